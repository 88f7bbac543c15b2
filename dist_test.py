"""Check that the GPUs of this machine can talk to each other, with short deadlines, so that a hang becomes a message.

    .venv-vllm/bin/python dist_test.py                                # the first two GPUs: copies between them, then NCCL all-reduce
    .venv-vllm/bin/python dist_test.py --gpus 0,1,2,3 --step-timeout-s 60
    .venv-vllm/bin/python dist_test.py --backend gloo                 # the same check between processes on the CPU, no GPU needed
    .venv-vllm/bin/python dist_test.py --ranks 0 --master-port 29511  # rank 0 here; rank 1 by the same command with --ranks 1, in a container for instance

Run it with the interpreter that has the server's torch (SERVER_VENV). A tensor-parallel server that hangs at its start says
nothing for minutes; this says which step hangs within --step-timeout-s. Each step runs in a process of its own; the parent watches
the clock and kills what does not move. Data is compared, since a broken peer-to-peer path can also deliver zeros at full speed.

When all-reduce hangs or fails it is tried again with one setting after the other (NCCL_P2P_DISABLE=1 first), and the verdict names
the one that works. With NCCL_P2P_DISABLE=1 vLLM also needs --disable-custom-all-reduce, whose kernels use the same path. GPU numbers
are CUDA's, that is positions in CUDA_VISIBLE_DEVICES where it is set, not nvidia-smi's.

Exit codes: 0 everything arrived, 1 something hung, failed or arrived wrong, 2 nothing to check (no torch, too few GPUs, bad arguments).
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time

START_TIMEOUT_S = 120.0  # importing torch and starting CUDA from a cold disk took up to a minute
PR_SET_PDEATHSIG = 1
REPEATS = 5  # timed copies and all-reduces after one that warms up

# Tried in this order when the collective fails; what each means is the advice that goes with it.
REMEDIES = {
    "nccl": [
        ({"NCCL_P2P_DISABLE": "1"},
         "peer-to-peer transfers do not work here (often PCIe ACS or the IOMMU, or a virtual machine): set NCCL_P2P_DISABLE=1 and start "
         "vLLM with --disable-custom-all-reduce"),
        ({"NCCL_SHM_DISABLE": "1"},
         "shared memory does not work here: enlarge /dev/shm (docker run --ipc=host or --shm-size=8g), or set NCCL_SHM_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
         "neither peer-to-peer nor shared memory works here: set NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 (slow), and start vLLM with "
         "--disable-custom-all-reduce"),
        ({"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"},
         "NCCL picks a network interface that does not reach this machine: set NCCL_SOCKET_IFNAME=lo and NCCL_IB_DISABLE=1"),
    ],
    "gloo": [
        ({"GLOO_SOCKET_IFNAME": "lo"}, "the host's name does not resolve to an address of this machine: set GLOO_SOCKET_IFNAME=lo"),
    ],
}

# What a hang or a failure in a step usually means.
ADVICE = {
    "import torch": "torch does not load: a slow disk, or an installation that does not fit this machine",
    "start CUDA": "the driver does not answer: see `nvidia-smi` and `dmesg`; machines with NVSwitch need nvidia-fabricmanager running",
    "copy": "copies between these GPUs do not arrive: set NCCL_P2P_DISABLE=1 and start vLLM with --disable-custom-all-reduce; PCIe ACS or "
            "the IOMMU is the usual cause",
    "meet": "the ranks did not find each other: a rank is missing, or a firewall or the wrong interface is in the way "
            "(NCCL_SOCKET_IFNAME=lo, GLOO_SOCKET_IFNAME=lo)",
    "all-reduce": "set NCCL_P2P_DISABLE=1 and start vLLM with --disable-custom-all-reduce",
}


# ---- the parent: deadlines ----


def supervise(commands, step_timeout_s, start_timeout_s=START_TIMEOUT_S, grace_s=3.0):
    """Run commands (dicts with `name`, `argv` and optionally `env`) side by side and watch their steps. A command prints one JSON object
    per line: {"step": NAME} when it begins a step, anything else is a result. One that begins no new step for step_timeout_s (at first
    start_timeout_s; a step may ask for another time with "allow_s") hangs. When one hangs or fails the others get grace_s, then all are killed, groups and all.

    Returns a list of dicts, one per command: `name`, `step` (the last one begun), `results`, `state` ("ok", "hung", "failed", "killed":
    stopped because another one hung or failed), `exit`, `errors` (end of its stderr), `stuck` (it survived SIGKILL)."""
    watch, runs = selectors.DefaultSelector(), []
    try:
        for c in commands:
            err = tempfile.TemporaryFile()  # noqa: SIM115 (closed in finish(); a pipe could fill up and be the hang)
            env = {**os.environ, **c.get("env", {}), "PYTHONUNBUFFERED": "1"}
            p = subprocess.Popen(c["argv"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, env=env, start_new_session=True)
            r = {"name": c["name"], "step": "start", "results": [], "state": None, "exit": None, "errors": "", "stuck": False}
            r |= {"process": p, "err": err, "rest": b"", "deadline": time.monotonic() + start_timeout_s}
            os.set_blocking(p.stdout.fileno(), False)
            watch.register(p.stdout, selectors.EVENT_READ, r)
            runs.append(r)
        end = None
        while any(r["state"] is None for r in runs):
            for key, _ in watch.select(timeout=0.1):
                if not take_lines(key.data, step_timeout_s):
                    watch.unregister(key.fileobj)
            now = time.monotonic()
            for r in runs:
                if r["state"] is None and r["process"].poll() is not None:
                    take_lines(r, step_timeout_s)
                    r["exit"] = r["process"].returncode
                    r["state"] = "ok" if r["exit"] == 0 else "failed"
                elif r["state"] is None and now > r["deadline"]:
                    r["state"] = "hung"
            if end is None and any(r["state"] in ("hung", "failed") for r in runs):
                end = now + grace_s
            if end is not None and now > end:
                for r in runs:
                    r["state"] = r["state"] or "killed"
    finally:
        for r in runs:
            finish(r)
        watch.close()
    return [{k: r[k] for k in ("name", "step", "results", "state", "exit", "errors", "stuck")} for r in runs]


def take_lines(r, step_timeout_s):
    """Read what a command has printed; False at the end of its output."""
    try:
        data = os.read(r["process"].stdout.fileno(), 1 << 16)
    except BlockingIOError:
        return True
    *lines, r["rest"] = (r["rest"] + data).split(b"\n")
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # something that a library printed
        if isinstance(said, dict) and "step" in said:
            r["step"], r["deadline"] = said["step"], time.monotonic() + said.get("allow_s", step_timeout_s)
        else:
            r["results"].append(said)
    return bool(data)


def finish(r):
    """Kill a command's process group and collect the end of its stderr."""
    p = r["process"]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(p.pid, signal.SIGKILL)
    try:
        p.wait(5)
    except subprocess.TimeoutExpired:
        r["stuck"] = True
    r["err"].seek(0)
    r["errors"] = r["err"].read()[-4000:].decode("utf-8", "replace").strip()
    r["err"].close()
    p.stdout.close()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(name, role, env=None, **settings):
    """Command of a worker for supervise()."""
    argv = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps({"role": role, **settings})]
    return {"name": name, "argv": argv, "env": env or {}}


