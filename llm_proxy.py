"""Logging proxy between an agent and its LLM server: bytes pass unchanged, one JSON line per HTTP attempt; it can record and replay.

    python llm_proxy.py --upstream http://127.0.0.1:8000 --port 8001 --log calls.jsonl
    python llm_proxy.py --upstream http://127.0.0.1:8000 --port 8001 --log calls.jsonl --record run.json          # write a recording
    python llm_proxy.py --upstream http://127.0.0.1:8000 --port 8001 --log calls.jsonl --server-kind llamacpp --replay run.json

Every path passes; POSTs to .../chat/completions, /completions, /responses, /messages, /embeddings and /generate are model calls and
make a record: which call (id, trial, seq, session, kind; retries share call_key and count attempt), when (t_* Unix, mono_* monotonic
seconds), what was asked (model, params, messages), the tokens that the server reported, how it ended. `--upstream` is the server's root,
without /v1. Own endpoints: /trajoule/health (200 when the server answers) and /trajoule/metrics (Prometheus). SIGTERM ends calls in
flight, writes their records and exits with 0.

A streamed call that did not ask for usage gets `stream_options.include_usage`; the extra chunk is withheld from the client. Headers are
never logged, and a credential that came in a header is blanked wherever else it occurs.

Replay: each chat call of the agent is matched to the recording by session (header X-Session-ID), kind, ordinal within the kind and
number of messages. The agent's real request goes to the server, so prefill, decode and energy are real; the client gets the recorded
reply with the server's real usage. So that the prefix cache behaves as in a live run, either
  putback   the recorded length is decoded, and in later requests the server's own text stands where the recorded replies stand (any
            server that decodes exact lengths). With --replay-words (vLLM) it may write whole words only, whose tokens come back as
            they were: the noise of random weights would not survive decoding and encoding; or
  force     the server is made to emit the recorded reply (vLLM started with --logits-processors servers.force_reply:ForceReply).
A call that does not fit the recording is answered with 400 and says what was expected and what came; so is one whose history holds a reply
that its session was not given. The record's `replay` has the entry, the tokens asked for, those that the server decoded too few (null
where it reports no count), how many replies were put back or left, and the tokens that had to be computed again although a live run would
have found them cached.

`error` in a record is null or: upstream_status (the server answered 4xx or 5xx), upstream_error (an error inside a 200),
upstream_unreachable, upstream_broken (the connection ended early), proxy_timeout, client_disconnect, proxy_shutdown, proxy_error,
replay_mismatch, replay_failed; `error_detail` says more. `complete` is true when the whole reply arrived, `chunks` counts the events of a
stream. A call that failed without an answer of the server has the status that the client got (502, 504), or null when it had left.

Exit codes: 0 stopped by a signal, 1 failure at run time, 2 bad arguments, recording or port.
"""

import argparse
import asyncio
import contextlib
import fcntl
import functools
import gc
import glob
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import unicodedata
import uuid
import zlib
from pathlib import Path

from stages.arguments import is_root, parsed

KINDS = ("agent", "summary", "questions", "answers", "short_summary", "other")
KIND_BY_PROMPT = {  # beginnings of Terminus-2's prompts around a context summary
    "You are about to hand off your work": "summary",
    "You are picking up work from a previous AI agent": "questions",
    "The next agent has a few questions": "answers",
    "Briefly continue this task": "short_summary",
}
MODEL_PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/generate")
HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer", "trailers",
              "transfer-encoding", "upgrade"}
NOT_FORWARDED = HOP_BY_HOP | {"host", "expect"}
CREDENTIALS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie")
PARAMS = ("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos",
          "frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort")
# Fields of a request that could end a reply early or change which tokens are allowed: a replayed call must decode its exact length.
ENDS_EARLY = ("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "response_format",
              "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "logit_bias", "bad_words",
              "allowed_token_ids", "best_of", "n")
CONNECT_TIMEOUT_S = 30
# Servers close idle connections after 5 s (uvicorn, llama.cpp). Ours must go first: a POST on a connection that is just closing fails.
KEEPALIVE_S = 2
# What a server held to whole words may write besides the words of the recording, and how many words that are at most.
COMMON_WORDS = """\
the of and to in is that it was for on are as with they at be this from have or by one had not but what all were when we there can an your
which their said if do will each about how up out them then she many some so these would other into has more her two like him see time
could no make than first been its who now people my made over did down only way find use may water long little very after words called
just where most know get through back much before go good new write our used me man too any day same right look think also around another
came come work three word must because does part even place well such here take why things help put years different away again off went
old number great tell men say small every found still between name should home big give air line set own under read last never us left
end along while might next sound below saw something thought both few those always looked show large often together asked house world
"""
WORDS_MAX, WORDS_MIN = 512, 16
BIG_BODY = 1 << 20  # bytes from which a body is sent in slices and hashed in a thread


# --- what a call is ----------------------------------------------------------------------------------------------------------------


