"""What a person sees of one trajectory: a trace for Perfetto's UI, and a figure of power over time. align_trial.py draws them:

    python align_trial.py data/traj/fix-git__summarize-off__r1 --calib results/calib --out results/trials.csv \\
        --trace results/trace --timeline results/timeline

This file is no program of its own. A `view` is what it knows of a trajectory: `row` (its line of the table), `seen` (calls and
times), `commands`, `pieces` (the agent's execution cut at every moment that matters), `whole` (J per piece), `samples`, `domains`, `idle_w`
and `energy_between(edges)`, joules per domain between successive times.
"""

import argparse
import json
import math
import sys
import textwrap
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles  # noqa: E402


def power_series(samples):
    """{domain: (times, W)}: mean power between the rows of samples.csv."""
    t = np.asarray(samples.t)
    t = t[np.r_[True, np.diff(t) > 0]]
    e = samples.energy(t[:-1], t[1:])
    return {d: (t[:-1], e.joules[d] / np.diff(t)) for d in samples.domains}


def pieces_with_names(view):
    """(begins, ends, names) of the pieces of the agent's execution."""
    p = view["pieces"]
    return p["a"], p["b"], np.select([p["model"], p["command"]], ["model", "command"], "waiting")


def behaviour(row):
    """live, or which kind of replay: part of whatever is drawn."""
    if row["mode"] != "replay":
        return row["mode"] or "mode unknown"
    return f"replay, {row['recording_source'] or 'of unknown origin'}"


def write_trace(path, view):
    """One Chrome trace-event JSON: phases, calls and commands as slices, power as counter tracks. Opens in Perfetto's UI.

    Times are microseconds since the trial's begin, `otherData.t_begin` says when that was.
    """
    row, seen = view["row"], view["seen"]
    zero = min(x for x in (seen["begin"], seen["t0"], float(view["samples"].t[0])) if x is not None)

    def us(t):
        return round((t - zero) * 1e6)

    title = f"{row['trajectory']} ({row['outcome']}; {behaviour(row)})"
    events = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": title}}]

    def thread(tid, name):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})

    def slice_(tid, name, start, end, **args):
        args = {k: v for k, v in args.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))}
        events.append(
            {"ph": "X", "pid": 1, "tid": tid, "name": name, "cat": "trajoule", "ts": us(start), "dur": us(end) - us(start), "args": args}
        )

    thread(1, "phases")
    for name, (x, y) in (("setup", (seen["begin"], seen["t0"] or seen["end"])), ("verifier", seen["verifier"])):
        if x is not None and y is not None and y > x:
            slice_(1, name, x, y, energy_j=row[f"{name}_j"])
    a, b, label = pieces_with_names(view)
    first = np.flatnonzero(np.r_[True, label[1:] != label[:-1]]) if len(a) else []
    for i, j in zip(first, np.r_[first[1:], len(a)].astype(int) if len(first) else [], strict=True):
        slice_(1, str(label[i]), a[i], b[j - 1], energy_j=round(float(view["whole"][i:j].sum()), 3))

    lanes = []  # calls that overlap need tracks of their own: slices of one track must nest
    for c in seen["calls"]:
        lane = next((n for n, end in enumerate(lanes) if end <= c["start"]), len(lanes))
        lanes[lane : lane + 1] = [c["end"]]
        on = (a >= c["start"]) & (b <= c["end"])
        slice_(
            10 + lane, c["kind"] if c["ok"] else f"{c['kind']} (failed)", c["start"], c["end"], status=c["status"],
            prompt_tokens=c["prompt"], cached_tokens=c["cached"], completion_tokens=c["completion"], finish_reason=c["finish"],
            error=str(c["error"])[:200] if c["error"] else None, energy_j=round(float(view["whole"][on].sum()), 3) if on.any() else None,
        )  # fmt: skip
    for lane in range(len(lanes)):
        thread(10 + lane, "model calls" + (f" {lane + 1}" if len(lanes) > 1 else ""))
    thread(50, "commands")
    ordered = sorted(view["commands"], key=lambda c: c["start"])
    for c, after in zip(ordered, [x["start"] for x in ordered[1:]] + [math.inf], strict=False):
        slice_(50, c["keys"].strip()[:80] or "(continued)", c["start"], max(c["start"], min(c["end"], after)))
    for d, (t, w) in power_series(view["samples"]).items():
        for x, y in zip(t, w, strict=True):
            if math.isfinite(y):
                events.append({"ph": "C", "pid": 1, "name": f"{d} power", "ts": us(x), "args": {"W": round(float(y), 3)}})
    identity = ("trajectory", "task", "policy", "rep", "mode", "recording", "recording_source", "model", "hardware", "outcome")
    energy = ("total_s", "total_j", "total_domains", "gpu_source", "cpu_source", "attribution")
    other = {k: row[k] for k in identity + energy} | {"t_begin": zero}
    lines = ",\n".join(json.dumps(e, allow_nan=False, separators=(",", ":")) for e in events)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": other}, allow_nan=False, indent=1)
    csvfiles.replace(path, lambda f: f.write(head.removesuffix("\n}") + ',\n "traceEvents": [\n' + lines + "\n]}\n"))


