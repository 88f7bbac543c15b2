"""Harbor from a warm process: a run behaves as one of its own would, and nothing outlives whoever asked for it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.supervise import descendants

REPO = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process supervision is Linux's")

# Stands for Harbor's command line: what it does is told by its arguments.
APP = """
import os, pathlib, signal, subprocess, sys, time
def app():
    what, note = sys.argv[2:4]
    if what == "exit":
        print(os.getcwd(), os.environ.get("COLOUR"), sys.argv[0]); print("bad news", file=sys.stderr)
        sys.exit(int(note))
    if what == "raise":
        raise ValueError(note)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    def stop(*_):
        pathlib.Path(note + ".term").touch()
        sys.exit(143)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "deaf" else stop)
    tmp = pathlib.Path(note + ".tmp"); tmp.write_text(f"{os.getpid()} {child.pid}"); tmp.rename(note)
    if what == "leave":
        sys.exit(0)
    time.sleep(1000)
"""


def wait_for(what, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def warm(tmp_path):
    """(server, start): start(*arguments) is a caller of the warm server."""
    for module in ("harbor.cli.main", "litellm", "harbor.agents.terminus_2.terminus_2", "harbor.environments.docker.docker", "local_env"):
        file = tmp_path / "fake" / (module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in file.relative_to(tmp_path / "fake").parents:
            (tmp_path / "fake" / package / "__init__.py").touch()
        file.write_text(APP if module == "harbor.cli.main" else "")
    shutil.copytree(REPO / "stages", tmp_path / "fake/stages")
    file = tmp_path / "fake/stages/warm_harbor.py"
    file.write_text(file.read_text().replace("GRACE_S = 10.0", "GRACE_S = 1.0"))
    sock = tmp_path / ("a folder of a very long name, as in a deep checkout" * 3) / "h.sock"
    sock.parent.mkdir()
    env = {**os.environ, "HARBOR_SOCKET": str(sock), "COLOUR": "before"}
    command = [sys.executable, tmp_path / "fake/stages/warm_harbor.py"]
    supervised = [sys.executable, REPO / "stages/supervise.py", "--grace", "3", "--"]  # as in a batch
    server = subprocess.Popen([*supervised, *command, "serve", sock], env=env, stderr=subprocess.PIPE)
    started = [server]

    def start(*arguments, **more):
        p = subprocess.Popen([*command, "run", *map(str, arguments)], env={**env, "COLOUR": "blue"}, cwd=tmp_path, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)  # fmt: skip
        started.append(p)
        return p

    wait_for(lambda: sock.exists() or server.poll() is not None)
    assert server.poll() is None, server.stderr.read()
    yield server, start
    for p in started:
        p.terminate()
        p.communicate(timeout=20)


def pids(note):
    return [int(x) for x in wait_for(lambda: note.exists() and note.read_text().split())]


def test_a_run_has_the_callers_arguments_folder_environment_output_and_exit_code(warm, tmp_path):
    _, start = warm
    first, second = start("exit", 3), start("exit", 0)
    for p, code in ((first, 3), (second, 0)):
        out, err = p.communicate(timeout=20)
        assert (p.returncode, out, err) == (code, f"{tmp_path} blue harbor\n", "bad news\n")
    p = start("raise", "no such thing")
    assert "ValueError: no such thing" in p.communicate(timeout=20)[1] and p.returncode == 1


def test_what_a_run_leaves_is_ended_before_its_caller_hears(warm, tmp_path):
    p = warm[1]("leave", tmp_path / "note")
    assert p.wait(20) == 0
    assert all(gone(pid) for pid in pids(tmp_path / "note"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_its_caller(warm, tmp_path, how):
    server, start = warm
    p = start("wait", tmp_path / "note")
    run, child = pids(tmp_path / "note")
    p.send_signal(how)
    assert p.wait(20) == (143 if how == signal.SIGTERM else -9)
    wait_for(lambda: gone(run) and gone(child))
    assert (tmp_path / "note.term").exists()  # it was asked to end, and could clean up
    assert server.poll() is None and start("exit", 0).wait(20) == 0


def test_a_run_without_caller_that_does_not_end_is_killed(warm, tmp_path):
    p = warm[1]("deaf", tmp_path / "note")
    run, child = pids(tmp_path / "note")
    p.kill()
    wait_for(lambda: gone(run) and gone(child))


def test_runs_end_with_the_server(warm, tmp_path):
    server, start = warm
    p = start("wait", tmp_path / "note")
    run, child = pids(tmp_path / "note")
    os.kill(descendants(server.pid)[0], signal.SIGKILL)
    assert p.wait(20) == 137 and server.wait(20) == 137
    assert gone(run) and gone(child)


def test_without_a_server_harbor_itself_runs(tmp_path):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python").symlink_to(sys.executable)
    (bin_ / "harbor").write_text('#!/bin/sh\necho "$@"\nexit 5\n')
    (bin_ / "harbor").chmod(0o755)
    for sock in ({}, {"HARBOR_SOCKET": str(tmp_path / "nobody")}):
        command = [bin_ / "python", REPO / "stages/warm_harbor.py", "run", "-c", "job.json"]
        r = subprocess.run(command, env={**os.environ, **sock}, capture_output=True, text=True)
        assert (r.returncode, r.stdout) == (5, "run -c job.json\n"), r.stderr


def test_a_server_with_threads_refuses_to_fork(warm, tmp_path):
    (tmp_path / "fake/litellm.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    r = subprocess.run([sys.executable, tmp_path / "fake/stages/warm_harbor.py", "serve", tmp_path / "t.sock"], capture_output=True, text=True, timeout=20)
    assert r.returncode == 1 and "1 thread(s) run after the imports" in r.stderr and not (tmp_path / "t.sock").exists()
