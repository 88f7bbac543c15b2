"""Facts about sampler.py: the real binding on a fake NVML, a fake powercap tree, simulated counters, this machine's own clock."""

import contextlib
import csv
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from fakes.counters import RecordedCounter, SteppingCounter, VirtualClock, latency_like_h200
from fakes.powercap import RANGE_UJ, Powercap

import sampler
from energylib import read_samples
from sampler import Rapl, Tracker

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the fake NVML")


@pytest.fixture
def run(repo, tmp_path):
    """run(args, nvml=settings, ...) -> (exit code, stderr, path of the CSV); the sampler in a process of its own."""

    def start(*args, nvml_dir=None, nvml=None, name="samples", **env):
        env = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
        env.pop("CUDA_VISIBLE_DEVICES", None) if "CUDA_VISIBLE_DEVICES" not in env else None
        if nvml_dir:
            env |= {"LD_LIBRARY_PATH": str(nvml_dir), "FAKE_NVML": nvml or "gpus=1"}
        command = [sys.executable, repo / "sampler.py", "-o", tmp_path / f"{name}.csv", *map(str, args)]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True), tmp_path / f"{name}.csv"

    def finish(*args, **kw):
        process, path = start(*args, **kw)
        _, err = process.communicate(timeout=60)
        return process.returncode, err, path

    finish.start = start
    return finish


def wait_for(path, process, fact):
    """Wait until `fact` is true of the whole data rows that the running sampler has written."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        rows = path.read_text().split("\n")[1:-1] if path.exists() else []
        if fact(rows):
            return rows
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    raise AssertionError(f"not within 30 s: {len(rows)} rows, the last {rows[-1:]}")


def wait_for_rows(path, process, n=1):
    return wait_for(path, process, lambda rows: len(rows) >= n)


def meta(path):
    """What the sidecar says."""
    return json.loads(path.with_suffix(".meta.json").read_text())


def footer(path):
    return json.loads(path.with_suffix(".meta.json").read_text())["footer"]


def undisturbed(foot, read_ms):
    """Whether the machine let the sampler run: no row was late, and reads took as long as the fake's. How narrow intervals are and how many
    steps are seen can be asked only then; the simulated counters ask it always."""
    reads = [g["read_ms"] for g in foot["gpus"].values()]
    return foot["largest_gap_s"] < 0.12 and all(r["p50"] < 1.15 * read_ms and r["p90"] < 1.5 * read_ms for r in reads)


def gpu_truth(samples, gpu, power_w=125.0):
    """(estimated minus true step time, half-width) per row; the fake's values say when they appeared."""
    edge = samples.mono - (samples.t - samples.columns[f"gpu{gpu}_edge"])
    true = samples.columns[f"gpu{gpu}_mj"] / (power_w * 1e3)
    return edge - true, samples.columns[f"gpu{gpu}_edge_err"]


# --- step tracking in simulated time --------------------------------------------------------------------------------------------


def track(counter, latency, duration_s, where=None, seed=1, read=None, tick_s=0.1):
    """Run a tracker in virtual time -> (tracker, steps found as rows value, edge, half, read at)."""
    clock, found = VirtualClock(counter, latency, seed, where), []
    tracker = Tracker(
        read or clock.read, clock.now, clock.sleep_until, lambda *step: found.append(step), tick_s, lambda: clock.t >= duration_s
    )
    tracker.run()
    return tracker, found


def score(counter, tracker, found, duration_s):
    """(median half-width, limit, share of steps inside the interval, reads per second, steps per second)"""
    halves = [half for _, _, half, _ in found]
    inside = np.mean([abs(counter.true_edge(value) - edge) <= half + 1e-9 for value, edge, half, _ in found])
    limit = max(0.005, np.median(tracker.latency) / 2 + 0.001)
    return np.median(halves), limit, inside, tracker.reads / duration_s, len(found) / duration_s


@pytest.mark.parametrize("latency_s", [0.0001, 0.001, 0.003, 0.004, 0.006])
@pytest.mark.parametrize("drift", [0.0, 0.01, -0.01])
@pytest.mark.parametrize("period_s", [0.05, 0.1])
def test_steps_are_located_to_milliseconds_with_few_reads(period_s, drift, latency_s):
    for seed, where in ((1, None), (2, 0.5), (3, 1.0), (4, 0.0)):
        counter = SteppingCounter(seed, period_s, drift=drift, duration_s=40)
        half, limit, inside, reads, steps = score(counter, *track(counter, latency_like_h200(latency_s), 40, where, seed), 40)
        assert half <= limit * 1.03 and inside >= 0.985 and reads <= 30 and steps > 9


