"""The Python worker for ExecuTorch's LLM server: the JSON lines, sessions and prefix reuse, with a method that only counts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "evals" / "executorch"))

import worker  # isort: skip


class Counting(worker.Session):
    """A session whose next token is always the number of tokens it holds; `fed` has what it was given to compute."""

    def __init__(self, _):
        self.held, self.fed = [], []

    def feed(self, tokens):
        self.fed.append(list(tokens))
        self.held += tokens
        return len(self.held)


class Letters:
    """A tokenizer with one token a character."""

    def encode(self, text, add_special_tokens):
        return type("Encoding", (), {"ids": [ord(c) for c in text]})

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + i % 26) for i in ids)


@pytest.fixture
def two(monkeypatch):
    """A worker with room for two named sessions."""
    monkeypatch.setattr(worker, "Session", Counting)
    w = worker.Worker.__new__(worker.Worker)
    w.tokenizer, w.ends, w.program, w.named, w.sessions, w.free = Letters(), {7}, None, 2, {None: Counting(None)}, []
    return w


def ask(w, **request):
    said = []
    w.serve(request, said.append)
    return said


def test_a_reply_is_its_tokens_and_then_what_it_took(two):
    *tokens, done = ask(two, prompt="xy", max_new_tokens=3)
    assert tokens == [{"token": "c"}, {"token": "d"}, {"token": "e"}]
    assert done["done"] and done["prompt_tokens"] == 2 and done["completion_tokens"] == 3 and done["finish_reason"] == "length"
    assert done["prefilled_prompt_tokens"] == 2 and done["reused_prompt_tokens"] == 0 and done["generated_token_ids"] == [2, 3, 4]


def test_an_end_token_ends_it(two):
    *tokens, done = ask(two, prompt="xyzuv", max_new_tokens=9)
    assert len(tokens) == 2 and done["finish_reason"] == "stop" and done["completion_tokens"] == 2


def test_what_a_session_holds_already_is_not_computed_again(two):
    first = ask(two, prompt="xy", max_new_tokens=1, session_id="a")[-1]
    again = ask(two, prompt_segments=[{"text": "xy"}, {"ids": first["generated_token_ids"]}, {"text": "z"}], max_new_tokens=1, session_id="a")[-1]
    assert (again["reused_prompt_tokens"], again["prefilled_prompt_tokens"], again["session_reset_reason"]) == (3, 1, "exact_prefix")
    other = ask(two, prompt="xQ", max_new_tokens=1, session_id="a")[-1]
    assert (other["reused_prompt_tokens"], other["session_reset_reason"]) == (1, "mismatch")
    fresh = ask(two, prompt="xy", max_new_tokens=1, session_id="b")[-1]
    assert (fresh["reused_prompt_tokens"], fresh["session_reset_reason"]) == (0, "new")
    same = ask(two, prompt="xy", max_new_tokens=1, session_id="b")[-1]
    assert same["prefilled_prompt_tokens"] == 1  # the last token must be computed to know the next


def test_sessions_are_limited_and_closing_one_makes_room(two):
    assert ask(two, op="open", session_id="a") == ask(two, op="open", session_id="b") == ask(two, op="open", session_id="a") == [{"opened": True}]
    full = [{"error": "all 2 sessions are in use", "code": "capacity_exhausted"}]
    assert ask(two, op="open", session_id="c") == full and ask(two, prompt="x", session_id="c") == full
    ask(two, prompt="xy", max_new_tokens=1, session_id="a")
    assert ask(two, op="close", session_id="a") == ask(two, op="close", session_id="never") == [{"closed": True}]
    done = ask(two, prompt="xy", max_new_tokens=1, session_id="c")[-1]
    assert done["reused_prompt_tokens"] == 0  # nothing of the one before is left


def test_a_reset_keeps_the_slot_and_forgets_the_rest(two):
    ask(two, prompt="xy", max_new_tokens=1, session_id="a")
    assert ask(two, op="reset", session_id="a") == [{"reset": True}]
    assert ask(two, prompt="xy", max_new_tokens=1, session_id="a")[-1]["reused_prompt_tokens"] == 0