def explain(runs):
    """Lines about the runs that did not end well: who, in which step, how, and the last words of stderr."""
    lines = []
    for r in runs:
        if r["state"] == "hung":
            lines.append(f"{r['name']} hangs in step '{r['step']}'")
        elif r["state"] == "failed":
            why = f"signal {-r['exit']}" if r["exit"] < 0 else f"exit {r['exit']}"
            last = r["errors"].splitlines()[-1] if r["errors"] else "nothing on stderr"
            lines.append(f"{r['name']} failed in step '{r['step']}' ({why}): {last[:300]}")
        if r["stuck"]:
            lines.append(f"{r['name']} cannot even be killed: it is stuck in the driver; the machine needs a GPU reset or a reboot")
    return lines


def bad(runs):
    return [r for r in runs if r["state"] != "ok"]


def failed_step(runs):
    """The step to give advice on: that of the first which failed, else of the first which hung."""
    for state in ("failed", "hung"):
        for r in runs:
            if r["state"] == state:
                return r["step"]
    return None


# ---- the workers ----


def step(name, **more):
    print(json.dumps({"step": name, **more}), flush=True)


def result(**what):
    print(json.dumps(what), flush=True)


def work_probe(s):
    """What there is: torch, NCCL, GPUs."""
    step("import torch", allow_s=START_TIMEOUT_S)
    import torch

    found = {"torch": torch.__version__, "gpus": []}
    if s["backend"] == "nccl":
        step("start CUDA", allow_s=START_TIMEOUT_S)
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            found["gpus"].append({"name": p.name, "uuid": str(getattr(p, "uuid", "")), "memory_gib": round(p.total_memory / 2**30, 1)})
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl and found["gpus"] else None
    else:
        found["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    result(**found)


def work_copy(s):
    """Copy a pattern from each GPU to each other one in one process, compare on arrival, time it."""
    step("import torch", allow_s=START_TIMEOUT_S)
    import torch

    step("start CUDA", allow_s=START_TIMEOUT_S)
    n = s["size_mb"] * 2**20 // 4
    for a in s["gpus"]:
        torch.zeros(1, device=f"cuda:{a}")
    for a in s["gpus"]:
        for b in (g for g in s["gpus"] if g != a):
            step("copy")
            pattern = torch.arange(n, dtype=torch.int32) + 7 * a + 13 * b
            source = pattern.to(f"cuda:{a}")
            target = torch.zeros_like(source, device=f"cuda:{b}")
            target.copy_(source)
            torch.cuda.synchronize(a)
            torch.cuda.synchronize(b)
            t0 = time.monotonic()
            for _ in range(REPEATS):
                target.copy_(source)
            torch.cuda.synchronize(a)
            torch.cuda.synchronize(b)
            took = (time.monotonic() - t0) / REPEATS
            result(source=a, target=b, right=bool(torch.equal(target.cpu(), pattern)), peer_access=torch.cuda.can_device_access_peer(b, a),
                   gb_per_s=round(4 * n / took / 1e9, 2))


def work_rank(s):
    """One rank: meet the others, all-reduce a few numbers and then --size-mb, compare with the sum that must come out."""
    step("import torch", allow_s=START_TIMEOUT_S)
    import datetime

    import torch
    import torch.distributed as dist

    rank, world = s["rank"], s["world"]
    if s["backend"] == "nccl":
        step("start CUDA", allow_s=START_TIMEOUT_S)
        device = torch.device("cuda", s["gpu"])
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        wait, more = torch.cuda.synchronize, {"device_id": device}
    else:
        device, more = torch.device("cpu"), {}

        def wait():
            pass

    step("meet")
    # The parent's deadline comes first; torch's own is the second line of defence for ranks started elsewhere.
    dist.init_process_group(s["backend"], init_method=f"tcp://{s['master_addr']}:{s['master_port']}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=s["step_timeout_s"] + 30), **more)
    for n in (4, s["size_mb"] * 2**20 // 4):
        step("all-reduce")
        base = torch.arange(n, dtype=torch.float32, device=device) % 1024
        expected = world * base + world * (world - 1) / 2
        right, took = True, None
        for k in range(1 + REPEATS):
            x = base + rank
            wait()
            t0 = time.monotonic()
            dist.all_reduce(x)
            wait()
            if k == 1:
                took = 0.0
            if k >= 1:
                took += (time.monotonic() - t0) / REPEATS
            right = right and bool(torch.equal(x, expected))
        result(rank=rank, bytes=4 * n, right=right, ms=round(took * 1e3, 3), gb_per_s=round(4 * n / took / 1e9, 2))
    step("leave")
    dist.destroy_process_group()


ROLES = {"probe": work_probe, "copy": work_copy, "rank": work_rank}


# ---- the check ----


def collective(a, gpus, env):
    """Run the ranks that start here once. Returns supervise()'s list."""
    port = a.master_port or free_port()
    common = {"backend": a.backend, "world": a.world_size, "size_mb": a.size_mb, "step_timeout_s": a.step_timeout_s,
              "master_addr": a.master_addr, "master_port": port}
    return supervise([worker(f"rank {r}", "rank", env, rank=r, gpu=gpus[r] if gpus else None, **common) for r in a.ranks], a.step_timeout_s)


def sums(runs):
    return [x for r in runs for x in r["results"] if "rank" in x]


def works(runs):
    return not bad(runs) and bool(sums(runs)) and all(x["right"] for x in sums(runs))


def complain(what, runs):
    """Print why a part failed; returns the advice for it."""
    wrong = [x for r in runs for x in r["results"] if not x.get("right", True)]
    for line in explain(runs):
        print(f"  {line}")
    if wrong:
        print(f"  {len(wrong)} of {sum(len(r['results']) for r in runs)} {what} results are wrong: data arrives damaged")
    return ADVICE.get(failed_step(runs) or "all-reduce", "")


def check(a):
    """The whole check for parsed arguments; prints what it finds and returns the exit code."""
    if importlib.util.find_spec("torch") is None:
        print(f"dist_test: torch is not installed for {sys.executable}: run this with the server's interpreter (.venv/bin/python after "
              "`bash 01_setup.sh` with a vLLM profile)", file=sys.stderr)
        return 2
    runs = supervise([worker("the probe", "probe", backend=a.backend)], max(a.step_timeout_s, START_TIMEOUT_S))
    if bad(runs):
        print("FAILED: torch does not start")
        print(f"  {complain('probe', runs)}")
        return 1
    found = runs[0]["results"][0]
    if a.backend == "gloo":
        if not found["gloo"]:
            print(f"dist_test: torch {found['torch']} was built without gloo", file=sys.stderr)
            return 2
        print(f"torch {found['torch']}, gloo, {a.world_size} processes on the CPU")
        gpus = None
    else:
        gpus = a.gpus or list(range(a.world_size))
        if len(found["gpus"]) <= max(gpus):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            print(f"dist_test: torch {found['torch']} sees {len(found['gpus'])} GPUs, expected GPU {', '.join(map(str, gpus))} "
                  f"(CUDA_VISIBLE_DEVICES={visible}); --backend gloo checks without GPUs", file=sys.stderr)
            return 2
        if found["nccl"] is None:
            print(f"dist_test: torch {found['torch']} was built without NCCL", file=sys.stderr)
            return 2
        print(f"torch {found['torch']}, NCCL {found['nccl']}")
        for i in gpus:
            g = found["gpus"][i]
            print(f"  GPU {i}: {g['name']}, {g['memory_gib']} GiB, {g['uuid']}")
    for name in sorted(k for k in os.environ if k.startswith(("NCCL_", "GLOO_"))):
        print(f"  set already: {name}={os.environ[name]}")
    copies = check_copies(a, gpus) if gpus and len(a.ranks) == a.world_size else True
    return 0 if check_collective(a, gpus) and copies else 1


def check_copies(a, gpus):
    """Copies between all pairs of GPUs in one process, as a server's custom all-reduce kernels do them. True when all arrive."""
    runs = supervise([worker("the copy", "copy", gpus=gpus, size_mb=a.size_mb)], a.step_timeout_s)
    for x in runs[0]["results"]:
        print(f"copy GPU {x['source']} -> {x['target']}: {'arrives' if x['right'] else 'DAMAGED'}, {x['gb_per_s']} GB/s, peer access "
              f"{'yes' if x['peer_access'] else 'no (through the host; vLLM then needs --disable-custom-all-reduce)'}")
    if bad(runs) or not all(x["right"] for x in runs[0]["results"]):
        print("FAILED: copy between GPUs")
        print(f"  {complain('copy', runs) or ADVICE['copy']}")
        return False
    return True


def check_collective(a, gpus):
    """All-reduce as it is, and with one remedy after the other when it does not work. True when it works as it is."""
    runs = collective(a, gpus, {})
    if works(runs):
        for size in sorted({x["bytes"] for x in sums(runs)}):
            slowest = max((x for x in sums(runs) if x["bytes"] == size), key=lambda x: x["ms"])
            print(f"all-reduce of {size} bytes over {a.world_size} ranks: right, {slowest['ms']} ms, {slowest['gb_per_s']} GB/s")
        print("OK")
        return True
    print(f"FAILED: {a.backend} all-reduce over {a.world_size} ranks, {a.step_timeout_s:g} s allowed per step")
    advice = complain("all-reduce", runs)
    if len(a.ranks) < a.world_size:
        missing = [r for r in range(a.world_size) if r not in a.ranks]
        print(f"  rank {', '.join(map(str, missing))} of {a.world_size} is started elsewhere (--ranks): does it run, with the same "
              "--master-addr, --master-port and --world-size?")
    elif a.remedies:
        for env, meaning in REMEDIES[a.backend]:
            said = " ".join(f"{k}={v}" for k, v in env.items())
            if all(os.environ.get(k) == v for k, v in env.items()):
                continue
            again = collective(a, gpus, env)
            print(f"  with {said}: {'works' if works(again) else '; '.join(explain(again)) or 'data arrives damaged'}")
            if works(again):
                print(f"  {meaning}")
                return False
    print(f"  {advice}")
    return False


def whole_numbers(text):
    values = [int(x) for x in text.split(",")]
    if min(values) < 0 or len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"'{text}': expected different whole numbers such as 0,1")
    return values


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    p.add_argument("--gpus", type=whole_numbers, help="GPUs, one rank each (default: the first --world-size)")
    p.add_argument("--world-size", type=int, help="ranks (default: one per GPU of --gpus, else 2)")
    p.add_argument("--ranks", type=whole_numbers, help="start only these ranks here; the others are started by hand")
    p.add_argument("--master-addr", default="127.0.0.1", help="where rank 0 listens")
    p.add_argument("--master-port", type=int, help="port where rank 0 listens (default: a free one)")
    p.add_argument("--step-timeout-s", type=float, default=30.0, help="seconds that one step may take before it counts as a hang")
    p.add_argument("--size-mb", type=int, default=64, help="MiB that the large copy and all-reduce move")
    p.add_argument("--no-remedies", dest="remedies", action="store_false", help="do not look for a setting that helps")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives a parent that was killed
        settings = json.loads(a.worker)
        ROLES[settings["role"]](settings)
        return
    a.world_size = a.world_size or (len(a.gpus) if a.gpus else 2)
    a.ranks = a.ranks or list(range(a.world_size))
    if a.world_size < 2:
        p.error(f"--world-size {a.world_size}: a check of communication needs at least 2 ranks")
    if a.gpus and len(a.gpus) != a.world_size:
        p.error(f"--gpus names {len(a.gpus)} GPUs for --world-size {a.world_size}: one per rank")
    if max(a.ranks) >= a.world_size:
        p.error(f"--ranks {max(a.ranks)}: ranks of --world-size {a.world_size} are 0 to {a.world_size - 1}")
    if len(a.ranks) < a.world_size and not a.master_port:
        p.error("--ranks needs --master-port, the same for all ranks")
    if not a.step_timeout_s > 0 or a.size_mb < 1:
        p.error("--step-timeout-s and --size-mb must be more than 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(check(a))


if __name__ == "__main__":
    main()
