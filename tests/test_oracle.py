"""The oracle check: why a task does not work, rows that survive interruption, several tasks at a time."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages import csvfiles, oracle

REPO = Path(__file__).resolve().parent.parent

def failed(kind, message="", **phases):
    return {"exception_info": {"exception_type": kind, "exception_message": message}, "verifier_result": None, **phases}


@pytest.mark.parametrize(
    ("result", "more", "reason", "detail"),
    [
        ({"verifier_result": {"rewards": {"reward": 1.0}}}, {}, "", ""),
        ({"verifier_result": {"rewards": {"reward": 0.0}}}, {}, "wrong", "earns 0"),
        ({"verifier_result": None}, {}, "verifier", "no reward"),
        (failed("RewardFileNotFoundError", "No reward file"), {}, "verifier", "No reward file"),
        (failed("VerifierTimeoutError", "after 600 s"), {}, "timeout", "verifier: after 600 s"),
        (failed("EnvironmentStartTimeoutError"), {}, "timeout", "build"),
        (failed("RuntimeError", "no Dockerfile"), {}, "build", "no Dockerfile"),
        (failed("RuntimeError", "x", agent_setup={}, agent_execution={"started_at": "2026-01-01T00:00:00Z"}), {}, "agent", "x"),
        (failed("RuntimeError", "no tmux", agent_setup={"started_at": "2026-01-01T00:00:00Z"}), {}, "setup", "no tmux"),
        # the last line of a build's output says what went wrong, its first line is the command
        (failed("RuntimeError", "Command: docker compose\nstep 1\nexit code: 100"), {"docker": {"phase": "build", "failed": True}}, "build", "exit code: 100"),
        (failed("RuntimeError", "manifest unknown"), {"docker": {"phase": "pull", "failed": True}}, "pull", "manifest unknown"),
        (failed("RuntimeError", "dependency failed to start"), {"docker": {"phase": "build", "failed": False}}, "setup", "dependency"),
        # without a network: in the pull, in the build, and in a verifier that installs packages
        (failed("RuntimeError", "a\ndial tcp: lookup docker.io: no such host"), {"docker": {"phase": "pull", "failed": True}}, "network", "pull: dial"),
        (failed("RuntimeError", "E: Temporary failure resolving 'deb.debian.org'"), {"docker": {"phase": "build", "failed": True}}, "network", "build: E:"),
        ({"verifier_result": {"rewards": {"reward": 0}}}, {"log": "ok\ncurl: (6) Could not resolve host: astral.sh\n"}, "network", "verifier: curl: (6)"),
        (failed("VerifierTimeoutError", "600 s"), {"log": "Err:1 Temporary failure resolving 'x'"}, "network", "verifier: Err:1"),
        (None, {"error": "ValueError: Error getting dataset terminal-bench@2.0"}, "network", "harbor: ValueError"),
        (None, {"error": "ValidationError: agent.timeout_sec"}, "harbor", "ValidationError"),
        # a task's own server that refuses connections is the task's affair
        ({"verifier_result": {"rewards": {"reward": 0}}}, {"log": "Connection refused by 127.0.0.1"}, "wrong", "earns 0"),
    ],
)  # fmt: skip
def test_why_a_task_does_not_work(result, more, reason, detail):
    got = oracle.judge(result, **more)
    assert got[0] == reason
    assert detail in got[1]


def test_a_row_replaces_an_earlier_one_and_the_list_names_what_works(tmp_path):
    times, ok = tmp_path / "d" / "times.csv", tmp_path / "d" / "ok.txt"
    times.parent.mkdir()
    times.write_text("task,ok,reason,environment\nold,1,,docker\nterminal-bench@2.0/x,0,build,docker\n")  # an earlier version's columns
    row = {"task": "terminal-bench@2.0/x", "ok": 1, "reason": "", "environment": "docker", "pull_s": 2.5}
    oracle.note(times, ok, row)
    with open(times) as f:
        rows = list(csv.DictReader(f))
    assert [(r["task"], r["ok"], r["pull_s"]) for r in rows] == [("old", "1", ""), ("terminal-bench@2.0/x", "1", "2.5")]
    assert ok.read_text().splitlines()[1:] == ["old", "terminal-bench@2.0/x"]  # as 06_run_batch.sh can run them


def write_task(folder, solution, dockerfile="FROM debian:bookworm-slim\nWORKDIR /app\n"):
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n[environment]\nbuild_timeout_sec = 60.0\n',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": dockerfile,
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": "#!/bin/bash\n[ -e /app/done ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def command(tmp_path, *more):
    return [sys.executable, "stages/oracle.py", "--list", tmp_path / "list.txt", "--environment", "local_env", "--folder", tmp_path / "oracle",
            "--times", tmp_path / "times.csv", "--ok", tmp_path / "ok.txt", *more]  # fmt: skip


@pytest.mark.integration
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="the tasks' namespaces need root here")
def test_one_broken_task_ends_no_other_and_an_interrupted_check_goes_on(tmp_path):
    write_task(tmp_path / "good", "touch /app/done")
    write_task(tmp_path / "wrong", "true")
    write_task(tmp_path / "slow", f"touch {tmp_path}/started; sleep 300")
    write_task(tmp_path / "invalid", "true")
    (tmp_path / "invalid" / "task.toml").write_text("[agent\n")
    names = ["good", "wrong", "invalid", "absent", "slow"]
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{n}\n" for n in names))
    env = {**os.environ, "HARBOR_TELEMETRY": "0", "LITELLM_OFFLINE_MODE": "true"}
    p = subprocess.Popen(command(tmp_path, "--jobs", "2"), cwd=REPO, env=env, stdout=subprocess.PIPE, text=True)
    rows, end = [], time.monotonic() + 120
    while len(rows) < 4 and p.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        rows = csvfiles.read(tmp_path / "times.csv")
    p.send_signal(signal.SIGTERM)
    out, _ = p.communicate(timeout=60)
    assert p.returncode == 130, out
    got = {Path(r["task"]).name: r["reason"] for r in rows}
    assert got == {"good": "", "wrong": "wrong", "invalid": "harbor", "absent": "harbor"}
    assert (tmp_path / "ok.txt").read_text().splitlines()[1:] == [f"{tmp_path}/good"]

    write_task(tmp_path / "slow", "touch /app/done")
    r = subprocess.run(command(tmp_path), cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    assert "4 of 5 have a row" in r.stdout and "slow: ok" in r.stdout
