"""What the proxy does to bytes (nothing) and what it writes down (everything), as facts. The server is tests/fakes/openai_server.py."""

import asyncio
import contextlib
import gzip
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from fakes.openai_server import running

import llm_proxy
from llm_proxy import CallKeys, Events, JsonLines, Recorder, Replay, ReplayError, Reply, kind_of, load_recording, usage_counts

CHAT = "/v1/chat/completions"


class Running:
    """A proxy that runs in a thread: its port, its log, and small clients."""

    def __init__(self, proxy, path, port, loop=None):
        self.proxy, self.path, self.port, self.loop = proxy, path, port, loop

    def records(self, n=None, timeout_s=30):
        """Records so far, in order of writing; waits until there are n. A line that is just being written is none yet."""
        end = time.monotonic() + timeout_s
        while True:
            lines = [json.loads(x) for x in self.path.read_text().split("\n")[:-1]]
            if n is None or len(lines) >= n or time.monotonic() > end:
                assert n is None or len(lines) == n
                return lines
            time.sleep(0.01)

    def post(self, body, headers=None, path=CHAT, raw=None):
        """(status, headers, bytes) of one POST."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = raw if raw is not None else json.dumps(body).encode()
        c.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
        r = c.getresponse()
        out = r.status, r.headers, r.read()
        c.close()
        return out

    def chat(self, messages, session="s", **fields):
        status, _, data = self.post({"model": "m", "messages": messages, **fields}, {"X-Session-ID": session} if session else None)
        return status, json.loads(data)

    def open(self, body, headers=""):
        """A raw socket with the request sent."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        data = json.dumps(body).encode()
        s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data)
        return s


@pytest.fixture
def proxied(tmp_path):
    """Function (upstream URL, **arguments of Proxy) -> Running."""
    with contextlib.ExitStack() as stack:

        def start(url, **kw):
            path = tmp_path / f"calls{len(os.listdir(tmp_path))}.jsonl"
            log, sock = JsonLines(path), llm_proxy.bind("127.0.0.1", 0)
            loop, ready, box = asyncio.new_event_loop(), threading.Event(), {}

            async def work():
                box["stop"] = asyncio.Event()
                box["proxy"] = llm_proxy.Proxy(url, log, **kw)
                async with llm_proxy.serving(box["proxy"], sock):
                    ready.set()
                    await box["stop"].wait()

            thread = threading.Thread(target=lambda: loop.run_until_complete(work()), daemon=True)
            thread.start()
            assert ready.wait(10)

            def end():
                loop.call_soon_threadsafe(box["stop"].set)
                thread.join(10)
                assert not thread.is_alive()
                log.close()

            stack.callback(end)
            return Running(box["proxy"], path, sock.getsockname()[1], loop)

        yield start


def sse(*objects, end=b"data: [DONE]\n\n"):
    return b"".join(b"data: " + json.dumps(o, ensure_ascii=False).encode() + b"\n\n" for o in objects) + end


def delta(text=None, finish=None, **more):
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}], **more}


USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
USER = [{"role": "user", "content": "hi"}]


def pieces(*parts):
    """A script whose stream sends exactly these byte strings, with a pause between them."""
    return [{"raw": "", "_stream": {"pieces": [p.decode("latin-1") for p in parts], "delay": 0.01}}]


# --- rules without a network


@pytest.mark.parametrize("text, session, kind", [
    ("You are about to hand off your work to another AI agent. …", "s", "summary"),
    ("You are picking up work from a previous AI agent on this task: …", "s", "questions"),
    ("The next agent has a few questions for you, …", "s", "answers"),
    ("Briefly continue this task: …", "s", "short_summary"),
    ("Here are the answers the other agent provided.", "s", "agent"),
    ("anything", "s", "agent"),
    ("anything", None, "other"),
    ([{"type": "text", "text": "You are about to hand off your work"}], "s", "summary"),
])
def test_kind_of_a_call(text, session, kind):
    before = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "x"}]
    assert kind_of([*before, {"role": "user", "content": text}], session) == kind


@pytest.mark.parametrize("details, cached", [
    ({"prompt_tokens_details": None}, None), ({"prompt_tokens_details": {"cached_tokens": None}}, None), ({}, None),
    ({"prompt_tokens_details": {}}, None), ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
    ({"prompt_tokens_details": {"cached_tokens": 42}}, 42),
])
def test_cached_tokens_has_three_states(details, cached):
    assert usage_counts({"prompt_tokens": 50, "completion_tokens": 0, **details}) == {
        "prompt_tokens": 50, "cached_tokens": cached, "completion_tokens": 0}


def test_usage_of_other_apis():
    responses = {"input_tokens": 7, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
    assert usage_counts(responses) == {"prompt_tokens": 7, "cached_tokens": 4, "completion_tokens": 3}
    anthropic = {"input_tokens": 7, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 1}
    assert usage_counts(anthropic) == {"prompt_tokens": 127, "cached_tokens": 100, "completion_tokens": 1}


def test_prompt_tokens_have_the_cached_ones_in_them_whatever_else_is_told():
    both = {"prompt_tokens": 120, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 100}, "cache_read_input_tokens": 100}
    assert usage_counts(both) == {"prompt_tokens": 120, "cached_tokens": 100, "completion_tokens": 1}


def test_events_do_not_depend_on_where_chunks_end():
    stream = "data: {\"a\": \"héé\"}\n\n: comment\r\n\r\nevent: x\r\ndata: 1\r\ndata: 2\r\n\r\ndata: tail".encode()
    want = [b'{"a": "h\xc3\xa9\xc3\xa9"}', None, b"1\n2", b"tail"]
    for size in range(1, len(stream) + 1):
        events, seen, raw = Events(), [], b""
        for i in range(0, len(stream), size):
            for r, d in events.feed(stream[i:i + size]):
                raw, seen = raw + r, [*seen, d]
        r, d = events.rest()
        assert [*seen, d] == want and raw + r == stream, size


def test_a_line_of_10_mb_in_small_chunks_costs_linear_time():
    events, chunk = Events(), b"x" * 1000
    t = time.thread_time()
    events.feed(b"data: ")
    for _ in range(10_000):
        events.feed(chunk)
    assert len(events.feed(b"\n\n")[0][1]) == 10_000_000
    assert time.thread_time() - t < 2  # quadratic, it would copy 50 GB


def test_keys_inside_text_are_not_taken_for_usage_or_finish():
    r = Reply()
    r.take_event(json.dumps(delta('{"usage": {"prompt_tokens": 9}, "finish_reason": "stop", "error": {"message": "x"}}')).encode())
    assert r.usage["prompt_tokens"] is None and r.finish_reason is None and r.error is None


