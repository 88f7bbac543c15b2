"""The batch's helpers: plans that nodes share, the machine's quiet, drift, and how a batch stands."""

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servers import adapter
from stages import csvfiles, drift, idle_check, plan, status, supervise, warm_up
from tests.fakes.openai_server import running

REPO = Path(__file__).resolve().parent.parent


# ---- plans


def test_nodes_that_plan_at_once_make_one_plan(tmp_path):
    (tmp_path / "l.txt").write_text("".join(f"tb@1/t{i}\n" for i in range(12)))

    def command(shard, reps):
        return [sys.executable, "stages/plan.py", "--plan", tmp_path / "traj/plan.csv", "--list", tmp_path / "l.txt", "--reps", str(reps),
                "--policies", "summarize-off summarize-on", "--shard", shard, "--show"]  # fmt: skip

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
    with pytest.raises(ValueError, match="line 2: .*a task fix-git stands there more than once, in line 1 too"):
        plan.read_list(tmp_path / "l.txt")


def test_a_trial_that_failed_for_infrastructure_reasons_is_not_measured(tmp_path):
    trial = {"mode": "live", "recording": None, "ended": "finished", "reason": None}
    for more, what in (({}, "measured"), ({"reason": "Harbor reports RuntimeError"}, "failed"), ({"ended": "server_down", "reason": "x"}, "failed")):
        (tmp_path / "trial.json").write_text(json.dumps(trial | more))
        assert plan.measured(tmp_path, "live", "") == what


# ---- a warm server


def test_warm_up_goes_on_until_no_call_waits_for_a_kernel():
    fit = {"terms": {"call": {"value": 0.05}}, "floor_above_uncached_tokens": 0}
    params = {"energy": {}, "time": fit}
    late = {2: 1.2, 6: 1.2}  # the third and the seventh call meet a size that is new

    def script(body, ordinal):
        return {"raw": "okay", "_latency": late.get(ordinal, 0)}

    with running(script) as server:
        calls, slow, seconds, warm = warm_up.warm_up(adapter.get("openai", server.url), "m", 4000, params, limit_s=30, calm=5)
        assert (calls, slow, warm) == (12, 2, True) and seconds > 2.4
        sizes = [len(r["body"]["messages"][0]["content"]) for r in server.log]
        assert len(set(sizes)) == 12 and any(b < a for a, b in zip(sizes, sizes[1:], strict=False))  # it grows, and begins anew
        assert warm_up.warm_up(adapter.get("openai", server.url), "m", 4000, params, limit_s=0, calm=5)[3] is False


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