def message_text(message):
    """Text of a chat message, whose content is a string, a list of parts, or nothing."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(p.get("text") or "" for p in content if isinstance(p, dict))
    return content if isinstance(content, str) else ""


def kind_of(messages, session):
    """Kind of a chat call by its last user message: agent (needs a session), one of the summary kinds, or other."""
    if not isinstance(messages, list) or not messages:
        return "other"
    last = next((m for m in reversed(messages) if isinstance(m, dict) and m.get("role") == "user"), None)
    text = message_text(last).lstrip()[:64]
    for beginning, kind in KIND_BY_PROMPT.items():
        if text.startswith(beginning):
            return kind
    return "agent" if session else "other"


def usage_counts(usage):
    """{prompt_tokens, cached_tokens, completion_tokens} of a usage object, None where it does not tell: null and 0 stay apart.

    Understands OpenAI's chat, completions and responses, and Anthropic's messages, whose input_tokens leave the cached ones out.
    """
    if not isinstance(usage, dict):
        return {}

    def count(*names, of=usage):
        values = [of.get(n) for n in names] if isinstance(of, dict) else []
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)

    prompt, completion = count("prompt_tokens", "input_tokens"), count("completion_tokens", "output_tokens")
    cached = count("cached_tokens", of=usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    if "cache_read_input_tokens" in usage:
        cached = count("cache_read_input_tokens")
        if prompt is not None and count("prompt_tokens") is None:  # prompt_tokens has the cached ones in it
            prompt += (cached or 0) + (count("cache_creation_input_tokens") or 0)
    return {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}


class Reply:
    """What is learned from a reply: usage, finish reason, errors inside a 200, whether it is complete, and, if wanted, its text."""

    def __init__(self, keep_text=False):
        self.usage = {"prompt_tokens": None, "cached_tokens": None, "completion_tokens": None}
        self.told = {}  # fields of the usage objects so far, the latest of each
        self.finish_reason = None
        self.error = None
        self.ended = False  # the stream said that it is complete
        self.events = 0
        self.text = [] if keep_text else None

    def take_usage(self, usage):
        """Counts that are told replace what was known; a usage that says null again does not wipe an earlier number, and one that tells
        only some counts (Anthropic's message_delta) stands beside what the earlier ones told."""
        if isinstance(usage, dict):
            self.told.update({k: v for k, v in usage.items() if v is not None})
            self.usage.update({k: v for k, v in usage_counts(self.told).items() if v is not None})

    def take(self, obj):
        """One JSON object: a whole reply or the data of one event. Whatever a server sends, it never stops the bytes."""
        with contextlib.suppress(AttributeError, TypeError):
            self._take(obj)

    def _take(self, obj):
        inner = obj.get("response") or obj.get("message")  # responses API, Anthropic's message_start
        for o in (inner, obj) if isinstance(inner, dict) else (obj,):
            if o.get("usage"):
                self.take_usage(o["usage"])
        if obj.get("error") and not obj.get("choices"):
            e = obj["error"]
            self.error = str(e.get("message", e) if isinstance(e, dict) else e)
        for choice in obj.get("choices") or []:
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
            if self.text is not None and not choice.get("index"):
                part = choice.get("message") or choice.get("delta") or choice
                self.text.append(message_text(part) or part.get("text") or "")
        for o in (obj, obj.get("delta")):  # Anthropic's messages
            if isinstance(o, dict) and o.get("stop_reason"):
                self.finish_reason = o["stop_reason"]
        if obj.get("type") in ("message_stop", "response.completed", "response.incomplete", "response.failed"):
            self.ended = True

    def take_event(self, data):
        """The data of one server-sent event, parsed as JSON only when it can hold something of interest."""
        if data == b"[DONE]":
            self.ended = True
            return None
        self.events += 1
        if self.text is None and not (
            b'"usage"' in data or b'"error"' in data or b'_reason"' in data and FINISHED.search(data) or ENDING.search(data)
        ):
            return None
        try:
            obj = json.loads(data)
        except ValueError:
            return None
        self.take(obj)
        return obj


# Quotes inside JSON strings are escaped, so an unescaped key can only be a real one.
FINISHED = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"')
STREAMED = re.compile(rb'"stream"\s*:\s*true')
ENDING = re.compile(rb'"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|failed))"')


class Events:
    """Incremental reader of server-sent events: chunks may end anywhere, lines may be of any length, events may have many lines."""

    def __init__(self):
        self.part = []  # pieces of the line that is not complete yet
        self.lines = []  # raw lines of the event that is not complete yet
        self.data = []

    def feed(self, chunk):
        """List of (raw bytes, data) of the events that `chunk` completes; data is None for an event without any."""
        if b"\n" not in chunk:
            self.part.append(chunk)
            return []
        if self.part:
            self.part.append(chunk)
            chunk = b"".join(self.part)
            self.part = []
        out = []
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            line = chunk[start:end + 1]
            start = end + 1
            self.lines.append(line)
            if line in (b"\n", b"\r\n"):
                out.append(self._event())
            elif line.startswith(b"data:"):
                self.data.append(line[5:].strip())
        if start < len(chunk):
            self.part.append(chunk[start:])
        return out

    def _event(self):
        raw = self.lines[0] if len(self.lines) == 1 else b"".join(self.lines)
        data = self.data[0] if len(self.data) == 1 else b"\n".join(self.data) if self.data else None
        self.lines, self.data = [], []
        return raw, data

    def rest(self):
        """What the stream left without a blank line at its end: (raw bytes, data)."""
        line = b"".join(self.part)
        self.part = []
        if line:
            self.lines.append(line)
            if line.startswith(b"data:"):
                self.data.append(line[5:].strip())
        return self._event() if self.lines else (b"", None)


def decoder(encoding):
    """Function from compressed to plain bytes, fed chunk by chunk; None for an encoding that is not understood."""
    encoding = (encoding or "identity").strip().lower()
    if encoding in ("identity", ""):
        return lambda b: b
    if encoding in ("gzip", "x-gzip", "deflate"):
        d = zlib.decompressobj(wbits=47 if encoding != "deflate" else 15)

        def inflate(b):
            nonlocal d
            if encoding == "deflate" and not d.unconsumed_tail and b and not inflate.begun and b[0] & 0x0F != 8:
                d = zlib.decompressobj(wbits=-15)  # raw deflate, against the standard but common
            inflate.begun = inflate.begun or bool(b)
            out = b""
            while b and not inflate.over:
                if d.eof:  # gzip may have several members, one after the other
                    d, inflate.first = zlib.decompressobj(wbits=31), False
                try:
                    out += d.decompress(b)
                except zlib.error:
                    if inflate.first:
                        raise
                    inflate.over = True  # padding behind the last one
                b = d.unused_data
            return out

        inflate.begun, inflate.first, inflate.over = False, True, False
        return inflate
    return None


# --- the log -----------------------------------------------------------------------------------------------------------------------


class JsonLines:
    """Append-only JSON lines, one write() per line, so that a kill leaves at most one torn line, the last.

    A torn line of an earlier run is cut off when the file is opened; the file is locked, since two writers would mix their sequence.
    Raises OSError, BlockingIOError when another process writes the file.
    """

    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.fd)
            raise
        self.lines, self.size, torn = 0, 0, b""
        with open(path, "rb") as f:
            for line in f:
                if line.endswith(b"\n"):
                    self.lines += 1
                    self.size += len(line)
                else:
                    torn = line
        if torn:
            try:
                json.loads(torn)
                os.write(self.fd, b"\n")
                self.size += len(torn) + 1
                self.lines += 1
            except ValueError:
                print(f"llm_proxy: {path}: cut off a torn last line of {len(torn)} bytes", file=sys.stderr)
                os.ftruncate(self.fd, self.size)

    def write(self, obj, secrets=()):
        """Append one object. Raises OSError (disk full), in which case nothing of the line stays in the file."""
        line = json.dumps(obj, ensure_ascii=False, allow_nan=False)
        for s in secrets:
            line = line.replace(json.dumps(s, ensure_ascii=False)[1:-1], "[redacted]")
        data = line.encode("utf-8", "replace") + b"\n"
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.fd, rest):]
        except OSError:
            with contextlib.suppress(OSError):  # a device, not a file
                os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)
        self.lines += 1

    def close(self):
        os.close(self.fd)


class CallKeys:
    """Which attempts belong to one call: the same session, path and body until a success.

    An identical request that arrives while the client of the first still waits is another call, not a retry.
    """

    def __init__(self):
        self.open = {}  # fingerprint -> calls without a success: [{key, attempts, waiting}]
        self.count = {}  # fingerprint -> calls so far; a number each, so that a key is never used twice
        self.start = f"{time.time_ns() // 1_000_000:x}"  # nor by the next proxy on the same log

    def begin(self, fingerprint, waiting):
        """`waiting()` says whether the client of this attempt still listens."""
        calls = self.open.setdefault(fingerprint, [])
        call = next((c for c in calls if c["waiting"] is None or not c["waiting"]()), None)
        if call is None:
            n = self.count[fingerprint] = self.count.get(fingerprint, 0) + 1
            call = {"key": f"{fingerprint[:20]}-{self.start}-{n}", "attempts": 0, "fingerprint": fingerprint}
            calls.append(call)
        call["attempts"] += 1
        call["waiting"] = waiting
        return call, call["attempts"]

    def end(self, call, success, waiting):
        calls = self.open.get(call["fingerprint"], [])
        if success and call in calls:
            calls.remove(call)
            if not calls:
                del self.open[call["fingerprint"]]
        elif call["waiting"] == waiting:  # bound methods are new objects at every look
            call["waiting"] = None


# --- recordings --------------------------------------------------------------------------------------------------------------------


class ReplayError(ValueError):
    """A call that does not fit the recording, or a recording that cannot be replayed on this server; the text is for the user."""