def test_later_null_usage_does_not_wipe_a_number():
    r = Reply()
    r.take({"usage": USAGE})
    r.take({"usage": {"prompt_tokens": None, "completion_tokens": 5, "prompt_tokens_details": None}})
    assert r.usage == {"prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 5}


@pytest.mark.parametrize("later, prompt, cached", [
    ({"output_tokens": 5}, 24, 16),
    ({"input_tokens": 3, "output_tokens": 5}, 19, 16),  # input_tokens leave the cached ones out, here as there
    ({"input_tokens": 8, "cache_read_input_tokens": None, "output_tokens": 5}, 24, 16),
    ({"input_tokens": 4, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 2, "output_tokens": 5}, 38, 32),
])
def test_prompt_of_an_anthropic_stream_stays_the_sum_of_its_parts(later, prompt, cached):
    r = Reply()
    r.take({"type": "message_start", "message": {"usage": {"input_tokens": 8, "cache_read_input_tokens": 16, "output_tokens": 1}}})
    r.take({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": later})
    assert r.usage == {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": 5}


@pytest.mark.parametrize("obj", [
    [], 1, None, {"usage": []}, {"usage": {"prompt_tokens": "9", "prompt_tokens_details": "x"}}, {"choices": [None, 1]},
    {"choices": {"a": 1}}, {"choices": [{"message": "text", "finish_reason": 1}]},
    {"usage": {"prompt_tokens": True, "completion_tokens": 1.5}},
    {"error": 1}, {"response": {"usage": 3}}, {"delta": []}, {"message": {"usage": None}},
])
def test_odd_replies_are_survived(obj):
    r = Reply(keep_text=True)
    r.take(obj)
    r.take_event(json.dumps(obj).encode())
    assert r.usage == {"prompt_tokens": None, "cached_tokens": None, "completion_tokens": None}


def test_call_keys_join_retries_and_part_parallel_calls():
    keys, waits, gone = CallKeys(), lambda: True, lambda: False
    a, n = keys.begin("f", waits)
    b, m = keys.begin("f", waits)
    assert a["key"] != b["key"] and (n, m) == (1, 1)  # the first client still waits: another call
    keys.end(a, False, waits)
    c, n = keys.begin("f", gone)
    assert c["key"] == a["key"] and n == 2
    d, n = keys.begin("f", waits)  # its client is gone, though the attempt has not ended yet
    assert d["key"] == a["key"] and n == 3
    keys.end(d, True, waits)
    keys.end(b, True, waits)
    e, n = keys.begin("f", waits)
    assert e["key"] not in (a["key"], b["key"]) and n == 1
    keys.end(e, True, waits)
    assert keys.open == {}


def test_keys_of_the_next_proxy_are_others():
    first = CallKeys().begin("f", lambda: True)[0]["key"]
    time.sleep(0.002)
    assert CallKeys().begin("f", lambda: True)[0]["key"] != first


# --- the log file


def test_log_cuts_a_torn_line_and_keeps_a_whole_one(tmp_path, capsys):
    f = tmp_path / "c.jsonl"
    f.write_bytes(b'{"a": 1}\n{"b": ')
    log = JsonLines(f)
    log.write({"c": None})
    log.close()
    assert f.read_bytes() == b'{"a": 1}\n{"c": null}\n'
    assert "torn last line of 6 bytes" in capsys.readouterr().err
    f.write_bytes(b'{"a": 1}\n{"b": 2}')
    log = JsonLines(f)
    log.close()
    assert f.read_bytes() == b'{"a": 1}\n{"b": 2}\n' and log.lines == 2


def test_log_of_another_proxy_is_refused(tmp_path):
    log = JsonLines(tmp_path / "c.jsonl")
    with pytest.raises(BlockingIOError):
        JsonLines(tmp_path / "c.jsonl")
    log.close()


def test_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    log, real = JsonLines(tmp_path / "c.jsonl"), os.write
    log.write({"a": 1})
    left = [5]

    def full(fd, data):
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        n = real(fd, data[:left[0]])
        left[0] -= n
        return n

    with monkeypatch.context() as m:
        m.setattr(os, "write", full)
        with pytest.raises(OSError):
            log.write({"b": 2})
    log.write({"c": 3})
    assert (tmp_path / "c.jsonl").read_text() == '{"a": 1}\n{"c": 3}\n'
    log.close()


def test_calls_go_on_when_the_log_cannot_be_written(proxied, monkeypatch, capfd):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url)
        monkeypatch.setattr(p.proxy.log, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert [p.chat(USER)[0] for _ in range(3)] == [200] * 3
        wait_for(lambda: p.proxy.counts["log_errors"] == 3)
        assert capfd.readouterr().err.count("No space left on device") == 1
        c = http.client.HTTPConnection("127.0.0.1", p.port)
        c.request("GET", "/trajoule/health")
        assert json.load(c.getresponse())["log_errors"] == 3


# --- transparency


def test_any_path_method_and_header_passes(proxied):
    with running([]) as s:
        p = proxied(s.url + "/v1")  # a trailing /v1 is forgiven
        c = http.client.HTTPConnection("127.0.0.1", p.port)
        c.putrequest("PATCH", "/echo/a%2Fb//c?q=%20x&y=%C3%BC+", skip_accept_encoding=True)
        hop = [("Connection", "keep-alive, X-Hop"), ("X-Hop", "no"), ("TE", "trailers")]
        for k, v in [("X-A", "1"), ("X-A", "2"), *hop, ("Content-Length", "3")]:
            c.putheader(k, v)
        c.endheaders(b"abc")
        r = c.getresponse()
        seen = json.load(r)
        got = [(k, v) for k, v in seen["headers"] if k != "Host"]
        assert seen["method"] == "PATCH" and seen["path"] == "/echo/a%2Fb//c?q=%20x&y=%C3%BC+" and seen["size"] == 3
        assert got == [("X-A", "1"), ("X-A", "2"), ("Content-Length", "3")]  # nothing added, hop-by-hop taken away
        assert r.headers.get_all("X-Two") == ["a", "b"]
        for path, status in [("/health", 200), ("/echo/gone", 204), ("/echo/moved", 302), ("/nowhere", 404)]:
            c.request("HEAD" if path == "/health" else "GET", path)
            r = c.getresponse()
            r.read()
            assert r.status == status, path
        assert p.records() == []  # none of these is a model call


def test_uploads_pass_chunked_expected_and_compressed(proxied):
    data = os.urandom(3_000_000)
    with running([]) as s:
        p = proxied(s.url)
        c = http.client.HTTPConnection("127.0.0.1", p.port)
        c.request("PUT", "/echo/up", iter([data[:1000], data[1000:]]), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
        assert json.load(c.getresponse())["sha256"] == hashlib.sha256(data).hexdigest()
        c.request("POST", "/echo/zip", gzip.compress(b"abc"), {"Content-Encoding": "gzip"})
        assert json.load(c.getresponse())["sha256"] == hashlib.sha256(gzip.compress(b"abc")).hexdigest()
        raw = socket.create_connection(("127.0.0.1", p.port), timeout=5)
        raw.sendall(b"POST /echo/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 100")
        raw.sendall(b"ab")
        assert b"200 OK" in raw.recv(1000)


def test_compressed_request_is_understood_and_passes_as_it_is(proxied):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url)
        raw = gzip.compress(json.dumps({"model": "m", "messages": USER}).encode())
        assert p.post(None, {"Content-Encoding": "gzip", "X-Session-ID": "s"}, raw=raw)[0] == 200
        r = p.records(1)[0]
        assert (r["kind"], r["model"], r["messages"], r["request_bytes"]) == ("agent", "m", 1, len(raw))


def test_gzip_reply_keeps_its_bytes_and_its_length(proxied):
    with running([{"raw": "text " * 50, "_gzip": True}]) as s:
        p = proxied(s.url)
        _, headers, data = p.post({"model": "m", "messages": USER}, {"Accept-Encoding": "br;q=1.0, gzip, zstd"})
        assert headers["Content-Encoding"] == "gzip" and int(headers["Content-Length"]) == len(data)
        assert json.loads(gzip.decompress(data))["usage"]["completion_tokens"] == p.records(1)[0]["completion_tokens"] == 62
        assert s.log[0]["headers"]["Accept-Encoding"] == "gzip"  # what the proxy cannot read is not offered to the server


def test_gzip_stream_keeps_its_bytes(proxied):
    with running([{"raw": "hello world", "_gzip": True}]) as s:
        p = proxied(s.url)
        body = {"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
        _, headers, data = p.post(body, {"Accept-Encoding": "gzip"})
        assert headers["Content-Encoding"] == "gzip" and gzip.decompress(data).endswith(b"data: [DONE]\n\n")
        r = p.records(1)[0]
        assert (r["completion_tokens"], r["cached_tokens"], r["complete"], r["chunks"]) == (2, 0, True, 6)


@pytest.mark.parametrize("tail", [b"", bytes(512)])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_gzip_of_several_members_is_read_to_its_end(tail, size):
    whole = gzip.compress(b"first ") + gzip.compress(b"") + gzip.compress(b"second") + tail
    plain = llm_proxy.decoder("gzip")
    assert b"".join(plain(whole[i:i + size]) for i in range(0, len(whole), size)) == b"first second"


def test_gzip_stream_of_several_members_is_complete(proxied):
    parts = [gzip.compress(sse(delta("a"), end=b"")), gzip.compress(sse(delta(None, "stop", usage=USAGE)))]
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        c, _ = listener.accept()
        c.recv(65536)
        c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + b"".join(parts))
        c.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    p = proxied(f"http://127.0.0.1:{listener.getsockname()[1]}")
    body = {"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    assert p.post(body, {"Accept-Encoding": "gzip"})[2] == b"".join(parts)
    r = p.records(1)[0]
    assert (r["error"], r["complete"], r["chunks"], r["prompt_tokens"]) == (None, True, 2, 10)
    thread.join(10)
    listener.close()


def test_prompt_of_100_mb(proxied):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url)
        status, _, _ = p.post({"model": "m", "messages": [{"role": "user", "content": "x" * 100_000_000}]})
        assert status == 200 and s.log[0]["size"] == p.records(1)[0]["request_bytes"] > 100_000_000


def test_cuts_inside_characters_and_lines_change_no_byte(proxied):
    whole = sse(delta("héllo"), delta("wörld 🙂"), delta(None, "stop"), {"choices": [], "usage": USAGE})
    parts = [whole[i:i + 7] for i in range(0, len(whole), 7)]
    for script in (pieces(*parts), pieces(whole), pieces(whole[:100] + whole[100:])):
        with running(script) as s:
            p = proxied(s.url)
            _, _, data = p.post({"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}})
            assert data == whole
            r = p.records(1)[0]
            assert (r["prompt_tokens"], r["cached_tokens"], r["completion_tokens"]) == (10, 0, 2)
            assert (r["chunks"], r["finish_reason"]) == (4, "stop")
            assert r["t_start"] <= r["t_sent"] <= r["t_first"] <= r["t_end"]


def test_chunks_are_passed_when_they_come(proxied):
    with running([{"raw": "", "_stream": {"pieces": ["data: {}\n\n", "data: [DONE]\n\n"], "hang_after": 1}}]) as s:
        p = proxied(s.url)
        raw = p.open({"model": "m", "messages": USER, "stream": True})
        while b"data: {}" not in raw.recv(4096):
            pass  # the next one never comes, so that nothing can have waited for it
        raw.close()


def test_http_1_0_client_gets_no_chunked_encoding(proxied):
    with running([{"raw": "hello world"}]) as s:
        p = proxied(s.url)
        body = json.dumps({"model": "m", "messages": USER, "stream": True}).encode()
        raw = socket.create_connection(("127.0.0.1", p.port), timeout=5)
        raw.sendall(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        got = b""
        while part := raw.recv(65536):
            got += part
        assert got.startswith(b"HTTP/1.0 200") and b"chunked" not in got and got.endswith(b"data: [DONE]\n\n")


def test_memory_does_not_grow_with_a_stream_nor_with_a_slow_client(program, tmp_path):
    import psutil

    event = sse(delta("x" * 60_000), end=b"")
    listener = socket.create_server(("127.0.0.1", 0))
    poured, seen = [0], [-1, -1, -1]

    def held_up():
        seen[:] = [*seen[1:], poured[0]]
        time.sleep(0.1)
        return 0 < seen[0] == poured[0] < 3000

    def pour():
        c, _ = listener.accept()
        c.recv(65536)
        c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for _ in range(3000):
            c.sendall(event)
            poured[0] += 1
        c.sendall(b"data: [DONE]\n\n")
        c.close()

    threading.Thread(target=pour, daemon=True).start()
    log = tmp_path / "calls.jsonl"
    p, port = program("--upstream", f"http://127.0.0.1:{listener.getsockname()[1]}", "--log", log)
    raw = Running(None, log, port).open({"model": "m", "messages": USER, "stream": True})
    before = psutil.Process(p.pid).memory_info().rss
    wait_for(held_up)  # the client does not read yet
    size, peak = 0, 0
    while size < 3000 * len(event):
        size += len(raw.recv(1 << 20))
        if size % 7 == 0:
            peak = max(peak, psutil.Process(p.pid).memory_info().rss)
    assert peak - before < 30e6
    r = Running(None, log, port).records(1)[0]
    assert r["complete"] and r["chunks"] == 3000 and r["response_bytes"] > 180e6
    raw.close()
    listener.close()


# --- usage of streams


def test_usage_is_asked_for_and_withheld(proxied):
    with running([{"raw": "hello world"}]) as s:
        p = proxied(s.url)
        _, _, data = p.post({"model": "m", "stream": True, "messages": USER})
        assert b"usage" not in data and data.endswith(b"data: [DONE]\n\n") and b'"hell"' in data
        assert s.log[0]["body"]["stream_options"] == {"include_usage": True}
        r = p.records(1)[0]
        assert (r["prompt_tokens"], r["cached_tokens"], r["completion_tokens"], r["stream"], r["complete"]) == (1, 0, 2, True, True)
        # apart from the new key the request has the client's bytes
        client = json.dumps({"model": "m", "stream": True, "messages": USER}).encode()
        assert s.log[0]["raw"] == b'{"stream_options":{"include_usage":true},' + client[1:]


def test_usage_is_asked_for_in_a_compressed_request_too(proxied):
    with running([{"raw": "hello world"}]) as s:
        p = proxied(s.url)
        client = json.dumps({"model": "m", "stream": True, "messages": USER}).encode()
        _, _, data = p.post(None, {"Content-Encoding": "gzip", "X-Session-ID": "s"}, raw=gzip.compress(client))
        assert b"usage" not in data and data.endswith(b"data: [DONE]\n\n")
        assert s.log[0]["raw"] == b'{"stream_options":{"include_usage":true},' + client[1:] and "Content-Encoding" not in s.log[0]["headers"]
        r = p.records(1)[0]
        assert (r["prompt_tokens"], r["completion_tokens"], r["stream"], r["kind"]) == (1, 2, True, "agent")


@pytest.mark.parametrize("size", [1, 5, 64, 4096])
def test_only_the_usage_chunk_is_withheld_wherever_chunks_end(proxied, size):
    before, after = sse(delta("ü"), delta(None, "stop"), end=b""), b": bye\n\ndata: [DONE]\n\n"
    extra = sse({"choices": [], "usage": USAGE}, end=b"")
    whole = before + extra + after
    script = [{"raw": "", "_stream": {"pieces": [whole[i:i + size].decode("latin-1") for i in range(0, len(whole), size)]}}]
    with running(script) as s:
        p = proxied(s.url)
        assert p.post({"model": "m", "stream": True, "messages": USER})[2] == before + after
        assert p.records(1)[0]["completion_tokens"] == 2


@pytest.mark.parametrize("raw, streamed", [
    (b'{"stream":true,"messages":[]}', True), (b'{"messages":[], "stream" :\n true}', True),
    (b'{"stream":false,"messages":[]}', False), (b'{"stream":null}', False), (b'{"messages":[{"role":"user","content":"\\"stream\\": true"}]}', False),
])
def test_only_a_call_that_may_be_streamed_waits_until_it_is_understood(raw, streamed):
    assert bool(llm_proxy.STREAMED.search(raw)) == streamed


def test_a_call_that_says_stream_false_is_recorded_like_any_other(proxied):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url)
        raw = json.dumps({"model": "m", "messages": USER, "stream": False}).encode()
        assert p.post(None, {"X-Session-ID": "s", "Authorization": "Bearer sk-secret-secret"}, raw=raw)[0] == 200
        r = p.records(1)[0]
    assert (r["kind"], r["stream"], r["attempt"], r["messages"], r["prompt_tokens"] > 0) == ("agent", False, 1, 1, True)
    assert len(r["id"]) == 36 and "sk-secret" not in p.path.read_text()


def test_usage_that_was_asked_for_is_passed(proxied):
    with running([{"raw": "hello world"}]) as s:
        p = proxied(s.url)
        body = {"model": "m", "stream": True, "messages": USER, "stream_options": {"include_usage": True}}
        _, _, data = p.post(body)
        assert b'"choices": [], "usage"' in data and s.log[0]["raw"] == json.dumps(body).encode()


def test_other_stream_options_survive_the_injection(proxied):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url)
        p.post({"model": "m", "stream": True, "messages": USER, "stream_options": {"continuous_usage_stats": True, "include_usage": False}})
        assert s.log[0]["body"]["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_usage_in_the_chunk_of_the_finish_reason_is_not_withheld(proxied):
    whole = sse(delta("a"), delta(None, "stop", usage=USAGE))
    with running(pieces(whole)) as s:
        p = proxied(s.url)
        assert p.post({"model": "m", "stream": True, "messages": USER})[2] == whole
        assert p.records(1)[0]["prompt_tokens"] == 10


def test_stream_without_usage_has_null_not_zero(proxied):
    with running([{"raw": "x", "_usage": None}]) as s:
        p = proxied(s.url)
        p.post({"model": "m", "stream": True, "messages": USER})
        r = p.records(1)[0]
        assert (r["prompt_tokens"], r["cached_tokens"], r["completion_tokens"], r["complete"]) == (None, None, None, True)


def test_anthropic_stream_ends_with_message_stop(proxied):
    whole = (b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3,"cache_read_input_tokens":16}}}\n\n'
             b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}\n\n'
             b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    r = Reply()
    for _, data in Events().feed(whole):
        r.take_event(data)
    assert r.usage == {"prompt_tokens": 19, "cached_tokens": 16, "completion_tokens": 5}
    assert r.ended and r.finish_reason == "end_turn"


# --- what goes wrong


def test_client_that_leaves_a_stream_is_recorded_and_the_server_is_told(proxied):
    events = [sse(delta("x", usage={"prompt_tokens": 5, "completion_tokens": i}), end=b"").decode() for i in range(1, 200)]
    with running([{"raw": "", "_stream": {"pieces": events, "delay": 0.02}}]) as s:
        p = proxied(s.url)
        raw = p.open({"model": "m", "messages": USER, "stream": True})
        got = b""
        while got.count(b"data:") < 3:
            got += raw.recv(4096)
        raw.close()
        r = p.records(1)[0]
        assert (r["client_disconnect"], r["complete"], r["error"], r["status"]) == (True, False, "client_disconnect", 200)
        assert 3 <= r["chunks"] < 199 and r["completion_tokens"] == r["chunks"] and r["prompt_tokens"] == 5
        wait_for(lambda: s.aborted)


def test_client_that_leaves_before_the_answer(proxied):
    with running([{"raw": "", "_hang": True}]) as s:
        p = proxied(s.url)
        raw = p.open({"model": "m", "messages": USER}, "X-Session-ID: s\r\n")
        wait_for(lambda: s.log)
        raw.close()
        r = p.records(1)[0]
        assert (r["client_disconnect"], r["complete"], r["status"], r["kind"]) == (True, False, None, "agent")
        wait_for(lambda: s.aborted)


def test_client_that_leaves_while_sending(proxied):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url)
        raw = socket.create_connection(("127.0.0.1", p.port))
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"model\"")
        wait_for(lambda: p.proxy.tasks)  # the proxy reads
        raw.close()
        r = p.records(1)[0]
        assert (r["client_disconnect"], r["status"], r["call_key"]) == (True, None, None) and s.log == []


def wait_for(fact, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_retries_share_a_call_key(proxied):
    busy = {"error": {"status": 503, "message": "busy"}}
    with running([busy, busy, {"raw": "x"}]) as s:
        p = proxied(s.url)
        assert [p.chat(USER)[0] for _ in range(4)] == [503, 503, 200, 200]
        r = p.records(4)
        assert [x["attempt"] for x in r] == [1, 2, 3, 1] and [x["seq"] for x in r] == [0, 1, 2, 3]
        assert len({x["call_key"] for x in r[:3]}) == 1 and r[3]["call_key"] != r[0]["call_key"]
        assert [x["error"] for x in r] == ["upstream_status", "upstream_status", None, None] and r[0]["error_detail"] == "busy"
        p.chat(USER, session="other")
        assert p.records(5)[4]["call_key"] not in {x["call_key"] for x in r}


@pytest.mark.parametrize("script, body, status, error", [
    ([{"_abort": True}], {}, 502, "upstream_broken"),
    ([{"error": {"status": 400, "message": "maximum context length is 100"}}], {}, 400, "upstream_status"),
    ([{"error": {"status": 500, "message": "boom"}}], {"stream": True}, 500, "upstream_status"),
    ([{"_hang": True}], {}, 504, "proxy_timeout"),
])
def test_errors_of_the_server(proxied, script, body, status, error):
    with running(script) as s:
        p = proxied(s.url, read_timeout_s=0.3 if error == "proxy_timeout" else None)
        got, _, data = p.post({"model": "m", "messages": USER, **body})
        r = p.records(1)[0]
        assert (got, r["status"], r["error"], r["client_disconnect"]) == (status, status, error, False)
        assert json.loads(data)["error"]["message"] and r["t_end"] >= r["t_start"] and r["prompt_tokens"] is None


def test_server_that_is_down(proxied):
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # and never listens
    p = proxied(f"http://127.0.0.1:{nobody.getsockname()[1]}")
    status, _, data = p.post({"model": "m", "messages": USER})
    assert status == 502 and "cannot connect to the server" in json.loads(data)["error"]["message"]
    assert p.records(1)[0]["error"] == "upstream_unreachable"
    c = http.client.HTTPConnection("127.0.0.1", p.port)
    c.request("GET", "/trajoule/health")
    assert c.getresponse().status == 503
    nobody.close()


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_stream_that_breaks_is_no_complete_reply(proxied, body):
    parts = [sse(delta(x), end=b"").decode() for x in "abcdef"]
    with running([{"raw": "", "_stream": {"pieces": parts, "abort_after": 3, "delay": 0.01}}]) as s:
        p = proxied(s.url)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            p.post({"model": "m", "messages": USER, **body})
        r = p.records(1)[0]
        assert (r["status"], r["complete"], r["error"], r["chunks"], r["client_disconnect"]) == (200, False, "upstream_broken", 3, False)


def test_stream_that_ends_without_end_mark(proxied):
    with running(pieces(sse(delta("a"), end=b""))) as s:
        p = proxied(s.url)
        assert p.post({"model": "m", "messages": USER, "stream": True})[0] == 200
        assert (p.records(1)[0]["complete"], p.records()[0]["error"]) == (False, "upstream_broken")


def test_error_inside_a_stream(proxied):
    with running(pieces(sse(delta("a"), {"error": {"message": "out of memory", "code": 500}}))) as s:
        p = proxied(s.url)
        p.post({"model": "m", "messages": USER, "stream": True})
        r = p.records(1)[0]
        assert (r["status"], r["error"], r["error_detail"], r["complete"]) == (200, "upstream_error", "out of memory", False)


def test_body_that_is_no_json_passes_and_is_recorded(proxied):
    with running([]) as s:
        p = proxied(s.url)
        assert p.post(None, raw=b"\xff{not json")[0] == 500  # the fake's own answer
        assert p.records(1)[0]["model"] is None


def test_there_is_no_total_timeout(proxied):
    with running([]) as s:
        t = proxied(s.url).proxy.session.timeout
        assert t.total is None and t.sock_read is None and t.sock_connect == 30


@pytest.mark.parametrize(("read_timeout_s", "how", "error"), [(None, {"delay": 0.05}, None), (300, {"hang_after": 1}, "proxy_timeout")])
def test_a_stream_of_more_than_300_s_passes(proxied, read_timeout_s, how, error):
    """The proxy's clock jumps by 400 s in the middle of a stream: every timer that runs by then is due. Where the server says nothing more, a
    limit on the time without a byte is such a timer: it shows that the jump works."""
    parts = [sse(delta(str(k)), end=b"").decode() for k in range(8)] + [sse(delta(finish="stop")).decode()]
    with running([{"raw": "", "_stream": {"pieces": parts, **how}}]) as s:
        p = proxied(s.url, read_timeout_s=read_timeout_s)
        loop = p.loop
        client = p.open({"model": "m", "messages": USER, "stream": True})
        data, clock, jumped = b"", loop.time, []
        while b'"0"' not in data:
            data += client.recv(1 << 16)
        client.settimeout(0.5)
        loop.time = lambda: clock() + 400 * len(jumped)
        with contextlib.suppress(ConnectionError):
            while not data.endswith(b"\r\n0\r\n\r\n"):
                jumped.append(clock())
                loop.call_soon_threadsafe(lambda: None)  # wakes it, or it would sleep on by the old clock
                with contextlib.suppress(TimeoutError):
                    if not (piece := client.recv(1 << 16)):
                        break
                    data += piece
        client.close()
        r = p.records(1)[0]
        assert (r["error"], r["complete"]) == (error, error is None)
        assert (b"[DONE]" in data) == (error is None)


def test_256_streams_at_once_lose_nothing(proxied):
    with running([{"raw": "word " * 40, "_stream": {"delay": 0.001}}]) as s:
        p = proxied(s.url)

        async def all_at_once():
            import aiohttp

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as c:
                async def one(i):
                    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"{i}"}]}
                    async with c.post(f"http://127.0.0.1:{p.port}{CHAT}", json=body) as r:
                        text = (await r.read()).decode()
                        return "".join(json.loads(x[6:])["choices"][0]["delta"].get("content", "")
                                       for x in text.split("\n\n") if x.startswith("data: {"))
                return await asyncio.gather(*[one(i) for i in range(256)])

        assert asyncio.run(all_at_once()) == ["word " * 40] * 256
        r = p.records(256)
        assert all(x["complete"] and x["completion_tokens"] == 50 for x in r)
        assert sorted(x["seq"] for x in r) == list(range(256)) and len({x["call_key"] for x in r}) == 256


