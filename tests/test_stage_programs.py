"""The helper programs of a batch say in one line which of their files is wrong."""

import asyncio
import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


def run(program, *args):
    """A program in this process, which spares the imports of its start."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [program, *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module(program.removesuffix(".py").replace("/", ".")).main()
    except SystemExit as e:
        code = e.code
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(sys.argv, code or 0, out.getvalue(), err.getvalue())


def start(program, *args, **env):
    return subprocess.run([sys.executable, program, *map(str, args)], cwd=REPO, capture_output=True, text=True, timeout=50, env=os.environ | env)


def refused(r, *says, code=2):
    """The program ended with one line that says all of this."""
    assert r.returncode == code and r.stderr.count("\n") == 1, r.stderr
    assert all(str(s) in r.stderr for s in says), r.stderr
    return True


def write_samples(path, rows=21, power_w=10.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("t,mono,cpu0_uj\n" + "".join(f"{1e9 + i / 10:.6f},{i / 10:.6f},{int(power_w * i * 1e5)}\n" for i in range(rows)))
    return path


# ---- idle_check


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "no 'idle'"),
        ("[]", "list indices"),
        ('{"idle": 3}', "not subscriptable"),
        ('{"idle": {"loaded": {"cpu0": {}}}}', "no 'between_calls_w'|no 'power_w'"),
        ('{"idle": {"loaded": {"cpu0": {"power_w": -1}}}}', "found -1, expected watts"),
        ("{", "Expecting property name"),
    ],
)
def test_a_calibration_that_cannot_be_read_is_named_by_idle_check_and_drift(tmp_path, text, said):
    (tmp_path / "params.json").write_text(text)
    r = run("stages/idle_check.py", "--idle", write_samples(tmp_path / "s.csv"), "--calib", tmp_path)
    assert refused(r, tmp_path / "params.json", "calibrate anew") and any(s in r.stderr for s in said.split("|")), r.stderr
    write_reference(tmp_path)
    r = run("stages/drift.py", "check", "--calib", tmp_path, "--calls", write_call(tmp_path / "c.jsonl"), "--samples", tmp_path / "s.csv")
    assert refused(r, "drift: ", tmp_path / "params.json", "calibrate anew")


@pytest.mark.parametrize(("rows", "said"), [(1, "found one sample, expected two"), (0, "found no row")])
def test_too_few_samples_are_no_quiet_machine(tmp_path, rows, said):
    r = run("stages/idle_check.py", "--idle", write_samples(tmp_path / "s.csv", rows), "--log", tmp_path / "log.csv")
    assert refused(r, tmp_path / "s.csv", said) and r.stdout == "" and not (tmp_path / "log.csv").exists()


def test_a_counter_without_readings_is_no_quiet_machine(tmp_path):
    (tmp_path / "s.csv").write_text("t,mono,cpu0_uj,cpu1_uj\n" + "".join(f"{1e9 + i},{i},{i * 10**7},{5 if not i else ''}\n" for i in range(5)))
    r = run("stages/idle_check.py", "--idle", tmp_path / "s.csv")
    assert refused(r, tmp_path / "s.csv", "cpu1: found too few readings") and "cpu0: 10.00 W" in r.stdout and "nan" not in r.stdout


def test_processes_of_gpus_that_cannot_be_asked_for_are_one_line(tmp_path):
    without_driver = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert refused(start("stages/idle_check.py", "--processes", "--gpus", "0", **without_driver), "--gpus 0: NVML does not start")


def test_a_servers_note_that_is_none_is_named(nvml_dir, tmp_path):
    env = {"LD_LIBRARY_PATH": str(nvml_dir), "FAKE_NVML": f"gpus=1,gpu0.pids={os.getpid()}"}
    for text in ("{}", "[]"):
        (tmp_path / "server-1.json").write_text(text)
        r = start("stages/idle_check.py", "--processes", "--gpus", "0", "--server", tmp_path / "server-1.json", **env)
        assert refused(r, "server-1.json: found no pid")


# ---- drift


def write_reference(folder, **cells):
    row = {"context": "8", "output": "4", "state": "miss", "reference": "start", "unused": "", "duration_s": "1.0", "cpu_total_j": "10"} | cells
    (folder / "calls_energy.csv").write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")


def write_call(path, **more):
    call = {"valid": True, "cell": {"context": 8, "output": 4, "state": "miss"}, "t_start": 1e9 + 0.2, "t_end": 1e9 + 1.2, "mono_start": 0.2, "mono_end": 1.2}
    path.write_text(json.dumps(call | more) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "line 2: no context, output, state, reference, unused, duration_s"),
        (b"context\n\xe9\n", "UTF-8"),
        ("context,output,state,reference,unused,duration_s\n8,4,miss,start,,\n", "line 2, duration_s: found '', expected a number above 0"),
        ("context,output,state,reference,unused,duration_s\nx,4,miss,start,,1\n", "line 2, context: found 'x'"),
        ("context,output,state,reference,unused,duration_s\n8,4,miss,,,1\n", "0 reference cells"),
        (None, "not found"),
    ],
)
def test_calls_without_a_reference_cell_are_named(tmp_path, text, said):
    if text is not None:
        (tmp_path / "calls_energy.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert refused(run("stages/drift.py", "cell", "--calib", tmp_path), f"drift: {tmp_path}/calls_energy.csv", said)


def test_what_drift_compares_must_be_there(tmp_path):
    r = run("stages/drift.py", "check", "--calib", tmp_path)
    assert r.returncode == 2 and r.stderr.splitlines()[-1] == "drift.py: error: check needs --calls and --samples"
    write_reference(tmp_path)
    (tmp_path / "params.json").write_text('{"idle": {"loaded": {}}}')
    check = ["stages/drift.py", "check", "--calib", tmp_path, "--samples", write_samples(tmp_path / "s.csv"), "--calls"]
    for more, said in (({"cell": 1}, "call 1: "), ({"t_end": None}, "call 1: "), ({"valid": False}, "no valid call")):
        assert refused(run(*check, write_call(tmp_path / "c.jsonl", **more)), f"{tmp_path}/c.jsonl", said)
    other = {"cell": {"context": 8, "output": 4, "state": "hit"}}
    assert refused(run(*check, write_call(tmp_path / "c.jsonl", **other)), "no usable call of the reference cell 8/4 hit")
    r = run(*check, write_call(tmp_path / "c.jsonl"))
    assert r.returncode == 0 and "time +0.0%, cpu +0.0%" in r.stdout, r.stderr


# ---- status

GOOD = {"ended": "finished", "reason": None, "reward": 1.0, "mode": "live", "recording": None, "t_end": 1000.0}


@pytest.fixture
def batch(tmp_path):
    """A batch of the trials a, b, of which a is measured; a function that asks how it stands."""
    (tmp_path / "traj").mkdir()
    (tmp_path / "traj/plan.csv").write_text("order,task,policy,rep,mode,recording,seed\n1,a,p,1,live,,1\n2,b,p,1,live,,1\n")
    write_samples(tmp_path / "traj/a__p__r1/samples.csv", 51)
    (tmp_path / "traj/a__p__r1/trial.json").write_text(json.dumps(GOOD))
    (tmp_path / "traj/b__p__r1").mkdir()
    (tmp_path / "batch").mkdir()
    return lambda: run("stages/status.py", "--traj", tmp_path / "traj", "--waste", tmp_path / "waste.csv", "--out", tmp_path / "s.html")


@pytest.mark.parametrize("entry", [{"t_end": 1000.0}, [1], None, {"t_end": 1000.0, "seconds": "x", "joules": "y", "domains": "", "sources": ""}])
def test_an_entry_of_energy_json_that_is_none_is_made_anew(tmp_path, batch, entry):
    (tmp_path / "batch/energy.json").write_text(json.dumps({"a__p__r1": entry}))
    r = batch()
    assert (r.returncode, r.stdout, r.stderr) == (0, "1 of 2 measured, 0 failed, 1 left; 50 J\n", "")
    assert json.loads((tmp_path / "batch/energy.json").read_text())["a__p__r1"]["joules"] == 50.0


@pytest.mark.parametrize("text", ["[1]", "{", '{"t_end": "x"}', '{"t_end": 1, "reward": [1]}', "7", '"x"'])
def test_a_trial_that_cannot_be_read_is_named_and_left_out(tmp_path, batch, text):
    (tmp_path / "traj/b__p__r1/trial.json").write_text(text)
    r = batch()
    assert refused(r, f"status: {tmp_path}/traj/b__p__r1/trial.json: found ", "left out", code=0)
    assert r.stdout == "1 of 2 measured, 0 failed, 1 left; 50 J\n" and (tmp_path / "s.html").exists()
    (tmp_path / "batch/energy.json").write_text(text)  # that of all trials
    assert batch().returncode == 0
    aside = tmp_path / "traj_unfinished/b__p__r1.1"
    aside.mkdir(parents=True)
    (aside / "trial.json").write_text(text)
    assert "waste 0 J in 1 attempt set aside" in batch().stdout


def test_what_ran_together_is_read_with_care(tmp_path, batch):
    for shared in ([1], 3, {"members": 7}):
        (tmp_path / "traj/a__p__r1/trial.json").write_text(json.dumps(GOOD | {"shared": shared}))
        (tmp_path / "batch/energy.json").unlink(missing_ok=True)
        assert batch().returncode == 0


# ---- supervise


@pytest.mark.parametrize("note", ["{}", "[]", "{", '{"pid": "x", "start": 1, "supervisor": 1, "supervisor_start": 1}'])
def test_a_note_that_is_none_is_named_and_replaced(tmp_path, note):
    (tmp_path / "x.json").write_text(note)
    r = start("stages/supervise.py", "--name", "x", "--", "touch", tmp_path / "ran", TRAJOULE_RUN_DIR=str(tmp_path))
    assert refused(r, f"supervise: {tmp_path}/x.json: found no note of a process group", code=0)
    assert (tmp_path / "ran").exists() and not (tmp_path / "x.json").exists()


def test_a_command_that_cannot_be_logged_or_noted_is_not_run(tmp_path):
    (tmp_path / "file").touch()
    touch = ["--", "sh", "-c", f"sleep 1; touch {tmp_path}/ran"]
    r = start("stages/supervise.py", "--log", tmp_path / "file/log", *touch)
    assert refused(r, f"supervise: --log {tmp_path}/file/log: Not a directory; without its log sh is not run", code=125)
    for folder in (tmp_path / "file/run", Path("/proc/none")):
        r = start("stages/supervise.py", "--name", "x", *touch, TRAJOULE_RUN_DIR=str(folder))
        assert refused(r, f"supervise: {folder}/x.json: ", "without this note sh is not run", code=125)
    assert not (tmp_path / "ran").exists()


# ---- modules that are no programs


@pytest.mark.parametrize("module", ["stages/report.py", "stages/oracle_env.py"])
def test_a_module_that_is_no_program_says_so(module, tmp_path):
    for args, code in ((["--help"], 0), ([], 2)):
        r = subprocess.run([sys.executable, REPO / module, *args], cwd=tmp_path, capture_output=True, text=True, timeout=50)
        assert r.returncode == code and "No program" in r.stdout and r.stderr == ""


# ---- oracle_env

DOCKER = """#!/bin/bash
echo "$*" >>"$0.calls"
case "$*" in
  *"image inspect"*RepoDigests*) [ ! -e "$0.local" ] || exit 1; echo "python@sha256:abc" ;;
  *inspect*|info*|version*) echo linux ;;
  *" pull "*|*" build"*) sleep 0.2; [ ! -e "$0.broken" ] || { echo "no such host"; exit 17; } ;;
