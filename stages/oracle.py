"""Run the reference solutions of a task list, several at a time in one Harbor process, and note which tasks work on this machine.

    python stages/oracle.py --list tasks/local.txt --jobs 2 --environment docker --folder data/h200/oracle \\
        --times data/h200/oracle_times.csv --ok data/h200/oracle_ok.txt

A row is written as soon as its task ends; a task that has one for this environment is not run again (--retry: those that failed are). The list
(--ok) is made from the rows: the tasks of --list that work in this environment.
Columns: task, ok, reason, reward, wall_s, pull_s, build_s (of the image), setup_s (start of the environment without them), solve_s, verify_s,
environment, checked (UTC), image (digest of a prebuilt one), detail. `reason` says why a task does not work here: dataset (not found), pull,
build, setup (of the environment), agent, verifier, timeout, network, wrong (the reference solution is judged wrong), harbor; `detail` is what
was said about it, in a line.
"""

import argparse
import asyncio
import json
import re
import shutil
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this folder, whose files are no packages
from stages import csvfiles, datasets, plan, trial  # noqa: E402

FIELDS = [*["task", "ok", "reason", "reward", "wall_s", "pull_s", "build_s", "setup_s", "solve_s", "verify_s", "environment", "checked"], "image", "detail"]
# What programs say when the network is the trouble, rather than the task. A refused connection is not among them: tasks have servers of their own.
NETWORK = re.compile(
    r"could not resolve|temporary failure (?:in name resolution|resolving)|name or service not known|network is unreachable|no such host"
    r"|tls handshake|certificate verify failed|certificate signed by unknown|toomanyrequests|i/o timeout|failed to fetch https?:"
    r"|curl: \((?:6|7|28|35|60)\)|error getting dataset|unable to access 'https?:|dns error",
    re.IGNORECASE,
)


def seconds(phase):
    """Duration of one of Harbor's phases, None when it did not run to its end."""
    if not phase or not phase.get("started_at") or not phase.get("finished_at"):
        return None
    begin, end = (datetime.fromisoformat(phase[k].replace("Z", "+00:00")) for k in ("started_at", "finished_at"))
    return round((end - begin).total_seconds(), 3)


def network_line(text):
    """The line of a log that shows network trouble, None when none does."""
    return next((line.strip() for line in text.splitlines() if NETWORK.search(line)), None)


def judge(result, docker=None, log="", error=""):
    """(reason, detail) of one task: `result` is Harbor's, None when it left none; `docker` what oracle_env noted; `log` the output of the
    reference solution and of the verifier; `error` what kept Harbor from running it. reason is empty when the task works."""
    exception = (result or {}).get("exception_info") or {}
    kind, message = exception.get("exception_type") or "", (exception.get("exception_message") or error).strip()
    reward = (((result or {}).get("verifier_result") or {}).get("rewards") or {}).get("reward")
    if result is not None and not kind and reward is not None and reward >= 1:
        return "", ""
    phase = docker["phase"] if docker and docker["failed"] else None
    if result is None:
        phase = phase or "harbor"
    elif kind.startswith(("Verifier", "Reward", "AddTests", "DownloadVerifier")) or not kind:
        phase = "verifier"
    else:
        phase = phase or ("agent" if result.get("agent_execution") else "setup" if docker or result.get("agent_setup") else "build")
    trouble = network_line(f"{message}\n{log}")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = trouble or (lines[-1] if phase in ("pull", "build") and lines else lines[0] if lines else "")
    if "Timeout" in kind and not trouble:
        return "timeout", f"{phase}: {said}"
    if trouble:
        return "network", f"{phase}: {trouble}"
    if phase == "verifier" and not kind:
        return ("verifier", "no reward was written") if reward is None else ("wrong", f"the reference solution earns {reward:g}")
    return phase, said


def note(times, row):
    """Write one task's row, in place of an earlier one of the same environment."""
    same = lambda r: (r["task"], r["environment"]) == (row["task"], row["environment"])  # noqa: E731
    csvfiles.write(times, FIELDS, [r for r in csvfiles.read(times) if not same(r)] + [row], extra="ignore")


def list_working(times, ok, tasks, environment):
    """Write the list of those of `tasks` that work in the environment, which the rows say; returns how many."""
    works = {r["task"] for r in csvfiles.read(times) if r["environment"] == environment and r["ok"] == "1"}
    found = [t for t in tasks if t in works]
    head = f"# tasks whose reference solution earns its reward on this machine, in {environment} (05_oracle_check.sh)\n"
    csvfiles.replace(ok, lambda f: f.write(head + "".join(f"{t}\n" for t in found)))
    return len(found)


def read_result(folder):
    """(Harbor's result or None, what oracle_env noted or None, output of solution and verifier) of a job folder with one trial."""

    def load(pattern):
        try:
            return json.loads(next(folder.glob(pattern)).read_text())
        except (StopIteration, OSError, ValueError):
            return None

    logs = [p for name in ("agent/oracle.txt", "verifier/test-stdout.txt") for p in folder.glob(f"*/{name}")]
    return load("*/result.json"), load("*/docker.json"), "\n".join(p.read_text(errors="replace")[-20000:] for p in logs)


