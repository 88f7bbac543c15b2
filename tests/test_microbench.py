"""What microbench.py sends, checks and keeps, against a small server that can misbehave, and against llama.cpp."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest
from fakes.model_server import ModelServer

import microbench as mb

CONTRACT = {  # fields that readers of calls.jsonl rely on
    "id", "trial", "seq", "call_key", "attempt", "kind", "path", "t_start", "t_sent", "t_first", "t_end", "mono_start", "mono_end",
    "stream", "status", "error", "complete", "client_disconnect", "model", "prompt_tokens", "cached_tokens", "completion_tokens",
    "finish_reason", "request_bytes", "response_bytes", "chunks", "session", "replayed", "replay", "params", "cell", "transport", "run", "valid",
    "reason",
}


def command(repo, server, out, *more):
    """Command line of a small grid: 2 contexts x 2 outputs, no quiet time."""
    return [sys.executable, str(repo / "microbench.py"), "--base-url", server.url, "--server-kind", server.kind, "--out", str(out),
            "--contexts", "64,100", "--outputs", "4,8", "--quiet-s", "0", *more]


@pytest.fixture
def bench(repo, tmp_path, capsys):
    """Run microbench.py against a server; returns (exit code, records, stderr)."""
    handler = signal.getsignal(signal.SIGTERM)

    def go(server, *more, out="calls.jsonl"):
        path = tmp_path / out
        with pytest.raises(SystemExit) as end:
            mb.main(command(repo, server, path, *more)[2:])
        return end.value.code, read(path), capsys.readouterr().err

    yield go
    signal.signal(signal.SIGTERM, handler)


def read(path):
    """Records so far; a line that is just being written is none yet."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def valid(records):
    return [r for r in records if r["valid"]]


def cells(records):
    return Counter((r["cell"]["context"], r["cell"]["output"], r["cell"]["rep"], r["cell"]["state"]) for r in records)


# ---- plan ----


def test_every_cell_once_per_repetition_in_another_order():
    pairs = mb.plan_pairs([1, 2, 3], [10, 20], reps=2, seed=0)
    by_rep = [[(p["context"], p["output"]) for p in pairs if p["rep"] == r] for r in (0, 1)]
    assert sorted(by_rep[0]) == sorted(by_rep[1]) == [(c, o) for c in (1, 2, 3) for o in (10, 20)]
    assert by_rep[0] != by_rep[1]
    assert pairs == mb.plan_pairs([1, 2, 3], [10, 20], reps=2, seed=0), "the order is the seed's, so that a rerun finds its place"
    assert pairs != mb.plan_pairs([1, 2, 3], [10, 20], reps=2, seed=1)


def test_reference_cell_stands_at_start_middle_and_end():
    pairs = mb.plan_pairs([1, 2, 3], [10, 20], reps=2, seed=0, reference=(2, 10))
    at = {p["reference"]: n for n, p in enumerate(pairs) if "reference" in p}
    assert at["start"] == 0 and at["end"] == len(pairs) - 1 == 14 and at["middle"] == 7
    assert len({mb.pair_key(p) for p in pairs}) == len(pairs), "each pair has an identity of its own"


def test_append_cells_beyond_the_context_are_left_out():
    pairs, left_out = mb.plan_append([100, 1000], [50, 100], [10], reps=1, seed=0, max_context=1060)
    assert {(p["cached"], p["uncached"]) for p in pairs} == {(100, 50), (100, 100), (1000, 50)}
    assert [(p["cached"], p["uncached"]) for p in left_out] == [(1000, 100)]


def test_warm_up_covers_every_context_and_every_uncached_part():
    assert [(p["context"], p["output"]) for p in mb.warm_shapes(mb.plan_pairs([64, 100], [4, 8], 2, 0, (64, 4)))] == [(64, 8), (100, 8)]
    pairs, _ = mb.plan_append([64, 128], [32, 48], [4], 1, 0)
    assert [(p["cached"], p["uncached"]) for p in mb.warm_shapes(pairs)] == [(64, 32), (64, 48)]


# ---- prompts ----


