"""A calibration run of a machine whose call model is known: samples, calls and idle files as the sampler and the microbenchmark write them.

    run = make_run(folder, contexts=[1024, 4096], outputs=[64, 256], reps=3, noise=0.01)
    calibrate.calibrate(**run.paths, out_dir=folder / "out")

Power is constant within a call's prefill and within its decode, and idle between calls. Counters behave like the real ones: NVML steps
every 100 ms, the sampler knows when to a few milliseconds; RAPL wraps; the model source counts estimated microjoules.
"""

import json
from dataclasses import dataclass

import numpy as np

T_BEGIN = 1_796_000_000.0
MONO = 1000.0
# A machine like an H200 with a 30B mixture of experts. Values per call, per token, per pair of tokens; the floor holds above 512 uncached
# tokens, or above those that "floor_above" says.
TERMS = ("call", "output", "uncached", "decode_attention", "prefill_attention", "cached", "prefill_floor")
TRUTH = {
    "gpu": dict(zip(TERMS, (1.0, 0.5, 0.008, 1.5e-5, 7e-7, 2e-4, 0.0), strict=True)),
    "cpu": dict(zip(TERMS, (0.5, 0.1, 0.002, 1e-6, 1e-8, 1e-5, 0.0), strict=True)),
    "dram": dict(zip(TERMS, (0.1, 0.02, 0.0005, 0.0, 0.0, 0.0, 0.0), strict=True)),
    "time": dict(zip(TERMS, (0.02, 0.0045, 1.2e-5, 2.5e-8, 1.4e-9, 2e-6, 0.0), strict=True)),
}
IDLE_W = {"gpu": 125.0, "cpu": 60.0, "dram": 8.0}
WRAP_UJ = 262_143_328_850


def cost(truth, prompt, cached, completion):
    """The truth itself, written out term by term (not through the code under test)."""
    u, n = prompt - cached, completion - 1
    prefill = truth["uncached"] * u + truth["prefill_attention"] * u * (cached + u / 2)
    if u > truth.get("floor_above", 512):
        prefill = max(prefill, truth["prefill_floor"])
    return (
        truth["call"] + truth["cached"] * cached + prefill,
        truth["output"] * n + truth["decode_attention"] * n * (prompt + completion / 2),
    )


@dataclass
class Run:
    folder: object
    paths: dict
    calls: list


