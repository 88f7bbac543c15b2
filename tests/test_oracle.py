"""The oracle check: why a task does not work, rows that survive interruption, several tasks at a time."""

import argparse
import asyncio
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


def row(task, ok, environment="local_env", **more):
    return {"task": task, "ok": ok, "reason": "" if ok else "build", "environment": environment, **more}


def test_a_row_replaces_an_earlier_one_of_its_environment(tmp_path):
    times = tmp_path / "d" / "times.csv"
    times.parent.mkdir()
    times.write_text("task,ok,reason,environment\nold,1,,docker\nterminal-bench@2.0/x,0,build,docker\n")  # an earlier version's columns
    oracle.note(times, row("terminal-bench@2.0/x", 1, "docker", pull_s=2.5))
    oracle.note(times, row("old", 0))
    with open(times) as f:
        rows = list(csv.DictReader(f))
    assert [(r["task"], r["ok"], r["pull_s"], r["environment"]) for r in rows] == [
        ("old", "1", "", "docker"), ("terminal-bench@2.0/x", "1", "2.5", "docker"), ("old", "0", "", "local_env")]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "before", "works"),
    [
        ([row("a", 1), row("b", 0)], None, ["a"]),  # the list is gone
        ([row("a", 1), row("b", 1)], "# head\na\n", ["a", "b"]),  # it lacks one: killed between two writes
        ([row("a", 1), row("b", 1, "docker"), row("b", 0)], "# head\nb\n", ["a"]),  # another environment's
        ([row("a", 0), row("b", 0), row("elsewhere", 1)], "# head\nelsewhere\n", []),  # another list's
    ],
)
def test_the_list_of_what_works_is_made_from_the_rows(tmp_path, monkeypatch, capsys, rows, before, works):
    """Of this list and this environment, also when nothing is left to run."""
    for r in rows:
        oracle.note(tmp_path / "times.csv", r)
    if before:
        (tmp_path / "ok.txt").write_text(before)
    for name in ("a", "b"):
        write_task(tmp_path / name, "true")
    (tmp_path / "list.txt").write_text("a\nb\n")
    monkeypatch.setattr(sys, "argv", [str(x) for x in command(tmp_path, "--tasks-dir", tmp_path)[1:]])
    oracle.main()
    assert "2 of 2 have a row" in capsys.readouterr().out
    assert (tmp_path / "ok.txt").read_text().splitlines()[1:] == works


def test_a_list_in_which_nothing_works_is_no_success_whatever_works_elsewhere(tmp_path):
    for r in (row("a", 0), row("a", 1, "docker"), row("elsewhere", 1)):
        oracle.note(tmp_path / "oracle_times.csv", r)
    (tmp_path / "oracle_ok.txt").write_text("# head\nelsewhere\n")
    write_task(tmp_path / "tasks/a", "true")
    (tmp_path / "list.txt").write_text("a\n")
    env = {**os.environ, "PROFILE": "cpu-smollm2", "ENVIRONMENT": "local_env", "TASKS_DIR": str(tmp_path / "tasks"), "DATA_DIR": str(tmp_path),
           "RESULTS_DIR": str(tmp_path), "ORACLE_DIR": str(tmp_path), "TRAJOULE_RUN_DIR": str(tmp_path / "run")}  # fmt: skip

    def check(name, **more):
        return subprocess.run(["bash", "05_oracle_check.sh", tmp_path / name], cwd=REPO, env=env | more, capture_output=True, text=True, timeout=60)

    r = check("list.txt")
    assert r.returncode == 1 and "0 task(s) work here" in r.stderr and "no task works here" in r.stderr, r.stderr
    r = check("oracle_ok.txt", FORCE="1")
    assert r.returncode == 2 and "is what this stage writes" in r.stderr and (tmp_path / "oracle_ok.txt").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_so_many_tasks_run_at_a_time(tmp_path, monkeypatch, jobs):
    now, most = 0, 0

    async def run_one(task, a):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        return row(task, 1, wall_s=0.05, **dict.fromkeys(("pull_s", "build_s", "setup_s", "solve_s", "verify_s")))

    monkeypatch.setattr(oracle, "run_one", run_one)
    listed = []
    a = argparse.Namespace(jobs=jobs, times=tmp_path / "times.csv")
    asyncio.run(oracle.check(["a", "b", "c", "d"], a, lambda: listed.append(len(csvfiles.read(a.times)))))
    assert most == jobs and listed == [1, 2, 3, 4]


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
    names = ["good", "wrong", "invalid", "slow"]
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{n}\n" for n in names))
    env = {**os.environ, "HARBOR_TELEMETRY": "0", "LITELLM_OFFLINE_MODE": "true"}
    p = subprocess.Popen(command(tmp_path, "--jobs", "2"), cwd=REPO, env=env, stdout=subprocess.PIPE, text=True)
    rows, end = [], time.monotonic() + 120
    while len(rows) < 3 and p.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        rows = csvfiles.read(tmp_path / "times.csv")
    p.send_signal(signal.SIGTERM)
    out, _ = p.communicate(timeout=60)
    assert p.returncode == 130, out
    got = {Path(r["task"]).name: r["reason"] for r in rows}
    assert got == {"good": "", "wrong": "wrong", "invalid": "harbor"}
    assert (tmp_path / "ok.txt").read_text().splitlines()[1:] == [f"{tmp_path}/good"]

    write_task(tmp_path / "slow", "touch /app/done")
    r = subprocess.run(command(tmp_path), cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    assert "3 of 4 have a row" in r.stdout and "slow: ok" in r.stdout
