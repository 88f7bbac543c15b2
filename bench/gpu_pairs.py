"""Does the sampler slow the server down? Does forcing a recorded reply, or a mask of allowed tokens? Interleaved pairs of one request.

    python bench/gpu_pairs.py --url http://127.0.0.1:8000 --what sampler --pairs 60 --out bench/h200_pairs_sampler.csv
    python bench/gpu_pairs.py --url http://127.0.0.1:8000 --what force   --pairs 30 --out bench/h200_pairs_force.csv   # vLLM with servers.force_reply
    python bench/gpu_pairs.py --url http://127.0.0.1:8000 --what words   --pairs 30 --out pairs_words.csv              # vLLM

One streamed request of exactly --tokens output tokens on a prompt that is cached; time per token = (last token - first token) / (tokens - 1).
`sampler`: the sampler process runs all the while and is stopped (SIGSTOP) for the requests without it. `force`: the reply's token ids are given
(those that the first request returned). `words`: 400 token ids are allowed, as in a replay whose server is held to words. Order within a pair
is random. Writes every pair and prints, for the time per token and the time to the first one, the mean of the paired differences in percent
of the mean without, with its 95 % interval by the paired t. (The mean of the pairs' ratios would not do: where single calls scatter by a
fifth, as the time to first token does, it comes out about 3 % too high.) --again PAIRS.csv prints the same for pairs that were written before. A
benchmark, run by hand on a GPU server: it reports, it passes no judgement.
"""

import argparse
import csv
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def request(url, body):
    """(seconds from the first token to the last, seconds to the first token, token ids or None) of one streamed completion."""
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=300)
    t0 = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"gpu_pairs: {url} answered {response.status}: {response.read(300)!r}")
    first = last = None
    ids, usage = [], None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        now = time.monotonic()
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        if event.get("choices"):
            ids += event["choices"][0].get("token_ids") or []
            first = first or now
            last = now
    connection.close()
    if usage["completion_tokens"] != body["max_tokens"]:
        raise SystemExit(f"gpu_pairs: {usage['completion_tokens']} tokens came, {body['max_tokens']} were asked for")
    return last - first, first - t0, ids


def effect(rows, quantity):
    """Mean paired difference of a quantity, with against without, in percent of the mean without: {"change_pct", "half_pct": half its 95 %
    interval (paired t), "without": mean, "scatter_pct": (without, with) standard deviations of single calls / their mean, "pairs"}."""
    import numpy as np

    from calibrate import t_quantile

    of = {(int(r["pair"]), int(r["on"])): float(r[quantity]) for r in rows}
    off, on = (np.array([of[pair, side] for pair, x in sorted(of) if x == 0]) for side in (0, 1))
    difference = on - off
    half = t_quantile(len(off) - 1) * difference.std(ddof=1) / np.sqrt(len(off)) if len(off) > 1 else np.nan
    scatter = tuple(100 * x.std(ddof=1) / x.mean() if len(x) > 1 else np.nan for x in (off, on))
    return {"change_pct": 100 * difference.mean() / off.mean(), "half_pct": 100 * half / off.mean(), "without": off.mean(),
            "scatter_pct": scatter, "pairs": len(off)}  # fmt: skip


def report(rows, what):
    for quantity, name in (("time_per_token_ms", "per token"), ("time_to_first_token_ms", "to the first token")):
        e = effect(rows, quantity)
        print(f"{what}: {e['without']:.4f} ms {name} without; with it {e['change_pct']:+.3f} % (95 % interval +-{e['half_pct']:.3f} %), "
              f"{e['pairs']} pairs; single calls scatter by {e['scatter_pct'][0]:.2g} % without and {e['scatter_pct'][1]:.2g} % with")  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url")
    p.add_argument("--what", choices=["sampler", "force", "words"], required=True)
    p.add_argument("--again", type=Path, metavar="PAIRS.csv", help="no request: only what these pairs say")
    p.add_argument("--pairs", type=int, default=60)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--context", type=int, default=1024, help="prompt tokens")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    if a.again:
        with open(a.again, newline="") as f:
            report(list(csv.DictReader(f)), a.what)
        return
    if not (a.url and a.out):
        p.error("--url and --out are needed, or --again")
    from servers import adapter

    name, _ = adapter.get("vllm", a.url).model()
    random.seed(1)
    prompt = [random.randrange(1000, 40000) for _ in range(a.context)]
    body = {"model": name, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": a.tokens}
    body |= {"ignore_eos": True, "min_tokens": a.tokens, "return_token_ids": True}
    for _ in range(3):
        _, _, ids = request(a.url, body)
    sampler = None
    if a.what == "sampler":
        folder = tempfile.mkdtemp()
        sampler = subprocess.Popen([sys.executable, str(ROOT / "sampler.py"), "-o", f"{folder}/samples.csv"])
        time.sleep(5)  # it has learned the counters' phases
    elif a.what == "force" and len(ids) < a.tokens:
        raise SystemExit("gpu_pairs: the server returned no token ids; --what force needs them (vLLM: return_token_ids)")
    rows = []
    try:
        for pair in range(a.pairs):
            took = {}
            for on in random.sample([False, True], 2):
                if sampler:
                    sampler.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                    time.sleep(1.0)  # a sampler that goes on finds its steps again
                extra = {}
                if a.what == "force" and on:
                    # the last token is the processor's own: it lets only an end of reply through, which ignore_eos keeps out of the way
                    extra = {"vllm_xargs": {"forced_reply": ",".join(map(str, ids[: a.tokens]))}}
                if a.what == "words" and on:
                    extra = {"allowed_token_ids": random.sample(range(1000, 40000), 400)}
                decode_s, first_s, _ = request(a.url, {**body, **extra})
                took[on] = decode_s / (a.tokens - 1)
                rows.append({"pair": pair, "on": int(on), "time_per_token_ms": decode_s / (a.tokens - 1) * 1e3, "time_to_first_token_ms": first_s * 1e3})
            if pair % 10 == 9:
                print(f"gpu_pairs: {pair + 1}/{a.pairs} pairs", file=sys.stderr)
    finally:
        if sampler:
            sampler.send_signal(signal.SIGCONT)
            sampler.terminate()
            sampler.wait()
    tmp = a.out.with_suffix(f".tmp{os.getpid()}")
    with open(tmp, "w", newline="") as f:
        w = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        w.writeheader()
        w.writerows(rows)
    os.replace(tmp, a.out)
    report(rows, a.what)


if __name__ == "__main__":
    main()