async def run_one(task, a):
    """One reference solution to its end; returns its row. What goes wrong is in the row, nothing is raised but cancellation."""
    from harbor.job_plan import JobPlan
    from harbor.models.job.config import JobConfig
    from harbor.trial.trial import Trial

    folder, begin, error, late, deadline = Path(a.folder) / Path(task).name, time.monotonic(), "", False, a.deadline
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reason = None
    try:
        _, task_part, _ = trial.sound_task(task, a.tasks_dir, a.registry)
        environment = "stages.oracle_env:TimedDocker" if a.environment == "docker" else "local_env:LocalEnvironment"
        job = JobConfig(job_name="harbor", jobs_dir=folder, agents=[{"name": "oracle"}], environment={"import_path": environment}, **task_part)
        reason = "dataset"
        found = await JobPlan.from_config(job)
        reason = None
        if len(found.trial_configs) != 1:
            raise ValueError(f"'{task}' are {len(found.trial_configs)} tasks; name one a line")
        # what the task allows itself is not ours to cut short
        deadline = max(a.deadline, datasets.limit_s(found.task_configs[0].get_local_path()))
        async with asyncio.timeout(deadline):
            await (await Trial.create(found.trial_configs[0])).run()
    except TimeoutError:
        late, error = True, f"longer than {deadline:.0f} s (TRIAL_DEADLINE_S, or what the task allows itself)"
    except Exception as e:  # noqa: BLE001 - a broken task must not end the check of the others
        error = f"{type(e).__name__}: {e}"
    result, docker, log = read_result(folder / "harbor")
    judged, detail = judge(result, docker, log, error)
    if late:
        judged, detail = "timeout", error
    elif reason and judged != "network":
        judged = reason
    pull, build = (docker["seconds"] if docker and docker["phase"] == phase else None for phase in ("pull", "build"))
    setup = seconds((result or {}).get("environment_setup"))
    return {
        "task": task, "ok": int(not judged), "reason": judged, "wall_s": round(time.monotonic() - begin, 3), "environment": a.environment,
        "reward": (((result or {}).get("verifier_result") or {}).get("rewards") or {}).get("reward"), "pull_s": pull, "build_s": build,
        "setup_s": None if setup is None else round(max(setup - (pull or 0) - (build or 0), 0), 3),
        "solve_s": seconds((result or {}).get("agent_execution")), "verify_s": seconds((result or {}).get("verifier")),
        "checked": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "image": (docker or {}).get("image"), "detail": " ".join(detail.split())[:300],
    }  # fmt: skip


async def check(tasks, a, ended_one=lambda: None):
    """Every task, `a.jobs` at a time; `ended_one` is called after each row. A signal ends those that run, with their containers; what has a row
    keeps it."""
    me = asyncio.current_task()
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(s, me.cancel)
    gate, begin, ended = asyncio.Semaphore(a.jobs), time.monotonic(), 0

    async def one(task):
        nonlocal ended
        async with gate:
            row = await run_one(task, a)
        note(a.times, row)
        ended_one()
        ended += 1
        left = (time.monotonic() - begin) / ended * (len(tasks) - ended)
        parts = [f"{k[:-2]} {row[k]:.1f}" for k in ("pull_s", "build_s", "setup_s", "solve_s", "verify_s") if row[k] is not None]
        said = "ok" if row["ok"] else f"does not work here: {row['reason']} - {row['detail']}"
        print(f"{ended}/{len(tasks)} {task}: {said} ({row['wall_s']:.1f} s{': ' if parts else ''}{', '.join(parts)})"
              f"{f', about {left:.0f} s left' if ended < len(tasks) else ''}", flush=True)  # fmt: skip

    await asyncio.gather(*(one(t) for t in tasks))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", required=True)
    p.add_argument("--tasks-dir", default="tasks/local")
    p.add_argument("--registry", default="", help="where data sets are looked up; empty: Harbor's own registry")
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--environment", choices=["docker", "local_env"], required=True)
    p.add_argument("--folder", required=True, help="Harbor's folders go here, one a task")
    p.add_argument("--times", type=Path, required=True)
    p.add_argument("--ok", type=Path, required=True)
    p.add_argument("--deadline", type=float, default=7200.0, help="s for one task")
    p.add_argument("--retry", action="store_true", help="run those again that failed")
    a = p.parse_args()
    try:
        tasks = datasets.expand(plan.read_list(a.list), a.tasks_dir, a.registry)
        # The rows are the truth and the list is made from them, now too: a check may have been killed between the two.
        working = lambda: list_working(a.times, a.ok, tasks, a.environment)  # noqa: E731
        working()
        known = {r["task"] for r in csvfiles.read(a.times) if r["environment"] == a.environment and not (a.retry and r["ok"] != "1")}
    except (OSError, ValueError) as e:
        print(f"oracle: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyError as e:
        print(f"oracle: {a.times}: column {e} missing; delete the file to check all tasks anew (FORCE=1)", file=sys.stderr)
        sys.exit(2)
    todo = [t for t in tasks if t not in known]
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} have a row in {a.times} already", flush=True)
    if not todo:
        return
    try:
        asyncio.run(check(todo, a, working))
    except asyncio.CancelledError:
        sys.exit(130)


if __name__ == "__main__":
    main()
