"""Split agent trajectories into model, command and waiting time and energy: one row per trajectory folder.

Three sources must agree. The wire (calls.jsonl) says when the model worked. The terminal recording (asciicast) says when a
command ran: from its keystroke to the return of the prompt; of mini-SWE-agent, which has no terminal, its own trajectory file
says so. Harbor's result says when the agent ran and what came of it.
The energy of each part comes from the counters (samples.csv), through energylib; with a calibration the call model predicts
the same energy from token counts alone, and the row says how far off it is (closure).

    model    union of the call intervals on the wire, failed attempts included
    command  the terminal is busy and no call is running; what runs on during a call is `overlap_s` and counts as model
    waiting  the rest of the agent's execution: fixed sleeps, back-off, overhead

The three add up to the total exactly, in seconds and in joules per domain. A cell is empty where nothing is known, never 0.

Several trajectories on one server: those that ran at the same time name each other in trial.json,
    "concurrency": 4, "shared": {"group": "g007", "members": ["hello__summarize-off__r1", ...]}
where `members` are the names of their folders, all beside each other. Every member has its own calls.jsonl and harbor/; samples.csv,
samples.meta.json and state.csv in each are links to (or copies of) the files of the one sampler, which ran from before the first
began until after the last ended. Align a group when all its members have a trial.json. In each slice of time the idle power is shared
equally by the members whose agents are executing, the rest by the call model: each running call's predicted power, so that total_j of
the members adds up to what the counters say for the time in which any agent executed. The call model knows single calls, and a batch
is cheaper: compare shares, and read closure_model_above_idle as the gain from batching.

Examples:
    python align_trial.py data/traj/* --calib results/calib --out results/trials.csv
    python align_trial.py data/traj/* --out results/trials.csv --jobs 2 --trace results/trace --timeline results/timeline
"""

import argparse
import csv
import json
import math
import os
import re
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import energylib

GROUPS = ("gpu", "cpu", "dram")
STALL_S = 1.0  # a call that takes this much longer than predicted, and twice as long, waited for something
FIRST = (1, 2, 5, 10)  # early predictors: what is known after so many calls

COLUMNS = [
    *["trajectory", "task", "policy", "rep", "mode", "recording", "recording_source", "model", "agent", "profile", "hardware", "t_begin"],
    *["server", "harbor"],
    *["outcome", "fail_reason", "reward", "exception"],
    *["calls", "attempts", "turns", "summarizations"],
    *["prompt_tokens", "cached_tokens", "uncached_tokens", "completion_tokens", "tokens_match"],
    *["total_s", "model_s", "command_s", "waiting_s", "overlap_s", "setup_s", "verifier_s"],
    *[f"{g}_{part}_j" for g in GROUPS for part in ("total", "model", "command", "waiting")],
    *["total_j", "total_domains"],
    *[f"{g}_{part}_j" for g in ("gpu", "cpu") for part in ("above_idle", "model_above_idle", "idle")],
    *["setup_j", "verifier_j", "wasted_j", "gpu_err_j"],
    *["est_gpu_model_j", "est_gpu_above_idle_j", "est_cpu_model_j", "est_cpu_above_idle_j", "est_model_s", "est_total_j", "est_domains"],
    *["closure_model_above_idle", "closure_model", "closure_time", "closure_total"],
    *["temp_max_c", "sm_mhz_median", "throttled_s", "idle_w", "idle_source", "idle_quiet_w"],
    *["coverage", "gpu_source", "cpu_source", "split_source", "attribution", "concurrency", "calib_sha256", "flags", "quality"],
    *[f"first{k}_{what}" for k in FIRST for what in ("s", "total_j", "prompt_tokens", "completion_tokens")],
    # how the three sources met, for whoever doubts the split
    *["recording_status", "recording_offset_s", "recording_residual_s", "trajectory_status"],
    *["harbor_prompt_tokens", "harbor_cached_tokens", "harbor_completion_tokens", "steps_prompt_tokens", "steps_completion_tokens"],
    *["replay_mode", "recomputed_tokens"],
]

FLAGS = {  # code -> the same in words (column `quality`)
    "alignment_failed": "the aligner itself failed on this folder; only identity and outcome are given",
    "samples_missing": "no samples.csv: no energy",
    "samples_unreadable": "samples.csv could not be read: no energy",
    "sidecar_missing": "no samples.meta.json: the counters' limits and ranges, and their hardware where trial.json lacks it, are not known",
    "sidecar_damaged": "samples.meta.json is empty, cut or not the sampler's: it was taken as missing",
    "not_covered": "the counters do not cover the whole agent execution: the energy of that domain is not given",
    "setup_not_covered": "the counters do not cover setup or verifier",
    "gaps": "less than 99 % of the time has samples closer than 5 ticks: the split is uncertain, the total is not (but unknown where power is integrated)",
    "estimated_cpu": "CPU energy is estimated by a power model, not measured",
    "estimated_gpu": "GPU energy is integrated from power readings, not from an energy counter",
    "calls_missing": "no calls.jsonl: model time is unknown, nothing is split",
    "calls_damaged": "calls.jsonl has bad lines or records without times",
    "calls_outside": "calls outside the agent's execution: an earlier attempt, counted as wasted",
    "no_calls": "no model call was made",
    "no_result": "Harbor left no result.json",
    "result_damaged": "Harbor's result.json is empty or cut",
    "no_agent_phase": "the agent never ran: everything is setup",
    "window_estimated": "start or end of the agent's execution is taken from calls and recording, not from Harbor",
    "window_unknown": "the agent's execution ends before it begins, by Harbor's times: nothing is split",
    "several_attempts": "Harbor ran several attempts; this row is the last one, the others count as wasted",
    "trajectory_missing": "Harbor left no trajectory.json",
    "trajectory_damaged": "trajectory.json is cut; its whole steps are used",
    "recording_missing": "no terminal recording",
    "recording_damaged": "the terminal recording has bad lines or ends in the middle of one",
    "recording_short": "the recording ends before the last keystrokes: for those, command time is the wait that the agent asked for",
    "recording_unaligned": "the recording's clock could not be matched with the calls: up to 1 s off",
    "recording_loose": "the recording's clock matches the calls only to 0.25 s or worse",
    "no_prompt_marks": "the shell prints no prompt marks: a command ends with its last output",
    "interactive_program": "a program read the keyboard: it counts as busy from each input to its last output",
    "command_open": "a command was still running at the end",
    "command_unknown": "commands are not known: waiting includes them",
    "requested_durations": "command time is the wait that the agent asked for, not the time the command took",
    "tokens_unknown": "an attempt ended without token counts; the sums leave it out",
    "cached_unknown": "the server did not report cached tokens for every call: no estimate, no closure",
    "tokens_differ": "Harbor's token totals differ from those on the wire",
    "calls_differ": "Harbor counts another number of good replies than the wire",
    "summaries_differ": "Harbor's number of summaries differs from the wire's",
    "closure_partial": "closure leaves out attempts that ended without token counts, on both sides",
    "closure_circular": "closure against an estimated counter is circular and says nothing about the call model",
    "no_calibration": "no calibration: no estimates, no above-idle energy, no closure",
    "calibration_unchecked": "trial or calibration does not say its hardware or model: not compared",
    "calibration_other": "the calibration is from other hardware or another model (--allow-other-calibration)",
    "idle_unknown": "the calibration lacks the idle power of a counter of this trial",
    "idle_from_trajectory": "counter steps were apportioned by the trajectory's own quietest power, for want of a calibrated idle",
    "idle_drift": "the trajectory's own quietest power differs by more than 3 % from the idle power that was subtracted",
    "clock_step": "the wall clock was set during the trial, by more than 50 ms",
    "mono_restarted": "the machine was restarted during the trial",
    "wrap_ambiguous": "a gap in the samples could hide more than one wrap of a CPU counter",
    "wrap_unknown_range": "a CPU counter wrapped and its range is unknown",
    "counter_reset": "a counter was reset during the trial",
    "counter_jump": "a counter jumped by more than the hardware can use",
    "counter_glitch": "a counter gave some wrong values, left out",
    "counter_gap": "a counter could not be read for more than 5 ticks: how its energy divides there is uncertain, the total is not",
    "counter_stuck": "a counter stood still for some time",
    "module_scope": "the GPU counter covers the whole module, CPU and memory included: they are not added on top",
    "shared": "other trajectories ran at the same time: energy is attributed by power, idle is shared",
    "shared_unknown": "others ran at the same time, but trial.json does not name them: their energy is in this row",
    "member_missing": "a member of the group has no calls.jsonl or no times here: its energy is in the rows of the others",
    "calibration_batch1": "the calibration is of single calls: closure includes what batching saves",
    "timeout_but_right": "the agent was stopped by its time limit, yet the verifier found the task solved",
    "ended_deadline": "the run was stopped by the stage's deadline",
    "reward_from_file": "the reward is from verifier/reward.txt, result.json lacks it",
    "throttled": "a GPU was throttled by power or heat",
    "stalled_call": "a call took over twice as long as the call model says, and over 1 s longer: kernels were compiled, or the server was busy",
    "replay_short": "the server decoded fewer tokens than the replayed recording asks for: its energy is that of shorter replies",
    "outcome_differs": "the replay ended otherwise than its recording says",
}

# litellm and the servers say "too long" in these ways
CONTEXT_WORDS = (
    "context length exceeded", "context_length_exceeded", "maximum context length", "model's context length", "prompt is too long",
    "input is too long", "available context size", "contextwindowexceeded", "contextlengthexceeded",
)  # fmt: skip
VERIFIER_ERRORS = {
    "VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError", "AddTestsDirError",
    "DownloadVerifierDirError",
}  # fmt: skip
SERVER_ERRORS = {
    "InternalServerError", "APIError", "APIConnectionError", "APITimeoutError", "Timeout", "RateLimitError", "ServiceUnavailableError",
    "AuthenticationError", "AgentAuthenticationError", "NotFoundError", "ModelNotFoundError", "BadRequestError", "ApiUsageLimitError",
    "BadGatewayError", "PermissionDeniedError", "UnprocessableEntityError", "APIResponseValidationError", "RetryError",
}  # fmt: skip


class InputError(Exception):
    """What was given cannot be used; the text says what was found and the way out."""


class ViewError(Exception):
    """A trace or timeline cannot be written; the text says which and why."""


# ---------------------------------------------------------------- intervals: arrays (n, 2) of [start, end)


