"""How fast energylib is: a day of 8 GPUs and 2 packages at 10 Hz (864,000 rows), beside plain pandas.

    python3 bench/energylib_speed.py                     # writes a file of about 350 MB to a temporary folder, and deletes it
    python3 bench/energylib_speed.py --rows 86400 --out bench/energylib_speed.csv

Prints and, with --out, writes: task, seconds and processor seconds (best of three), peak memory. Every task runs in a process of
its own; on a busy machine the seconds exceed the processor seconds, and only the latter say something about the program.
pandas reads the same columns and integrates by interpolation between rows, as a short script would: no steps, no wraps.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TASKS = {
    "energylib_load": "energylib: load and build all step tables",
    "energylib_100k": "energylib: 100,000 intervals, 10 domains",
    "energylib_100k_phase": "energylib: 100,000 intervals, 10 domains, phase-aware with 100,000 calls",
    "pandas_load": "pandas: read_csv of the same columns",
    "pandas_100k": "pandas and numpy.interp: 100,000 intervals, 10 domains",
}


def write_day(path, rows, gpus=8, packages=2):
    """A samples.csv as sampler.py writes it: steps every 0.1 s per GPU, RAPL with wraps."""
    import numpy as np

    rng = np.random.default_rng(1)
    names = ["t", "mono"]
    for g in range(gpus):
        names += [f"gpu{g}_mj", f"gpu{g}_edge", f"gpu{g}_edge_err", f"gpu{g}_w"]
    for c in range(packages):
        names += [f"cpu{c}_uj"]
    with open(path, "w") as f:
        f.write(",".join(names) + "\n")
        mj, uj = rng.integers(10**7, 10**9, gpus).astype(float), rng.integers(0, 2 * 10**11, packages).astype(float)
        for begin in range(0, rows, 20_000):
            n = min(20_000, rows - begin)
            mono = 1000.0 + 0.1 * np.arange(begin, begin + n) + rng.normal(0, 1e-4, n)
            columns = [(1796041893.0 + mono, "%.6f"), (mono, "%.6f")]
            for g in range(gpus):
                power = 125 + 400 * (np.sin(mono / 7 + g) > 0.3)
                count = mj[g] + np.cumsum(power * 100)
                mj[g] = count[-1]
                edge = 1796041893.0 + np.round(mono, 1) - 0.06 - 0.005 * g
                columns += [(count, "%d"), (edge, "%.6f"), (np.full(n, 0.003), "%.6f"), (power, "%.3f")]
            for c in range(packages):
                count = uj[c] + np.cumsum(np.full(n, 9e6 + c))
                uj[c] = count[-1]
                columns.append((count % 262143328850, "%d"))
            table = np.column_stack([values for values, _ in columns])
            np.savetxt(f, table, fmt=[fmt for _, fmt in columns], delimiter=",")
    meta = {"counters": {f"cpu{c}_uj": {"source": "rapl", "max_range_uj": 262143328850, "power_limit_w": 250} for c in range(packages)}}
    Path(path).with_suffix(".meta.json").write_text(json.dumps(meta))


def intervals(t_begin, t_end, k=100_000):
    import numpy as np

    edges = np.sort(np.random.default_rng(2).uniform(t_begin + 1, t_end - 1, 2 * k)).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]


def run(task, path):
    """(seconds, processor seconds) of one task, best of three where it can be repeated."""
    import numpy as np

    if task.startswith("energylib"):
        from energylib import read_samples

        begin = time.perf_counter(), time.process_time()
        samples = read_samples(path)
        for domain in samples.domains:
            samples.steps(domain)
        spent = since(begin)
        if task == "energylib_load":
            return spent
        t0, t1 = intervals(samples.t_begin, samples.t_end)
        extra = {}
        if task.endswith("phase"):
            extra = {"calls": np.c_[t0, t1], "idle_w": dict.fromkeys(samples.domains, 100.0)}
        return min(timed(lambda: samples.energy(t0, t1, **extra)) for _ in range(3))
    import pandas as pd

    begin = time.perf_counter(), time.process_time()
    table = pd.read_csv(path, usecols=lambda name: not name.endswith("_w"))
    spent = since(begin)
    if task == "pandas_load":
        return spent
    t0, t1 = intervals(table.t.iloc[0], table.t.iloc[-1])
    counters = [table[name].to_numpy(float) for name in table if name.endswith(("_mj", "_uj"))]
    t = table.t.to_numpy()
    return min(timed(lambda: [np.interp(t1, t, c) - np.interp(t0, t, c) for c in counters]) for _ in range(3))


def timed(function):
    begin = time.perf_counter(), time.process_time()
    function()
    return since(begin)


def since(begin):
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=864_000)
    parser.add_argument("--out", help="CSV for the results")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.task:
        seconds, cpu_s = run(args.task, args.file)
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "day.csv")
        write_day(path, args.rows)
        size_mb = os.path.getsize(path) / 1e6
        print(f"{args.rows} rows, {size_mb:.0f} MB")
        results = []
        for task, title in TASKS.items():
            command = [sys.executable, __file__, "--task", task, "--file", path]
            try:
                out = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
            except subprocess.CalledProcessError as e:
                print(f"{title}: {e.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return 1
            best = min(out, key=lambda r: r["seconds"])
            results.append([task, title, args.rows, round(best["seconds"], 4), round(best["cpu_s"], 4), round(best["peak_mb"])])
            print(f"{title}: {best['seconds']:.3f} s ({best['cpu_s']:.3f} s processor), peak {best['peak_mb']:.0f} MB", flush=True)
    if args.out:
        with open(args.out, "w", newline="") as f:
            csv.writer(f, lineterminator="\n").writerows([["task", "title", "rows", "seconds", "cpu_s", "peak_mb"], *results])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