@pytest.mark.parametrize("latency_s", [0.0001, 0.001, 0.003])
@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_a_counter_that_steps_every_20_ms_is_followed_at_every_fifth_step(latency_s, drift):
    for seed, where in ((5, 0.5), (32, 0.5), (32, None), (11, 1.0), (18, 0.0)):
        counter = SteppingCounter(seed, 0.02, drift=drift, duration_s=40)
        half, limit, inside, reads, steps = score(counter, *track(counter, latency_like_h200(latency_s), 40, where, seed), 40)
        assert half <= limit and inside >= 0.99 and reads <= 30 and steps > 9


@pytest.mark.parametrize("latency_s", [0.004, 0.006, 0.008, 0.012])
@pytest.mark.parametrize("drift", [0.0, 0.01])
@pytest.mark.parametrize("where", [None, 0.0, 0.5, 1.0])
def test_long_reads_locate_a_counter_of_20_ms_as_well(latency_s, drift, where):
    """Every setting of bench/sampler_steps.csv, fewer runs of it. The moment inside a read of 12 ms at random: see the next test."""
    if where is None and latency_s > 0.01:
        return
    runs = []
    for seed in range(4):
        counter = SteppingCounter(seed, 0.02, drift=drift, duration_s=40)
        runs.append(score(counter, *track(counter, latency_like_h200(latency_s), 40, where, seed), 40))
    half, limit, inside, reads, steps = np.mean(runs, axis=0)
    assert half <= limit * 1.02 and inside >= 0.98 and max(r[3] for r in runs) <= 30.05 and steps > 7


def test_reads_that_see_a_counter_of_20_ms_anywhere_in_12_ms_are_taken_in_pairs_and_say_so():
    for seed in range(2):
        counter = SteppingCounter(seed, 0.02, duration_s=40)
        tracker, found = track(counter, latency_like_h200(0.012), 40, None, seed)
        half, _, inside, reads, steps = score(counter, tracker, found, 40)
        assert half == pytest.approx(np.median(tracker.latency), rel=0.05) and inside >= 0.99 and reads <= 30 and steps > 6


def test_a_flip_that_is_somewhere_else_is_found_again():
    """The filter is put half a period off: pairs of reads tell, intervals stay true meanwhile."""
    counter = SteppingCounter(3, 0.02, duration_s=60)
    clock, found = VirtualClock(counter, latency_like_h200(0.008), 3, 0.5), []
    tracker = Tracker(clock.read, clock.now, clock.sleep_until, lambda *step: found.append(step), 0.1, lambda: clock.t >= 10)
    tracker.run()
    tracker.flip += 0.01
    tracker.stopped = lambda: clock.t >= 60
    while not tracker.stopped() and tracker._follow():
        pass
    late = [(value, edge, half) for value, edge, half, at in found if at > 14]
    assert np.mean([abs(counter.true_edge(value) - edge) <= half for value, edge, half in late]) >= 0.98 and len(late) > 300
    assert np.median([half for *_, half in late]) <= 0.0051


@pytest.mark.parametrize("latency_s", [0.008, 0.012])
@pytest.mark.parametrize("where", [None, 0.0, 0.5, 1.0])
def test_long_reads_of_varying_length_are_located_to_half_their_length_and_a_millisecond(latency_s, where):
    runs = []
    for period in (0.05, 0.1):
        for drift in (0.0, 0.01):
            for seed in range(4):
                counter = SteppingCounter(seed, period, drift=drift, duration_s=40)
                runs.append(score(counter, *track(counter, latency_like_h200(latency_s), 40, where, seed), 40))
    half, limit, inside, reads, steps = np.array(runs).T
    assert np.median(half - limit) <= 0 and inside.mean() >= 0.99 and reads.max() <= 30 and steps.min() > 9


@pytest.mark.parametrize("latency_s", [0.008, 0.012])
def test_long_reads_are_located_to_half_their_length(latency_s):
    counter = SteppingCounter(6, duration_s=40)
    half, limit, inside, reads, _ = score(counter, *track(counter, lambda rng: latency_s, 40, 0.5), 40)
    assert half <= limit and inside >= 0.99 and reads <= 30


def test_the_recorded_h200_counter_is_followed(repo):
    counter = RecordedCounter(repo / "tests/data/h200_qwen3_30b_a3b/nvml_poll.csv.gz")
    tracker, found = track(counter, latency_like_h200(0.003), 300)
    half, limit, inside, reads, steps = score(counter, tracker, found, 300)
    assert half <= limit and inside >= 0.99 and reads <= 30 and steps > 9.9
    assert tracker.period == pytest.approx(0.1, abs=0.0005) and tracker.locks == 1