def load_recording(path):
    """A checked recording. Raises ReplayError with file, key, found and expected."""
    try:
        rec = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ReplayError(f"{path}: {e.strerror}") from e
    except ValueError as e:
        raise ReplayError(f"{path}: not a JSON file ({e})") from e

    def need(ok, key, found, expected):
        if not ok:
            raise ReplayError(f"{path}: {key}: found {json.dumps(found)[:80]}, expected {expected}")

    need(isinstance(rec, dict), "top level", type(rec).__name__, "an object")
    need(rec.get("schema") == 1, "schema", rec.get("schema"), "1")
    need(rec.get("source") in ("authored", "recorded"), "source", rec.get("source"), "'authored' or 'recorded'")
    need(isinstance(rec.get("calls"), list) and rec["calls"], "calls", rec.get("calls"), "a list with at least one call")
    for i, c in enumerate(rec["calls"]):
        need(isinstance(c, dict), f"calls[{i}]", c, "an object")
        need(c.get("kind") in KINDS, f"calls[{i}].kind", c.get("kind"), "one of " + ", ".join(KINDS))
        need(isinstance(c.get("content"), str), f"calls[{i}].content", c.get("content"), "a string")
        for key in ("messages", "completion_tokens"):
            v = c.get(key)
            need(v is None or isinstance(v, int) and not isinstance(v, bool) and v > 0, f"calls[{i}].{key}", v, "a positive number or null")
    return rec


class Recorder:
    """Writes a recording of each session while it runs: the first to `path`, further ones beside it, named after the session.

    Sessions whose recordings are there already go on in them, so that a proxy that is started again loses nothing; no other file is
    overwritten. Raises ReplayError when `path` has something that cannot go on.
    """

    def __init__(self, path, name=None):
        self.path = Path(path)
        self.name = name or self.path.stem
        self.sessions = {}  # session -> (calls, path, fingerprint of the last call)
        if has_bytes(self.path):
            self._read(self.path)
            for f in sorted(self.path.parent.glob(f"{glob.escape(self.path.stem)}.*")):
                with contextlib.suppress(ReplayError):  # not ours
                    self._read(f)
        self.found = sum(len(calls) for calls, _, _ in self.sessions.values())

    def _read(self, f):
        rec = load_recording(f)
        session = rec.get("session", 0)
        if not isinstance(session, str | None):
            raise ReplayError(f"{f}: session: found {json.dumps(rec.get('session'))[:80]}, expected that of a recording which --record wrote")
        if f == self.path or f.name.startswith(self._stem(session)):
            self.sessions.setdefault(session, (rec["calls"], f, rec.get("last_request")))

    def add(self, session, fingerprint, call, model, secrets):
        calls, path, last = self.sessions.get(session) or ([], self._path(session), None)
        calls = [*(calls[:-1] if last == fingerprint else calls), call]  # the client may ask again although it had been answered
        self.sessions[session] = calls, path, fingerprint
        obj = {
            "schema": 1, "name": self.name if path == self.path else path.stem, "task": None, "source": "recorded", "agent": "terminus-2",
            "model": model, "description": f"Recorded on the wire from a live run, session {session or 'without a name'}.",
            "expected_outcome": None, "session": session, "last_request": fingerprint, "calls": calls,
        }
        text = json.dumps(obj, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
        for s in secrets:
            text = text.replace(json.dumps(s, ensure_ascii=False)[1:-1], "[redacted]")
        tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            tmp.write_text(text, encoding="utf-8", errors="replace")
            os.replace(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)

    def _path(self, session):
        """A file for a new session, of which there is nothing yet."""
        name, taken = self._stem(session), {path for _, path, _ in self.sessions.values()}
        names = itertools.chain([self.path.name, name + self.path.suffix], (f"{name}-{n}{self.path.suffix}" for n in itertools.count(2)))
        return next(p for p in map(self.path.with_name, names) if p not in taken and not has_bytes(p))

    def _stem(self, session):
        return f"{self.path.stem}.{re.sub(r'[^A-Za-z0-9._-]', '_', session or 'none')[:100]}"


def words_of(text):
    """A text without what tokenizers and clients may change in it: forms of Unicode, and spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


class ReplaySession:
    """Where one session stands in the recording, and the server's own texts by (position in the history, recorded text)."""

    def __init__(self):
        self.by_body = {}  # fingerprint of a body -> entry, so that a retry gets the same reply
        self.done = {}  # kind -> fingerprints that were answered
        self.own = {}
        self.given = set()  # words of the replies that the client has
        self.cut_off = False  # one of them ended at its limit: what the client makes of it is its own affair


class Replay:
    """Matches calls to a recording, rewrites what is forwarded and what is answered. `adapter` is of servers/adapter.py.

    `words`: the server may write only whole words that survive decoding and encoding.
    """

    def __init__(self, recording, adapter, mode, words=False):
        self.mode, self.words = mode, words
        self.adapter = adapter
        self.asking = threading.Lock()
        self.word_ids = None
        self.entries = {}
        for i, c in enumerate(recording["calls"]):
            self.entries.setdefault(c["kind"], []).append({"index": i, **c})
        self.sessions = {}
        self.ids = {}

    def match(self, session, kind, messages, fingerprint):
        """The recording's entry for a call. Raises ReplayError, which leaves the session where it stands."""
        s = self.sessions.setdefault(session, ReplaySession())
        if fingerprint in s.by_body:
            return s, s.by_body[fingerprint]
        entries, k, n_messages = self.entries.get(kind, []), len(s.done.get(kind, ())), len(messages)
        where = f"session '{session}'" if session else "a request without the header X-Session-ID"
        if not entries:
            held = ", ".join(f"{len(v)} {n}" for n, v in self.entries.items())
            raise ReplayError(f"{where}: a call of kind '{kind}' with {n_messages} messages came, the recording has only: {held}")
        if k >= len(entries) and not entries[-1].get("repeat"):
            raise ReplayError(f"{where}: call {k + 1} of kind '{kind}' came, the recording has {len(entries)}")
        entry = entries[min(k, len(entries) - 1)]
        if entry.get("messages") not in (None, n_messages):
            raise ReplayError(f"{where}: call {k + 1} of kind '{kind}' has {n_messages} messages, the recording has {entry['messages']}")
        if kind == "agent" and k > 0 and n_messages == 1:
            raise ReplayError(f"{where}: the conversation began again with one message, the recording expects call {k + 1} of it")
        for i, m in enumerate(messages):
            text = message_text(m) if isinstance(m, dict) and m.get("role") == "assistant" else ""
            if text and not s.cut_off and words_of(text) not in s.given:
                raise ReplayError(
                    f"{where}: call {k + 1} of kind '{kind}' has a reply in its history (message {i + 1}: {text[:60]!r}) that was not given to it, "
                    "expected the replies of the recording from its first on: start the agent anew together with the proxy"
                )
        s.by_body[fingerprint] = entry
        return s, entry

    def token_ids(self, text):
        """Token ids of a recorded text on this server (blocking; asked once)."""
        if text not in self.ids:
            self.ids[text] = self.adapter.tokenize(text)
        return self.ids[text]

    def prepare(self):
        """Ask for the tokens of all replies before the first call, so that no call waits for it (blocking)."""
        for entries in self.entries.values():
            for e in entries:
                self.length(e)
        if self.words:
            self.allowed()

    def allowed(self):
        """Token ids of whole words, each with the space before it, that stay what they are side by side in a reply (blocking; asked once).

        Raises ReplayError when this server's tokenizer or chat template leaves no such words.
        """
        with self.asking:
            if self.word_ids is None:
                recorded = re.findall(r"[A-Za-z]{2,}", " ".join(e["content"] for entries in self.entries.values() for e in entries))
                candidates = list(dict.fromkeys([*recorded, *COMMON_WORDS.split()]))[:WORDS_MAX]
                single = {w: ids for w in candidates if len(ids := self.adapter.tokenize(f" {w}")) == 1}
                order = [*single, *reversed(single)]
                text, expected = "".join(f" {w}" for w in order), [single[w][0] for w in order]
                chat = self.adapter.chat_ids([{"role": r, "content": c} for r, c in (("user", "x"), ("assistant", text), ("user", "x"))])
                whole = any(chat[i:i + len(expected)] == expected for i in range(len(chat) - len(expected) + 1))
                if len(single) < WORDS_MIN or self.adapter.tokenize(text) != expected or not whole:
                    raise ReplayError(
                        f"words do not survive this server's tokenizer and chat template ({len(single)} of {len(candidates)} are one token): "
                        "leave out --replay-words, or use --replay-mode force"
                    )
                self.word_ids = sorted({ids[0] for ids in single.values()})
            return self.word_ids

    def length(self, entry):
        """Tokens that the server decodes for an entry: its text and, unless it was cut off, the token that ends it (blocking)."""
        ends = 0 if entry.get("finish_reason") == "length" else 1
        if self.mode == "force":
            return len(self.token_ids(entry["content"])) + ends
        if entry.get("completion_tokens"):
            return entry["completion_tokens"]
        if not self.adapter.can_tokenize:
            key = f"calls[{entry['index']}].completion_tokens"
            raise ReplayError(f"{key}: found null, expected a number, since a server of kind '{self.adapter.kind}' cannot count tokens")
        return len(self.token_ids(entry["content"])) + ends

    def forward(self, session, entry, body):
        """(body for the server, what the record says about it). Blocking: it may ask the server for tokens."""
        n = self.length(entry)
        body = {k: v for k, v in body.items() if k not in ENDS_EARLY}
        note = {"mode": self.mode, "words": None, "entry": entry["index"], "asked_tokens": n, "missing_tokens": None, "own_text_restored": 0,
                "recorded_text_left": 0, "expected_cached_tokens": None, "recomputed_tokens": None}
        messages = body["messages"] = list(body["messages"])
        before = None
        for i, m in enumerate(messages):
            if not isinstance(m, dict) or m.get("role") != "assistant":
                continue
            own = session.own.get((i, message_text(m)))
            if own is None:
                note["recorded_text_left"] += self.mode == "putback"
                continue
            before = own
            if self.mode == "putback" and not own["text"] and message_text(m):  # a turn without a text would not be that of a live run
                note["recorded_text_left"] += 1
            elif self.mode == "putback":
                messages[i] = {**m, "content": own["text"]}
                note["own_text_restored"] += 1
        if before and None not in (before["prompt_tokens"], before["completion_tokens"]):
            # The last token of a reply is sampled but never computed: it is not in the cache of a live run either.
            covered = before["prompt_tokens"] + before["completion_tokens"] - 1
            note["expected_cached_tokens"] = covered - covered % self.adapter.cache_block
        if self.mode == "force":
            ids = self.token_ids(entry["content"])
            body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), "forced_reply": ",".join(map(str, ids))}
            body["max_tokens"] = n
        else:
            body.update(self.adapter.exact_output(n))
        if self.words:
            ids = self.allowed()
            body.update(self.adapter.only_tokens(ids))
            note["words"] = len(ids)
        return body, note

    def finish(self, session, entry, kind, fingerprint, n_messages, own_text, usage):
        """Keep what the server wrote itself, for the requests that follow (blocking: the text is cut to its tokens)."""
        session.done.setdefault(kind, set()).add(fingerprint)
        text = own_text
        decoded = usage["completion_tokens"]
        if self.mode == "putback" and entry.get("finish_reason") != "length" and self.adapter.can_tokenize and decoded is not None:
            # A live reply of n tokens has n - 1 in its text: the last one is the end mark, which the chat template writes again.
            with contextlib.suppress(RuntimeError, KeyError):  # the server is gone: the next call says so
                text = self.cut(own_text, max(0, decoded - 1))
        session.own[(n_messages, entry["content"])] = {"text": text, **usage}
        session.given.add(words_of(entry["content"]))
        session.cut_off |= entry.get("finish_reason") == "length"

    def cut(self, text, keep):
        """The longest beginning of `text` that has at most `keep` tokens."""
        count = lambda s: len(self.adapter.tokenize(s)) if s else 0  # noqa: E731
        if count(text) <= keep:
            return text
        low, high = max(0, len(text) - 64), len(text)
        if count(text[:low]) > keep:
            low = 0
        while high - low > 1:
            mid = (low + high) // 2
            low, high = (mid, high) if count(text[:mid]) <= keep else (low, mid)
        return text[:low]

    def check_forced(self, entry, own_text):
        """Raises ReplayError when the server did not emit the recorded reply (tokenizers may normalise Unicode and spaces)."""
        if words_of(own_text) != words_of(entry["content"]):
            raise ReplayError(
                f"the server answered {own_text[:60]!r} instead of the recorded {entry['content'][:60]!r}: "
                "start vLLM with --logits-processors servers.force_reply:ForceReply, or use --replay-mode putback"
            )


