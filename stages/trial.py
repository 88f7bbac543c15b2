"""The two ends of one trajectory that bash should not compute: Harbor's job file before, trial.json after.

    python stages/trial.py check   --task fix-bug --policy summarize-8k
    python stages/trial.py prepare --dir data/h200/traj/fix-bug__summarize-8k__r1 --task fix-bug --policy summarize-8k --rep 1 ...
    python stages/trial.py kept    --dir data/h200/traj/fix-bug__summarize-8k__r1 --mode live
    python stages/trial.py finish  --dir data/h200/traj/fix-bug__summarize-8k__r1 --harbor-exit 0

`check` refuses (exit code 2) what no server could run: a task that is not there or broken, a policy that there is not. `prepare` writes
request.json (what is asked) and job.json (Harbor's job configuration), and prints the deadline in force: --deadline, or what
the task allows itself if that is more. `finish` writes trial.json, atomically and last:
its presence means that the trajectory is finished. `kept` refuses a finished one of another kind (exit code 2).
Exit codes: 2 bad input, `finish` and `kept` 3 when the trial failed for infrastructure reasons.

Context policies of Terminus-2 (L is the server's context in tokens). It summarizes before a call when its free context, L minus its own
count of the history, is below a threshold; so "once the history exceeds N tokens" is the threshold L - N:
  summarize-off    never; a context overflow ends the trial
  summarize-<N>k   once the history exceeds N x 1024 tokens
  summarize-on     Terminus-2's default: when fewer than 8,000 tokens are free
L is always passed on as model_info: for a model that litellm does not know, Harbor would silently assume 1,000,000 tokens.
"""

import argparse
import difflib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from stages import datasets, plan  # noqa: E402

DEFAULT_FREE_TOKENS = 8000  # Terminus-2's own threshold
ROOM_TOKENS = 2048  # a summary itself needs this much beyond the history that triggers it


class BadInput(ValueError):
    """Something that the user gave cannot be; the text says what and what would do."""


def policy_kwargs(policy, context):
    """Terminus-2's arguments for a context policy at a served context of `context` tokens. Raises BadInput."""
    if policy == "summarize-off":
        return {"enable_summarize": False}
    if policy == "summarize-on":
        if context < DEFAULT_FREE_TOKENS + ROOM_TOKENS:
            raise BadInput(
                f"policy summarize-on keeps {DEFAULT_FREE_TOKENS} tokens free, but the server's context is {context}: it would summarize "
                f"before every call; use summarize-<N>k, or serve at least {DEFAULT_FREE_TOKENS + ROOM_TOKENS} tokens (MAX_MODEL_LEN)"
            )
        return {"enable_summarize": True, "proactive_summarization_threshold": DEFAULT_FREE_TOKENS}
    m = re.fullmatch(r"summarize-([1-9][0-9]{0,4})k", policy)
    if not m:
        raise BadInput(
            f"policy '{policy:.60}' is unknown; expected summarize-off, summarize-on or summarize-<N>k with N from 1 to 99999, such as summarize-8k"
        )
    history = int(m[1]) * 1024
    if context < history + ROOM_TOKENS:
        raise BadInput(
            f"policy {policy} needs a context of at least {history + ROOM_TOKENS} tokens, the server offers {context}: "
            f"raise MAX_MODEL_LEN or take a smaller N"
        )
    return {"enable_summarize": True, "proactive_summarization_threshold": context - history}


def find_task(task, tasks_dir, registry=""):
    """(name, part of Harbor's job configuration) of a task: a folder, a name in tasks_dir, or DATASET@VERSION/NAME (looked up in `registry`)."""
    for folder in (Path(task), Path(tasks_dir) / task):
        if (folder / "task.toml").is_file():
            folder = Path(os.path.abspath(folder))  # a link's own name, not its target's: the plan and the folders have it, too
            return folder.name, {"tasks": [{"path": str(folder)}]}
    whole, _, name = task.rpartition("/")
    part = datasets.dataset(whole, registry, name)
    if part and name:
        return name, {"datasets": [part]}
    known = sorted(p.parent.name for p in Path(tasks_dir).glob("*/task.toml"))
    near = ", ".join(difflib.get_close_matches(Path(task).name, known, 3) or known[:3])
    raise BadInput(
        f"task '{task}' is no folder with a task.toml, not in {tasks_dir} ({f'of {len(known)} tasks, such as {near}' if known else 'empty'}), "
        f"and not of the form DATASET@VERSION/NAME"
    )


def sound_task(task, tasks_dir, registry=""):
    """(name, part of Harbor's job configuration, its folder or None) of a task whose task.toml, if it has a folder, Harbor can use."""
    name, part = find_task(task, tasks_dir, registry)
    folder = Path(part["tasks"][0]["path"]) if "tasks" in part else None
    if folder:
        datasets.config_of(folder)
    return name, part, folder


