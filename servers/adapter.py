"""What differs between LLM servers, in one class per kind: cache reset, exact lengths, tokens of a text. Nothing else in the pipeline knows.

    python servers/adapter.py wait    --kind llamacpp --url http://127.0.0.1:8000 --timeout 60 [--model NAME]
    python servers/adapter.py model   --kind vllm     --url http://127.0.0.1:8000      # prints: NAME CONTEXT
    python servers/adapter.py version --kind vllm     --url http://127.0.0.1:8000
    python servers/adapter.py reset   --kind llamacpp --url http://127.0.0.1:8000      # empties the prefix cache, or says why not
    python servers/adapter.py probe   --kind vllm     --url http://127.0.0.1:8000      # are cached tokens reported?

Kinds: `vllm` (needs VLLM_SERVER_DEV_MODE=1 for the reset and --enable-prompt-tokens-details), `llamacpp` (llama.cpp's server, with slots
that may be saved), `openai` (any other OpenAI-compatible server: no reset, no exact lengths). URLs are the server's root, without /v1.
Only the standard library is used. Exit codes: 0 yes, 1 the server refused or is down, 2 bad arguments, or (`wait --model`) a server of another
kind or model than they say.
"""

import argparse
import functools
import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages.arguments import parsed  # noqa: E402


class ServerError(RuntimeError):
    """The server refused, answered nonsense or could not be reached; the text says which request and why."""


def excerpt(text):
    """The beginning of an answer in one line, to end a message with."""
    return f": {' '.join(text[:300].split())}" if text.strip() else ""