# --- what is never written


def test_no_header_and_no_key_is_written_anywhere(proxied, tmp_path):
    bodies = JsonLines(tmp_path / "bodies.jsonl")
    refusal = {"error": {"status": 401, "message": "Incorrect API key: sk-verysecret123"}}
    with running([{"raw": "your key is sk-verysecret123"}, refusal]) as s:
        p = proxied(s.url, bodies=bodies, recorder=Recorder(tmp_path / "rec.json"))
        headers = {"Authorization": "Bearer sk-verysecret123", "Cookie": "id=cookiesecret", "X-Api-Key": "anothersecret",
                   "X-Session-ID": "s"}
        for _ in range(2):
            p.post({"model": "m", "messages": [{"role": "user", "content": "echo $KEY: sk-verysecret123"}]}, headers)
        p.records(2)
        assert s.log[0]["headers"]["Authorization"] == "Bearer sk-verysecret123"  # the server gets it
        for f in tmp_path.iterdir():
            assert "secret" not in f.read_text(), f
        assert "[redacted]" in (tmp_path / "rec.json").read_text()
        first = json.loads((tmp_path / "bodies.jsonl").read_text().splitlines()[0])
        assert first["reply"] == "your key is [redacted]" and first["id"] == p.records()[0]["id"]
    bodies.close()