PHASE_COLOURS = {"model": "#0072b2", "command": "#e69f00", "waiting": "#bbbbbb"}  # Okabe-Ito; dark, middle and light in grey


def three_digits(x):
    """A number as it is read: no exponent, no false precision."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def write_timeline(path, view, formats=()):
    """Figures `path`.png and what else is asked for: power over time coloured by what the agent was doing, energy per phase beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    row, t0, t1 = view["row"], view["seen"]["t0"], view["seen"]["t1"]
    groups = [g for g in ("gpu", "cpu") if view["domains"][g]]
    if not groups:
        return
    a, b, label = pieces_with_names(view)
    fig, axes = plt.subplots(len(groups), 2, figsize=(9, 1.5 + 1.9 * len(groups)), width_ratios=[4, 1], squeeze=False, layout="constrained")
    edges = np.unique(np.r_[np.linspace(t0, t1, min(1200, max(2, int((t1 - t0) * 10)))), a, b])
    edges = edges[np.r_[True, np.diff(edges) > 1e-6]]
    energy = view["energy_between"](edges)
    phase = label[np.clip(np.searchsorted(a, (edges[:-1] + edges[1:]) / 2, side="right") - 1, 0, len(a) - 1)]
    for (left, right), g in zip(axes, groups, strict=True):
        power = np.sum([energy[d] for d in view["domains"][g]], axis=0) / np.diff(edges)
        x = edges - t0
        for name, colour in PHASE_COLOURS.items():
            y = np.where(phase == name, power, 0.0)
            left.fill_between(x, np.r_[y, y[-1:]], step="post", color=colour, linewidth=0, label=name)
        idle = [view["idle_w"].get(d) for d in view["domains"][g]]
        if None not in idle:
            left.axhline(sum(idle), color="black", linewidth=0.8, linestyle="--", label="idle power subtracted")
        left.set_ylabel(f"{g.upper()} power (W)" + ("\nestimated" if row[f"{g}_source"] == "estimated" else ""))
        left.set_xlim(0, t1 - t0)
        left.set_ylim(bottom=0)
        parts = {k: row[f"{g}_{k}_j"] for k in PHASE_COLOURS if row[f"{g}_{k}_j"] is not None}
        unit, scale = ("kJ", 1000) if max(parts.values(), default=0) >= 10_000 else ("J", 1)
        bars = right.bar(list(parts), [x / scale for x in parts.values()], color=[PHASE_COLOURS[k] for k in parts])
        right.bar_label(bars, labels=[three_digits(x / scale) for x in parts.values()], fontsize=8, padding=2)
        if g == "gpu" and row["gpu_err_j"] is not None and "model" in parts:  # twice the counter's random uncertainty
            right.errorbar(["model"], [parts["model"] / scale], [2 * row["gpu_err_j"] / scale], color="black", linewidth=0.8, capsize=2)
        right.set_ylabel(f"energy ({unit})")
        right.margins(y=0.15)
        right.tick_params(axis="x", labelsize=7)
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("time since the agent started (s)")
    handles, names = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)  # a long title needs the top for itself
    total = row["total_j"]
    joules = "" if total is None else f", {three_digits(total / 1000)} kJ" if total >= 10_000 else f", {three_digits(total)} J"
    joules += f" ({row['total_domains']}{', share of a server in common' if row['attribution'] == 'shared' else ''})" if joules else ""
    title = f"{row['trajectory']} ({behaviour(row)}): {row['outcome']}, {t1 - t0:.1f} s{joules}"
    fig.suptitle(textwrap.fill(title, 110), x=0.01, ha="left", fontsize=9)
    for f in dict.fromkeys(["png", *formats]):
        csvfiles.put_whole(path.with_name(f"{path.name}.{f}"), lambda beside: fig.savefig(beside, dpi=150))
    plt.close(fig)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    parser.error("nothing is drawn from here; align_trial.py --trace FOLDER --timeline FOLDER does")


if __name__ == "__main__":
    sys.exit(main())