# --- the proxy ---------------------------------------------------------------------------------------------------------------------


class ClientGone(Exception):
    """The client closed its connection."""


class Attempt:
    """One HTTP attempt of a model call; becomes one record."""

    def __init__(self, request, seq):
        self.t_start, self.mono_start = time.time(), time.monotonic()
        self.seq = seq
        self.path = request.path
        self.session = request.headers.get("X-Session-ID")
        self.headers = request.headers
        self.transport = request.transport
        self.raw, self.plain, self.body, self.messages = b"", b"", None, None
        self.call, self.attempt, self.kind = None, None, "other"
        self.stream = False
        self.injected = False
        self.fingerprint = None
        self.reply = Reply()
        self.t_sent = self.t_first = self.t_end = self.mono_end = None
        self.status, self.error, self.detail = None, None, None
        self.complete = self.client_disconnect = False
        self.response_bytes = 0
        self.replay = None

    # Worked out when the record is written, not while the call waits.

    @functools.cached_property
    def id(self):
        return str(uuid.uuid4())

    @functools.cached_property
    def secrets(self):
        return [v for h in CREDENTIALS if h in self.headers for v in re.split(r"[\s;,]+", self.headers[h]) if len(v) >= 8]

    def waiting(self):
        return self.transport is not None and not self.transport.is_closing()

    def fail(self, error, detail=None):
        """The first failure names the attempt; what follows from it does not."""
        if self.error is None:
            self.error, self.detail = error, (str(detail)[:500] if detail else None)

    def record(self, trial):
        body = self.body if isinstance(self.body, dict) else {}
        model = body.get("model")
        return {
            "id": self.id, "trial": trial, "seq": self.seq, "call_key": self.call and self.call["key"], "attempt": self.attempt,
            "kind": self.kind, "t_start": round(self.t_start, 6), "t_sent": self.t_sent and round(self.t_sent, 6),
            "t_first": self.t_first and round(self.t_first, 6), "t_end": round(self.t_end, 6),
            "mono_start": round(self.mono_start, 6), "mono_end": round(self.mono_end, 6), "path": self.path, "stream": self.stream,
            "status": self.status, "error": self.error, "error_detail": self.detail, "complete": self.complete,
            "client_disconnect": self.client_disconnect, "model": model if isinstance(model, str) else None, **self.reply.usage,
            "finish_reason": self.reply.finish_reason, "request_bytes": len(self.raw), "response_bytes": self.response_bytes,
            "chunks": self.reply.events if self.t_first else None, "messages": None if self.messages is None else len(self.messages),
            "session": self.session, "replayed": self.replay is not None, "replay": self.replay,
            "params": {k: body[k] for k in PARAMS if isinstance(body.get(k), (int, float, str))},
        }


