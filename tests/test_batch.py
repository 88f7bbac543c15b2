"""The batch's helpers: plans that nodes share, the machine's quiet, drift, and how a batch stands."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages import drift, idle_check, plan, status

REPO = Path(__file__).resolve().parent.parent


# ---- plans


def test_nodes_that_plan_at_once_make_one_plan(tmp_path):
    (tmp_path / "l.txt").write_text("".join(f"t{i}\n" for i in range(12)))

    def command(shard, reps):
        return [sys.executable, "stages/plan.py", "--plan", tmp_path / "traj/plan.csv", "--list", tmp_path / "l.txt", "--policies", "p q", "--reps", str(reps),
                "--shard", shard, "--show"]  # fmt: skip

    # they ask for different numbers of repetitions, so that each finds something to append
    running = [subprocess.Popen(command(f"{i}/4", i), cwd=REPO, stdout=subprocess.PIPE, text=True) for i in (1, 2, 3, 4)]
    for p in running:
        p.communicate(timeout=60)
        assert p.returncode == 0
    rows = plan.read_plan(tmp_path / "traj/plan.csv")
    assert [r["order"] for r in rows] == [str(i) for i in range(1, 12 * 2 * 4 + 1)]
    assert len({plan.key(r) for r in rows}) == 96
    shown = [subprocess.run(command(f"{i}/4", 4), cwd=REPO, capture_output=True, text=True).stdout.splitlines() for i in (1, 2, 3, 4)]
    assert [len(s) for s in shown] == [24] * 4 and len(set(sum(shown, []))) == 96


def test_two_tasks_of_one_name_are_refused_whatever_they_are_from(tmp_path):
    (tmp_path / "l.txt").write_text("terminal-bench@2.0/fix-git\nmy/tasks/fix-git\n")
    with pytest.raises(ValueError, match="fix-git stand"):
        plan.read_list(tmp_path / "l.txt")


def test_a_trial_that_failed_for_infrastructure_reasons_is_not_measured(tmp_path):
    trial = {"mode": "live", "recording": None, "ended": "finished", "reason": None}
    for more, what in (({}, "measured"), ({"reason": "Harbor reports RuntimeError"}, "failed"), ({"ended": "server_down", "reason": "x"}, "failed")):
        (tmp_path / "trial.json").write_text(json.dumps(trial | more))
        assert plan.measured(tmp_path, "live", "") == what


# ---- a quiet machine


@pytest.mark.parametrize(
    ("power_w", "rested_w", "between_w", "shift"),
    [(121.6, 121.6, 124.1, 0.0), (123, 121.6, 124.1, 0.0), (130, 121.6, 124.1, 130 / 124.1 - 1), (100, 121.6, 124.1, 100 / 121.6 - 1), (9, None, None, None),
     (10, 10, None, 0.0)],
)  # fmt: skip
def test_idle_power_lies_between_rested_and_between_calls(power_w, rested_w, between_w, shift):
    assert idle_check.compare(power_w, rested_w, between_w) == (None if shift is None else pytest.approx(shift))


def test_a_process_is_foreign_unless_it_is_ours_or_of_another_pid_namespace():
    me, parent, elsewhere = os.getpid(), os.getppid(), 2**22 + 1
    assert idle_check.foreign({me, parent, elsewhere}, {me}) == [parent]


def write_samples(path, seconds, power_w):
    """Counters of one package at 10 Hz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as f:
        f.write("t,mono,cpu0_uj\n")
        for i in range(int(seconds * 10) + 1):
            f.write(f"{1e9 + i / 10:.6f},{i / 10:.6f},{int(power_w * i * 1e5)}\n")
    path.with_name(path.stem + ".meta.json").write_text(json.dumps({
        "columns": {"cpu0_uj": {"source": "rapl", "unit": "uJ", "max_range_uj": 2**40, "zone": "intel-rapl:0", "name": "package-0", "scope": "package"}}}))


def test_another_idle_power_is_warned_of_and_recorded(tmp_path):
    write_samples(tmp_path / "check.csv", 2, 12.0)
    (tmp_path / "params.json").write_text(json.dumps({"idle": {"loaded": {"cpu0": {"power_w": 10.0, "between_calls_w": 10.1}}, "bare": {}}}))
    cmd = [sys.executable, "stages/idle_check.py", "--idle", tmp_path / "check.csv", "--log", tmp_path / "checks.csv", "--before", "x", "--calib"]
    r = subprocess.run([*cmd, tmp_path], cwd=REPO, capture_output=True, text=True)
    assert r.returncode == 4 and "WARNING: idle power cpu0: 12.00 W (rapl), +18.8%" in r.stdout, r.stderr
    r = subprocess.run([*cmd, tmp_path / "none"], cwd=REPO, capture_output=True, text=True)
    assert r.returncode == 0
    with open(tmp_path / "checks.csv") as f:
        assert [(x["before"], x["shift"]) for x in csv.DictReader(f)] == [("x", "0.1881"), ("x", "")]


