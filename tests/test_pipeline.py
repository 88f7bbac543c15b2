"""The numbered stages end to end: the real small server, real Harbor trials in Linux namespaces and in Docker, kills at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.fakes.openai_server import running
from tests.fakes.processes import left_of, mentioning

REPO = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
CONTEXT_TASK = "log-report"


def docker_answers():
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture
def place(tmp_path, free_port):
    """Settings that keep a test's data, ports and locks to itself."""
    names = ("PROFILE", "MODE", "ENVIRONMENT", "TEMPERATURE", "MAX_TURNS")
    env = {k: v for k, v in os.environ.items() if k not in names}
    return env | {
        "PROFILE": "cpu-smollm2",
        "PORT": str(free_port()),
        "PROXY_PORT": str(free_port()),
        "DATA_DIR": str(tmp_path / "data"),
        "RESULTS_DIR": str(tmp_path / "results"),
        "ORACLE_DIR": str(tmp_path / "data"),
        "TRAJOULE_RUN_DIR": str(tmp_path / "run"),
        "ENVIRONMENT": "local_env",
        "IDLE_S": "3",
        "BATCH_IDLE_S": "1",
        "CALIB_CONTEXTS": "64,160",
        "CALIB_OUTPUTS": "4,12",
        "CALIB_REPS": "1",
        "APPEND_CACHED": "64",
        "APPEND_UNCACHED": "32",
        "APPEND_OUTPUTS": "4",
        "MIN_FREE_MB": "100",
        "AGENT_TIMEOUT_S": "300",
    }


def stage(env, command, check=True, timeout=600):
    r = subprocess.run(["bash", *command.split()], cwd=REPO, env=env, capture_output=True, text=True, timeout=timeout)
    assert not check or r.returncode == 0, f"{command}: exit {r.returncode}\n{r.stdout[-2000:]}\n{r.stderr[-4000:]}"
    return r


