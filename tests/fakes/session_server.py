"""A scripted LLM server with named sessions, as ExecuTorch's speaks it, that can also misbehave.

    python -m tests.fakes.session_server --port 8000 --host 127.0.0.1 --model-id m --max-context 2048 [any other option]

Endpoints: /health, /v1/models, POST /v1/chat/completions, DELETE /v1/sessions/{id}, and GET /events with everything that came, in order.
A turn is logged to standard error as ExecuTorch does, after the answer. FAULTS (environment, JSON) makes it misbehave:
  exit N              end at once with this code            never_ready true    /health says 503 for ever
  answer "..."|{...}  body of every completion              status N            status of every completion
  capacity N          sessions; one more is a 429           delete [503, ...]   statuses of the first DELETEs; delete_always N of all
  dead_after N        after N turns /health says 503        die_after N         after N turns the process ends
  foreign "id"        one turn of somebody else is logged   silent true         no turn lines
  torn true           the last turn's line has no end       cut true            and lacks its last fields
  no_sessions true    DELETE is unknown                     commands [...]      what the agent is told to run, turn by turn
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = json.loads(os.environ.get("FAULTS") or "{}")
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class State:
    lock = threading.Lock()
    events, open, turns, deletes = [], set(), 0, 0
    count = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, obj):
        data = obj.encode() if isinstance(obj, str) else json.dumps(obj).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def do_GET(self):
        if self.path == "/health":
            dead = FAULTS.get("never_ready") or ("dead_after" in FAULTS and State.turns >= FAULTS["dead_after"])
            return self.send(503, {"status": "unavailable"}) if dead else self.send(200, {"status": "ok"})
        if self.path == "/v1/models":
            return self.send(200, {"object": "list", "data": [{"id": ARGS.model_id, "object": "model"}]})
        if self.path == "/version":
            return self.send(200, {"version": "0.0.scripted"})
        if self.path == "/events":
            return self.send(200, State.events)
        return self.send(404, {"error": {"message": "no such path", "type": "not_found", "code": None}})

    def do_DELETE(self):
        session = self.path.rpartition("/")[2]
        if FAULTS.get("no_sessions"):
            return self.send(404, {"error": {"message": "no such path", "type": "not_found", "code": None}})
        status = 200
        if session != "trajoule-preflight":
            with State.lock:
                State.deletes += 1
                planned = FAULTS.get("delete", [])
                status = FAULTS.get("delete_always") or (planned[State.deletes - 1] if State.deletes <= len(planned) else 200)
                if status == 200:
                    State.open.discard(session)
                State.events.append(["delete", session, status])
        return self.send(status, {"closed": True, "session_id": session} if status == 200 else {"error": {"message": "not now"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if body.get("model") != ARGS.model_id:
            return self.send(404, {"error": {"message": f"no model {body.get('model')}", "type": "x", "code": "model_not_found"}})
        if "status" in FAULTS:
            return self.send(FAULTS["status"], {"error": {"message": "scripted"}})
        if "answer" in FAULTS:
            return self.send(200, FAULTS["answer"])
        session = self.headers.get("x-session-affinity")
        with State.lock:
            State.events.append(["chat", session])
            if session and session not in State.open:
                if len(State.open) >= FAULTS.get("capacity", 1000):
                    return self.send(429, {"error": {"message": "no free slot", "type": "capacity", "code": "capacity_exhausted"}})
                State.open.add(session)
            turn = State.count[session] = State.count.get(session, -1) + 1
        prompt = sum(len(str(m.get("content"))) for m in body["messages"]) // 4 + 1
        commands = FAULTS.get("commands", []) + [DONE]
        arguments = json.dumps({"command": commands[min(turn, len(commands) - 1)]})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        message = {"role": "assistant", "content": "I go on."} | ({"tool_calls": [call]} if body.get("tools") else {})
        usage = {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}
        usage["prompt_tokens_details"] = {"cached_tokens": 1 if turn else 0}
        self.send(200, {
            "id": "c", "object": "chat.completion", "created": int(time.time()), "model": ARGS.model_id, "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if body.get("tools") else "stop"}],
        })  # fmt: skip
        with State.lock:
            State.turns += 1
            self.log_turn(session, prompt, 1 if turn else 0)
            if State.turns >= FAULTS.get("die_after", 1 << 30):
                os._exit(7)

    def log_turn(self, session, prompt, reused):
        if FAULTS.get("silent"):
            return
        end = "" if FAULTS.get("torn") and State.turns > 1 else "\n"

        def line(name):
            return (
                f"INFO llm_turn_stats session_id={name or '<scratch>'} reason=new prompt_tokens={prompt} reused_prompt_tokens={reused} "
                f"prefilled_prompt_tokens={prompt - reused} completion_tokens=4 prefill_ms=10.5 prefill_tok_s=9 decode_ms=2.25 decode_tok_s=9 total_ms=13"
            )

        tail = "" if FAULTS.get("cut") and State.turns > 1 else " finish=stop"
        sys.stderr.write(line(session) + tail + end)
        if FAULTS.get("foreign") and State.turns > 1:
            sys.stderr.write(line(FAULTS["foreign"]) + " finish=stop\n")
        sys.stderr.flush()


p = argparse.ArgumentParser()
for name, kind in (("host", str), ("port", int), ("model-id", str), ("max-context", int)):
    p.add_argument(f"--{name}", type=kind, required=True)
ARGS, OTHERS = p.parse_known_args()
if __name__ == "__main__":
    if "exit" in FAULTS:
        print("scripted: no worker binary", file=sys.stderr)
        sys.exit(FAULTS["exit"])
    server = ThreadingHTTPServer((ARGS.host, ARGS.port), Handler)
    server.daemon_threads = True
    print("options:", *OTHERS, flush=True)
    server.serve_forever()
