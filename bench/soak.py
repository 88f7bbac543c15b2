"""Trials back to back on the small model server while its proxy, sampler, server, Harbor and the batch itself are killed at random moments.

    python bench/soak.py --minutes 10 --out bench/soak.csv
    python bench/soak.py --trials 200 --minutes 120

A batch of replayed trajectories runs under kills (06_run_batch.sh is started again whenever it ended) for 60 % of the time; what it measured, in
whole repetitions, is finished without kills; then the same plan runs once more, undisturbed. The table says what must hold: nothing planned is
lost, no process is left, every finished row equals the undisturbed run's in what identifies and scores it, what was set aside is accounted for,
and the disk use is bounded. Exit code 1 when something does not hold.
"""

import argparse
import collections
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TASKS = {"count-a": True, "count-b": True, "count-c": False, "count-d": True}  # whether the recorded agent writes what the verifier wants
# what must not depend on whether a trial was disturbed before it was measured
IDENTITY = [*["trajectory", "task", "policy", "rep", "mode", "recording", "recording_source", "model", "agent", "profile"],
            *["outcome", "fail_reason", "calls", "turns"]]  # fmt: skip
VICTIMS = {
    "proxy": lambda p: "llm_proxy.py" in p.line,
    "sampler": lambda p: "sampler.py" in p.line and "supervise" not in p.line,
    "server": lambda p: "servers/llamacpp.py" in p.line and "supervise" not in p.line,
    "Harbor": lambda p: "warm_harbor.py serve" in p.line and "warm_harbor.py serve" in p.parent_line and "supervise" not in p.parent_line,
    "trial": lambda p: p.line.startswith("bash 04_run_trial.sh"),
    "batch": lambda p: p.line.startswith("bash 06_run_batch.sh"),
}
Process = collections.namedtuple("Process", "pid line parent_line")


def processes(*marks):
    """Living processes whose command line or environment holds one of the marks."""
    found = []
    for p in Path("/proc").iterdir():
        if not p.name.isdigit() or int(p.name) == os.getpid():
            continue
        try:
            line = command_line(p.name)
            stat = (p / "stat").read_text().rpartition(")")[2].split()
            everything = line + (p / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if stat[0] != "Z" and any(m in everything for m in marks):
            found.append(Process(int(p.name), line, command_line(stat[1])))
    return found


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_tasks(folder):
    """Small tasks with a recording of two calls each: a trial takes seconds, so that many are disturbed in the time there is."""
    for name, right in TASKS.items():
        turns = [
            {"analysis": "Empty.", "plan": "Count.", "commands": [{"keystrokes": f"seq {9 if right else 8} >/app/n; sleep 1\n", "duration": 1.2}]},
            {"analysis": "Done.", "plan": "Stop.", "commands": [], "task_complete": True},
            {"analysis": "Sure.", "plan": "Stop.", "commands": [], "task_complete": True},
        ]
        recording = {"schema": 1, "name": "01-count", "task": name, "source": "authored", "agent": "terminus-2", "model": None, "description": "Counts.",
                     "expected_outcome": "success" if right else "fail",
                     "calls": [{"kind": "agent", "content": json.dumps(t), "messages": None, "completion_tokens": None} for t in turns]}  # fmt: skip
        files = {
            "task.toml": 'schema_version = "1.4"\n[metadata]\npackages = []\n[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 60.0\n',
            "instruction.md": "Write the numbers from 1 to 9 into /app/n, one a line.\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
            "solution/solve.sh": "seq 9 >/app/n\n",
            "tests/test.sh": '#!/bin/bash\n[ "$(tail -n 1 /app/n)" = 9 ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n',
        }
        files = {f"tasks/{name}/{path}": text for path, text in files.items()}
        files[f"recordings/{name}/01-count.json"] = json.dumps(recording)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)


