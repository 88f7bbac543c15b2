"""One row of oracle_times.csv from Harbor's folder of one reference solution, and the list of tasks that work.

    python stages/oracle.py --task fix-bug --job data/oracle/fix-bug/harbor --exit 0 --wall 3.2 --times tasks/oracle_times.csv --ok tasks/oracle_ok.txt

Columns: task, ok, reason, reward, wall_s, setup_s (build or start of the environment), solve_s, verify_s, environment, checked (UTC).
`reason` says why a task does not work here: build, setup, agent, verifier, timeout, wrong (the reference solution is judged wrong), harbor.
"""

import argparse
import csv
import json
import os
from datetime import UTC, datetime
from pathlib import Path

FIELDS = ["task", "ok", "reason", "reward", "wall_s", "setup_s", "solve_s", "verify_s", "environment", "checked"]


def seconds(phase):
    """Duration of one of Harbor's phases, None when it did not run to its end."""
    if not phase or not phase.get("started_at") or not phase.get("finished_at"):
        return None
    begin, end = (datetime.fromisoformat(phase[k].replace("Z", "+00:00")) for k in ("started_at", "finished_at"))
    return round((end - begin).total_seconds(), 3)


def reason_of(result, exit_code):
    """Why the reference solution did not earn a reward of 1; empty when it did."""
    if exit_code == 124:
        return "timeout"
    if result is None:
        return "harbor"
    kind = (result.get("exception_info") or {}).get("exception_type") or ""
    if "Timeout" in kind:
        return "timeout"
    if kind.startswith(("Verifier", "Reward")):
        return "verifier"
    if kind:
        return "setup" if result.get("agent_setup") else "agent" if result.get("agent_execution") else "build"
    reward = ((result.get("verifier_result") or {}).get("rewards") or {}).get("reward")
    return "verifier" if reward is None else "" if reward >= 1 else "wrong"


def read_rows(path):
    try:
        with open(path, encoding="utf-8-sig", newline="") as f:
            return list(csv.DictReader(f))
    except FileNotFoundError:
        return []


def replace(path, write):
    tmp = path.with_name(f"{path.name}.tmp{os.getpid()}")
    with open(tmp, "w", newline="", encoding="utf-8") as f:
        write(f)
    os.replace(tmp, path)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", required=True)
    p.add_argument("--job", type=Path, required=True)
    p.add_argument("--exit", type=int, required=True)
    p.add_argument("--wall", type=float, required=True)
    p.add_argument("--environment", default="")
    p.add_argument("--times", type=Path, required=True)
    p.add_argument("--ok", type=Path, required=True)
    a = p.parse_args()
    try:
        result = json.loads(next(iter(sorted(a.job.glob("*/result.json")))).read_text())
    except (StopIteration, ValueError, OSError):
        result = None
    reason = reason_of(result, a.exit)
    r = result or {}
    row = {
        "task": a.task, "ok": int(not reason), "reason": reason, "wall_s": round(a.wall, 3), "environment": a.environment,
        "reward": ((r.get("verifier_result") or {}).get("rewards") or {}).get("reward"), "setup_s": seconds(r.get("environment_setup")),
        "solve_s": seconds(r.get("agent_execution")), "verify_s": seconds(r.get("verifier")), "checked": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip
    rows = [x for x in read_rows(a.times) if x["task"] != a.task] + [row]
    a.times.parent.mkdir(parents=True, exist_ok=True)

    def write_times(f):
        w = csv.DictWriter(f, FIELDS, lineterminator="\n")
        w.writeheader()
        w.writerows(rows)

    replace(a.times, write_times)
    replace(a.ok, lambda f: f.write("# tasks whose reference solution earns its reward on this machine (05_oracle_check.sh)\n"
                                    + "".join(f"{x['task']}\n" for x in rows if str(x["ok"]) == "1")))  # fmt: skip
    message = (r.get("exception_info") or {}).get("exception_message") or ""
    print(f"{a.task}: {'ok' if not reason else 'does not work here: ' + reason + (' - ' + message.strip().splitlines()[0][:200] if message.strip() else '')}"
          f" ({a.wall:.1f} s)")  # fmt: skip


if __name__ == "__main__":
    main()
