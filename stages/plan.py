"""The plan of a batch: which trajectories, in which order. Written before the first one runs, so that what never ran still counts as planned.

    python stages/plan.py --list tasks/final.txt --policies "summarize-off summarize-8k" --reps 3 --mode live --seed 1 --plan data/h200/traj/plan.csv
    python stages/plan.py --plan data/h200/traj/plan.csv --shard 2/4 --show      # trajectories of one shard: open, measured or failed

Order: repetition by repetition, tasks and policies shuffled within each (seeded), so that a slow drift of the machine hits every policy alike.
A plan that exists is kept and only what it lacks is appended; what is planned or measured one way cannot be asked for another way (live,
or a replay of another recording) in the same folder: the rows would share a name. Several batches (shards on nodes that share a file system)
may plan at once: they take turns. With --dry-run nothing is written. Columns: order, task, policy, rep, mode, recording, seed. Exit code 2: bad
input.
"""

import argparse
import contextlib
import fcntl
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles  # noqa: E402

FIELDS = ["order", "task", "policy", "rep", "mode", "recording", "seed"]


def read_list(path):
    """{task: "PATH, line N"} of a list file: one task a line, `#` starts a comment. Raises ValueError on an empty list, and on two tasks of one
    name: their trajectories would share a folder, whatever data set or folder the tasks are from. OSError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path}: no text file; expected one task a line")
    tasks, lines = {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (task := line.split("#")[0].strip()):
            continue
        if (name := Path(task).name) in lines:
            raise ValueError(f"{path}, line {number}: '{task}': a task {name} stands there more than once, in line {lines[name]} too; delete one")
        tasks[task], lines[name] = f"{path}, line {number}", number
    if not tasks:
        raise ValueError(f"{path}: no task in it; expected one name a line")
    return tasks


def single(tasks, tasks_dir, recordings_dir=None):
    """The tasks of a list (read_list), which must be one each, be there, and with `recordings_dir` have a recording. Raises ValueError."""
    from stages import datasets, trial

    for task, where in tasks.items():
        try:
            if datasets.DATASET.fullmatch(task) or datasets.inside(datasets.folder_of(task, tasks_dir)):
                raise ValueError(f"'{task}' is many tasks; 05_oracle_check.sh writes those that work here, one a line, to oracle_ok.txt")
            trial.sound_task(task, tasks_dir)
            if recordings_dir:
                recording_of(recordings_dir, task, 1)
        except (OSError, ValueError) as e:
            raise ValueError(f"{where}: {e}") from None
    return list(tasks)


def known_policies(text, context=sys.maxsize):
    """The context policies that a text names, one at least, all possible in so many tokens. Raises ValueError."""
    from stages import trial

    policies = text.split()
    if not policies:
        raise ValueError(f"POLICIES='{text}': expected one or more of summarize-off, summarize-on, summarize-<N>k")
    for p in policies:
        trial.policy_kwargs(p, context)
    if len(set(policies)) < len(policies):
        raise ValueError(f"POLICIES='{text}': one stands there more than once")
    return policies


def recording_of(recordings_dir, task, rep):
    """Recordings of a task serve its repetitions in turn. Raises ValueError when there is none."""
    found = sorted(Path(recordings_dir, Path(task).name).glob("*.json"))
    if not found:
        raise ValueError(f"task '{task}': no recording in {Path(recordings_dir, Path(task).name)}; replay needs one (or MODE=live)")
    return str(found[(rep - 1) % len(found)])


def make(tasks, policies, reps, mode, seed, recordings_dir):
    """Rows of a new plan, without `order`."""
    rows = []
    for rep in range(1, reps + 1):
        block = [(t, p) for t in tasks for p in policies]
        random.Random(f"{seed}/{rep}").shuffle(block)
        rows += [{"task": t, "policy": p, "rep": rep, "mode": mode, "seed": seed,
                  "recording": recording_of(recordings_dir, t, rep) if mode == "replay" else ""} for t, p in block]  # fmt: skip
    return rows


def key(row):
    return Path(row["task"]).name, row["policy"], str(row["rep"])


def name(row):
    """A trajectory's name, which its folder has (trajectory_name of common.sh)."""
    return "{}__{}__r{}".format(*key(row))


def kind(mode, recording):
    """What a trajectory is, beyond its name: "live", or the recording that it replays."""
    return "live" if mode == "live" else f"replay of {Path(recording).name}"


def check_same(rows, known, plan):
    """Raises ValueError when a row of `rows` is planned otherwise already."""
    kinds = {key(r): kind(r["mode"], r["recording"]) for r in known}
    for r in rows:
        planned, asked = kinds.get(key(r)), kind(r["mode"], r["recording"])
        if planned not in (None, asked):
            raise ValueError(f"{plan}: {name(r)} is planned as {planned}, asked for is {asked}; "
                             f"use another DATA_DIR, or delete the row and its folder to plan it anew")  # fmt: skip