esac
"""


@pytest.fixture
def timed_docker(tmp_path, monkeypatch):
    """A function that starts a TimedDocker with a docker that only notes how it is called; returns what docker.json says, and the calls."""
    pytest.importorskip("harbor")
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    from stages import oracle_env

    docker, trial = tmp_path / "bin/docker", tmp_path / "trial"
    for folder in (docker.parent, trial, tmp_path / "environment"):
        folder.mkdir()
    (tmp_path / "environment/Dockerfile").write_text("FROM python\n")
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")

    def begin(image=None, fails=None):
        if fails:
            docker.with_name(f"docker.{fails}").touch()
        config = EnvironmentConfig(docker_image=image)
        env = oracle_env.TimedDocker(environment_dir=tmp_path / "environment", environment_name="t", session_id="t__1",
                                     trial_paths=TrialPaths(trial), task_env_config=config)  # fmt: skip
        with pytest.raises(RuntimeError, match="no such host") if fails == "broken" else contextlib.nullcontext():
            asyncio.run(env.start(force_build=False))
        return json.loads((trial / "docker.json").read_text()), docker.with_name("docker.calls").read_text()

    return begin


def test_a_pull_is_timed_apart_from_the_start_and_its_digest_noted(timed_docker):
    note, calls = timed_docker("python:3")
    assert 0.2 <= note.pop("seconds") < 20 and note == {"phase": "pull", "failed": False, "image": "python@sha256:abc"}
    assert 0 < calls.index(" pull --policy missing") < calls.index(" up ") and " build" not in calls


def test_a_build_is_timed_and_has_no_digest(timed_docker):
    note, calls = timed_docker()
    assert 0.2 <= note.pop("seconds") < 20 and note == {"phase": "build", "failed": False}
    assert " pull " not in calls and "RepoDigests" not in calls


@pytest.mark.parametrize(("image", "phase"), [("python:3", "pull"), (None, "build")])
def test_what_failed_of_docker_is_noted(timed_docker, image, phase):
    note, calls = timed_docker(image, fails="broken")
    assert note.pop("seconds") >= 0.2 and note == {"phase": phase, "failed": True} and " up " not in calls


def test_an_image_without_a_digest_is_noted_as_none(timed_docker):
    assert timed_docker("python:3", fails="local")[0]["image"] is None
