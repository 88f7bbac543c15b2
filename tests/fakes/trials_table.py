"""Synthetic tables in the form that align_trial.py writes: seeded, consistent (parts add up), and plainly not measurements."""

import csv
import io

import numpy as np

FIRST = (1, 2, 5, 10)
MODEL, HARDWARE = "synthetic-30b", "synthetic GPU + synthetic CPU"


def rows(
    tasks=20,
    policies=("summarize-off", "summarize-8k"),
    reps=3,
    seed=1,
    mode="live",
    recording_source="",
    domains=("gpu", "cpu"),
    cpu_source="rapl",
    p_success=0.5,
    scale=1.0,
    prefix="task",
    unscored=0.03,
):
    """A list of dicts, one per trajectory. Energy follows tokens and time with 5 % of noise; harder tasks cost more and fail more."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(tasks):
        size, ease = rng.lognormal(0, 0.6), rng.beta(1.5 * p_success, 1.5 * (1 - p_success)) if 0 < p_success < 1 else p_success
        for j, policy in enumerate(policies):
            for rep in range(1, reps + 1):
                u = rng.random()
                success = u < ease
                calls = max(1, int(rng.poisson(9 * size * (0.8 if success else 1.3))))
                out.append(row(rng, f"{prefix}-{i + 1:02d}", policy, rep, calls, success, j, mode, recording_source, domains, cpu_source, scale))
                if rng.random() < unscored:
                    out[-1] |= {"outcome": "unscored", "fail_reason": "verifier"}
    return out


def row(rng, task, policy, rep, calls, success, policy_index=0, mode="live", recording_source="", domains=("gpu", "cpu"), cpu_source="rapl", scale=1.0):
    """One trajectory."""
    completion = int(calls * rng.uniform(120, 260))
    prompt = int(calls * (1500 + calls * 180 * (1 if policy_index == 0 else 0.6)))
    cached = int(prompt * rng.uniform(0.7, 0.9) * (1 if policy_index == 0 else 0.85))
    model_s = (completion * 0.012 + (prompt - cached) * 0.0002) * rng.normal(1, 0.03)
    command_s, waiting_s = calls * rng.lognormal(0.6, 0.5), calls * rng.uniform(0.6, 1.4)
    seconds = {"model": model_s, "command": command_s, "waiting": waiting_s}
    idle = {"gpu": 120.0 * scale, "cpu": 60.0 * scale}
    r = {
        "trajectory": f"{task}__{policy}__r{rep}" + ("" if mode == "live" else "-replay"),
        "task": task,
        "policy": policy,
        "rep": rep,
        "mode": mode,
        "recording": "" if mode == "live" else f"{rep:02d}-solve@0123456789ab",
        "recording_source": recording_source,
        "model": MODEL,
        "agent": "terminus-2",
        "profile": "synthetic",
        "hardware": HARDWARE,
        "t_begin": 1_790_000_000 + 100 * rep,
        "outcome": "success" if success else "fail",
        "fail_reason": "" if success else "wrong_result",
        "reward": float(success),
        "calls": calls,
        "attempts": calls,
        "turns": calls,
        "summarizations": 0,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "uncached_tokens": prompt - cached,
        "completion_tokens": completion,
        "tokens_match": True,
        "total_s": sum(seconds.values()),
        **{f"{p}_s": s for p, s in seconds.items()},
        "overlap_s": 0,
    }
    total = 0.0
    for d in ("gpu", "cpu", "dram"):
        if d not in domains:
            r |= {f"{d}_{p}_j": "" for p in ("total", "model", "command", "waiting")}
            continue
        base = idle.get(d, 5.0 * scale)
        busy = {"model": base * {"gpu": 2.2, "cpu": 0.2}.get(d, 0.1), "command": base * {"gpu": 0, "cpu": 0.5}.get(d, 0.0), "waiting": 0.0}
        parts = {p: s * (base + busy[p] * rng.normal(1, 0.05)) for p, s in seconds.items()}
        r |= {f"{d}_{p}_j": j for p, j in parts.items()} | {f"{d}_total_j": sum(parts.values())}
        total += sum(parts.values())
        if d != "dram":
            r |= {f"{d}_above_idle_j": sum(parts.values()) - base * r["total_s"], f"{d}_idle_j": base * r["total_s"]}
            r[f"{d}_model_above_idle_j"] = parts["model"] - base * seconds["model"]
            r[f"est_{d}_above_idle_j"] = base * {"gpu": 2.2, "cpu": 0.2}[d] * (completion * 0.012 + (prompt - cached) * 0.0002) * 1.01
    measured = sum(r[f"{d}_model_above_idle_j"] for d in domains if d != "dram")
    r["closure_model_above_idle"] = sum(r[f"est_{d}_above_idle_j"] for d in domains if d != "dram") / measured - 1
    r["est_domains"] = "+".join(d for d in domains if d != "dram")
    r["est_total_j"] = total * (1 + 0.6 * r["closure_model_above_idle"])
    r["closure_total"] = r["est_total_j"] / total - 1
    for k in FIRST:
        if calls >= k:
            r |= {f"first{k}_s": model_s * k / calls, f"first{k}_total_j": total * k / calls * rng.lognormal(0, 0.2)}
            r |= {f"first{k}_prompt_tokens": prompt * k // calls, f"first{k}_completion_tokens": completion * k // calls}
        else:
            r |= {f"first{k}_{c}": "" for c in ("s", "total_j", "prompt_tokens", "completion_tokens")}
    r |= {
        "total_j": total,
        "total_domains": "+".join(domains),
        "gpu_source": "nvml" if "gpu" in domains else "none",
        "cpu_source": cpu_source if "cpu" in domains else "none",
        "setup_j": 300.0 * scale,
        "verifier_j": 100.0 * scale,
        "wasted_j": 0.0,
        "throttled_s": 0.0,
        "idle_w": idle["gpu" if "gpu" in domains else "cpu"],
        "idle_source": "calibration",
        "coverage": 0.999,
        "split_source": "recording",
        "attribution": "exclusive",
        "concurrency": 1,
        "calib_sha256": "feed" * 16,
        "flags": "estimated_cpu;closure_circular" if cpu_source == "estimated" else "",
    }
    for d in ("gpu", "cpu"):
        for c in (f"{d}_above_idle_j", f"{d}_idle_j", f"{d}_model_above_idle_j", f"est_{d}_above_idle_j"):
            r.setdefault(c, "")
    return r


def quickstart(seed=5):
    """What a machine without counters gives: 4 tasks x 2 policies x 2 authored replays, one live run, CPU energy estimated."""
    kinds = {"domains": ("cpu",), "cpu_source": "estimated", "scale": 0.15}
    table = rows(4, ("summarize-off", "summarize-2k"), 2, seed, "replay", "authored", p_success=0.6, prefix="example", unscored=0, **kinds)
    live = row(np.random.default_rng(seed), "example-01", "summarize-off", 1, 5, False, **kinds)
    return [*table, live]


def text(table):
    """The table as CSV text."""
    names = list(dict.fromkeys(c for r in table for c in r))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def write(path, table):
    """Write the table to a path and return it."""
    path.write_text(text(table))
    return path
