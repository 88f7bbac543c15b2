"""A small server with the interfaces of vLLM and llama.cpp: a template, a tokenizer, a prefix cache in blocks, and faults on demand.

Tokens are words; words of more than seven letters are two. The prefix cache holds prompts, whole blocks only and never a whole prompt,
as the real ones do. `faults` is a dict that a test may change while the server runs:
    reset         "404" | "lie" (answers success, keeps the cache) | "refuse" (success false); "after": n with it: only from the nth reset
    short         outputs are one token short: an int is how many more times, True is always, {"output": n} only for that max_tokens
    forget        the cache is emptied before every call
    details       "none" (usage without details) | "null on miss"
    status        n: answers 500 n more times
    torn          n: streams end before [DONE] n more times
    delay_s       seconds that every call takes
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def tokens_of(text):
    out = []
    for word in text.split():
        out += [word] if len(word) <= 7 else [word[:7], word[7:]]
    return out


class ModelServer:
    """Context manager; `url`, `faults`, `calls` (bodies of model calls), `resets` (count); `running`: requests that it claims to run,
    `tells_block`: whether its metrics tell the size of a cache block."""

    def __init__(self, kind="vllm", block=None, max_context=4096, **faults):
        self.kind, self.max_context, self.faults = kind, max_context, faults
        self.block = block or {"vllm": 16, "llamacpp": 1, "openai": 1}[kind]
        self.calls, self.resets, self.cache, self.vocabulary = [], 0, set(), {}
        self.running, self.tells_block = 0, True
        self.lock = threading.Lock()

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # headers and body in one segment: two would meet Nagle's algorithm and take 40 ms

            def log_message(self, *_):
                pass

            def do_GET(self):
                server.answer(self, None)

            def do_POST(self):
                data = self.rfile.read(int(self.headers["Content-Length"]))
                server.answer(self, json.loads(data) if data else {})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def ids(self, text):
        with self.lock:
            return [self.vocabulary.setdefault(t, len(self.vocabulary)) for t in tokens_of(text)]

    def template(self, messages):
        return " ".join(f"<{m['role']}> {m['content']} <end>" for m in messages) + " <assistant>"

    def count_down(self, name):
        """True while the fault `name` has uses left."""
        left = self.faults.get(name, 0)
        if left is True or left <= 0:
            return bool(left)
        self.faults[name] = left - 1
        return True

    def reset(self):
        self.resets += 1
        fault = self.faults.get("reset") if self.resets > self.faults.get("after", 0) else None
        if fault is None:
            self.cache.clear()
        return fault

    def answer(self, handler, body):
        path = handler.path.split("?")[0]
        if path in ("/v1/chat/completions", "/v1/completions"):
            return self.model_call(handler, path, body)
        status, out = 404, {"detail": "Not Found"}
        if path == "/v1/models":
            status, out = 200, {"data": [{"id": "words", "max_model_len": self.max_context}]}
        elif self.kind == "vllm":
            if path == "/version":
                status, out = 200, {"version": "0"}
            elif path == "/metrics":
                text = f'vllm:cache_config_info{{block_size="{self.block}",cache_dtype="auto"}} 1.0\n' if self.tells_block else ""
                text += f'# HELP vllm:num_requests_running x\nvllm:num_requests_running{{engine="0"}} {self.running:.1f}\n'
                return self.send(handler, 200, text.encode())
            elif path == "/tokenize":
                text = self.template(body["messages"]) if "messages" in body else body["prompt"]
                ids = self.ids(text)
                status, out = 200, {"tokens": ids, "count": len(ids)}
            elif path == "/reset_prefix_cache":
                fault = self.reset()
                if fault != "404":
                    status, out = 200, {"success": fault != "refuse"}
        elif self.kind == "llamacpp":
            if path == "/props":
                status, out = 200, {"build_info": "b0"}
            elif path == "/slots":
                status, out = 200, [{"id": 0, "n_ctx": self.max_context, "is_processing": self.running > 0}]
            elif path.startswith("/slots/"):
                status, out = (501, {"error": "no slot_save_path"}) if self.reset() == "404" else (200, {"n_erased": 1})
            elif path == "/apply-template":
                status, out = 200, {"prompt": self.template(body["messages"])}
            elif path == "/tokenize":
                status, out = 200, {"tokens": self.ids(body["content"])}
        self.send(handler, status, json.dumps(out).encode())

    def send(self, handler, status, data, content_type="application/json"):
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def model_call(self, handler, path, body):
        self.calls.append(body)
        time.sleep(self.faults.get("delay_s", 0))
        if self.count_down("status"):
            return self.send(handler, 500, b'{"error": {"message": "out of memory"}}')
        prompt = body["prompt"] if path == "/v1/completions" else self.ids(self.template(body["messages"]))
        n = body["max_tokens"]
        if self.faults.get("forget"):
            self.cache.clear()
        blocks = [tuple(prompt[:k]) for k in range(self.block, len(prompt), self.block)]
        cached = max((len(b) for b in blocks if b in self.cache), default=0)
        self.cache.update(tuple(prompt[:k]) for k in range(self.block, len(prompt) + 1, self.block))
        short = self.faults.get("short", 0)
        n -= (short["output"] == n) if isinstance(short, dict) else self.count_down("short")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": cached}}
        if self.faults.get("details") == "none" or (self.faults.get("details") == "null on miss" and not cached):
            usage["prompt_tokens_details"] = None
        if not body.get("stream"):
            out = {"choices": [{"message": {"content": "word " * n}, "finish_reason": "length"}], "usage": usage}
            return self.send(handler, 200, json.dumps(out).encode())
        events = [{"choices": [{"text": " word", "finish_reason": None}]} for _ in range(n)]
        events += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events)
        text += "" if self.count_down("torn") else "data: [DONE]\n\n"
        self.send(handler, 200, text.encode(), "text/event-stream")