def test_s22_the_period_is_learned(repo):
    for period in (0.02, 0.05, 0.1, 0.25):
        counter = SteppingCounter(3, period, duration_s=20)
        assert track(counter, latency_like_h200(0.001), 20)[0].period == pytest.approx(period, rel=0.02)


@pytest.mark.parametrize("seed", [2, 5, 7])
def test_a_lost_counter_is_found_again_and_nothing_wrong_is_said_meanwhile(seed):
    counter = SteppingCounter(seed, duration_s=60)
    first, second = SteppingCounter(seed, duration_s=60), SteppingCounter(seed + 6, 0.08, duration_s=60, start_mj=80_000_000)
    split = counter.values.index(next(v for v, e in zip(first.values, first.edges, strict=True) if e > 30))
    later = [(e, v) for e, v in zip(second.edges, second.values, strict=True) if e > 30.2]
    counter.edges, counter.values = first.edges[:split] + [e for e, _ in later], first.values[:split] + [v for _, v in later]
    tracker, found = track(counter, latency_like_h200(0.003), 60)
    tail = [abs(counter.true_edge(v) - e) <= h for v, e, h, at in found if at > 30]
    assert tracker.period == pytest.approx(0.08, rel=0.01) and np.mean(tail) > 0.99 and len(tail) > 9 * 29


def test_errors_are_retried_and_counted():
    counter = SteppingCounter(4, duration_s=30)
    clock, found, calls = VirtualClock(counter, latency_like_h200(0.001), 1), [], [0]

    def flaky():
        calls[0] += 1
        value = clock.read()
        if calls[0] % 17 == 0 or 300 < calls[0] < 340:
            raise OSError("GPU is busy")
        return value

    tracker = Tracker(flaky, clock.now, clock.sleep_until, lambda *step: found.append(step), 0.1, lambda: clock.t >= 30)
    tracker.run()
    assert tracker.errors > 30 and tracker.failures >= 1 and len(found) > 8 * 25
    assert np.mean([abs(counter.true_edge(v) - e) <= h for v, e, h, _ in found]) > 0.98


def test_a_counter_without_steps_is_asked_less_often():
    class Still:
        edges, values = [-1.0], [5]

        def at(self, t):
            return 5

    tracker, found = track(Still(), latency_like_h200(0.001), 60)
    assert not found and tracker.reads / 60 < 31


def test_a_counter_that_changes_with_every_read_is_read_once_a_tick():
    class Smooth:
        def at(self, t):
            return int(1e9 * t)

    tracker, found = track(Smooth(), latency_like_h200(0.002), 20)
    assert 9 < len(found) / 20 < 13 and tracker.period is None
    assert np.median([half for _, _, half, _ in found]) < 0.002


# --- the real binding on a fake NVML --------------------------------------------------------------------------------------------


@needs_cc
def test_a_gpu_is_sampled_through_the_real_binding(run, nvml_dir):
    code, err, path = run("--duration", 4, nvml_dir=nvml_dir, nvml="gpus=1,latency_us=3000,long_us=12000")
    assert code == 0, err
    samples = read_samples(path)
    error, half = gpu_truth(samples, 0)
    foot = footer(path)
    if undisturbed(foot, 3.0):
        assert np.mean(np.abs(error) <= half) > 0.95 and np.median(half) < 0.0075 and foot["achieved_hz"] == pytest.approx(10, abs=0.3)
    e = samples.energy(samples.t_begin + 0.5, samples.t_end - 0.5)
    assert e.joules["gpu0"][0] == pytest.approx(125 * (samples.t_end - samples.t_begin - 1), rel=0.02)
    assert samples.source["gpu0"] == "nvml" and e.method["gpu0"] == "edges"
    meta = samples.meta
    gpu, counter = meta["gpus"][0], meta["counters"]["gpu0_mj"]
    assert gpu["uuid"].startswith("GPU-af7b61d0") and gpu["pci"] == "00000000:18:00.0" and gpu["ecc"] == 1 and gpu["mig"] == 0
    assert gpu["application_clocks_mhz"] == {"sm": 1980, "memory": 3201} and gpu["power_limit_w"] == 700 and gpu["persistence_mode"] == 1
    assert counter["scope"] == "gpu" and counter["update_period_s"] == pytest.approx(0.1, abs=0.003)
    assert foot["gpus"]["gpu0"]["reads_per_s"] < 40 and foot["ended"] == "duration"  # 30, and the reserve of the search
    state = path.with_name("state.csv").read_text().splitlines()
    assert state[0] == "t,mono,gpu0_temp_c,gpu0_sm_mhz,gpu0_mem_mhz,gpu0_throttle_reasons,gpu0_util_pct,cpu_util_pct"
    assert state[1].split(",")[2:7] == ["41", "1980", "3201", "4", "97"] and len(state) <= 6