def infra_failure(trial):
    """Why a finished trial says nothing about the agent (server, sandbox, deadline), None when it does."""
    return None if trial.get("ended") == "finished" and not trial.get("reason") else trial.get("reason") or trial.get("ended")


def measured(folder, mode, recording):
    """What a trajectory's folder holds: "" nothing finished, "measured", or "failed" for infrastructure reasons. Raises ValueError when it is
    one of another kind than asked for."""
    try:
        trial = json.loads((folder / "trial.json").read_text())
        found = kind(trial["mode"], (trial["recording"] or {}).get("file"))
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder}/trial.json cannot be read ({type(e).__name__}: {e}); move the folder away to measure it anew") from e
    if found != kind(mode, recording):
        raise ValueError(f"{folder} is measured as {found}, asked for is {kind(mode, recording)}; use another DATA_DIR, or move the folder away")
    return "failed" if infra_failure(trial) else "measured"


@contextlib.contextmanager
def locked(path):
    """Holds PATH.lock while the body runs; waits for whoever holds it, on this machine or on another that shares the file system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as f:
        fcntl.lockf(f, fcntl.LOCK_EX)  # a POSIX lock: it holds across the clients of an NFS server
        yield


def read_plan(path):
    rows = csvfiles.read(path)
    if path.exists() and path.stat().st_size and not rows and path.read_text(encoding="utf-8-sig").strip() != ",".join(FIELDS):
        raise ValueError(f"{path}: found no plan, expected the columns {','.join(FIELDS)}; delete it to plan anew")
    seen = set()
    for number, r in enumerate(rows, 2):
        if lacking := [c for c in FIELDS if r.get(c) is None]:
            raise ValueError(f"{path}: line {number}: column(s) {', '.join(lacking)} missing; delete the line, or the file to plan anew")
        if not r["order"].isdigit() or not r["rep"].isdigit() or "\0" in "".join(r[c] for c in FIELDS):
            raise ValueError(f"{path}: line {number}: found {r['order']!r:.40}, {r['rep']!r:.40}, expected whole numbers as order and rep; delete the line")
        if key(r) in seen:
            raise ValueError(f"{path}: line {number}: {name(r)} stands there twice; delete one of the lines")
        seen.add(key(r))
    return rows


def extend(a):
    """Append to the plan what it lacks of the wanted rows; returns its rows and {key: what its folder holds} of those that are wanted."""
    known = read_plan(a.plan)
    wanted = known
    if a.list:
        policies = known_policies(a.policies, a.context)
        if a.reps < 1:
            raise ValueError(f"--reps {a.reps}: expected a whole number from 1 on")
        tasks = single(read_list(a.list), a.tasks_dir, a.recordings if a.mode == "replay" else None)
        wanted = make(tasks, policies, a.reps, a.mode, a.seed, a.recordings)
    check_same(wanted, known, a.plan)
    done = {key(r): measured(a.plan.parent / name(r), r["mode"], r["recording"]) for r in wanted}
    have = {key(r) for r in known}
    new = [r for r in wanted if key(r) not in have]
    last = max((int(r["order"]) for r in known), default=0)
    rows = known + [{**r, "order": last + k} for k, r in enumerate(new, 1)]
    if new and not a.dry_run:
        csvfiles.write(a.plan, FIELDS, rows)
    return rows, done


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--plan", type=Path, required=True)
    p.add_argument("--list", help="task list to plan")
    p.add_argument("--policies", default="")
    p.add_argument("--reps", type=int, default=1)
    p.add_argument("--mode", choices=["live", "replay"], default="live")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tasks-dir", default="tasks/local", help="where a bare task name is looked up")
    p.add_argument("--recordings", default="tasks/recordings")
    p.add_argument("--context", type=int, default=sys.maxsize, help="tokens of the server's context, for which a policy may be too large")
    p.add_argument("--shard", default="1/1", help="i/n: every n-th trajectory from the i-th on")
    p.add_argument("--dry-run", action="store_true", help="write nothing")
    p.add_argument("--show", action="store_true", help="print task, policy, rep, mode, open|measured|failed, recording of this call's part")
    a = p.parse_args()
    try:
        i, n = (int(x) for x in a.shard.split("/"))
        if not 1 <= i <= n:
            raise ValueError
    except ValueError:
        print(f"plan: --shard '{a.shard}': expected i/n with 1 <= i <= n, such as 2/4", file=sys.stderr)
        sys.exit(2)
    try:
        with contextlib.nullcontext() if a.dry_run else locked(a.plan):
            rows, done = extend(a)
    except (OSError, ValueError) as e:
        print(f"plan: {e}", file=sys.stderr)
        sys.exit(2)
    if a.show:
        for r in [r for r in rows if key(r) in done][i - 1 :: n]:
            print(r["task"], r["policy"], r["rep"], r["mode"], done[key(r)] or "open", r["recording"], sep="\t")


if __name__ == "__main__":
    main()