class Server:
    """02_serve_vllm.sh in the background; leaving ends it and shows that nothing of it is left."""

    def __init__(self, env):
        self.env = env

    def __enter__(self):
        self.process = subprocess.Popen(["bash", "02_serve_vllm.sh"], cwd=REPO, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{self.env['PORT']}"
        subprocess.run([sys.executable, "servers/adapter.py", "wait", "--kind", "llamacpp", "--url", url, "--timeout", "60"], cwd=REPO, check=True)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        assert mentioning(self.env["PORT"]) == []


def rows(env):
    table = pd.read_csv(Path(env["RESULTS_DIR"]) / "trials.csv")
    assert len(table)
    for _, r in table.iterrows():
        assert r.model_s + r.command_s + r.waiting_s == pytest.approx(r.total_s, abs=1e-6)
        assert r.cpu_model_j + r.cpu_command_j + r.cpu_waiting_j == pytest.approx(r.cpu_total_j, abs=1e-5)
    return table


def align(env):
    folders = sorted(str(p) for p in Path(env["DATA_DIR"], "traj").glob("*__*"))
    calib = Path(env["RESULTS_DIR"], "calib")
    given = ["--calib", str(calib)] if calib.exists() else []
    r = subprocess.run(
        [sys.executable, "align_trial.py", *folders, *given, "--out", f"{env['RESULTS_DIR']}/trials.csv"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert r.returncode == 0, r.stderr[-3000:]
    return rows(env)


def test_from_idle_power_to_report(place):
    """Every stage in order on the real small server: calibration, oracle check, replayed trajectories, alignment, evaluation."""
    tasks = Path(place["DATA_DIR"], "tasks.txt")
    tasks.parent.mkdir(parents=True)
    tasks.write_text("sqlite-query\n")
    stage(place, "03_calibrate.sh --idle-bare")
    with Server(place):
        stage(place, "03_calibrate.sh")
        params = json.loads(Path(place["RESULTS_DIR"], "calib", "params.json").read_text())
        assert params["idle"]["loaded"]
        assert "calibrated already" in stage(place, "03_calibrate.sh").stderr
    Path(place["RESULTS_DIR"], "calib", "params.json").unlink()  # as if the first run had been ended before its fit
    with Server(place):
        again = stage(place, "03_calibrate.sh").stderr
        assert "that of an earlier start of the server is taken again" in again and again.count("kept, it is whole") == 2
        stage(place, f"05_oracle_check.sh {tasks}")
        assert "sqlite-query" in Path(place["ORACLE_DIR"], "oracle_ok.txt").read_text()
        again = stage(place, f"06_run_batch.sh {tasks} summarize-off 2")
        assert "2 of 2 measured" in again.stderr
        assert "all 2 trajectories are measured already" in stage(place, f"06_run_batch.sh {tasks} summarize-off 2").stderr
    table = align(place)
    assert list(table.outcome) == ["success", "fail"]  # 01-solve, 02-all-states
    assert set(table.cpu_source) == {"estimated"} or set(table.cpu_source) == {"rapl"}
    assert (table["mode"] == "replay").all() and (table.recording_source == "authored").all()
    assert (table.model_s > 0).all() and (table.command_s > 0).all() and (table.cached_tokens > 0).all()
    out = Path(place["RESULTS_DIR"], "eval")
    r = subprocess.run(
        [sys.executable, "evaluate.py", "--trials", f"{place['RESULTS_DIR']}/trials.csv", "--plan", f"{place['DATA_DIR']}/traj/plan.csv", "--out", str(out)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert r.returncode == 0, r.stderr[-3000:]
    assert "report.html" in r.stdout
    page = (out / "report.html").read_text()
    assert "authored" in page
    configs = pd.read_csv(out / "configs.csv")
    assert configs.planned.sum() == configs.success.sum() + configs.fail.sum() + configs.unscored.sum() == 2


@pytest.mark.skipif(not docker_answers(), reason="NO DOCKER ENGINE ANSWERS: the trial in Docker was not run")
def test_a_trial_in_docker(place):
    env = place | {"ENVIRONMENT": "docker"}
    with Server(env):
        stage(env, "04_run_trial.sh sqlite-query summarize-off 1", timeout=900)
    table = align(env)
    assert list(table.outcome) == ["success"]
    assert table.split_source[0] == "recording"


def long_history(body, ordinal):
    """A model that prints about 9,000 characters a turn for seven turns, then is done: the history grows past 11K tokens."""
    if ordinal < 7:
        keys = f"python3 -c \"print('{ordinal} lorem ipsum dolor sit amet ' * 330)\"\n"
        return {"analysis": "I read on.", "plan": "More.", "commands": [{"keystrokes": keys, "duration": 0.3}]}
    return {"analysis": "Done.", "plan": "Stop.", "commands": [], "task_complete": True}


@pytest.mark.parametrize(("policy", "summaries"), [("summarize-8k", True), ("summarize-off", False)])
def test_context_policies_do_what_they_say(place, policy, summaries):
    """Real Terminus-2 against a scripted server: 8k fires once the history is between 8K and 11K tokens, off never does."""
    with running(long_history) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "MODE": "live", "MAX_MODEL_LEN": "32768", "MAX_TURNS": "20", "RESPONSE_SCHEMA": ""}
        stage(env, f"04_run_trial.sh {CONTEXT_TASK} {policy} 1")
    calls = [json.loads(x) for x in Path(place["DATA_DIR"], "traj", f"{CONTEXT_TASK}__{policy}__r1", "calls.jsonl").read_text().splitlines()]
    kinds = [c["kind"] for c in calls]
    if not summaries:
        assert set(kinds) == {"agent"}
        assert max(c["prompt_tokens"] for c in calls) > 11 * 1024  # it would have fired
        return
    first = kinds.index("summary")
    assert kinds[first : first + 3] == ["summary", "questions", "answers"]
    # litellm counts with another tokenizer than the server, and the last screen is not in its count: hence a range
    assert 8 * 1024 <= calls[first]["prompt_tokens"] <= 11 * 1024
    assert max(c["prompt_tokens"] for c in calls[:first] if c["kind"] == "agent") <= 11 * 1024
    table = align(env)
    assert table.summarizations[0] == kinds.count("summary")


@pytest.mark.parametrize("moment", range(3))
def test_kill_9_at_a_random_moment_leaves_nothing_and_a_rerun_finishes(place, moment):
    """The stage itself is killed, so no trap of it runs: proxy, sampler, Harbor and sandbox must go by themselves."""
    seed = random.SystemRandom().randrange(1 << 30)
    after = random.Random(seed).uniform(0.5, 14.0)
    print(f"seed {seed}: killed after {after:.2f} s")
    done = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "sleep 1\n", "duration": 1.0}], "task_complete": True, "_latency": 0.3}
    with running([done]) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "MODE": "live", "MAX_MODEL_LEN": "32768", "RESPONSE_SCHEMA": ""}
        p = subprocess.Popen(["bash", "04_run_trial.sh", "sqlite-query", "summarize-off", "1"], cwd=REPO, env=env, start_new_session=True)
        time.sleep(after)
        p.send_signal(signal.SIGKILL)
        p.wait()
        assert left_of(place["DATA_DIR"], f"--port {place['PROXY_PORT']}") == []
        folder = Path(place["DATA_DIR"], "traj", "sqlite-query__summarize-off__r1")
        if (folder / "samples.csv").exists():  # what was measured stays readable
            import energylib

            energylib.read_samples(folder / "samples.csv")
            energylib.read_jsonl(folder / "calls.jsonl") if (folder / "calls.jsonl").exists() else None
        stage(env, "04_run_trial.sh sqlite-query summarize-off 1")
        assert json.loads((folder / "trial.json").read_text())["ended"] == "finished"
        assert left_of(place["DATA_DIR"], f"--port {place['PROXY_PORT']}") == []