def of_threads(pid, file, take):
    """Sum over the threads of a process of what `take` finds in their /proc file."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += take(pathlib.Path(f"/proc/{pid}/task/{task}/{file}").read_text())
    return total


@needs_cc
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count CPU time to the nanosecond")
def test_one_gpu_at_10_hz_wakes_the_cpu_seldom(run, nvml_dir):
    """What decides about the sampler's CPU use where reads are not themselves CPU time (the fake's sleep): how often it wakes. How long a wake-up
    takes is the machine's: 0.05 to 0.1 ms where nothing else runs, so 100 a second are below 1 % of a core. The footer's CPU time is the kernel's."""
    process, path = run.start("--gpus", "0", "--powercap", "/nowhere", nvml_dir=nvml_dir, nvml="gpus=1,latency_us=3000")
    first = len(wait_for_rows(path, process))
    time.sleep(1.5)  # the search of the counter's period reads more often

    def count():
        wakes = of_threads(process.pid, "status", lambda text: int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M)[1]))
        return wakes, of_threads(process.pid, "schedstat", lambda text: int(text.split()[0])) / 1e9, time.monotonic()

    wakes, before, begin = count()
    time.sleep(3)
    now = count()
    wakes, spent, seconds = now[0] - wakes, now[1], now[2] - begin
    rows = len(wait_for_rows(path, process)) - first
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    print(f"{wakes / seconds:.0f} wake-ups a second, {100 * (spent - before) / seconds:.2f} % of a core")
    assert wakes < 100 * seconds and rows > 5 * seconds
    assert spent - before - 0.02 < footer(path)["sampler_cpu_s"] < spent + 0.1, "the footer says the same, less the start"


def test_an_output_that_is_a_folder_is_bad_input(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        sampler.main(["-o", str(tmp_path), "--cpu-model"])
    assert stop.value.code == 2 and f"-o {tmp_path}: is a folder, expected a file" in capsys.readouterr().err


@pytest.mark.parametrize("same", [("--meta", "s.csv"), ("--state", "./s.csv"), ("--state", "s.meta.json"), ("--meta", "s.state.csv")])
def test_one_file_for_two_things_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch, same):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.csv").write_text("measured before\n")
    assert sampler.main(["-o", "s.csv", "--gpus", "none", "--cpu-model", *same]) == 2
    assert "found one file twice, expected three different ones" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["s.csv"] and (tmp_path / "s.csv").read_text() == "measured before\n"


@needs_cc
def test_eight_gpus_with_slow_reads_do_not_delay_each_other(run, nvml_dir):
    code, err, path = run("--duration", 4, nvml_dir=nvml_dir, nvml="gpus=8,latency_us=4000")
    samples = read_samples(path)
    assert code == 0 and len(samples.domains) == 8
    for gpu in range(8) if undisturbed(footer(path), 4.0) else ():
        error, half = gpu_truth(samples, gpu)
        assert np.mean(np.abs(error) <= half) > 0.9 and len(samples.steps(f"gpu{gpu}").t) > 35


@needs_cc
def test_s12_power_takes_over_where_there_is_no_energy_counter(run, nvml_dir):
    code, err, path = run("--duration", 2, nvml_dir=nvml_dir, nvml="gpus=2,gpu1.no_energy=1,gpu1.power_w=70")
    samples = read_samples(path)
    assert code == 0 and samples.source == {"gpu0": "nvml", "gpu1": "nvml-power"}
    assert "gpu1_mj" not in samples.columns and err.count("has no energy counter") == 1
    assert samples.energy(samples.t_begin, samples.t_begin + 1.5).joules["gpu1"][0] == pytest.approx(105, rel=0.01)


@needs_cc
def test_s12_a_gpu_that_answers_nothing_fails_loudly(run, nvml_dir, tmp_path):
    code, err, path = run("--powercap", tmp_path, nvml_dir=nvml_dir, nvml="gpus=1,no_energy=1,no_power=1")
    assert code == 2 and "answers neither energy nor power" in err and "nothing to measure" in err and not path.exists()


@needs_cc
def test_s15_grace_hopper_counts_the_module(run, nvml_dir):
    _, _, path = run("--duration", 1, nvml_dir=nvml_dir, nvml="gpus=1,name=NVIDIA GH200 480GB")
    assert read_samples(path).scope["gpu0"] == "module"


