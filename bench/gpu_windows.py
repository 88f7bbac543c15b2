"""Energy of single model calls on a real GPU, measured four ways in one run: Zeus's monitor, plain counter reads, interpolation, and ours.

    python bench/gpu_windows.py --url http://127.0.0.1:8000 --repeats 15 --out bench/h200_windows.csv

Each window is one request of exactly n output tokens, alone, with 0.7 to 1.0 s of quiet around it. In this process, at the window's two ends:
Zeus's ZeusMonitor (when the package zeus is installed) and a plain nvmlDeviceGetTotalEnergyConsumption. The sampler runs beside; its file gives
`naive` (rows interpolated by their time stamps), `linear` (interpolated between the counter's steps) and `phase` (ours: the straddling steps
apportioned by power). The reference is the energy of the whole steps that contain the call, less idle power times their time outside the call,
idle power from the neighbouring quiet: it has no edge to get wrong. Errors are in percent of the energy above idle. A benchmark: it reports.
"""

import argparse
import csv
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))


def zeus_monitor():
    try:
        from zeus.monitor import ZeusMonitor
    except ImportError as e:
        print(f"gpu_windows: Zeus is left out ({e}); its columns stay empty", file=sys.stderr)
        return None
    return ZeusMonitor(gpu_indices=[0], cpu_indices=[])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", required=True)
    p.add_argument("--tokens", default="45,112,225,450", help="output tokens of the windows")
    p.add_argument("--context", type=int, default=4096, help="prompt tokens; the prompt is cached")
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    import numpy as np
    import pynvml
    from gpu_pairs import request

    import energylib
    from servers import adapter

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    monitor = zeus_monitor()
    name, _ = adapter.get("vllm", a.url).model()
    random.seed(2)
    prompt = [random.randrange(1000, 40000) for _ in range(a.context)]
    body = {"model": name, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
    cells = [int(x) for x in a.tokens.split(",")] * a.repeats
    random.shuffle(cells)
    for n in sorted(set(cells)):
        request(a.url, {**body, "max_tokens": n, "min_tokens": n})
    folder = tempfile.mkdtemp()
    sampler = subprocess.Popen([sys.executable, str(ROOT / "sampler.py"), "-o", f"{folder}/samples.csv"])
    rows = []
    try:
        time.sleep(6)
        for i, n in enumerate(cells):
            time.sleep(random.uniform(0.7, 1.0))
            t0 = time.time()
            if monitor:
                monitor.begin_window("call", sync_execution=False)
            plain0 = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
            begin = time.time()
            request(a.url, {**body, "max_tokens": n, "min_tokens": n})
            end = time.time()
            plain1 = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
            zeus_j = sum(monitor.end_window("call", sync_execution=False).gpu_energy.values()) if monitor else None
            rows.append({"tokens": n, "t_start": begin, "t_end": end, "seconds": end - begin, "t_window": t0, "plain": (plain1 - plain0) / 1e3, "zeus": zeus_j})
            if i % 10 == 9:
                print(f"gpu_windows: {i + 1}/{len(cells)} windows", file=sys.stderr)
        time.sleep(1.5)
    finally:
        sampler.terminate()
        sampler.wait()
    samples = energylib.read_samples(f"{folder}/samples.csv")
    t0, t1 = (np.array([r[k] for r in rows]) for k in ("t_start", "t_end"))
    calls = np.column_stack([t0, t1])
    whole = samples.whole_steps("gpu0", t0, t1)
    quiet = samples.whole_steps("gpu0", t0 - 0.45, t0 - 0.15)
    idle_w = quiet[:, 2] / (quiet[:, 1] - quiet[:, 0])
    above = whole[:, 2] - idle_w * (whole[:, 1] - whole[:, 0])
    mean_idle = float(np.nanmean(idle_w))
    phase = samples.energy(t0, t1, calls=calls, idle_w={"gpu0": mean_idle}).joules["gpu0"]
    linear = samples.energy(t0, t1).joules["gpu0"]
    with open(f"{folder}/samples.csv") as f:
        table = [(float(r["t"]), float(r["gpu0_mj"])) for r in csv.DictReader(f) if r["gpu0_mj"]]
    stamp, value = np.array(table).T
    naive = np.diff(np.interp(calls, stamp, value / 1e3), axis=1)[:, 0]
    for k, r in enumerate(rows):
        r |= {"reference_above_idle_j": above[k], "idle_w": idle_w[k], "naive": naive[k], "linear": linear[k], "phase": phase[k]}
    tmp = a.out.with_suffix(f".tmp{os.getpid()}")
    with open(tmp, "w", newline="") as f:
        w = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        w.writeheader()
        w.writerows(rows)
    os.replace(tmp, a.out)
    print("error in % of the energy above idle: mean (signed) / mean of absolute values")
    print(f"{'tokens':>7}{'s':>7}{'n':>4}" + "".join(f"{m:>18}" for m in ("plain", "zeus", "naive", "linear", "phase")))
    for n in sorted(set(cells)):
        mine = [r for r in rows if r["tokens"] == n]
        line = f"{n:>7}{statistics.mean(r['seconds'] for r in mine):>7.2f}{len(mine):>4}"
        for m in ("plain", "zeus", "naive", "linear", "phase"):
            have = [r for r in mine if r[m] is not None and r[m] == r[m]]
            error = [100 * (r[m] - r["idle_w"] * r["seconds"] - r["reference_above_idle_j"]) / r["reference_above_idle_j"] for r in have]
            line += f"{statistics.mean(error):>+10.2f} /{statistics.mean(map(abs, error)):>6.2f}" if error else f"{'-':>18}"
        print(line)


if __name__ == "__main__":
    main()