def union(intervals):
    """Sorted, disjoint intervals that cover the same time. Empty and inverted ones vanish."""
    iv = np.asarray(intervals, dtype=float).reshape(-1, 2)
    iv = iv[iv[:, 1] > iv[:, 0]]
    if not len(iv):
        return iv
    iv = iv[np.argsort(iv[:, 0], kind="stable")]
    reach = np.maximum.accumulate(iv[:, 1])
    first = np.r_[True, iv[1:, 0] > reach[:-1]]
    last = np.r_[first[1:], True]
    return np.column_stack([iv[first, 0], reach[last]])


def clip(intervals, t0, t1):
    """The parts of the intervals inside [t0, t1]."""
    iv = np.asarray(intervals, dtype=float).reshape(-1, 2)
    iv = np.column_stack([np.maximum(iv[:, 0], t0), np.minimum(iv[:, 1], t1)])
    return iv[iv[:, 1] > iv[:, 0]]


def inside(t, disjoint):
    """For each time: does it lie in one of the sorted, disjoint intervals?"""
    t = np.asarray(t, dtype=float)
    if not len(disjoint):
        return np.zeros(t.shape, dtype=bool)
    i = np.searchsorted(disjoint[:, 0], t, side="right") - 1
    return (i >= 0) & (t < disjoint[np.maximum(i, 0), 1])


def exact_parts(total, parts, digits=6):
    """Round the total and its parts so that the rounded parts add up to the rounded total exactly.

    The last part is the remainder of the rounded others; when rounding alone would push it below zero, the largest gives way.
    Returns (total, parts), all None when something is unknown.
    """
    if not all(known(x) for x in (total, *parts)):
        return None, [None] * len(parts)
    unit = 10**digits
    whole = round(total * unit)
    n = [round(p * unit) for p in parts[:-1]]
    n.append(whole - sum(n))
    if n[-1] < 0 and -n[-1] <= 2 * len(n):
        big = max(range(len(n) - 1), key=n.__getitem__)
        n[big] += n[-1]
        n[-1] = 0
    return whole / unit, [x / unit for x in n]


def known(x):
    """A number that is neither missing nor NaN nor infinite."""
    return x is not None and math.isfinite(x)


# ---------------------------------------------------------------- reading


def read_json(path):
    """(object, status): status is ok, missing, empty or damaged. Never raises for what a killed writer leaves behind."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None, "missing"
    except OSError:
        return None, "damaged"
    if not text.strip():
        return None, "empty"
    try:
        return json.loads(text), "ok"
    except ValueError:
        return None, "damaged"


def sub(obj, key):
    """obj[key] when that is an object, else an empty one: a field that is missing, null or of another kind."""
    value = obj.get(key) if isinstance(obj, dict) else None
    return value if isinstance(value, dict) else {}


def unix(text):
    """Unix seconds of an ISO 8601 time; a time without zone is UTC, as Harbor writes it. None when it is not one."""
    if not isinstance(text, str):
        return None
    try:
        t = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (t if t.tzinfo else t.replace(tzinfo=UTC)).timestamp()


def as_time(x):
    """Unix seconds from a number or an ISO text, else None."""
    if isinstance(x, bool) or x is None:
        return None
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else unix(x)


def span(result, phase):
    """(start, end) of one of the phases of Harbor's result, such as "verifier"; None where it is not known."""
    timing = sub(result, phase)
    return unix(timing.get("started_at")), unix(timing.get("finished_at"))


def read_steps(agent_dir):
    """(steps, status) of Terminus-2's trajectory.json and its continuations; of a file cut by a kill, the whole steps before the cut.

    Harbor rewrites trajectory.json in place after every turn, so a kill can leave half of it.
    """
    paths = [agent_dir / "trajectory.json"]
    paths += sorted(agent_dir.glob("trajectory.cont-*.json"), key=lambda p: [int(x) for x in re.findall(r"\d+", p.name)])
    steps, status = [], "ok"
    for path in paths:
        obj, state = read_json(path)
        if state == "ok" and isinstance(obj, dict) and isinstance(obj.get("steps"), list):
            steps += [s for s in obj["steps"] if isinstance(s, dict)]
        elif state in ("missing", "empty"):
            status = "missing" if path is paths[0] else "damaged"
        else:
            status = "damaged"
            steps += whole_steps(path.read_text(encoding="utf-8", errors="replace"))
    return steps, status


def whole_steps(text, key="steps"):
    """The complete objects at the beginning of the list `key` of a cut trajectory file."""
    found = re.search(rf'"{key}"\s*:\s*\[', text)
    if not found:
        return []
    decoder, at, steps = json.JSONDecoder(), found.end(), []
    while True:
        at = re.compile(r"[\s,]*").match(text, at).end()
        try:
            step, at = decoder.raw_decode(text, at)
        except ValueError:
            return steps
        if isinstance(step, dict):
            steps.append(step)


def read_calls(path):
    """(model calls, flags) of calls.jsonl, one dict per HTTP attempt, in order of start; None when there is no file.

    Requests that are no model calls (model lists, health checks, tokenization) are left out. A record without an end
    (the proxy was killed) ends at infinity, to be clipped by whoever knows when the agent ended.
    """
    if not Path(path).is_file():
        return None, {"calls_missing"}
    flags = set()
    try:
        records = energylib.read_jsonl(path)
    except (ValueError, OSError):
        flags.add("calls_damaged")
        records = []
        for line in Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    calls = []
    for n, r in enumerate(records):
        if not isinstance(r, dict) or not re.search(r"completions|responses|messages|generate", str(r.get("path") or "completions")):
            continue
        start, end = as_time(r.get("t_start")), as_time(r.get("t_end"))
        if start is None:
            flags.add("calls_damaged")
            continue
        ok = r.get("status") == 200 and not r.get("error") and r.get("complete") is not False and not r.get("client_disconnect")
        calls.append({
            "start": start, "end": math.inf if end is None else end, "key": r.get("call_key") or r.get("id") or f"#{n}", "ok": ok,
            "kind": r.get("kind") or "agent", "session": r.get("session"), "trial": r.get("trial"), "status": r.get("status"),
            "error": r.get("error"), "finish": r.get("finish_reason"), "first": as_time(r.get("t_first")), "replay": r.get("replay"),
            **{k: count(r.get(f"{k}_tokens")) for k in ("prompt", "cached", "completion")},
        })  # fmt: skip
    return sorted(calls, key=lambda c: (c["start"], c["end"])), flags


def count(x):
    """A token count, or None: unknown stays unknown."""
    return int(x) if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x >= 0 else None


# ---------------------------------------------------------------- terminal recording


def read_cast(path):
    """An asciicast (v2 or v3) as {status, t0, version, events [(seconds, kind, data)]}; status ok, missing, empty or damaged.

    v2 times count from the start, v3 times from the event before, so in v3 everything after a lost line is shifted: reading
    stops there. The last line may be cut by a kill. `t0` is the header's whole second.
    """
    cast = {"status": "missing", "t0": None, "version": None, "events": []}
    try:
        lines = Path(path).read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError:
        return cast
    lines = [x for x in (line.strip("\r\0 ") for line in lines) if x and not x.startswith("#")]
    if not lines:
        return cast | {"status": "empty"}
    try:
        header = json.loads(lines[0])
        cast |= {"version": int(header["version"]), "t0": float(header["timestamp"])}
    except (ValueError, KeyError, TypeError):
        return cast | {"status": "damaged"}
    cast["status"], now = "ok", 0.0
    for line in lines[1:]:
        try:
            t, kind, data = json.loads(line)[:3]
            t = float(t)
        except (ValueError, TypeError):
            cast["status"] = "damaged"
            if cast["version"] >= 3:
                break
            continue
        now = now + t if cast["version"] >= 3 else t
        if kind in ("i", "o") and isinstance(data, str):
            cast["events"].append((now, kind, data))
    return cast


CONTROL = re.compile(r"^[\x03\x04\x1a\x1c]+$")  # C-c C-d C-z C-\: signals to what runs, not its input
MARK = re.compile(r"\x1b\[\?(2004|1049)([hl])")
MARK_HEADS = tuple(f"\x1b[?{n}"[:k] for n in ("2004", "1049") for k in range(1, 8))


def busy_spans(events):
    """When the terminal was busy: ([{keys, start, end}], flags); end None = still running when the recording ends.

    bash switches bracketed paste off (ESC[?2004l) when a line is accepted and on (ESC[?2004h) when the prompt is back. A line
    typed ahead starts when the shell takes it. Keys that the shell never takes were read by a program (a REPL, a pager, an editor):
    it is busy from each input to its last output. Where the shell prints no marks, so is everything.
    """
    flags = set()
    outs = [t for t, kind, _ in events if kind == "o"]

    def until_last_output(start, end):
        i = np.searchsorted(outs, end, side="left") - 1 if end is not None else len(outs) - 1
        return max(start, outs[i]) if i >= 0 else start

    if not any(kind == "o" and "\x1b[?2004" in data for _, kind, data in events):
        typed = [(t, data) for t, kind, data in events if kind == "i"]
        spans = []
        for (t, keys), after in zip(typed, [t for t, _ in typed[1:]] + [None], strict=False):
            spans.append({"keys": keys, "start": t, "end": until_last_output(t, after)})
        return spans, {"no_prompt_marks"} if typed else set()

    runs = []  # {keys, start, end, read: [(t, keys)] inputs of a program, ahead: [(t, keys)] lines typed ahead, full: full screen}

    def begin(start, keys, ahead):
        return {"keys": keys, "start": start, "end": None, "read": [], "ahead": ahead, "full": False}

    run, line, at_prompt, carry = begin(0.0, "", []), None, False, ""  # until the first prompt the shell itself is starting

    def settle(r):
        """No more of what was typed during this run will be taken by the shell: a program read it."""
        r["read"] = sorted(r["read"] + r["ahead"])
        r["ahead"] = []

    for t, kind, data in events:
        if kind == "i":
            newline = "\r" in data or "\n" in data
            if at_prompt:
                settle(run)
                if newline:
                    line = (t, data)
            elif newline:
                run["ahead"].append((t, data))
            elif not CONTROL.match(data):
                run["read"].append((t, data))
            continue
        data = carry + data
        cut = next((n for n in range(min(7, len(data)), 0, -1) if data.endswith(MARK_HEADS) and data[-n:] in MARK_HEADS), 0)
        carry = data[len(data) - cut :] if cut else ""
        for m in MARK.finditer(data):
            if m[1] == "1049":
                if m[2] == "h":
                    run["full"] = True
            elif m[2] == "l":
                start, keys = (t, "")
                if line:
                    (start, keys), line = line, None
                elif run["ahead"]:
                    keys = run["ahead"].pop(0)[1]
                left, run["ahead"] = run["ahead"], []
                run = begin(start, keys, left)
                runs.append(run)
                at_prompt = False
            else:
                if run["end"] is None:
                    run["end"] = t
                at_prompt = True
    settle(run)

    spans = []
    for r in runs:
        if not r["read"] and not (r["full"] and r["end"] is None):
            spans.append({"keys": r["keys"], "start": r["start"], "end": r["end"]})
            continue
        flags.add("interactive_program")
        begins = [(r["start"], r["keys"]), *r["read"]]
        for (t, keys), (after, _) in zip(begins, [*begins[1:], (None, "")], strict=True):
            end = r["end"] if after is None and r["end"] is not None else until_last_output(t, after)
            spans.append({"keys": keys, "start": t, "end": end})
    return spans, flags