def wants_usage(body):
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def inject_usage(raw, body):
    """The request's bytes with stream_options.include_usage; all other bytes stay as they are where the key is new."""
    if "stream_options" not in body:
        at = raw.index(b"{") + 1
        comma = b"," if body else b""
        return raw[:at] + b'"stream_options":{"include_usage":true}' + comma + raw[at:]
    options = body["stream_options"] if isinstance(body["stream_options"], dict) else {}
    return json.dumps({**body, "stream_options": {**options, "include_usage": True}}, ensure_ascii=False).encode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=64)
def readable_encodings(offered):
    """Value of Accept-Encoding with those of the offered encodings that `decoder` can undo."""
    read = [e.strip() for e in offered.split(",") if e.split(";")[0].strip().lower() in ("gzip", "x-gzip", "deflate", "identity")]
    return ", ".join(read) or "identity"


@functools.lru_cache(maxsize=64)
def encoded_url(text):
    """URL whose path and query go out as they came in."""
    from yarl import URL

    return URL(text, encoded=True)


def slices(data, size=1 << 18):
    """Async iterator over big bytes: sent at once they would hold the event loop and every other stream."""

    async def each():
        view = memoryview(data)
        for i in range(0, len(view), size):
            yield view[i:i + size]

    return each()


def connection_headers(message):
    """Names of headers that belong to one connection only, as its Connection header says."""
    if "Connection" not in message.headers:
        return frozenset()
    return {h.strip().lower() for v in message.headers.getall("Connection") for h in v.split(",")}