def test_metrics_count_what_happened(proxied):
    with running([{"raw": "hello world"}, {"error": {"status": 503, "message": "busy"}}]) as s:
        p = proxied(s.url, trial="t1")
        p.chat(USER)
        p.chat(USER)
        assert p.records(2)[0]["trial"] == "t1"
        c = http.client.HTTPConnection("127.0.0.1", p.port)
        c.request("GET", "/trajoule/metrics")
        text = c.getresponse().read().decode()
        assert 'trajoule_attempts_total{kind="agent",status="200"} 1' in text and 'kind="agent",status="503"} 1' in text
        assert 'trajoule_tokens_total{kind="completion"} 2' in text and "trajoule_in_flight 0" in text


def test_metrics_stand_beside_a_call_that_has_no_status(proxied):
    with running([{"raw": "", "_hang": True}, {"raw": "x"}]) as s:
        p = proxied(s.url)
        raw = p.open({"model": "m", "messages": USER}, "X-Session-ID: s\r\n")
        wait_for(lambda: s.log)
        raw.close()
        p.records(1)
        assert p.chat(USER)[0] == 200
        p.records(2)
        c = http.client.HTTPConnection("127.0.0.1", p.port)
        c.request("GET", "/trajoule/metrics")
        r = c.getresponse()
        text = r.read().decode()
        assert r.status == 200 and 'kind="agent",status="none"} 1' in text and 'kind="agent",status="200"} 1' in text