@needs_cc
@pytest.mark.parametrize(
    ("wanted", "uuids"),
    [
        ("2,3", ["GPU-af7b61d2", "GPU-af7b61d3"]),
        ("3", ["GPU-af7b61d3"]),
        ("GPU-af7b61d1", ["GPU-af7b61d1"]),
        ("GPU-af7b61d2-0000-4000-8000-000000000002,0", ["GPU-af7b61d2", "GPU-af7b61d0"]),
        ("MIG-af7b61d1-0000-4000-8000-000000000001,1", ["GPU-af7b61d1"]),
        ("MIG-GPU-af7b61d2-0000-4000-8000-000000000002/3/0", ["GPU-af7b61d2"]),
        ("1,9,2", ["GPU-af7b61d1"]),
    ],
)
def test_s17_cuda_visible_devices_is_resolved_by_uuid(run, nvml_dir, wanted, uuids):
    _, _, path = run("--duration", 0.5, nvml_dir=nvml_dir, nvml="gpus=4,mig=1", CUDA_VISIBLE_DEVICES=wanted)
    meta = json.loads(path.with_suffix(".meta.json").read_text())
    assert [g["uuid"][:12] for g in meta["gpus"]] == uuids


@needs_cc
def test_s21_slow_queries_of_the_state_delay_no_row_and_no_read_of_the_counter(run, nvml_dir):
    _, _, path = run("--duration", 4, nvml_dir=nvml_dir, nvml="gpus=1,state_ms=900")
    foot, samples = footer(path), read_samples(path)
    assert 2 <= len(path.with_name("state.csv").read_text().splitlines()) <= 5
    assert foot["largest_gap_s"] < 0.5 and foot["rows"] > 35 and foot["gpus"]["gpu0"]["read_ms"]["max"] < 500
    assert np.isfinite(samples.columns["gpu0_mj"]).mean() > 0.9 and foot["gpus"]["gpu0"]["steps"] > 30


@needs_cc
@pytest.mark.parametrize("wanted", ["9", "GPU-ffff", "GPU-", "MIG-0", "one"])
def test_s17_a_gpu_that_is_not_there_is_an_error(run, nvml_dir, wanted):
    code, err, _ = run("--gpus", wanted, nvml_dir=nvml_dir, nvml="gpus=2")
    assert code == 2 and "expected an index, UUID or MIG id of: 0=GPU-af7b61d0" in err and len(err.splitlines()) == 1


@needs_cc
def test_s20_a_read_that_takes_300_ms_delays_no_row(run, nvml_dir):
    _, _, path = run("--duration", 3, nvml_dir=nvml_dir, nvml="gpus=2,gpu0.hang_at=70,hang_ms=600")
    foot, samples = footer(path), read_samples(path)
    assert foot["gpus"]["gpu0"]["read_ms"]["max"] > 590 and foot["largest_gap_s"] < 0.5
    e = samples.energy(samples.t_begin + 0.3, samples.t_end - 0.3).joules
    assert e["gpu0"][0] == pytest.approx(e["gpu1"][0], rel=0.04)


@needs_cc
def test_failing_reads_are_empty_cells_and_one_line(run, nvml_dir):
    process, path = run.start(nvml_dir=nvml_dir, nvml="gpus=1,fail_from=90,fail_to=110")
    rows = wait_for(path, process, lambda rows: ",,,," in "".join(rows) and ",,,," not in "".join(rows[-8:]))
    process.send_signal(signal.SIGTERM)
    code, err = process.wait(30), process.stderr.read()
    samples, foot = read_samples(path), footer(path)
    missing = np.isnan(samples.columns["gpu0_mj"]).sum()
    assert code == 0 and 1 <= missing <= len(rows) - 8 and foot["gpus"]["gpu0"]["read_errors"] == 21
    assert err.count("cells stay empty") == 1
    assert samples.energy(samples.t_begin + 0.2, samples.t_end - 0.3).joules["gpu0"][0] == pytest.approx(
        125 * (samples.t_end - samples.t_begin - 0.5), rel=0.03
    )


@needs_cc
def test_a_reset_counter_goes_on_and_is_counted(run, nvml_dir):
    _, _, path = run("--duration", 4, nvml_dir=nvml_dir, nvml="gpus=1,reset_at=90")
    samples = read_samples(path)
    samples.steps("gpu0")
    assert footer(path)["gpus"]["gpu0"]["backward_steps"] == 1 and "gpu0:counter_reset" in samples.flags
    assert np.isnan(samples.energy(samples.t_begin, samples.t_end).joules["gpu0"][0])


@needs_cc
def test_a_stuck_counter_is_unknown_not_zero(run, nvml_dir):
    _, _, path = run("--duration", 5, nvml_dir=nvml_dir, nvml="gpus=1,stuck_from=80")
    samples = read_samples(path)
    e = samples.energy(samples.t_end - 1, samples.t_end)
    assert np.isnan(e.joules["gpu0"][0]) and "gpu0:counter_stuck" in samples.flags