@pytest.mark.parametrize("count", [
    len,  # one token per word
    lambda words: len(words) + sum(w == "long" for w in words),  # a word of two tokens
    lambda words: len(words) + 30,  # a long template
])
def test_prompts_have_exactly_the_length_asked_for(count):
    for target in (40, 41, 1000):
        words = mb.fit_words(count, random.Random(target), ["a", "b", "long"], [], target, "a context")
        assert count(words) == target


def test_prompt_shorter_than_its_template_is_bad_input():
    with pytest.raises(mb.PlanError, match="template alone takes 30"):
        mb.fit_words(lambda words: len(words) + 30, random.Random(0), ["a"], [], 20, "a context")


def test_words_of_two_tokens_are_not_used():
    words = mb.usable_words(lambda words: len(words) + sum(len(w) > 6 for w in words))
    assert words == [w for w in mb.WORDS if len(w) <= 6]
    with pytest.raises(mb.BenchError, match="only 0 of"):
        mb.usable_words(lambda words: 2 * len(words))


# ---- one call's verdict ----

GOOD = {"error": None, "complete": True, "prompt_tokens": 100, "completion_tokens": 8, "cached_tokens": 0, "finish_reason": "length"}
APPEND = {"context": 100, "output": 8, "cached": 64, "uncached": 36, "state": "append"}


@pytest.mark.parametrize(("state", "change", "reason"), [
    ("miss", {}, None),
    ("miss", {"cached_tokens": None}, None),
    ("miss", {"cached_tokens": 16}, "a miss with 16 cached tokens"),
    ("miss", {"prompt_tokens": 99}, "prompt of 99 tokens, expected 100"),
    ("miss", {"prompt_tokens": None}, "prompt of None tokens"),
    ("miss", {"completion_tokens": 7, "finish_reason": "stop"}, "output of 7 tokens, expected 8 .*stop"),
    ("miss", {"error": "HTTP 500: no"}, "HTTP 500"),
    ("miss", {"complete": False}, "ended before"),
    ("hit", {"cached_tokens": 96}, None),
    ("hit", {"cached_tokens": 84}, None),
    ("hit", {}, "a hit with 0 cached tokens"),
    ("hit", {"cached_tokens": 48}, "expected at least 84"),
    (APPEND, {"cached_tokens": 64}, None),
    (APPEND, {"cached_tokens": 48}, None),
    (APPEND, {"cached_tokens": 0}, "an append with 0 cached tokens"),
    (APPEND, {"cached_tokens": 96}, "an append with 96 cached tokens"),
])
def test_check(state, change, reason):
    cell = state if isinstance(state, dict) else {"context": 100, "output": 8, "state": state}
    found = mb.check({**GOOD, **change}, cell, block=16, miss_allowed=0)
    assert found is None if reason is None else re.search(reason, found)