# --- recordings and replay


class Letters:
    """An adapter whose token is four characters, as in the fake server."""

    kind, can_tokenize, cache_block = "llamacpp", True, 16

    def tokenize(self, text):
        return list(range(-(-len(text) // 4)))

    def exact_output(self, n):
        return {"max_tokens": n, "ignore_eos": True}


def as_json(obj):
    from aiohttp import web

    return web.json_response(obj)


def recording(*calls, **more):
    calls = [c if isinstance(c, dict) else {"kind": "agent", "content": c} for c in calls]
    return {"schema": 1, "name": "r", "source": "authored", "calls": calls, **more}


def replaying(proxied, url, *calls, mode="putback", adapter=None):
    return proxied(url, replay=Replay(recording(*calls), adapter or Letters(), mode))


def test_replay_answers_from_the_recording_and_puts_the_servers_text_back(proxied):
    with running(lambda body, i: {"raw": f"own {i} "}) as s:
        p = replaying(proxied, s.url, "first recorded reply", "second recorded reply")
        status, reply = p.chat(USER, stop=["x"], response_format={"type": "json_object"}, temperature=0.5)
        assert status == 200 and reply["choices"][0]["message"]["content"] == "first recorded reply"
        sent = s.log[0]["body"]
        assert (sent["max_tokens"], sent["ignore_eos"], sent["temperature"]) == (6, True, 0.5)  # 5 tokens of text and the one that ends it
        assert "stop" not in sent and "response_format" not in sent  # they could end the reply early
        messages = [*USER, {"role": "assistant", "content": "first recorded reply"}, {"role": "user", "content": "go on"}]
        _, reply = p.chat(messages)
        assert reply["choices"][0]["message"]["content"] == "second recorded reply"
        # of the server's own six tokens five are text in the history; the last one stands for the end mark
        assert s.log[1]["body"]["messages"][1] == {"role": "assistant", "content": ("own 0 " + " " * 40)[:20]}
        r = p.records(2)
        assert [x["replayed"] for x in r] == [True, True] and [x["completion_tokens"] for x in r] == [6, 7]
        assert r[1]["replay"]["own_text_restored"] == 1 and r[1]["replay"]["recomputed_tokens"] == 0
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == r[1]["cached_tokens"]


def test_without_a_count_the_servers_text_is_put_back_whole(proxied):
    with running([{"raw": "own", "_usage": None}]) as s:
        p = replaying(proxied, s.url, "first recorded reply", "two")
        p.chat(USER)
        p.chat([*USER, {"role": "assistant", "content": "first recorded reply"}, *USER])
        assert s.log[1]["body"]["messages"][1]["content"] == "own" + " " * 21  # six tokens of four characters
        r = p.records(2)
        assert (r[0]["replay"]["missing_tokens"], r[1]["replay"]["own_text_restored"], r[1]["replay"]["recorded_text_left"]) == (None, 1, 0)


def test_an_empty_text_of_the_server_is_not_put_back_and_the_record_says_so(proxied):
    usage = {"prompt_tokens": 1, "completion_tokens": 6}
    empty = {"choices": [{"index": 0, "message": {"role": "assistant", "content": None, "reasoning_content": "hm"}}], "usage": usage}
    with running([{"raw": "", "_usage": usage}]) as s:
        s.reply = lambda *_: asyncio.sleep(0, as_json(empty))
        p = replaying(proxied, s.url, "first recorded reply", "two")
        p.chat(USER)
        p.chat([*USER, {"role": "assistant", "content": "first recorded reply"}, *USER])
        assert s.log[1]["body"]["messages"][1]["content"] == "first recorded reply"
        r = p.records(2)[1]["replay"]
        assert (r["own_text_restored"], r["recorded_text_left"]) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("decoded, missing", [(6, 0), (4, 2), (None, None)])
def test_tokens_that_were_asked_for_and_not_decoded_are_in_the_record(proxied, stream, decoded, missing):
    usage = decoded and {"prompt_tokens": 1, "completion_tokens": decoded}
    with running([{"raw": "own text", "_usage": usage}]) as s:
        p = replaying(proxied, s.url, "first recorded reply")
        p.post({"model": "m", "messages": USER, "stream": stream}, {"X-Session-ID": "s"})
        r = p.records(1)[0]
        assert (r["replay"]["asked_tokens"], r["replay"]["missing_tokens"], r["complete"]) == (6, missing, True)


@pytest.mark.parametrize("mode", ["putback", "force"])
@pytest.mark.parametrize("answered, history, says", [
    ([], ["one"], "call 1 of kind 'agent' has a reply in its history (message 2: 'one') that was not given to it"),
    ([USER], ["never recorded"], "(message 2: 'never recorded')"),
    ([USER], ["two"], "(message 2: 'two')"),
    ([USER], ["one", "never recorded"], "(message 4: 'never recorded')"),
])
def test_a_history_that_the_session_was_not_given_does_not_fit(proxied, mode, answered, history, says):
    with running(lambda body, i: {"raw": "one"}) as s:
        p = replaying(proxied, s.url, "one", "two", "three", mode=mode)
        for messages in answered:
            assert p.chat(messages)[0] == 200
        messages = [*USER, *(m for text in history for m in ({"role": "assistant", "content": text}, *USER))]
        status, reply = p.chat(messages)
        assert status == 400 and says in reply["error"]["message"]
        assert p.records(len(answered) + 1)[-1]["error"] == "replay_mismatch" and len(s.log) == len(answered)


def test_spaces_and_turns_without_text_do_not_make_a_history_another(proxied):
    with running([{"raw": "own"}]) as s:
        p = replaying(proxied, s.url, "one  reply\n", "two")
        p.chat(USER)
        call = {"role": "assistant", "content": None, "tool_calls": []}
        assert p.chat([*USER, {"role": "assistant", "content": "one reply"}, call, *USER])[0] == 200
        assert p.records(2)[1]["replay"]["recorded_text_left"] == 2


def test_what_an_agent_makes_of_a_reply_that_was_cut_off_is_its_own_affair(proxied):
    with running([{"raw": "own"}]) as s:
        p = replaying(proxied, s.url, {"kind": "agent", "content": "x" * 40, "finish_reason": "length", "completion_tokens": 10}, "two")
        p.chat(USER)
        assert p.chat([*USER, {"role": "assistant", "content": "[TRUNCATED RESPONSE NOT AVAILABLE]"}, *USER])[0] == 200
        assert p.records(2)[1]["replay"]["recorded_text_left"] == 1


def test_replay_cache_equals_that_of_a_live_run(proxied):
    texts = [f"a longer reply of the model number {i}, with words" for i in range(4)]

    def talk(p, replies):
        messages, out = [], []
        for i, text in enumerate(replies):
            messages.append({"role": "user", "content": f"observation {i} " + "o" * 30 * i})
            _, r = p.chat(messages)
            out.append((r["usage"]["prompt_tokens"], r["usage"]["prompt_tokens_details"]["cached_tokens"]))
            messages.append({"role": "assistant", "content": text})
        return out

    with running([{"raw": t} for t in texts]) as s:
        live = talk(proxied(s.url), texts)
    with running(lambda body, i: {"raw": texts[i][::-1]}) as s:
        recorded = ["R" * len(t) for t in texts]
        replay = talk(replaying(proxied, s.url, *recorded), recorded)
    assert replay == live and live[-1][1] > 32


def test_retry_gets_the_same_reply_and_errors_pass(proxied):
    with running([{"error": {"status": 503, "message": "busy"}}, {"raw": "o"}]) as s:
        p = replaying(proxied, s.url, "one", "two")
        assert p.chat(USER)[0] == 503
        assert [p.chat(USER)[1]["choices"][0]["message"]["content"] for _ in range(2)] == ["one", "one"]
        status, reply = p.chat([*USER, {"role": "assistant", "content": "one"}, *USER])
        assert reply["choices"][0]["message"]["content"] == "two"
        assert p.records(4)[0]["error_detail"] == "busy"


def test_summary_is_replayed_and_the_same_position_may_hold_two_texts(proxied):
    def u(t):
        return {"role": "user", "content": t}

    def a(t):
        return {"role": "assistant", "content": t}

    hand, pick = "You are about to hand off your work x", "You are picking up work from a previous AI agent y"
    ask = "The next agent has a few questions z"
    calls = ["one", "two", {"kind": "summary", "content": "SUM", "repeat": True}, {"kind": "questions", "content": "Q", "repeat": True},
             {"kind": "answers", "content": "ANS", "repeat": True}, "three", "four", "five"]
    own = iter("ABCDEFGHIJKLMNOP")
    with running(lambda body, i: {"raw": next(own) * 80}) as s:
        s.item = lambda body, session, last: {"raw": next(own) * 80}  # no canned texts
        p = replaying(proxied, s.url, *calls)

        def say(messages):
            status, r = p.chat(messages)
            assert status == 200, r
            return r["choices"][0]["message"]["content"]

        def sent(i=-1):
            return [m["content"][:1] if m["role"] == "assistant" else "u" for m in s.log[i]["body"]["messages"]]

        m = [u("task")]
        assert say(m) == "one"
        m += [a("one"), u("o1")]
        assert say(m) == "two"
        m += [a("two")]
        assert say([*m, u(hand)]) == "SUM" and sent() == ["u", "A", "u", "B", "u"]
        assert say([u(pick)]) == "Q" and sent() == ["u"]
        assert say([*m, u(hand), a("SUM"), u(ask)]) == "ANS" and sent() == ["u", "A", "u", "B", "u", "C", "u"]
        m = [u("task"), u(pick), a("Q"), u("Here are the answers the other agent provided.")]
        assert say(m) == "three" and sent() == ["u", "u", "Q", "u"]  # the question call's reply never stood there in the cache
        m += [a("three"), u("o3")]
        assert say(m) == "four" and sent() == ["u", "u", "Q", "u", "F", "u"]
        assert say([*m, a("four"), u(hand + "2")]) == "SUM"  # a second summary
        m = [u("task"), u(pick + "2"), a("Q"), u("Here are the answers")]
        assert say(m) == "five"
        kinds = [r["kind"] for r in p.records(9)]
        assert kinds == ["agent", "agent", "summary", "questions", "answers", "agent", "agent", "summary", "agent"]


@pytest.mark.parametrize("calls, messages, session, says", [
    (["one"], [*USER, {"role": "assistant", "content": "one"}, *USER], "s", "call 2 of kind 'agent' came, the recording has 1"),
    (["one", {"kind": "agent", "content": "two", "messages": 5}], [*USER, {"role": "assistant", "content": "one"}, *USER], "s",
     "has 3 messages, the recording has 5"),
    (["one", "two"], [{"role": "user", "content": "from the start"}], "s", "began again with one message"),
    (["one"], [{"role": "user", "content": "You are about to hand off your work"}], "s", "a call of kind 'summary' with 1 messages came"),
    (["one"], USER, None, "without the header X-Session-ID"),
])
def test_what_does_not_fit_the_recording_is_a_clear_error(proxied, calls, messages, session, says):
    with running([{"raw": "own"}]) as s:
        p = replaying(proxied, s.url, *calls)
        p.chat(USER)
        status, reply = p.chat(messages, session=session)
        assert status == 400 and says in reply["error"]["message"] and reply["error"]["code"] == "replay_mismatch"
        r = p.records(2)[1]
        assert (r["status"], r["error"], r["replayed"]) == (400, "replay_mismatch", False) and says in r["error_detail"]
        assert len(s.log) == 1  # nothing of it reached the server


def test_sessions_are_replayed_apart(proxied):
    with running([{"raw": "own"}]) as s:
        p = replaying(proxied, s.url, "one", "two")
        assert [p.chat(USER, session=x)[1]["choices"][0]["message"]["content"] for x in "abc"] == ["one"] * 3


@pytest.mark.parametrize("wants", [True, False])
def test_replay_streams_the_recorded_text(proxied, wants):
    text = "A recorded reply with ünïcödé, longer than what the server says."
    with running([{"raw": "own text"}]) as s:
        p = replaying(proxied, s.url, text)
        body = {"model": "m", "stream": True, "messages": USER, **({"stream_options": {"include_usage": True}} if wants else {})}
        _, _, data = p.post(body, {"X-Session-ID": "s"})
        objects = [json.loads(x[6:]) for x in data.decode().split("\n\n") if x.startswith("data: {")]
        assert "".join(c["delta"].get("content") or "" for o in objects for c in o["choices"]) == text
        assert [c["finish_reason"] for o in objects for c in o["choices"]][-1] == "stop" and data.endswith(b"data: [DONE]\n\n")
        assert any(o.get("usage") for o in objects) is wants
        r = p.records(1)[0]
        assert r["completion_tokens"] == r["replay"]["asked_tokens"] == 17 and r["complete"] and r["t_first"]


def test_reply_that_was_cut_off_stays_cut_off(proxied):
    with running([{"raw": "own"}]) as s:
        p = replaying(proxied, s.url, {"kind": "agent", "content": "x" * 40, "finish_reason": "length", "completion_tokens": 10})
        _, reply = p.chat(USER)
        assert reply["choices"][0]["finish_reason"] == "length" and s.log[0]["body"]["max_tokens"] == 10


def test_server_that_cannot_count_needs_recorded_counts(proxied):
    adapter = Letters()
    adapter.can_tokenize, adapter.kind = False, "openai"
    with running([{"raw": "own"}]) as s:
        p = replaying(proxied, s.url, "one", adapter=adapter)
        status, reply = p.chat(USER)
        assert status == 400 and "calls[0].completion_tokens: found null" in reply["error"]["message"]


def test_whoever_sees_the_line_of_a_call_finds_its_text_and_the_recording(proxied, tmp_path, monkeypatch):
    bodies, out = JsonLines(tmp_path / "bodies.jsonl"), tmp_path / "rec.json"
    with running([{"raw": "first"}]) as s:
        p, there = proxied(s.url, bodies=bodies, recorder=Recorder(out)), []
        write = p.proxy.log.write
        monkeypatch.setattr(p.proxy.log, "write", lambda *a: (there.append((bodies.lines, out.exists())), write(*a)))
        p.chat(USER)
        p.records(1)
        assert there == [(1, True)]
    bodies.close()


@pytest.mark.parametrize("broken", ["log", "bodies", "recorder"])
def test_what_cannot_be_written_takes_nothing_else_along(proxied, tmp_path, monkeypatch, broken):
    bodies, recorder = JsonLines(tmp_path / "bodies.jsonl"), Recorder(tmp_path / "rec.json")
    with running([{"raw": "first"}]) as s:
        p = proxied(s.url, bodies=bodies, recorder=recorder)
        where = {"log": p.proxy.log, "bodies": bodies, "recorder": recorder}[broken]
        monkeypatch.setattr(where, "add" if broken == "recorder" else "write", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        assert p.chat(USER)[0] == 200
        wait_for(lambda: not p.proxy.tasks and p.proxy.counts["log_errors"] == 1 and (broken == "log" or p.proxy.log.lines == 1))
        there = {"log": p.proxy.log.lines == 1, "bodies": bodies.lines == 1, "recorder": (tmp_path / "rec.json").exists()}
        assert there == {k: k != broken for k in there}
    bodies.close()


def test_recording_of_a_live_run_can_be_replayed(proxied, tmp_path):
    out = tmp_path / "rec.json"
    with running([{"error": {"status": 503, "message": "busy"}}, {"raw": "first"}, {"raw": "second ü"}]) as s:
        p = proxied(s.url, recorder=Recorder(out))
        p.chat(USER)
        p.chat(USER)
        p.post({"model": "m", "stream": True, "messages": [*USER, {"role": "assistant", "content": "first"}, *USER]}, {"X-Session-ID": "s"})
        p.records(3)
        for _ in range(2):
            p.chat(USER, session="another one/..")
        p.records(5)
    rec = load_recording(out)
    assert [(c["kind"], c["content"], c["messages"], c["completion_tokens"]) for c in rec["calls"]] == [
        ("agent", "first", 1, 1), ("agent", "second ü", 3, 2)]
    assert rec["source"] == "recorded" and rec["model"] == "m"
    assert sorted(f.name for f in tmp_path.glob("rec*")) == ["rec.another_one_...json", "rec.json"]
    with running([{"raw": "own"}]) as s:
        p = proxied(s.url, replay=Replay(rec, Letters(), "putback"))
        assert p.chat(USER)[1]["choices"][0]["message"]["content"] == "first"
        assert p.chat([*USER, {"role": "assistant", "content": "first"}, *USER])[1]["choices"][0]["message"]["content"] == "second ü"


def test_a_recording_goes_on_after_a_restart(proxied, tmp_path):
    out, turns = tmp_path / "rec.json", [[*USER, {"role": "assistant", "content": "0"}, *USER], USER]
    texts = lambda f: [c["content"] for c in json.loads((tmp_path / f).read_text())["calls"]]  # noqa: E731
    with running(lambda body, i: {"raw": str(i)}) as s:
        for _ in range(2):
            p = proxied(s.url, recorder=Recorder(out))
            for session in ("a", "b/"):
                p.chat(turns.pop() if session == "a" else USER, session=session)
            p.records(2)
        assert texts("rec.json") == ["0", "1"] and texts("rec.b_.json") == ["1"]  # b asked the same again: the later answer counts
        p = proxied(s.url, recorder=Recorder(out))
        p.chat(USER, session="b_")
        p.chat(USER, session="c")
        p.records(2)
    assert Recorder(out).found == 5
    assert (texts("rec.json"), texts("rec.b_.json"), texts("rec.b_-2.json"), texts("rec.c.json")) == (["0", "1"], ["1"], ["0"], ["0"])


def test_a_recording_that_did_not_come_from_record_is_not_gone_on_with(tmp_path):
    out = tmp_path / "rec.json"
    for content, says in [(json.dumps(recording("x")), "session: found null"), ("{", "not a JSON file")]:
        out.write_text(content)
        with pytest.raises(ReplayError, match=says):
            Recorder(out)
        assert out.read_text() == content


@pytest.mark.parametrize("change, says", [
    ({"schema": 2}, "schema: found 2, expected 1"), ({"calls": []}, "calls: found []"), ({"source": "x"}, "source"),
    ({"calls": [{"kind": "agnet", "content": ""}]}, "calls[0].kind: found \"agnet\", expected one of agent, "),
    ({"calls": [{"kind": "agent"}]}, "calls[0].content: found null, expected a string"),
    ({"calls": [{"kind": "agent", "content": "", "messages": "3"}]}, "calls[0].messages"),
    ({"calls": [{"kind": "agent", "content": "", "completion_tokens": 0}]}, "calls[0].completion_tokens: found 0"),
])
def test_faulty_recordings_are_refused(tmp_path, change, says):
    f = tmp_path / "r.json"
    f.write_text(json.dumps({**recording("x"), **change}))
    with pytest.raises(ReplayError) as e:
        load_recording(f)
    assert says in str(e.value) and str(f) in str(e.value)


# --- forced replies


class Row(list):
    """A row of logits with the few operations of a tensor that the processor uses."""

    shape = property(lambda self: (len(self),))

    def fill_(self, v):
        self[:] = [v] * len(self)

    def clone(self):
        return Row(self)

    def __getitem__(self, i):
        return Row(list.__getitem__(self, j) for j in i) if isinstance(i, list) else list.__getitem__(self, i)

    def __setitem__(self, i, v):
        if isinstance(i, list):
            for j, x in zip(i, v, strict=True):
                list.__setitem__(self, j, x)
        else:
            list.__setitem__(self, i, v)


def test_forced_reply_allows_one_token_and_then_an_end():
    from servers.force_reply import Forced, parse_ids

    rule = Forced(parse_ids("3,1"), {0, 2})

    def possible(output):
        return [i for i, x in enumerate(rule(output, Row([0.5, 1.5, 2.5, 3.5, 4.5]))) if x != float("-inf")]

    assert [possible([]), possible([3]), possible([3, 1]), possible([-1])] == [[3], [1], [0, 2], [1]]  # -1: not known yet, but there
    assert Forced([9], set())([], Row([1.0, 2.0])) == [1.0, 2.0]  # beyond the vocabulary: left alone
    for bad in ("", "a", "1,-2", None):
        with pytest.raises(ValueError, match="vllm_xargs.forced_reply"):
            parse_ids(bad)


class Wordy(Letters):
    """An adapter whose tokens are a space with a word of up to six letters, or else single characters."""

    kind = "vllm"

    def tokenize(self, text):
        return [hash(t) for t in re.findall(r" [A-Za-z]{1,6}(?![A-Za-z])|.", text, re.DOTALL)]

    def chat_ids(self, messages):
        return self.tokenize("".join(f"<{m['role']}>\n{m['content']}<end>" for m in messages))

    def only_tokens(self, ids):
        return {"allowed_token_ids": ids}


def test_a_server_held_to_words_may_write_those_that_are_one_token(proxied):
    adapter = Wordy()
    with running([{"raw": " of the house"}]) as s:
        p = proxied(s.url, replay=Replay(recording("list files remarkably", "two"), adapter, "putback", words=True))
        assert p.chat(USER, allowed_token_ids=[1])[1]["choices"][0]["message"]["content"] == "list files remarkably"
        allowed = s.log[0]["body"]["allowed_token_ids"]
        of = {w: adapter.tokenize(f" {w}")[0] for w in ("list", "files", "the", "remarkably"[:6])}
        assert {of["list"], of["files"], of["the"]} <= set(allowed) and of["remark"] not in allowed and 1 not in allowed
        assert len(set(allowed)) == len(allowed) <= llm_proxy.WORDS_MAX
        r = p.records(1)[0]
        assert (r["replay"]["mode"], r["replay"]["words"]) == ("putback", len(allowed))


@pytest.mark.parametrize("change", [
    {"tokenize": lambda self, text: [ord(c) for c in text]},  # no word is one token
    {"tokenize": lambda self, text: Wordy.tokenize(self, text) if len(text) < 20 else [1]},  # side by side they are other tokens
    {"chat_ids": lambda self, messages: self.tokenize("".join(m["content"].strip() for m in messages))},  # the template takes the space away
])
def test_words_that_do_not_survive_are_a_clear_error(proxied, change):
    with running([{"raw": "x"}]) as s:
        p = proxied(s.url, replay=Replay(recording("one"), type("Other", (Wordy,), change)(), "putback", words=True))
        status, reply = p.chat(USER)
        assert status == 400 and "words do not survive this server's tokenizer and chat template" in reply["error"]["message"]
        assert s.log == []


def test_force_mode_sends_the_ids_and_notices_a_server_without_the_processor(proxied):
    class Vllm(Letters):
        kind = "vllm"

    with running(lambda body, i: {"raw": "one  reply" if i == 0 else "something else"}) as s:
        p = replaying(proxied, s.url, "one reply", "two", mode="force", adapter=Vllm())
        status, reply = p.chat(USER, stop=["x"])
        assert status == 200 and reply["choices"][0]["message"]["content"] == "one reply"  # spaces may differ by tokenizer
        assert s.log[0]["body"]["vllm_xargs"] == {"forced_reply": "0,1,2"} and s.log[0]["body"]["max_tokens"] == 4
        messages = [*USER, {"role": "assistant", "content": "one reply"}, *USER]
        status, reply = p.chat(messages)
        assert status == 502 and "--logits-processors servers.force_reply:ForceReply" in reply["error"]["message"]
        assert s.log[1]["body"]["messages"] == messages  # nothing is put back: the server's text is the recorded one
        assert p.records(2)[1]["error"] == "replay_failed"


# --- the program


@pytest.fixture
def program(repo):
    """Function (*arguments) -> (process, port), ready to serve; killed at the end."""
    started = []

    def start(*args, wait=True):
        p = subprocess.Popen([sys.executable, str(repo / "llm_proxy.py"), "--port", "0", *map(str, args)],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        started.append(p)
        return p, int(p.stdout.readline().split(" -> ")[0].rpartition(":")[2]) if wait else None

    yield start
    for p in started:
        p.kill()
        p.communicate()


def test_kill_leaves_a_valid_log_and_the_next_proxy_goes_on(program, tmp_path):
    log = tmp_path / "calls.jsonl"
    with running([{"raw": "x"}]) as s:
        p, port = program("--upstream", s.url, "--log", log)
        stop = threading.Event()

        def load():
            while not stop.is_set():
                with contextlib.suppress(OSError, http.client.HTTPException):
                    Running(None, log, port).post({"model": "m", "messages": USER})

        threads = [threading.Thread(target=load) for _ in range(4)]
        for t in threads:
            t.start()
        wait_for(lambda: log.read_text().count("\n") > 30)
        p.kill()
        p.wait()
        stop.set()
        for t in threads:
            t.join()
        lines = log.read_bytes().split(b"\n")
        for line in lines[:-1]:
            json.loads(line)
        _, port = program("--upstream", s.url, "--log", log)
        assert Running(None, log, port).post({"model": "m", "messages": USER})[0] == 200
        last = Running(None, log, port).records(len(lines))[-1]
        assert last["seq"] == len(lines) - 1


def test_a_restart_on_the_same_log_keeps_the_recording_and_uses_no_key_twice(program, tmp_path):
    log, rec = tmp_path / "calls.jsonl", tmp_path / "rec.json"
    with running(lambda body, i: {"raw": str(i)}) as s:
        for _ in range(2):
            p, port = program("--upstream", s.url, "--log", log, "--record", rec)
            there = Running(None, log, port)
            assert there.chat(USER)[0] == there.chat([*USER, *USER])[0] == 200
            p.send_signal(signal.SIGTERM)
            assert p.wait(30) == 0
        assert [c["content"] for c in json.loads(rec.read_text())["calls"]] == ["0", "1", "2", "3"]
        assert len({r["call_key"] for r in map(json.loads, log.read_text().splitlines())}) == 4


def test_sigterm_ends_calls_in_flight_and_records_them(program, tmp_path):
    log = tmp_path / "calls.jsonl"
    with running([{"_hang": True}]) as s:
        p, port = program("--upstream", s.url, "--log", log)
        raw = Running(None, log, port).open({"model": "m", "messages": USER})
        wait_for(lambda: s.log)
        p.send_signal(signal.SIGTERM)
        assert p.wait(30) == 0 and p.stderr.read() == ""
        r = json.loads(log.read_text())
        assert (r["error"], r["client_disconnect"], r["complete"]) == ("proxy_shutdown", False, False)
        raw.close()


def test_bad_arguments_are_one_line_and_exit_code_2(program, tmp_path):
    log = tmp_path / "c.jsonl"
    _, taken = program("--upstream", "http://127.0.0.1:9", "--log", log)
    for args, says in [
        (["--port", taken, "--log", tmp_path / "d.jsonl"], f"port {taken} on 127.0.0.1 cannot be used"),
        (["--log", log], "another proxy writes this file"),
        (["--log", tmp_path / "no/c.jsonl"], "does not exist"),
    ]:
        p, _ = program("--upstream", "http://127.0.0.1:9", *args, wait=False)
        err = p.communicate(timeout=20)[1]
        assert p.returncode == 2 and says in err and err.count("\n") == 1, err


@pytest.mark.parametrize(("args", "says"), [
    (["--replay", "bad.json", "--server-kind", "vllm"], "not a JSON file"),
    (["--replay", "/nowhere.json", "--server-kind", "vllm"], "/nowhere.json: No such file"),
    (["--replay", "bad.json"], "--replay needs --server-kind vllm, llamacpp or openai"),
    *[(["--upstream", x], "expected a URL") for x in ("localhost:1", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:1:2", "ftp://x")],
    *[([option, "."], f"{option} .: is a folder, expected a file") for option in ("--log", "--bodies", "--record")],
    (["--replay", "bad.json", "--replay-words", "--server-kind", "llamacpp"], "--replay-words needs --replay-mode putback and"),
    (["--replay-words"], "give it with --replay"),
    (["--replay-mode", "force", "--server-kind", "vllm"], "give it with --replay"),
    (["--record", "bad.json"], "--record bad.json: holds another run, since d.jsonl has no calls yet: give another file"),
    *[([f"--read-timeout={x}"], f"argument --read-timeout: found {x!r}, expected seconds") for x in ("-1", "nan", "inf", "1e300", "long", "")],
    *[([f"--port={x}"], f"argument --port: found {x!r}, expected a port") for x in ("-1", "nan", "65536", "1e3", "http", "")],
])
def test_arguments_that_cannot_be_meant_are_one_line(tmp_path, monkeypatch, capsys, args, says):
    (tmp_path / "bad.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        llm_proxy.main(["--upstream", "http://127.0.0.1:9", "--port", "0", "--log", "d.jsonl", *args])
    assert end.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "d.jsonl").exists()


def test_without_aiohttp_it_names_the_command_that_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)  # an import of it fails
    with pytest.raises(SystemExit) as end:
        llm_proxy.main(["--upstream", "http://127.0.0.1:9", "--port", "0", "--log", str(tmp_path / "d.jsonl")])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "aiohttp is missing in" in said and "`bash 01_setup.sh`" in said


# --- a real server


@pytest.mark.integration
def test_replay_on_llama_cpp_behaves_like_the_live_run(program, llamacpp_server, tmp_path):
    from servers import adapter

    llama = adapter.get("llamacpp", llamacpp_server)
    users = ["Say hello.", "Name three colours.", "And the capital of France?", "Thank you."]

    def talk(*args, stream=False):
        llama.reset_cache()
        p, at = program("--upstream", llama.base_url, "--server-kind", "llamacpp", *args)
        messages, texts = [], []
        for i, text in enumerate(users):
            messages.append({"role": "user", "content": text})
            body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 10 if i == 1 else 40, "stream": stream}
            status, _, data = Running(None, None, at).post(body, {"X-Session-ID": "s"})
            assert status == 200, data
            if stream:
                objects = [json.loads(x[6:]) for x in data.decode().split("\n\n") if x.startswith("data: {")]
                texts.append("".join(c["delta"].get("content") or "" for o in objects for c in o["choices"]))
            else:
                texts.append(json.loads(data)["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": texts[-1]})
        p.send_signal(signal.SIGTERM)
        assert p.wait(30) == 0
        return texts

    talk("--log", tmp_path / "live.jsonl", "--record", tmp_path / "rec.json")
    rec = load_recording(tmp_path / "rec.json")
    for i, c in enumerate(rec["calls"]):  # what is replayed is never what the server would say itself
        c["content"] = f"Recorded reply number {i}: wholly other words, of another length than the model's."
    (tmp_path / "other.json").write_text(json.dumps(rec))
    live = [json.loads(x) for x in (tmp_path / "live.jsonl").read_text().splitlines()]
    assert [x["cached_tokens"] for x in live][0] == 0 and live[-1]["cached_tokens"] > 60
    for stream in (False, True):
        texts = talk("--log", tmp_path / f"replay{stream}.jsonl", "--replay", tmp_path / "other.json", stream=stream)
        assert texts == [c["content"] for c in rec["calls"]]
        replay = [json.loads(x) for x in (tmp_path / f"replay{stream}.jsonl").read_text().splitlines()]
        for a, b in zip(live, replay, strict=True):
            assert a["completion_tokens"] == b["completion_tokens"] == b["replay"]["asked_tokens"]
            # Text whose last tokens come back as others costs a few tokens; they are counted, and explain the difference.
            lost = b["replay"]["recomputed_tokens"] or 0
            assert abs(a["prompt_tokens"] - b["prompt_tokens"]) <= lost + 1
            assert abs(a["cached_tokens"] - (b["cached_tokens"] + lost)) <= llama.cache_block and lost <= 4