def align_clock(t0, typed, ends, model, latest=None):
    """Offset of the recording's clock: (offset_s, residual_s, pairs). Unix time of an event = t0 + offset + its relative time.

    The header holds whole seconds only. Terminus-2 sends keys right after a reply, never during a call and never before the
    first reply: the offset is the one that puts keystrokes just after call ends and none inside a call. `latest` bounds it
    (keys typed during setup came before the agent's execution). The quickest pair defines it, so it is late by the quickest way
    from reply to keystroke, some 10 ms; the residual is the median of the other pairs' extra delay.
    """
    typed, ends = np.asarray(typed, dtype=float), np.asarray(ends, dtype=float)
    # a floored second, plus the time that the recorder takes to start (0 to 0.3 s)
    lo, hi = -0.05, min(1.5, math.inf if latest is None else latest + 0.02)
    guess = max(lo, min(0.5, hi))
    if not len(typed) or not len(ends):
        return guess, None, 0
    lo = max(lo, ends[0] - (t0 + typed[0]) - 0.005)
    near = zip(ends, np.searchsorted(t0 + typed, ends - hi), np.searchsorted(t0 + typed, ends - lo, side="right"), strict=True)
    d = np.unique(np.round(np.concatenate([end - t0 - typed[i:j] for end, i, j in near]), 3))
    d = d[(d >= lo - 0.001) & (d <= hi + 0.001)]  # a millisecond is finer than any of this: at most 1,550 places to try
    if not len(d):
        return guess, None, 0
    best = None
    for offset in d:
        keys = t0 + typed + offset
        i = np.searchsorted(keys, ends - 0.001)
        lag = np.where(i < len(keys), np.maximum(keys[np.minimum(i, len(keys) - 1)] - ends, 0.0), 1.0)
        during = inside(keys - 0.005, model) & inside(keys + 0.005, model)
        cost = np.minimum(lag, 1.0).sum() + during.sum()
        if best is None or cost < best[0] - 1e-9:
            best = (cost, offset, lag[lag < 0.5])
    _, offset, lag = best
    return float(offset), float(np.median(lag)) if len(lag) else None, len(lag)


def replies_with_commands(calls, steps, t0, t1):
    """Ends of the calls after which the agent typed: by the trajectory's turns where there are any, else all of the agent's."""
    ends = np.array(sorted(c["end"] for c in calls if c["kind"] == "agent" and c["ok"] and t0 <= c["end"] <= t1))
    if not len(ends):
        return ends
    keep = np.zeros(len(ends), dtype=bool)
    last = -math.inf
    for step in steps:
        at = unix(step.get("timestamp"))
        if step.get("source") != "agent" or at is None:
            continue
        i = np.searchsorted(ends, at + 0.002, side="right") - 1
        last = at
        if i >= 0 and any(
            str((c.get("arguments") or {}).get("keystrokes") or "") for c in step.get("tool_calls") or [] if isinstance(c, dict)
        ):
            keep[i] = True
    keep |= ends > last  # turns that were not written down any more
    return ends[keep]


def commands_from_recording(cast, calls, steps, model, t0, t1):
    """(command spans in Unix time [{keys, start, end}], offset, residual, flags) inside the agent's execution."""
    spans, flags = busy_spans(cast["events"])
    inputs = [(t, data) for t, kind, data in cast["events"] if kind == "i"]
    typed = [t for t, data in inputs if data.strip() != "clear"]
    setup = [t for t, data in inputs[:1] if data.strip() == "clear"]  # Terminus-2 clears the screen as the last step of its setup
    latest = t0 - cast["t0"] - setup[0] if setup else None
    ends = replies_with_commands(calls, steps, t0, t1)
    offset, residual, pairs = align_clock(cast["t0"], typed, ends, model, latest)
    if typed and not pairs:
        flags.add("recording_unaligned")
    if residual is not None and residual > 0.25:
        flags.add("recording_loose")
    zero = cast["t0"] + offset
    last = zero + cast["events"][-1][0]
    # `exit` ends the recorder but not the terminal: what the agent typed after that is known from its steps alone
    after = [c for c in commands_from_steps(steps, calls, t0, t1) if c["keys"] and c["start"] > last]
    out = []
    for s in spans:
        start = zero + s["start"]
        end = zero + s["end"] if s["end"] is not None else last if after else t1
        if s["end"] is None and start < t1 and not after:
            flags.add("command_open")
        if start < t1 and end > t0:
            out.append({"keys": s["keys"], "start": max(start, t0), "end": min(end, t1)})
    if after:
        flags.add("recording_short")
    return out + after, offset if pairs else None, residual, flags


def commands_from_steps(steps, calls, t0, t1):
    """Command spans from the waits that the agent asked for, when there is no recording: an upper bound, labelled.

    A step's time is the end of its turn, after the commands; its commands began when the last call before it ended.
    """
    ends = sorted(c["end"] for c in calls if c["ok"])
    out = []
    for step in steps:
        at = unix(step.get("timestamp"))
        tools = [c.get("arguments") or {} for c in step.get("tool_calls") or [] if isinstance(c, dict)]
        waits = [(str(a.get("keystrokes", "")), a["duration"]) for a in tools if isinstance(a.get("duration"), (int, float))]
        if step.get("source") != "agent" or at is None or not waits:
            continue
        i = np.searchsorted(ends, at + 0.002, side="right") - 1
        now = ends[i] if i >= 0 else t0
        for keys, wait in waits:
            start, now = now, min(now + max(0.0, wait), at)
            if start < t1 and now > t0 and now > start:
                out.append({"keys": keys, "start": max(start, t0), "end": min(now, t1)})
    return out


def commands_from_mini_swe(path, calls, t0, t1):
    """(command spans, flags) of mini-SWE-agent's own trajectory file; (None, flags) when there is none.

    An assistant's message has the time at which its reply had come, the tools' messages behind it the time at which all of its
    commands were done. The file is rewritten after every step, so the step in which an agent was stopped is not in it: when its
    reply is on the wire, its command ran until the end.
    """
    obj, status = read_json(path)
    if status in ("missing", "empty"):
        return None, set()
    flags = set() if status == "ok" else {"trajectory_damaged"}
    found = obj.get("messages") if isinstance(obj, dict) else whole_steps(path.read_text(encoding="utf-8", errors="replace"), "messages")
    spans, replies = [], 0
    for m in found if isinstance(found, list) else ():
        extra = sub(m, "extra")
        at = as_time(extra.get("timestamp"))
        if isinstance(m, dict) and m.get("role") == "assistant":
            replies += 1
            keys = [str(a.get("command") or "") for a in extra.get("actions") or [] if isinstance(a, dict)]
            spans.append({"keys": "\n".join(keys), "start": at, "end": None})
        elif extra.get("interrupt_type") == "FormatError":
            replies += 1  # a reply without a command that can be run
        elif spans and at is not None:
            spans[-1]["end"] = at
    good = [c for c in calls if c["ok"] and c["kind"] == "agent"]
    if len(good) > replies and good[-1]["end"] < t1:
        spans.append({"keys": "", "start": good[-1]["end"], "end": t1})
        flags.add("command_open")
    spans = [s | {"start": max(s["start"], t0), "end": min(s["end"], t1)} for s in spans if s["start"] is not None and s["end"] is not None]
    return [s for s in spans if s["end"] > s["start"]], flags


# ---------------------------------------------------------------- what Harbor says


def harbor_attempts(folder):
    """Trial folders under `harbor/`, in order of start: [{dir, result, result_status, begin}]."""
    root = Path(folder) / "harbor"
    if not root.is_dir():
        return []
    dirs = [p for p in sorted(root.iterdir()) if p.is_dir() and any((p / n).exists() for n in ("result.json", "config.json", "agent"))]
    if not dirs and (root / "agent").is_dir():
        dirs = [root]  # `harbor trial start` puts the trial right there
    found = []
    for p in dirs:
        result, status = read_json(p / "result.json")
        result = result if isinstance(result, dict) else {}
        times = [p.stat().st_mtime] if not result else []
        found.append({"dir": p, "result": result, "status": status, "begin": unix(result.get("started_at")) or (times or [0.0])[0]})
    return sorted(found, key=lambda a: a["begin"])


def pick_attempt(attempts, calls):
    """The attempt this row is about: the last whose session is on the wire, else the last."""
    sessions = {c["session"] for c in calls or []}
    return next((a for a in reversed(attempts) if f"{a['dir'].name}__agent" in sessions), attempts[-1] if attempts else None)


def agent_window(result):
    """(start, end) of the agent's execution, over all steps of a task with several."""
    t0, t1 = span(result, "agent_execution")
    if t0 is None and isinstance(result.get("step_results"), list):
        spans = [span(s, "agent_execution") for s in result["step_results"]]
        t0 = min((a for a, _ in spans if a is not None), default=None)
        t1 = max((b for _, b in spans if b is not None), default=None)
    return t0, t1