class Proxy:
    """Handler of all requests. `replay` is a Replay or None, `recorder` a Recorder or None, `bodies` a JsonLines or None."""

    def __init__(self, upstream, log, trial=None, bodies=None, replay=None, recorder=None, read_timeout_s=None):
        self.upstream = upstream.rstrip("/").removesuffix("/v1")
        self.log, self.trial, self.bodies, self.replay, self.recorder = log, trial, bodies, replay, recorder
        self.read_timeout_s = read_timeout_s or None
        self.seq = log.lines if log else 0
        self.keys = CallKeys()
        self.tasks = set()
        self.finishing = {}  # session -> task that keeps the server's own text of the last replayed call
        self.stopping = False
        self.session = None
        self.counts = {"client_disconnects": 0, "log_errors": 0, "replay_mismatches": 0, "passed": 0}
        self.calls = {}
        self.tokens = {"prompt": 0, "cached": 0, "completion": 0}
        self.seconds = {"call": [0.0, 0], "first_byte": [0.0, 0]}
        self.bytes = {"request": 0, "response": 0}

    async def open(self):
        import aiohttp

        # No total timeout: a call may stream for hours. Limits of header sizes and connections are the server's business.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self.read_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, max_line_size=1 << 20, max_field_size=1 << 20,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self):
        """End what is in flight; every attempt writes its record."""
        self.stopping = True
        for t in list(self.tasks):
            t.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=5)
        for t in self.finishing.values():
            t.cancel()
        await self.session.close()

    async def handle(self, request):
        if request.path.startswith("/trajoule/"):
            return await self.own(request)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        if request.method != "POST" or not request.path.endswith(MODEL_PATHS):
            return await self.pass_on(request)
        return await self.model_call(request)

    # own endpoints

    async def own(self, request):
        import aiohttp
        from aiohttp import web

        if request.path == "/trajoule/health":
            seen = {}
            for path in ("/health", "/v1/models"):
                try:
                    async with self.session.get(self.upstream + path, timeout=aiohttp.ClientTimeout(total=5)) as r:
                        seen[path] = r.status
                        await r.read()
                except Exception as e:
                    seen[path] = type(e).__name__
                if seen[path] == 200:
                    break
            ok = 200 in seen.values()
            return web.json_response({"status": "ok" if ok else "upstream does not answer", "upstream": seen, "in_flight": len(self.tasks),
                                      "records": self.log.lines, "log_errors": self.counts["log_errors"]}, status=200 if ok else 503)
        if request.path == "/trajoule/metrics":
            return web.Response(text=self.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
        return web.json_response({"error": f"{request.path}: the proxy has /trajoule/health and /trajoule/metrics"}, status=404)

    def metrics(self):
        out = ["# HELP trajoule_attempts_total HTTP attempts of model calls.", "# TYPE trajoule_attempts_total counter"]
        calls = sorted((k, "none" if s is None else str(s), n) for (k, s), n in self.calls.items())
        out += [f'trajoule_attempts_total{{kind="{k}",status="{s}"}} {n}' for k, s, n in calls]
        rows = [("tokens_total", "Tokens that servers reported, by kind; cached ones are part of prompt.", "counter", "kind", self.tokens),
                ("bytes_total", "Bytes of the bodies of model calls.", "counter", "direction", self.bytes)]
        for name, text, typ, label, values in rows:
            out += [f"# HELP trajoule_{name} {text}", f"# TYPE trajoule_{name} {typ}"]
            out += [f'trajoule_{name}{{{label}="{k}"}} {v}' for k, v in values.items()]
        for name, (total, n) in self.seconds.items():
            words = name.replace("_", " ")
            out += [f"# HELP trajoule_{name}_seconds Time of model calls ({words}).", f"# TYPE trajoule_{name}_seconds summary"]
            out += [f"trajoule_{name}_seconds_sum {total:.6f}", f"trajoule_{name}_seconds_count {n}"]
        for name, n in self.counts.items():
            words = name.replace("_", " ")
            out += [f"# HELP trajoule_{name}_total Number of {words}.", f"# TYPE trajoule_{name}_total counter"]
            out += [f"trajoule_{name}_total {n}"]
        out += ["# HELP trajoule_in_flight Requests that run now.", "# TYPE trajoule_in_flight gauge"]
        out += [f"trajoule_in_flight {len(self.tasks)}"]
        return "\n".join(out) + "\n"

    # passing on

    def headers(self, request, drop=()):
        """End-to-end headers of a request."""
        from multidict import CIMultiDict

        skip = NOT_FORWARDED | connection_headers(request) | set(drop)
        return CIMultiDict([(k, v) for k, v in request.headers.items() if k.lower() not in skip])

    async def send(self, request, data, headers):
        """Upstream's response, its body unread."""
        if data is not None and isinstance(data, (bytes, bytearray)):
            headers["Content-Length"] = str(len(data))
            if len(data) > BIG_BODY:
                data = slices(data)
        return await self.session.request(
            request.method, encoded_url(self.upstream + request.raw_path), data=data, headers=headers, allow_redirects=False
        )

    def answer(self, upstream, drop=()):
        """Response object with upstream's status and end-to-end headers."""
        from aiohttp import web

        skip = HOP_BY_HOP | connection_headers(upstream) | set(drop)
        out = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        for k, v in upstream.headers.items():
            if k.lower() not in skip:
                out.headers.add(k, v)
        # A stream's headers go out at once, other headers together with the first bytes of the body.
        out._send_headers_immediately = is_events(upstream)
        return out

    async def pass_on(self, request):
        """Anything that is no model call: streamed both ways, not recorded."""
        self.counts["passed"] += 1
        up = None
        task = asyncio.current_task()
        self.tasks.add(task)
        try:
            up = await self.send(request, request.content if request.can_read_body else None, self.headers(request))
            out = self.answer(up)
            await out.prepare(request)
            async for chunk in up.content.iter_any():
                await out.write(chunk)
            await out.write_eof()
            return out
        except Exception as e:
            error, detail = self.explain(e)
            if up is not None:
                return self.break_off(request)
            return self.refuse(error, detail)
        finally:
            self.tasks.discard(task)
            if up is not None:
                up.close() if not up.content.at_eof() else up.release()

    def break_off(self, request):
        """The reply broke after its headers: the client's connection ends without a proper end, as upstream's did."""
        from aiohttp import web

        if request.transport is not None:
            request.transport.close()
        return web.Response()

    def refuse(self, error, detail, status=None):
        """An error of the proxy itself, in OpenAI's format."""
        from aiohttp import web

        status = status or (504 if error == "proxy_timeout" else 502)
        e = {"message": f"llm_proxy: {error}: {detail}", "type": "proxy_error", "code": error}
        return web.json_response({"error": e}, status=status)

    def explain(self, e):
        """(error code, detail) of an exception on the way to the server."""
        import aiohttp

        if isinstance(e, asyncio.TimeoutError):
            return "proxy_timeout", f"no answer from the server ({type(e).__name__})"
        if isinstance(e, aiohttp.ClientConnectorError):
            return "upstream_unreachable", f"cannot connect to the server: {e.os_error.strerror or e.os_error}"
        if isinstance(e, (aiohttp.ClientError, ConnectionError)):
            return "upstream_broken", f"the server broke the connection ({type(e).__name__}: {e})"
        return "proxy_error", f"{type(e).__name__}: {e}"

    # model calls

    async def model_call(self, request):
        a = Attempt(request, self.seq)
        self.seq += 1
        task = asyncio.current_task()
        self.tasks.add(task)
        try:
            await self.read_body(request, a)
            if not self.replay and "Content-Encoding" not in request.headers and not STREAMED.search(a.raw):
                return await self.relayed(request, a, early=True)
            await self.understand(request, a)
            if self.replay and a.messages is not None:
                return await self.replayed(request, a)
            return await self.relayed(request, a)
        except ClientGone:
            a.client_disconnect = True
            a.fail("client_disconnect")
            return self.break_off(request)
        except asyncio.CancelledError:
            # aiohttp cancels the handler when the client's connection is lost; close() cancels it at the end.
            a.client_disconnect = not self.stopping
            a.fail("proxy_shutdown" if self.stopping else "client_disconnect")
            raise
        except Exception as e:
            a.fail(*self.explain(e))
            if a.status is not None:
                return self.break_off(request)
            out = self.refuse(a.error, a.detail)
            a.status = out.status
            return out
        finally:
            self.tasks.discard(task)
            self.finish(a)

    async def read_body(self, request, a):
        try:
            if (size := request.content_length or 0) > BIG_BODY or size == 0:
                parts = [chunk async for chunk in request.content.iter_any()]
                a.raw = b"".join(parts)
            else:
                a.raw = await request.content.read(-1)
        except Exception as e:
            raise ClientGone from e

    async def understand(self, request, a):
        """What the request is: its JSON, kind, and the call that it is an attempt of."""
        plain = a.raw
        encoding = request.headers.get("Content-Encoding")
        if encoding:
            try:
                plain = decoder(encoding)(a.raw)
            except (TypeError, zlib.error):
                plain = b""
        a.plain = plain
        try:
            a.body = json.loads(plain)
        except (ValueError, RecursionError):
            a.body = None
        if isinstance(a.body, dict):
            a.stream = a.body.get("stream") is True
            if a.session is None and isinstance(a.body.get("session_id"), str):
                a.session = a.body["session_id"]
            if request.path.endswith("/chat/completions"):
                a.messages = a.body.get("messages") if isinstance(a.body.get("messages"), list) else None
                a.kind = kind_of(a.messages, a.session)
        digest = hashlib.sha256(f"{a.session}\n{a.path}\n".encode("utf-8", "replace"))
        if len(a.raw) <= BIG_BODY:
            digest.update(a.raw)
        else:
            await asyncio.to_thread(digest.update, a.raw)
        a.fingerprint = digest.hexdigest()
        a.call, a.attempt = self.keys.begin(a.fingerprint, a.waiting)
        if self.bodies or self.recorder:
            a.reply.text = []

    async def relayed(self, request, a, early=False):
        """The call as it is; of the reply the client gets every byte, and the record what it says.

        `early`: the request, surely not streamed, is sent before it is understood: parsing 100 KB costs more than all the rest.
        """
        headers, data = self.headers(request), a.raw
        # Servers choose among what the client offers; an encoding that cannot be read here would hide the usage.
        if "Accept-Encoding" in headers:
            headers["Accept-Encoding"] = readable_encodings(",".join(headers.popall("Accept-Encoding")))
        # Only where a key can be put in: UTF-8 (JSON may also be UTF-16, which has zero bytes). A compressed request goes on as plain text.
        may_ask = a.path.endswith("/completions") and b"\0" not in a.plain[:4]
        if a.stream and may_ask and not wants_usage(a.body):
            data = inject_usage(a.plain, a.body)
            a.injected = True
            headers.popall("Content-Encoding", None)
            headers["Accept-Encoding"] = "identity"  # a chunk must be cut out of the reply
        a.t_sent = time.time()
        if early:
            sending = asyncio.Task(self.send(request, data, headers), loop=asyncio.get_running_loop(), eager_start=True)
            try:
                await self.understand(request, a)
            except BaseException:
                sending.cancel()
                raise
            up = await sending
        else:
            up = await self.send(request, data, headers)
        try:
            a.status = up.status
            plain = decoder(up.headers.get("Content-Encoding"))
            if is_events(up):
                return await self.relay_events(request, a, up, plain)
            out = self.answer(up)
            await out.prepare(request)
            parts = []
            async for chunk in up.content.iter_any():
                a.response_bytes += len(chunk)
                parts.append(chunk)
                await write(out, chunk)
            a.t_end, a.mono_end = time.time(), time.monotonic()
            await write_eof(out)
            a.complete = True
            if plain:
                self.read_reply(a, plain(b"".join(parts)))
            return out
        finally:
            up.release() if up.content.at_eof() else up.close()

    def read_reply(self, a, body):
        """A reply that was not streamed: usage, finish reason, the text of an error."""
        try:
            obj = json.loads(body)
        except ValueError:
            obj = None
        a.reply.take(obj)
        if a.status >= 400:
            a.fail("upstream_status", a.reply.error or body[:300].decode("utf-8", "replace"))
        elif a.reply.error:
            a.fail("upstream_error", a.reply.error)

    async def relay_events(self, request, a, up, plain):
        """A stream of events: chunks pass as they come, or whole events where the extra usage chunk is withheld."""
        withhold = a.injected and up.headers.get("Content-Encoding") in (None, "identity")
        out = self.answer(up, drop=("content-length",) if withhold else ())
        await out.prepare(request)
        events = Events()
        async for chunk in up.content.iter_any():
            if a.t_first is None:
                a.t_first = time.time()
            a.response_bytes += len(chunk)
            if withhold:
                keep = [raw for raw, data in events.feed(chunk) if not self.read_event(a, data)]
                if keep:
                    await write(out, b"".join(keep))
                continue
            await write(out, chunk)
            if plain:
                for _, data in events.feed(plain(chunk)):
                    self.read_event(a, data)
        raw, data = events.rest()
        if not self.read_event(a, data) and withhold and raw:
            await write(out, raw)
        a.t_end, a.mono_end = time.time(), time.monotonic()
        await write_eof(out)
        a.complete = a.reply.ended or a.reply.finish_reason is not None
        if a.reply.error:
            a.complete = False
            a.fail("upstream_error", a.reply.error)
        elif not a.complete and plain:
            a.fail("upstream_broken", "the stream ended without its end mark")
        return out

    def read_event(self, a, data):
        """True for the usage chunk that only the proxy asked for."""
        if data is None:
            return False
        obj = a.reply.take_event(data)
        return a.injected and isinstance(obj, dict) and obj.get("choices") == [] and bool(obj.get("usage"))

    # replay

    async def replayed(self, request, a):
        """The agent's request to the server, the recorded reply to the agent."""
        name = a.session or ""
        try:
            if a.kind == "other" and not a.session:
                raise ReplayError("a request without the header X-Session-ID came: give Terminus-2 session_id_headers=[\"X-Session-ID\"]")
            if pending := self.finishing.get(name):
                await asyncio.wait([pending])
            session, entry = self.replay.match(name, a.kind, a.messages, a.fingerprint)
            body, a.replay = await asyncio.to_thread(self.replay.forward, session, entry, a.body)
        except ReplayError as e:
            return self.mismatch(a, "replay_mismatch", e, 400)
        except (RuntimeError, KeyError) as e:  # the adapter's ServerError
            return self.mismatch(a, "replay_failed", e, 502)
        if a.stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        a.reply.text = []
        headers = self.headers(request, drop=("content-encoding",))
        headers["Accept-Encoding"] = "identity"
        a.t_sent = time.time()
        up = await self.send(request, json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"), headers)
        try:
            a.status = up.status
            if up.status >= 400:
                return await self.replay_refused(request, a, up)
            if a.stream and is_events(up):
                out = await self.replay_events(request, a, up, entry)
            else:
                out = await self.replay_reply(a, up, entry)
        except ReplayError as e:
            a.status = None
            return self.mismatch(a, "replay_failed", e, 502)
        finally:
            up.release() if up.content.at_eof() else up.close()
        if a.complete:
            own, usage = "".join(a.reply.text), dict(a.reply.usage)
            if usage["completion_tokens"] is not None:
                a.replay["missing_tokens"] = max(0, a.replay["asked_tokens"] - usage["completion_tokens"])
            if None not in (a.replay["expected_cached_tokens"], usage["cached_tokens"]):
                a.replay["recomputed_tokens"] = max(0, a.replay["expected_cached_tokens"] - usage["cached_tokens"])
            done = asyncio.to_thread(self.replay.finish, session, entry, a.kind, a.fingerprint, len(a.messages), own, usage)
            self.finishing[name] = asyncio.ensure_future(done)
            a.reply.text = [entry["content"]]
            a.reply.finish_reason = entry.get("finish_reason") or "stop"
        return out

    def mismatch(self, a, code, e, status):
        self.counts["replay_mismatches"] += 1
        a.fail(code, e)
        a.status = status
        return self.refuse(code, e, status)

    async def replay_refused(self, request, a, up):
        out = self.answer(up)
        data = await up.read()
        a.response_bytes = len(data)
        await out.prepare(request)
        await write(out, data)
        await write_eof(out)
        a.complete = True
        self.read_reply(a, data)
        return out

    async def replay_reply(self, a, up, entry):
        from aiohttp import web

        data = await up.read()
        a.t_end, a.mono_end = time.time(), time.monotonic()
        a.response_bytes = len(data)
        self.read_reply(a, data)
        obj = json.loads(data)
        if self.replay.mode == "force":
            self.replay.check_forced(entry, "".join(a.reply.text))
        for choice in obj.get("choices") or []:
            choice["message"] = {"role": "assistant", "content": entry["content"]}
            choice["finish_reason"] = entry.get("finish_reason") or "stop"
            for key in ("logprobs", "token_ids"):  # those of the server's own text
                choice.pop(key, None)
        a.complete = True
        return web.json_response(obj)

    async def replay_events(self, request, a, up, entry):
        """The recorded text in as many pieces as the server's own: each goes out when a piece of the server's arrives."""
        out = self.answer(up, drop=("content-length", "content-encoding"))
        await out.prepare(request)
        text, sent, asked, pieces = entry["content"], 0, max(1, a.replay["asked_tokens"]), 0
        client_wants = wants_usage(a.body)
        events = Events()
        async for chunk in up.content.iter_any():
            if a.t_first is None:
                a.t_first = time.time()
            a.response_bytes += len(chunk)
            for raw, data in events.feed(chunk):
                if data is None or data == b"[DONE]":
                    if data:
                        a.reply.take_event(data)
                    await write(out, raw)
                    continue
                obj = a.reply.take_event(data)
                if obj is None or obj.get("error"):
                    await write(out, raw)
                    continue
                if not obj.get("choices"):
                    if client_wants:
                        await write(out, raw)
                    continue
                for choice in obj["choices"]:
                    delta, last = choice.get("delta") or {}, bool(choice.get("finish_reason"))
                    pieces += bool(delta.get("content"))
                    upto = len(text) if last else min(len(text), len(text) * pieces // asked)
                    choice["delta"] = {**{k: v for k, v in delta.items() if k == "role"}, "content": text[sent:upto]}
                    sent = upto
                    if last:
                        choice["finish_reason"] = entry.get("finish_reason") or "stop"
                    for key in ("logprobs", "token_ids"):
                        choice.pop(key, None)
                await write(out, b"data: " + json.dumps(obj, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n\n")
        a.t_end, a.mono_end = time.time(), time.monotonic()
        if self.replay.mode == "force":
            try:
                self.replay.check_forced(entry, "".join(a.reply.text))
            except ReplayError as e:  # the client has its reply already; the record says that the decode was not the recorded one
                a.fail("replay_failed", e)
        await write_eof(out)
        a.complete = a.reply.ended or a.reply.finish_reason is not None
        if a.reply.error:
            a.complete = False
            a.fail("upstream_error", a.reply.error)
        return out

    # the end of every attempt

    def finish(self, a):
        if a.t_end is None:
            a.t_end, a.mono_end = time.time(), time.monotonic()
        success = a.complete and a.status is not None and a.status < 400 and not a.client_disconnect and a.error is None
        if a.call:
            self.keys.end(a.call, success, a.waiting)
        self.calls[(a.kind, a.status)] = self.calls.get((a.kind, a.status), 0) + 1
        self.counts["client_disconnects"] += a.client_disconnect
        for name in self.tokens:
            self.tokens[name] += a.reply.usage[f"{name}_tokens"] or 0
        self.bytes["request"] += len(a.raw)
        self.bytes["response"] += a.response_bytes
        self.seconds["call"][0] += a.mono_end - a.mono_start
        self.seconds["call"][1] += 1
        if a.t_first:
            self.seconds["first_byte"][0] += a.t_first - a.t_start
            self.seconds["first_byte"][1] += 1
        # The record comes last: whoever has seen a call's line may count on its text and the recording being there.
        for write_part in (self.write_bodies, self.write_recording, self.write_record):
            try:
                write_part(a, success)
            except Exception as e:
                # The agent's call must not fail because a disk is full; health and metrics show it, and so does standard error, once.
                if not self.counts["log_errors"]:
                    print(f"llm_proxy: a record could not be written: {e}; calls go on, see /trajoule/health", file=sys.stderr, flush=True)
                self.counts["log_errors"] += 1

    def write_bodies(self, a, _):
        if self.bodies:
            request = a.body if a.body is not None else a.raw.decode("utf-8", "replace")
            self.bodies.write({"id": a.id, "call_key": a.call and a.call["key"], "t_start": a.t_start, "request": request,
                               "reply": "".join(a.reply.text or []), "status": a.status}, a.secrets)

    def write_recording(self, a, success):
        if self.recorder and success and a.messages is not None:
            call = {"kind": a.kind, "content": "".join(a.reply.text), "messages": len(a.messages),
                    "completion_tokens": a.reply.usage["completion_tokens"], "finish_reason": a.reply.finish_reason}
            self.recorder.add(a.session, a.fingerprint, call, a.body.get("model"), a.secrets)

    def write_record(self, a, _):
        self.log.write(a.record(self.trial), a.secrets)


def is_events(response):
    return response.headers.get("Content-Type", "").lower().startswith("text/event-stream")


async def write(out, data):
    """Write to the client. Raises ClientGone, so that it cannot be mistaken for a fault of the server."""
    try:
        await out.write(data)
    except ConnectionError as e:
        raise ClientGone from e


async def write_eof(out):
    try:
        await out.write_eof()
    except ConnectionError as e:
        raise ClientGone from e


@contextlib.asynccontextmanager
async def serving(proxy, sock):
    """The proxy at work on a listening socket; at the end calls in flight are ended and recorded."""
    from aiohttp import web

    await proxy.open()
    server = web.Server(proxy.handle, handler_cancellation=True, auto_decompress=False, access_log=None, max_line_size=1 << 20,
                        max_field_size=1 << 20)
    runner = web.ServerRunner(server, shutdown_timeout=1)
    await runner.setup()
    site = web.SockSite(runner, sock, backlog=1024)
    await site.start()
    prepare = asyncio.ensure_future(asyncio.to_thread(prepare_replay, proxy.replay)) if proxy.replay else None
    try:
        yield
    finally:
        await site.stop()
        await proxy.close()
        await runner.cleanup()
        if prepare:
            prepare.cancel()


async def serve(proxy, sock, ready):
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(s, stop.set)
    async with serving(proxy, sock):
        gc.collect()
        gc.freeze()  # what is loaded stays: a full collection that looks through it holds every call up for 7 ms
        ready()
        await stop.wait()


def prepare_replay(replay):
    # When the server is not up yet, or cannot count tokens, the call that needs it says so.
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        replay.prepare()


def bind(host, port):
    """A bound socket. Raises OSError when the port is taken."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    # SO_REUSEADDR lets two sockets bind one port as long as neither listens: only listening makes the port ours.
    sock.listen(1024)
    return sock


def has_bytes(path):
    return os.path.isfile(path) and os.path.getsize(path) > 0


def die(text):
    print(f"llm_proxy: {text}", file=sys.stderr)
    sys.exit(2)


def tcp_port(text):
    """A TCP port, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a port from 0 to 65535")
    return int(text)


def seconds(text):
    """A time-out, for argparse."""
    return parsed(float, text, lambda s: 0 <= s < 1e9, "seconds, 0 (never) or more")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--upstream", required=True, help="root of the LLM server, without /v1")
    p.add_argument("--port", type=tcp_port, required=True, help="port to listen on; 0 takes a free one and prints it")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--log", required=True, help="calls.jsonl; appended to")
    p.add_argument("--trial", help="name of the trial, copied into every record")
    p.add_argument("--bodies", help="JSON lines with the requests and the text of the replies (large; prompts hold what the agent saw)")
    p.add_argument("--server-kind", choices=["vllm", "llamacpp", "openai"],
                   help="needed for --replay, which counts tokens and asks for exact lengths: each kind of server does so in its own way")
    p.add_argument("--replay", help="recording whose replies the agent gets")
    p.add_argument("--replay-mode", choices=["putback", "force"], default="putback",
                   help="force needs vLLM with servers.force_reply and slows its decode down (bench/gpu_pairs.py measures by how much)")
    p.add_argument("--replay-words", action="store_true",
                   help="with putback: let the server write only whole words, which survive being put back (vLLM; for random weights)")
    p.add_argument("--record", help="write a recording of the run to this file; one that is there goes on, with the --log of the same run")
    p.add_argument("--read-timeout", type=seconds, default=0, metavar="S",
                   help="seconds without a byte from the server after which a call is given up; 0: never")
    a = p.parse_args(argv)
    if not is_root(a.upstream):
        die(f"--upstream: found '{a.upstream}', expected a URL such as http://127.0.0.1:8000")
    if a.replay and a.record:
        die("--record writes what a live run answered, --replay answers from a recording: give one of them")
    if a.replay and not a.server_kind:
        die("--replay needs --server-kind vllm, llamacpp or openai (any other server: lengths are asked for, but not exact)")
    if not a.replay and (a.replay_words or a.replay_mode != "putback"):
        die("--replay-mode and --replay-words say how a recording is replayed: give it with --replay")
    if a.replay_mode == "force" and a.server_kind != "vllm":
        die(f"--replay-mode force needs --server-kind vllm, found '{a.server_kind}'; use putback")
    if a.replay_words and (a.replay_mode != "putback" or a.server_kind != "vllm"):
        die(f"--replay-words needs --replay-mode putback and --server-kind vllm, found {a.replay_mode} and {a.server_kind}")
    try:
        import aiohttp  # noqa: F401
    except ImportError as e:
        die(f"{e.name} is missing in {sys.executable}: run `bash 01_setup.sh`, then .venv/bin/python llm_proxy.py")
    if a.record and has_bytes(a.record) and not has_bytes(a.log):
        die(f"--record {a.record}: holds another run, since {a.log} has no calls yet: give another file, or the --log of the run that is to go on")
    for flag, path in (("--log", a.log), ("--bodies", a.bodies), ("--record", a.record)):
        if path and not Path(path).parent.is_dir():
            die(f"{flag} {path}: the folder {Path(path).parent} does not exist; create it first")
        if path and Path(path).is_dir():
            die(f"{flag} {path}: is a folder, expected a file")
    replay = None
    if a.replay:
        from servers import adapter

        mode = a.replay_mode
        try:
            replay = Replay(load_recording(a.replay), adapter.get(a.server_kind, a.upstream), mode, a.replay_words)
        except ReplayError as e:
            die(str(e))
    try:
        recorder = Recorder(a.record, a.trial) if a.record else None
    except ReplayError as e:
        die(f"--record cannot go on from what is there: {e}; give another file")
    try:
        sock = bind(a.host, a.port)
    except (OSError, OverflowError) as e:
        why = getattr(e, "strerror", None) or e
        die(f"port {a.port} on {a.host} cannot be used ({why}): stop what listens there, or choose another --port")
    try:
        log = JsonLines(a.log)
        bodies = JsonLines(a.bodies) if a.bodies else None
    except BlockingIOError:
        die(f"{a.log}: another proxy writes this file: stop it, or choose another --log")
    except OSError as e:
        die(f"{e.filename}: {e.strerror}")
    proxy = Proxy(a.upstream, log, a.trial, bodies, replay, recorder, a.read_timeout)
    host, port = sock.getsockname()[:2]
    shown = re.sub(r"//[^/@]*@", "//", a.upstream)
    what = f", replaying {a.replay} ({replay.mode})" if replay else f", recording to {a.record}" if recorder else ""
    what += f" (goes on from {recorder.found} calls)" if recorder and recorder.found else ""
    ready = lambda: print(f"llm_proxy: http://{host}:{port} -> {shown}, records to {a.log}{what}", flush=True)  # noqa: E731
    asyncio.run(serve(proxy, sock, ready))
    if proxy.counts["log_errors"]:
        print(f"llm_proxy: {proxy.counts['log_errors']} record(s) could not be written to {a.log}: it is not complete", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