# ---- drift


def test_drift_is_relative_to_the_same_cell(repo):
    known, cell = drift.calibrated(repo / "results/calib")
    assert cell == (8192, 192)
    miss = [r for r in known if (r["context"], r["output"], r["state"]) == ("8192", "192", "miss")]
    row = drift.compare([{k: float(r[k]) * 1.1 for k in ("duration_s", "gpu_total_j")} for r in miss], miss)
    assert row["time_shift"] == pytest.approx(0.1) and row["gpu_shift"] == pytest.approx(0.1) and row["cpu_shift"] is None


def test_the_calibration_itself_has_not_drifted(repo, tmp_path):
    cmd = [sys.executable, "stages/drift.py", "check", "--calib", "results/calib", "--calls", "data/calib/calls.jsonl", "--samples", "data/calib/samples.csv",
           "--log", tmp_path / "drift.csv", "--tolerance"]  # fmt: skip
    r = subprocess.run([*cmd, "0.01"], cwd=repo, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    assert "reference cell 8192/192 hit: time" in r.stdout
    with open(tmp_path / "drift.csv") as f:
        rows = list(csv.DictReader(f))
    assert [r["state"] for r in rows] == ["hit", "miss"] and all(abs(float(r["gpu_shift"])) < 0.01 and r["cpu_shift"] == "" for r in rows)


# ---- how a batch stands


def test_status_counts_what_is_measured_failed_left_and_wasted(tmp_path):
    traj = tmp_path / "traj"
    plan_rows = [("a", "1"), ("b", "1"), ("c", "1"), ("d", "1")]
    traj.mkdir()
    with open(traj / "plan.csv", "w") as f:
        w = csv.DictWriter(f, plan.FIELDS, lineterminator="\n")
        w.writeheader()
        w.writerows({"order": i, "task": t, "policy": "p", "rep": r, "mode": "live", "recording": "", "seed": 1} for i, (t, r) in enumerate(plan_rows, 1))
    good = {"ended": "finished", "reason": None, "reward": 1.0, "mode": "live", "recording": None}
    for name, more in (("a", {"t_end": 1000.0}), ("b", {"t_end": 1060.0}), ("c", {"t_end": 1120.0, "ended": "server_down", "reason": "<no server>"})):
        write_samples(traj / f"{name}__p__r1" / "samples.csv", 5, 10.0)
        (traj / f"{name}__p__r1" / "trial.json").write_text(json.dumps(good | more))
    write_samples(tmp_path / "traj_unfinished/c__p__r1.20260101T000000/samples.csv", 3, 10.0)
    (tmp_path / "traj_unfinished/d__p__r1.20260101T000000").mkdir()  # killed before the first sample
    cmd = [sys.executable, "stages/status.py", "--traj", traj, "--waste", tmp_path / "waste.csv", "--out", tmp_path / "r/status.html", "--title", "a < b"]
    for _ in range(2):  # the second time from what is known already
        r = subprocess.run(cmd, cwd=REPO, capture_output=True, text=True)
        assert r.stdout == "2 of 4 measured, 1 failed, 1 left; 150 J; waste 30 J in 2 attempt(s) set aside; about 60 s left\n", r.stderr
    text = (tmp_path / "r/status.html").read_text()
    assert "a &lt; b" in text and "&lt;no server&gt;" in text and "stopped before its end" in text and 'name="viewport"' in text
    assert "http://" not in text and "https://" not in text and len(text) < 20000
    with open(tmp_path / "waste.csv") as f:
        assert [(r["trajectory"], r["energy_j"], r["domains"]) for r in csv.DictReader(f)] == [("c__p__r1", "30.0", "cpu0"), ("d__p__r1", "", "")]


def test_the_time_left_leaves_pauses_out():
    assert status.spacing([0, 10, 20, 5000, 5010, 5020]) == 10
    assert status.spacing([5]) is None


# ---- whole batches, against a scripted server

DONE = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "touch /app/done\n", "duration": 0.1}], "task_complete": True, "_latency": 0.2}


