"""What the proxy adds to a call: the same server with and without it, taken in turns in one run. Medians, 95th percentiles and ratios.

    python bench/proxy_overhead.py                             # about a minute
    python bench/proxy_overhead.py --rounds 400 --out bench/proxy_overhead.csv      # the table as a file (--json: everything)
    python bench/proxy_overhead.py --litellm                   # LiteLLM's proxy beside it, when `litellm[proxy]` is installed

Server, proxy and client are three processes; the server sends a ready-made reply, so that what differs is the proxy. Measured are: time to
the first byte and to the end of a plain call, once after a pause in which the other targets were called (the caches are cold) and once right
behind it; time to the first byte of a stream; the time per chunk of a stream that comes as fast as it
can (total time / chunks); the delay from the server's write to the client's read of chunks that come singly, 2 ms apart; the CPU time of
the proxy per call and per single chunk; and 256 streams at once, of which every byte must arrive. The limits are 1 ms for the first byte
and 50 microseconds per chunk, at the median. `relay` is a bare TCP relay in Python that reads and writes bytes and understands nothing:
what any further process on the way costs on this machine. Exit code 1 when a limit is missed or a stream is not complete. Other work on
the machine delays every hop between processes and cools the caches: look at the load that is printed.
"""

import argparse
import asyncio
import contextlib
import csv
import importlib.util
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FIRST_BYTE_LIMIT_S, CHUNK_LIMIT_S, STREAMS = 1e-3, 50e-6, 256
# `id` holds the server's clock in nanoseconds: CLOCK_MONOTONIC is the same in all processes of a machine.
CHUNK = b'data: {"id":"%020d","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},' \
        b'"finish_reason":null}]}\n\n'
CHUNK_BYTES = len(CHUNK % 0)
LONG_PROMPT = "make: *** No rule to make target 'all'.\n" * 2500  # 100 KB, some 30,000 tokens
STAMP = re.compile(rb'"id":"(\d{20})"')
HEAD = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
END = (HEAD + b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
       + HEAD + b'"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":9,"total_tokens":18}}\n\n' + b"data: [DONE]\n\n")
PLAIN = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": {"prompt_tokens": 9, "completion_tokens": 200},
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 200}, "finish_reason": "stop"}],
}).encode()


async def server(port):
    """A minimal HTTP server: `n` and `pause` of the request's body say how many chunks come and how far apart."""

    async def talk(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                if not body.get("stream"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(PLAIN) + PLAIN)
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(body["n"]):
                    writer.write(b"%x\r\n%s\r\n" % (CHUNK_BYTES, CHUNK % time.monotonic_ns()))
                    await writer.drain()
                    await asyncio.sleep(body["pause"])
                writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(END), END))
        writer.close()

    s = await asyncio.start_server(talk, "127.0.0.1", port, backlog=1024)
    await s.serve_forever()


async def relay(port, up):
    """Bytes from each connection to the server and back."""

    class Pipe(asyncio.Protocol):
        other = None

        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.other.transport.write(data)

        def connection_lost(self, _):
            if self.other:
                self.other.transport.close()

    class Client(Pipe):
        def connection_made(self, transport):
            self.transport = transport
            transport.pause_reading()
            self.task = asyncio.ensure_future(self.connect())

        async def connect(self):
            _, self.other = await asyncio.get_running_loop().create_connection(Pipe, "127.0.0.1", up)
            self.other.other = self
            self.transport.resume_reading()

    s = await asyncio.get_running_loop().create_server(Client, "127.0.0.1", port, backlog=1024)
    await s.serve_forever()