class Adapter:
    """An OpenAI-compatible server about which nothing more is known. Methods raise ServerError; they are synchronous."""

    kind = "openai"
    cache_block = 1  # tokens: a prefix hit is a multiple of it
    can_reset = False
    can_tokenize = False

    def __init__(self, base_url, timeout_s=60.0):
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        # Direct: a proxy from the environment must never see requests to a local server. Built once: it loads the CA certificates, 40 ms.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.name = None

    def request(self, path, body=None, method=None, timeout_s=None):
        """(status, text) of one request; `body` is sent as JSON. A status of 400 and more is returned, not raised."""
        data = None if body is None else json.dumps(body).encode()
        req = urllib.request.Request(self.base_url + path, data=data, method=method or ("POST" if data is not None else "GET"))
        req.add_header("Content-Type", "application/json")
        try:
            try:
                r = self.opener.open(req, timeout=timeout_s or self.timeout_s)
            except urllib.error.HTTPError as e:
                r = e
            with r:
                return r.status, r.read().decode("utf-8", "replace")
        except (OSError, ValueError, http.client.HTTPException) as e:
            raise ServerError(f"{req.get_method()} {self.base_url + path}: {' '.join(str(getattr(e, 'reason', e)).split())}") from e

    def json(self, path, body=None, method=None, timeout_s=None):
        """Parsed JSON of a request that must answer 200."""
        status, text = self.request(path, body, method, timeout_s)
        if status != 200:
            raise ServerError(f"{self.base_url + path} answered {status}, expected 200{excerpt(text)}")
        try:
            return json.loads(text)
        except ValueError as e:
            raise ServerError(f"{self.base_url + path} answered no JSON{excerpt(text)}") from e

    def wait_ready(self, timeout_s, alive=None):
        """Wait until the server lists a model. `alive()` may end the wait early by returning False (its process has died)."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                self.model(timeout_s=min(max(timeout_s, 1), 5))
                return
            except ServerError as e:
                error = e
            if alive is not None and not alive():
                raise ServerError(f"the process of the server at {self.base_url} ended before it was ready")
            if time.monotonic() > end:
                if isinstance(error.__cause__, urllib.error.URLError) and isinstance(error.__cause__.reason, ConnectionRefusedError):
                    raise ServerError(f"no server at {self.base_url} after {timeout_s:.0f} s ({error}); start it with: bash 02_serve_vllm.sh")
                raise ServerError(
                    f"what listens at {self.base_url} is no model server, or none that is ready ({error}): wait for it, stop it, or choose another PORT"
                )
            time.sleep(0.25)

    def check(self, model):
        """Raises ValueError when the server is of another kind, or serves another model."""
        for kind, path, key in (("vllm", "/version", '"version"'), ("llamacpp", "/props", '"build_info"')):
            status, text = self.request(path, timeout_s=10)
            if status == 200 and key in text and self.kind not in ("openai", kind):
                raise ValueError(f"the server at {self.base_url} is of kind {kind}, the settings say SERVER_KIND={self.kind}")
        if self.kind != "openai" and self.served() != model:  # what others serve has the name that they gave it
            raise ValueError(f"the server at {self.base_url} serves {self.served()}, the settings say SERVED_MODEL={model}")

    def model(self, timeout_s=None):
        """(served model name, context in tokens or None)."""
        listed = self.json("/v1/models", timeout_s=timeout_s)
        try:
            first = listed["data"][0]
            return first["id"], first.get("max_model_len") or (first.get("meta") or {}).get("n_ctx")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ServerError(f"{self.base_url}/v1/models lists no model") from None

    def served(self):
        """Name of the served model, asked for once."""
        self.name = self.name or self.model()[0]
        return self.name

    def version(self):
        """Version text, None where the server does not tell."""
        return None

    def reset_cache(self):
        """Empty the prefix cache."""
        raise ServerError(f"a server of kind '{self.kind}' has no cache reset; start prompts with a fresh random text instead")

    def tokenize(self, text):
        """Token ids of a text, special tokens recognised, none added."""
        raise ServerError(f"a server of kind '{self.kind}' has no tokenizer endpoint")

    def chat_ids(self, messages):
        """Token ids of a chat's prompt, template included."""
        raise ServerError(f"a server of kind '{self.kind}' has no tokenizer endpoint")

    def chat_tokens(self, messages):
        """Number of prompt tokens of a chat, template included."""
        return len(self.chat_ids(messages))

    def exact_output(self, n):
        """Body fields that make the server generate exactly n tokens (here: at most; check usage.completion_tokens)."""
        return {"max_tokens": n}

    def only_tokens(self, ids):
        """Body fields that let the server sample from these token ids only."""
        raise ServerError(f"a server of kind '{self.kind}' cannot be held to some tokens")

    def idle(self):
        """True when no request runs, False when one does, None when the server does not tell."""
        return None

    def probe_cached_tokens(self):
        """What the server reports for a repeated prompt: a number of tokens, 0, or None when it reports nothing."""
        name, _ = self.model()
        text = f"probe {time.time_ns()}: " + "one two three four five six seven eight nine ten " * 16
        body = {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        self.json("/v1/chat/completions", body, timeout_s=600)
        details = self.json("/v1/chat/completions", body, timeout_s=600).get("usage", {}).get("prompt_tokens_details") or {}
        return details.get("cached_tokens")


class LlamaCpp(Adapter):
    kind = "llamacpp"
    can_reset = True
    can_tokenize = True

    def version(self):
        info = self.json("/props").get("build_info")
        return f"llama.cpp {info}" if info else None

    def reset_cache(self):
        for slot in self.json("/slots"):
            status, text = self.request(f"/slots/{slot['id']}?action=erase", body={})
            if status == 501:
                raise ServerError(f"slot {slot['id']} cannot be erased: the server runs without --slot-save-path")
            if status != 200:
                raise ServerError(f"erasing slot {slot['id']} answered {status}: {text[:300]}")

    def tokenize(self, text):
        return self.json("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def chat_ids(self, messages):
        prompt = self.json("/apply-template", {"messages": messages})["prompt"]
        return self.json("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]

    def exact_output(self, n):
        return {"max_tokens": n, "ignore_eos": True}

    def idle(self):
        return not any(s.get("is_processing") for s in self.json("/slots"))


class Vllm(Adapter):
    kind = "vllm"
    can_reset = True
    can_tokenize = True

    @functools.cached_property
    def cache_block(self):
        """Tokens of a block as the server's metrics tell; 16, the default on CUDA, where they do not (on a CPU it is 128)."""
        told = re.search(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)"', self.request("/metrics")[1], re.MULTILINE)
        return int(told[1]) if told else 16

    def version(self):
        return f"vLLM {self.json('/version')['version']}"

    def reset_cache(self):
        end = time.monotonic() + 30
        while True:
            status, text = self.request("/reset_prefix_cache", body={})
            if status == 404:
                raise ServerError("/reset_prefix_cache answered 404: start vLLM with VLLM_SERVER_DEV_MODE=1")
            if status != 200:
                raise ServerError(f"/reset_prefix_cache answered {status}: {text[:300]}")
            # Since 0.26 a refusal (blocks are held) is a 200 with success: false; before, the body was empty.
            if '"success":false' not in text.replace(" ", ""):
                return
            if time.monotonic() > end:
                raise ServerError('/reset_prefix_cache still answers {"success": false} after 30 s: a request holds blocks of the cache')
            time.sleep(0.2)

    def tokenize(self, text):
        return self.json("/tokenize", {"model": self.served(), "prompt": text, "add_special_tokens": False})["tokens"]

    def chat_ids(self, messages):
        return self.json("/tokenize", {"model": self.served(), "messages": messages, "add_generation_prompt": True})["tokens"]

    def exact_output(self, n):
        return {"max_tokens": n, "min_tokens": n, "ignore_eos": True}

    def only_tokens(self, ids):
        # A mask that is made once a request, at most 1024 ids: nothing of it depends on what was sampled, so decoding waits for nothing.
        return {"allowed_token_ids": ids}

    def idle(self):
        running = [
            float(line.rsplit(" ", 1)[1])
            for line in self.request("/metrics")[1].splitlines()
            if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
        ]
        return None if not running else sum(running) == 0


KINDS = {c.kind: c for c in (Vllm, LlamaCpp, Adapter)}


def get(kind, base_url, timeout_s=60.0):
    """Adapter of a server kind. Raises ValueError on a kind that nobody knows."""
    if kind not in KINDS:
        raise ValueError(f"server kind '{kind}' is unknown; expected one of {', '.join(KINDS)}")
    return KINDS[kind](base_url, timeout_s)


def seconds(text):
    """A time, for argparse."""
    return parsed(float, text, lambda s: 0 <= s < 1e9, "seconds, 0 or more")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["wait", "model", "version", "reset", "probe", "idle"])
    p.add_argument("--kind", required=True, choices=list(KINDS))
    p.add_argument("--url", required=True, help="root of the server, without /v1")
    p.add_argument("--timeout", type=seconds, default=60.0, help="seconds to wait (for `wait`)")
    p.add_argument("--model", help="`wait` refuses a server of another kind or model")
    a = p.parse_args()
    server = get(a.kind, a.url)
    try:
        if a.what == "wait":
            server.wait_ready(a.timeout)
            if a.model:
                server.check(a.model)
        elif a.what == "model":
            print(*(x if x is not None else "-" for x in server.model()))
        elif a.what == "version":
            print(server.version() or "-")
        elif a.what == "reset":
            server.reset_cache()
        elif a.what == "idle":
            print({True: "idle", False: "busy", None: "unknown"}[server.idle()])
        else:
            cached = server.probe_cached_tokens()
            print("not reported" if cached is None else cached)
    except (ServerError, KeyError) as e:
        print(f"adapter: {e}", file=sys.stderr)
        sys.exit(1)
    except ValueError as e:
        print(f"adapter: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
