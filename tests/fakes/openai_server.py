"""A scripted OpenAI-compatible server on 127.0.0.1 that can also misbehave, for tests of whatever talks to one.

    python tests/fakes/openai_server.py PORT SCRIPT.json [LOG.jsonl]

SCRIPT is a list of items. An item is the JSON object that the assistant replies (Terminus-2's format), or has keys of its own:
  raw "text"          the reply's text as it is, instead of the item as JSON
  error {status, message, code}   an HTTP error
  _latency s          wait before the reply         _finish "length"   finish reason
  _usage {...}|null   usage instead of the counted one (null: none)
  _stream {...}       how it is streamed: `pieces` (list of byte strings, latin-1, sent one by one as they are), `delay` s between pieces,
                      `abort_after` n pieces (the connection is reset), `hang_after` n pieces, `end` false (no [DONE])
  _gzip true          gzip the body                 _abort true        reset the connection before answering
  _hang true          never answer
The reply is picked by the number of requests that a session (header X-Session-ID, else "default") has made; the last item repeats.
Prompts around context summaries get canned texts and consume no item. Token counts are characters / 4; the cache is counted too: tokens
of the longest common beginning with an earlier prompt or reply of the same session, in blocks of 16. `ignore_eos` with `max_tokens` gives
exactly that many tokens, /tokenize answers as llama.cpp's: a replay with --server-kind llamacpp works against it.

In a test: `async with Server(script) as s: ...`, or `with running(script) as s:`, which runs it in a thread. `s.url` is its root,
`s.log` has one dict a request.
"""

import asyncio
import contextlib
import gzip
import json
import sys
import threading
import time

from aiohttp import web
from multidict import CIMultiDict

BLOCK = 16
CANNED = {
    "You are about to hand off your work": "SUMMARY: I listed /app and nothing else.",
    "You are picking up work from a previous AI agent": "Q1 what is done? Q2? Q3? Q4? Q5?",
    "The next agent has a few questions": "A1: only ls was run. A2.. A5: none.",
    "Briefly continue this task": "short summary",
}