def make_run(folder, contexts=(1024, 4096, 8192, 16384), outputs=(64, 192, 512), reps=3, states=("miss", "hit"), noise=0.01,
             domains=("gpu0",), sources=None, seed=1, truth=None, quiet_s=0.5, tokens=None, cached=None, first_token=True, idle_s=30.0,
             idle_drift=0.0, idle_burst=0.0, idle_load=None, energy_noise=None, append=(), block=16, pairs=None, duty=1.0):  # fmt: skip
    """Write the files of a run into `folder`.

    noise       relative standard deviation of a call's energy and time
    energy_noise  that of its energy, where it is another one
    tokens      function of (rng, context): measured prompt lengths that differ from the plan
    cached      function of (context, state) that replaces the cached tokens reported
    append      cells (cached, uncached, output) for append_calls.jsonl
    pairs       (context, output) instead of the full grid
    duty        share of each step in which the GPU's counter looks at the power
    idle_drift  relative change of the loaded idle file's power over its length
    idle_burst  extra power (W) in a fifth of the loaded idle file
    idle_load   function of seconds (array) that gives the extra power (W) in the loaded idle file"""
    rng = np.random.default_rng(seed)
    truth = truth or TRUTH
    sources = sources or {}
    folder.mkdir(parents=True, exist_ok=True)
    plan = []
    for rep in range(reps):
        cells = list(pairs) if pairs else [(c, o) for c in contexts for o in outputs]
        rng.shuffle(cells)
        plan += [("grid", int(c), int(o), s, rep) for c, o in cells for s in states]
    plan += [("append", c, o, u, 0) for c, u, o in append]
    t = 1.5
    knots, powers = [0.0], []  # power of the machine per domain, piecewise constant
    calls = {"grid": [], "append": []}
    for seq, (kind, c, output, s, rep) in enumerate(plan):
        if kind == "grid":
            prompt = int(tokens(rng, c)) if tokens else c
            hit = (prompt - 1) // block * block if s == "hit" else 0
            cell = {"context": c, "output": output, "state": s, "rep": rep}
        else:
            prompt, hit = c + s, c
            cell = {"context": c + s, "output": output, "state": "append", "rep": rep, "cached": c, "uncached": s}
        first, rest = cost(truth["time"], prompt, hit, output)
        stretch = max(0.2, 1 + noise * rng.standard_normal())
        first, rest = first * stretch, rest * stretch
        parts = {}
        for d in domains:
            a, b = cost(truth[d[:-1]], prompt, hit, output)
            wobble = max(0.2, 1 + (noise if energy_noise is None else energy_noise) * rng.standard_normal()) / domains_share(d, domains)
            parts[d] = (a * wobble / first, b * wobble / rest if rest else 0.0)
        start = t
        knots += [start, start + first, start + first + rest]
        powers += [{d: 0.0 for d in domains}, {d: parts[d][0] for d in domains}, {d: parts[d][1] for d in domains}]
        end = start + first + rest
        reported = cached(c, s) if cached and kind == "grid" else hit
        calls[kind].append(
            {"id": f"call-{seq}", "seq": seq, "t_start": T_BEGIN + start, "t_first": T_BEGIN + start + first if first_token else None,
             "t_end": T_BEGIN + end, "mono_start": MONO + start, "mono_end": MONO + end, "status": 200, "complete": True, "error": None,
             "model": "synthetic", "prompt_tokens": prompt, "cached_tokens": reported, "completion_tokens": output, "cell": cell,
             "transport": "chat", "valid": True}
        )  # fmt: skip
        t = end + quiet_s + 0.05 * rng.random()
    knots.append(t + 1.0)
    powers.append({d: 0.0 for d in domains})
    write_samples(folder / "samples.csv", rng, domains, sources, np.array(knots), powers, duty)
    for name, watts in (("idle_loaded", 1.0), ("idle_bare", 0.65)):
        n = max(60, round(2 * idle_s))  # pieces of constant power, of half a second or less
        level = np.linspace(-idle_drift / 2, idle_drift / 2, n)
        ripple = 0.003 * rng.standard_normal(n) + (level if name == "idle_loaded" else 0.0)
        extra = np.zeros(n)
        if name == "idle_loaded":
            extra[n // 3 : n // 3 + n // 5] = idle_burst
            extra += idle_load((np.arange(n) + 0.5) * idle_s / n) if idle_load else 0.0
        steps = [{d: (watts * (1 + r) - 1) * base_w(d, domains) + x for d in domains} for r, x in zip(ripple, extra, strict=True)]
        write_samples(folder / f"{name}.csv", rng, domains, sources, np.linspace(0, idle_s, n + 1), steps)
    for kind, name in (("grid", "calls.jsonl"), ("append", "append_calls.jsonl")):
        if calls[kind]:
            (folder / name).write_text("".join(json.dumps(r) + "\n" for r in calls[kind]))
    paths = {"samples_path": folder / "samples.csv", "calls_path": folder / "calls.jsonl", "idle_loaded": folder / "idle_loaded.csv",
             "idle_bare": folder / "idle_bare.csv"}  # fmt: skip
    if append:
        paths["append"] = folder / "append_calls.jsonl"
    return Run(folder, paths, calls["grid"])


def domains_share(domain, domains):
    """Several GPUs share the work, and so the truth, evenly."""
    return sum(d[:-1] == domain[:-1] for d in domains)


def base_w(domain, domains):
    return IDLE_W[domain[:-1]] / domains_share(domain, domains)


def write_samples(path, rng, domains, sources, knots, powers, duty=1.0):
    """samples.csv and its sidecar; `powers[i]` {domain: W above idle} holds between knots[i] and knots[i + 1] (seconds)."""
    rows = np.arange(0.2, knots[-1], 0.1) + 0.002 * rng.random(len(np.arange(0.2, knots[-1], 0.1)))
    columns, counters = {"t": [f"{T_BEGIN + x:.6f}" for x in rows], "mono": [f"{MONO + x:.6f}" for x in rows]}, {}
    for d in domains:
        joules = np.r_[0.0, np.cumsum([(p[d] + base_w(d, domains)) * w for p, w in zip(powers, np.diff(knots), strict=True)])]
        kind = d[:-1]
        if kind == "gpu":
            phase = rng.random() * 0.1
            edge = np.floor((rows - phase) / 0.1) * 0.1 + phase
            counted = np.interp(edge, knots, joules)
            if duty < 1:  # what it saw at the end of each step, taken for the whole step
                rise = (np.interp(edge, knots, joules) - np.interp(edge - 0.1 * duty, knots, joules)) / duty
                counted = np.cumsum(np.where(np.r_[0.0, np.diff(edge)] > 0.05, rise, 0.0))
            columns[f"{d}_mj"] = [f"{55_000_000 + round(1e3 * j)}" for j in counted]
            seen = edge + 0.001 * rng.standard_normal(len(edge))
            columns[f"{d}_edge"] = [f"{T_BEGIN + x:.6f}" for x in seen]
            columns[f"{d}_edge_err"] = ["0.002000"] * len(rows)
            counters[f"{d}_mj"] = {"source": "nvml", "unit": "mJ", "name": "Synthetic GPU", "scope": "gpu", "update_period_s": 0.1}
        else:
            source = sources.get(d, "rapl")
            name = f"{d}_est_uj" if source == "model" else f"{d}_uj"
            start = WRAP_UJ - 50_000_000 if source == "rapl" else 0
            raw = [start + round(1e6 * j) for j in np.interp(rows, knots, joules)]
            columns[name] = [str(v % WRAP_UJ if source == "rapl" else v) for v in raw]
            counters[name] = {"source": source, "unit": "uJ", "scope": "package", "max_range_uj": WRAP_UJ if source == "rapl" else None}
    lines = [",".join(columns)] + [",".join(row) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    meta = {"t_begin": T_BEGIN, "host": {"cpu": "Synthetic CPU", "logical_cpus": 4}, "counters": counters}
    path.with_name(path.stem + ".meta.json").write_text(json.dumps(meta))
