"""How fast align_trial.py is: a batch of long trajectories, aligned by all CPUs.

Makes a few distinct trajectories of 30 minutes (18,000 rows of samples, 60 calls, 120 commands, a recording of 6,000 events), links them
into N folders, aligns them, and prints seconds per trajectory and for 1,000 of them. The target is 1,000 in under 2 minutes on 2 cores.

    python bench/align_speed.py --n 1000
    python bench/align_speed.py --n 100 --gpus 2 --jobs 1 --profile
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
DURATION_S, CALLS, CALL_S, COMMANDS_PER_TURN, EVENTS_PER_COMMAND = 1800.0, 60, 12.0, 2, 50
BEGIN = 1796040000.0


def iso(t):
    return datetime.fromtimestamp(t, UTC).isoformat()


def make(folder, seed, gpus):
    """One trajectory folder: turns of one call and two commands, counters that step every 100 ms."""
    rng = np.random.default_rng(seed)
    name = f"bench__{seed}"
    agent = folder / "harbor" / name / "agent"
    agent.mkdir(parents=True)
    turn = DURATION_S / CALLS
    starts = BEGIN + 3 + turn * np.arange(CALLS) + rng.uniform(0, 1, CALLS)
    calls, steps, events, header = [], [], [], int(BEGIN)
    offset = rng.uniform(0, 1)
    events.append((1.2, "i", "clear\r"))
    for k, t in enumerate(starts):
        end = t + CALL_S * rng.uniform(0.5, 1)
        calls.append({
            "id": f"{k}", "call_key": f"k{k}", "attempt": 1, "kind": "agent", "t_start": t, "t_end": end, "status": 200, "error": None,
            "path": "/v1/chat/completions", "complete": True, "prompt_tokens": 500 * k + 800, "cached_tokens": 500 * k,
            "completion_tokens": 400, "finish_reason": "stop", "session": f"{name}__agent",
        })  # fmt: skip
        now = end
        for _ in range(COMMANDS_PER_TURN):
            at = now + 0.01 - header - offset
            events += [(at, "i", "make\n"), (at + 0.001, "o", "make\r\n\x1b[?2004l\r")]
            run = rng.uniform(0.5, 3)
            events += [(at + run * x, "o", "cc -c file.c\r\n" * 3) for x in np.linspace(0.01, 0.99, EVENTS_PER_COMMAND)]
            events.append((at + run, "o", "\x1b[?2004hroot@task:/app# "))
            now += 4.0
        tools = [{"function_name": "bash_command", "arguments": {"keystrokes": "make\n", "duration": 4.0}}] * COMMANDS_PER_TURN
        steps.append(
            {"source": "agent", "timestamp": iso(now), "tool_calls": tools, "metrics": {"prompt_tokens": 1, "completion_tokens": 1}}
        )
    head = json.dumps({"version": 2, "width": 160, "height": 40, "timestamp": header})
    (agent / "recording.cast").write_text("\n".join([head, *(json.dumps([round(t, 6), k, d]) for t, k, d in events)]) + "\n")
    (agent / "trajectory.json").write_text(json.dumps({"steps": steps}))
    result = {
        "started_at": iso(BEGIN), "finished_at": iso(BEGIN + DURATION_S), "exception_info": None,
        "verifier_result": {"rewards": {"reward": 1.0}},
        "agent_execution": {"started_at": iso(BEGIN + 2), "finished_at": iso(BEGIN + DURATION_S - 1)}, "agent_result": {"metadata": {}},
    }  # fmt: skip
    (agent.parent / "result.json").write_text(json.dumps(result))
    (folder / "calls.jsonl").write_text("".join(json.dumps(c) + "\n" for c in calls))

    t = BEGIN + np.arange(0, DURATION_S, 0.1) + rng.normal(0, 0.001, int(DURATION_S * 10))
    cuts = np.sort(np.r_[BEGIN - 5, [x for c in calls for x in (c["t_start"], c["t_end"])], BEGIN + DURATION_S + 5])
    total = np.r_[0.0, np.cumsum(np.diff(cuts) * np.where(np.arange(len(cuts) - 1) % 2, 400.0, 100.0))]
    edge = np.floor(t * 10) / 10
    head, columns = ["t", "mono"], [t, t - BEGIN + 1000]
    for g in range(gpus):
        head += [f"gpu{g}_mj", f"gpu{g}_edge", f"gpu{g}_edge_err", f"gpu{g}_w"]
        columns += [np.floor(np.interp(edge, cuts, total) * 1e3), edge, np.full(len(t), 0.003), np.full(len(t), 250.0)]
    head += ["cpu0_uj", "dram0_uj"]
    columns += [np.floor((t - BEGIN) * 80e6), np.floor((t - BEGIN) * 9e6)]
    np.savetxt(
        folder / "samples.csv", np.column_stack(columns), delimiter=",", header=",".join(head), comments="",
        fmt=["%.0f" if h.endswith("j") else "%.6f" for h in head],
    )  # fmt: skip
    meta = {f"gpu{g}_mj": {"source": "nvml"} for g in range(gpus)} | {
        f"{d}_uj": {"source": "rapl", "max_range_uj": 1 << 38} for d in ("cpu0", "dram0")
    }
    (folder / "samples.meta.json").write_text(json.dumps({"counters": meta}))


def link(source, folder, name):
    """A folder whose files are the source's, with a trial.json of its own."""
    folder.mkdir()
    for p in source.iterdir():
        (folder / p.name).symlink_to(p)
    trial = {
        "trajectory": name,
        "task": "bench",
        "policy": "p",
        "rep": 1,
        "mode": "live",
        "agent": "terminus-2",
        "ended": "finished",
        "concurrency": 1,
    }
    (folder / "trial.json").write_text(json.dumps(trial))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--n", type=int, default=200, help="trajectories (default %(default)s)")
    p.add_argument("--distinct", type=int, default=4, help="of which so many differ (default %(default)s)")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--profile", action="store_true", help="profile one trajectory in this process instead")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        for k in range(args.distinct):
            make(tmp / f"source{k}", k, args.gpus)
        folders = []
        for n in range(args.n):
            folders.append(tmp / f"t{n}")
            link(tmp / f"source{n % args.distinct}", folders[-1], f"bench__p__r{n}")
        if args.profile:
            sys.path.insert(0, str(REPO))
            import cProfile
            import pstats

            import align_trial

            align_trial.align(folders[0])
            with cProfile.Profile() as profile:
                align_trial.align(folders[0])
            pstats.Stats(profile).sort_stats("cumulative").print_stats(25)
            return 0
        out = tmp / "trials.csv"
        command = [sys.executable, str(REPO / "align_trial.py"), *map(str, folders), "--out", str(out), "--jobs", str(args.jobs)]
        begin = time.monotonic()
        subprocess.run(command, check=True)
        spent = time.monotonic() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert len(out.read_text().splitlines()) == args.n + 1
    cpu = used.ru_utime + used.ru_stime
    print(f"{args.n} trajectories of {DURATION_S / 60:.0f} min, {args.jobs} processes: {spent:.1f} s, {cpu:.1f} s of CPU time")
    print(f"for 1,000: {1000 * spent / args.n:.0f} s as measured, {1000 * cpu / args.n / args.jobs:.0f} s on {args.jobs} CPUs of its own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
