"""Send calibration requests with exact context and output lengths, and write one line per call with what the server really did.

    python microbench.py --base-url http://127.0.0.1:8000 --server-kind vllm --out calls.jsonl --reps 5
    python microbench.py --base-url http://127.0.0.1:8000 --proxy-url http://127.0.0.1:8001 --server-kind llamacpp \\
        --out calls.jsonl --contexts 256,1024 --outputs 16,64 --reps 2
    python microbench.py ... --transport completions --out completions.jsonl     # the comparison: token ids, streamed
    python microbench.py ... --append --out append_calls.jsonl                   # what agents do: long cached history, short new part
    python microbench.py ... --dry-run                                           # the plan and its time; nothing is sent

Every cell (context x output) is a pair: the prefix cache is emptied, the prompt is sent (miss), and sent again (hit). Cells are
shuffled within a repetition, every context is warmed up first, and a reference cell at the start, in the middle and at the end shows
drift; with --cool-down-s the machine rests before each of the three (and after the warm-up), so that what came just before one of them,
a long prompt say, is not taken for drift. Before each call nothing is asked of the server for --quiet-s seconds: three steps of a 10 Hz
energy counter by default.
Prompts are random words, different in every run from their first word on (the run's id picks them), so that a reset which silently
failed still leaves a miss. The default transport is the agent's, non-streamed chat; --transport completions streams token-id prompts.
Append cells first fill the cache with --append-cached tokens (state "fill"), then send the conversation with --append-uncached more.

What came back is checked: prompt and output length to the token, no cached tokens on a miss, the whole prompt (less a cache block) on
a hit, the reset's answer. A pair that fails is sent again up to --retries times. Every attempt stays on record; `valid` is false, with
the `reason`, for those that must not be fitted: failed checks, warm-ups, fills. A rerun keeps the finished calls of the same plan
(OUT.plan.json beside the output), also after a kill; another plan, --quiet-s or --no-reset needs another --out.

Server kinds: `vllm` and `llamacpp` can do everything. `openai` (any other OpenAI-compatible server) has no cache reset: misses rely on
the random start, and the template's own few tokens may be cached; no token ids, so chat only; prompts are counted through short requests
and checked on every call; output lengths are exact only if the server generates until max_tokens. A server that does not report cached
tokens gives records with cached_tokens null and `verified` false. --no-reset does the same on servers whose reset does not reach every
tier of the cache. A key for the server is taken from OPENAI_API_KEY.

Exit codes: 0 every call of the plan is valid, 1 some are not or the server failed (rerun to go on), 2 bad input, 130 interrupted.
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import secrets
import signal
import statistics
import sys
import time
import urllib.parse
import uuid
from pathlib import Path

from stages.arguments import is_root, parsed

# Common English words: nearly all are one token with a space before them in every BPE vocabulary; those that are not are dropped.
COMMON_WORDS = """time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money story fact
month right study book eye job word business issue side kind head house service friend father power hour game line end member law
car city name team minute idea body back face level office door health person art war history party result change morning reason
research moment air teacher force education table paper field rate plan report view value model test data form cost land tree sun
road step term class short small large long white black red green open free full early late first last next same other"""
WORDS = COMMON_WORDS.split()
MOST_TOKENS = 10_000_000  # of a prompt: more is a slip of the finger
SALT_WORDS = 12  # words that no other run begins with: even 64 usable words make 2^72 different starts
TEMPLATE_SLACK = 8  # tokens that chat templates add for the next answer but do not repeat in the history, such as an empty <think> block
# Tokens per second that --dry-run and the first ETA assume when --prefill-rate and --decode-rate are not given: a 30B MoE on an H200,
# a 135M model on two CPU cores, and a guess. They are never written to a record.
ASSUMED_RATES = {"vllm": (25000.0, 220.0), "llamacpp": (250.0, 60.0), "openai": (2000.0, 40.0)}
GRID = {"contexts": [1024, 4096, 8192, 16384, 30000], "outputs": [64, 192, 512]}
APPEND = {"cached": [4096, 16384, 28672], "uncached": [64, 256, 1024, 2048], "outputs": [64, 256]}


class PlanError(ValueError):
    """The plan cannot be carried out as asked; the text says which setting, and the way out. Exit code 2."""


class BenchError(RuntimeError):
    """The server does not do what the measurement needs; the text says what and the way out. Exit code 1."""


# ---- plan ----


def plan_pairs(contexts, outputs, reps, seed, reference=None):
    """Pairs of a grid in the order in which they are sent: shuffled within each repetition, the reference cell (context, output) at the
    start, in the middle and at the end. A pair is a cell without its state; the reference's repetitions count on from `reps`."""
    rng = random.Random(seed)
    pairs = []
    for rep in range(reps):
        cells = [{"context": c, "output": o, "rep": rep} for c in contexts for o in outputs]
        rng.shuffle(cells)
        pairs += cells
    if reference:
        context, output = reference
        for k, (where, at) in enumerate((("start", 0), ("middle", len(pairs) // 2 + 1), ("end", len(pairs) + 2))):
            pairs.insert(at, {"context": context, "output": output, "rep": reps + k, "reference": where})
    return pairs


def plan_append(cached, uncached, outputs, reps, seed, max_context=None):
    """(pairs, left out) of the append cells; those longer than the model's context are left out."""
    rng = random.Random(seed)
    pairs, left_out = [], []
    for rep in range(reps):
        cells = [
            {"context": c + u, "output": o, "rep": rep, "cached": c, "uncached": u} for c in cached for u in uncached for o in outputs
        ]
        left_out += [p for p in cells if max_context and p["context"] + p["output"] > max_context]
        cells = [p for p in cells if p not in left_out]
        rng.shuffle(cells)
        pairs += cells
    return pairs, left_out


def states(pair):
    """The two calls of a pair: what is measured is miss and hit, or the append call after its fill."""
    return ("fill", "append") if "cached" in pair else ("miss", "hit")


def measured_states(pair):
    return ("append",) if "cached" in pair else ("miss", "hit")


def pair_key(cell):
    """Identity of a pair: its cell without the state."""
    return json.dumps({k: v for k, v in sorted(cell.items()) if k != "state"})


def plan_hash(plan):
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def estimate_s(pairs, rates, quiet_s):
    """Seconds that pairs take at `rates` (prefill, decode; tokens per second), quiet included. For the plan and the ETA only."""
    prefill, decode = rates
    outputs = sum(p["output"] + 1 if "cached" in p else 2 * p["output"] for p in pairs)
    return sum(p["context"] for p in pairs) / prefill + outputs / decode + 3 * quiet_s * len(pairs)


def rests(pairs):
    """Indices of the pairs before which the machine cools down: the first one, which follows the warm-up, and the reference cells."""
    return [n for n, p in enumerate(pairs) if n == 0 or "reference" in p]


def clock(seconds):
    s = int(round(seconds))
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


# ---- record on disk ----


def read_finished(path, mend):
    """({(pair key, state)} of the valid calls in a calls file, their runs, lines). A torn last line (a killed run) is skipped, and with `mend`
    cut off the file, so that what is appended starts on a line of its own. Raises PlanError on a bad line elsewhere."""
    done, runs, lines = set(), set(), 0
    if not path.exists():
        return done, runs, lines
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    for n, line in enumerate(whole.splitlines(), 1):
        try:
            rec = json.loads(line)
            if rec["valid"]:
                done.add((pair_key(rec["cell"]), rec["cell"]["state"]))
                runs.add(rec.get("run"))
        except (ValueError, KeyError, TypeError) as e:
            raise PlanError(f"{path}:{n}: no record of a call ({type(e).__name__}: {e}); give another --out, or remove the line") from e
        lines += 1
    if mend and len(whole) < len(raw):
        with open(path, "r+b") as f:
            f.truncate(len(whole))
    return done, runs, lines


def check_settings(out, sidecar, runs, now):
    """Raises PlanError when one of `runs`, whose calls are kept, was made with other settings than `now` that change what a call measures."""
    for run in sidecar["runs"]:
        for k, option in (("quiet_s", "--quiet-s"), ("cache_reset", "--no-reset")):
            if run.get("run") in runs and run.get(k, now[k]) != now[k]:
                raise PlanError(
                    f"{out} has calls made with another {option} ({k}: {json.dumps(run[k])} there, {json.dumps(now[k])} now): give another --out, "
                    "or the same settings"
                )


def open_plan(out, plan):
    """Sidecar of the output as a dict. A fresh one where there is none; raises PlanError when the output belongs to another plan."""
    sidecar = Path(f"{out}.plan.json")
    fresh = {"schema": 1, "plan_sha256": plan_hash(plan), "plan": plan, "runs": [], "complete": False}
    if not sidecar.exists():
        if out.exists() and out.stat().st_size:
            raise PlanError(f"{out} has calls but no {sidecar.name} beside it, so its plan is unknown: give another --out")
        return fresh
    try:
        old = json.loads(sidecar.read_text())
        differ = [k for k in sorted(plan.keys() | old["plan"].keys()) if plan.get(k) != old["plan"].get(k)]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise PlanError(f"{sidecar} is not a plan ({type(e).__name__}: {e}): remove it with {out.name}, or give another --out") from e
    if differ:
        k = differ[0]
        raise PlanError(
            f"{out} was made with another plan ({k}: {json.dumps(old['plan'].get(k))} there, {json.dumps(plan.get(k))} now; "
            f"{len(differ)} settings differ): give another --out, or the same settings"
        )
    return old


# ---- prompts ----


def single_token_words(words, tokens_in):
    """Those of `words` that are one token after a space, by halving; tokens_in(words) counts a list. Takes two counts if all of them are."""
    if not words or tokens_in(words) == len(words):
        return words
    half = len(words) // 2
    return [] if half == 0 else single_token_words(words[:half], tokens_in) + single_token_words(words[half:], tokens_in)


def usable_words(tokens_in):
    """Words to build prompts from. Raises BenchError below 64 of them: different starts and exact lengths need a choice."""
    words = single_token_words(WORDS, tokens_in)
    if len(words) < 64:
        raise BenchError(f"only {len(words)} of {len(WORDS)} English words are one token for this model, 64 are needed for exact prompts")
    return words


def random_text(rng, words, salt, n):
    return [*salt[:n], *rng.choices(words, k=max(0, n - len(salt)))]


def fit_words(count, rng, words, salt, target, what):
    """List of words for which count(words) is exactly `target` tokens. Raises PlanError when the template alone is longer."""
    template = count([])
    if template >= target:
        raise PlanError(f"{what} of {target} tokens is too short: the chat template alone takes {template}; ask for more")
    seq = random_text(rng, words, salt, target - template)
    for _ in range(12):
        off = target - count(seq)
        if off == 0:
            return seq
        seq = seq + rng.choices(words, k=off) if off > 0 else seq[:off]
    raise BenchError(f"no prompt of exactly {target} tokens found for {what} (off by {off} after 12 tries)")


def chat_prompts(pair, count, rng, words, salt):
    """The two message lists of a pair; count(messages) gives tokens. An append is the next turn of the conversation in the cache."""

    def user(seq):
        return {"role": "user", "content": " ".join(seq)}

    if "cached" not in pair:
        messages = [user(fit_words(lambda s: count([user(s)]), rng, words, salt, pair["context"], "a context"))]
        return messages, messages
    first = [user(fit_words(lambda s: count([user(s)]), rng, words, salt, pair["cached"], "a cached part"))]
    history = [*first, {"role": "assistant", "content": rng.choice(words)}]
    last = fit_words(lambda s: count([*history, user(s)]), rng, words, [], pair["context"], "a cached part and an uncached part")
    return first, [*history, user(last)]


def id_prompts(pair, rng, ids, salt):
    """The two token-id prompts of a pair."""
    whole = random_text(rng, ids, salt, pair["context"])
    return (whole[: pair["cached"]] if "cached" in pair else whole), whole


# ---- one call ----


def send(url, path, body, session, timeout_s):
    """Send one request and return its record (t_start to chunks, as in calls.jsonl). Never raises on a server's or a connection's fault:
    `error` says what happened. An interrupt ends the call and is recorded as error "interrupted"; the caller stops then."""
    parts = urllib.parse.urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    conn = make(parts.hostname, parts.port, timeout=timeout_s)
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Session-ID": session}
    if os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    stream = bool(body.get("stream"))
    rec = {
        "t_start": time.time(), "t_sent": None, "t_first": None, "t_end": None, "mono_start": time.monotonic(), "mono_end": None,
        "path": path, "stream": stream, "status": None, "error": None, "complete": False, "client_disconnect": False,
        "model": body["model"], "prompt_tokens": None, "cached_tokens": None, "completion_tokens": None, "finish_reason": None,
        "request_bytes": len(data), "response_bytes": 0, "chunks": 0,
    }
    try:
        conn.connect()
        rec["t_start"], rec["mono_start"] = time.time(), time.monotonic()
        conn.request("POST", parts.path.rstrip("/") + path, data, headers)
        rec["t_sent"] = time.time()
        resp = conn.getresponse()
        rec["status"] = resp.status
        if stream and resp.status == 200:
            read_stream(resp, rec)
        else:
            text = resp.read()
            rec["response_bytes"], rec["chunks"] = len(text), 1
            if resp.status != 200:
                rec["error"] = f"HTTP {resp.status}: {text[:300].decode('utf-8', 'replace')}"
            else:
                take_answer(json.loads(text), rec)
                rec["complete"] = True
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as e:
        rec["error"] = f"{type(e).__name__}: {e}"
    except KeyboardInterrupt:
        rec["error"], rec["client_disconnect"] = "interrupted", True
    finally:
        rec["t_end"], rec["mono_end"] = time.time(), time.monotonic()
        conn.close()
    for k in ("t_start", "t_sent", "t_first", "t_end", "mono_start", "mono_end"):
        rec[k] = None if rec[k] is None else round(rec[k], 6)
    return rec


def read_stream(resp, rec):
    """Read server-sent events line by line; t_first is the first event with a choice, before it is parsed further."""
    for line in resp:
        now = time.time()
        rec["response_bytes"] += len(line)
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            rec["complete"] = True
            continue
        event = json.loads(data)
        rec["chunks"] += 1
        if rec["t_first"] is None and event.get("choices"):
            rec["t_first"] = now
        take_answer(event, rec)


def take_answer(answer, rec):
    """Copy usage, finish reason and a server's error text from an answer or a stream event. A count that is missing stays null,
    and one that is told stays when a later event says null."""
    if answer.get("error"):
        rec["error"] = f"server: {json.dumps(answer['error'])[:300]}"
    usage = answer.get("usage") or {}
    told = {k: usage.get(k) for k in ("prompt_tokens", "completion_tokens")}
    told["cached_tokens"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    rec.update({k: v for k, v in told.items() if v is not None})
    for choice in answer.get("choices") or []:
        rec["finish_reason"] = choice.get("finish_reason") or rec["finish_reason"]


def check(rec, cell, block, miss_allowed):
    """None when a call did what its cell says, else the reason. `block`: cache block in tokens, `miss_allowed`: cached tokens that a miss
    may have (0 after a reset). An unreported cached count is not judged here."""
    if rec["error"]:
        return rec["error"]
    if not rec["complete"]:
        return "the stream ended before [DONE]"
    if rec["prompt_tokens"] != cell["context"]:
        return f"prompt of {rec['prompt_tokens']} tokens, expected {cell['context']}"
    if rec["completion_tokens"] != cell["output"]:
        return f"output of {rec['completion_tokens']} tokens, expected {cell['output']} (finish_reason {rec['finish_reason']})"
    cached, state = rec["cached_tokens"], cell["state"]
    if cached is None:
        return None
    if state in ("miss", "fill") and cached > miss_allowed:
        most = f"at most {miss_allowed}" if miss_allowed else "none"
        return f"a {state} with {cached} cached tokens, expected {most}: the cache was not empty"
    if state == "hit" and cached < cell["context"] - block:
        return f"a hit with {cached} cached tokens, expected at least {cell['context'] - block} (cache block {block}; see --cache-block)"
    if state == "append" and not -block - TEMPLATE_SLACK <= cached - cell["cached"] <= block + TEMPLATE_SLACK:
        return f"an append with {cached} cached tokens, expected about {cell['cached']} (cache block {block}; see --cache-block)"
    return None


# ---- the run ----


class Bench:
    """One run against one server: sends pairs, checks them, appends the records to the open file `out`."""

    def __init__(self, a, adapter, served, out, seq):
        self.a, self.adapter, self.served, self.out, self.seq = a, adapter, served, out, seq
        self.run = secrets.token_hex(6)
        self.reset = settings_of(a, adapter)["cache_reset"]
        self.url = a.proxy_url or a.base_url
        self.path = "/v1/chat/completions" if a.transport == "chat" else "/v1/completions"
        self.block = a.cache_block or adapter.cache_block
        self.reports_cached = None  # unknown until the first hit
        self.ids = self.template = None
        if adapter.can_tokenize:
            self.words = usable_words(lambda words: len(adapter.tokenize("".join(f" {w}" for w in words))))
            self.ids = adapter.tokenize("".join(f" {w}" for w in self.words))
        else:
            one_word = self.asked_tokens(["time"])
            self.words = usable_words(lambda words: self.asked_tokens(["time", *words]) - one_word)
            self.template = one_word - 1
        # Without a reset the template's own tokens, which every prompt starts with, may be cached.
        if self.reset:
            self.miss_allowed = 0
        else:
            head = 0 if a.transport == "completions" else self.count([{"role": "user", "content": ""}])
            self.miss_allowed = head and -(-head // self.block) * self.block

    def salt(self, source):
        return random.Random(f"{self.run} {self.seq}").choices(source, k=SALT_WORDS)

    def asked_tokens(self, words):
        """Prompt tokens of a chat as its usage tells: on servers without a tokenizer short requests stand in for one."""
        body = {"model": self.served, "messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 1}
        rec = send(self.url, self.path, body, f"microbench-{self.run}", self.a.timeout_s)
        if rec["error"] or rec["prompt_tokens"] is None:
            raise BenchError(f"a short chat gave no usage.prompt_tokens: {rec['error'] or 'usage is missing'}")
        return rec["prompt_tokens"]

    def count(self, messages):
        """Prompt tokens of a chat."""
        if self.template is None:
            return self.adapter.chat_tokens(messages)
        return self.template + len(messages[0]["content"].split())

    def body(self, prompt, output):
        body = {"model": self.served, "temperature": 0, **self.adapter.exact_output(output)}
        if self.a.transport == "chat":
            return {**body, "messages": prompt, "stream": False}
        return {**body, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}

    def prompts(self, pair):
        rng = random.Random(f"{self.run} {self.seq} text")
        if self.a.transport == "chat":
            return chat_prompts(pair, self.count, rng, self.words, self.salt(self.words))
        return id_prompts(pair, rng, self.ids, self.salt(self.ids))

    def empty_cache(self):
        """Reset the prefix cache when the server is idle. None, or the reason why it was refused."""
        from servers.adapter import ServerError

        end = time.monotonic() + 30
        try:
            while self.adapter.idle() is False:
                if time.monotonic() > end:
                    return "the server was not idle for 30 s: another client uses it"
                time.sleep(0.1)
            if self.reset:
                self.adapter.reset_cache()
        except (ServerError, ValueError, KeyError, TypeError) as e:
            return f"cache reset refused: {e}"
        return None

    def call(self, pair, state, prompt, attempt, refused=None, unused=None):
        """Send one call after the quiet time and put it on record. `refused`: reason that makes it invalid whatever comes back; `unused`:
        reason why it is not a measurement although nothing is wrong with it (warm-up, fill). Returns (record, fault or None)."""
        cell = {**pair, "state": state}
        if state == "fill":
            cell["context"], cell["output"] = pair["cached"], 1
        body = self.body(prompt, cell["output"])
        time.sleep(self.a.quiet_s)
        rec = send(self.url, self.path, body, f"microbench-{self.run}", self.a.timeout_s)
        inferred = False
        if rec["cached_tokens"] is None and self.reports_cached and state in ("miss", "fill") and not rec["error"]:
            rec["cached_tokens"], inferred = 0, True  # this server reports hits and says nothing when there is none
        fault = refused or check(rec, cell, self.block, self.miss_allowed)
        if not fault and rec["cached_tokens"] is None and self.reports_cached and state in ("hit", "append"):
            fault = "the server reported no cached tokens for this call, but did for others"
        if state == "fill":
            cell = {**pair, "state": state}
        record = {
            "id": str(uuid.uuid4()), "trial": None, "seq": self.seq,
            "call_key": hashlib.sha256(f"{pair_key(pair)} {state}".encode()).hexdigest()[:16], "attempt": attempt, "kind": "other",
            **rec, "session": f"microbench-{self.run}", "replayed": False, "replay": None,
            "params": {k: v for k, v in body.items() if k not in ("messages", "prompt", "model")},
            "cell": cell, "transport": self.a.transport, "proxied": bool(self.a.proxy_url), "run": self.run,
            "valid": not fault and not unused, "reason": fault or unused, "verified": rec["cached_tokens"] is not None and not inferred,
        }
        if inferred:
            record["cached_inferred"] = True
        self.out.write(json.dumps(record, allow_nan=False) + "\n")
        self.out.flush()
        self.seq += 1
        if rec["error"] == "interrupted":
            raise KeyboardInterrupt
        return rec, fault

    def pair(self, pair, done, unused=None):
        """Send a pair until every measured call that is not in `done` is valid, at most 1 + --retries times. Returns (records by state of
        the last attempt, fault or None); `done` grows by the valid calls. `unused` marks all of it as no measurement."""
        first_state, second_state = states(pair)
        key, records, fault = pair_key(pair), {}, None
        for attempt in range(1, self.a.retries + 2):
            if attempt > 1:
                self.revive()
            refused = self.empty_cache()
            if refused and attempt <= self.a.retries:
                fault = refused
                time.sleep(1)
                continue
            first, second = self.prompts(pair)
            again = "fills the cache for the call after it" if first_state == "fill" else "sent again to fill the cache"
            filler = again if first_state == "fill" or (key, first_state) in done else None
            records[first_state], fault = self.call(pair, first_state, first, attempt, refused, unused or filler)
            if not fault and not unused and not filler:
                done.add((key, first_state))
            if fault:
                continue
            if (key, second_state) not in done:
                records[second_state], fault = self.call(pair, second_state, second, attempt, refused, unused)
                if fault:
                    continue
                if not unused:
                    done.add((key, second_state))
            break
        time.sleep(self.a.quiet_s)  # the step that holds the end of the call ends before the next prompt is counted
        return records, fault

    def revive(self):
        """Between attempts: a server or proxy that went away gets 10 s to come back, then the run ends."""
        from servers import adapter as adapters

        try:
            adapters.get(self.adapter.kind, self.url).wait_ready(10)
        except adapters.ServerError as e:
            raise BenchError(str(e)) from e

    def warm_up(self, shapes):
        """Send each shape once, miss and hit: kernels are compiled at their first use. Learns whether cached tokens are reported and stops
        early where no hit comes at all."""
        for n, pair in enumerate(shapes, 1):
            records, fault = self.pair(pair, set(), unused="warm-up")
            last = records.get(states(pair)[1])
            if fault:
                raise BenchError(f"warm-up of {describe(pair)} failed: {fault}{self.hint(fault)}")
            if self.reports_cached is None:
                self.reports_cached = last["cached_tokens"] is not None
                if not self.reports_cached and self.adapter.kind != "openai":
                    raise BenchError("the server reports no cached tokens: start vLLM with --enable-prompt-tokens-details")
                if not self.reports_cached:
                    say("this server reports no cached tokens: hits and misses are recorded unverified, cached_tokens null")
            took = ", ".join(f"{s} {r['mono_end'] - r['mono_start']:.2f} s" for s, r in records.items())
            say(f"warm-up {n}/{len(shapes)}: {describe(pair)}: {took}")

    def hint(self, fault):
        if fault.startswith("cache reset refused"):
            return "; or run with --no-reset and another --out, which relies on the prompts' random start"
        if "a hit with" in fault:
            return "; is prefix caching on?"
        if "output of" in fault and self.adapter.kind == "openai":
            return "; this server stops early: exact lengths need kind vllm or llamacpp"
        return ""


def say(text):
    print(f"microbench: {text}", file=sys.stderr, flush=True)


def describe(pair):
    what = f"cached {pair['cached']} + {pair['uncached']}" if "cached" in pair else f"context {pair['context']}"
    where = f", reference cell at the {pair['reference']}" if "reference" in pair else ""
    return f"{what} output {pair['output']}" + (f" rep {pair['rep']}" if pair["rep"] >= 0 else "") + where


def warm_shapes(pairs):
    """Pairs that run every shape once: per context, and per uncached part of append cells (after the shortest cached one), the longest
    output. They do not appear in the plan."""
    shapes = {}
    for p in sorted(pairs, key=lambda p: (p.get("cached", 0), -p["output"])):
        shapes.setdefault(p.get("uncached", p["context"]), {k: v for k, v in p.items() if k != "reference"} | {"rep": -1})
    return [shapes[k] for k in sorted(shapes)]


def drift(path):
    """Text about the reference cell's call times at start, middle and end; None when it is not complete."""
    times = {}
    for line in path.read_bytes().splitlines():
        rec = json.loads(line)
        if rec["valid"] and "reference" in rec["cell"]:
            times[rec["cell"]["reference"], rec["cell"]["state"]] = rec["mono_end"] - rec["mono_start"]
    if len(times) != 6:
        return None
    parts = []
    for s in ("miss", "hit"):
        start, middle, end = (times[w, s] for w in ("start", "middle", "end"))
        parts.append(f"{s} {start:.3f} {middle:.3f} {end:.3f} s ({end / start - 1:+.1%})")
    return "reference cell at start, middle, end: " + "; ".join(parts)


def make_plan(a, served, max_context):
    """(pairs, plan dict that the hash covers, lines to say). Raises PlanError."""
    notes = []
    plan = {"mode": "append" if a.append else "grid", "transport": a.transport, "server_kind": a.server_kind, "model": served,
            "proxied": bool(a.proxy_url), "reps": a.reps, "seed": a.seed}
    if a.cool_down_s:
        plan["cool_down_s"] = a.cool_down_s
    if a.append:
        outputs = a.outputs or APPEND["outputs"]
        plan |= {"cached": a.append_cached, "uncached": a.append_uncached, "outputs": outputs}
        pairs, left_out = plan_append(a.append_cached, a.append_uncached, outputs, a.reps, a.seed, max_context)
        if left_out:
            notes.append(f"{len(left_out)} of {len(left_out) + len(pairs)} append calls exceed the model's {max_context} tokens: left out")
        if not pairs:
            raise PlanError(f"no append cell fits the model's {max_context} tokens: give smaller --append-cached, --append-uncached")
        return pairs, plan, notes
    contexts, outputs = a.contexts or GRID["contexts"], a.outputs or GRID["outputs"]
    if max_context and max(contexts) + max(outputs) > max_context:
        raise PlanError(f"context {max(contexts)} + output {max(outputs)} exceeds the model's context of {max_context} tokens: "
                        "give smaller --contexts or --outputs, or serve a longer context")
    reference = a.reference
    if reference == "middle":
        reference = (sorted(contexts)[(len(contexts) - 1) // 2], sorted(outputs)[(len(outputs) - 1) // 2])
    plan |= {"contexts": contexts, "outputs": outputs, "reference": list(reference) if reference else None}
    return plan_pairs(contexts, outputs, a.reps, a.seed, reference), plan, notes


def run(a):
    """Carry out the plan of the parsed arguments; returns the exit code. Raises PlanError, BenchError, servers.adapter.ServerError."""
    import fcntl

    from energylib import write_json_atomic
    from servers import adapter as adapters

    adapter = adapters.get(a.server_kind, a.base_url)
    if not adapter.can_tokenize and a.transport == "completions":
        raise PlanError(f"--transport completions needs token ids, and a server of kind '{adapter.kind}' has no tokenizer: use chat")
    if not adapter.can_tokenize and a.append:
        raise PlanError(f"--append needs a tokenizer, which a server of kind '{adapter.kind}' does not offer: leave it out")
    folder = next(p for p in a.out.absolute().parents if p.exists())
    if a.out.is_dir() or not folder.is_dir():
        raise PlanError(f"--out {a.out}: {a.out if a.out.is_dir() else folder} is a {'folder' if a.out.is_dir() else 'file'}, expected a file in a folder")
    if a.dry_run:
        return dry_run(a, adapter)
    adapter.wait_ready(a.wait_s)
    listed, max_context = adapter.model()
    served = a.model or listed
    pairs, plan, notes = make_plan(a, served, max_context)
    for line in notes:
        say(line)
    sidecar, sidecar_path = open_plan(a.out, plan), Path(f"{a.out}.plan.json")
    a.out.parent.mkdir(parents=True, exist_ok=True)
    with open(a.out, "a", encoding="utf-8") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PlanError(f"{a.out} is being written by another microbench.py: wait for it, or give another --out") from None
        done, runs, seq = read_finished(a.out, mend=True)
        check_settings(a.out, sidecar, runs, settings_of(a, adapter))
        missing = unfinished(pairs, done)
        if not missing:
            say(f"{a.out} is complete: {len(pairs)} pairs, nothing to do")
            write_json_atomic(sidecar_path, {**sidecar, "complete": True})
            return 0
        bench = Bench(a, adapter, served, out, seq)
        if bench.block >= min(p.get("cached", p["context"]) for p in pairs):
            raise PlanError(f"the smallest context is no longer than a cache block of {bench.block} tokens, it could never hit: ask more")
        sidecar["complete"] = False
        sidecar["runs"].append({
            "run": bench.run, "t_begin": round(time.time(), 3), "t_end": None, "model": served, "max_context": max_context,
            "server_version": adapter.version(), "base_url": a.base_url, "proxy_url": a.proxy_url,
            **settings_of(a, adapter), "cache_block": bench.block,
        })
        write_json_atomic(sidecar_path, sidecar)
        if not bench.reset:
            say(f"the cache is not reset: misses rely on the prompts' random start, up to {bench.miss_allowed} tokens of template may hit")
        shapes = warm_shapes(missing)
        about = clock(estimate_s([*shapes, *missing], rates_of(a), a.quiet_s) + a.cool_down_s * len(rests(missing)))
        say(f"run {bench.run}: {len(missing)} of {len(pairs)} pairs to send to {served} at {bench.url} ({a.transport}), perhaps {about}")
        failed = send_all(bench, pairs, missing, shapes, done)
    sidecar["complete"] = not failed
    sidecar["runs"][-1]["t_end"] = round(time.time(), 3)
    write_json_atomic(sidecar_path, sidecar)
    text = drift(a.out)
    if text:
        say(text)
    if failed:
        pair, fault = failed[0]
        say(f"{len(failed)} of {len(pairs)} pairs are not valid after {a.retries + 1} tries; the same command tries them again. The first:")
        say(f"  {describe(pair)}: {fault}{bench.hint(fault)}")
        return 1
    say(f"{a.out}: {len(pairs)} pairs complete")
    return 0


def dry_run(a, adapter):
    """Print the plan, what of it is on record already, and an estimate of its time. Asks the server for its context if it is there."""
    from servers.adapter import ServerError

    served = max_context = None
    try:
        served, max_context = adapter.model()
    except ServerError:
        say(f"no server at {a.base_url}: the lengths are not checked against the model's context")
    pairs, plan, notes = make_plan(a, a.model or served, max_context)
    done = set()
    if served and a.out.exists():
        sidecar = open_plan(a.out, plan)
        done, runs, _ = read_finished(a.out, mend=False)
        check_settings(a.out, sidecar, runs, settings_of(a, adapter))
    missing = unfinished(pairs, done)
    for line in notes:
        say(line)
    for n, p in enumerate(pairs, 1):
        print(f"{n:4d}  {' -> '.join(states(p))}  {describe(p)}{'' if p in missing else '  (on record)'}")
    shapes, rates = warm_shapes(missing), rates_of(a)
    about = clock(estimate_s([*shapes, *missing], rates, a.quiet_s) + a.cool_down_s * len(rests(missing)))
    print(f"{len(missing)} of {len(pairs)} pairs to send, {2 * len(missing)} calls, and {2 * len(shapes)} calls of warm-up; about {about} "
          f"if the server does {rates[0]:g} tokens/s of prefill and {rates[1]:g} of decode (--prefill-rate, --decode-rate). Nothing sent.")
    return 0


def settings_of(a, adapter):
    """What of a run must be the same in all runs of an output, though the plan does not say it."""
    return {"quiet_s": a.quiet_s, "cache_reset": adapter.can_reset and not a.no_reset}


def unfinished(pairs, done):
    return [p for p in pairs if any((pair_key(p), s) not in done for s in measured_states(p))]


def rates_of(a):
    """(prefill, decode) tokens per second for estimates of time."""
    prefill, decode = ASSUMED_RATES[a.server_kind]
    return a.prefill_rate or prefill, a.decode_rate or decode


def send_all(bench, pairs, missing, shapes, done):
    """Warm up and send the missing pairs with progress and ETA. Returns [(pair, fault)] of those that are not valid."""
    rates, quiet_s, cool_down_s = rates_of(bench.a), bench.a.quiet_s, bench.a.cool_down_s
    bench.warm_up(shapes)
    failed, ratios, begin, resting = [], [], time.monotonic(), rests(missing)
    for n, p in enumerate(missing, 1):
        if cool_down_s and n - 1 in resting:
            say(f"cooling down for {cool_down_s:g} s")
            time.sleep(cool_down_s)
        t0 = time.monotonic()
        records, fault = bench.pair(p, done)
        if fault:
            failed.append((p, fault))
        ratios.append((time.monotonic() - t0) / estimate_s([p], rates, quiet_s))
        left_s = statistics.median(ratios[-20:]) * estimate_s(missing[n:], rates, quiet_s) + cool_down_s * sum(k >= n for k in resting)
        took = ", ".join(f"{s} {r['mono_end'] - r['mono_start']:.2f} s ({r['cached_tokens']} cached)" for s, r in records.items())
        say(f"{len(pairs) - len(missing) + n}/{len(pairs)} {describe(p)}: {took or 'not sent'}{f'; NOT VALID: {fault}' if fault else ''}; "
            f"{clock(time.monotonic() - begin)} gone, about {clock(left_s)} left")
    return failed


def numbers(text):
    """Comma-separated numbers of tokens, for argparse."""
    expected = "different whole numbers from 1 to 10 million with commas between, such as 1024,4096"
    values = [parsed(int, x, lambda n: 1 <= n <= MOST_TOKENS, expected) for x in text.split(",")]
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
    return values


def positive(text):
    return parsed(int, text, lambda n: 1 <= n <= MOST_TOKENS, "a whole number from 1 to 10 million")


def repetitions(text):
    return parsed(int, text, lambda n: 1 <= n <= 10_000, "a whole number from 1 to 10000")


def seconds(text):
    return parsed(float, text, lambda s: 0 <= s <= 86400, "seconds, 0 to 86400")


def timeout(text):
    return parsed(float, text, lambda s: 1e-3 <= s <= 86400, "seconds, more than 0, at most 86400")


def rate(text):
    return parsed(float, text, lambda r: 1e-6 <= r <= 1e9, "tokens per second, more than 0")


def reference(text):
    if text in ("middle", "none"):
        return None if text == "none" else text
    context, _, output = text.partition(":")
    try:
        return positive(context), positive(output)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected CONTEXT:OUTPUT such as 4096:192, middle or none") from None


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base-url", required=True, help="root of the server, without /v1; cache resets and token counts go here")
    p.add_argument("--proxy-url", help="send the measured calls through this proxy")
    p.add_argument("--server-kind", required=True, choices=list(ASSUMED_RATES))
    p.add_argument("--model", help="served model name (default: the first that the server lists)")
    p.add_argument("--out", required=True, type=Path, help="calls file, one JSON object per line; appended to when the plan is the same")
    p.add_argument("--contexts", type=numbers, help=f"prompt lengths, tokens (default {','.join(map(str, GRID['contexts']))})")
    p.add_argument("--outputs", type=numbers, help=f"output lengths, tokens (default {','.join(map(str, GRID['outputs']))}; with --append "
                                                   f"{','.join(map(str, APPEND['outputs']))})")
    p.add_argument("--reps", type=repetitions, default=1, help="repetitions of every cell")
    p.add_argument("--transport", choices=["chat", "completions"], default="chat")
    p.add_argument("--append", action="store_true", help="send append cells instead of the grid")
    p.add_argument("--append-cached", type=numbers, default=APPEND["cached"], help="tokens in the cache before an append call")
    p.add_argument("--append-uncached", type=numbers, default=APPEND["uncached"], help="tokens that an append call adds")
    p.add_argument("--reference", type=reference, default="middle", metavar="CONTEXT:OUTPUT",
                   help="cell repeated at start, middle and end; `middle` of the grid (default), or `none`")
    p.add_argument("--seed", type=int, default=0, help="order of the cells; the prompts differ in every run whatever the seed")
    p.add_argument("--quiet-s", type=seconds, default=0.35, help="seconds without any request before each call (0.35: 3 counter steps)")
    p.add_argument("--cool-down-s", type=seconds, default=0.0, metavar="S",
                   help="seconds of rest after the warm-up and before each reference cell (state.csv of the sampler shows how long a GPU takes to "
                        "cool); part of the plan; 0: none")
    p.add_argument("--retries", type=int, choices=range(10), default=2, metavar="0-9", help="how often a pair that failed is sent again")
    p.add_argument("--no-reset", action="store_true", help="rely on the prompts' random start instead of the server's cache reset")
    p.add_argument("--cache-block", type=positive, help="tokens of a cache block, where it is not the kind's usual (vLLM on CPU: 128)")
    p.add_argument("--timeout-s", type=timeout, default=900.0, help="longest wait for a call's next byte")
    p.add_argument("--wait-s", type=seconds, default=30.0, help="longest wait for the server at the start")
    p.add_argument("--prefill-rate", type=rate, help="tokens/s that the time estimate assumes")
    p.add_argument("--decode-rate", type=rate, help="tokens/s that the time estimate assumes")
    p.add_argument("--dry-run", action="store_true", help="print the plan and an estimate of its time; nothing is sent")
    return p


def main(argv=None):
    p = parser()
    a = p.parse_args(argv)
    for name in ("base_url", "proxy_url"):
        url = getattr(a, name)
        if url is not None:
            if not is_root(url):
                p.error(f"--{name.replace('_', '-')} '{url}': expected an address such as http://127.0.0.1:8000")
            setattr(a, name, url.rstrip("/").removesuffix("/v1"))

    def interrupted(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    from servers.adapter import ServerError

    goes_on = "" if os.environ.get("TRAJOULE_CALLER") else ", the same command goes on"  # a stage says itself how it goes on
    try:
        code = run(a)
    except PlanError as e:
        say(e)
        code = 2
    except (BenchError, ServerError, OSError) as e:
        say(e)
        if a.out.exists() and a.out.stat().st_size:
            say(f"what was finished is in {a.out}{goes_on}")
        code = 1
    except KeyboardInterrupt:
        say(f"interrupted; what was finished is in {a.out}{goes_on}")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
