"""servers/adapter.py: what each server kind answers, against a small server that can misbehave, and against llama.cpp."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from fakes.model_server import ModelServer

from servers import adapter
from servers.adapter import ServerError

CHAT = [{"role": "user", "content": "one two three"}]


@pytest.fixture
def raw_server():
    """A function: a server that sends the given bytes to whoever connects; returns its URL."""
    servers = []

    def start(data):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=s.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(s)
        return f"http://127.0.0.1:{s.server_port}"

    yield start
    for s in servers:
        s.shutdown()
        s.server_close()


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'tgi' is unknown; expected one of vllm, llamacpp, openai"):
        adapter.get("tgi", "http://127.0.0.1:1")


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_tokens_of_text_and_chat(kind):
    with ModelServer(kind) as s:
        a = adapter.get(kind, s.url + "/v1/")
        assert a.model() == ("words", 4096)
        assert len(a.tokenize(" one two three")) == 3
        assert a.chat_tokens(CHAT) == 7
        assert a.idle() is True
        s.running = 1
        assert a.idle() is False


def test_exact_output_per_kind():
    def body(kind):
        return adapter.get(kind, "http://127.0.0.1:1").exact_output(5)

    assert body("vllm") == {"max_tokens": 5, "min_tokens": 5, "ignore_eos": True}
    assert body("llamacpp") == {"max_tokens": 5, "ignore_eos": True}
    assert body("openai") == {"max_tokens": 5}


def test_a_server_that_nobody_knows_says_what_it_cannot_do():
    with ModelServer("openai") as s:
        a = adapter.get("openai", s.url)
        assert a.idle() is None and a.version() is None and not a.can_reset and not a.can_tokenize
        for ask in (a.reset_cache, lambda: a.tokenize("x"), lambda: a.chat_tokens(CHAT)):
            with pytest.raises(ServerError, match="kind 'openai'"):
                ask()


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_reset_and_probe(kind):
    with ModelServer(kind) as s:
        a = adapter.get(kind, s.url)
        assert a.probe_cached_tokens() > 100
        a.reset_cache()
        assert s.resets == 1 and not s.cache
        s.faults["details"] = "none"
        assert a.probe_cached_tokens() is None, "not reported is not 0"


def test_a_missing_reset_route_says_how_to_get_it():
    with ModelServer("vllm", reset="404") as s, pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        adapter.get("vllm", s.url).reset_cache()
    with ModelServer("llamacpp", reset="404") as s, pytest.raises(ServerError, match="--slot-save-path"):
        adapter.get("llamacpp", s.url).reset_cache()


def test_a_refused_reset_is_asked_again_until_the_blocks_are_free():
    with ModelServer("vllm", reset="refuse") as s:
        a = adapter.get("vllm", s.url)
        done = threading.Thread(target=a.reset_cache)
        done.start()
        while s.resets < 2:
            time.sleep(0.01)
        s.faults.clear()
        done.join(30)
        assert not done.is_alive() and s.resets > 2


def test_a_reset_refused_for_good_is_an_error(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(adapter.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(adapter.time, "sleep", lambda _: None)
    with ModelServer("vllm", reset="refuse") as s, pytest.raises(ServerError, match="a request holds blocks"):
        adapter.get("vllm", s.url).reset_cache()


def test_block_size_comes_from_the_server():
    with ModelServer("vllm", block=32) as s:
        assert adapter.get("vllm", s.url).cache_block == 32
        s.tells_block = False
        assert adapter.get("vllm", s.url).cache_block == 16
    assert adapter.get("llamacpp", s.url).cache_block == 1


@pytest.mark.parametrize("data", [
    b"",
    b"nonsense\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html>hi>",
    b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno",
    b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data": []}',
])
def test_whatever_comes_back_is_a_server_error(raw_server, data):
    with pytest.raises(ServerError):
        adapter.get("vllm", raw_server(data)).model()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\n<p>\nno\n\n", r"/v1/models answered 404, expected 200: <p> no\)"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", r"/v1/models answered 404, expected 200\)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", r"/v1/models answered no JSON: <html>\)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", r"/v1/models lists no model\)"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\ntorn", r"GET http://.*/v1/models: IncompleteRead"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", r"GET http://.*/v1/models: SSH"),
    ],
)
def test_what_answers_but_is_no_model_server_is_named(raw_server, data, says):
    url = raw_server(data)
    with pytest.raises(ServerError, match=f"what listens at {url} is no model server, or none that is ready .*{says}.*: wait for it, stop it, or ch"):
        adapter.get("vllm", url).wait_ready(0)


def test_what_never_answers_is_named(repo):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        script = "source common.sh; eval \"$(declare -f need_server | sed 's/--timeout 10/--timeout 0/')\"; need_server"
        r = subprocess.run(["bash", "-c", script], cwd=repo, env=os.environ | {"PORT": str(port)}, capture_output=True, text=True, timeout=60)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1
    assert f"ERROR: what listens at http://127.0.0.1:{port} is no model server, or none that is ready (GET http" in r.stderr and "timed out)" in r.stderr


def test_nobody_there(free_port):
    a = adapter.get("llamacpp", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServerError, match="GET http://127.0.0.1"):
        a.model()
    t0 = time.monotonic()
    with pytest.raises(ServerError, match="no server at .* after 0 s"):
        a.wait_ready(0.3)
    with pytest.raises(ServerError, match="ended before it was ready"):
        a.wait_ready(60, alive=lambda: False)
    assert time.monotonic() - t0 < 30


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with ModelServer("vllm") as s:
        assert adapter.get("vllm", s.url).model()[0] == "words"


def test_many_requests_cost_little():
    with ModelServer("vllm") as s:
        a = adapter.get("vllm", s.url)
        t0 = time.process_time()
        for _ in range(50):
            a.tokenize(" one two")
        assert (time.process_time() - t0) / 50 < 0.02, "CPU seconds per request, client and server together"


def test_command_line(repo, free_port):
    def run(*args):
        r = subprocess.run([sys.executable, str(repo / "servers" / "adapter.py"), *args], capture_output=True, text=True, timeout=30)
        return r.returncode, r.stdout.strip(), r.stderr.strip()

    with ModelServer("vllm") as s:
        assert run("model", "--kind", "vllm", "--url", s.url) == (0, "words 4096", "")
        assert run("idle", "--kind", "vllm", "--url", s.url)[:2] == (0, "idle")
        assert run("reset", "--kind", "vllm", "--url", s.url)[0] == 0
        assert int(run("probe", "--kind", "vllm", "--url", s.url)[1]) > 100
    code, _, err = run("model", "--kind", "vllm", "--url", f"http://127.0.0.1:{free_port()}")
    assert code == 1 and err.startswith("adapter: ") and len(err.splitlines()) == 1
    assert run("model", "--kind", "tgi", "--url", "http://x")[0] == 2


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e300", "soon", ""])
def test_a_time_that_cannot_be_meant_is_one_line(monkeypatch, capsys, text):
    monkeypatch.setattr(sys, "argv", ["adapter.py", "wait", "--kind", "vllm", "--url", "http://127.0.0.1:1", f"--timeout={text}"])
    with pytest.raises(SystemExit) as end:
        adapter.main()
    assert end.value.code == 2 and f"argument --timeout: found {text!r}, expected seconds" in capsys.readouterr().err.splitlines()[-1]


# ---- llama.cpp ----


@pytest.fixture(scope="module")
def llamacpp(llamacpp_server):
    return adapter.get("llamacpp", llamacpp_server)


def usage(a, messages, **more):
    out = a.json("/v1/chat/completions", {"model": "smollm2", "messages": messages, "temperature": 0, **more}, timeout_s=200)["usage"]
    return out["prompt_tokens"], out["prompt_tokens_details"]["cached_tokens"], out["completion_tokens"]


@pytest.mark.integration
def test_llamacpp_model(llamacpp):
    assert llamacpp.model() == ("smollm2", 512)
    assert llamacpp.version().startswith("llama.cpp ")


@pytest.mark.integration
@pytest.mark.parametrize("messages", [
    CHAT,
    [{"role": "system", "content": "Short."}, *CHAT],
    [*CHAT, {"role": "assistant", "content": "four"}, {"role": "user", "content": "more ½ 世界 <|im_end|> \n\n x"}],
])
def test_llamacpp_counts_what_the_server_counts(llamacpp, messages):
    assert llamacpp.chat_tokens(messages) == usage(llamacpp, messages, max_tokens=1)[0]


@pytest.mark.integration
def test_llamacpp_reset_empties_every_slot(llamacpp):
    llamacpp.reset_cache()
    # llama.cpp puts a prompt that begins like a slot's into that slot: these two begin differently, so each has its own.
    chats = [[{"role": "system", "content": w * 60}, *CHAT] for w in (" alpha", " omega")]
    for chat in chats:
        usage(llamacpp, chat, max_tokens=1)
    for chat in chats:
        assert usage(llamacpp, chat, max_tokens=1)[1] == llamacpp.chat_tokens(chat) - 1
    for chat in chats:
        llamacpp.reset_cache()
        assert usage(llamacpp, chat, max_tokens=1)[1] == 0


@pytest.mark.integration
@pytest.mark.parametrize("n", [1, 7, 33])
def test_llamacpp_output_is_exact(llamacpp, n):
    assert usage(llamacpp, [{"role": "user", "content": "Say yes."}], **llamacpp.exact_output(n))[2] == n


@pytest.mark.integration
def test_llamacpp_idle(llamacpp):
    assert llamacpp.idle() is True
    t = threading.Thread(target=usage, args=(llamacpp, CHAT), kwargs=llamacpp.exact_output(96))
    t.start()
    while llamacpp.idle():
        assert t.is_alive(), "a running request was never seen"
    t.join()
    end = time.monotonic() + 30  # the slot is given back a moment after the answer
    while not llamacpp.idle():
        assert time.monotonic() < end


@pytest.mark.integration
def test_llamacpp_says_when_a_prompt_is_too_long(llamacpp):
    with pytest.raises(ServerError, match="answered 400"):
        usage(llamacpp, [{"role": "user", "content": "word " * 600}], max_tokens=1)