@needs_cc
def test_nvml_that_does_not_start_is_said(run, nvml_dir, tmp_path):
    code, err, _ = run("--powercap", tmp_path, "--gpus", "0", nvml_dir=nvml_dir, nvml="init_error=1")
    assert code == 2 and "Driver Not Loaded" in err and "--gpus none" in err


@needs_cc
def test_nvml_that_does_not_start_is_never_passed_over(run, nvml_dir, tmp_path):
    args = ("--powercap", tmp_path, "--cpu-model", "--duration", 0.5)
    code, err, path = run(*args, nvml_dir=nvml_dir, nvml="init_error=9", CUDA_VISIBLE_DEVICES="0")
    assert code == 0 and "CUDA_VISIBLE_DEVICES=0, but NVML does not start (Driver Not Loaded): no GPU energy" in err
    code, err, _ = run(*args, nvml_dir=nvml_dir, nvml="init_error=999", CUDA_VISIBLE_DEVICES="0")
    assert code == 2 and "CUDA_VISIBLE_DEVICES=0, but NVML does not start (Unknown Error); mend the driver" in err
    code, err, path = run(*args, nvml_dir=nvml_dir, nvml="init_error=999")
    assert code == 0 and "NVML does not start (Unknown Error): no GPU energy" in err and "NVML does not start" in str(meta(path)["left_out"])


@needs_cc
@pytest.mark.parametrize("code", [4, 15])  # no permission, lost
def test_a_gpu_that_cannot_be_opened_is_left_out_as_cuda_does(run, nvml_dir, tmp_path, code):
    args = ("--powercap", tmp_path, "--duration", 1)
    for nvml, settings in ((f"gpus=2,gpu1.open_error={code}", {}), (f"gpus=2,gpu0.open_error={code}", {"CUDA_VISIBLE_DEVICES": "0"})):
        rc, err, path = run(*args, nvml_dir=nvml_dir, nvml=nvml, **settings)
        assert rc == 0 and "cannot be opened" in err and "Traceback" not in err
        used = {c["uuid"][-1] for c in meta(path)["counters"].values() if "uuid" in c}
        assert used == {"0" if "gpu1" in nvml else "1"} and "left_out" in meta(path)
    rc, err, _ = run(*args, "--gpus", "1", nvml_dir=nvml_dir, nvml=f"gpus=2,gpu1.open_error={code}")
    assert rc == 2 and "found '1', expected an index, UUID or MIG id of: 0=GPU-" in err


@needs_cc
def test_power_is_read_although_the_energy_counter_never_moves(run, nvml_dir, tmp_path):
    _, _, path = run("--powercap", tmp_path, "--duration", 3, nvml_dir=nvml_dir, nvml="gpus=1,stuck_from=1")
    with open(path) as f:
        cells = [row["gpu0_w"] for row in csv.DictReader(line for line in f if not line.startswith("#"))]
    assert sum(bool(c) for c in cells) >= 5


# --- powercap -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    return Powercap(tmp_path / "powercap")


def test_s7_a_package_counts_once_and_psys_core_uncore_never(tree):
    tree.package(0, watts=30, dram_watts=4).package(0, mmio=True).psys()
    tree.zone("intel-rapl:0:1", "core", 20).zone("intel-rapl:0:2", "uncore", 2)
    rapl = Rapl(tree.root)
    assert {c: z["id"] for c, z in rapl.columns.items()} == {"cpu0_uj": "intel-rapl:0", "dram0_uj": "intel-rapl:0:0"}
    why = {z["name"]: z["why"] for z in rapl.left_out}
    assert "never added" in why["psys"] and "same package" in why["package-0"] and "part of" in why["core"] and "part of" in why["uncore"]


def test_s9_two_sockets_with_dram_of_the_same_name(tree):
    tree.package(0, watts=30, dram_watts=4, start_uj=5).package(1, watts=50, dram_watts=8, start_uj=70)
    rapl = Rapl(tree.root)
    before = {c: rapl.read(c) for c in rapl.columns}
    tree.tick(2.0)
    rise = {c: (rapl.read(c) - before[c]) * 1e-6 for c in rapl.columns}
    assert rise == pytest.approx({"cpu0_uj": 60, "dram0_uj": 8, "cpu1_uj": 100, "dram1_uj": 16})


def test_packages_are_numbered_by_name_not_by_zone(tree):
    tree.package(1, at=0, watts=50).package(0, at=1, watts=30)
    rapl = Rapl(tree.root)
    assert [rapl.columns[c]["name"] for c in ("cpu0_uj", "cpu1_uj")] == ["package-0", "package-1"]


