"""dist_test.py: a hang becomes a message in time. The deadlines are tested with plain processes, the check itself with torch where it is."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dist_test as dt

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def says(name, code):
    """A command that runs some Python; step(x) begins a step."""
    head = "import json, os, signal, sys, time\ndef step(x): print(json.dumps({'step': x}))\n"
    return {"name": name, "argv": [sys.executable, "-c", head + code]}


def by_name(runs):
    return {r["name"]: r for r in runs}


def test_commands_that_end_are_ok_and_their_results_are_kept():
    runs = dt.supervise([says("a", "step('one'); print(json.dumps({'x': 1})); print('a library talks')"), says("b", "step('one')")], 10)
    assert [r["state"] for r in runs] == ["ok", "ok"] and runs[0]["results"] == [{"x": 1}] and dt.explain(runs) == []


def test_a_process_that_stands_still_is_named_with_its_step():
    t0 = time.monotonic()
    runs = dt.supervise([says("rank 0", "step('meet'); step('all-reduce'); time.sleep(600)"), says("rank 1", "step('meet')")], 1, grace_s=0.5)
    assert time.monotonic() - t0 < 10
    assert by_name(runs)["rank 0"]["state"] == "hung" and by_name(runs)["rank 1"]["state"] == "ok"
    assert dt.explain(runs) == ["rank 0 hangs in step 'all-reduce'"]
    assert "NCCL_P2P_DISABLE=1" in dt.ADVICE[dt.failed_step(runs)] and "--disable-custom-all-reduce" in dt.ADVICE[dt.failed_step(runs)]


def test_a_stopped_process_hangs_and_is_killed():
    code = "step('all-reduce'); print(json.dumps({'pid': os.getpid()}), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    (run,) = dt.supervise([says("rank 0", code)], 1, grace_s=0.1)
    assert run["state"] == "hung" and not run["stuck"]
    with pytest.raises(ProcessLookupError):
        os.kill(run["results"][0]["pid"], 0)


def test_every_step_has_its_own_deadline():
    (run,) = dt.supervise([says("a", "for x in 'abcd': step(x); time.sleep(0.4)")], 1.2, start_timeout_s=30)
    assert run["state"] == "ok", "1.6 s in all, no step longer than 0.4 s"
    (run,) = dt.supervise([says("a", "time.sleep(600)")], 60, start_timeout_s=0.5, grace_s=0.1)
    assert (run["state"], run["step"]) == ("hung", "start")
    (run,) = dt.supervise([says("a", "print(json.dumps({'step': 'import torch', 'allow_s': 30})); time.sleep(1.5)")], 0.3)
    assert run["state"] == "ok", "a slow import is no hang"


def test_a_failure_ends_the_others_and_comes_first_in_the_advice():
    runs = dt.supervise([says("rank 0", "step('all-reduce'); time.sleep(600)"), says("rank 1", "step('start CUDA'); sys.exit('no driver')")], 60,
                        grace_s=0.3)
    found = by_name(runs)
    assert found["rank 0"]["state"] == "killed" and found["rank 1"]["state"] == "failed"
    assert dt.explain(runs) == ["rank 1 failed in step 'start CUDA' (exit 1): no driver"]
    assert dt.failed_step(runs) == "start CUDA"


def test_a_crash_by_signal_is_said():
    runs = dt.supervise([says("rank 0", "step('copy'); os.kill(os.getpid(), signal.SIGSEGV)")], 10)
    assert dt.explain(runs) == ["rank 0 failed in step 'copy' (signal 11): nothing on stderr"]


def test_much_output_does_not_block_a_process():
    (run,) = dt.supervise([says("a", "sys.stderr.write('x' * 1000000); print('y' * 1000000); step('last')")], 20)
    assert run["state"] == "ok" and run["step"] == "last" and len(run["errors"]) <= 4000


def test_children_die_with_their_parent(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import subprocess\np = subprocess.Popen(['sleep', '600'])\nopen({str(pid_file)!r}, 'w').write(str(p.pid))\nstep('x'); time.sleep(600)"
    dt.supervise([says("a", code)], 1, grace_s=0.1)
    pid = int(pid_file.read_text())
    for _ in range(50):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.1)
                continue
        return
    pytest.fail(f"process {pid} outlived its group")


def test_wrong_data_is_not_success():
    run = {"name": "rank 0", "state": "ok", "results": [{"rank": 0, "bytes": 16, "right": False, "ms": 1.0}]}
    assert not dt.works([run]) and not dt.works([{**run, "results": []}])
    assert dt.works([{**run, "results": [{**run["results"][0], "right": True}]}])


def check(repo, *more, timeout=120, env=None):
    r = subprocess.run([sys.executable, str(repo / "dist_test.py"), *more], capture_output=True, text=True, timeout=timeout,
                       env={**os.environ, **(env or {})})
    assert "Traceback" not in r.stderr, r.stderr
    return r.returncode, r.stdout, r.stderr


@pytest.mark.parametrize(("more", "message"), [
    (["--world-size", "1"], "at least 2 ranks"),
    (["--gpus", "0,1,2", "--world-size", "2"], "one per rank"),
    (["--gpus", "0,0"], "different whole numbers"),
    (["--ranks", "2", "--master-port", "1"], "are 0 to 1"),
    (["--ranks", "0"], "needs --master-port"),
    (["--step-timeout-s", "0"], "more than 0"),
])
def test_bad_input(repo, more, message):
    code, _, err = check(repo, *more)
    assert code == 2 and message in err


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_it_says_so(repo):
    code, out, err = check(repo)
    assert code == 2 and out == "" and "torch is not installed" in err and len(err.splitlines()) == 1


@needs_torch
@pytest.mark.integration
def test_without_gpus_it_says_so(repo):
    code, _, err = check(repo, env={"CUDA_VISIBLE_DEVICES": ""})
    assert code == 2 and "sees 0 GPUs" in err and "--backend gloo" in err


@needs_torch
@pytest.mark.integration
def test_gloo_between_processes(repo):
    code, out, _ = check(repo, "--backend", "gloo", "--size-mb", "1", "--world-size", "3")
    assert code == 0 and out.splitlines()[-1] == "OK" and "over 3 ranks: right" in out


@needs_torch
@pytest.mark.integration
def test_a_rank_that_never_comes(repo, free_port):
    code, out, _ = check(repo, "--backend", "gloo", "--ranks", "0", "--master-port", str(free_port()), "--step-timeout-s", "3")
    assert code == 1 and "rank 0 hangs in step 'meet'" in out and "rank 1 of 2 is started elsewhere" in out


@needs_torch
@pytest.mark.integration
def test_ranks_started_apart_find_each_other(repo, free_port):
    port, got = str(free_port()), {}

    def start(rank):
        got[rank] = check(repo, "--backend", "gloo", "--ranks", rank, "--master-port", port, "--size-mb", "1")

    threads = [threading.Thread(target=start, args=(r,)) for r in "01"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[r][0] for r in "01"] == [0, 0]


@needs_torch
@pytest.mark.integration
def test_a_rank_that_stops_in_the_middle(repo):
    p = subprocess.Popen([sys.executable, str(repo / "dist_test.py"), "--backend", "gloo", "--no-remedies", "--size-mb", "256", "--step-timeout-s", "5"],
                         stdout=subprocess.PIPE, text=True)
    stopped = None
    while stopped is None:
        time.sleep(0.05)
        for child in Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                if "--worker" in line and json.loads(line[line.index("--worker") + 1]).get("rank") == 1:
                    stopped = int(child)
    time.sleep(1)
    os.kill(stopped, signal.SIGSTOP)
    out = p.communicate(timeout=200)[0]
    assert p.returncode == 1 and "rank 1 hangs in step" in out
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