def find_reward(attempt):
    """(reward, from_file): Harbor's reward; the smallest when there are several; None when nothing was verified."""
    rewards = sub(sub(attempt["result"], "verifier_result"), "rewards")
    values = [rewards["reward"]] if "reward" in rewards else list(rewards.values())
    values = [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    if values:
        return min(values), False
    if attempt["status"] != "ok":  # Harbor died before it wrote the result; the verifier may have finished
        try:
            value = float((attempt["dir"] / "verifier" / "reward.txt").read_text())
            return (value, True) if math.isfinite(value) else (None, False)
        except (OSError, ValueError):
            pass
    return None, False


def completed(steps):
    """Did the agent declare the task complete, twice in a row as Terminus-2 wants it?"""
    agent = [s for s in steps if s.get("source") == "agent"][-2:]
    return len(agent) == 2 and all(
        any(isinstance(c, dict) and c.get("function_name") == "mark_task_complete" for c in s.get("tool_calls") or []) for s in agent
    )


def max_turns(result, attempt_dir):
    """The turn limit that the agent was given, None without one."""
    kwargs = sub(sub(result.get("config") or read_json(attempt_dir / "config.json")[0], "agent"), "kwargs")
    limits = (kwargs.get(k) for k in ("max_turns", "episodes", "max_episodes"))
    return next((int(x) for x in limits if isinstance(x, (int, float))), None)


def classify(trial, attempt, steps, calls):
    """(outcome, fail_reason, reward, exception, flags).

    A reward that the verifier gave counts, whatever stopped the agent. Without success, the agent's own limits (context,
    output length, turns, time) are fails; only infrastructure is `unscored`.
    """
    flags, ended = set(), trial.get("ended")
    result = attempt["result"] if attempt else {}
    exception = sub(result, "exception_info").get("exception_type")
    message = str(sub(result, "exception_info").get("exception_message") or "").lower()
    text = f"{exception} {message}".lower()
    reward, from_file = find_reward(attempt) if attempt else (None, False)
    if from_file:
        flags.add("reward_from_file")
    if ended == "deadline":
        flags.add("ended_deadline")
    if reward is not None and reward >= 1:
        if exception == "AgentTimeoutError":
            flags.add("timeout_but_right")
        return "success", None, reward, exception, flags

    turns = count(sub(sub(result, "agent_result"), "metadata").get("n_episodes"))
    turns = sum(s.get("source") == "agent" for s in steps) if turns is None else turns
    limit = max_turns(result, attempt["dir"]) if attempt else None
    last = [c for c in calls or [] if c["kind"] == "agent"][-1:]
    own = None  # the agent's own doing
    if exception == "AgentTimeoutError":
        own = "agent_timeout"
    elif any(w in text for w in CONTEXT_WORDS):
        own = "context_overflow"
    elif "outputlengthexceeded" in text or (exception == "RecursionError" and last and last[0]["finish"] == "length"):
        own = "output_length"
    elif exception == "NonZeroAgentExitCodeError":
        own = "agent_error"
    elif not exception and limit is not None and turns >= limit and not completed(steps):
        own = "turn_limit"
    if reward is not None:
        return "fail", own or "wrong_result", reward, exception, flags
    if own:
        return "fail", own, reward, exception, flags

    # nobody judged the result: whose fault?
    if exception in VERIFIER_ERRORS:
        return "unscored", "verifier", reward, exception, flags
    if any(c["error"] == "replay_mismatch" for c in calls or []):
        return "unscored", "replay", reward, exception, flags
    if ended == "server_down" or exception in SERVER_ERRORS or message.startswith("litellm"):
        return "unscored", "server", reward, exception, flags
    if exception:
        # what broke before the agent began (image, sandbox, tmux) is the environment
        return "unscored", "harbor" if agent_window(result)[0] else "environment", reward, exception, flags
    if ended == "deadline" and calls and not completed(steps):
        return "fail", "agent_timeout", reward, exception, flags
    if ended == "interrupted":
        return "unscored", "interrupted", reward, exception, flags
    if result:
        return "unscored", "verifier", reward, exception, flags
    return "unscored", "verifier" if completed(steps) else "harbor", reward, exception, flags


# ---------------------------------------------------------------- calibration


def load_calibration(calib):
    """{params, sha256, path} of a calibration folder or params.json; None without one.

    Raises InputError when what was given cannot be read.
    """
    if calib is None:
        return None
    path = Path(calib)
    path = path / "params.json" if path.is_dir() or path.suffix != ".json" else path
    params, status = read_json(path)
    if status != "ok" or not isinstance(params, dict):
        raise InputError(f"{path}: {status}, expected the params.json that calibrate.py writes (03_calibrate.sh)")
    import calibrate

    try:
        calibrate.idle_power(params)
        calibrate.predict(params, [1], [0], [1])
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise InputError(f"{path}: {type(e).__name__}: {e}: not a params.json of this version; run calibrate.py again") from None
    return {"params": params, "sha256": energylib.sha256(path), "path": str(path)}


def mismatch(params, trial, folder):
    """(what differs between calibration and trial, or None; True when something could not be compared).

    The trial's hardware is what trial.json says or, in the calibration's own words, what its sidecar of the counters says. How many CPUs a
    virtual machine was given matters only where CPU energy was measured.
    """
    unchecked = False
    meta, status = read_sidecar(folder)
    counters = counter_columns(folder)
    gpus_only = bool(counters) and all(energylib.group(column.partition("_")[0]) == "gpu" for column in counters)
    for key in ("hardware", "model"):
        want, found = params.get(key), trial.get(key)
        names = {plain(found, key)} if found else set()
        if names and key == "hardware" and status == "ok":
            names.add(plain(energylib.hardware_name(meta), key))
        names -= {"unknown"}
        if not want or want == "unknown" or not names:
            unchecked = True
            continue
        if gpus_only:
            want, names = without_cpus(want), {without_cpus(name) for name in names}
        if plain(want, key) not in names:
            return f"{key} is {want!r} in the calibration and {found!r} in the trial", unchecked
    return None, unchecked


def read_sidecar(folder):
    """(what samples.meta.json says, status): status is ok, missing, empty or damaged, and nothing is said where it is not ok."""
    meta, status = read_json(Path(folder) / "samples.meta.json")
    if status == "ok" and not (isinstance(meta, dict) and all(isinstance(meta.get(k) or {}, dict) for k in ("counters", "host"))
                               and all(isinstance(c, dict) for c in sub(meta, "counters").values())):  # fmt: skip
        status = "damaged"
    return (meta if status == "ok" else {}), status


def counter_columns(folder):
    """Names of the counters in a trial's samples.csv, without reading its rows."""
    try:
        with open(Path(folder) / "samples.csv", encoding="utf-8-sig", errors="replace") as f:
            return [c for c in f.readline().rstrip().split(",") if energylib.COUNTER.match(c) or re.fullmatch(r"gpu\d+_w", c)]
    except OSError:
        return []


def without_cpus(hardware):
    """A machine's name without its number of CPUs."""
    return re.sub(r" \(\d+ logical cpus\)$", "", str(hardware), flags=re.IGNORECASE)


def plain(value, key):
    """A name as it is compared: case, spaces and, for models, provider and folder do not matter."""
    value = json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else str(value)
    value = " ".join(value.lower().split())
    return value.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") if key == "model" else value


# ---------------------------------------------------------------- energy on segments


def segment_energy(samples, a, b, calls, busy, idle_w, powers, over=None):
    """({domain: joules (k,)}, {domain: err (k,)}) of the segments [a, b).

    A counter step that straddles a boundary is apportioned by what was going on. A GPU idles unless a call runs, and its idle power
    is known. A CPU does not: commands and Harbor itself use it too, so its steps (one row each) are apportioned by the mean power
    that model, command and waiting time have in these segments, or in the segments `over`.
    """
    host = [d for d in samples.domains if energylib.group(d) != "gpu"]
    gpu_idle = {d: w for d, w in idle_w.items() if d not in host}
    e = samples.energy(a, b, calls=calls, idle_w=gpu_idle, call_power_w=powers)
    joules, err = dict(e.joules), dict(e.err)
    model = union(calls)
    if not host or not len(a) or not len(model) + len(busy):
        return joules, err
    begin, end = min(a.min(), samples.t_begin) - 1, max(b.max(), samples.t_end) + 1
    cuts = np.unique(np.r_[begin, end, clip(model, begin, end).ravel(), clip(busy, begin, end).ravel()])
    phase = phases((cuts[:-1] + cuts[1:]) / 2, model, busy)
    of_segment, dt, learnt = phases((a + b) / 2, model, busy), b - a, joules
    if over is not None:
        of_segment, dt = phases(over.mean(axis=1), model, busy), np.diff(over)[:, 0]
        learnt = samples.energy(*over.T, calls=calls, idle_w=gpu_idle, call_power_w=powers).joules
    weights = {}
    for d in host:
        rest = np.nansum(learnt[d]) / max(dt[np.isfinite(learnt[d])].sum(), 1e-9)
        mean = []
        for p in range(3):
            on = (of_segment == p) & np.isfinite(learnt[d])
            mean.append(learnt[d][on].sum() / dt[on].sum() if dt[on].sum() > 0 else rest)
        weights[d] = np.maximum(mean, 1e-9)[phase]
    e = samples.energy(a, b, calls=np.column_stack([cuts[:-1], cuts[1:]]), idle_w=dict.fromkeys(host, 0.0), call_power_w=weights)
    return joules | {d: e.joules[d] for d in host}, err | {d: e.err[d] for d in host}


def phases(t, model, busy):
    """0 model, 1 command, 2 waiting for each time."""
    return np.where(inside(t, model), 0, np.where(inside(t, busy), 1, 2))


def call_powers(calibration, calls):
    """Expected above-idle GPU (else CPU) power of each call from the call model, W; None when it cannot say."""
    if not calibration or not calls or any(c[k] is None for c in calls for k in ("prompt", "cached", "completion")):
        return None
    est = predict(calibration, calls)
    joules = est["gpu_above_idle_j"] if est["gpu_above_idle_j"] is not None else est["cpu_above_idle_j"]
    if joules is None:
        return None
    power = np.asarray(joules) / np.array([c["end"] - c["start"] for c in calls])
    return power if np.isfinite(power).all() and (power > 0).all() else None


def predict(calibration, calls):
    """The call model's estimates for calls with known token counts, as arrays or None."""
    import calibrate

    prompt, cached, completion = (np.array([c[k] for c in calls], dtype=float) for k in ("prompt", "cached", "completion"))
    return calibrate.predict(calibration["params"], prompt, np.minimum(cached, prompt), completion)


# ---------------------------------------------------------------- state of the hardware


def read_state(path, t0, t1, model):
    """{temp_max_c, sm_mhz_median, throttled_s} from state.csv within [t0, t1]; clocks while the model works."""
    out = {"temp_max_c": None, "sm_mhz_median": None, "throttled_s": None}
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as f:
            rows = list(csv.DictReader(f))
    except OSError:
        return out

    def number(row, key):
        try:
            x = float(row.get(key) or "")
        except (TypeError, ValueError):
            return None
        return x if math.isfinite(x) else None

    rows = [(t, r) for r in rows if (t := number(r, "t")) is not None and t0 <= t <= t1]
    if not rows:
        return out
    names = [k for k in rows[0][1] if k]
    temps = [x for _, r in rows for k in names if re.fullmatch(r"gpu\d+_temp_c", k) and (x := number(r, k)) is not None]
    at = inside([t for t, _ in rows], model)
    clocks = [
        x
        for (_, r), m in zip(rows, at, strict=True)
        if m
        for k in names
        if re.fullmatch(r"gpu\d+_sm_mhz", k) and (x := number(r, k)) is not None
    ]
    out["temp_max_c"] = max(temps, default=None)
    out["sm_mhz_median"] = float(np.median(clocks)) if clocks else None
    reasons = [k for k in names if re.fullmatch(r"gpu\d+_throttle_reasons", k) and any(r.get(k) for _, r in rows)]
    if reasons:
        limited = [any(throttled(r.get(k)) for k in reasons) for _, r in rows]
        times = np.array([t for t, _ in rows])
        step = np.diff(np.r_[times, t1])
        step = np.minimum(step, 3 * np.median(step)) if len(step) > 1 else np.minimum(step, 1.0)
        out["throttled_s"] = float(step[np.array(limited)].sum())
    return out


def throttled(cell):
    """Does this cell of state.csv (a bit mask, decimal or hex) name a reason that slows the GPU?"""
    try:
        return bool(int(str(cell).strip(), 0) & sum(energylib.THROTTLE_REASONS))
    except ValueError:
        return False


# ---------------------------------------------------------------- one trajectory


def align(folder, calibration=None, trace_dir=None, timeline_dir=None, formats=()):
    """The row of one trajectory folder, as a dict with every name of COLUMNS. Raises InputError when there is no trial.json.

    `calibration` is what load_calibration returns.
    """
    folder = Path(folder)
    trial, status = read_json(folder / "trial.json")
    if status != "ok" or not isinstance(trial, dict):
        raise InputError(f"{folder}/trial.json: {status}: unfinished, to be run again")
    row, flags = dict.fromkeys(COLUMNS), set()
    recording = sub(trial, "recording")
    row |= {k: trial.get(k) for k in ("trajectory", "task", "policy", "rep", "mode", "model", "agent", "profile", "hardware", "t_begin")}
    row["trajectory"] = row["trajectory"] or folder.resolve().name
    row["server"] = sub(trial, "server").get("version") or sub(trial, "server").get("kind")
    row["harbor"] = trial.get("harbor_version")
    members = sub(trial, "shared").get("members")
    members = [m for m in members if isinstance(m, str)] if isinstance(members, list) else []
    row["concurrency"] = max(count(trial.get("concurrency")) or 1, len(members))
    if recording:
        row["recording"] = f"{recording.get('name')}@{str(recording.get('sha256') or '')[:12]}"
        row["recording_source"] = recording.get("source")
    try:
        seen = align_outcome(folder, trial, row, flags)
        together = sub(trial, "shared").get("group")
        seen |= {"name": folder.resolve().name, "peers": [] if row["concurrency"] == 1 else read_peers(folder, together, members, flags)}
        if (expected := recording.get("expected_outcome")) and row["outcome"] in ("success", "fail") and row["outcome"] != expected:
            flags.add("outcome_differs")
        align_energy(folder, trial, row, flags, seen, calibration, trace_dir, timeline_dir, formats)
    except ViewError:
        raise
    except Exception as e:  # one odd folder must not cost the batch: the row says so, the exit code too
        flags.add("alignment_failed")
        print(f"{folder}: alignment failed: {type(e).__name__}: {e}; please report it with this folder", file=sys.stderr)
        if os.environ.get("TRAJOULE_DEBUG"):
            raise
    row["flags"] = ";".join(sorted(flags))
    row["quality"] = "; ".join(FLAGS[f] for f in sorted(flags)) or "ok"
    return row


def align_outcome(folder, trial, row, flags):
    """Identity, outcome, counts and tokens into the row; returns what the energy part needs."""
    calls, call_flags = read_calls(folder / "calls.jsonl")
    flags |= call_flags
    attempts = harbor_attempts(folder)
    attempt = pick_attempt(attempts, calls)
    if len(attempts) > 1:
        flags.add("several_attempts")
    result = attempt["result"] if attempt else {}
    if not attempt or attempt["status"] == "missing":
        flags.add("no_result")
    elif attempt["status"] != "ok":
        flags.add("result_damaged")
    agent_dir = attempt["dir"] / "agent" if attempt else folder / "harbor" / "none"
    steps, row["trajectory_status"] = read_steps(agent_dir)
    if str(row["agent"]).startswith("terminus") and row["trajectory_status"] != "ok":
        flags.add("trajectory_missing" if row["trajectory_status"] == "missing" else "trajectory_damaged")

    own = list(calls or [])
    outcome, reason, reward, exception, more = classify(trial, attempt, steps, own)
    flags |= more
    row |= {"outcome": outcome, "fail_reason": reason, "reward": reward, "exception": exception}

    # the agent's execution
    t0, t1 = agent_window(result)
    begin = unix(result.get("started_at")) or as_time(trial.get("t_begin"))
    end = unix(result.get("finished_at")) or as_time(trial.get("t_end"))
    if t0 is None and own:
        t0 = own[0]["start"]
        flags.add("window_estimated")
    if t0 is not None and t1 is None:
        stops = [span(result, "verifier")[0], end]
        finite = [c["end"] for c in own if math.isfinite(c["end"])]
        t1 = next((x for x in stops if x is not None and x > t0), max(finite, default=None))
        flags.add("window_estimated")
    if t0 is None or t1 is None:
        t0 = t1 = None
        flags.add("no_agent_phase")
    elif t1 <= t0:
        t0 = t1 = begin = None
        flags.add("window_unknown")

    for c in own:
        if not math.isfinite(c["end"]):
            c["end"] = max(c["start"], t1 or c["start"])
    apart = [c for c in own if t0 is not None and (c["end"] <= t0 or c["start"] >= t1)]
    if apart:
        flags.add("calls_outside")
        own = [c for c in own if c["end"] > t0 and c["start"] < t1]

    # counts and tokens, all attempts
    setup_end = end if t0 is None else t0
    row["setup_s"] = setup_end - begin if setup_end is not None and begin is not None else None
    v0, v1 = span(result, "verifier")
    row["verifier_s"] = v1 - v0 if v0 is not None and v1 is not None else None
    if calls is not None:
        keys = list(dict.fromkeys(c["key"] for c in own))
        row |= {"calls": len(keys), "attempts": len(own)}
        usage = [c for c in own if c["prompt"] is not None]
        if usage or not own:
            row["prompt_tokens"] = sum(c["prompt"] for c in usage)
            row["completion_tokens"] = sum(c["completion"] or 0 for c in usage)
        if any(c["cached"] is None for c in usage):
            flags.add("cached_unknown")
        elif usage or not own:
            row["cached_tokens"] = sum(c["cached"] for c in usage)
            row["uncached_tokens"] = row["prompt_tokens"] - row["cached_tokens"]
        if not all(has_tokens(c) for c in own):
            flags.add("tokens_unknown")
        if not own:
            flags.add("no_calls")
        for k in FIRST:
            if len(keys) >= k:
                part = [c for c in own if c["key"] in keys[:k]]
                row[f"first{k}_prompt_tokens"] = sum(c["prompt"] or 0 for c in part)
                row[f"first{k}_completion_tokens"] = sum(c["completion"] or 0 for c in part)
        replays = [c["replay"] for c in own if isinstance(c["replay"], dict)]
        row["replay_mode"] = "+".join(sorted({str(r.get("mode")) for r in replays})) or None
        if any((count(r.get("missing_tokens")) or 0) > 0 for r in replays):
            flags.add("replay_short")
        recomputed = [count(r.get("recomputed_tokens")) for r in replays]
        row["recomputed_tokens"] = sum(x for x in recomputed if x is not None) if any(x is not None for x in recomputed) else None
    harbor_totals(result, steps, own if calls is not None else None, row, flags)
    return {
        "calls": own, "known": calls is not None, "peers": [], "apart": apart, "attempt": attempt, "attempts": attempts,
        "agent_dir": agent_dir, "steps": steps, "t0": t0, "t1": t1, "begin": begin, "end": end, "verifier": (v0, v1),
    }  # fmt: skip


def harbor_totals(result, steps, own, row, flags):
    """Turns, summaries and the three token sums (wire, Harbor's totals, its steps), and whether wire and Harbor agree."""
    agent = sub(result, "agent_result")
    meta = sub(agent, "metadata")
    agent_steps = [s for s in steps if s.get("source") == "agent"]
    metrics = [s["metrics"] for s in agent_steps if isinstance(s.get("metrics"), dict)]
    wire_turns = sum(c["kind"] == "agent" and c["ok"] for c in own) if own is not None else None
    row["turns"] = count(meta.get("n_episodes"))
    if row["turns"] is None:
        row["turns"] = len(agent_steps) or wire_turns
    wire = len({c["key"] for c in own if c["kind"] == "summary" and c["ok"]}) if own is not None else None
    harbor = count(meta.get("summarization_count"))
    row["summarizations"] = wire if wire is not None else harbor
    if wire is not None and harbor is not None and wire != harbor:
        flags.add("summaries_differ")
    for k, name in (("prompt", "n_input_tokens"), ("cached", "n_cache_tokens"), ("completion", "n_output_tokens")):
        row[f"harbor_{k}_tokens"] = count(agent.get(name))
    for k in ("prompt", "completion"):
        row[f"steps_{k}_tokens"] = sum(count(m.get(f"{k}_tokens")) or 0 for m in metrics) if metrics else None
    if own is None or row["harbor_prompt_tokens"] is None or row["harbor_completion_tokens"] is None:
        return
    replies = meta.get("api_request_times_msec")
    if isinstance(replies, list) and len(replies) not in {
        sum(c["ok"] and (cut or c["finish"] != "length") for c in own) for cut in (False, True)
    }:
        flags.add("calls_differ")
    # Terminus-2 leaves replies that were cut by their length out of its totals, and never sees those that it hung up on
    sums = [
        tuple(sum(c[k] or 0 for c in own if c["ok"] and (cut or c["finish"] != "length")) for k in ("prompt", "completion"))
        for cut in (False, True)
    ]
    row["tokens_match"] = (row["harbor_prompt_tokens"], row["harbor_completion_tokens"]) in sums
    if not row["tokens_match"]:
        flags.add("tokens_differ")


def align_energy(folder, trial, row, flags, seen, calibration, trace_dir, timeline_dir, formats):
    """Times, energies, estimates and closure into the row; the views when they are wanted."""
    t0, t1, own = seen["t0"], seen["t1"], seen["calls"]
    model = union(clip([(c["start"], c["end"]) for c in own], t0, t1)) if t0 is not None else np.empty((0, 2))
    commands = split_sources(row, flags, seen, model)
    seen["busy"] = union([(c["start"], c["end"]) for c in commands])
    pieces = cut_time(seen, model)
    times_into(row, pieces)

    row |= {"gpu_source": "none", "cpu_source": "none", "attribution": "shared" if seen["peers"] else "exclusive"}
    if seen["peers"]:
        flags.add("shared")
        if calibration:
            flags.add("calibration_batch1")
    if calibration:
        row["calib_sha256"] = calibration["sha256"]
        differs, unchecked = mismatch(calibration["params"], trial, folder)
        if differs or unchecked:
            flags.add("calibration_other" if differs else "calibration_unchecked")
    else:
        flags.add("no_calibration")
    if t0 is not None:
        row |= read_state(folder / "state.csv", t0, t1, model)
        if row["throttled_s"]:
            flags.add("throttled")

    samples = open_samples(folder, flags)
    view = energy_into(row, flags, seen, samples, calibration, idle_powers(calibration, trial, samples), pieces) if samples else None
    estimates(row, flags, calibration, own, pieces, view)
    if view and (trace_dir or timeline_dir):
        from stages import timeline

        def energy_between(edges):
            return segment_energy(samples, edges[:-1], edges[1:], view["spans"], view["busy"], view["apportion"], None)[0]

        name = str(row["trajectory"]).replace("/", "_")
        view |= {"row": row, "seen": seen, "commands": commands, "pieces": pieces, "samples": samples, "energy_between": energy_between}
        try:
            if trace_dir:
                timeline.write_trace(Path(trace_dir) / f"{name}.json", view)
            if timeline_dir and t0 is not None:
                timeline.write_timeline(Path(timeline_dir) / name, view, formats)
        except OSError as e:
            raise ViewError(f"{e.filename}: {e.strerror}") from None


def cut_time(seen, model):
    """The agent's execution cut at every moment that matters, so that every sum in the row is a sum of the same pieces.

    A dict of arrays, one value per piece: `a`, `b` its ends, `mid`, `dt`, and what it belongs to: `model`, `command`, `waiting`,
    `overlap`, `wasted`, `blind` (only calls without token counts run). `firsts` {k: end of the k-th logical call}.
    """
    t0, t1, own, busy = seen["t0"], seen["t1"], seen["calls"], seen["busy"]
    counted, blind = (union([(c["start"], c["end"]) for c in own if has_tokens(c) == x]) for x in (True, False))
    wasted = union([(c["start"], c["end"]) for c in wasted_calls(own)])
    firsts, keys = {}, list(dict.fromkeys(c["key"] for c in own))
    for k in FIRST if t0 is not None else ():
        if len(keys) >= k:
            firsts[k] = min(t1, max(c["end"] for c in own if c["key"] in keys[:k]))
    cuts = [x for iv in (model, busy, blind, counted, wasted) for x in iv.ravel()] + [t0, t1, *firsts.values()]
    cuts += list(group_cuts([seen, *seen["peers"]])) if seen["peers"] else []
    cuts = np.unique([x for x in cuts if t0 is not None and t0 <= x <= t1])
    a, b = cuts[:-1], cuts[1:]
    mid = (a + b) / 2
    on, is_busy = inside(mid, model), inside(mid, busy)
    return {
        "a": a, "b": b, "mid": mid, "dt": b - a, "model": on, "command": is_busy & ~on, "waiting": ~on & ~is_busy, "overlap": on & is_busy,
        "wasted": inside(mid, wasted), "blind": inside(mid, blind) & ~inside(mid, counted), "firsts": firsts,
    }  # fmt: skip


PARTS = ("model", "command", "waiting")


def has_tokens(call):
    """Did this attempt end with token counts? One that was aborted or refused did not."""
    return call["prompt"] is not None and call["completion"] is not None


def times_into(row, pieces):
    """total_s and its parts; without a split the total alone."""
    dt = pieces["dt"]
    if not len(dt):
        return
    begin, end = pieces["a"][0], pieces["b"][-1]
    row["total_s"] = round(float(end - begin), 6)
    for k, at in pieces["firsts"].items():
        row[f"first{k}_s"] = float(at - begin)
    if row["split_source"] is None:
        return
    row["total_s"], parts = exact_parts(float(end - begin), [float(dt[pieces[p]].sum()) for p in PARTS])
    row |= {f"{p}_s": x for p, x in zip(PARTS, parts, strict=True)}
    row["overlap_s"] = float(dt[pieces["overlap"]].sum())
    if row["split_source"] == "calls":
        row["command_s"] = row["overlap_s"] = None


def idle_powers(calibration, trial, samples):
    """({counter: W}, "batch", "calibration" or None): the idle power between calls of the trial's own counters.

    The calibration's, moved by what the batch's baseline of loaded idle differs from the calibration's: no two GPUs of a kind idle alike,
    nor one of them on two days. Estimated powers are not moved; their baseline is no meter.
    """
    if not calibration:
        return {}, None
    import calibrate

    between, rested = (calibrate.idle_like(calibration["params"], samples.domains, state) for state in ("loaded", "rested"))
    between, now = {d: float(w) for d, w in between.items() if known(w)}, sub(trial, "idle_rested_w")
    moved = {d: w + now[d] - rested[d] for d, w in between.items() if known(now.get(d)) and d in rested and samples.source[d] != "model"}
    return between | moved, ("batch" if moved else "calibration") if between else None


def energy_into(row, flags, seen, samples, calibration, idle, pieces):
    """Everything measured in joules; returns what estimates and views need, one value per piece and domain group."""
    a, b, dt, group = pieces["a"], pieces["b"], pieces["dt"], [seen, *seen["peers"]]
    domains = {g: [d for d in samples.domains if energylib.group(d) == g] for g in GROUPS}
    present = [g for g in GROUPS if domains[g]]
    summed = [g for g in present if any(d in samples.total_domains for d in domains[g])]
    row["total_domains"] = "+".join(summed) or None
    sources(row, flags, samples, domains)
    if summed != present:
        flags.add("module_scope")

    # idle power: the calibration's or the batch's, and the trajectory's own quietest
    idle_w, row["idle_source"] = idle
    idle_of = {g: sum(idle_w[d] for d in domains[g]) if domains[g] and all(d in idle_w for d in domains[g]) else None for g in GROUPS}
    if calibration and any(idle_of[g] is None for g in ("gpu", "cpu") if domains[g]):
        flags.add("idle_unknown")
    lead = "gpu" if domains["gpu"] else "cpu"
    quiet_at = np.column_stack([a, b])[pieces["waiting"]]
    if seen["peers"]:  # the machine is quiet when nobody calls
        quiet_at = group_pieces(group)
        quiet_at = quiet_at[~inside(quiet_at.mean(axis=1), union([(c["start"], c["end"]) for m in group for c in m["calls"]]))]
    quiet = quiet_power(samples, domains[lead], *quiet_at.T)
    row["idle_w"], row["idle_quiet_w"] = idle_of[lead], quiet["total"]
    if known(quiet["total"]) and idle_of[lead] and abs(quiet["total"] / idle_of[lead] - 1) > 0.03:
        flags.add("idle_drift")
    apportion = idle_w
    if not calibration and lead == "gpu" and quiet["by_domain"]:
        apportion = quiet["by_domain"]
        flags.add("idle_from_trajectory")

    # what lies outside the agent's execution comes along in the same reading: setup, verifier, earlier attempts
    gone = [(c["start"], c["end"]) for c in seen["apart"]]
    gone += [agent_window(x["result"]) for x in seen["attempts"] if x is not seen["attempt"]]
    outside = [("setup", seen["begin"], seen["end"] if seen["t0"] is None else seen["t0"]), ("verifier", *seen["verifier"])]
    outside += [("gone", x, y) for x, y in union([g for g in gone if None not in g])]
    outside = [(name, x, y) for name, x, y in outside if x is not None and y is not None and y > x]
    outside = [(name, x, y) for name, x, y in outside if not any(m["t0"] < y and m["t1"] > x for m in seen["peers"])]
    calls = sorted((c for m in group for c in m["calls"] + m["apart"]), key=lambda c: (c["start"], c["end"]))
    spans = np.array([(c["start"], c["end"]) for c in calls], dtype=float).reshape(-1, 2)
    powers = call_powers(calibration, calls)
    busy = union(np.concatenate([m["busy"] for m in group]))
    begin, end = np.r_[a, [x for _, x, _ in outside]], np.r_[b, [y for _, _, y in outside]]
    over = group_pieces(group) if seen["peers"] else None
    joules, err = segment_energy(samples, begin, end, spans, busy, apportion, powers, over)
    n = len(a)
    if n:
        covered = samples.energy(a[:1], b[-1:]).covered[0]
        row["coverage"] = float(covered) if known(covered) else None
        if known(covered) and covered < 0.99:
            flags.add("gaps")

    # of what the machine used, what this trajectory answers for (all of it when it is alone)
    idle_share, totals = np.ones(n), {}
    group_j, group_idle, group_err = {}, {}, {}
    for g in present:
        machine, idle_g = np.sum([joules[d][:n] for d in domains[g]], axis=0), sum(idle_w.get(d, 0.0) for d in domains[g])
        share = np.ones(n)
        if seen["peers"] and n:
            whole_j, _ = segment_energy(samples, *over.T, spans, busy, apportion, powers, over)
            whole_j = np.sum([whole_j[d] for d in domains[g]], axis=0)
            idle_share, share, totals[g] = share_out(group, g, calibration, pieces["mid"], over, whole_j, idle_g)
        group_idle[g] = idle_g * dt * idle_share
        group_j[g] = group_idle[g] + (machine - idle_g * dt) * share
        group_err[g] = np.sqrt(np.sum([np.square(err[d][:n]) for d in domains[g]], axis=0)) * share
    split = row["split_source"] is not None
    for g in present if n else ():
        j, above = group_j[g], group_j[g] - group_idle[g]
        if not np.isfinite(j).all():
            flags.add("not_covered")
            continue
        total = totals[g] if known(totals.get(g)) else float(j.sum())
        row[f"{g}_total_j"] = round(total, 6)
        if split:
            row[f"{g}_total_j"], parts = exact_parts(total, [float(j[pieces[p]].sum()) for p in PARTS])
            row |= {f"{g}_{p}_j": x for p, x in zip(PARTS, parts, strict=True) if p != "command" or row["split_source"] != "calls"}
        if g != "dram" and idle_of[g] is not None:
            row |= {f"{g}_idle_j": float(group_idle[g].sum()), f"{g}_above_idle_j": float(above.sum())}
            if split:
                row[f"{g}_model_above_idle_j"] = float(above[pieces["model"]].sum())
        if g == "gpu" and split:
            row["gpu_err_j"] = float(np.sqrt(np.nansum(np.square(group_err[g][pieces["model"]]))))

    totals = [row[f"{g}_total_j"] for g in summed]
    whole = np.sum([group_j[g] for g in summed], axis=0)
    beyond = np.sum([joules[d][n:] for g in summed for d in domains[g]], axis=0)
    where = np.array([name for name, _, _ in outside], dtype=object)
    if totals and all(known(x) for x in totals):
        row["total_j"] = round(sum(totals), 6)
        row |= {f"first{k}_total_j": float(whole[pieces["mid"] < at].sum()) for k, at in pieces["firsts"].items()}
        if seen["known"]:
            row["wasted_j"] = float(whole[pieces["wasted"]].sum() + beyond[where == "gone"].sum())
    for name in ("setup", "verifier"):
        if (where == name).any():
            x = float(beyond[where == name].sum())
            row[f"{name}_j"] = x if known(x) else None
            if not known(x):
                flags.add("setup_not_covered")
    return {
        "domains": domains, "summed": summed, "idle_w": idle_w, "idle_of": idle_of, "apportion": apportion, "spans": spans,
        "joules": group_j, "idle": group_idle, "whole": whole, "idle_share": idle_share, "busy": busy,
    }  # fmt: skip


def split_sources(row, flags, seen, model):
    """Command spans from the best source there is; sets split_source, recording_* and the flags."""
    t0, t1, own = seen["t0"], seen["t1"], seen["calls"]
    cast = read_cast(seen["agent_dir"] / "recording.cast")
    row["recording_status"] = cast["status"]
    terminal = str(row["agent"]).startswith("terminus")
    if cast["status"] in ("missing", "empty") and terminal:
        flags.add("recording_missing")
    elif cast["status"] == "damaged":
        flags.add("recording_damaged")
    if t0 is None or not seen["known"]:
        return []
    if cast["events"]:
        commands, offset, residual, more = commands_from_recording(cast, own, seen["steps"], model, t0, t1)
        flags |= more
        row |= {"recording_offset_s": offset, "recording_residual_s": residual, "split_source": "recording"}
        return commands
    commands, more = commands_from_mini_swe(seen["agent_dir"] / "mini-swe-agent.trajectory.json", own, t0, t1)
    if commands is not None:
        flags |= more
        row["split_source"] = "agent_log"
        return commands
    if any(s.get("source") == "agent" and unix(s.get("timestamp")) for s in seen["steps"]):
        flags.add("requested_durations")
        row["split_source"] = "trajectory"
        return commands_from_steps(seen["steps"], own, t0, t1)
    flags.add("command_unknown")
    row["split_source"] = "calls"
    return []


def wasted_calls(calls):
    """Attempts that failed, were aborted, or were repeated: of the attempts of one request only the last good one was of use."""
    useful = {}
    for c in calls:
        if c["ok"]:
            useful[c["key"]] = c
    return [c for c in calls if useful.get(c["key"]) is not c]


def open_samples(folder, flags):
    """The counters of a trial, None when there are none that can be read."""
    path = folder / "samples.csv"
    if not path.is_file() or path.stat().st_size == 0:
        flags.add("samples_missing")
        return None
    meta, status = read_sidecar(folder)
    if status != "ok":
        flags.add("sidecar_missing" if status == "missing" else "sidecar_damaged")
        print(f"align_trial: {folder}/samples.meta.json: {status}; energy is computed without the counters' limits and ranges", file=sys.stderr)
    try:
        samples = energylib.read_samples(path, meta)
    except Exception as e:  # whatever is wrong with the file, the row still has times, tokens and outcome
        print(f"align_trial: {e}", file=sys.stderr)
        flags.add("samples_unreadable")
        return None
    if not samples.domains or len(samples.t) < 2:
        flags.add("samples_unreadable")
        return None
    flags.update(code for f in samples.flags if (code := f.rpartition(":")[2]) in FLAGS)
    return samples


def sources(row, flags, samples, domains):
    """gpu_source and cpu_source in words of the table; `estimated` for what no counter measured."""
    for g in ("gpu", "cpu"):
        found = sorted({str(samples.source[d]) for d in domains[g]})
        if "model" in found:
            flags.add(f"estimated_{g}")
        if g == "gpu" and "nvml-power" in found:
            flags.add("estimated_gpu")
        row[f"{g}_source"] = "+".join("estimated" if s == "model" else s for s in found) or "none"


def quiet_power(samples, domains, a, b):
    """The trajectory's own quietest power: {total W, by_domain {domain: W}}, the 10th percentile over its waits, in tiles of about 1 s.

    The edges of each wait are left out: the counter's steps there hold part of a call. Short waits count on GPUs only, which draw
    their idle power at once and evenly; a CPU's wait has bursts.
    """
    shortest_s = 0.2 if domains and energylib.group(domains[0]) == "gpu" else 1.0
    starts, ends = [], []
    for x, y in union(np.column_stack([a, b])) if len(a) and domains else []:
        x, y = x + 0.15, y - 0.11
        if y - x >= shortest_s:
            grid = np.linspace(x, y, max(1, int(y - x)) + 1)
            starts += list(grid[:-1])
            ends += list(grid[1:])
    if not starts:
        return {"total": None, "by_domain": {}}
    starts, ends = np.array(starts), np.array(ends)
    e = samples.energy(starts, ends)
    power = {d: e.joules[d] / (ends - starts) for d in domains if np.isfinite(e.joules[d]).any()}
    total = np.sum([power[d] for d in domains], axis=0) if len(power) == len(domains) else np.array([np.nan])
    return {
        "total": float(np.nanpercentile(total, 10)) if np.isfinite(total).any() else None,
        "by_domain": {d: float(np.nanpercentile(w, 10)) for d, w in power.items()},
    }


def stalled(took_s, predicted_s):
    """Did calls take over twice as long as the call model says, and over STALL_S longer?"""
    return took_s > predicted_s + np.maximum(predicted_s, STALL_S)


def estimates(row, flags, calibration, own, pieces, view):
    """est_* and closure_*: from token counts and the call model alone, against the same calls and domains measured."""
    calls = [c for c in own if has_tokens(c)]
    if not calibration or not calls or any(c["cached"] is None for c in calls):
        return  # an unknown cached count (flagged) would have to be guessed
    est = predict(calibration, calls)
    row["est_model_s"] = seconds = float(np.sum(est["time_s"]))
    took_s = np.array([c["end"] - c["start"] for c in calls])
    measured_s = float(took_s.sum())
    if row["concurrency"] == 1 and stalled(took_s, est["time_s"]).any():
        flags.add("stalled_call")
    row["closure_time"] = seconds / measured_s - 1 if measured_s > 0 else None
    if len(calls) < len(own):
        flags.add("closure_partial")
    idle_of, summed = (view["idle_of"], view["summed"]) if view else ({}, GROUPS)
    above = {g: float(np.sum(j)) for g in GROUPS if (j := est.get(f"{g}_above_idle_j")) is not None and g in summed}
    for g in ("gpu", "cpu"):
        if g in above:
            row[f"est_{g}_above_idle_j"] = above[g]
            if idle_of.get(g) is not None:
                row[f"est_{g}_model_j"] = above[g] + idle_of[g] * seconds
    both = [g for g in above if idle_of.get(g) is not None and known(row[f"{g}_total_j"])]
    if not both or row["split_source"] is None:
        return
    row["est_domains"] = "+".join(both)
    on = pieces["model"] & ~pieces["blind"]
    idle_w = sum(idle_of[g] for g in both)
    joules, base = (np.sum([view[k][g] for g in both], axis=0) for k in ("joules", "idle"))
    est_above = sum(above[g] for g in both)
    shared_s = pieces["dt"] * view["idle_share"]  # seconds of idle power that this trajectory answers for
    rest_s, on_s = float(shared_s[~pieces["model"]].sum()), float(pieces["dt"][pieces["model"]].sum())
    idle_s = seconds * float(shared_s[pieces["model"]].sum()) / on_s if on_s else seconds
    row["est_total_j"] = est_above + idle_w * (idle_s + rest_s)

    def off(estimate, measured):
        return estimate / measured - 1 if measured > 0 else None

    row["closure_model_above_idle"] = off(est_above, float((joules - base)[on].sum()))
    row["closure_model"] = off(est_above + idle_w * idle_s, float(joules[on].sum()))
    row["closure_total"] = off(row["est_total_j"], float(joules[~pieces["blind"]].sum()))
    if any(row[f"{g}_source"] == "estimated" for g in both if g != "dram"):
        flags.add("closure_circular")


# ---------------------------------------------------------------- several trajectories on one server


def member_folder(folder, name, group):
    """The folder of a member as it ran in this group: one that failed was set aside since, and its name may be another run's now."""
    for path in (folder.parent / name, *sorted((folder.parent.parent / "traj_unfinished").glob(f"{name}.*"))):
        said = read_json(path / "trial.json")[0] or read_json(path / "request.json")[0]
        if sub(said, "shared").get("group") == group:
            return path
    return folder.parent / name / "not in this group"


def read_peers(folder, group, members, flags):
    """The other members of a group, as align_outcome sees them, with `busy`, the time in which their commands ran."""
    folder, peers = Path(folder).resolve(), []
    others = sorted(m for m in set(members) if (folder.parent / m).resolve() != folder)
    if not others:
        flags.add("shared_unknown")
    for name in others:
        peer = member_folder(folder, name, group)
        trial = read_json(peer / "trial.json")[0]
        trial = trial if isinstance(trial, dict) else {}
        row = dict.fromkeys(COLUMNS) | {"trajectory": name, "agent": trial.get("agent")}
        seen = align_outcome(peer, trial, row, set())
        if not seen["known"] or seen["t0"] is None:
            flags.add("member_missing")
            continue
        commands = split_sources(row, set(), seen, union([(c["start"], c["end"]) for c in seen["calls"]]))
        peers.append(seen | {"name": peer.resolve().name, "busy": union([(c["start"], c["end"]) for c in commands])})
    return peers


def group_cuts(group):
    """Every moment at which an agent, a call or a command of a group of trajectories begins or ends, sorted."""
    ends = [x for m in group for x in (m["t0"], m["t1"], *(x for c in m["calls"] for x in (c["start"], c["end"])), *m["busy"].ravel())]
    return np.unique([x for x in ends if x is not None])


def group_pieces(group):
    """(n, 2) slices between these moments in which some agent of the group executes. The same for every member, to the last bit."""
    cuts = group_cuts(group)
    slices = np.column_stack([cuts[:-1], cuts[1:]])
    return slices[inside(slices.mean(axis=1), union([(m["t0"], m["t1"]) for m in group if m["t0"] is not None]))]


def share_out(group, g, calibration, mid, slices, joules, idle_w):
    """(share of idle, share of the rest, total J) of the first member of the group in the domains `g`.

    The shares are for the times `mid`; the total is what it gets of `joules`, measured in the group's `slices`, of which `idle_w` are
    idle power. The members' shares add up to one at any time, and their totals, rounded, to that of the machine to the last digit.
    """
    order = sorted(range(len(group)), key=lambda i: (group[i]["t0"], group[i]["t1"], group[i]["name"]))
    group, me = [group[i] for i in order], order.index(0)
    watts = [predicted_powers(calibration, m["calls"], g) for m in group]
    present = presence(group, watts, slices.mean(axis=1))
    dt = np.diff(slices)[:, 0]
    above = joules - idle_w * dt
    calling, working = (present[k].sum(axis=0) for k in ("calls", "busy"))
    call_w = mean_power(above, dt * calling, (calling > 0) & (working == 0))
    command_w = mean_power(above, dt * working, (working > 0) & (calling == 0))
    use = (call_w or command_w or 1.0, command_w or 0.0)
    idle, rest = divide(present, g, *use)
    each = (idle * (idle_w * dt) + np.where(rest > 0, rest * above, 0.0)).sum(axis=1)
    upto = np.round(np.cumsum(each), 6)
    total = float(upto[me] - (upto[me - 1] if me else 0.0))
    idle, rest = divide(presence(group, watts, mid), g, *use)
    return idle[me], rest[me], total


def predicted_powers(calibration, calls, g):
    """Mean power above idle of each call in the domains `g` by the call model, W; of one without token counts that of the others.
    None when the call model knows nothing of these domains."""
    full = [has_tokens(c) and c["cached"] is not None for c in calls]
    if not calibration or not any(full):
        return None
    joules = predict(calibration, [c for c, f in zip(calls, full, strict=True) if f]).get(f"{g}_above_idle_j")
    if joules is None:
        return None
    seconds = np.array([c["end"] - c["start"] for c in calls])
    watts = np.full(len(calls), np.nan)
    watts[full] = np.asarray(joules) / np.maximum(seconds[full], 1e-3)
    return np.where(np.isfinite(watts), watts, np.nanmean(watts))


def presence(group, watts, mid):
    """What each member does at each time, as (members, times) arrays: `active`, `calls` running, their `watts`, `busy` with a command.
    Only time within its agent's execution counts."""
    out = {k: np.zeros((len(group), len(mid))) for k in ("active", "calls", "watts", "busy")}
    for i, m in enumerate(group):
        out["active"][i] = (mid >= m["t0"]) & (mid < m["t1"])
        out["busy"][i] = inside(mid, m["busy"]) & (out["active"][i] > 0)
        for k, c in enumerate(m["calls"]):
            on = ((mid >= c["start"]) & (mid < c["end"])) * out["active"][i]
            out["calls"][i] += on
            out["watts"][i] += on * (np.nan if watts[i] is None else watts[i][k])
    return out


def mean_power(joules, seconds, where):
    """Mean of joules per second where it is asked for; None where there is no time or nothing above idle."""
    where = where & np.isfinite(joules)
    power = joules[where].sum() / seconds[where].sum() if seconds[where].sum() > 0 else 0.0
    return float(power) if power > 0 else None


def divide(present, g, call_w, command_w):
    """(idle, rest): the members' shares of idle power and of what is above it, each adding up to one wherever an agent executes.

    Idle goes to all alike that execute. Above idle goes to the running calls by predicted power (`call_w` each where there is no
    prediction) and, on CPUs, to running commands by `command_w`; failing both to all alike that execute.
    """
    active = present["active"]
    weight = np.where(np.isfinite(present["watts"]), present["watts"], call_w * present["calls"])
    choices = [weight + (command_w * present["busy"] if g != "gpu" else 0.0), present["calls"]]
    choices += [present["busy"]] if g != "gpu" else []
    chosen = active
    for w in reversed(choices):
        chosen = np.where(w.sum(axis=0) > 0, w, chosen)

    def normal(w):
        return w / np.maximum(w.sum(axis=0), 1e-300)

    return normal(active), normal(chosen)


# ---------------------------------------------------------------- the table


def cell(x):
    """A value as it stands in the table: empty when missing, plain decimals, at most six digits after the point."""
    if x is None or (isinstance(x, float) and not math.isfinite(x)):
        return ""
    if isinstance(x, (bool, np.bool_)):
        return "true" if x else "false"
    if isinstance(x, (float, np.floating)):
        text = f"{x:.6f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text
    return str(x)


def write_table(path, rows):
    """trials.csv, atomically."""
    from stages import csvfiles

    def body(f):
        out = csv.writer(f, lineterminator="\n")
        out.writerow(COLUMNS)
        out.writerows([cell(row[c]) for c in COLUMNS] for row in rows)

    csvfiles.replace(Path(path), body)


def align_all(folders, calibration=None, jobs=1, trace_dir=None, timeline_dir=None, formats=(), progress=None):
    """Rows of all folders, in their order."""
    work = [(f, calibration, trace_dir, timeline_dir, formats) for f in folders]
    rows = []
    if jobs <= 1 or len(work) < 2:
        for w in work:
            rows.append(align(*w))
            if progress:
                progress(len(rows), len(work))
        return rows
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # spawn: numpy may have started threads, which a fork would copy half
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(align_one, work, chunksize=1 if len(work) < 50 else 4):
            rows.append(row)
            if progress:
                progress(len(rows), len(work))
    return rows


def align_one(work):
    return align(*work)


def show_progress(begin=None):
    """A function (done, of) that prints a progress line with the time left, at most every two seconds and at the end."""
    begin, last = begin or time.monotonic(), [0.0]

    def show(done, of):
        now = time.monotonic()
        if done < of and now - last[0] < 2:
            return
        last[0] = now
        each = (now - begin) / done
        print(f"align_trial: {done}/{of} trajectories, {each:.2f} s each, {each * (of - done):.0f} s left", file=sys.stderr, flush=True)

    return show


def existing(path):
    """The path, or the nearest folder above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dirs", nargs="+", metavar="DIR", help="trajectory folders; one without trial.json is unfinished and skipped")
    p.add_argument(
        "--calib", metavar="DIR", help="folder with params.json from calibrate.py; without it no estimates, no above-idle energy"
    )
    p.add_argument("--out", required=True, metavar="CSV", help="the table to write, for example results/trials.csv")
    p.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: the CPUs there are, %(default)s)"
    )
    p.add_argument("--trace", metavar="DIR", help="write one Chrome trace-event JSON per trajectory (open it at ui.perfetto.dev)")
    p.add_argument("--timeline", metavar="DIR", help="write one figure per trajectory: power over time by phase, energy per phase")
    p.add_argument("--format", action="append", choices=["pdf", "svg"], default=[], help="write the timelines in this format too")
    p.add_argument(
        "--allow-other-calibration", action="store_true", help="use a calibration from other hardware or another model; rows are flagged"
    )
    args = p.parse_args(argv)
    if args.jobs < 1:
        p.error(f"--jobs {args.jobs}: expected 1 or more")
    if args.format and not args.timeline:
        p.error("--format is of the timelines; give --timeline with it")
    if not os.access(existing(Path(args.out).resolve().parent), os.W_OK) or Path(args.out).is_dir():
        print(f"align_trial: --out {args.out}: cannot be written, expected a path for a CSV file in a folder of yours", file=sys.stderr)
        return 2
    for name, folder in (("--trace", args.trace), ("--timeline", args.timeline)):
        if folder and not ((there := existing(Path(folder).resolve())).is_dir() and os.access(there, os.W_OK)):
            print(f"align_trial: {name} {folder}: cannot be made a folder of yours, {there} is in the way", file=sys.stderr)
            return 2
    try:
        calibration = load_calibration(args.calib)
    except InputError as e:
        print(f"align_trial: --calib {args.calib}: {e}; without --calib there are no estimates, but a table", file=sys.stderr)
        return 2
    folders = []
    for d in args.dirs:
        trial, status = read_json(Path(d) / "trial.json")
        if not Path(d).is_dir():
            print(
                f"align_trial: {d}: no such folder, expected one of the folders that 06_run_batch.sh leaves, <task>__<policy>__r<rep>",
                file=sys.stderr,
            )
            return 2
        if status != "ok" or not isinstance(trial, dict):
            print(f"align_trial: {d}: skipped, trial.json is {status} (unfinished; 04_run_trial.sh runs it again)", file=sys.stderr)
            continue
        if calibration and not args.allow_other_calibration:
            differs, _ = mismatch(calibration["params"], trial, d)
            if differs:
                print(
                    f"align_trial: {d}: {calibration['path']} does not fit: {differs}; calibrate there, or --allow-other-calibration",
                    file=sys.stderr,
                )
                return 2
        folders.append(d)
    if not folders:
        print(
            "align_trial: no finished trajectory among the folders given, nothing to align; run 04_run_trial.sh or 06_run_batch.sh first",
            file=sys.stderr,
        )
        return 2
    from concurrent.futures.process import BrokenProcessPool

    try:
        rows = align_all(folders, calibration, args.jobs, args.trace, args.timeline, args.format, show_progress())
        write_table(args.out, rows)
    except KeyboardInterrupt:
        print(f"align_trial: interrupted, {args.out} was not written", file=sys.stderr)
        return 130
    except BrokenProcessPool:
        print(f"align_trial: a worker process was killed (out of memory?), {args.out} was not written; try --jobs 1", file=sys.stderr)
        return 1
    except ViewError as e:
        print(f"align_trial: {e}; {args.out} was not written", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"align_trial: {args.out}: {e.strerror or e}; nothing was written there", file=sys.stderr)
        return 1
    outcomes = {k: sum(r["outcome"] == k for r in rows) for k in ("success", "fail", "unscored")}
    print(f"{args.out}: {len(rows)} trajectories, " + ", ".join(f"{n} {k}" for k, n in outcomes.items()))
    counts = Counter(f for r in rows for f in r["flags"].split(";") if f)
    for flag in sorted(counts, key=lambda f: (-counts[f], list(FLAGS).index(f))):
        print(f"  {counts[flag]} of {len(rows)}: {FLAGS[flag]} ({flag})")
    from stages import status

    for table in sorted({Path(os.path.relpath(Path(d).resolve().parent.parent / "waste.csv")) for d in folders}):
        try:  # the batch counts there what attempts used that are in no row
            used = [r["energy_j"] for r in status.read_waste(table)]
        except ValueError as e:
            print(f"align_trial: {e}; the table is written all the same", file=sys.stderr)
            continue
        if used:
            print(f"waste: {sum(float(j) for j in used if j):.0f} J in {len(used)} attempt{'s' * (len(used) > 1)} set aside ({table})")
    return 1 if any("alignment_failed" in r["flags"].split(";") for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
