#!/usr/bin/env python3
"""A model worker for ExecuTorch's LLM server, in Python: the runtime of the executorch wheel behind the server's JSON lines.

    python -m executorch.examples.llm_server.python.server --worker-bin evals/executorch/worker.py --model-path smollm2.pte \\
        --tokenizer-path models/smollm2-hf/tokenizer.json --hf-tokenizer ./models/smollm2-hf --model-id smollm2 --max-context 2048

ExecuTorch's own workers are C++ programs that a user builds; this one needs no compiler. It loads a .pte of export_llama.py once per session,
each with a KV cache of its own: WORKER_SESSIONS (default 2) named ones and one without a name. What a prompt has in common with what its
session holds is not computed again. Decoding is greedy; stop strings are the server's business. `python3` must be one that has executorch and
tokenizers: put its folder first in PATH.
"""

import argparse
import json
import os
import sys
import time

CHUNK = 256  # tokens of one call; export_llama.py allows no more


class Session:
    def __init__(self, program):
        self.method = program.load_method("forward")
        self.held = []  # tokens whose keys and values are in the cache

    def feed(self, tokens):
        """Append tokens and return the most likely next one."""
        import torch

        logits = None
        for i in range(0, len(tokens), CHUNK):
            part = tokens[i : i + CHUNK]
            logits = self.method.execute((torch.tensor([part]), torch.tensor([len(self.held)])))[0]
            self.held += part
        return int(logits[0].argmax())

    def resume(self, prompt):
        """Keep what the prompt and the cache have in common, at most all but one token; returns (kept, why)."""
        n = next((i for i, (a, b) in enumerate(zip(prompt, self.held, strict=False)) if a != b), min(len(prompt), len(self.held)))
        why = "new" if not self.held else "exact_prefix" if n == len(self.held) else "mismatch"
        n = min(n, len(prompt) - 1)
        self.held = self.held[:n]
        return n, why


class Worker:
    def __init__(self, model, tokenizer, named):
        from executorch.runtime import Runtime
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(tokenizer)
        self.ends = {i for t in ("<|im_end|>", "<|endoftext|>", "</s>") if (i := self.tokenizer.token_to_id(t)) is not None}
        self.program = Runtime.get().load_program(model)
        self.named, self.sessions, self.free = named, {None: Session(self.program)}, []

    def open(self, name):
        """The session of a name, None when all are taken. A session that was closed lends its memory to the next one."""
        if name not in self.sessions:
            if len(self.sessions) - 1 >= self.named:
                return None
            self.sessions[name] = self.free.pop() if self.free else Session(self.program)
        return self.sessions[name]

    def close(self, name):
        if name in self.sessions and name is not None:
            session = self.sessions.pop(name)
            session.held = []
            self.free.append(session)

    def generate(self, request, say):
        session = self.open(request.get("session_id") or None)
        if session is None:
            return say({"error": f"all {self.named} sessions are in use", "code": "capacity_exhausted"})
        segments = request.get("prompt_segments") or [{"text": request.get("prompt") or ""}]
        prompt = [i for s in segments for i in (s["ids"] if "ids" in s else self.tokenizer.encode(s["text"], add_special_tokens=False).ids)]
        if not prompt:
            return say({"error": "the prompt is empty"})
        t0 = time.monotonic()
        kept, why = session.resume(prompt)
        token = session.feed(prompt[kept:])
        t1 = time.monotonic()
        limit = request.get("max_new_tokens", -1)
        made, text, finish = [], "", "length"
        while limit < 0 or len(made) < limit:
            if token in self.ends:
                finish = "stop"
                break
            made.append(token)
            whole = self.tokenizer.decode(made, skip_special_tokens=False)
            if not whole.endswith("\ufffd"):  # a character may have several tokens
                say({"token": whole[len(text) :]})
                text = whole
                if any(s in text for s in request.get("stop") or []):
                    finish = "stop"
                    break
            token = session.feed([token])
        t2 = time.monotonic()
        prefilled, seconds = len(prompt) - kept, (max(t1 - t0, 1e-9), max(t2 - t1, 1e-9))
        say({
            "done": True, "prompt_tokens": len(prompt), "completion_tokens": len(made), "finish_reason": finish, "reused_prompt_tokens": kept,
            "prefilled_prompt_tokens": prefilled, "session_reset_reason": why, "prefill_ms": seconds[0] * 1e3, "decode_ms": seconds[1] * 1e3,
            "total_ms": sum(seconds) * 1e3, "prefill_tok_s": prefilled / seconds[0], "decode_tok_s": len(made) / seconds[1],
            "generated_token_ids": made,
        })  # fmt: skip

    def serve(self, request, say):
        op, name = request.get("op"), request.get("session_id")
        if op is None:
            return self.generate(request, say)
        if op == "open" and self.open(name) is None:
            return say({"error": f"all {self.named} sessions are in use", "code": "capacity_exhausted"})
        if op == "close":
            self.close(name)
        elif op == "reset" and name in self.sessions:
            self.sessions[name].held = []
        done = {"open": "opened", "close": "closed", "reset": "reset"}.get(op)
        return say({done: True} if done else {"error": f"unknown op {op!r}"})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model_path", required=True)
    p.add_argument("--tokenizer_path", required=True)
    a = p.parse_args()
    lines = os.fdopen(os.dup(1), "w", buffering=1)  # protocol only; whatever libraries print goes to standard error
    os.dup2(2, 1)

    def say(obj):
        lines.write(json.dumps(obj) + "\n")

    worker = Worker(a.model_path, a.tokenizer_path, int(os.environ.get("WORKER_SESSIONS") or 2))
    say({"ready": True, "max_named_sessions": worker.named})
    for line in sys.stdin:
        try:
            worker.serve(json.loads(line), say)
        except Exception as e:  # one bad request must not take the sessions of the others along
            print(f"worker: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            say({"error": f"{type(e).__name__}: {e}"})


if __name__ == "__main__":
    main()
