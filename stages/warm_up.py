"""Calls of many sizes before a batch, until none of them waits for something that a warm server has done already (kernels being compiled).

    python stages/warm_up.py --url http://127.0.0.1:8000 --kind vllm --calib results/calib --limit-s 180

GPU servers compile or tune kernels when a size first occurs, for seconds at a time, and an agent's calls have sizes that no calibration
grid has. So a conversation grows here by random amounts, as an agent's does, and begins anew when it is long. A call counts as slow when it
takes over twice and over 1 s longer than the calibration says (as align_trial.py's flag stalled_call has it); after --calm calls in a row that
are not, the server is warm. Nothing of this is measured or kept.
Exit code: 0 warm, 4 still slow after --limit-s, 2 bad input, 1 the server failed.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SMALLEST, LARGEST = 16, 4096  # words that a turn adds
OUTPUT_TOKENS = 4


def warm_up(server, model, longest, params, limit_s, calm, seed=0):
    """(calls, slow calls, seconds, is it warm). `longest`: tokens after which a conversation begins anew. Raises ServerError."""
    import align_trial
    import calibrate
    import microbench
    from servers.adapter import ServerError

    rng, begin = random.Random(seed), time.monotonic()
    text, size, calls, slow, in_a_row = "", 0, 0, 0, 0
    while in_a_row < calm and time.monotonic() - begin < limit_s:
        words = round(math.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST))))
        if size + 2 * words > longest:
            text, size = "", 0
        text += " ".join(rng.choices(microbench.WORDS, k=words)) + " "
        body = {"model": model, "messages": [{"role": "user", "content": text}], **server.exact_output(OUTPUT_TOKENS)}
        rec = microbench.send(server.base_url, "/v1/chat/completions", body, "warm-up", max(limit_s, 60))
        if rec["error"] or not rec["prompt_tokens"]:
            raise ServerError(f"a warm-up call failed: {rec['error'] or 'no token counts came back'}")
        size, calls = rec["prompt_tokens"], calls + 1
        took_s = rec["mono_end"] - rec["mono_start"]
        said_s = float(calibrate.predict(params, size, rec["cached_tokens"] or 0, OUTPUT_TOKENS)["time_s"][0])
        is_slow = bool(align_trial.stalled(took_s, said_s))
        slow, in_a_row = slow + is_slow, 0 if is_slow else in_a_row + 1
    return calls, slow, time.monotonic() - begin, in_a_row >= calm


def main():
    from servers import adapter

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", required=True, help="root of the server")
    p.add_argument("--kind", required=True, choices=["vllm", "llamacpp", "openai"])
    p.add_argument("--calib", required=True, type=Path, help="folder with params.json")
    p.add_argument("--limit-s", type=float, default=180.0)
    p.add_argument("--calm", type=int, default=24, help="calls in a row that must not be slow (%(default)s)")
    a = p.parse_args()
    try:
        params = json.loads((a.calib / "params.json").read_text())
        server = adapter.get(a.kind, a.url)
        model, context = server.model()
        calls, slow, seconds, warm = warm_up(server, model, (context or 8192) - 64, params, a.limit_s, a.calm)
    except adapter.ServerError as e:
        print(f"warm_up: {e}", file=sys.stderr)
        sys.exit(1)
    except (OSError, ValueError, KeyError) as e:
        print(f"warm_up: {a.calib}: {type(e).__name__}: {e}; calibrate first: bash 03_calibrate.sh", file=sys.stderr)
        sys.exit(2)
    print(f"{'' if warm else 'WARNING: not '}warm after {calls} calls in {seconds:.0f} s, {slow} of them slow")
    sys.exit(0 if warm else 4)


if __name__ == "__main__":
    main()