def test_a_count_that_was_told_is_not_wiped_by_null():
    rec = {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None, "finish_reason": None}
    mb.take_answer({"usage": {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}}, rec)
    mb.take_answer({"usage": {"prompt_tokens": None, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": None}}}, rec)
    assert (rec["prompt_tokens"], rec["completion_tokens"], rec["cached_tokens"]) == (100, 8, 0)


# ---- whole runs ----


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
@pytest.mark.parametrize("transport", ["chat", "completions"])
def test_grid(bench, kind, transport):
    with ModelServer(kind) as s:
        code, records, err = bench(s, "--reps", "2", "--transport", transport)
    assert code == 0, err
    good = valid(records)
    plan = [(c, o, r) for c in (64, 100) for o in (4, 8) for r in (0, 1)] + [(64, 4, r) for r in (2, 3, 4)]
    assert cells(good) == Counter((*p, state) for p in plan for state in ("miss", "hit"))
    for r in records:
        assert r.keys() >= CONTRACT
        assert (r["prompt_tokens"], r["completion_tokens"]) == (r["cell"]["context"], r["cell"]["output"])
        assert r["cached_tokens"] == (0 if r["cell"]["state"] == "miss" else (r["prompt_tokens"] - 1) // s.block * s.block)
        assert r["mono_end"] > r["mono_start"] and r["t_start"] <= r["t_sent"] <= r["t_end"]
        assert (r["t_first"] is None) == (transport == "chat")
        assert not r["stream"] or r["t_sent"] <= r["t_first"] <= r["t_end"]
    assert [r["seq"] for r in records] == list(range(len(records)))
    assert {r["reason"] for r in records if not r["valid"]} == {"warm-up"}
    assert "reference cell at start, middle, end" in err
    same = [set(json.dumps(c.get("messages", c.get("prompt"))) for c in s.calls[k : k + 2]) for k in range(0, len(s.calls), 2)]
    assert all(len(x) == 1 for x in same) and len(set().union(*same)) == len(same), "a hit repeats its miss, every pair is new"
    wanted = {"vllm": {"min_tokens", "ignore_eos"}, "llamacpp": {"ignore_eos"}}[kind]
    assert all(wanted <= c.keys() for c in s.calls)


@pytest.mark.parametrize("transport", ["chat", "completions"])
def test_append_cells(bench, transport):
    with ModelServer("vllm") as s:
        code, records, err = bench(s, "--append", "--append-cached", "64,96,5000", "--append-uncached", "32,50", "--transport", transport)
    assert code == 0, err
    assert "4 of 12 append calls exceed the model's 4096 tokens" in err
    good = valid(records)
    assert {(r["cell"]["cached"], r["cell"]["uncached"], r["cell"]["output"]) for r in good} == {
        (c, u, o) for c in (64, 96) for u in (32, 50) for o in (4, 8)}
    for r in good:
        assert r["cell"]["state"] == "append" and r["cell"]["context"] == r["prompt_tokens"] == r["cell"]["cached"] + r["cell"]["uncached"]
        assert abs(r["cached_tokens"] - r["cell"]["cached"]) <= 16
    fills = [r for r in records if r["cell"]["state"] == "fill" and r["cell"]["rep"] >= 0]
    assert len(fills) == len(good) and all((r["prompt_tokens"], r["completion_tokens"]) == (r["cell"]["cached"], 1) for r in fills)


def test_quiet_time_before_every_call(bench):
    with ModelServer("vllm") as s:
        code, records, _ = bench(s, "--contexts", "64", "--outputs", "4", "--quiet-s", "0.15", "--reference", "none")
    assert code == 0
    assert all(b["mono_start"] - a["mono_end"] >= 0.15 for a, b in pairwise(records))


def test_machine_rests_after_the_warm_up_and_before_each_reference_cell(bench):
    with ModelServer("vllm") as s:
        code, records, err = bench(s, "--cool-down-s", "0.4", "--reps", "1")
    assert code == 0 and err.count("cooling down for 0.4 s") == 3  # the reference cell at the start is the first after the warm-up
    gaps = {(b["cell"]["state"], b["cell"].get("reference")): b["mono_start"] - a["mono_end"] for a, b in pairwise(records) if b["valid"]}
    rested = {key for key, gap in gaps.items() if gap >= 0.4}
    assert rested >= {("miss", "start"), ("miss", "middle"), ("miss", "end")}
    assert gaps["hit", "middle"] < 0.4


def test_cool_down_belongs_to_the_plan_and_its_absence_leaves_old_plans_valid(bench, tmp_path):
    with ModelServer("vllm") as s:
        assert bench(s)[0] == 0
        assert "cool_down_s" not in json.loads((tmp_path / "calls.jsonl.plan.json").read_text())["plan"]
        code, _, err = bench(s, "--cool-down-s", "5")
        assert code == 2 and "another plan (cool_down_s: null there, 5.0 now" in err
        code, _, _ = bench(s, "--cool-down-s", "5", "--dry-run", out="other.jsonl")
    assert code == 0
    assert mb.rests([{"rep": 0}, {"rep": 0}, {"reference": "middle"}, {"rep": 1}]) == [0, 2] and mb.rests([]) == []


def test_plan_of_the_included_calibration_is_the_one_its_arguments_give(repo):
    sidecar = json.loads((repo / "data" / "calib" / "calls.jsonl.plan.json").read_text())
    plan = sidecar["plan"]
    a = mb.parser().parse_args(["--base-url", "http://x", "--proxy-url", "http://y", "--server-kind", "vllm", "--out", "z", "--reps", "5"])
    _, made, _ = mb.make_plan(a, plan["model"], 32768)
    assert mb.plan_hash(made) == mb.plan_hash(plan) == sidecar["plan_sha256"]


def test_prompts_differ_between_runs_from_their_first_words(bench):
    with ModelServer("vllm") as s:
        for out in ("a.jsonl", "b.jsonl"):
            assert bench(s, "--seed", "7", out=out)[0] == 0
    starts = [tuple(c["messages"][0]["content"].split()[:6]) for c in s.calls]
    assert len(set(starts)) == len(starts) / 2


def test_reset_that_lies_is_still_a_miss(bench):
    with ModelServer("vllm", reset="lie") as s:
        code, records, err = bench(s)
    assert code == 0, err
    assert all(r["cached_tokens"] == 0 for r in valid(records) if r["cell"]["state"] == "miss")


def test_reset_that_lies_is_found_where_the_template_stays_cached(bench):
    with ModelServer("llamacpp", reset="lie", after=3) as s:
        code, records, err = bench(s, "--retries", "1")
    assert code == 1
    assert "a miss with 1 cached tokens, expected none" in err
    assert not [r for r in valid(records) if r["cell"]["state"] == "miss" and r["cached_tokens"]]


def test_server_without_reset_route_is_named_before_anything_is_measured(bench):
    with ModelServer("vllm", reset="404") as s:
        code, records, err = bench(s)
        assert code == 1 and "VLLM_SERVER_DEV_MODE=1" in err and "--no-reset" in err and not valid(records)
        code, records, err = bench(s, "--no-reset", out="b.jsonl")
    assert code == 0, err
    assert all(r["cached_tokens"] == 0 for r in valid(records) if r["cell"]["state"] == "miss")


def test_refused_reset_is_recorded_and_a_rerun_mends_it(bench):
    with ModelServer("vllm", reset="404", after=6) as s:
        code, before, err = bench(s, "--retries", "0")
        assert code == 1 and "pairs are not valid" in err
        refused = [r for r in before if "cache reset refused" in (r["reason"] or "")]
        assert refused and not any(r["valid"] for r in refused)
        s.faults.clear()
        code, after, _ = bench(s, "--retries", "0")
    assert code == 0
    assert after[: len(before)] == before
    assert set(cells(valid(after)).values()) == {1} and len(valid(after)) == 14


def test_wrong_output_length_is_sent_again(bench):
    with ModelServer("vllm") as s:
        assert bench(s)[0] == 0
        s.faults["short"] = 1
        code, records, _ = bench(s, "--retries", "1", out="b.jsonl")
        assert code == 0
        assert [r["attempt"] for r in records if "output of" in (r["reason"] or "")] == [1]
        s.faults["short"] = {"output": 4}
        code, records, err = bench(s, "--retries", "1", out="c.jsonl")
    assert code == 1 and "output of 3 tokens, expected 4" in err
    assert {r["cell"]["output"] for r in valid(records)} == {8}
    bad = [r for r in records if not r["valid"] and r["reason"] != "warm-up"]
    assert bad and {r["attempt"] for r in bad} == {1, 2} and all("output of 3" in r["reason"] for r in bad)


def test_hit_that_is_none(bench):
    with ModelServer("vllm", forget=True) as s:
        code, records, err = bench(s)
    assert code == 1 and "is prefix caching on?" in err and not valid(records)


def test_server_that_reports_no_cached_tokens(bench):
    with ModelServer("vllm", details="none") as s:
        code, records, err = bench(s)
        assert code == 1 and "--enable-prompt-tokens-details" in err and not valid(records)
    with ModelServer("openai", details="none") as s:
        code, records, err = bench(s, out="b.jsonl")
    assert code == 0, err
    assert all(r["cached_tokens"] is None and r["verified"] is False for r in valid(records)) and "unverified" in err


def test_nothing_reported_on_a_miss_is_marked_where_hits_are_reported(bench):
    with ModelServer("vllm", details="null on miss") as s:
        code, records, _ = bench(s)
    assert code == 0
    for r in valid(records):
        assert r["cached_tokens"] == (0 if r["cell"]["state"] == "miss" else (r["prompt_tokens"] - 1) // 16 * 16)
        assert r.get("cached_inferred", False) == (r["cell"]["state"] == "miss")


class SilentOnce(ModelServer):
    """Reports no cached tokens for its sixth call: after two warm-ups, the hit of the first pair."""

    def model_call(self, handler, path, body):
        self.faults["details"] = "none" if len(self.calls) == 5 else None
        super().model_call(handler, path, body)


def test_hit_without_a_count_is_sent_again_where_others_have_one(bench):
    says = "the server reported no cached tokens for this call, but did for others"
    with SilentOnce("vllm") as s:
        code, records, err = bench(s)
    assert code == 0, err
    assert [(r["cell"]["state"], r["attempt"], r["cached_tokens"]) for r in records if r["reason"] == says] == [("hit", 1, None)]
    assert set(cells(valid(records)).values()) == {1}
    with SilentOnce("vllm") as s:
        code, records, err = bench(s, "--retries", "0", out="b.jsonl")
    assert code == 1 and says in err and len(valid(records)) == 13


class Busy(ModelServer):
    """Runs another request until its metrics were asked for `until` times; `asked_at`: how often they had been at each reset and call."""

    until, asked, asked_at = 6, 0, ()

    def answer(self, handler, body):
        if handler.path == "/metrics":
            self.asked += 1
            self.running = int(self.asked < self.until)
        elif handler.path in ("/reset_prefix_cache", "/v1/chat/completions"):
            self.asked_at = (*self.asked_at, self.asked)
        super().answer(handler, body)


def test_nothing_is_reset_or_sent_while_the_server_runs_other_requests(bench):
    with Busy("vllm") as s:
        code, _, err = bench(s)
    assert code == 0, err
    assert min(s.asked_at) == s.until


def test_openai_server_has_exact_lengths_without_a_tokenizer(bench):
    with ModelServer("openai") as s:
        code, records, err = bench(s)
        assert code == 0, err
        assert all(r["prompt_tokens"] == r["cell"]["context"] for r in records)
        assert all(r["cached_tokens"] <= 4 for r in valid(records) if r["cell"]["state"] == "miss"), "the template alone"
        code, _, err = bench(s, "--transport", "completions", out="b.jsonl")
        assert code == 2 and "no tokenizer" in err
        code, _, err = bench(s, "--append", "--append-cached", "64", out="c.jsonl")
        assert code == 2 and "--append needs a tokenizer" in err


def test_server_error_and_torn_stream_are_sent_again(bench):
    with ModelServer("vllm", status=1, torn=1) as s:
        code, records, _ = bench(s, "--transport", "completions")
    assert code == 0
    reasons = [r["reason"] for r in records if not r["valid"] and r["reason"] != "warm-up"]
    assert len(reasons) == 2 and "out of memory" in reasons[0] and "ended before [DONE]" in reasons[1]
    assert [r["complete"] for r in records if r["reason"] in reasons] == [False, False]


def test_dry_run_sends_nothing(bench, tmp_path):
    with ModelServer("vllm") as s:
        code, _, _ = bench(s, "--dry-run")
        assert code == 0 and not s.calls and not s.resets and not list(tmp_path.iterdir())
    code, _, err = bench(s, "--dry-run")
    assert code == 0 and "not checked against the model's context" in err


# ---- interruption ----


def test_killed_run_goes_on_where_it_stood(repo, tmp_path, bench):
    out = tmp_path / "calls.jsonl"
    with ModelServer("vllm", delay_s=0.05) as s:
        p = subprocess.Popen(command(repo, s, out, "--reps", "2"), stderr=subprocess.DEVNULL)
        while len(valid(read(out))) < 5:
            time.sleep(0.02)
        p.kill()
        p.wait()
        before = read(out)
        with open(out, "a") as f:
            f.write('{"id": "torn", "ce')
        s.faults.clear()
        code, records, err = bench(s, "--reps", "2")
        assert code == 0, err
        sent = len(s.calls)
        assert bench(s, "--reps", "2")[0] == 0 and len(s.calls) == sent, "a complete plan sends nothing"
    assert records[: len(before)] == before
    good = valid(records)
    assert len(good) == 22 and set(cells(good).values()) == {1}
    assert len({r["run"] for r in good}) == 2
    plan = json.loads((tmp_path / "calls.jsonl.plan.json").read_text())
    assert plan["complete"] and len(plan["runs"]) == 2 and plan["runs"][0]["t_end"] is None


def test_sigterm_records_the_call_in_flight(repo, tmp_path):
    out = tmp_path / "calls.jsonl"
    with ModelServer("vllm") as s:
        p = subprocess.Popen(command(repo, s, out), stderr=subprocess.PIPE, text=True)
        while len(read(out)) < 3:
            time.sleep(0.02)
        s.faults["delay_s"] = 30
        n = len(s.calls)
        while len(s.calls) <= n:
            time.sleep(0.02)
        p.send_signal(signal.SIGTERM)
        err = p.communicate(timeout=30)[1]
    assert p.returncode == 130 and "the same command goes on" in err
    last = read(out)[-1]
    assert last["error"] == "interrupted" and not last["valid"] and last["client_disconnect"]


def test_server_that_goes_away_ends_the_run(repo, tmp_path):
    out = tmp_path / "calls.jsonl"
    with ModelServer("vllm") as s:
        p = subprocess.Popen(command(repo, s, out, "--reps", "50"), stderr=subprocess.PIPE, text=True)
        while len(valid(read(out))) < 3:
            time.sleep(0.02)
    err = p.communicate(timeout=40)[1]
    assert p.returncode == 1 and "the same command goes on" in err and "Traceback" not in err


def test_two_writers_are_refused(repo, tmp_path, bench):
    out = tmp_path / "calls.jsonl"
    with ModelServer("vllm", delay_s=30) as s:
        p = subprocess.Popen(command(repo, s, out), stderr=subprocess.DEVNULL)
        try:
            while not s.calls:
                time.sleep(0.02)
            code, _, err = bench(s)
        finally:
            p.kill()
            p.wait()
    assert code == 2 and "another microbench.py" in err


# ---- bad input ----


@pytest.mark.parametrize(("more", "says"), [
    (["--contexts", "5000"], "exceeds the model's context of 4096"),
    (["--contexts", "3"], "template alone takes 4"),
    (["--contexts", "16"], "cache block of 16"),
    (["--contexts", "64,64"], "different whole numbers"),
    (["--reference", "64"], "CONTEXT:OUTPUT"),
    (["--proxy-url", "localhost"], "expected an address"),
    (["--proxy-url", "http://127.0.0.1:99999"], "expected an address"),
    (["--append", "--append-cached", "5000"], "no append cell fits"),
])
def test_bad_input(bench, more, says):
    with ModelServer("vllm", block=1 if "3" in more else None) as s:
        code, records, err = bench(s, *(["--cache-block", "1"] if "3" in more else []), *more)
    assert code == 2 and says in err and not records, err


NUMBERS = ("--contexts", "--outputs", "--append-cached", "--append-uncached", "--reps", "--retries", "--cache-block", "--prefill-rate", "--decode-rate",
           "--timeout-s", "--quiet-s", "--cool-down-s", "--wait-s", "--seed")  # fmt: skip
MAY_BE_ZERO = ("--retries", "--quiet-s", "--cool-down-s", "--wait-s", "--seed")


@pytest.mark.parametrize("option", NUMBERS)
def test_numbers_that_cannot_be_meant_are_one_line(option, capsys):
    for text in ("-5", "nan", "inf", "1e300", "many", "", *(() if option in MAY_BE_ZERO else ("0",))):
        if (option, text) == ("--seed", "-5"):
            continue
        with pytest.raises(SystemExit) as end:
            mb.main(["--base-url", "http://127.0.0.1:1", "--server-kind", "vllm", "--out", "c.jsonl", "--dry-run", f"{option}={text}"])
        said = capsys.readouterr().err.splitlines()[-1]
        assert end.value.code == 2 and f"argument {option}: " in said and (text in said), said


@pytest.mark.parametrize(("more", "says"), [
    (["--server-kind", "openai", "--transport", "completions"], "--transport completions needs token ids"),
    (["--server-kind", "openai", "--append"], "--append needs a tokenizer"),
    (["--out", "."], "--out .: . is a folder, expected a file"),
    (["--out", "pyproject.toml/calls.jsonl"], "pyproject.toml is a file, expected a file in a folder"),
])
def test_a_plan_that_cannot_be_carried_out_is_refused_by_its_dry_run(repo, capsys, monkeypatch, more, says):
    monkeypatch.chdir(repo)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            mb.main(["--base-url", "http://127.0.0.1:1", "--server-kind", "vllm", "--out", "c.jsonl", "--dry-run", *more])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert end.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]


def test_output_of_another_plan_is_never_mixed(bench, tmp_path):
    with ModelServer("vllm") as s:
        assert bench(s)[0] == 0
        code, _, err = bench(s, "--reps", "2")
        assert code == 2 and "another plan (reps: 1 there, 2 now" in err
        (tmp_path / "calls.jsonl.plan.json").unlink()
        code, _, err = bench(s)
        assert code == 2 and "its plan is unknown" in err
        (tmp_path / "calls.jsonl.plan.json").write_text("{")
        code, _, err = bench(s)
        assert code == 2 and "is not a plan" in err


@pytest.mark.parametrize(("more", "says"), [
    (["--quiet-s", "0.01"], "another --quiet-s (quiet_s: 0.0 there, 0.01 now): give another --out"),
    (["--no-reset"], "another --no-reset (cache_reset: true there, false now): give another --out"),
])
def test_calls_of_another_quiet_time_or_reset_are_never_mixed(bench, more, says):
    with ModelServer("vllm", status=True) as s:
        assert bench(s, "--quiet-s", "0.02", "--no-reset")[0] == 1  # nothing valid came of it
        s.faults.clear()
        assert bench(s)[0] == 0
        for dry in ([], ["--dry-run"]):
            code, _, err = bench(s, *more, *dry)
            assert code == 2 and says in err
        assert bench(s)[0] == 0


def test_bad_line_in_the_output_is_named(bench, tmp_path):
    with ModelServer("vllm") as s:
        assert bench(s)[0] == 0
        path = tmp_path / "calls.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], '{"no": "call"}', *lines[1:]]) + "\n")
        code, _, err = bench(s)
    assert code == 2 and "calls.jsonl:2: no record of a call" in err


# ---- real programs ----


@pytest.mark.integration
@pytest.mark.parametrize("more", [(), ("--transport", "completions"), ("--append", "--append-cached", "96", "--append-uncached", "48")])
def test_llamacpp_through_the_proxy(repo, tmp_path, free_port, llamacpp_server, more):
    port, log, out = free_port(), tmp_path / "proxy.jsonl", tmp_path / "calls.jsonl"
    proxy = subprocess.Popen([sys.executable, str(repo / "llm_proxy.py"), "--upstream", llamacpp_server, "--port", str(port),
                              "--log", str(log), "--server-kind", "llamacpp"], stdout=subprocess.DEVNULL)
    try:
        from servers.adapter import get

        get("llamacpp", f"http://127.0.0.1:{port}").wait_ready(20)
        r = subprocess.run([sys.executable, str(repo / "microbench.py"), "--base-url", llamacpp_server, "--server-kind", "llamacpp",
                            "--proxy-url", f"http://127.0.0.1:{port}", "--out", str(out), "--contexts", "64,129", "--outputs", "3,5",
                            "--quiet-s", "0.05", "--reference", "none", *more], capture_output=True, text=True, timeout=200)
    finally:
        proxy.terminate()
        proxy.wait(10)
    assert r.returncode == 0, r.stderr
    records = read(out)
    for rec in valid(records):
        cell = rec["cell"]
        assert (rec["prompt_tokens"], rec["completion_tokens"]) == (cell["context"], cell["output"])
        expected = {"miss": 0, "hit": cell["context"] - 1, "append": cell.get("cached")}[cell["state"]]
        assert abs(rec["cached_tokens"] - expected) <= (1 if cell["state"] == "append" else 0)
    assert len(valid(records)) == (2 if "--append" in more else 8)
    on_the_wire = read(log)
    assert [(w["prompt_tokens"], w["cached_tokens"], w["completion_tokens"]) for w in on_the_wire] == [
        (m["prompt_tokens"], m["cached_tokens"], m["completion_tokens"]) for m in records]
