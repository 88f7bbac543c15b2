"""Changes one file after the other in /tmp/site and looks at what make does. File times are set, so nothing here waits."""

import os
import pathlib
import subprocess
import time

site = pathlib.Path("/tmp/site")
clock = [time.time() - 100000]


def made():
    return {p: p.stat().st_mtime_ns for p in (*site.glob("build/*"), *site.glob("out/*"))}


def age():
    """Everything is old, in the order in which it was made: what make then writes is newer than anything."""
    files = sorted((p for p in site.rglob("*") if p.is_file()), key=lambda p: (p.parent.name in ("build", "out"), p.stat().st_mtime_ns))
    for path in files:
        clock[0] += 1
        os.utime(path, (clock[0], clock[0]))


def make(*args, ok=True, env=None):
    p = subprocess.run(["make", *args], cwd=site, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})
    assert (p.returncode == 0) == ok, f"make {args}: exit {p.returncode}\n{p.stdout}{p.stderr}"
    return p.stdout


def changed(path, text=None):
    """The names of what make makes anew after a change of path."""
    age()
    before = made()
    path = site / path
    path.write_text(text if text is not None else path.read_text() + "\n")
    make()
    after = made()
    return {p.name for p in after if before.get(p) != after[p]} | {p.name for p in before if p not in after}


def html():
    return {p.name: p.read_text() for p in site.glob("out/*.html")}


make("clean")
assert not (site / "build").exists() and not (site / "out").exists(), "clean leaves something"
make()
pages = {"about.html", "snow.html", "tea.html", "wood.html"}
assert set(html()) == {*pages, "index.html"}
before = made()
make()
assert made() == before, "make after make makes something"
every = pages | {"index.html", "render"}
EXPECTED = {
    "settings.conf": every | {"config.h", "render.o"},
    "tools/config.sh": every | {"config.h", "render.o"},
    "src/render.c": every | {"render.o"},
    "src/escape.c": every | {"escape.o"},
    "src/escape.h": every | {"escape.o", "render.o"},
    "lib/text.h": every | {"text.o", "libtext.a", "render.o"},
    "lib/text.c": every | {"text.o", "libtext.a"},
    "pages/header.inc": pages | {"index.html"},
    "pages/tea.txt": {"tea.html", "index.html"},
    "tools/index.sh": {"index.html"},
}
OWN = {"config.h", "render.o", "escape.o", "text.o", "libtext.a", "render", "index.html"} | pages
for name, expected in EXPECTED.items():
    found = changed(name) & OWN
    assert found == expected, f"after a change of {name}: made {sorted(found)}, expected {sorted(expected)}"
assert changed("pages/new.txt", "title: New\nx\n") >= {"new.html", "index.html"}
assert "new.html" in html()["index.html"]
age()
(site / "pages/snow.txt").unlink()
make()
assert set(html()) == {"about.html", "new.html", "tea.html", "wood.html", "index.html"} and "snow" not in html()["index.html"]
age()
good = (site / "pages/wood.txt").read_text()
(site / "pages/wood.txt").write_text("no title\n")
make(ok=False)
make(ok=False)
assert not (site / "out/wood.html").exists() or "no title" not in html()["wood.html"] and "</main>" in html()["wood.html"]
(site / "pages/wood.txt").write_text(good)
make()
result = html()
make("clean")
(site / "slow").mkdir()
for tool in ("cc", "gcc", "ar", "sh"):
    real = subprocess.run(["sh", "-c", f"command -v {tool}"], capture_output=True, text=True).stdout.strip()
    (site / "slow" / tool).write_text(f'#!{"/bin/bash" if tool == "sh" else "/bin/sh"}\nsleep 0.0$(($$ % 10))\nexec {real} "$@"\n')
    (site / "slow" / tool).chmod(0o755)
for n in range(4):
    make("-j8", env={"PATH": f"{site}/slow:{os.environ['PATH']}"})
    assert html() == result, f"make -j8 gives something else (time {n + 1})"
    make("clean")
print("the Makefile is right")