@pytest.mark.parametrize("victim", ["sampler", "llm_proxy"])
def test_a_trial_ends_when_its_sampler_or_proxy_does(place, victim):
    """The agent waits for a minute: measuring on without the one who measures would be for nothing."""
    import psutil

    done = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "sleep 60\n", "duration": 60.0}], "_latency": 0.3}
    with running([done]) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "MODE": "live", "MAX_MODEL_LEN": "32768", "RESPONSE_SCHEMA": ""}
        p = subprocess.Popen(["bash", "04_run_trial.sh", "sqlite-query", "summarize-off", "1"], cwd=REPO, env=env, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 60
        while not s.log and time.monotonic() < end:
            time.sleep(0.2)
        began = time.monotonic()
        next(q for q in psutil.Process(p.pid).children(recursive=True) if f"{victim}.py" in q.cmdline()).kill()
        assert p.wait(50) == 3 and time.monotonic() - began < 40, p.stderr.read()
        trial = json.loads(Path(place["DATA_DIR"], "traj/sqlite-query__summarize-off__r1/trial.json").read_text())
        assert trial["ended"] == "harness_failed" and victim.removeprefix("llm_") in trial["reason"]
        assert left_of(place["DATA_DIR"], f"--port {place['PROXY_PORT']}") == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_batch_that_is_ended_takes_its_trial_along(place, how, tmp_path):
    """Whatever ends the outer stage ends what it runs, at once: bash alone would answer a signal only after its foreground command."""
    done = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "sleep 60\n", "duration": 60.0}], "_latency": 0.3}
    (tmp_path / "list.txt").write_text("sqlite-query\n")
    with running([done]) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "MODE": "live", "MAX_MODEL_LEN": "32768", "RESPONSE_SCHEMA": ""}
        p = subprocess.Popen(["bash", "06_run_batch.sh", str(tmp_path / "list.txt"), "summarize-off", "1"], cwd=REPO, env=env, start_new_session=True)
        end = time.monotonic() + 60
        while not s.log and time.monotonic() < end:
            time.sleep(0.2)
        assert s.log  # Harbor runs, the agent has asked for its first reply
        p.send_signal(how)
        assert p.wait(40) in (-9, 130, 143)
        assert left_of(place["DATA_DIR"], f"--port {place['PROXY_PORT']}", seconds=40) == []


def test_a_taken_proxy_port_is_named(place):
    with running([{}]) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "PROXY_PORT": str(s.port + 0), "MODE": "live"}
        r = stage(env, "04_run_trial.sh sqlite-query summarize-off 1", check=False)
        assert r.returncode == 2 and "PORT and PROXY_PORT are both" in r.stderr
        with running([{}]) as other:
            env["PROXY_PORT"] = str(other.port)
            r = stage(env, "04_run_trial.sh sqlite-query summarize-off 1", check=False)
            assert r.returncode == 1
            assert f"port {other.port} is taken" in r.stderr


def test_a_full_disk_stops_a_trial_before_it_starts(place):
    with running([{}]) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "MODE": "live", "MIN_FREE_MB": "999999999"}
        r = stage(env, "04_run_trial.sh sqlite-query summarize-off 1", check=False)
        assert r.returncode == 1 and "MIN_FREE_MB" in r.stderr


def test_no_counter_and_no_estimate_is_one_clear_line(place, tmp_path):
    """Without RAPL, GPU and the labelled estimate there is nothing to measure: the stage says so and starts no trial."""
    with running([{}]) as s:
        env = place | {"SERVER_KIND": "openai", "PORT": str(s.port), "MODE": "live", "CPU_MODEL_W": "", "POWERCAP_DIR": str(tmp_path / "none"), "GPUS": "none"}
        r = stage(env, "04_run_trial.sh sqlite-query summarize-off 1", check=False)
        assert r.returncode == 1
        assert "sampler" in r.stderr.strip().splitlines()[-1]
        assert not list(Path(place["DATA_DIR"]).glob("traj/*/trial.json"))
