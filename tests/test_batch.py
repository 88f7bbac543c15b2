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