def tokens(text):
    return max(1, len(text) // 4)


class Server:
    """The server; `script` may also be a function (request body, ordinal) -> item."""

    def __init__(self, script, log=None, port=0):
        self.script, self.log_file, self.port = script, log, port
        self.log = []  # what came, one dict a request
        self.aborted = []  # requests whose client went away
        self.count = {}
        self.seen = {}  # session -> texts that the cache holds

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.chat)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_route("*", "/echo/{tail:.*}", self.echo)
        self.runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, backlog=1024)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def models(self, _):
        return web.json_response({"object": "list", "data": [{"id": "fake-model", "object": "model", "max_model_len": 131072}]})

    async def health(self, _):
        return web.Response()

    async def tokenize(self, request):
        """As llama.cpp does, with tokens of four characters."""
        text = (await request.json())["content"]
        return web.json_response({"tokens": list(range(-(-len(text) // 4)))})

    async def echo(self, request):
        """What came, as it came: method, raw path, headers and a digest of the body; /echo/gone answers 204, /echo/moved 302."""
        import hashlib

        digest, size = hashlib.sha256(), 0
        async for chunk in request.content.iter_any():
            digest.update(chunk)
            size += len(chunk)
        if request.path == "/echo/gone":
            return web.Response(status=204)
        if request.path == "/echo/moved":
            return web.Response(status=302, headers={"Location": "http://elsewhere.invalid/x"})
        seen = {"method": request.method, "path": request.raw_path, "headers": [[k, v] for k, v in request.headers.items()],
                "sha256": digest.hexdigest(), "size": size}
        return web.json_response(seen, headers=CIMultiDict([("X-Two", "a"), ("X-Two", "b")]))

    def cached(self, session, prompt):
        best = 0
        for text in self.seen.setdefault(session, []):
            n = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
            best = max(best, n)
        return min(best // 4, tokens(prompt) - 1) // BLOCK * BLOCK

    def item(self, body, session, last):
        canned = next((text for beginning, text in CANNED.items() if last.startswith(beginning)), None)
        if canned is not None:
            return {"raw": canned}
        i = self.count[session] = self.count.get(session, -1) + 1
        if callable(self.script):
            return self.script(body, i)
        return self.script[min(i, len(self.script) - 1)]

    async def chat(self, request):
        t0 = time.time()
        raw = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        body = json.loads(raw)
        session = request.headers.get("X-Session-ID", "default")
        messages = body.get("messages") or [{"role": "user", "content": body.get("prompt") or ""}]
        last = messages[-1].get("content")
        last = last if isinstance(last, str) else json.dumps(last)
        item = self.item(body, session, last)
        entry = {"t": t0, "path": request.path, "headers": dict(request.headers), "n_messages": len(messages), "body_keys": sorted(body),
                 "body_wo_messages": {k: v for k, v in body.items() if k != "messages"}, "last_message_head": last[:300],
                 "session": session, "err": item.get("error"), "size": len(raw)}
        self.log.append({**entry, "body": body, "raw": raw})
        try:
            return await self.reply(request, body, session, messages, item, entry)
        except (asyncio.CancelledError, ConnectionError):
            entry["aborted"] = True
            self.aborted.append(entry)
            raise
        finally:
            if self.log_file:
                self.log_file.write(json.dumps({**entry, "dt": time.time() - t0}) + "\n")

    async def reply(self, request, body, session, messages, item, entry):
        await asyncio.sleep(item.get("_latency", 0))
        if item.get("_hang"):
            await asyncio.sleep(3600)
        if item.get("_abort"):
            request.transport.abort()
            return web.Response()
        if item.get("error"):
            e = item["error"]
            obj = {"error": {"message": e["message"], "type": "invalid_request_error", "code": e.get("code")}}
            return web.json_response(obj, status=e["status"])
        content = item["raw"] if "raw" in item else json.dumps(item)
        if body.get("ignore_eos") and body.get("max_tokens"):  # an exact length, as servers decode it
            content = (content + " " * 4 * body["max_tokens"])[: 4 * body["max_tokens"]]
        prompt = "\n".join(f"{m.get('role')}:{m.get('content')}" for m in messages)
        cached = self.cached(session, prompt)
        self.seen[session] = [prompt + f"\nassistant:{content}", *self.seen[session][:3]]
        usage = {"prompt_tokens": tokens(prompt), "completion_tokens": tokens(content), "total_tokens": tokens(prompt) + tokens(content),
                 "prompt_tokens_details": {"cached_tokens": cached}}
        usage = item.get("_usage", usage)
        entry["prompt_tokens"] = tokens(prompt)
        base = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": body.get("model")}
        if body.get("stream"):
            return await self.stream(request, body, item, content, usage, base)
        finish = item.get("_finish", "stop")
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        if body.get("logprobs"):
            one = {"token": "a", "logprob": -0.1, "bytes": None, "top_logprobs": []}
            choice |= {"token_ids": [1, 2, 3], "logprobs": {"content": [one]}}
        if request.path.endswith("/v1/completions"):
            choice = {"index": 0, "text": content, "finish_reason": finish}
        obj = {**base, "object": "chat.completion", "choices": [choice], **({"usage": usage} if usage is not None else {})}
        if body.get("return_token_ids"):
            obj["prompt_token_ids"] = [9, 8, 7]
        data = json.dumps(obj).encode()
        if item.get("_gzip"):
            return web.Response(body=gzip.compress(data), headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})
        return web.Response(body=data, content_type="application/json")

    async def stream(self, request, body, item, content, usage, base):
        how = item.get("_stream", {})
        pieces = how.get("pieces")
        if pieces is None:
            pieces = [p.decode("latin-1") for p in self.events(body, item, content, usage, base, how)]
        pieces = [p.encode("latin-1") for p in pieces]
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        if item.get("_gzip"):
            headers["Content-Encoding"] = "gzip"
            whole = gzip.compress(b"".join(pieces))
            pieces = [whole[i:i + 7] for i in range(0, len(whole), 7)]
        out = web.StreamResponse(headers=headers)
        await out.prepare(request)
        for i, piece in enumerate(pieces):
            if how.get("abort_after") == i:
                await asyncio.sleep(0.05)  # what was sent must arrive before the reset
                request.transport.abort()
                return out
            if how.get("hang_after") == i:
                await asyncio.sleep(3600)
            await out.write(piece)
            if how.get("delay") is not None:
                await asyncio.sleep(how["delay"])
        await out.write_eof()
        return out

    def events(self, body, item, content, usage, base, how):
        """vLLM's order: role, text, finish reason, then (when asked) a chunk without choices that has the usage, then [DONE]."""
        chunk = {**base, "object": "chat.completion.chunk"}

        def event(choices, **more):
            return b"data: " + json.dumps({**chunk, "choices": choices, **more}, ensure_ascii=False).encode() + b"\n\n"

        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for i in range(0, len(content), 4):
            yield event([{"index": 0, "delta": {"content": content[i:i + 4]}, "finish_reason": None}])
        yield event([{"index": 0, "delta": {}, "finish_reason": item.get("_finish", "stop")}])
        if (body.get("stream_options") or {}).get("include_usage") and usage is not None:
            yield event([], usage=usage)
        if how.get("end", True):
            yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def running(script, log=None):
    """The server in a thread with a loop of its own; yields the Server."""
    server, loop, ready, stop = Server(script, log), asyncio.new_event_loop(), threading.Event(), None

    async def work():
        nonlocal stop
        stop = asyncio.Event()
        async with server:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(work()), daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the fake server did not start within 10 s")
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    with open(sys.argv[2], encoding="utf-8") as f:
        script = json.load(f)
    log = open(sys.argv[3], "a", buffering=1, encoding="utf-8") if len(sys.argv) == 4 else None  # noqa: SIM115

    async def serve():
        async with Server(script, log, int(sys.argv[1])) as s:
            print(f"openai_server: {s.url}", flush=True)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