@pytest.fixture
def place(tmp_path, free_port):
    """Settings that keep a batch's data, ports and locks to itself; tasks `good` and `other`, and `broken`, whose environment does not start."""
    from test_oracle import write_task

    for name, dockerfile in (("good", "FROM debian:bookworm-slim\nWORKDIR /app\n"), ("other", "FROM debian:bookworm-slim\nWORKDIR /app\n"),
                             ("broken", "FROM debian:bookworm-slim\nRUN exit 3\n")):  # fmt: skip
        write_task(tmp_path / "tasks" / name, "touch /app/done", dockerfile)
    ours = ("PROFILE", "MODE", "TEMPERATURE", "MAX_TURNS", "CONCURRENCY")
    return {k: v for k, v in os.environ.items() if k not in ours} | {
        "PROFILE": "cpu-smollm2", "PROXY_PORT": str(free_port()), "DATA_DIR": str(tmp_path / "data"), "RESULTS_DIR": str(tmp_path / "results"),
        "TRAJOULE_RUN_DIR": str(tmp_path / "run"), "TASKS_DIR": str(tmp_path / "tasks"), "ENVIRONMENT": "local_env", "BATCH_IDLE_S": "0.5", "MODE": "live",
        "MIN_FREE_MB": "100", "SERVER_KIND": "openai", "MAX_MODEL_LEN": "32768", "RESPONSE_SCHEMA": "",
    }  # fmt: skip


def batch(env, tmp_path, tasks, *more):
    (tmp_path / "list.txt").write_text("\n".join(tasks) + "\n")
    command = ["bash", "06_run_batch.sh", tmp_path / "list.txt", "summarize-off", "1", *more]
    r = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=250)
    return r.returncode, r.stderr


@pytest.mark.integration
def test_infrastructure_failures_are_named_retried_at_the_end_and_their_energy_is_waste(place, tmp_path):
    from fakes.openai_server import running

    with running([DONE]) as s:
        env = place | {"PORT": str(s.port)}
        code, err = batch(env, tmp_path, ["good", "broken"])
        assert code == 3, err
        assert "1 trial(s) failed for infrastructure reasons: once more" in err
        assert "broken__summarize-off__r1 failed for infrastructure reasons: Harbor reports" in err
        assert "1 of 2 measured, 1 failed, 0 left" in err and "in 1 attempt(s) set aside" in err
        with open(tmp_path / "data/waste.csv") as f:
            rows = list(csv.DictReader(f))
        assert [r["trajectory"] for r in rows] == ["broken__summarize-off__r1"] and float(rows[0]["energy_j"]) > 0
        code, err = batch(env | {"MAX_INFRA_FAILURES": "1"}, tmp_path, ["good", "broken"])
        assert code == 1
        assert "1 trials in a row failed for infrastructure reasons (MAX_INFRA_FAILURES), the last, broken__summarize-off__r1: Harbor reports" in err
        assert "good__summarize-off__r1 (" not in err  # what is measured stays
    assert "Set aside" in (tmp_path / "results/status.html").read_text()


@pytest.mark.integration
def test_two_at_a_time_have_a_proxy_each_and_one_sampler(place, tmp_path):
    from fakes.openai_server import running

    with running([DONE]) as s:
        code, err = batch(place | {"PORT": str(s.port), "CONCURRENCY": "2"}, tmp_path, ["good", "other"])
    assert code == 0, err
    folders = [tmp_path / f"data/traj/{n}__summarize-off__r1" for n in ("good", "other")]
    trials = [json.loads((f / "trial.json").read_text()) for f in folders]
    assert [t["concurrency"] for t in trials] == [2, 2] and [t["reward"] for t in trials] == [1.0, 1.0]
    assert trials[0]["shared"] == trials[1]["shared"] and sorted(trials[0]["shared"]["members"]) == [f.name for f in folders]
    group = folders[0] / trials[0]["shared"]["folder"]
    assert (folders[0] / "samples.csv").samefile(folders[1] / "samples.csv") and (group / "samples.csv").samefile(folders[0] / "samples.csv")
    sessions = []
    for f in folders:
        calls = [json.loads(x) for x in (f / "calls.jsonl").read_text().splitlines()]
        assert {c["trial"] for c in calls} == {f.name} and len(calls) == 2
        sessions += {c["session"] for c in calls}
    assert len(set(sessions)) == 2
    assert trials[0]["t_begin"] < trials[1]["t_end"] and trials[1]["t_begin"] < trials[0]["t_end"]