def job_config(a, task_part, policy_args):
    """Harbor's job configuration of one trial; everything that Harbor is told is in it."""
    call_kwargs = {"max_tokens": a.max_output_tokens}
    if a.schema and a.mode == "live":
        try:
            schema = json.loads(Path(a.schema).read_text())
        except (OSError, ValueError) as e:
            raise BadInput(f"RESPONSE_SCHEMA={a.schema}: {e}; expected a JSON schema file, or nothing") from None
        call_kwargs["extra_body"] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "terminus2", "strict": True, "schema": schema}}
        }
    kwargs = {
        "api_base": f"{a.proxy_url}/v1",
        "session_id_headers": ["X-Session-ID"],
        "model_info": {
            "max_input_tokens": a.context,
            "max_output_tokens": a.max_output_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        },
        "llm_kwargs": {"timeout": a.llm_timeout},
        "llm_call_kwargs": call_kwargs,
        **policy_args,
    }
    if a.temperature is not None:
        kwargs["temperature"] = a.temperature
    if a.max_turns:
        kwargs["max_turns"] = a.max_turns
    agent = {"name": "terminus-2", "model_name": f"openai/{a.model}", "kwargs": kwargs}
    if a.agent_timeout:
        agent["override_timeout_sec"] = a.agent_timeout
    environment = {"type": "docker"} if a.environment == "docker" else {"import_path": "local_env:LocalEnvironment"}
    return {
        "job_name": "harbor",
        "jobs_dir": str(Path(a.dir).resolve()),
        "n_attempts": 1,
        "n_concurrent_trials": 1,
        "quiet": True,
        "retry": {"max_retries": 0},
        "environment": environment,
        "agents": [agent],
        **task_part,
    }


