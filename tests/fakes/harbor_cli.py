"""Stands in for `harbor run` where Harbor itself is not under test: the same arguments, the same files, real calls to the server.

Each trial makes `calls` model calls with the trial's UUID as the runner's agent would, then its session is closed as the plugin's END hook does. HARBOR_FAKE
(environment, JSON): trials N, calls N, rc N, errored N, hang true, prompt N characters, deadline_s of a session's close.
"""

import argparse
import functools
import json
import os
import sys
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

PLAN = {"trials": 1, "calls": 2, "rc": 0, "errored": 0, "prompt": 40, "deadline_s": 120} | json.loads(os.environ.get("HARBOR_FAKE") or "{}")


def chat(url, model, headers, text):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "tools": [{}]}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as r:
        return json.load(r)


def now():
    return datetime.now(UTC).isoformat()


def trial(a, url, number, close):
    ident, name = str(uuid.uuid4()), f"{a.include_task_name[0]}__fake{number}"
    folder = Path(a.jobs_dir) / a.job_name / name
    (folder / "agent").mkdir(parents=True)
    headers = {"X-Session-ID": f"{name}__agent"}
    if os.environ.get("TRAJOULE_SESSIONS") == "trial":
        headers["x-session-affinity"] = ident
    begin = now()
    messages = []
    for _ in range(PLAN["calls"]):
        reply = chat(url, a.model.removeprefix("openai/"), headers, "x" * PLAN["prompt"])["choices"][0]["message"]
        messages.append({**reply, "extra": {"timestamp": time.time()}})
    info = {"exit_status": "Submitted", "model_stats": {"api_calls": PLAN["calls"]}}
    (folder / "agent" / "mini-swe-agent.trajectory.json").write_text(json.dumps({"info": info, "messages": messages}))
    broken = number < PLAN["errored"]
    result = {
        "id": ident, "task_name": a.include_task_name[0], "started_at": begin, "finished_at": now(),
        "agent_execution": {"started_at": begin, "finished_at": now()},
        "exception_info": {"exception_type": "EnvironmentStartTimeoutError"} if broken else None,
        "verifier_result": None if broken else {"rewards": {"reward": float(number % 2 == 0)}},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    if close:
        close(ident)


def main():
    p = argparse.ArgumentParser()
    for name in ("jobs-dir", "job-name", "model", "plugin", "plugin-kwarg", "n-concurrent", "n-attempts", "agent", "dataset", "path"):
        p.add_argument(f"--{name}")
    for name in ("ae", "ak", "include-task-name"):
        p.add_argument(f"--{name}", action="append")
    a, _ = p.parse_known_args(sys.argv[2:])
    url = next(x for x in a.ae if x.startswith("OPENAI_BASE_URL=")).partition("=")[2]
    close = None
    if a.plugin and os.environ.get("TRAJOULE_SESSIONS") == "trial":
        import kv_sessions

        close = functools.partial(kv_sessions.close_session, a.plugin_kwarg.partition("=")[2], deadline_s=PLAN["deadline_s"])
    job_dir = Path(a.jobs_dir) / a.job_name
    job_dir.mkdir()
    if PLAN.get("hang"):
        time.sleep(600)
    with ThreadPoolExecutor(int(a.n_concurrent)) as pool:
        list(pool.map(lambda n: trial(a, url, n, close), range(PLAN["trials"])))
    job = {"n_total_trials": PLAN["trials"], "stats": {"n_completed_trials": PLAN["trials"], "n_errored_trials": PLAN["errored"]}}
    (job_dir / "result.json").write_text(json.dumps(job))
    sys.exit(PLAN["rc"])


if __name__ == "__main__":
    main()
