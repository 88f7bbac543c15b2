"""What sharing a server does to energy: the same recording by two agents at a time, and by each alone, on the small model server.

    python bench/concurrency.py --out bench/concurrency.csv
    python bench/concurrency.py --pairs 5

Calibrates the server first, then runs the recording twice alone (CONCURRENCY=1) and twice at once (CONCURRENCY=2), --pairs times each, and aligns.
Identical concurrent work should get equal shares; the shares must add up to what the counters say for the time in which an agent executed; and a
batch costs less than its calls one after another: that is the gain. Exit code 1 when shares differ by more than 5 % or do not add up within
two standard deviations of what the counters say, interpolated.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
sys.path.insert(0, str(REPO / "bench"))


def stage(env, *command):
    r = subprocess.run(["bash", *map(str, command)], cwd=REPO, env=env, capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {r.returncode}\n{r.stderr[-2000:]}")


def run(env, folder, pairs, at_a_time):
    """Rows of 2 x `pairs` trajectories of the same recording, `at_a_time` at once."""
    here = env | {"DATA_DIR": str(folder / f"x{at_a_time}"), "CONCURRENCY": str(at_a_time)}
    stage(here, "06_run_batch.sh", folder / "list.txt", "summarize-off", 2 * pairs)
    out = folder / f"trials_x{at_a_time}.csv"
    trials = sorted(str(p.parent) for p in (folder / f"x{at_a_time}/traj").glob("*/trial.json"))
    subprocess.run([sys.executable, "align_trial.py", *trials, "--calib", folder / "res/calib", "--out", out], cwd=REPO, check=True, capture_output=True)
    with open(out) as f:
        return {r["trajectory"]: r for r in csv.DictReader(f)}


def counters_say(folder, members):
    """Joules of all counters that may be added, over the time in which any agent of the group executed, and their standard deviation.

    Interpolated between the counter's steps at the ends of that time: this knows nothing of calls and their power, by which
    align_trial.py apportions the steps that are cut there. Within the slices that the agents share, its sums are exact (tests)."""
    import numpy as np

    import align_trial
    import energylib

    windows = []
    for m in members:
        result = json.loads(next((folder / m / "harbor").glob("*/result.json")).read_text())
        windows.append(align_trial.agent_window(result))
    spans = align_trial.union(windows)
    samples = energylib.read_samples(folder / members[0] / "samples.csv")
    e = samples.energy(spans[:, 0], spans[:, 1])
    joules, err = (np.array([x[d] for d in samples.total_domains]) for x in (e.joules, e.err))
    return float(joules.sum()), float(np.sqrt(np.square(err).sum()))


def main():
    import soak

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--out", type=Path)
    p.add_argument("--keep", action="store_true", help="leave the data")
    a = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trajoule-concurrency."))
    print(f"data in {folder}", file=sys.stderr)
    soak.write_tasks(folder)
    (folder / "list.txt").write_text("count-a\n")  # it has one recording: every repetition replays the same
    port, proxy_port = soak.free_port(), soak.free_port()
    env = dict(os.environ) | {
        "PROFILE": "cpu-smollm2", "PORT": str(port), "PROXY_PORT": str(proxy_port), "DATA_DIR": str(folder / "data"), "RESULTS_DIR": str(folder / "res"),
        "TRAJOULE_RUN_DIR": str(folder / "run"), "ENVIRONMENT": "local_env", "MODE": "replay", "BATCH_IDLE_S": "1",
        "TASKS_DIR": str(folder / "tasks"), "RECORDINGS_DIR": str(folder / "recordings"), "SERVER_SLOTS": "4",
        "APPEND_CACHED": "", "CALIB_REPS": "2", "CALIB_CONTEXTS": "128,512", "IDLE_S": "5",
    }  # fmt: skip
    with open(folder / "server.log", "ab") as log:
        server = subprocess.Popen(["bash", "02_serve_vllm.sh"], cwd=REPO, env=env, stdout=log, stderr=log)
    try:
        adapter = [sys.executable, "servers/adapter.py", "wait", "--kind", "llamacpp", "--url", f"http://127.0.0.1:{port}", "--timeout", "600"]
        subprocess.run(adapter, cwd=REPO, check=True)
        stage(env, "03_calibrate.sh")
        alone, together = (run(env, folder, a.pairs, n) for n in (1, 2))
    finally:
        server.terminate()
        server.wait(60)

    rows, good = [], True
    groups = {}
    for name, row in together.items():
        shared = json.loads((folder / "x2/traj" / name / "trial.json").read_text())["shared"]
        groups.setdefault(shared["group"], []).append(row)
    for group, members in groups.items():
        names = [r["trajectory"] for r in members]
        shares = {}
        for column in ("cpu_model_j", "cpu_model_above_idle_j", "total_j"):
            values = [float(r[column]) for r in members]
            shares[column] = values[0] / sum(values)
        sum_j, (counted_j, sd_j) = sum(float(r["total_j"]) for r in members), counters_say(folder / "x2/traj", names)
        rows.append({"group": group, "members": len(members), **{f"share_{k}": round(v, 4) for k, v in shares.items()}, "sum_total_j": round(sum_j, 6),
                     "counters_j": round(counted_j, 6), "counters_sd_j": round(sd_j, 6)})  # fmt: skip
        good &= abs(shares["cpu_model_above_idle_j"] - 0.5) <= 0.025 and abs(sum_j - counted_j) <= 2 * sd_j
    mean = lambda table, column: sum(float(r[column]) for r in table.values()) / len(table)  # noqa: E731
    for row in rows:
        model, above, everything = (f"{row[f'share_{c}']:.1%}" for c in ("cpu_model_j", "cpu_model_above_idle_j", "total_j"))
        print(f"group of {row['members']}: the first one's share of model energy {model}, above idle {above}, of everything {everything}; "
              f"shares add up to {row['sum_total_j']:.3f} J, counters say {row['counters_j']:.3f} +- {row['counters_sd_j']:.3f} J")  # fmt: skip
    gain = {c: 1 - mean(together, c) / mean(alone, c) for c in ("cpu_model_above_idle_j", "cpu_model_j", "total_j")}
    print(f"{len(alone)} alone, {len(together)} two at a time; {alone[min(alone)]['cpu_source']} CPU energy. Per trajectory, together against alone: "
          + ", ".join(f"{c} {-g:+.1%}" for c, g in gain.items())
          + f", model_s {mean(together, 'model_s') / mean(alone, 'model_s') - 1:+.1%}")  # fmt: skip
    if a.out:
        with open(a.out, "w", newline="") as f:
            w = csv.DictWriter(f, [*rows[0], *(f"gain_{c}" for c in gain)], lineterminator="\n", restval="")
            w.writeheader()
            w.writerows(rows)
            w.writerow({"group": "together against alone", **{f"gain_{c}": round(g, 4) for c, g in gain.items()}})
    if not a.keep:
        shutil.rmtree(folder)
    sys.exit(not good)


if __name__ == "__main__":
    main()