def package_versions():
    """Versions of what decides about behaviour and numbers; None where a package is not in this environment."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("harbor", "litellm", "aiohttp", "numpy", "xllamacpp", "nvidia-ml-py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def idle_rested(path):
    """{counter: W} of a batch's loaded-idle baseline, of the measured counters that were idle in it (calibrate.py's judgement)."""
    import calibrate
    import energylib

    samples = energylib.read_samples(path)
    found = {d: calibrate.idle_of_file(samples, d)["power_w"] for d in samples.domains if samples.source[d] != "model"}
    return {d: round(w, 3) for d, w in found.items() if w is not None}


def check(a):
    sound_task(a.task, a.tasks_dir, a.registry)
    policy_kwargs(a.policy, sys.maxsize)


def prepare(a):
    import energylib

    name, task_part, declared = sound_task(a.task, a.tasks_dir, a.registry)
    recording = None
    if a.mode == "replay":
        try:
            content = json.loads(Path(a.recording).read_text())
            recording = {"name": content["name"], "file": a.recording, "sha256": energylib.sha256(a.recording), "source": content["source"],
                         "expected_outcome": content.get("expected_outcome")}  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(
                f"recording '{a.recording}': {type(e).__name__} {e}; expected a JSON file with name, task, source and calls"
            ) from e
        if content.get("task") != name:
            raise BadInput(f"recording {a.recording} is of task '{content.get('task')}', not of '{name}'")
    if a.context is None:
        raise BadInput("the server does not tell its context: set MAX_MODEL_LEN to it")
    policy_args = policy_kwargs(a.policy, a.context)
    folder = Path(a.dir)
    if not folder.name.startswith(f"{name}__{a.policy}__r"):
        raise BadInput(f"folder {folder} does not fit task {name} and policy {a.policy}")
    request = {
        "schema": 1,
        "trajectory": folder.name,
        "task": name,
        "policy": a.policy,
        "rep": a.rep,
        "mode": a.mode,
        "recording": recording,
        "model": a.model,
        "agent": "terminus-2",
        "profile": a.profile,
        "environment": a.environment,
        "context_limit": a.context,
        "policy_args": policy_args,
        "server": {"kind": a.server_kind, "version": a.server_version, "max_context": a.context},
        "idle_rested_w": idle_rested(a.idle) if a.idle else None,
        "concurrency": max(len(a.members), 1),
        "shared": {"group": Path(a.group).name, "members": a.members, "folder": os.path.relpath(a.group, folder)} if a.group else None,
        "versions": package_versions(),
        "harbor_version": importlib.metadata.version("harbor"),
    }
    job = job_config(a, task_part, policy_args)
    timeout = a.agent_timeout or (datasets.config_of(declared).get("agent", {}).get("timeout_sec") if declared else None)
    # What the task allows itself is not ours to cut short: that would count as a failure of the infrastructure.
    deadline_s = max(a.deadline or 0.0, datasets.limit_s(declared, a.agent_timeout) if declared else 0.0)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        energylib.write_json_atomic(folder / "request.json", request)
        energylib.write_json_atomic(folder / "job.json", job)
    except OSError:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    print(
        f"{name}: {a.policy}, {'replay of ' + recording['name'] if recording else 'live'}, context {a.context}, "
        f"agent timeout {f'{timeout:.0f} s' if timeout else 'of the task'}",
        file=sys.stderr,
    )
    print(deadline_s)


def kept(a):
    """A finished trajectory stays; its exit code is the same again. Raises ValueError when it is of another kind than asked for."""
    name, found = os.path.basename(a.dir), plan.measured(Path(a.dir), a.mode, a.recording)
    if found == "failed":
        why = plan.infra_failure(json.loads((Path(a.dir) / "trial.json").read_text()))
        print(f"{name} failed for infrastructure reasons: {why} (06_run_batch.sh runs it again, and so does this once its folder is moved away)")
        return 3
    if found:
        print(f"{name} is finished already (move its folder away to measure it again)")
    return 0


# Exceptions after which the agent's work counts: everything else that Harbor reports is infrastructure, and the batch retries it.
AGENT_EXCEPTIONS = ("AgentTimeoutError", "ContextLengthExceededError", "OutputLengthExceededError", "NonZeroAgentExitCodeError")


def finish(a):
    import energylib

    folder = Path(a.dir)
    request = json.loads((folder / "request.json").read_text())
    results = sorted(folder.glob("harbor/*/result.json"))
    ended, reason, exception, rewards = "finished", None, None, None
    if a.harbor_exit == 124:
        ended, reason = "deadline", f"the trial ran longer than {a.deadline:.0f} s (TRIAL_DEADLINE_S, or what the task allows itself)"
    elif a.harbor_exit in (129, 130, 143):
        ended, reason = "interrupted", f"Harbor was ended by a signal (exit {a.harbor_exit})"
    elif not results:
        ended, reason = "harbor_failed", f"Harbor left no result.json (exit {a.harbor_exit}); see {folder}/logs/harbor.log"
    if results:
        try:
            result = json.loads(results[0].read_text())
            exception = (result.get("exception_info") or {}).get("exception_type")
            rewards = (result.get("verifier_result") or {}).get("rewards")
        except ValueError as e:
            ended, reason = "harbor_failed", f"{results[0]} is no JSON ({e})"
    if ended == "finished" and exception and exception not in AGENT_EXCEPTIONS:
        reason = f"Harbor reports {exception}"
    if ended == "finished" and a.server_down:
        ended, reason = "server_down", "the model server did not answer after the trial"
    if ended in ("finished", "harbor_failed") and a.broken:
        ended, reason = "harness_failed", a.broken
    try:
        meta = json.loads((folder / "samples.meta.json").read_text())
    except (OSError, ValueError):
        meta = None
    calib = Path(a.calib) / "params.json" if a.calib else None
    trial = {
        **request,
        "hardware": energylib.hardware_name(meta if isinstance(meta, dict) else {}),
        "t_begin": a.t_begin,
        "t_end": a.t_end,
        "harbor_exit": a.harbor_exit,
        "ended": ended,
        "reason": reason,
        "exception": exception,
        "reward": (rewards or {}).get("reward"),
        "calib_sha256": energylib.sha256(calib) if calib and calib.exists() else None,
    }
    failure = plan.infra_failure(trial)
    energylib.write_json_atomic(folder / "trial.json", trial)
    (folder / "request.json").unlink()
    print(f"{request['trajectory']}: {f'not scored: {failure}' if failure else f"reward {trial['reward']}"}")
    return 3 if failure else 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    q = sub.add_parser("prepare")
    optional = lambda kind: lambda text: kind(text) if text not in ("", "-") else None  # noqa: E731
    for name, kind in (
        ("dir", str),
        ("task", str),
        ("tasks-dir", str),
        ("registry", str),
        ("policy", str),
        ("rep", int),
        ("mode", str),
        ("recording", str),
        ("model", str),
        ("context", optional(int)),
        ("profile", str),
        ("environment", str),
        ("server-kind", str),
        ("server-version", optional(str)),
        ("proxy-url", str),
        ("temperature", optional(float)),
        ("max-turns", optional(int)),
        ("max-output-tokens", int),
        ("agent-timeout", optional(float)),
        ("llm-timeout", float),
        ("schema", str),
        ("deadline", float),
    ):
        q.add_argument(f"--{name}", type=kind)
    q.add_argument("--idle", help="samples of the batch's loaded-idle baseline")
    q.add_argument("--group", help="folder of the trajectories that run at the same time; its samples are theirs")
    q.add_argument("--members", type=str.split, default=[], help="their names, this one's too")
    q = sub.add_parser("check")
    q.add_argument("--task", required=True)
    q.add_argument("--policy", required=True)
    q.add_argument("--tasks-dir", default="tasks/local")
    q.add_argument("--registry", default="")
    q = sub.add_parser("kept")
    q.add_argument("--dir", required=True)
    q.add_argument("--mode", required=True)
    q.add_argument("--recording", default="")
    q = sub.add_parser("finish")
    q.add_argument("--dir", required=True)
    q.add_argument("--harbor-exit", type=int, required=True)
    q.add_argument("--deadline", type=float, default=0.0)
    q.add_argument("--t-begin", type=float)
    q.add_argument("--t-end", type=float)
    q.add_argument("--server-down", action="store_true")
    q.add_argument("--broken", help="what of the measurement itself failed: the trial counts as infrastructure failure")
    q.add_argument("--calib", help="folder of the calibration in force")
    a = p.parse_args()
    try:
        sys.exit({"check": check, "prepare": prepare, "kept": kept, "finish": finish}[a.what](a))
    except (ValueError, OSError) as e:
        print(f"{os.path.basename(a.dir) if 'dir' in a else 'trial'}: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