async def call(session, url, stream=False, n=0, pause=0.0, delays=None, prompt="x" * 400):
    """(seconds to the first byte, seconds to the end, bytes) of one call; the delay of each chunk goes to the list `delays`."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": stream, "n": n, "pause": pause}
    if stream:
        body["stream_options"] = {"include_usage": True}
    t, first, size = time.perf_counter(), None, 0
    async with session.post(url + "/v1/chat/completions", json=body, headers={"Authorization": "Bearer sk-bench"}) as r:
        if r.status != 200:
            raise RuntimeError(f"{url} answered {r.status}: {(await r.text())[:200]}")
        async for chunk in r.content.iter_any():
            first = first or time.perf_counter() - t
            size += len(chunk)
            if delays is not None and (stamp := STAMP.search(chunk)):
                delays.append((time.monotonic_ns() - int(stamp[1])) / 1e9)
    return first, time.perf_counter() - t, size


def summary(values):
    v = sorted(values)
    if not v:
        return {"median_s": None, "p95_s": None, "n": 0}
    return {"median_s": statistics.median(v), "p95_s": v[int(0.95 * (len(v) - 1))], "n": len(v)}


async def measure(targets, rounds, chunks, pids):
    """{target: results}; the targets take turns, so that a busy machine is as unkind to one as to the other."""
    import aiohttp
    import psutil

    out = {name: {"plain": [], "plain_first": [], "plain_again": [], "long_prompt": [], "stream_first": [], "long": [], "single": []} for name in targets}

    def cpu_s(name):
        return sum(psutil.Process(pids[name]).cpu_times()[:2]) if name in pids else float("nan")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:
        for _ in range(20):
            for url in targets.values():
                await call(session, url)
                await call(session, url, stream=True, n=5)
        for i in range(rounds):
            order = list(targets.items()) if i % 2 else list(targets.items())[::-1]
            for name, url in order:
                first, total, _ = await call(session, url)
                out[name]["plain"].append(total)
                out[name]["plain_first"].append(first)
                out[name]["plain_again"].append((await call(session, url))[0])
                out[name]["long_prompt"].append((await call(session, url, prompt=LONG_PROMPT))[0])
                out[name]["stream_first"].append((await call(session, url, stream=True, n=5, pause=0.002))[0])
        for name, url in targets.items():  # CPU clocks have steps of 10 ms: many calls in a row
            cpu = cpu_s(name)
            for _ in range(rounds):
                await call(session, url)
            out[name]["cpu_s_per_call"] = (cpu_s(name) - cpu) / rounds  # nan for the server itself
        for i in range(9):
            order = list(targets.items()) if i % 2 else list(targets.items())[::-1]
            for name, url in order:
                _, total, size = await call(session, url, stream=True, n=chunks)
                if name != "litellm" and size != chunks * CHUNK_BYTES + len(END):
                    raise RuntimeError(f"{name}: {size} bytes of a stream arrived, expected {chunks * CHUNK_BYTES + len(END)}")
                out[name]["long"].append(total / chunks)
        for name, url in targets.items():
            cpu = cpu_s(name)
            # LiteLLM writes chunks of its own: when the server wrote what is in them is not known.
            await call(session, url, stream=True, n=chunks, pause=0.002, delays=None if name == "litellm" else out[name]["single"])
            out[name]["cpu_s_per_chunk"] = (cpu_s(name) - cpu) / chunks
        for name, url in targets.items():
            t = time.perf_counter()
            got = await asyncio.gather(*[call(session, url, stream=True, n=50, pause=0.02) for _ in range(STREAMS)])
            out[name]["many_s"] = time.perf_counter() - t
            out[name]["many_lost"] = sum(size != 50 * CHUNK_BYTES + len(END) for _, _, size in got)
    return out


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(url, process, timeout_s):
    end = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with contextlib.suppress(OSError):
            opener.open(url, timeout=2).close()
            return
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"proxy_overhead: {url} did not come up within {timeout_s} s")
        time.sleep(0.1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=200, help="calls of each kind and target")
    p.add_argument("--chunks", type=int, default=2000, help="chunks of a long stream")
    p.add_argument("--litellm", action="store_true", help="LiteLLM's proxy beside ours")
    p.add_argument("--json", help="write the numbers to this file too")
    p.add_argument("--out", help="write the table to this CSV file too")
    p.add_argument("--server", type=int, nargs=1, help=argparse.SUPPRESS)
    p.add_argument("--relay", type=int, nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.server or a.relay:
        asyncio.run(server(*a.server) if a.server else relay(*a.relay))
        return
    with contextlib.ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(*argv, **kw):
            process = subprocess.Popen([str(x) for x in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **kw)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        up, bare, ours = free_port(), free_port(), free_port()
        targets = {n: f"http://127.0.0.1:{x}" for n, x in (("direct", up), ("relay", bare), ("proxy", ours))}
        wait_for(targets["direct"], start(sys.executable, __file__, "--server", up), 20)
        process = start(sys.executable, __file__, "--relay", bare, up)
        pids = {"relay": process.pid}
        wait_for(targets["relay"], process, 20)
        process = start(sys.executable, REPO / "llm_proxy.py", "--upstream", targets["direct"], "--port", ours, "--log", tmp / "c.jsonl")
        pids["proxy"] = process.pid
        wait_for(targets["proxy"] + "/trajoule/metrics", process, 20)
        if a.litellm and all(importlib.util.find_spec(m) for m in ("litellm", "fastapi", "backoff")):
            port = free_port()
            config = tmp / "litellm.yaml"
            model = f"model: openai/m\n    api_base: {targets['direct']}/v1\n    api_key: sk-bench\n"
            config.write_text(f"model_list:\n- model_name: m\n  litellm_params:\n    {model}")
            env = {**os.environ, "LITELLM_OFFLINE_MODE": "true", "LITELLM_MASTER_KEY": "sk-bench"}
            process = start(Path(sys.executable).parent / "litellm", "--config", config, "--port", port, "--host", "127.0.0.1", env=env)
            targets["litellm"], pids["litellm"] = f"http://127.0.0.1:{port}", process.pid
            wait_for(targets["litellm"] + "/health/liveliness", process, 120)
        elif a.litellm:
            print("LiteLLM's proxy is not installed (pip install 'litellm[proxy]'): not compared")
        res = asyncio.run(measure(targets, a.rounds, a.chunks, pids))
    report(res, a)


SCALE = {"ms": 1e3, "us": 1e6}
MEASURES = [  # key, label, unit, limit in seconds of what the proxy adds
    ("plain_first", "plain call, first byte", "ms", FIRST_BYTE_LIMIT_S),
    ("plain", "plain call, end", "ms", None),
    ("plain_again", "plain call behind another, first byte", "ms", FIRST_BYTE_LIMIT_S),
    ("long_prompt", "prompt of 100 KB, first byte", "ms", FIRST_BYTE_LIMIT_S),
    ("stream_first", "stream, first byte", "ms", FIRST_BYTE_LIMIT_S),
    ("long", "per chunk of a fast stream", "us", CHUNK_LIMIT_S),
    ("single", "delay of a single chunk", "us", None),
]


def number(seconds, unit):
    """A cell of the table, '-' for what is not known."""
    return f"{'-':>12}" if seconds is None else f"{seconds * SCALE[unit]:12.3f}"


def report(res, a):
    """Print the table, write it where asked, exit with 1 when a limit is missed."""
    rows, missed = {}, []
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; "
          f"{a.rounds} rounds, {a.chunks} chunks a stream, targets in turns")
    print(f"{'':48}" + "".join(f"{n:>12}" for n in res) + "".join(f"{n + ' adds':>14}{'ratio':>8}" for n in res if n != "direct"))
    for key, label, unit, limit in MEASURES:
        s = rows[key] = {n: summary(r[key]) for n, r in res.items()}
        line = f"{f'{label}, median, {unit}':48}" + "".join(number(v["median_s"], unit) for v in s.values())
        for n, v in s.items():
            if n == "direct" or v["median_s"] is None:
                continue
            added = v["median_s"] - s["direct"]["median_s"]
            line += f"{added * SCALE[unit]:14.3f}{v['median_s'] / s['direct']['median_s']:8.2f}"
            if n == "proxy" and limit and added > limit:
                missed.append(f"{label}: {added * SCALE[unit]:.3f} {unit} added, limit {limit * SCALE[unit]:g} {unit}")
        print(line)
        print(f"{'   95th percentile':48}" + "".join(number(v["p95_s"], unit) for v in s.values()))
    for key, label, unit in [("cpu_s_per_call", "CPU time of a plain call", "ms"), ("cpu_s_per_chunk", "CPU time of a single chunk", "us")]:
        values = ["-" if n == "direct" else f"{r[key] * SCALE[unit]:.3f}" for n, r in res.items()]
        print(f"{f'{label}, {unit}':48}" + "".join(f"{v:>12}" for v in values))
    print(f"{f'{STREAMS} streams of 50 chunks, s':48}" + "".join(f"{r['many_s']:12.2f}" for r in res.values()))
    lost = {n: r["many_lost"] for n, r in res.items() if n != "litellm"}  # LiteLLM writes chunks of its own
    print(f"{'   incomplete streams':48}" + "".join(f"{x:12d}" for x in lost.values()))
    missed += [f"{x} of {STREAMS} streams through '{n}' are incomplete" for n, x in lost.items() if x]
    if a.json:
        cpu = {n: {k: r[k] for k in ("cpu_s_per_call", "cpu_s_per_chunk")} for n, r in res.items() if n != "direct"}
        many = {n: r["many_s"] for n, r in res.items()}
        text = json.dumps({"summary": rows, "cpu": cpu, "many_s": many, "incomplete": lost, "missed": missed}, indent=1, allow_nan=False)
        Path(a.json).write_text(text + "\n")
    if a.out:
        write_csv(rows, res, lost, a)
    for m in missed:
        print("MISSED", m)
    sys.exit(1 if missed else 0)


def write_csv(rows, res, lost, a):
    """The table as CSV: one line per measure and target, times in seconds, empty where nothing is known."""
    limits = {key: limit for key, _, _, limit in MEASURES}
    extra = {"cpu_s_per_call": a.rounds, "cpu_s_per_chunk": a.chunks, "many_s": STREAMS}
    with open(a.out, "w", newline="", encoding="utf-8") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["measure", "target", "n", "median_s", "p95_s", "added_s", "ratio", "limit_s", "incomplete", "cpus", "load", "python"])
        machine = [os.cpu_count(), f"{os.getloadavg()[0]:.2f}", platform.python_version()]
        for key, by_target in rows.items():
            direct = by_target["direct"]["median_s"]
            for name, v in by_target.items():
                known = v["median_s"] is not None
                added = v["median_s"] - direct if known and name != "direct" else None
                limit = limits[key] if name == "proxy" else None
                out.writerow([key, name, v["n"], *rounded(v["median_s"], v["p95_s"], added, v["median_s"] / direct if known else None), limit,
                              None, *machine])
        for key, n in extra.items():
            for name, r in res.items():
                value = r[key] if r[key] == r[key] else None  # not known of the server itself
                out.writerow([key, name, n, *rounded(value), None, None, None, None, lost.get(name) if key == "many_s" else None, *machine])


def rounded(*values):
    return [None if v is None else f"{v:.4g}" for v in values]


if __name__ == "__main__":
    main()