def test_a_process_on_a_measured_gpu_that_is_not_the_servers_is_named(repo, nvml_dir, tmp_path):
    server = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    other, elsewhere = subprocess.Popen(["sleep", "61"]), subprocess.Popen(["sleep", "62"])
    try:
        worker = next(iter(supervise.descendants(server.pid)), None) or (time.sleep(0.5), supervise.descendants(server.pid)[0])[1]
        gone = 2**22 + 1  # in a container NVML may name pids of the host

        def check(gpus, note):
            fake = f"gpus=3,gpu0.pids={worker}+{gone}+{other.pid},gpu1.drawing={elsewhere.pid}"
            cmd = [sys.executable, "stages/idle_check.py", "--processes", "--gpus", gpus, "--server", note]
            env = os.environ | {"LD_LIBRARY_PATH": str(nvml_dir), "FAKE_NVML": fake}
            r = subprocess.run(cmd, cwd=repo, capture_output=True, text=True, env=env)
            return r.returncode, r.stdout.strip()

        note = tmp_path / "server-8000.json"
        assert check("0", note) == (0, "")  # no note: nobody knows whose the processes are
        note.write_text(json.dumps({"pid": server.pid, "supervisor": server.pid}))
        assert check("0", note) == (4, f"process {other.pid} is on a GPU that is measured and is not the server's: sleep 61")
        assert check("0,1", note)[1].count("\n") == 1 and check("2", note) == (0, "")
        other.terminate()
        other.wait()
        assert check("0", note) == (0, "")
    finally:
        for p in (other, elsewhere, server):
            for pid in (*supervise.descendants(p.pid), p.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            p.wait()


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
        assert r.stdout == "2 of 4 measured, 1 failed, 1 left; 150 J; waste 30 J in 2 attempts set aside; about 60 s left\n", r.stderr
    text = (tmp_path / "r/status.html").read_text()
    assert "a &lt; b" in text and "&lt;no server&gt;" in text and "stopped before its end" in text and 'name="viewport"' in text
    assert "http://" not in text and "https://" not in text and len(text) < 20000
    with open(tmp_path / "waste.csv") as f:
        assert [(r["trajectory"], r["energy_j"], r["domains"]) for r in csv.DictReader(f)] == [("c__p__r1", "30.0", "cpu0"), ("d__p__r1", "", "")]


def test_waste_stays_on_record_when_its_folder_is_gone_and_none_is_said_as_none(tmp_path):
    table, folder = tmp_path / "waste.csv", tmp_path / "traj_unfinished/a__p__r1.20260101T000000"
    assert status.wasted(tmp_path / "traj_unfinished", table) == [] and table.read_text() == ",".join(status.WASTE) + "\n"
    write_samples(folder / "samples.csv", 3, 10.0)
    assert status.wasted(tmp_path / "traj_unfinished", table)[0]["energy_j"] == 30.0
    folder.joinpath("samples.csv").unlink()
    folder.joinpath("samples.meta.json").unlink()
    folder.rmdir()
    assert [r["energy_j"] for r in status.wasted(tmp_path / "traj_unfinished", table)] == ["30.0"]


def test_status_of_what_is_no_batch_is_one_line(tmp_path, monkeypatch, capsys):
    def said(*args):
        monkeypatch.setattr(sys, "argv", ["status.py", "--traj", str(tmp_path / args[0]), "--waste", str(tmp_path / args[1])])
        with pytest.raises(SystemExit) as e:
            status.main()
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1
        return err

    (tmp_path / "traj").mkdir()
    (tmp_path / "traj/plan.csv").write_text(",".join(plan.FIELDS) + "\n")
    assert "no plan.csv" in said("nope", "waste.csv") and not (tmp_path / "batch").exists()
    head = ",".join(status.WASTE) + "\n"
    wrong = {"a,b\n1,2\n": "row 1: no trajectory, set_aside", head + "t,t.1,x,3,many,cpu0,rapl\n": "found 'many'", head + "t,t.1,x,3,-1,,\n": "found '-1'"}
    for text, what in wrong.items():
        (tmp_path / "waste.csv").write_text(text)
        assert what in said("traj", "waste.csv")


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
        assert "1 of 2 measured, 1 failed, 0 left" in err and "in 1 attempt set aside" in err
        with open(tmp_path / "data/waste.csv") as f:
            rows = list(csv.DictReader(f))
        assert [r["trajectory"] for r in rows] == ["broken__summarize-off__r1"] and float(rows[0]["energy_j"]) > 0
        code, err = batch(env | {"MAX_INFRA_FAILURES": "1"}, tmp_path, ["good", "broken"])
        assert code == 1
        assert "1 trials in a row failed for infrastructure reasons (MAX_INFRA_FAILURES), the last, broken__summarize-off__r1: Harbor reports" in err
        assert "good__summarize-off__r1 (" not in err  # what is measured stays
        assert len(csvfiles.read(tmp_path / "data/waste.csv")) == 2  # also when the batch ends at a failure
    assert "Set aside" in (tmp_path / "results/status.html").read_text()


@pytest.mark.integration
def test_what_an_interrupted_batch_used_is_waste_at_once(place, tmp_path):
    with running([DONE | {"_hang": True}]) as s:
        (tmp_path / "list.txt").write_text("good\n")
        p = subprocess.Popen(["bash", "06_run_batch.sh", tmp_path / "list.txt", "summarize-off", "1"], cwd=REPO, env=place | {"PORT": str(s.port)},
                             stderr=subprocess.PIPE, text=True)  # fmt: skip
        end = time.monotonic() + 100
        while not s.log and p.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        p.terminate()
        err = p.communicate(timeout=100)[1]
    assert p.returncode == 143 and "interrupted; " in err and s.log, err
    rows = csvfiles.read(tmp_path / "data/waste.csv")
    assert [(r["trajectory"], r["reason"]) for r in rows] == [("good__summarize-off__r1", "stopped before its end")] and float(rows[0]["energy_j"]) > 0
    assert not (tmp_path / "data/traj/good__summarize-off__r1").exists() and "1 attempt set aside" not in err


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


# ---- what 06_run_batch.sh decides, without a server


def ours(tmp_path, **more):
    settings = ("PROFILE", "MODE", "PORT", "PROXY_PORT", "GPUS", "CONCURRENCY")
    return {k: v for k, v in os.environ.items() if k not in settings} | {
        "PROFILE": "cpu-smollm2", "DATA_DIR": str(tmp_path / "data"), "RESULTS_DIR": str(tmp_path / "results"), "TRAJOULE_RUN_DIR": str(tmp_path / "run"),
        "MODE": "live", "GPUS": "none"} | more  # fmt: skip


@pytest.mark.parametrize("command", ["06_run_batch.sh {list} summarize-off 1 --shard 4/4", "slurm/shard.sh {list} summarize-off 1"])
def test_a_shard_of_nothing_ends_well_before_any_server(tmp_path, command):
    (tmp_path / "list.txt").write_text("tidy-files\nnested-archive\n")
    env = ours(tmp_path, SLURM_ARRAY_TASK_ID="4", SLURM_ARRAY_TASK_COUNT="4", SLURM_SUBMIT_DIR=str(REPO), TMPDIR=str(tmp_path))
    r = subprocess.run(["bash", *command.format(list=tmp_path / "list.txt").split()], cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    assert r.returncode == 0 and "nothing to do" in r.stderr.splitlines()[-1], r.stderr
    assert not (tmp_path / "data").exists()


def decide(tmp_path, script, **env):
    """Run a script with the functions of 06_run_batch.sh that decide whether it goes on, and with stand-ins for what they call."""
    functions = "unready() { check_machine() { name_of() { settle() {"
    take = " ".join(f"-e '/^{f}() {{/,/^}}/p'" for f in functions.replace("() {", "").split())
    script = f"source common.sh; source <(sed -n {take} 06_run_batch.sh); BATCH_DIR={tmp_path}; idle_power() {{ echo measured >&2; }}; {script}"
    r = subprocess.run(["bash", "-c", script], cwd=REPO, env=ours(tmp_path, **env), capture_output=True, text=True, timeout=60)
    return r.returncode, r.stdout, r.stderr


def test_a_trial_waits_for_the_disk_and_is_not_started_without(tmp_path):
    code, out, err = decide(tmp_path, "check_machine t1; echo on", CHECK_WAIT_S="0", MIN_FREE_MB="999999999", CHECK_IDLE_S="0")
    assert (code, out) == (1, "") and "ERROR: t1 was not started: " in err and "MB of disk are free, a trial needs MIN_FREE_MB=999999999" in err
    script = "SECONDS=0; free_mb() { echo $((SECONDS < 1 ? 5 : 50)); }; check_machine t1; echo on"
    code, out, err = decide(tmp_path, script, CHECK_WAIT_S="30", MIN_FREE_MB="10", CHECK_IDLE_S="0")
    assert (code, out) == (0, "on\n") and err.count("waiting, for at most 30 s: 5 MB of disk") == 1 and "measured" not in err


def test_a_trial_is_not_started_while_any_of_its_ports_is_taken(tmp_path, free_port):
    env = {"CHECK_WAIT_S": "0", "MIN_FREE_MB": "0", "CHECK_IDLE_S": "0"}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        for concurrency, first in (("1", taken), ("2", taken - 1)):
            code, out, err = decide(tmp_path, "check_machine t1; echo on", CONCURRENCY=concurrency, PROXY_PORT=str(first), **env)
            assert (code, out) == (1, "") and f"t1 was not started: port {taken} is taken" in err
    assert decide(tmp_path, "check_machine t1; echo on", PROXY_PORT=str(free_port()), **env)[:2] == (0, "on\n")


def test_a_trial_is_not_started_beside_a_foreign_process_on_the_gpus(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in (("nvidia-smi", "exit 0"), ("python", f"echo \"$*\" >>{tmp_path}/asked; echo process 77 holds the GPU")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"CHECK_WAIT_S": "0", "MIN_FREE_MB": "0", "CHECK_IDLE_S": "0", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PROXY_PORT": "9", "PORT": "8123"}
    script = f"PY={tmp_path}/bin/python; check_machine t1; echo on"
    code, out, err = decide(tmp_path, script, **env, **{"GPUS": "0"})
    assert (code, out) == (1, "") and "t1 was not started: process 77 holds the GPU" in err
    assert (tmp_path / "asked").read_text() == f"stages/idle_check.py --processes --gpus 0 --server {tmp_path}/run/server-8123.json\n"
    assert decide(tmp_path, script, **env)[:2] == (0, "on\n")  # GPUS=none: they are nobody's affair


def test_another_idle_power_is_waited_for_and_then_recorded_only(tmp_path):
    env = {"MIN_FREE_MB": "0", "PROXY_PORT": "9"}
    noisy = "idle_power() { echo \"$*\" >&2; n=$((${n:-0} + 1)); ((n > 2)) || return 4; }; check_machine t1; echo $n"
    code, out, err = decide(tmp_path, noisy, CHECK_WAIT_S="30", CHECK_IDLE_S="0.5", **env)
    assert (code, out) == (0, "3\n") and err == f"{tmp_path}/check.csv 0.5 --log {tmp_path}/checks.csv --before t1\n" * 3
    assert decide(tmp_path, noisy, CHECK_WAIT_S="0", CHECK_IDLE_S="0.5", **env)[:2] == (0, "1\n")
    assert decide(tmp_path, "check_machine t1", CHECK_WAIT_S="0", CHECK_IDLE_S="0.0", **env) == (0, "", "")


def test_a_batch_stops_after_so_many_failures_in_a_row_and_no_earlier(tmp_path):
    script = """ran=0 in_a_row=0 failed=()
    reason_of() { echo because; }
    for code in {codes}; do settle $'t\\tp\\t1' "$code"; done
    echo "$ran ${#failed[@]}" """
    for codes, code, out in (("3 3 0 3 3 0", 0, "6 4\n"), ("3 0 3 3 3 0", 1, ""), ("0 2 0", 2, ""), ("0 143 0", 143, "")):
        got = decide(tmp_path, script.replace("{codes}", codes), MAX_INFRA_FAILURES="3")
        assert got[:2] == (code, out), got[2]
    assert "3 trials in a row failed" in decide(tmp_path, script.replace("{codes}", "3 3 3"), MAX_INFRA_FAILURES="3")[2]
