"""local_env.py: Dockerfiles read, files copied, namespaces built, hidden and cleaned up."""

import asyncio
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import local_env as L

REPO = Path(__file__).resolve().parent.parent


def namespaces():
    try:
        L.detect_mode()
        return True
    except L.LocalEnvError:
        return False


needs_namespaces = pytest.mark.skipif(not namespaces(), reason="no namespaces here: local_env.py cannot run")


def dockerfile(tmp_path, text):
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------------------------------- Dockerfiles


def test_dockerfile_of_a_task(tmp_path):
    image = L.read_dockerfile(
        dockerfile(
            tmp_path,
            "FROM debian:bookworm-slim\n"
            "# a comment\n"
            "RUN apt-get update && apt-get install -y --no-install-recommends \\\n"
            "    tmux git=1:2.39 \\\n"
            "    # a comment between continued lines\n"
            "    sqlite3 && rm -rf /var/lib/apt/lists/*\n"
            "ENV A=1 B='two words' C=${A}x\n"
            "ARG D=${MISSING:-default}\n"
            "WORKDIR /app\nWORKDIR sub\n"
            "COPY --chmod=755 a.sh b.sh bin/\n"
            'COPY ["with space.txt", "/x/"]\n'
            "RUN make $D\n"
            "USER nobody\n"
            'CMD ["bash"]\n',
        )
    )
    assert image["packages"] == ["tmux", "git", "sqlite3"]
    assert image["workdir"] == "/app/sub" and image["user"] == "nobody"
    assert image["env"] == {"A": "1", "B": "two words", "C": "x"}
    assert image["steps"] == [
        ("mkdir", "/app"),
        ("mkdir", "/app/sub"),
        ("copy", ["a.sh", "b.sh"], "bin/", "/app/sub", {"chmod": "755"}),
        ("copy", ["with space.txt"], "/x/", "/app/sub", {}),
        ("run", "make $D", "/app/sub", None, {"D": "default", "A": "1", "B": "two words", "C": "x"}),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("FROM a AS b\nFROM c", "second build stage"),
        ("COPY --from=b /x /y", "COPY --from"),
        ("ADD https://example.org/x /x", "ADD of an address"),
        ("ADD x.tar.gz /x", "ADD of an address or an archive"),
        ("RUN --mount=type=cache,target=/x true", "RUN with options"),
        ("RUN <<EOF\ntrue\nEOF", "here-document"),
        ("FETCH x", "FETCH: not a Dockerfile instruction"),
    ],
)
def test_what_needs_an_image_is_refused_with_file_line_and_way_out(tmp_path, line, said):
    with pytest.raises(L.LocalEnvError) as e:
        L.read_dockerfile(dockerfile(tmp_path, "FROM debian\n" * (not line.startswith("FROM")) + line))
    assert said in str(e.value) and "Dockerfile:2" in str(e.value) and "-e docker" in str(e.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN if true; then apt-get install x; fi", "RUN: found apt-get in 'if true; then apt-get install x; fi'"),
        ("RUN make && ( apt-get install x )", "RUN: found apt-get in '( apt-get install x )'"),
        ("RUN apt-get install python$V", "found 'python$V', expected the name of a package"),
        ("RUN apt-get install 'x", "found no end of a quote"),
        ("RUN [1, 2]", "RUN: found [1, 2], expected strings only"),
        ('ENV A="x', "ENV: No closing quotation"),
        ("SHELL /bin/bash -c", 'SHELL: found /bin/bash -c, expected a JSON array'),
        ("COPY it's /x", "COPY: No closing quotation"),
        ('COPY ["a" "b"]', 'COPY: found ["a" "b"], expected a JSON array'),
        ("COPY --chmod=u+x a /x", "--chmod: found 'u+x', expected an octal number"),
        (b"ENV A=\xe9", "found the byte 0xe9, expected text in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_with_file_and_line(tmp_path, line, said):
    path = dockerfile(tmp_path, "")
    path.write_bytes(b"FROM debian\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(L.LocalEnvError) as e:
        L.read_dockerfile(path)
    assert str(e.value).startswith(f"{path}:2: ") and said in str(e.value) and "mend" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("RUN [ -e /x ] || touch /x", "[ -e /x ] || touch /x"),
        ("RUN [[ a = a ]] && x", "[[ a = a ]] && x"),
        ('RUN ["echo", "a b"]', "echo 'a b'"),
        ('SHELL ["/bin/bash", "-c"]\nRUN [[ a = a ]] && x', "/bin/bash -c '[[ a = a ]] && x'"),
        ("RUN\tmake \\", "make"),
        ("RUN make \\\n# the end", "make"),
        ("RUN ma\\\n\n\\\nke a", "make a"),
    ],
)
def test_run_lines_are_the_shells_as_in_docker(tmp_path, line, command):
    assert L.read_dockerfile(dockerfile(tmp_path, f"FROM debian\n{line}"))["steps"] == [("run", command, "/", None, {})]


def test_apt_lines_are_checked_and_the_rest_of_the_line_runs():
    line = "DEBIAN_FRONTEND=noninteractive apt-get install -y gcc && useradd -m bob && rm -rf /var/lib/apt/lists/*"
    assert L.split_apt(line) == (["gcc"], "useradd -m bob")
    assert L.split_apt("make install") == ([], "make install")


@pytest.mark.parametrize(
    ("line", "packages", "rest"),
    [
        ("apt-get install -y git || true", ["git"], ": || true"),
        ("apt-get update >/dev/null 2>&1 && apt-get install -qq git=1 >/dev/null 2>&1 # a comment; make", ["git"], ""),
        ("apt-get -o A=b install -y -t stable -o Dpkg::Options::=--x 'git' libc6:amd64", ["git", "libc6"], ""),
        ('apt-get install -y git && echo "a; b && c"; false; true', ["git"], 'echo "a; b && c"; false; true'),
        ("make; apt-get update && false; true", [], "make; false; true"),
        ("apt-get update && (cd /a && make) && if [ -e /b ]; then rm /b; fi", [], "(cd /a && make) && if [ -e /b ]; then rm /b; fi"),
        ("apt-get install -y curl && curl x | sh && V=$(cat /v; date)", ["curl"], ": && curl x | sh && V=$(cat /v; date)"),
        ("apt-get install -y git; rm -rf /var/lib/apt/lists/* /tmp/x", ["git"], "rm -rf /tmp/x"),
        ("echo 'apt-get install git'", [], "echo 'apt-get install git'"),
        ("for f in a b; do echo $f; done; apt-get clean", [], "for f in a b; do echo $f; done"),
    ],
)
def test_apt_is_taken_out_of_a_line_that_else_stays_as_it_was(line, packages, rest):
    assert L.split_apt(line) == (packages, rest)
    assert subprocess.run(["sh", "-nc", rest], capture_output=True).returncode == 0


def test_missing_packages_are_named_with_the_command(tmp_path):
    assert L.missing_packages(["bash", "coreutils", "no-such-package-1"]) == ["no-such-package-1"]
    with pytest.raises(L.LocalEnvError, match="apt-get install -y no-such-package-1"):
        L.check_packages(["bash", "no-such-package-1", "asciinema"], tmp_path)


def test_a_task_asks_only_for_the_packages_that_it_uses(tmp_path):
    (tmp_path / "task.toml").write_text('[metadata]\npackages = ["bash"]\n')
    L.check_packages(["bash", "tmux", "no-such-package-1"], tmp_path)
    (tmp_path / "task.toml").write_text('[metadata]\npackages = ["no-such-package-1"]\n')
    with pytest.raises(L.LocalEnvError, match="lacks no-such-package-1"):
        L.check_packages(["bash", "no-such-package-1", "no-such-package-2"], tmp_path)


def test_expand_as_docker_does():
    assert L.expand("$A/${B}/${C:-c}/${A:-x}/$NONE", {"A": "1", "B": "2"}) == "1/2/c/1/"


def test_compose_file_is_accepted_only_when_it_closes_the_network(tmp_path):
    dockerfile(tmp_path, "FROM debian\n")
    compose = tmp_path / "docker-compose.yaml"
    for closed in ("# closed\nservices:\n  main:\n    network_mode: none\n", "services: {main: {init: true, network_mode: none}}"):
        compose.write_text(closed)
        assert L.read_environment(tmp_path)["steps"] == []
    wanted = ("services:\n  main: {}\n  db:\n    image: postgres\n", "services: {main: {network_mode: host}}")
    for other in (*wanted, "services: [", "services: {main: [1]}", "x: 1", ""):
        compose.write_text(other)
        with pytest.raises(L.LocalEnvError, match="docker-compose.yaml"):
            L.read_environment(tmp_path)


def test_copy_follows_dockers_rules(tmp_path):
    (tmp_path / "d/inner").mkdir(parents=True)
    (tmp_path / "d/one").write_text("1")
    (tmp_path / "f.txt").write_text("f")
    (tmp_path / "g.txt").write_text("g")
    f, d = str(tmp_path / "f.txt"), tmp_path / "d"
    assert L.copy_entries(tmp_path, ["f.txt"], "/x/y", "/app") == ([(f, "y")], "/x")
    assert L.copy_entries(tmp_path, ["f.txt"], "/x/", "/app") == ([(f, "f.txt")], "/x")
    assert L.copy_entries(tmp_path, ["f.txt"], ".", "/app") == ([(f, "f.txt")], "/app")
    assert L.copy_entries(tmp_path, ["*.txt"], "sub/", "/app")[1] == "/app/sub"
    assert L.copy_entries(tmp_path, ["d"], "/x", "/app") == ([(str(d / "inner"), "inner"), (str(d / "one"), "one")], "/x")
    with pytest.raises(L.LocalEnvError, match="no such file"):
        L.copy_entries(tmp_path, ["missing"], "/x", "/app")
    (tmp_path / "context").mkdir()
    with pytest.raises(L.LocalEnvError, match="outside"):
        L.copy_entries(tmp_path / "context", ["../f.txt"], "/x", "/app")


def test_unpack_leaves_out_what_points_outside(tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind, target in [("ok", tarfile.REGTYPE, ""), ("abs", tarfile.SYMTYPE, "/etc/passwd"), ("dev", tarfile.CHRTYPE, "")]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    archive.seek(0)
    assert L.unpack(archive, tmp_path / "out") == ["abs"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["ok"]


# ---------------------------------------------------------------------------------------------------- limits, hiding, sweeping


def test_private_paths_below_shown_directories_are_masked():
    shown = ["/usr", "/opt"]
    private = ["/root", "/opt/lab/trajoule", "/opt/lab/trajoule/tasks", "/usr/local/src/x", "/usr"]
    assert L.hidden_paths(private, shown) == ["/opt/lab/trajoule", "/usr/local/src/x"]


def test_disks_below_shown_directories_get_an_overlay(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "22 21 8:2 / /usr/local\\040x rw shared:1 - ext4 /dev/sda2 rw\n"
        "23 21 0:5 / /usr/lib/proc rw - proc proc rw\n"
        "24 21 8:3 / /home rw - ext4 /dev/sda3 rw\n"
    )
    assert L.mounts_below(["/usr"], table) == ["/usr/local x"]


def test_cgroup_v2_is_made_below_the_nearest_ancestor_that_allows_it(tmp_path):
    # a tree of plain files, as the kernel shows it: the own cgroup holds processes, so its controllers cannot be given on
    own = tmp_path / "user.slice/session.scope"
    own.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids")
    cgroup_file = tmp_path / "self"
    cgroup_file.write_text("0::/user.slice/session.scope\n")
    group = L.make_cgroup(1.5, 512, L.owned_name(), tmp_path, cgroup_file)
    assert group.parent == own.parent
    assert (group / "memory.max").read_text() == str(512 << 20)
    assert (group / "cpu.max").read_text() == "150000 100000"
    (tmp_path / "cgroup.controllers").write_text("hugetlb")
    assert L.make_cgroup(1, 512, L.owned_name(), tmp_path, cgroup_file) is None


def test_soft_limits_say_what_they_are(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    lines, said = L.soft_limits(2, 100)
    assert lines[0].startswith("taskset -pc ") and lines[1] == "ulimit -d 102400"
    assert "2 CPU(s) by affinity" in said and "100 MB" in said
    assert L.soft_limits(None, None) == ([], "")


def test_sweep_takes_what_dead_runners_left_and_nothing_else(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f"{L.NAME}-{dead.pid}-12345-abcdef01"
    reused = tmp_path / f"{L.NAME}-{os.getpid()}-1-abcdef02"  # our pid, another start time: its owner is gone
    mine, other = tmp_path / L.owned_name(), tmp_path / "trajoule-env-notes"
    for d in (left, reused, mine, other):
        (d / "up").mkdir(parents=True)
    assert sorted(L.sweep(tmp_path)) == sorted([left.name, reused.name])
    assert mine.exists() and other.exists() and not left.exists()


def test_refusals_name_the_way_out(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(L, "sysctl", lambda path: "1" if "apparmor" in path else None)
    said = L.refusal("unshare: write failed /proc/self/uid_map: Operation not permitted")
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in said and "-e docker" in said and "\n" not in said
    monkeypatch.setattr(L, "sysctl", lambda path: "0" if path.startswith("user/") else None)
    assert "user.max_user_namespaces" in L.refusal("unshare failed")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "CAP_SYS_ADMIN" in L.refusal("unshare failed")


def test_refused_unshare_is_one_clear_line(tmp_path, monkeypatch):
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2; exit 1\n")
    fake.chmod(0o755)
    p = subprocess.run(
        [sys.executable, REPO / "local_env.py", "--check"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True
    )
    assert p.returncode == 1
    assert p.stderr.count("\n") == 1 and "Operation not permitted" in p.stderr and "Docker" in p.stderr


# ---------------------------------------------------------------------------------------------------- the namespace itself


@pytest.fixture
def inside(request, tmp_path):
    """A function that runs a shell line in a fresh environment."""
    ns = L.Namespace(name="test me", size_mb=64, **getattr(request, "param", {})).start()

    def run(line, **kw):
        return asyncio.run(ns.run(line, **kw))

    run.ns = ns
    yield run
    ns.stop()


@needs_namespaces
def test_only_the_machines_programs_are_there(inside, tmp_path):
    assert inside("ls -A /home /opt /srv /tmp /run/user 2>/dev/null | grep -v :")[1].split() == []
    assert inside(f"ls {REPO} {tmp_path} {Path.home()}/.ssh 2>/dev/null")[1] == ""
    assert inside("ls -A /root")[1].split() == [".bashrc", ".profile"]
    assert inside("git --version && python3 -c 'print(1)' && hostname")[1].splitlines()[1:] == ["1", "test-me"]
    assert "$" not in inside("cat /etc/shadow")[1]
    assert inside("find /etc -type f ! -perm -004 ! -name shadow")[1] == ""
    assert inside("env | cut -d= -f1 | sort")[1].split() == ["HOME", "LANG", "OLDPWD", "PATH", "PWD", "SHLVL", "_"]


@needs_namespaces
def test_no_network_and_no_foreign_processes(inside):
    assert inside("cat /proc/net/dev | sed 1,2d | cut -d: -f1")[1].split() == ["lo"]
    assert inside("ls -d /proc/[0-9]* | wc -l")[1].strip() in ("4", "5", "6")
    rc, out, _ = inside(
        "python3 -c 'import socket as s; a = s.create_server((\"127.0.0.1\", 0)); s.create_connection(a.getsockname()); print(1)'"
    )
    assert (rc, out) == (0, "1\n"), "the loopback must work"


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="the machine's programs can be replaced inside only by root")
def test_replaced_programs_get_no_privileges(inside):
    spy = "#!/bin/bash\ngrep CapEff /proc/self/status >/tmp/caps\n"
    for program in ("env", "setpriv", "nsenter", "dash"):
        inside(f"cp /bin/sh /tmp/sh; rm /usr/bin/{program}; printf %s {shlex.quote(spy)} >/usr/bin/{program}; chmod 755 /usr/bin/{program}")
    inside("true")
    assert int(inside("true")[0]) == 0
    caps = Path(f"/proc/{inside.ns.pid}/root/tmp/caps").read_text().split()[1]
    assert int(caps, 16) == sum(1 << n for n in L.KEPT.values())


@needs_namespaces
def test_the_machine_cannot_be_reached_by_mounts_devices_or_kernel_settings(inside):
    for line in [
        "mount -t tmpfs x /mnt",
        "mknod /dev/disk b 8 0",
        "echo x >/proc/sys/kernel/core_pattern",
        "echo b >/proc/sysrq-trigger",
        "umount /proc",
    ]:
        assert inside(line)[0] != 0, line


@needs_namespaces
def test_changes_stay_inside_and_have_a_limit(inside):
    if os.geteuid() == 0:
        assert inside("echo x >/usr/bin/trajoule-test && rm /usr/bin/env && rm -r /usr/share/doc && mkdir /usr/share/doc")[0] == 0
    assert inside("echo x >/usr/local/bin/trajoule-test && echo x >/etc/trajoule-test")[0] == 0
    assert not Path("/usr/local/bin/trajoule-test").exists() and Path("/usr/bin/env").exists()
    rc, _, err = inside("dd if=/dev/zero of=/tmp/big bs=1M count=100")
    assert rc == 1 and "No space left" in err


@needs_namespaces
@pytest.mark.parametrize("inside", [{"memory_mb": 300}], indirect=True)
def test_memory_has_a_limit(inside):
    assert inside("python3 -c 'x = bytearray(1 << 20)'")[0] == 0
    assert inside("python3 -c 'x = bytearray(600 << 20)'")[0] != 0


@needs_namespaces
def test_exec_semantics(inside):
    assert inside("exit 7")[0] == 7
    assert inside("kill -9 $$")[0] == 137
    assert inside("pwd", cwd="/usr")[1] == "/usr\n"
    assert inside("true", cwd="/not/there")[0] == 126
    assert inside("echo $A-$HOME", env={"A": "x y"})[1] == "x y-/root\n"
    assert inside("cat; echo end")[1] == "end\n", "stdin is empty"
    assert inside("echo " + "x" * 200_000)[1] == "x" * 200_000 + "\n", "longer than one argument may be"
    assert inside("printf '\\377'")[1] == "\ufffd"


@needs_namespaces
def test_background_children_do_not_block_and_survive(inside):
    t = time.monotonic()
    assert inside("sleep 30 & echo started")[1] == "started\n"
    assert time.monotonic() - t < 29
    assert inside("pgrep -x sleep -f 'sleep 30' >/dev/null || ps ax | grep -q '[s]leep 30'")[0] == 0
    with pytest.raises(TimeoutError, match="timed out after 1 seconds"):
        inside("echo x; sleep 60", timeout_s=1)
    reaped = (
        "(true &); for i in $(seq 50); do sleep 0.1; ps ax -o stat | grep -q ^Z || exit 0; done; exit 1"  # at once, on a machine at rest
    )
    assert inside(reaped)[0] == 0, "pid 1 reaps orphans"


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")
def test_users(inside):
    assert inside("id -un; id -gn; echo $HOME", user="nobody")[1].split() == ["nobody", "nogroup", "/nonexistent"]
    assert inside("id -u; id -g", user=4321)[1].split() == ["4321", "0"]
    rc, _, err = inside("true", user="nosuchuser")
    assert rc == 126 and "not known" in err


@needs_namespaces
def test_tmux_and_asciinema_record_with_prompt_marks(inside):
    if inside("command -v tmux asciinema")[0]:
        pytest.skip("tmux or asciinema is not installed")

    def recorded(after=None):
        """Times of the keys and, behind them, of the prompt's return; waits for the prompt."""
        end = time.monotonic() + 60
        while True:
            lines = inside("cat /tmp/r.cast 2>/dev/null")[1].split("\n")[1:-1]
            events = [json.loads(line) for line in lines]
            keys = [t for t, kind, data in events if kind == "i" and (after is None or after in data)]
            marks = [t for t, kind, data in events if kind == "o" and "\x1b[?2004h" in data and (after is None or keys and t > keys[0])]
            if marks:
                return keys, marks
            assert time.monotonic() < end, lines
            time.sleep(0.1)

    inside("tmux new -d -s x -x 160 -y 40 'bash --login'; tmux send-keys -t x 'asciinema rec --stdin /tmp/r.cast' Enter")
    recorded()
    inside("tmux send-keys -t x -- $'sleep 0.2; echo hi\\n'")
    keys, marks = recorded("s")
    assert 0.2 <= marks[0] - keys[0] < 30


@needs_namespaces
def test_files_in_and_out(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.sh").write_text("#!/bin/sh\necho hi\n")
    (tmp_path / "in/a.sh").chmod(0o755)
    (tmp_path / "in/link").symlink_to("a.sh")
    image = L.read_dockerfile(dockerfile(tmp_path / "in", "FROM x\nWORKDIR /app\nCOPY a.sh link /app/\nRUN ./a.sh >made\n"))
    ns = L.Namespace(size_mb=64, private=[tmp_path], binds=[(tmp_path, "/logs/agent", False)]).start()
    try:

        async def steps():
            await ns.build(image, tmp_path / "in")
            await ns.run("ln -s /etc/passwd /app/escape; touch /logs/agent/seen")
            return await ns.get("/app", ".", tmp_path / "out")

        left_out = asyncio.run(steps())
    finally:
        ns.stop()
    assert left_out == ["./escape"]
    assert (tmp_path / "out/made").read_text() == "hi\n" and os.access(tmp_path / "out/a.sh", os.X_OK)
    assert (tmp_path / "seen").exists()


@needs_namespaces
def test_a_failing_run_line_says_which(tmp_path):
    image = L.read_dockerfile(dockerfile(tmp_path, "FROM x\nRUN echo oops >&2; exit 3\n"))
    ns = L.Namespace(size_mb=64).start()
    try:
        with pytest.raises(L.LocalEnvError, match="RUN echo oops.*ended with 3: oops"):
            asyncio.run(ns.build(image, tmp_path))
    finally:
        ns.stop()


@needs_namespaces
def test_changes_can_go_to_a_disk_and_are_removed(tmp_path):
    try:
        ns = L.Namespace(upper_dir=tmp_path).start()
    except L.LocalEnvError as e:
        pytest.skip(f"overlayfs does not take {tmp_path} here: {e}")
    asyncio.run(ns.run("echo x >/app.txt; echo y >/usr/local/bin/y"))
    assert len(list(tmp_path.iterdir())) == 1
    ns.stop()
    assert list(tmp_path.iterdir()) == []


def descendants(text):
    """Pids of processes whose command line holds `text`."""
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if text in (p / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") and int(p.name) != os.getpid():
                found.append(int(p.name))
        except OSError:
            pass
    return found


@needs_namespaces
@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.004, 0.008, 0.015, 0.02, 0.03, 0.1, 1.0])
def test_kill_9_of_the_owner_leaves_nothing(tmp_path, delay_s):
    mark = f"sleep 98{os.getpid() % 1000:03d}.{int(delay_s * 1000)}"
    code = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "import asyncio, local_env as L\n"
        "print('go', flush=True)\n"
        f"ns = L.Namespace(size_mb=64, upper_dir={str(tmp_path)!r}).start()\n"
        f"asyncio.run(ns.run('setsid {mark} & {mark}'))\n"
    )
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    owner.stdout.readline()
    time.sleep(delay_s)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30

    def busy():  # the supervisor's command line names the directory
        return [*descendants(mark), *descendants(str(tmp_path)), *tmp_path.iterdir()]

    while busy() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert busy() == []
    assert len(Path("/proc/self/mountinfo").read_text().splitlines()) == mounts


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@needs_namespaces
def test_a_killed_supervisor_takes_the_namespace_along():
    ns = L.Namespace(size_mb=64).start()
    ns._supervisor.kill()
    ns._supervisor.wait()
    deadline = time.monotonic() + 30
    while running(ns.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(ns.pid)
    with pytest.raises(L.LocalEnvError, match="not running"):
        ns.argv(["true"])
    ns.stop()
    ns.stop()


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming an unprivileged user needs root")
def test_an_unprivileged_user_gets_a_user_namespace(tmp_path):
    script = tmp_path / "local_env.py"
    script.write_text((REPO / "local_env.py").read_text())
    for p in [script, *script.parents[:-2]]:
        p.chmod(p.stat().st_mode | 0o055)
    become = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "env",
        "-i",
        f"PATH={L.INSIDE_PATH}",
        "HOME=/nonexistent",
    ]
    if subprocess.run([*become, "unshare", "--user", "true"]).returncode:
        pytest.skip("unprivileged user namespaces are refused here")
    p = subprocess.run([*become, "python3", script, "--check"], capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    assert "namespaces of user" in p.stdout and "unprivileged" in p.stdout


# ---------------------------------------------------------------------------------------------------- Harbor


def harbor(*args, timeout=300, **env):
    exe = Path(sys.executable).parent / "harbor"
    if not exe.exists():
        pytest.skip("Harbor is not installed in this environment")
    env = {**os.environ, "HARBOR_TELEMETRY": "0", "LITELLM_OFFLINE_MODE": "true", "PYTHONPATH": str(REPO), **env}
    return subprocess.run([exe, "run", *map(str, args), "-y", "--quiet"], env=env, capture_output=True, text=True, timeout=timeout)


def one_result(jobs):
    found = list(Path(jobs).glob("*/*__*/result.json"))
    assert len(found) == 1, found
    return json.loads(found[0].read_text())


def make_task(root, environment="", dockerfile="FROM debian:bookworm-slim\nWORKDIR /app\n", solve="", test=""):
    task = root / "a-task"
    for d in ("environment", "solution", "tests"):
        (task / d).mkdir(parents=True)
    (task / "task.toml").write_text(f'schema_version = "1.4"\n[agent]\ntimeout_sec = 60.0\n[environment]\n{environment}\n')
    (task / "instruction.md").write_text("Do it.\n")
    (task / "environment/Dockerfile").write_text(dockerfile)
    (task / "solution/solve.sh").write_text("#!/bin/bash\n" + solve)
    (task / "tests/test.sh").write_text("#!/bin/bash\n" + test)
    return task


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
def test_a_task_sees_neither_solution_nor_runner_and_no_network_unless_it_asks(tmp_path):
    solve = f"ls -d {REPO} {tmp_path} /tests {Path.home()}/.cache 2>/dev/null >/app/seen\ncat /proc/net/dev | sed 1,2d | cut -d: -f1 | xargs >/app/net\n"
    test = 'if [ ! -s /app/seen ] && [ "$(cat /app/net)" = lo ]; then echo 1; else echo 0; cat /app/seen /app/net >&2; fi >/logs/verifier/reward.txt\n'
    task = make_task(tmp_path, solve=solve, test=test)
    p = harbor("-p", task, "-a", "oracle", "-e", "local_env:LocalEnvironment", "-o", tmp_path / "jobs")
    r = one_result(tmp_path / "jobs")
    assert r["exception_info"] is None, r["exception_info"]
    assert r["verifier_result"]["rewards"]["reward"] == 1, p.stdout
    open_task = make_task(
        tmp_path / "open", 'network_mode = "public"', solve=solve, test=test.replace('"$(cat /app/net)" = lo', "-s /app/net")
    )
    p = harbor("-p", open_task, "-a", "oracle", "-e", "local_env:LocalEnvironment", "-o", tmp_path / "jobs2")
    assert one_result(tmp_path / "jobs2")["verifier_result"]["rewards"]["reward"] == 1
    assert "asked for the network" in p.stderr + p.stdout


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
def test_a_task_whose_programs_are_missing_fails_with_the_command(tmp_path):
    task = make_task(tmp_path, dockerfile="FROM debian\nRUN apt-get install -y no-such-package-1\n")
    harbor("-p", task, "-a", "oracle", "-e", "local_env:LocalEnvironment", "-o", tmp_path / "jobs")
    r = one_result(tmp_path / "jobs")
    assert "apt-get install -y no-such-package-1" in r["exception_info"]["exception_message"]


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
def test_kill_9_of_harbor_leaves_nothing(tmp_path):
    mark = f"sleep 97{os.getpid() % 1000:03d}"
    task = make_task(tmp_path, solve=f"touch /logs/agent/started\n{mark} & setsid {mark}\n")
    exe = Path(sys.executable).parent / "harbor"
    if not exe.exists():
        pytest.skip("Harbor is not installed in this environment")
    env = {**os.environ, "HARBOR_TELEMETRY": "0", "LITELLM_OFFLINE_MODE": "true", "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}
    before = set(tmp_path.iterdir())
    argv = [exe, "run", "-p", task, "-a", "oracle", "-e", "local_env:LocalEnvironment", "-o", tmp_path / "jobs", "-y", "--quiet"]
    p = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("jobs/*/*__*/agent/started")):
        assert p.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    while len(descendants(mark)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    p.kill()
    p.wait()
    deadline = time.monotonic() + 30
    while (descendants(mark) or len(set(tmp_path.iterdir()) - before) > 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descendants(mark) == []
    assert {q.name for q in set(tmp_path.iterdir()) - before} == {"jobs"}
