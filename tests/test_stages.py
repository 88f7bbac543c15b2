"""The bash stages and their small Python helpers: settings, plans, context policies, processes that leave nothing behind."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages import plan, trial


def bash(repo, command, **env):
    """Run a bash command in the repository with a clean set of our settings; returns the finished process."""
    ours = {
        k: v for k, v in os.environ.items() if k not in ("PROFILE", "PORT", "PROXY_PORT", "DATA_DIR", "RESULTS_DIR", "ORACLE_DIR", "MODE")
    }
    return subprocess.run(["bash", "-c", command], cwd=repo, env={**ours, **env}, capture_output=True, text=True, timeout=60)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


# ---- settings

PROFILES = ["cpu-smollm2", "cpu-vllm", "l4x2-qwen3-coder", "h200", "h200-random"]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid(repo, profile):
    r = bash(repo, "bash 00_env_check.sh --settings", PROFILE=profile)
    assert r.returncode == 0, r.stderr
    settings = dict(line.split("=", 1) for line in r.stdout.splitlines())
    assert settings["PROFILE"] == profile
    section = settings["SERVER_PACKAGES"].strip("'")
    assert f"[{section}]" in (repo / "env_freeze.txt").read_text().splitlines()


def test_environment_wins_over_profile_wins_over_defaults(repo):
    def value(name, **env):
        out = bash(repo, "bash 00_env_check.sh --settings", **env).stdout
        return dict(line.split("=", 1) for line in out.splitlines())[name]

    assert value("MAX_MODEL_LEN", PROFILE="cpu-smollm2") == "8192"
    assert value("MAX_MODEL_LEN", PROFILE="h200") == "32768"
    assert value("MAX_MODEL_LEN", PROFILE="cpu-smollm2", MAX_MODEL_LEN="4096") == "4096"
    assert value("CPU_MODEL_W", PROFILE="cpu-smollm2", CPU_MODEL_W="") == "''"  # set to nothing: the estimate is off


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"PORT": "eight"}, "setting PORT='eight': expected a whole number"),
        ({"PROFILE": "nope"}, "PROFILE=nope: no file"),
        ({"PROFILE": "h200", "PORT": "8001"}, "PORT and PROXY_PORT are both 8001"),
        ({"CPU_MODEL_W": "65"}, "CPU_MODEL_W='65': expected IDLE:BUSY"),
        ({"MODE": "repaly"}, "MODE='repaly': expected live or replay"),
        ({"CALIB_CONTEXTS": "1k,2k"}, "CALIB_CONTEXTS='1k,2k'"),
    ],
)
def test_a_bad_setting_is_named_with_what_was_expected(repo, env, says):
    r = bash(repo, "bash 00_env_check.sh", **env)
    assert r.returncode == 2
    assert says in r.stderr
    assert len(r.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "stage",
    ["00_env_check", "01_setup", "02_serve_vllm", "03_calibrate", "04_run_trial", "05_oracle_check", "06_run_batch", "quickstart", "test"],
)
def test_help_shows_an_example(repo, stage):
    r = bash(repo, f"bash {stage}.sh --help")
    assert r.returncode == 0
    assert f"bash {stage}.sh" in r.stdout


def test_sudo_setup_shows_before_it_does(repo):
    r = bash(repo, "bash sudo_setup.sh --dry-run")
    assert r.returncode == 0
    assert "udev" in r.stdout and "powercap" in r.stdout
    assert not Path("/etc/udev/rules.d/60-trajoule-powercap.rules").exists()
    assert bash(repo, "bash sudo_setup.sh --undo --dry-run").returncode == 0
    assert bash(repo, "bash sudo_setup.sh --foo").returncode == 2


# ---- context policies


@pytest.mark.parametrize(
    ("policy", "context", "kwargs"),
    [
        ("summarize-off", 32768, {"enable_summarize": False}),
        ("summarize-8k", 32768, {"enable_summarize": True, "proactive_summarization_threshold": 32768 - 8192}),
        ("summarize-2k", 8192, {"enable_summarize": True, "proactive_summarization_threshold": 8192 - 2048}),
        ("summarize-on", 32768, {"enable_summarize": True, "proactive_summarization_threshold": 8000}),
    ],
)
def test_policy_becomes_the_threshold_of_free_tokens(policy, context, kwargs):
    assert trial.policy_kwargs(policy, context) == kwargs


@pytest.mark.parametrize(
    ("policy", "context", "says"),
    [
        ("summarize-8k", 8192, "needs a context of at least 10240 tokens"),
        ("summarize-on", 8192, "would summarize before every call"),
        ("summarize-0k", 8192, "unknown"),
        ("sumarize-8k", 32768, "unknown"),
    ],
)
def test_a_policy_that_cannot_do_what_it_says_is_refused(policy, context, says):
    with pytest.raises(trial.BadInput, match=says):
        trial.policy_kwargs(policy, context)


def test_task_is_a_folder_a_name_or_a_dataset(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "task.toml").touch()
    assert trial.find_task("t", tmp_path) == ("t", {"tasks": [{"path": str(tmp_path / "t")}]})
    assert trial.find_task(str(tmp_path / "t"), "nowhere")[0] == "t"
    assert trial.find_task("terminal-bench@2.0/fix-git", tmp_path) == (
        "fix-git",
        {"datasets": [{"name": "terminal-bench", "version": "2.0", "task_names": ["fix-git"]}]},
    )
    with pytest.raises(trial.BadInput, match="not in"):
        trial.find_task("u", tmp_path)


# ---- how a trial ended


def finished(tmp_path, harbor_exit, result=None, **more):
    folder = tmp_path / "t__summarize-off__r1"
    (folder / "harbor" / "t__x").mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps({"schema": 1, "trajectory": folder.name}))
    if result is not None:
        (folder / "harbor" / "t__x" / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    a = dict(dir=folder, harbor_exit=harbor_exit, deadline=9.0, t_begin=1.0, t_end=2.0, server_down=False, broken=None, calib=None) | more
    code = trial.finish(type("A", (), a))
    return code, json.loads((folder / "trial.json").read_text())


GOOD = {"verifier_result": {"rewards": {"reward": 1.0}}, "exception_info": None}


def test_a_measured_trial_ends_with_its_reward(tmp_path):
    code, t = finished(tmp_path, 0, GOOD)
    assert (code, t["ended"], t["reward"]) == (0, "finished", 1.0)
    assert not (tmp_path / "t__summarize-off__r1" / "request.json").exists()


@pytest.mark.parametrize("kind", ["AgentTimeoutError", "ContextLengthExceededError", "OutputLengthExceededError"])
def test_what_the_agent_did_is_no_infrastructure_failure(tmp_path, kind):
    code, t = finished(tmp_path, 0, {"exception_info": {"exception_type": kind}, "verifier_result": None})
    assert (code, t["exception"], t["reward"]) == (0, kind, None)


@pytest.mark.parametrize(
    ("harbor_exit", "result", "ended"),
    [
        (0, None, "harbor_failed"),
        (124, None, "deadline"),
        (143, None, "interrupted"),
        (0, '{"verifier_result": {"rew', "harbor_failed"),
        (0, {"exception_info": {"exception_type": "EnvironmentStartTimeoutError"}}, "finished"),
    ],
)
def test_infrastructure_failures_exit_with_3_and_a_reason(tmp_path, harbor_exit, result, ended):
    code, t = finished(tmp_path, harbor_exit, result)
    assert code == 3
    assert t["ended"] == ended
    assert t["reason"]


def test_a_trial_whose_sampler_died_is_an_infrastructure_failure(tmp_path):
    code, t = finished(tmp_path, 0, GOOD, broken="the sampler ended badly (exit 137)")
    assert (code, t["ended"], t["reason"]) == (3, "harness_failed", "the sampler ended badly (exit 137)")


# ---- plans


def test_plan_interleaves_repetitions_and_keeps_what_is_planned(tmp_path):
    tasks, policies = ["a", "b", "c"], ["p", "q"]
    rows = plan.make(tasks, policies, 3, "live", 1, "")
    assert [r["rep"] for r in rows] == [1] * 6 + [2] * 6 + [3] * 6
    assert {(r["task"], r["policy"]) for r in rows[:6]} == {(t, p) for t in tasks for p in policies}
    assert [(r["task"], r["policy"]) for r in rows[:6]] != [(r["task"], r["policy"]) for r in rows[6:12]]
    assert rows == plan.make(tasks, policies, 3, "live", 1, "")

    lists = tmp_path / "list.txt"
    lists.write_text("# two tasks\na\nb # with a comment\n")
    out = tmp_path / "plan.csv"

    def run(*more):
        cmd = [sys.executable, "stages/plan.py", "--list", str(lists), "--policies", "p q", "--plan", str(out), "--show", *more]
        return subprocess.run(cmd, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True).stdout.splitlines()

    first = run("--reps", "1")
    assert len(first) == 4
    before = out.read_text()
    assert run("--reps", "1") == first and out.read_text() == before
    assert len(run("--reps", "2")) == 8
    with open(out) as f:
        assert [r["order"] for r in csv.DictReader(f)] == [str(i) for i in range(1, 9)]
    shards = [run("--reps", "2", "--shard", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(sum(shards, [])) == sorted(run("--reps", "2"))


def test_a_trajectory_is_never_taken_for_one_of_another_kind(tmp_path):
    for name in ("01-solve.json", "02-fail.json"):
        (tmp_path / "rec/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "rec/a" / name).touch()
    (tmp_path / "l.txt").write_text("a\n")
    traj = tmp_path / "traj"

    def run(mode, *more):
        cmd = [sys.executable, "stages/plan.py", "--list", tmp_path / "l.txt", "--policies", "p", "--plan", traj / "plan.csv", "--mode", mode,
               "--recordings", tmp_path / "rec", "--show", *more]  # fmt: skip
        r = subprocess.run(cmd, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
        return r.returncode, r.stdout, r.stderr

    assert run("replay") == (0, f"a\tp\t1\treplay\topen\t{tmp_path}/rec/a/01-solve.json\n", "")
    code, out, err = run("live")
    assert (code, out) == (2, "") and "a__p__r1 is planned as replay of 01-solve.json, asked for is live" in err

    folder = traj / "a__p__r1"
    folder.mkdir()
    measured = {"mode": "replay", "recording": {"file": "rec/a/01-solve.json"}}
    (folder / "trial.json").write_text(json.dumps(measured))
    assert "\tmeasured\t" in run("replay")[1]
    (folder / "trial.json").write_text(json.dumps({"mode": "live", "recording": None}))
    code, out, err = run("replay")
    assert (code, out) == (2, "") and f"{folder} is measured as live, asked for is replay of 01-solve.json" in err
    (folder / "trial.json").write_text("{")
    assert run("replay")[0] == 2 and "trial.json cannot be read" in run("replay")[2]

    (folder / "trial.json").write_text(json.dumps(measured))
    kept = [sys.executable, "stages/trial.py", "kept", "--dir", folder, "--mode"]
    r = subprocess.run([*kept, "replay", "--recording", "01-solve.json"], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert r.returncode == 0 and "finished already" in r.stdout
    r = subprocess.run([*kept, "live"], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert r.returncode == 2 and "is measured as replay of 01-solve.json, asked for is live" in r.stderr


@pytest.mark.parametrize(("text", "says"), [("# nothing\n", "no task"), ("a\nb\na\n", "more than once")])
def test_a_bad_task_list_is_named(tmp_path, text, says):
    (tmp_path / "l.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        plan.read_list(tmp_path / "l.txt")


def test_recordings_serve_repetitions_in_turn(tmp_path):
    (tmp_path / "t").mkdir()
    for n in ("02-b.json", "01-a.json"):
        (tmp_path / "t" / n).touch()
    assert [Path(plan.recording_of(tmp_path, "t", r)).stem for r in (1, 2, 3)] == ["01-a", "02-b", "01-a"]
    with pytest.raises(ValueError, match="no recording"):
        plan.recording_of(tmp_path, "u", 1)


# ---- processes


def supervise(*args, **kw):
    return subprocess.Popen([sys.executable, "stages/supervise.py", *args], cwd=Path(__file__).parent.parent, **kw)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAJOULE_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_exit_codes_pass_through():
    assert supervise("--", "sh", "-c", "exit 7").wait(20) == 7
    assert supervise("--", "sh", "-c", "kill -9 $$").wait(20) == 137
    assert supervise("--", "/nonexistent").wait(20) == 125
    assert supervise("--deadline", "0.3", "--", "sleep", "60").wait(20) == 124


def test_nothing_is_left_of_a_command_not_even_a_session_of_its_own(tmp_path):
    note = tmp_path / "pid"
    assert supervise("--", "bash", "-c", f"setsid sleep 300 & echo $! > {note}; sleep 0.2").wait(20) == 0
    assert wait_for(lambda: not alive(int(note.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_stage_killed_by_kill_9_takes_its_processes_along(tmp_path):
    note = tmp_path / "pid"
    stage = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} stages/supervise.py -- bash -c 'echo $$ > {note}; sleep 300 & wait' & wait"],
        cwd=Path(__file__).parent.parent,
    )
    assert wait_for(note.exists) and wait_for(lambda: note.read_text().strip())
    pid = int(note.read_text())
    assert alive(pid)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    assert wait_for(lambda: not alive(pid))


def test_a_command_whose_starter_died_before_the_supervisor_was_up_is_not_run(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert supervise("--parent", str(gone.pid), "--", "touch", str(tmp_path / "ran")).wait(20) == 0
    assert not (tmp_path / "ran").exists()
    assert supervise("--parent", str(os.getpid()), "--", "touch", str(tmp_path / "ran")).wait(20) == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_leftover_of_a_killed_supervisor_is_ended_by_the_next_start(tmp_path, run_dir):
    note = tmp_path / "pid"
    s = supervise("--name", "x", "--", "bash", "-c", f"sleep 300 & echo $! > {note}; wait")
    assert wait_for(lambda: note.exists() and note.read_text().strip())
    assert wait_for((run_dir / "x.json").exists)
    s.send_signal(signal.SIGKILL)
    s.wait()
    left = int(note.read_text())  # the command itself dies with its supervisor, its child does not
    assert alive(left)
    second = supervise("--name", "x", "--", "true", stderr=subprocess.PIPE, text=True)
    _, err = second.communicate(timeout=30)
    assert second.returncode == 0
    assert "left over" in err
    assert wait_for(lambda: not alive(left))
    assert not (run_dir / "x.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_server_started_with_nohup_outlives_its_shell_but_not_its_stage(tmp_path, run_dir):
    note = tmp_path / "pid"
    command = f"{sys.executable} stages/supervise.py --name z --detachable -- bash -c 'echo $$ > {note}; sleep 300 & wait'"
    shell_command = f"nohup {command} & until [[ -s {note} ]]; do sleep 0.1; done"
    shell = subprocess.Popen(["bash", "-c", shell_command], cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL)
    assert shell.wait(30) == 0
    time.sleep(0.5)  # to die it would need a moment
    pid = int(note.read_text())
    assert alive(pid)
    assert wait_for((run_dir / "z.json").exists)
    os.kill(json.loads((run_dir / "z.json").read_text())["supervisor"], signal.SIGHUP)
    time.sleep(0.5)
    assert alive(pid)
    os.kill(json.loads((run_dir / "z.json").read_text())["supervisor"], signal.SIGTERM)
    assert wait_for(lambda: not alive(pid))

    note.unlink()
    outer = supervise("--", "bash", "-c", f"exec {command}")  # as start_server does
    assert wait_for(lambda: note.exists() and note.read_text().strip())
    pid = int(note.read_text())
    outer.send_signal(signal.SIGKILL)
    outer.wait()
    assert wait_for(lambda: not alive(pid))


def test_two_of_one_name_are_refused(run_dir):
    first = supervise("--name", "y", "--", "sleep", "60")
    assert wait_for((run_dir / "y.json").exists)
    second = supervise("--name", "y", "--", "true", stderr=subprocess.PIPE, text=True)
    _, err = second.communicate(timeout=20)
    assert second.returncode == 1 and "already runs" in err
    first.terminate()
    assert first.wait(20) == 143


# ---- a stage that needs a server says which command starts it


def test_a_trial_without_a_server_names_the_command(repo, tmp_path, free_port):
    env = dict(PROFILE="cpu-smollm2", PORT=str(free_port()), DATA_DIR=str(tmp_path / "d"), RESULTS_DIR=str(tmp_path / "r"), MODE="live")
    r = bash(repo, "timeout 50 bash 04_run_trial.sh hello-file summarize-off 1", **env)
    assert r.returncode == 1
    assert "bash 02_serve_vllm.sh" in r.stderr.splitlines()[-1]
    assert not list((tmp_path / "d").glob("traj/*/trial.json"))


@pytest.mark.parametrize("args", ["", "hello-file summarize-off", "hello-file summarize-off zero"])
def test_a_trial_with_wrong_arguments_is_refused(repo, args):
    r = bash(repo, f"bash 04_run_trial.sh {args}", PROFILE="cpu-smollm2")
    assert r.returncode == 2
    assert len(r.stderr.strip().splitlines()) == 1