class Place:
    """Settings, folder and ports of one run; `marks` recognises every process of it."""

    def __init__(self, folder, port):
        folder.mkdir(parents=True)
        self.folder = folder
        self.env = dict(os.environ) | {
            "PROFILE": "cpu-smollm2", "PORT": str(port), "PROXY_PORT": str(free_port()), "DATA_DIR": str(folder / "data"), "RESULTS_DIR": str(folder / "res"),
            "TRAJOULE_RUN_DIR": str(folder.parent / "run"), "ENVIRONMENT": "local_env", "MODE": "replay", "BATCH_IDLE_S": "0.5", "MIN_FREE_MB": "100",
            "TASKS_DIR": str(folder.parent / "tasks"), "RECORDINGS_DIR": str(folder.parent / "recordings"),
            "MAX_INFRA_FAILURES": "5", "AGENT_TIMEOUT_S": "120", "TRIAL_DEADLINE_S": "180",
        }  # fmt: skip

    def batch(self, list_file, reps):
        with open(self.folder / "batch.log", "ab") as log:
            command = ["bash", "06_run_batch.sh", str(list_file), "summarize-off", str(reps)]
            return subprocess.Popen(command, cwd=REPO, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def measured(self):
        done = {}
        for path in (self.folder / "data/traj").glob("*/trial.json"):
            trial = json.loads(path.read_text())
            if trial["ended"] == "finished" and not trial["reason"]:
                done[path.parent.name] = trial
        return done

    def rows(self):
        folders = sorted(str(p.parent) for p in (self.folder / "data/traj").glob("*/trial.json"))
        out = self.folder / "trials.csv"
        subprocess.run([sys.executable, "align_trial.py", *folders, "--out", out], cwd=REPO, check=True, capture_output=True)
        with open(out) as f:
            return {r["trajectory"]: r for r in csv.DictReader(f)}


class Keeper(threading.Thread):
    """Keeps the model server up, as whoever runs a server would; counts how often it had to."""

    def __init__(self, env, log):
        super().__init__(daemon=True)
        self.env, self.log, self.over, self.starts, self.process = env, log, threading.Event(), 0, None

    def run(self):
        while not self.over.is_set():
            if self.process is None or self.process.poll() is not None:
                self.starts += 1
                with open(self.log, "ab") as log:
                    self.process = subprocess.Popen(["bash", "02_serve_vllm.sh"], cwd=REPO, env=self.env, stdout=log, stderr=log)
            self.over.wait(0.5)
        self.process.terminate()
        self.process.wait(60)


def disturb(marks, rng, every_s, until, kills):
    """Kill something of the run every now and then, as `kill -9` does."""
    while True:
        time.sleep(rng.expovariate(1 / every_s))
        if time.monotonic() > until:
            return
        living = processes(*marks)
        victims = {kind: [p for p in living if is_one(p)] for kind, is_one in VICTIMS.items()}
        kinds = [kind for kind in VICTIMS if victims[kind]]
        if kinds:
            kind = rng.choice(kinds)
            victim = rng.choice(victims[kind])
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            kills[kind] += 1


def size_mb(folder):
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6


def soak(folder, trials, minutes, every_s, seed):
    """Rows of the table, as (what, value, holds); holds is None for what is only stated."""
    rng = random.Random(seed)
    begin = time.monotonic()
    patience_s = max(600.0, 60 * minutes)  # for what was begun to be finished in peace
    port = free_port()
    disturbed, calm = Place(folder / "disturbed", port), Place(folder / "calm", port)
    marks = (str(folder),)
    write_tasks(folder)
    tasks = folder / "list.txt"
    tasks.write_text("\n".join(TASKS) + "\n")
    reps = -(-trials // len(TASKS))
    keeper = Keeper(disturbed.env, folder / "server.log")
    keeper.start()
    adapter = [sys.executable, "servers/adapter.py", "wait", "--kind", "llamacpp", "--url", f"http://127.0.0.1:{port}", "--timeout", "600"]
    subprocess.run(adapter, cwd=REPO, check=True)

    # Under kills; then the plan is cut to what was begun, and that is finished in peace.
    kills, starts, peak_mb = collections.Counter(), 0, 0.0
    until = begin + 60 * minutes * 0.6
    killer = threading.Thread(target=disturb, args=(marks, rng, every_s, until, kills), daemon=True)
    killer.start()
    while time.monotonic() < until and len(disturbed.measured()) < reps * len(TASKS):
        batch = disturbed.batch(tasks, reps)
        starts += 1
        while batch.poll() is None and time.monotonic() < until:
            time.sleep(0.3)
        if batch.poll() is None:
            batch.terminate()
            batch.wait(60)
        peak_mb = max(peak_mb, size_mb(disturbed.folder))
    killer.join(60)
    reps_done = max(1, len(disturbed.measured()) // len(TASKS))
    planned = reps_done * len(TASKS)
    for place, tries in ((disturbed, 3), (calm, 2)):
        for _ in range(tries):
            batch = place.batch(tasks, reps_done)
            starts += place is disturbed
            try:
                batch.wait(patience_s)
            except subprocess.TimeoutExpired:
                batch.terminate()
                batch.wait(60)
            if len([n for n in place.measured() if int(n.rpartition("__r")[2]) <= reps_done]) == planned:
                break
    elapsed = time.monotonic() - begin
    keeper.over.set()
    keeper.join(90)

    time.sleep(1)
    left = processes(*marks)
    wanted = [f"{t}__summarize-off__r{r}" for t in TASKS for r in range(1, reps_done + 1)]
    rows, reference = disturbed.rows(), calm.rows()
    lost = [w for w in wanted if w not in disturbed.measured()]
    differ = [w for w in wanted if w in rows and w in reference and any(rows[w][c] != reference[w][c] for c in IDENTITY)]
    compared = sum(w in rows and w in reference for w in wanted)
    unenergetic = [w for w in wanted if w in rows and not rows[w]["cpu_total_j"]]
    unfinished = disturbed.folder / "data/traj_unfinished"
    aside = [p for p in unfinished.glob("*")] if unfinished.exists() else []
    with open(disturbed.folder / "data/waste.csv") if aside else open(os.devnull) as f:
        waste = list(csv.DictReader(f))
    per_trial = size_mb(calm.folder / "data") / planned
    mb = size_mb(disturbed.folder / "data")
    attempts = len(disturbed.measured()) + len(aside)
    run_dir = [p.name for p in (folder / "run").glob("*.json")]
    details = [p.line for p in left] + [f"lost: {x}" for x in lost]
    details += [f"differs: {x}: {[(c, rows[x][c], reference[x][c]) for c in IDENTITY if rows[x][c] != reference[x][c]]}" for x in differ]
    table = [
        ("minutes", f"{elapsed / 60:.1f}", None),
        ("trials planned and finished under kills", f"{planned}", None),
        ("kills: " + ", ".join(f"{k} {kills[k]}" for k in VICTIMS), f"{sum(kills.values())}", None),
        ("starts of the batch, of the model server", f"{starts}, {keeper.starts}", None),
        ("planned trials lost", f"{len(lost)}", not lost),
        ("measured rows without energy", f"{len(unenergetic)}", not unenergetic),
        ("rows that differ from the undisturbed run's in " + ", ".join(IDENTITY), f"{len(differ)} of {compared}", not differ and compared == planned),
        ("attempts set aside, of them in waste.csv", f"{len(aside)}, {len(waste)}", len(aside) == len(waste)),
        ("joules of the attempts set aside (estimated where there is no RAPL)", f"{sum(float(r['energy_j'] or 0) for r in waste):.0f}", None),
        ("processes left at the end", f"{len(left)}", not left),
        ("notes of process groups left", f"{len(run_dir)}", not run_dir),
        ("MB per undisturbed trial; per attempt under kills", f"{per_trial:.2f}; {mb / max(attempts, 1):.2f}", mb / max(attempts, 1) <= 1.5 * per_trial),
    ]
    return table, details


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trials", type=int, default=200)
    p.add_argument("--minutes", type=float, default=120.0)
    p.add_argument("--every", type=float, default=15.0, help="mean seconds between two kills")
    p.add_argument("--seed", type=int, default=int(time.time()))
    p.add_argument("--out", type=Path, help="the table as CSV")
    p.add_argument("--keep", action="store_true", help="leave the data")
    a = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trajoule-soak."))
    print(f"seed {a.seed}, data in {folder}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        table, details = soak(folder, a.trials, a.minutes, a.every, a.seed)
    finally:  # whatever went wrong here, nothing of it stays: the stages end what they started
        for p in processes(str(folder)):
            if p.line.startswith(("bash 06_run_batch.sh", "bash 02_serve_vllm.sh")) or "--name server-" in p.line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(p.pid, signal.SIGTERM)
    table = [("seed", str(a.seed), None), *table]
    for what, value, holds in table:
        print(f"{'' if holds is None else 'ok' if holds else 'NOT':4}{value:>16}  {what}")
    for line in details:
        print(f"    {line}")
    if a.out:
        with open(a.out, "w", newline="") as f:
            w = csv.writer(f, lineterminator="\n")
            w.writerow(["what", "value", "holds"])
            w.writerows((what, value, "" if holds is None else "yes" if holds else "no") for what, value, holds in table)
    bad = any(holds is False for _, _, holds in table)
    if not a.keep and not bad:
        shutil.rmtree(folder)
    sys.exit(bad)


if __name__ == "__main__":
    main()