def test_mirrored_dies_count_once_and_different_dies_both(tree):
    tree.package(0, name="package-0-die-0").package(0, at=1, name="package-0-die-1", follows="intel-rapl:0")
    assert [z["id"] for z in Rapl(tree.root).columns.values()] == ["intel-rapl:0"]
    tree.zone("intel-rapl:2", "package-1-die-0", 20, start_uj=5_000_000).zone("intel-rapl:3", "package-1-die-1", 25, start_uj=9_000_000)
    assert [z["id"] for z in Rapl(tree.root).columns.values()] == ["intel-rapl:0", "intel-rapl:2", "intel-rapl:3"]


def test_a_nested_tree_is_read_like_a_flat_one(tmp_path):
    tree = Powercap(tmp_path / "nested")
    for path, name in (("intel-rapl/intel-rapl:0", "package-0"), ("intel-rapl/intel-rapl:0/intel-rapl:0:0", "dram")):
        tree.zone(path, name, 10)
    assert list(Rapl(tree.root).columns) == ["cpu0_uj", "dram0_uj"]


def test_s1_s2_the_sidecar_has_the_range_or_null(tree):
    tree.package(0).package(1, range_uj=None)
    rapl = Rapl(tree.root)
    assert rapl.describe("cpu0_uj")["max_range_uj"] == RANGE_UJ and rapl.describe("cpu1_uj")["max_range_uj"] is None
    assert rapl.describe("cpu0_uj")["power_limit_w"] == 250


def test_s1_a_wrap_on_the_way_is_unwrapped(run, tree):
    tree.package(0, watts=200, range_uj=200_000_000, start_uj=199_800_000)
    with tree.running():
        code, err, path = run("--gpus", "none", "--powercap", tree.root, "--duration", 3)
    samples = read_samples(path)
    assert code == 0 and samples.energy(samples.t_begin + 0.1, samples.t_end - 0.1).joules["cpu0"][0] == pytest.approx(
        200 * (samples.t_end - samples.t_begin - 0.2), rel=0.15  # the tree's thread may be late; a wrap is a third of it
    )
    assert "cpu0:wrapped" in samples.flags


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root reads everything, and there is no setpriv")
def test_s4_s5_unreadable_counters_are_said_once_with_the_fix(repo, tmp_path, tree):
    tree.package(0).package(1)
    for zone in ("intel-rapl:0", "intel-rapl:1"):
        os.chmod(tree.root / zone / "energy_uj", 0o400)
    for folder in (tmp_path, *tmp_path.parents):
        if os.stat(folder).st_mode & 0o5 != 0o5:  # pytest keeps its folders to itself
            os.chmod(folder, 0o755)
    shutil.copy(repo / "sampler.py", tmp_path)
    code = f"import sampler; r = sampler.Rapl({str(tree.root)!r}); print(r.columns, len(r.left_out))"
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    # root's own Python may lie where nobody else can read; the system's will do, the standard library is enough
    python = (shutil.which("python3", path="/usr/bin:/bin") or sys.executable) if drop else sys.executable
    out = subprocess.run([*drop, python, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    if "sampler" not in out.stderr:
        pytest.skip(f"another user cannot start Python here: {out.stderr.strip()}")
    assert out.stdout.strip() == "{} 2" and out.stderr.count("permission denied") == 1 and "sudo_setup.sh" in out.stderr


def test_a_counter_that_becomes_unreadable_leaves_empty_cells_and_one_line(run, tree):
    tree.package(0)
    with tree.running():
        process, path = run.start("--gpus", "none", "--powercap", tree.root)
        wait_for_rows(path, process)
    (tree.root / "intel-rapl:0/energy_uj").write_text("busy\n" * 8)
    wait_for(path, process, lambda rows: sum(row.endswith(",") for row in rows) > 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0 and err.count("not readable") == 1 and footer(path)["cpu_read_errors"]["cpu0_uj"] > 5


def test_s6_no_counters_is_said_and_nothing_is_written(run, tmp_path):
    code, err, path = run("--gpus", "none", "--powercap", tmp_path / "nothing")
    assert code == 2 and "nothing to measure" in err and "--cpu-model 0.74:3.5" in err and len(err.splitlines()) == 1 and not path.exists()


# --- the model source and the program, on this machine --------------------------------------------------------------------------


def test_the_model_charges_busy_time(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 1000 50 0 0 7 0 0\ncpu0 1\ncpu1 1\n")
    model = sampler.CpuModel(0.0, 10.0, stat)
    stat.write_text("cpu  250 20 30 1100 90 1 2 70 0 0\ncpu0 1\ncpu1 1\n")
    busy = (150 + 20 + 30 + 1 + 2) / os.sysconf("SC_CLK_TCK")  # not idle, not waiting for I/O, not stolen
    assert model.read("cpu0_est_uj") == pytest.approx(10e6 * busy)


def test_the_model_is_used_only_without_rapl(run, tree):
    tree.package(0)
    with tree.running():
        _, _, path = run("--gpus", "none", "--powercap", tree.root, "--cpu-model", "1:2", "--duration", 0.5)
    assert read_samples(path).source == {"cpu0": "rapl"}


def test_the_model_on_this_machine_sees_a_busy_process(run, tmp_path):
    process, path = run.start("--gpus", "none", "--powercap", tmp_path, "--cpu-model", "0:5")
    wait_for_rows(path, process)
    begin = time.time()
    spent = time.process_time()
    while time.process_time() - spent < 0.6:
        pass
    end = time.time()
    wait_for(path, process, lambda rows: float(rows[-1].split(",")[0]) > end)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    samples = read_samples(path)
    joules = samples.energy(begin, end).joules["cpu0"][0]
    assert process.returncode == 0 and samples.source["cpu0"] == "model" and samples.meta["counters"]["cpu0_est_uj"]["source"] == "model"
    assert 5 * 0.5 < joules <= 5 * os.cpu_count() * (end - begin + 0.3)  # at least this process, at most every CPU


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_a_footer_and_exit_code_0(run, tmp_path, number):
    process, path = run.start("--gpus", "none", "--powercap", tmp_path, "--cpu-model", "--hz", "20")
    wait_for_rows(path, process, 10)
    process.send_signal(number)
    process.communicate(timeout=30)
    foot, samples = footer(path), read_samples(path)
    assert process.returncode == 0 and foot["ended"] == signal.Signals(number).name
    assert foot["rows"] == len(samples.t) and "torn_last_line" not in samples.flags
    assert foot["cpu_read_ms"]["p50"] > 0 and foot["sampler_cpu_s"] < 1


def test_kill_9_leaves_a_valid_file_and_a_sidecar_without_footer(run, tmp_path):
    process, path = run.start("--gpus", "none", "--powercap", tmp_path, "--cpu-model")
    wait_for_rows(path, process, 3)
    process.kill()
    process.communicate()
    samples = read_samples(path)
    assert len(samples.t) >= 3 and "footer" not in samples.meta and samples.meta["counters"]["cpu0_est_uj"]["idle_w_per_cpu"] == 0.74
    assert path.read_bytes().endswith(b"\n")


def test_a_stopped_sampler_counts_its_missed_ticks(run, tmp_path):
    process, path = run.start("--gpus", "none", "--powercap", tmp_path, "--cpu-model")
    wait_for_rows(path, process)
    process.send_signal(signal.SIGSTOP)
    before = len(wait_for_rows(path, process))
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    wait_for_rows(path, process, before + 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    foot = footer(path)
    assert foot["missed_ticks"] >= 7 and foot["largest_gap_s"] > 0.9 and "gaps" in read_samples(path).flags


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_an_error_in_one_line(run, tmp_path):
    target = tmp_path / "full.csv"
    with contextlib.suppress(OSError):
        os.symlink("/dev/full", target)
    code, err, _ = run("--gpus", "none", "--powercap", tmp_path, "--cpu-model", "--duration", "1", name="full")
    assert code == 1 and "No space left" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cpu-model", "5"], "expected IDLE_W:BUSY_W"),
        (["--cpu-model", "5:1"], "expected IDLE_W:BUSY_W"),
        (["--hz", "1000"], "at most 100"),
        *[([f"{option}={x}"], f"argument {option}: found {x!r}, expected a number above 0")
          for option in ("--hz", "--duration") for x in ("-1", "0", "nan", "inf", "1e300", "soon", "")],
        *[([f"--cpu-model={x}"], f"argument --cpu-model: found {x!r}, expected IDLE_W:BUSY_W") for x in ("nan:nan", "-1:2", "1:inf", "1:1e300", "a:b", "")],
    ],
)  # fmt: skip
def test_bad_arguments_say_found_and_expected(capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        sampler.main(["-o", "/nowhere/samples.csv", *args])
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_names_of_sidecar_and_state(tmp_path):
    tree = Powercap(tmp_path / "p").package(0)
    a = sampler.Sampler(tmp_path / "samples.csv", gpus="none", powercap=tree.root)
    b = sampler.Sampler(tmp_path / "idle_bare.csv", gpus="none", powercap=tree.root)
    assert (a.meta_path.name, a.state_path.name) == ("samples.meta.json", "state.csv")
    assert (b.meta_path.name, b.state_path.name) == ("idle_bare.meta.json", "idle_bare.state.csv")


def test_help_gives_an_example_and_the_source_of_the_model(repo):
    out = subprocess.run([sys.executable, repo / "sampler.py", "--help"], capture_output=True, text=True)
    assert out.returncode == 0 and "python3 sampler.py -o" in out.stdout and "cloudcarbonfootprint.org" in out.stdout
