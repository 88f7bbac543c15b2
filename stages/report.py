"""What a person reads of an evaluation: numbers in words, the figures, report.html and the lines on the terminal.

No program: evaluate.py computes and calls this; nothing here computes a statistic. A `result` is what evaluate.py knows of one group of
trajectories that may be pooled: `group` (its key and rows) and the rows of each table, by name.
"""

import base64
import html
import io
import math
import os
import re
import sys
from pathlib import Path
from string import Template
from typing import NamedTuple

if __name__ == "__main__":
    print(__doc__.rstrip())
    sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
import numpy as np
import pandas as pd

from stages import csvfiles

MIN_TASKS_T, MIN_TASKS_BOOTSTRAP = 5, 10  # fewer tasks: no interval; fewer: t instead of the bootstrap
ALL_TASKS, ALL_POLICIES = "(all tasks)", "(all policies)"  # rows of rq2_shares.csv that pool
FIRST_CALLS = (1, 2, 5, 10)
PHASES = ("model", "command", "waiting")


# ------------------------------------------------------------------------------------------------------------ words


def write_atomic(path, data):
    """Write text or bytes under a temporary name, then rename: a reader never sees half a file."""
    csvfiles.put_whole(Path(path), lambda beside: beside.write_bytes(data if isinstance(data, bytes) else data.encode()))


def joules(value, digits=3):
    """1234 -> '1.23 kJ'."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, unit in ((1e6, "MJ"), (1e3, "kJ"), (0, "J")):
        if abs(value) >= limit * 0.9995 or limit == 0:
            return f"{significant(value / (limit or 1), digits)} {unit}"
    return "–"


def joule_range(lo, hi, dash=" to "):
    """'0.908 to 1.09 kJ': both in the unit of the larger one."""
    high = joules(hi)
    unit = high.rpartition(" ")[2]
    return f"{significant(lo / {'J': 1, 'kJ': 1e3, 'MJ': 1e6}[unit])}{dash}{high}"


def significant(value, digits=3):
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded)))) if rounded else 0}f}"


def plural(n, word):
    if n == 1:
        return f"1 {word}"
    return f"{n} {word[:-1]}ies" if word.endswith("ry") else f"{n} {word}s"


def percent(value, digits=None):
    """0.1234 -> '12 %', 0.01234 -> '1.2 %', unless the digits are given."""
    if digits is None:
        digits = int(value is not None and 0.0005 <= abs(value) < 0.0995)
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def span(row, name, show):
    """'10 kJ to 15 kJ' from the limits of a row; an open upper end is said in words; '' without an interval."""
    lo, hi = row.get(f"{name}_lo"), row.get(f"{name}_hi")
    if lo is None and hi is None:
        return ""
    if hi is None:
        return f"{show(lo)} or more"
    if show is joules and lo is not None:
        return joule_range(lo, hi)
    low, high = show(lo) if lo is not None else "0", show(hi)
    unit = high.rpartition(" ")[2]
    if low.endswith(f" {unit}"):  # 10 to 15 kJ rather than 10 kJ to 15 kJ
        low = low.removesuffix(f" {unit}")
    return f"{low} to {high}"


def short_policies(policies):
    """Policies without the prefix that all of them share: summarize-off, summarize-8k -> off, 8k."""
    policies = list(policies)
    prefix = os.path.commonprefix(policies)
    prefix = prefix[: prefix.rfind("-") + 1]
    return {p: p[len(prefix) :] if len(policies) > 1 and prefix else p for p in policies}


def behaviour_words(group):
    return {
        "live": "live",
        "recorded": "replay of recorded trajectories",
        "authored": "replay of authored replies",
        "replay": "replay of recordings of unknown origin",
    }[group.key["behaviour"]]


def source_words(group):
    source = group.key["source"]
    if source == "measured":
        return "energy measured"
    if source == "":
        return "no energy"
    return "energy estimated from busy time" if source == "estimated" else f"energy {source} from busy time"


def stamp(group):
    """What these rows are, in short: stands under every figure and over every table."""
    r, b, source = group.scored, group.key["behaviour"], group.key["source"]
    kind = b if b == "live" else "replay, origin unknown" if b == "replay" else f"{b} replay"
    energy = f"energy {source}" if source else "no energy"
    return f"{kind} · {energy} · {plural(len(r), 'trajectory')}, {plural(r['task'].nunique(), 'task')}"


def policy_order(policies):
    """summarize-off first (the reference), then by number: 2k before 8k before 16k, then by name."""
    return sorted(policies, key=lambda p: (p != "summarize-off", [int(x) if x.isdigit() else 0 for x in re.split(r"(\d+)", p)], p))


def codes(flags):
    """The flags of a row, one by one."""
    return [c for c in re.split(r"[\s,;|]+", flags) if c]


def flagged(rows, code):
    """Which rows carry a flag of the alignment."""
    known = {flags: code in codes(flags) for flags in set(rows["flags"])}  # few are different
    return np.array([known[flags] for flags in rows["flags"]], bool)


class Closure(NamedTuple):
    """Closure errors of some trajectories: estimate / measurement - 1."""

    median: float
    median_abs: float
    n: int
    mean_abs: float


CLOSURES = {  # column closure_* -> what it is the error of
    "model_above_idle": "energy above idle of the model calls",
    "time": "time of the model calls",
    "total": "energy of the whole trajectory, its other time being known",
}
STALLED = "stalled_call"


def closure(group, of="model_above_idle", stalled=True):
    """A closure error of the group, without the trajectories that had a stalled call where `stalled` is False; None without any."""
    v = group.rows[f"closure_{of}"].to_numpy(float)
    v = v[np.isfinite(v)] if stalled else v[np.isfinite(v) & ~flagged(group.rows, STALLED)]
    return Closure(float(np.median(v)), float(np.median(np.abs(v))), len(v), float(np.mean(np.abs(v)))) if len(v) else None


def requested(group):
    """In how many scored trajectories the time of commands is the time that the agent asked for, and of how many."""
    s = group.scored
    return {"trajectories": int((flagged(s, "requested_durations") | (s["split_source"] == "trajectory").to_numpy(bool)).sum()), "of": len(s)}


def power_outside_calls(group):
    """(mean GPU power during commands and waiting, idle power then) in W; None where it is unknown or the GPU was shared out."""
    s = group.scored
    found = s[[*(f"gpu_{p}_j" for p in PHASES[1:]), *(f"{p}_s" for p in PHASES[1:]), "idle_w"]].to_numpy(float)
    found = found[np.isfinite(found).all(axis=1)]
    seconds = found[:, 2:4].sum()
    if "gpu" not in group.domains or (s["attribution"] == "shared").any() or not seconds > 0:
        return None
    return float(found[:, :2].sum() / seconds), float(found[:, 4] @ found[:, 2:4].sum(axis=1) / seconds)


def outcome_differs(group):
    """How many replays ended otherwise than their recording says, and of how many replays."""
    replays = group.rows[group.rows["mode"] == "replay"]
    return {"replays": len(replays), "differ": int(flagged(replays, "outcome_differs").sum())}


def idle_powers(group):
    """The idle power that was subtracted: [{source, runs, median_w, lowest_w, highest_w}], by where it comes from."""
    r = group.rows[group.rows["idle_w"].notna()]
    found = ((source, some["idle_w"].to_numpy(float)) for source, some in r.groupby("idle_source", sort=True))
    return [
        {"source": source or None, "runs": len(w), "median_w": float(np.median(w)), "lowest_w": float(w.min()), "highest_w": float(w.max())}
        for source, w in found
    ]


WASTE_COLUMNS = ("set_aside", "set_aside_no_energy", "set_aside_j", "infra_j", "waste_j", "waste_no_energy", "wasted_j", "all_j")


def waste_of(rows):
    """The waste of all policies of a group: sums of what is known, None where nothing is."""
    out = {c: sum(known) if (known := [r[c] for r in rows if r[c] is not None]) else None for c in WASTE_COLUMNS}
    return out | {"waste_share": out["waste_j"] / out["all_j"] if out["waste_j"] is not None and out["all_j"] else None}


def overall_shares(rows):
    """The row over all tasks (and all policies, where there are several)."""
    whole = [r for r in rows if r["task"] == ALL_TASKS]
    return whole[-1] if whole else None


def first_calls(k):
    return "first call" if k == 1 else f"first {k} calls"


# ---------------------------------------------------------------------------------------------------------- figures

BLUE, ORANGE, GREY = "#0b5a94", "#e08e0b", "#c3c9d0"  # told apart in grey too: dark, middle, light


MARKERS = "osD^vP*X"


POLICY_COLOURS = ["#0b5a94", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#7f6000"]  # after Okabe and Ito; markers differ too


FORMATS = ("png", "pdf", "svg")
MOST_POINTS = 2000  # of a policy in one panel: more are a blot and take seconds to draw
FIGURE_WIDTH = 3.6  # inches; one column of a paper, and 8 point letters are still read on a phone


def figure_style():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 8,
            "axes.titlesize": 8.5,
            "axes.labelsize": 8,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "svg.hashsalt": "trajoule",
            "pdf.fonttype": 42,
            "hatch.linewidth": 0.6,
        }
    )
    return plt


def save(plt, figure, out, name, formats):
    """Write the figure as PNG and as what else was asked for; the same input gives the same bytes."""
    figure.text(0.995, 0.004, figure.stamp, ha="right", va="bottom", fontsize=5.6, color="#5a6675")
    for f in dict.fromkeys(["png", *formats]):
        buffer = io.BytesIO()
        metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None}}[f]
        figure.savefig(buffer, format=f, dpi=220, metadata=metadata)
        write_atomic(out / f"{name}.{f}", buffer.getvalue())
    plt.close(figure)
    return out / f"{name}.png"


def shorten(text, n):
    return text if len(text) <= n else text[: n - 1] + "…"


def pool_policies(cells):
    """Rows of rq2 per task and policy as rows per task: means and shares over all of its trajectories."""
    out = {}
    for r in cells:
        out.setdefault(r["task"], []).append(r)
    pooled = []
    for task, some in out.items():
        energy = [r["n"] * r["total_j"] for r in some]
        row = {"task": task, "policy": ALL_POLICIES, "n": sum(r["n"] for r in some)}
        row["total_j"] = sum(energy) / row["n"]
        for c in (c for c in some[0] if c.endswith("_share")):
            if all(r[c] is not None for r in some) and sum(energy) > 0:
                row[c] = sum(e * r[c] for e, r in zip(energy, some, strict=True)) / sum(energy)
        pooled.append(row)
    return pooled


def draw_shares(plt, group, rows):
    """Where the energy goes: share of model, command and waiting for each task and policy."""
    cells = [r for r in rows if r["task"] != ALL_TASKS]
    short = short_policies(policy_order({r["policy"] for r in cells}))
    if len(cells) > 24:  # too many bars to read: the policies of a task together
        short = {}
        cells = pool_policies(cells)
    note = f"; the 30 tasks with most energy of {len(cells)}" if len(cells) > 30 else ""
    order = {p: i for i, p in enumerate(short)}
    cells = sorted(cells, key=lambda r: (-r["total_j"], r["task"]))[:30] if not short else cells
    cells = sorted(cells, key=lambda r: (r["task"], order[r["policy"]])) if short else cells
    height = 0.95 + 0.21 * len(cells)
    figure, ax = plt.subplots(figsize=(FIGURE_WIDTH, height))
    figure.stamp = stamp(group)
    for i, r in enumerate(cells):
        left = 0.0
        for p, colour in zip(PHASES, (BLUE, ORANGE, GREY), strict=True):
            for d, hatch in zip(group.domains, (None, "////", "...."), strict=False):
                share = r.get(f"{d}_{p}_share")
                if share:
                    ax.barh(i, 100 * share, left=left, height=0.74, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
                    left += 100 * share
        ax.text(101.5, i, joules(r["total_j"]), va="center", fontsize=7, clip_on=False)
    labels = [shorten(r["task"], 20) + (f" · {short[r['policy']]}" if len(short) > 1 else "") for r in cells]
    ax.set_yticks(range(len(cells)), labels)
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 100), ylim=(len(cells) - 0.4, -0.6), xlabel=f"share of a trajectory's energy, %{note}")
    ax.spines["left"].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (BLUE, ORANGE, GREY)]
    names = ["model calls", "commands", "waiting"]
    if len(group.domains) > 1:
        for d, hatch in zip(group.domains, (None, "////", "...."), strict=False):
            handles.append(plt.Rectangle((0, 0), 1, 1, facecolor="#8a8a8a", hatch=hatch, edgecolor="white", linewidth=0.4))
            names.append(d.upper())
    figure.subplots_adjust(left=min(0.46, 0.05 + 0.0165 * max(map(len, labels))), right=0.86, top=1 - 0.3 / height, bottom=0.55 / height)
    figure.legend(
        handles,
        names,
        loc="upper center",
        ncols=len(names),
        frameon=False,
        handlelength=1,
        columnspacing=0.9,
        handletextpad=0.4,
        borderpad=0.2,
    )
    return figure


def draw_scatter(plt, group, kept, table):
    """Predicted against measured energy on tasks not seen: the best predictor of each kind, and the call model."""
    y, found = kept["total_j"]
    mape = {r["predictor"]: r.get("mape") for r in table if r["target"] == "total_j"}
    chosen = []
    for kind in ("ex-ante", "early", "post-hoc"):
        some = [p for p in found if p.kind == kind and mape.get(p.name) is not None and p.fitted != "no"]
        if kind == "early":  # families differ in the trajectories they cover; the one with most is shown
            n = {p.family: np.isfinite(p.values).sum() for p in some}
            most = max(n.values(), default=0)
            some = [p for p in some if n[p.family] == most]
        if some:
            chosen.append((kind, min(some, key=lambda p: (mape[p.name], p.name))))
    chosen += [("post-hoc, not fitted", p) for p in found if p.fitted == "no" and mape.get(p.name) is not None]
    if not chosen:
        return None
    rows_n = (len(chosen) + 1) // 2
    figure, axes = plt.subplots(rows_n, 2, figsize=(FIGURE_WIDTH, 1.85 * rows_n + 0.3), squeeze=False)
    figure.stamp = stamp(group) + ("" if group.measured else " · circular")
    if len(group.scored) > MOST_POINTS:
        figure.stamp += " · a part of the points"
    policies = policy_order(group.scored["policy"].unique())
    of_row = group.scored["policy"].to_numpy(str)
    values = np.concatenate([y[y > 0], *[p.values[np.isfinite(p.values) & (p.values > 0)] for _, p in chosen]])
    lo, hi = values.min() / 1.4, values.max() * 1.4
    for ax, (kind, p) in zip(axes.flat, chosen, strict=False):
        ax.fill_between([lo, hi], [lo * 0.8, hi * 0.8], [lo * 1.2, hi * 1.2], color="#eceff2", linewidth=0)
        ax.plot([lo, hi], [lo, hi], color="#5a6675", linewidth=0.8)
        for i, policy in enumerate(policies):
            use = np.flatnonzero((of_row == policy) & np.isfinite(p.values))
            use = use[:: math.ceil(len(use) / MOST_POINTS)] if len(use) else use
            colour = POLICY_COLOURS[i % len(POLICY_COLOURS)]
            ax.scatter(
                y[use],
                p.values[use],
                s=13,
                marker=MARKERS[i % len(MARKERS)],
                facecolor="none",
                edgecolor=colour,
                linewidth=0.9,
                label=policy,
            )
        ax.set(xscale="log", yscale="log", xlim=(lo, hi), ylim=(lo, hi), aspect="equal")
        ax.set_title(f"{kind}\n{shorten(p.name, 27)}\nMAPE {percent(mape[p.name])}", fontsize=7)
        for axis in (ax.xaxis, ax.yaxis):
            log_ticks(axis, lo, hi)
        ax.tick_params(labelsize=6.5)
    for ax in axes.flat[len(chosen) :]:
        ax.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.supxlabel(f"{'measured' if group.measured else 'estimated'} energy of a trajectory, kJ", fontsize=8, y=0.045)
    figure.supylabel("predicted, kJ", fontsize=8, x=0.01)
    top = 0.0
    if len(labels) > 1:
        figure.legend(handles, labels, loc="upper center", ncols=min(3, len(labels)), frameon=False, handletextpad=0.2)
        top = 0.22
    h = 1.85 * rows_n + 0.3
    figure.subplots_adjust(left=0.15, right=0.97, top=1 - (0.46 + top) / h, bottom=0.52 / h, wspace=0.38, hspace=0.62)
    return figure


def log_ticks(axis, lo, hi):
    """Few labelled ticks in kJ on a logarithmic axis in joules: 1-2-5 steps, thinned to at most five."""
    ticks = [
        m * 10.0**e for e in range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1) for m in (1, 2, 5) if lo <= m * 10.0**e <= hi
    ]
    while len(ticks) > 5:
        ticks = ticks[::2]
    axis.set_ticks(ticks, [f"{t / 1000:g}" for t in ticks])
    axis.set_minor_locator(__import__("matplotlib").ticker.NullLocator())


def draw_configs(plt, group, rows):
    """Energy per accomplished goal and per trajectory under each context policy, with intervals."""
    rows = [r for r in rows if r["energy_per_trajectory_j"] is not None]
    if not rows:
        return None
    height = 1.05 + 0.55 * len(rows)
    figure, ax = plt.subplots(figsize=(FIGURE_WIDTH, height))
    figure.stamp = stamp(group)
    labels = []
    for i, r in enumerate(rows):
        for name, offset, marker, colour in (("energy_per_trajectory_j", -0.16, "o", GREY), ("energy_per_goal_j", 0.16, "D", BLUE)):
            value, lo, hi = r[name], r.get(f"{name}_lo"), r.get(f"{name}_hi")
            edge = "#5a6675" if colour == GREY else colour
            if value is None:
                bound = r["energy_per_goal_lower_bound_j"]
                if r["energy_per_goal_basis"] == "bound":  # an arrow: no goal was accomplished, the cost is somewhere to the right
                    ax.annotate(
                        "", (bound * 1.35, i + offset), (bound, i + offset), arrowprops={"arrowstyle": "-|>", "color": BLUE, "lw": 1.2}
                    )
                    ax.plot([bound], [i + offset], marker="|", color=BLUE, markersize=9)
                    ax.annotate(f"at least {joules(bound)}", (bound, i + offset), (3, 5), textcoords="offset points", fontsize=7)
                continue
            if lo is not None and hi is not None:
                ax.plot([lo, hi], [i + offset] * 2, color=edge, linewidth=1.4, solid_capstyle="butt")
            elif lo is not None:  # no upper limit: success may be zero
                ax.annotate("", (1.35 * value, i + offset), (lo, i + offset), arrowprops={"arrowstyle": "-|>", "color": edge, "lw": 1.4, "shrinkA": 0})
                ax.plot([1.35 * value], [i + offset], alpha=0)  # the axis has room for the arrow
            ax.plot([value], [i + offset], marker, markersize=5.5, markerfacecolor=colour, markeredgecolor=edge)
            labels.append((value, i + offset, 5 if offset < 0 else -11))
    ax.set_yticks(range(len(rows)), [shorten(r["policy"], 18) for r in rows])
    ax.set_ylim(len(rows) - 0.45, -0.6)
    left, right = ax.get_xlim()
    ax.set_xlim(0, right + 0.08 * (right - left))
    for x, y, above in labels:  # towards the middle, so that none runs over the axis or out of the figure
        side = "left" if x < ax.get_xlim()[1] / 2 else "right"
        ax.annotate(joules(x), (x, y), (-4 if side == "left" else 4, above), textcoords="offset points", fontsize=7, ha=side)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v / 1000:g}")
    ax.locator_params(axis="x", nbins=6)
    ax.set_xlabel("energy, kJ")
    ax.grid(axis="x", color="#e6eaee", linewidth=0.6)
    handles = [
        plt.Line2D([], [], marker=m, linestyle="", markerfacecolor=c, markeredgecolor=e)
        for m, c, e in (("o", GREY, "#5a6675"), ("D", BLUE, BLUE))
    ]
    figure.legend(handles, ["per trajectory", "per accomplished goal"], loc="upper center", ncols=2, frameon=False, handletextpad=0.2)
    figure.subplots_adjust(
        left=0.05 + 0.0165 * max(len(shorten(r["policy"], 18)) for r in rows), right=0.96, top=1 - 0.3 / height, bottom=0.58 / height
    )
    return figure


def draw_retry(plt, group, rows):
    """Success against expected energy when up to k attempts are allowed."""
    if max((r["k"] for r in rows), default=0) < 2:
        return None
    figure, ax = plt.subplots(figsize=(FIGURE_WIDTH, 2.7))
    figure.stamp = stamp(group)
    policies = policy_order({r["policy"] for r in rows})
    for i, policy in enumerate(policies):
        mine = [r for r in rows if r["policy"] == policy]
        colour = POLICY_COLOURS[i % len(POLICY_COLOURS)]
        x, y = [r["expected_energy_j"] / 1000 for r in mine], [100 * r["success_within_k"] for r in mine]
        ax.plot(x, y, marker=MARKERS[i % len(MARKERS)], markersize=4.5, color=colour, linewidth=1, markerfacecolor="white", label=policy)
        for r, a, b in zip(mine, x, y, strict=True):
            if r.get("success_within_k_lo") is not None:
                ax.plot([a, a], [100 * r["success_within_k_lo"], 100 * r["success_within_k_hi"]], color=colour, linewidth=0.7, alpha=0.6)
            if len(mine) <= 6:
                ax.annotate(str(r["k"]), (a, b), (4, -8), textcoords="offset points", fontsize=7)
    ax.set(xlabel="expected energy per task, kJ", ylabel="tasks solved within k attempts, %", ylim=(-4, 104))
    ax.set_xlim(left=0)
    ax.grid(color="#e6eaee", linewidth=0.6)
    ax.legend(frameon=False, loc="best")
    figure.subplots_adjust(left=0.14, right=0.96, top=0.96, bottom=0.2)
    return figure


def draw_all(result, number, kept, out, formats):
    """Draw what there is to see of a group into `out`, remove what an earlier run left, and return {figure: path of the PNG}."""
    plt, group, found = figure_style(), result["group"], {}
    suffix = "" if number == 1 else f"_group{number}"
    figures = {
        "shares": ("rq2_shares", draw_shares(plt, group, result["shares"]) if result["shares"] else None),
        "scatter": ("rq1_scatter", draw_scatter(plt, group, kept, result["predictors"]) if kept else None),
        "configs": ("configs", draw_configs(plt, group, result["configs"])),
        "retry": ("retry_budget", draw_retry(plt, group, result["retry"])),
    }
    for key, (name, figure) in figures.items():
        for f in FORMATS:
            (out / f"{name}{suffix}.{f}").unlink(missing_ok=True)
        if figure is not None:
            found[key] = save(plt, figure, out, name + suffix, formats)
    return found


def remove_figures_of_groups(out):
    """A run with more groups than the next one leaves figures that nobody would overwrite."""
    for stale in out.glob("*_group[0-9]*.*"):
        if re.fullmatch(r"(rq1_scatter|rq2_shares|configs|retry_budget)_group\d+\.(png|pdf|svg)", stale.name):
            stale.unlink()


# ------------------------------------------------------------------------------------------------------------- page

esc = html.escape


def tag(name, text, css=""):
    return f'<{name} class="{css}">{text}</{name}>' if css else f"<{name}>{text}</{name}>"


def html_table(caption, head, rows, css=""):
    """Rows are lists of ready HTML cells, or a string for a row that spans the table. `name|wide` hides a column on phones."""
    names, _, kinds = zip(*(h.partition("|") for h in head), strict=True)
    labels = [esc(re.sub("<[^>]*>", "", n)) for n in names]
    out = [f'<div class="table"><table class="{css}"><caption>{caption}</caption><thead><tr>']
    out += [f'<th scope="col" class="{k}">{n}</th>' for n, k in zip(names, kinds, strict=True)]
    out.append("</tr></thead><tbody>")
    for r in rows:
        if isinstance(r, str):
            out.append(f'<tr class="part"><td colspan="{len(head)}">{r}</td></tr>')
        else:
            cells = zip(labels, kinds, r, strict=True)
            out.append("<tr>" + "".join(f'<td class="{k}" data-label="{n}"><span>{c}</span></td>' for n, k, c in cells) + "</tr>")
    return "".join(out) + "</tbody></table></div>"


def with_span(value, interval):
    return f"{value}<small>{interval}</small>" if interval else value


def embed(path, alt, caption):
    """The figure inside the page itself, or nothing where there is none."""
    if path is None:
        return ""
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return f'<figure><img alt="{esc(alt)}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


def answer_goal(row):
    """One sentence on what a goal cost under a policy."""
    under = f"Under <code>{esc(row['policy'])}</code>"
    attempts = row["success"] + row["fail"]
    succeeded = f"{row['success'] or 'none'} of {plural(attempts, 'scored attempt')} succeeded"
    if attempts == 1:
        succeeded = f"the only scored attempt {'succeeded' if row['success'] else 'failed'}"
    basis, ci = row["energy_per_goal_basis"], span(row, "energy_per_goal_j", joules)
    if basis == "goals" and not ci:
        return (
            f"{under} {succeeded}: <strong>{joules(row['energy_per_goal_j'])}</strong> per accomplished goal on "
            f"{'this task' if row['tasks'] == 1 else 'these tasks'} (no interval from {plural(row['tasks'], 'task')})."
        )
    if basis == "goals":
        return (
            f"{under} an accomplished goal took <strong>{joules(row['energy_per_goal_j'])}</strong> "
            f"(95 % interval {ci}, {plural(row['tasks'], 'task')}); {succeeded}."
        )
    if basis == "bound":
        return (
            f"{under} {succeeded}: {joules(row['spent_j'])} were spent, and a goal costs "
            f"<strong>at least {joules(row['energy_per_goal_lower_bound_j'])}</strong> (with 95 % confidence)."
        )
    if basis == "too few tasks":
        where = "" if attempts == 1 else f" on {plural(row['tasks'], 'task')}"
        return (
            f"{under} {succeeded} ({joules(row['spent_j'])} spent). What a goal costs <strong>cannot be said</strong> from "
            f"{plural(attempts, 'attempt')}{where}; that takes {MIN_TASKS_T} tasks."
        )
    if attempts == 0:
        counts = f"{row['unscored']} unscored, {row['pending']} pending"
        return f"{under} no attempt could be scored ({counts}), so nothing is known about the energy of a goal."
    return f"{under} no scored attempt has a known energy."


def answer_shares(group, row):
    if not row:
        return ""
    ci = span(row, "model_share", percent)
    ci = f" (95 % interval {ci})" if ci else ""
    n = requested(group)
    asked = f" (by the time that the agent asked for, in {n['trajectories']} of {plural(n['of'], 'trajectory')})" if n["trajectories"] else ""
    return (
        f"Model calls took <strong>{percent(row['model_share'])}</strong> of the energy{ci}, "
        f"commands {percent(row['command_share'])}{asked}, waiting {percent(row['waiting_share'])}. {idle_share_words(group, row)}"
    )


def idle_share_words(group, row):
    """How much of the energy is drawn whether or not anything runs, and what commands and waiting are on the GPU; '' where it is unknown."""
    if row.get("idle_share") is None:
        return ""
    ci = span(row, "idle_share", percent)
    idle = [d.upper() for d in group.domains if d != "dram"]
    text = f"<strong>{percent(row['idle_share'])}</strong> of the energy{f' (95 % interval {ci})' if ci else ''} is idle power times time: what the "
    text += f"{' and '.join(idle)} {'draws' if len(idle) == 1 else 'draw'} though nothing runs."
    power = power_outside_calls(group)
    if power is None:
        return text
    there, base = power
    if abs(there - base) < 0.05 * base:
        return f"{text} GPU energy during commands and waiting is what the loaded, idle GPU draws ({there:.0f} W there, idle power {base:.0f} W)."
    return f"{text} During commands and waiting the GPU drew {there:.0f} W, against an idle power of {base:.0f} W."


def cpu_words(group):
    """That totals lack the CPU; '' where they have it, or have nothing."""
    if "cpu" in group.domains or not group.domains:
        return ""
    if set(group.rows["cpu_source"]) <= {"", "none"}:
        return "CPU energy was not measured on this machine; it is not in these totals."
    return "CPU energy is not in these totals."


def share_notes(group):
    """What must be known beside the shares, below their table."""
    n = requested(group)
    out = [cpu_words(group)]
    if n["trajectories"]:
        out.append(
            f"In {n['trajectories']} of {plural(n['of'], 'trajectory')} the time of commands is the time that the agent asked for, not the time that "
            "they took. How the energy outside model calls divides into commands and waiting rests on it; the share of model calls does not."
        )
    return tag("p", " ".join(filter(None, out))) if any(out) else ""


def closure_words(c):
    return f"median {signed_percent(c.median)}, median size {percent(c.median_abs, 1)}, {plural(c.n, 'trajectory')}"


def stalled_words(group):
    """How many trajectories had a call that stalled, and closure with and without them; '' where none had."""
    rows = group.rows[~group.rows["planned_only"].to_numpy(bool)]
    n = int(flagged(rows, STALLED).sum())
    if not n:
        return ""
    text = (
        f"{n} of {plural(len(rows), 'trajectory')} had a call that took over twice as long as the call model says, and over 1 s longer: kernels were "
        "compiled, or the server was busy. They are in every result. Closure error with and without them: "
    )
    found = [(words, closure(group, of), closure(group, of, stalled=False)) for of, words in CLOSURES.items()]
    return text + "; ".join(f"{words}, {short_closure(a)} with, {short_closure(b)} without" for words, a, b in found if a) + "."


def short_closure(c):
    return f"median {signed_percent(c.median)} and mean size {percent(c.mean_abs, 1)} (n = {c.n})" if c else "nothing (n = 0)"


def answer_prediction(group, table, paired):
    rows = [r for r in table if r["target"] == "total_j" and r.get("mape") is not None]
    if not rows:
        return "How well energy can be foretold cannot be said: it takes at least two tasks, one to learn from and one to be tested on."
    if not group.measured:
        return (
            "How well energy can be foretold is not claimed here: where it is busy time times a stated power, foretelling it from time "
            "or tokens is circular."
        )
    best = []
    for kind, words in (("ex-ante", "before the start"), ("post-hoc", "afterwards")):
        won = [r["best"] for r in paired if r["target"] == "total_j" and r["compared"] == kind]
        some = [r for r in rows if r["kind"] == kind and r["predictor"] in (won or [r["predictor"]])]
        if some:
            r = min(some, key=lambda r: (r["mape"], r["predictor"]))
            ci = span(r, "mape", percent)
            known = ", its other time being known" if r["fitted"] == "no" else ""  # est_total_j has the measured time outside calls
            best.append(f"{words} the best predictor ({esc(r['predictor'])}{known}) is off by {percent(r['mape'])}{f' ({ci})' if ci else ''}")
    text = "; ".join(best)
    return f"{text[:1].upper()}{text[1:]}, on average over tasks that it has not seen." if text else ""


MOST_WARNINGS = 3  # of the calibration at the top of the page and on the terminal


def calibration_warnings(params):
    """What the calibration itself warns of or refused, in its own words: first that it is no basis for estimates, then what was refused."""
    found = [c for c in (params or {}).get("checks", ()) if c["severity"] in ("refused", "warning")]
    found.sort(key=lambda c: (c["code"] != "accuracy", c["severity"] != "refused"))
    return [without_folders(c["text"]) for c in found]


def calibration_notice(params):
    """The calibration's own warnings, for the top of the page."""
    found = calibration_warnings(params)
    if not found:
        return ""
    words = "<strong>The calibration itself warns.</strong> Estimates from tokens and all energy above idle rest on it; totals do not."
    more = tag("p", f"{plural(len(found) - MOST_WARNINGS, 'more warning')}: under “How it was measured”.") if len(found) > MOST_WARNINGS else ""
    return f'<div class="notice">{tag("p", words)}{tag("ul", "".join(tag("li", esc(t)) for t in found[:MOST_WARNINGS]))}{more}</div>'


def differs_words(group):
    """'3 of 16 replays ended otherwise than their recording says', or '' where none did."""
    n = outcome_differs(group)
    return f"{n['differ']} of {plural(n['replays'], 'replay')} ended otherwise than the recording says" if n["differ"] else ""


def notice(group):
    """What must be known before any number is read."""
    out = []
    b, source = group.key["behaviour"], group.key["source"]
    if b == "authored":
        out.append(
            "<strong>Authored replies.</strong> The agent's replies in these trajectories were written by hand and replayed; its commands, "
            "the model's work and the time are real. Outcomes, energy per goal, retries and the comparison of policies show how the "
            "method works and are no findings about any model."
        )
    elif b in ("recorded", "replay"):
        origin = " whose origin is not stated" if b == "replay" else ""
        out.append(
            f"<strong>Replayed trajectories.</strong> The agent's replies come from recordings{origin}. Energy and time are of this "
            "machine; outcomes are those of the recordings."
        )
    if differs_words(group):
        out.append(
            f"<strong>Outcomes differ.</strong> {differs_words(group)} (flag <code>outcome_differs</code>): the same commands did something else "
            "here. What counts is what happened here, not what the recording says."
        )
    if source not in ("measured", ""):
        part = "No energy counter was readable" if source == "estimated" else f"{esc(source[:1].upper() + source[1:])}"
        out.append(
            f"<strong>Estimated energy.</strong> {part}: joules that are estimated are busy time times a stated power. Differences between "
            "rows are then differences in processor time."
        )
    return f'<div class="notice">{"".join(tag("p", t) for t in out)}</div>' if out else ""


def config_table(group, rows, cost):
    head = ["policy", "planned", "success / fail / unscored", "success rate", "energy per trajectory", "energy per goal"]
    bounds = any(r["unscored"] for r in rows)
    head += ["per goal if the unscored fail / succeed"] * bounds
    extra = {"carbon": ("CO₂ per goal", "carbon_per_goal_g", " g"), "price": ("price per goal", "price_per_goal", "")}
    extra = [v for k, v in extra.items() if cost.get(k) is not None]
    body = []
    for r in rows:
        outcomes = f"{r['success']} / {r['fail']} / {r['unscored']}" + (f" + {r['pending']} pending" if r["pending"] else "")
        goal = with_span(joules(r["energy_per_goal_j"]), span(r, "energy_per_goal_j", joules))
        if r["energy_per_goal_j"] is None and r["energy_per_goal_lower_bound_j"] is not None:
            few = f"; fewer than {MIN_TASKS_T} tasks: no conclusion" if r["energy_per_goal_basis"] == "too few tasks" else ""
            tried = f"0 of {plural(r['fail'], 'attempt')}, {joules(r['spent_j'])} spent{few}"
            goal = with_span(f"≥ {joules(r['energy_per_goal_lower_bound_j'])}", tried)
        cells = [esc(r["policy"]), str(r["planned"]), outcomes]
        cells.append(with_span(percent(r["success_rate"]), span(r, "success_rate", percent)))
        cells += [with_span(joules(r["energy_per_trajectory_j"]), span(r, "energy_per_trajectory_j", joules)), goal]
        if bounds:
            cells.append(f"{joules(r['energy_per_goal_if_unscored_fail_j'])} / {joules(r['energy_per_goal_if_unscored_succeed_j'])}")
        cells += ["–" if r.get(c) is None else significant(r[c]) + unit for _, c, unit in extra]
        body.append(cells)
    caption = f"Outcomes and energy per context policy ({esc(stamp(group))})."
    return html_table(caption, head + [e[0] for e in extra], body, "stack")


def difference_sentences(group, rows):
    out = []
    for r in rows:
        if r.get("paired_tasks"):
            ci = span(r, "energy_difference_j", signed_joules)
            ci = f" (95 % interval {ci}; sign-flip p = {r['energy_difference_j_p']:.2g})" if ci else " (too few tasks for an interval)"
            ci += ", each task counting once (the means of the table count each trajectory once)"
            text = (
                f"On the {plural(r['paired_tasks'], 'task')} that both have, a trajectory under <code>{esc(r['policy'])}</code> took "
                f"{signed_joules(r['energy_difference_j'])} against <code>{esc(r['reference_policy'])}</code>{ci}"
            )
            if r.get("energy_per_goal_ratio") is not None:
                ci = span(r, "energy_per_goal_ratio", significant)
                text += f", and a goal {significant(r['energy_per_goal_ratio'])} times the energy{f' ({ci})' if ci else ''}"
            out.append(tag("p", text + "."))
    if out and group.key["behaviour"] != "live":
        out.append(tag("p", "The replies were fixed beforehand, so this is no finding about the policies."))
    return "".join(out)


def signed_percent(v):
    return f"{100 * v:+.1f} %".replace("-", "−")


def signed_joules(v):
    return ("+" if v > 0 else "−" if v < 0 else "") + joules(abs(v))


def without_folders(text):
    """Whose folders they were is nobody's business."""
    return re.sub(r"(?<!\S)/(?:[^\s/]+/)+", "", text)


ASIDE_WORDS = {  # reasons of waste.csv; every other one is a failure of the infrastructure
    "stopped before its end": "stopped before its end (killed or interrupted)",
    "measured, then set aside": "measured, then set aside by the user",
    "": "reason not recorded",
}


def by_reason(counts, words):
    """': 2 × stopped before its end, 1 × failed (server down)', the commonest first; '' without any."""
    ranked = sorted(counts.items(), key=lambda x: (-x[1], x[0]))
    said = [f"{n} × {words(reason)}" for reason, n in ranked[:4]]
    said += [f"{rest} × other reasons"] if (rest := sum(n for _, n in ranked[4:])) else []
    return f": {', '.join(said)}" if said else ""


def waste_section(group, rows, reasons):
    """Energy that bought nothing: a sentence and a table, per policy."""
    total = waste_of(rows)
    if total["set_aside"] is None:
        unknown = "What attempts used that were set aside is not known: no table of them was given (<code>--waste</code>)."
        within = f" Calls that failed, were aborted or repeated took {joules(total['wasted_j'])} inside scored attempts." if total["wasted_j"] else ""
        return tag("p", unknown + within)
    text = esc(waste_words(total, sum(r["unscored"] for r in rows), reasons))
    body = []
    for r in rows:
        aside = f"{r['set_aside']}" + (f" (energy of {r['set_aside_no_energy']} unknown)" if r["set_aside_no_energy"] else "")
        share = with_span(joules(r["waste_j"]), f"{percent(r['waste_share'])} of {joules(r['all_j'])}" if r["waste_share"] is not None else "")
        body.append([esc(r["policy"]), with_span(joules(r["set_aside_j"]), f"attempts: {aside}")])
        body[-1] += [with_span(joules(r["infra_j"]), f"runs: {r['unscored']}"), share, joules(r["wasted_j"])]
    domains = esc(group.key["total_domains"] or "none")
    caption = f"Energy of attempts set aside and of unscored runs per context policy ({esc(source_words(group))}, domains {domains})."
    head = ["policy", "set aside", "unscored runs", "waste, of all energy", "failed calls inside scored attempts"]
    return tag("p", text) + html_table(caption, head, body, "stack")


def waste_words(total, unscored, reasons):
    """One sentence on the energy of what was set aside or stayed unscored; `reasons` {set_aside, unscored}: {reason: attempts}."""
    if total["set_aside"] == unscored == 0:
        return "No attempt was set aside, and no run stayed unscored."
    aside = by_reason(reasons["set_aside"], lambda r: ASIDE_WORDS.get(r) or f"failed ({shorten(without_folders(r), 60)})")
    left = by_reason(reasons["unscored"], lambda r: r.replace("_", " ") or "reason not recorded")
    counts = f"{plural(total['set_aside'], 'attempt')} set aside{aside}; {plural(unscored, 'unscored run')}{left}"
    if total["waste_j"] is None:
        return f"Of what was set aside or stayed unscored no energy is known ({counts})."
    least = "at least " if total["waste_no_energy"] else ""
    share = f"{percent(total['waste_share'])} of all energy, {joules(total['all_j'])}"
    return f"What was set aside or stayed unscored took {least}{joules(total['waste_j'])} ({counts}), {share}."


def share_table(group, rows):
    whole = [r for r in rows if r["task"] == ALL_TASKS]
    cells = [r for r in rows if r["task"] != ALL_TASKS]
    body = []
    for r in whole + (cells if len(cells) <= 12 else []):
        bar = "".join(f'<i class="{p}" style="width:{100 * (r[f"{p}_share"] or 0):.2f}%"></i>' for p in PHASES)
        words = [with_span(percent(r[f"{p}_share"]), span(r, f"{p}_share", percent)) for p in PHASES]
        domains = "<br>".join(f"{d.upper()} {percent(r[f'{d}_total_share'])}" for d in group.domains)
        name = f"{esc(r['task'].strip('()'))}<small>{esc(r['policy'].strip('()'))}</small>"
        body.append([name, str(r["n"]), joules(r["total_j"]), *words, f'<span class="bar" aria-hidden="true">{bar}</span>', domains])
    caption = f"Mean energy of a trajectory and where it went ({esc(stamp(group))}). Each task is in rq2_shares.csv."
    head = ["", "n|wide", "energy", *(f'<span class="key"><i class="{p}"></i></span>{p}' for p in PHASES), "|wide", "domains|wide"]
    return html_table(caption, head, body)  # the heads of the columns are the key to the bars


def predictor_table(group, table):
    rows = [r for r in table if r["target"] == "total_j"]

    def cells(r, note=""):
        name = f"{esc(r['predictor'])}<small>{note or ('not fitted; its other time being known' if r['fitted'] == 'no' else r['fitted'])}</small>"
        if r.get("mape") is None:
            return [name, "0", "not scored", "–", "–", "–"]
        ape = with_span(percent(r["mape"], 1), span(r, "mape", lambda v: percent(v, 1)))
        rho = "–" if r["spearman"] is None else f"{r['spearman']:.2f}"
        return [name, str(r["n"]), ape, percent(r["mdape"], 1), joules(r["mae_j"]), rho]

    body = ["Known before the start", *(cells(r) for r in rows if r["kind"] == "ex-ante")]
    seen = [r for r in rows if r["kind"] == "ex-ante, task seen" and r.get("mape") is not None]
    if seen:
        body += ["Known before the start, if the task has run before (here the task is not unseen)", *(cells(r) for r in seen)]
    early = []
    for k in FIRST_CALLS:
        some = [r for r in rows if r["kind"] == "early" and r["predictor"].startswith(f"{first_calls(k)}:") and r.get("mape") is not None]
        if some:  # the first of each k is the constant over the same trajectories
            best = min(some[1:] or some, key=lambda r: (r["mape"], r["predictor"]))
            early.append(cells(best, f"a constant on the same trajectories: {percent(some[0]['mape'], 1)}"))
    if early:
        body += [
            "Known after the first calls (best of energy and tokens; each row covers the trajectories that have so many calls)",
            *early,
        ]
    body += ["Known afterwards", *(cells(r) for r in rows if r["kind"] == "post-hoc")]
    circular = "" if group.measured else " <strong>Circular: the energy is itself an estimate from busy time; no claim is made.</strong>"
    caption = (
        f"Error of predictors of a trajectory's total energy ({esc(stamp(group))}). Kinds are not ranked against each other.{circular}"
    )
    return html_table(caption, ["predictor", "n|wide", "mean error (MAPE)", "median|wide", "in joules|wide", "rank corr."], body)


def paired_list(group, paired):
    if not group.measured:
        return ""
    lines = []
    for r in paired:
        if r["target"] == "total_j" and r["compared"] in ("ex-ante", "post-hoc"):
            points = f"{100 * r['difference']:.1f} percentage points"
            ci = span(r, "difference", lambda v: f"{100 * v:.1f}")
            ci = f"95 % interval {ci}; sign-flip p = {r['p_sign_flip']:.2g}" if ci else "too few tasks for an interval"
            lines.append(
                f"{r['kind']}: {esc(r['best'])} before {esc(r['runner_up'])} by {points} on the same {r['n']} trajectories ({ci})."
            )
    if not lines:
        return ""
    return f"<ul>{''.join(tag('li', x) for x in lines)}</ul><p>The best was picked on the same data, so these p values err on the low side.</p>"


def retry_section(group, rows, cut):
    if not rows:
        return tag("p", "No scored attempt with a known energy: nothing to say on retries.")
    body = []
    for r in (r for r in rows if r["k"] <= 8):
        left_out = f"; {r['tasks_with_fewer_attempts']} with fewer attempts left out" if r["tasks_with_fewer_attempts"] else ""
        name = f"{esc(r['policy'])}, up to {r['k']}<small>{plural(r['tasks'], 'task')}{left_out}</small>"
        cells = [with_span(percent(r["success_within_k"]), span(r, "success_within_k", percent))]
        cells += [with_span(joules(r[c]), span(r, c, joules)) for c in ("expected_energy_j", "energy_per_success_j")]
        body.append([name, *cells])
    caption = f"Retrying until the first success ({esc(stamp(group))}): exact mean over all orders of the attempts."
    out = [html_table(caption, ["policy, attempts allowed", "tasks solved", "energy per task", "energy per success"], body)]
    held = [r for r in cut if r["kind"] == "held-out"]
    for r in held:
        policy = f"<code>{esc(r['policy'])}</code>"
        if r["recommended"] == "yes":
            text = (
                f"Stopping an attempt at about {joules(r['cutoff_j'])} saves {percent(r['saving'])} of the energy per goal under {policy} "
                f"(95 % interval {span(r, 'saving', percent)}), on tasks that the cut-off was not chosen on; {r['successes_lost']} of "
                f"{r['successes_kept'] + r['successes_lost']} successes would be lost."
            )
        else:
            text = f"No cut-off in joules is recommended under {policy}: chosen on the other tasks, it does not reliably save energy."
        out.append(tag("p", text))
    if held and group.key["behaviour"] != "live":
        out.append(tag("p", "The replies were fixed beforehand, so this shows the method only."))
    if cut and not held:
        text = f"With fewer than {MIN_TASKS_T} tasks no cut-off is recommended; energy_cutoff.csv describes what one would have done here."
        out.append(tag("p", text))
    return "".join(out)


def calibration_words(params):
    """(term, text) pairs for the method section, as far as the calibration has them."""
    out = []
    idle = params.get("idle")
    for state, words in (("loaded", "idle power, model loaded"), ("bare", "idle power, no server")):
        powers = idle.get(state) if isinstance(idle, dict) else None
        found = []
        for d, v in sorted(powers.items()) if isinstance(powers, dict) else ():
            if isinstance(v, dict) and isinstance(v.get("power_w"), int | float):
                found.append(f"{d} {significant(v['power_w'])} W" + (f" ({v['source']})" if v.get("source") else ""))
        out.append((words, ", ".join(found)))
    energy = params.get("energy")
    for domain, fit in energy.items() if isinstance(energy, dict) else ():
        try:
            held = fit["held_out"]["leave_one_cell_out"]["above_idle"]["mape"]
        except (KeyError, TypeError):
            continue
        if isinstance(held, int | float):
            text = f"held-out error {percent(held, 1)} of a call's energy above idle (a cell of context and output length left out)"
            out.append((f"call model, {domain.upper()}", text))
    return out


def span_of_dates(group):
    t = group.rows["t_begin"].to_numpy(float)
    t = t[np.isfinite(t)]
    days = [pd.Timestamp(v, unit="s").strftime("%Y-%m-%d") for v in (t.min(), t.max())] if len(t) else [""]
    return days[0] if days[0] == days[-1] else " to ".join(days)


def profile_name(profile):
    """A profile given as a path, by its name."""
    return Path(profile).name.removesuffix(".sh")


def model_words(model):
    """The model, with what only its name says: servers take random weights for timing, and such a model can do nothing."""
    return f"{model} (its weights are random)" if model.endswith("-random") else model


def values_of(group, column):
    return sorted({v for v in group.rows[column] if v})


SPLIT_WORDS = {
    "recording": "the terminal's recording",
    "agent_log": "the agent's own log",
    "trajectory": "the waits that the agent asked for",
    "calls": "calls alone (commands count as waiting)",
}


def idle_words(group):
    """'89.1 W (of the calibration; 12 runs)', a range where it differs between runs."""
    words = {"calibration": "of the calibration", "batch": "the calibration's, moved to the batch's own baseline", None: "source not stated"}
    out = []
    for p in idle_powers(group):
        watts = significant(p["median_w"])
        if significant(p["lowest_w"]) != significant(p["highest_w"]):
            watts = f"{significant(p['lowest_w'])} to {significant(p['highest_w'])}"
        out.append(f"{watts} W ({words[p['source']]}; {plural(p['runs'], 'run')})")
    return ", ".join(out)


def method_list(group, params, cost):
    """The facts of the method section as a definition list."""
    key, r = group.key, group.rows
    recordings = sorted({v.split("@")[0] for v in values_of(group, "recording")})
    harbor = ", ".join(values_of(group, "harbor"))
    counters = [", ".join(v for v in values_of(group, f"{d}_source") if v != "none") if d in group.domains else "" for d in ("gpu", "cpu")]
    pairs = [
        ("model, hardware", " on ".join(x for x in (model_words(key["model"]), key["hardware"]) if x)),
        ("agent", ", ".join(x for x in (key["agent"], key["profile"] and f"profile {profile_name(key['profile'])}") if x)),
        ("model server, harness", " and ".join(x for x in (", ".join(values_of(group, "server")), harbor and f"Harbor {harbor}") if x)),
        ("behaviour", behaviour_words(group) + (f" ({', '.join(recordings[:12])})" if recordings else "")),
        ("energy", f"{key['source'] or 'none'}; domains {key['total_domains'] or 'none'}"),
        ("source of GPU energy", counters[0]),
        ("source of CPU energy", counters[1]),
        ("phases told apart by", ", ".join(SPLIT_WORDS[v] for v in values_of(group, "split_source"))),
        ("run on", span_of_dates(group)),
        ("size", f"{plural(len(group.scored), 'scored trajectory')}, {plural(r['task'].nunique(), 'task')}"),
        ("trajectories at a time", key["concurrency"]),
        ("idle power subtracted", idle_words(group)),
        ("calibration in force", ", ".join(f"params.json with SHA-256 {v[:12]}…" for v in values_of(group, "calib_sha256"))),
        *(calibration_words(params) if params else ()),
    ]
    against = "measured" if group.measured else "estimated from busy time"
    for of, name, words in (("model_above_idle", "energy", f"energy above idle, against what was {against}"), ("time", "time", "time")):
        if c := closure(group, of):
            pairs.append((f"closure error, {name}", f"{closure_words(c)}: what tokens and calibration say of the model calls' {words}"))
    pairs.append(("stalled calls", stalled_words(group)))
    if cost:
        rates = {"carbon": "g CO₂ per kWh", "price": "per kWh"}
        text = ", ".join(f"{cost[k]:g} {unit}" for k, unit in rates.items() if cost.get(k) is not None)
        pairs.append(("carbon and price", f"{text}, times a PUE of {cost['pue']:g}; energies are without it"))
    facts = "<dl>" + "".join(f"<dt>{esc(k)}</dt><dd>{esc(str(v))}</dd>" for k, v in pairs if v) + "</dl>"
    warnings = "".join(tag("li", esc(t)) for t in calibration_warnings(params))
    return facts + (f"<h3>What the calibration warns of</h3>{tag('ul', warnings)}" if warnings else "")


def estimated_list(group):
    items = []
    source = group.key["source"]
    if source == "estimated":
        items.append("All joules: busy time of the processors times a stated power per logical CPU.")
    elif source not in ("measured", ""):
        items.append(f"Part of the joules ({esc(source)}): the estimated part is busy time times a stated power.")
    if any("nvml-power" in s for s in values_of(group, "gpu_source")):
        items.append("GPU energy is integrated from power readings, because the energy counter was not readable.")
    items.append(
        "The call model (closure error, and the predictor of that name): energy from token counts and the calibration. As a predictor of a "
        "trajectory's energy it is given the measured time outside model calls, times the idle power."
    )
    if "dram" not in group.domains:
        items.append("Memory is not counted apart: no DRAM counter is part of these totals.")
    items.append("Not measured at all: disk, network, fans, power supply, cooling." + (f" {cpu_words(group)}" if cpu_words(group) else ""))
    if "cpu" in group.domains:
        items.append("CPU counters include everything that ran on the machine, the measuring programs too.")
    return "".join(tag("li", i) for i in items)


def counts_of(rows):
    """Counts of runs over all policies."""
    return {k: sum(row[k] for row in rows) for k in ("unscored", "missing", "pending", "no_energy", "planned")}


def unscored_words(total):
    gone = f", {total['missing']} of them left no row" if total["missing"] else ""
    return f"{total['unscored']} of {total['planned']} planned runs are unscored{gone}"


def pending_words(total):
    return f"{total['pending']} of {total['planned']} planned runs are still to come"


def caveats(group, rows, notes=()):
    """What to distrust about these rows, worked out from them, as list items."""
    r, s, out = group.rows, group.scored, []
    tasks = s["task"].nunique()
    if tasks < MIN_TASKS_T:
        out.append(f"{plural(tasks, 'task')}: too few for any interval. The numbers describe these tasks and nothing beyond them.")
    elif tasks < MIN_TASKS_BOOTSTRAP:
        out.append(f"{tasks} tasks: intervals rest on the t distribution, which few tasks can only roughly justify.")
    per = s.groupby(["task", "policy"], sort=True).size()
    if len(per) and per.min() != per.max():
        out.append(f"Tasks have between {per.min()} and {per.max()} scored attempts; those with more weigh more.")
    elif len(per) and per.max() == 1:
        out.append("One attempt per task and policy: luck and task cannot be told apart, and nothing can be said on retries.")
    total = counts_of(rows)
    if total["unscored"]:
        out.append(f"{unscored_words(total)}; the table bounds what they could change.")
    if total["pending"]:
        out.append(f"{pending_words(total)}: every number here is provisional.")
    if total["no_energy"]:
        out.append(f"{plural(total['no_energy'], 'scored run')} without energy: taken at the mean of the same task and policy.")
    c = closure(group)
    if c is None:
        out.append("There is no closure error: estimate and measurement were never both there.")
    elif c.median_abs > 0.1:
        out.append(f"The call model typically misses the model calls' energy above idle by {percent(c.median_abs)}: its predictions are rough.")
    if stalled_words(group):
        out.append(stalled_words(group))
    low = int((s["coverage"].to_numpy(float) < 0.95).sum())
    if low:
        out.append(f"{plural(low, 'run')} with samples for less than 95 % of the time: totals hold, the split into phases is less sure.")
    hot = int((r["throttled_s"].to_numpy(float) > 0).sum())
    if hot:
        out.append(f"The GPU throttled during {plural(hot, 'run')}.")
    off = int(unsplit(group).sum())
    if off:
        out.append(f"In {plural(off, 'run')} the parts do not add up to the total, or are missing; shares leave those parts out.")
    if len(values_of(group, "calib_sha256")) > 1:
        out.append("Rows rest on different calibrations: estimates from tokens are not of one kind.")
    for column, words in (("server", "servers"), ("harbor", "versions of Harbor")):
        if len(found := values_of(group, column)) > 1:
            out.append(f"Rows come from different {words} ({esc(', '.join(found))}) and are taken together here.")
    if (r["attribution"] == "shared").any():
        out.append("Calls overlapped; their energy was shared out by calibrated power. Compare shares rather than joules.")
    return "".join(tag("li", i) for i in [*out, *map(esc, notes)]) + flag_items(r)


def flag_items(rows):
    """The flags that the alignment raised, with the number of trajectories and, where the table has them, in words."""
    count, words = {}, {}
    for flags, quality in zip(rows["flags"], rows["quality"], strict=True):
        found, said = codes(flags), quality.split("; ")
        words |= zip(found, said, strict=True) if len(found) == len(said) else ()
        for code in found:
            count[code] = count.get(code, 0) + 1
    ranked = sorted(count.items(), key=lambda x: (-x[1], x[0]))[:12]
    listing = (f"{n} × <code>{esc(k)}</code>{': ' if words.get(k) else ''}{esc(words.get(k, ''))}" for k, n in ranked)
    return tag("li", f"Flags raised by the alignment:{tag('ul', ''.join(tag('li', x) for x in listing))}") if ranked else ""


def unsplit(group):
    """Which scored rows have phases that do not add up to the total."""
    s = group.scored
    if not group.domains:
        return np.zeros(len(s), bool)
    parts = np.sum([s[f"{d}_{p}_j"].to_numpy(float) for d in group.domains for p in PHASES], axis=0)
    total = s["total_j"].to_numpy(float)
    return ~(np.abs(parts - total) <= 1e-3 * total + 1e-6)


def other_section(result, cost):
    """A group that is not the largest, in short."""
    g = result["group"]
    words = {"profile": profile_name, "model": model_words}
    key = " · ".join(words.get(k, str)(v) for k, v in g.key.items() if v and k != "concurrency")
    parts = [f"<h2>Not pooled with the above: {esc(stamp(g))}</h2>", tag("p", esc(key), "kicker"), notice(g)]
    parts += [*(tag("p", answer_goal(r)) for r in result["configs"][:6]), config_table(g, result["configs"], cost)]
    parts.append(difference_sentences(g, result["configs"]))
    if result["shares"]:
        parts += [tag("p", answer_shares(g, overall_shares(result["shares"]))), share_table(g, result["shares"]), share_notes(g)]
    parts += ["<h3>What was set aside or left unscored</h3>", waste_section(g, result["configs"], result["reasons"])]
    return "".join([*parts, "<h3>What to distrust about these</h3>", tag("ul", caveats(g, result["configs"]))])


def interval(limits):
    return f"; 95 % interval {limits}" if limits else ""


def cards(first):
    """The three or four numbers that stand out."""
    g, rows, share, c = first["group"], first["configs"], overall_shares(first["shares"]), closure(first["group"])
    out = []
    goals = [r for r in rows if r["energy_per_goal_basis"] == "goals"]
    bounds = [r["energy_per_goal_lower_bound_j"] for r in rows if r["energy_per_goal_basis"] == "bound"]
    if goals:
        low, high = (f(r["energy_per_goal_j"] for r in goals) for f in (min, max))
        same = joules(low) == joules(high)
        tasks = max(r["tasks"] for r in goals)
        words = "per accomplished goal" + ("" if same else ", by policy") + (f", on {plural(tasks, 'task')} only" if tasks < MIN_TASKS_T else "")
        known = [(r["policy"], span(r, "energy_per_goal_j", joules)) for r in goals]
        intervals = ", ".join((f"{policy}: " if len(goals) > 1 else "") + ci for policy, ci in known if ci)
        out.append((joules(low) if same else joule_range(low, high, " – "), words + interval(intervals)))
    elif bounds:
        out.append((f"≥ {joules(min(bounds))}", "per accomplished goal (none was), with 95 % confidence"))
    elif n := sum(r["fail"] for r in rows if r["energy_per_goal_basis"] == "too few tasks"):
        out.append(("not known", f"per accomplished goal: none was in {plural(n, 'attempt')}, on fewer than {MIN_TASKS_T} tasks"))
    if share:
        seconds = "" if share["total_s"] is None else f" of {share['total_s']:.0f} s"
        out.append((joules(share["total_j"]), f"per trajectory{seconds}, mean of {share['n']}{interval(span(share, 'total_j', joules))}"))
        out.append((percent(share["model_share"]), f"of it in model calls{interval(span(share, 'model_share', percent))}"))
    if c:
        against = "measurement" if g.measured else "energy from busy time (circular)"
        out.append((signed_percent(c.median), f"closure error: estimate from tokens against {against}, median of {c.n}"))
    return "".join(f'<div class="card"><b>{esc(a)}</b><span>{esc(b)}</span></div>' for a, b in out)


def elsewhere(summary):
    """Attempts set aside that belong to no run of the table: they are in no configuration, but in the total."""
    found = summary["set_aside"]
    if not found or not found["attempts"]:
        return ""
    kinds = (f"{joules(k['energy_j'])} {k['source']} ({k['total_domains']})" for k in found["by_source"] if k["energy_j"] is not None)
    text = f"In all {plural(found['attempts'], 'attempt')} of this batch {'was' if found['attempts'] == 1 else 'were'} set aside: "
    unknown = sum(k["without_energy"] for k in found["by_source"])
    text += ", ".join([*kinds, *([f"energy of {unknown} unknown"] if unknown else [])])
    n = found["of_no_run_in_the_table"]
    return tag("p", esc(text + (f"; {plural(n, 'attempt')} of them of no run in the table." if n else ".")))


def build_report(results, notes, params, cost, summary, source_name):
    """The whole page as text: the template with the largest group told in full, the others after it and by themselves."""
    first = results[0]
    g, figures, rows, share = first["group"], first["figures"], first["configs"], overall_shares(first["shares"])
    others = "; ".join(f"{len(r['group'].rows)} {behaviour_words(r['group'])}, {source_words(r['group'])}" for r in results[1:])
    if others:
        others = f"This page tells the largest set of comparable runs first. Not pooled with it, at the end: {others}."
    prediction = answer_prediction(g, first["predictors"], first["paired"])
    fields = {
        "title": f"Trajoule: {esc(g.key['model'] or 'energy of agent trajectories')}",
        "kicker": esc(" · ".join(x for x in (model_words(g.key["model"]), g.key["hardware"], span_of_dates(g)) if x)),
        "notice": calibration_notice(params) + notice(g),
        "answer": " ".join(answer_goal(r) for r in rows[:4]),
        "answer_more": " ".join(x for x in (answer_shares(g, share), prediction) if x),
        "cards": cards(first),
        "others_line": tag("p", esc(others), "kicker") if others else "",
        "shares_figure": embed(
            figures.get("shares"),
            "Share of energy in model calls, commands and waiting per task",
            "Where a trajectory's energy goes. At the right, the mean energy of a trajectory.",
        ),
        "goal_figure": embed(
            figures.get("configs"),
            "Energy per trajectory and per accomplished goal, by policy",
            "Energy per trajectory and per accomplished goal. Lines are 95 % intervals, where there are tasks enough for them; an arrow has no upper limit.",
        ),
        "goal_table": config_table(g, rows, cost),
        "differences": difference_sentences(g, rows),
        "share_table": tag("p", idle_share_words(g, share)) + share_table(g, first["shares"]) + share_notes(g)
        if share
        else tag("p", "No scored trajectory has a known energy."),
        "waste": waste_section(g, rows, first["reasons"]) + elsewhere(summary),
        "prediction": tag("p", prediction),
        "scatter_figure": embed(
            figures.get("scatter"),
            "Predicted against actual energy of each trajectory",
            "Each trajectory's energy as foretold without having seen its task; the band is ±20&nbsp;%. Best predictor of each kind, and the call "
            "model. The kinds know different things and are not ranked.",
        ),
        "predictor_table": predictor_table(g, first["predictors"]) if first["predictors"] else "",
        "paired": paired_list(g, first["paired"]),
        "retry_figure": embed(
            figures.get("retry"),
            "Tasks solved within k attempts against expected energy",
            "Tasks solved within k attempts (the numbers) and the energy to expect, when a task is given up after k failures.",
        ),
        "retry": retry_section(g, first["retry"], first["cutoff"]),
        "method": method_list(g, params, cost),
        "min_bootstrap": MIN_TASKS_BOOTSTRAP,
        "min_t": MIN_TASKS_T,
        "estimated": estimated_list(g),
        "caveats": caveats(g, rows, notes),
        "other_groups": "".join(other_section(r, cost) for r in results[1:]),
        "source": esc(source_name),
        "fingerprint": summary["fingerprint"][:16],
    }
    template = Template(Path(__file__).with_name("report_template.html").read_text(encoding="utf-8"))
    return template.substitute(fields)


def terminal_summary(results, notes, params, out):
    """The lines that end the program: joules, shares, energy per goal, waste, closure, sources, and what warns of them."""
    warnings = calibration_warnings(params)
    lines = [f"calibration warns: {t}" for t in warnings[:MOST_WARNINGS]]
    if len(warnings) > MOST_WARNINGS:
        lines.append(f"calibration warns: {len(warnings) - MOST_WARNINGS} more, in the report")
    for r in results:
        g, share, total, asked = r["group"], overall_shares(r["shares"]), counts_of(r["configs"]), requested(r["group"])
        lines.append(
            f"{behaviour_words(g)}; {source_words(g)} ({g.key['total_domains'] or 'no domains'}); {g.key['model'] or 'model unknown'}"
        )
        if share:
            lines.append(
                f"  per trajectory   {joules(share['total_j'])} mean of {plural(share['n'], 'trajectory')} on {plural(share['tasks'], 'task')}"
            )
            shares = ", ".join(f"{p} {percent(share[f'{p}_share'])}" for p in PHASES)
            ci = span(share, "model_share", percent)
            lines.append(f"  shares           {shares}{f' (model: {ci})' if ci else ''}")
            if asked["trajectories"]:
                of = plural(asked["of"], "trajectory")
                lines.append(f"  note             command time is the time that the agent asked for, in {asked['trajectories']} of {of}")
            if idle_share_words(g, share):
                lines.append(f"  idle share       {re.sub('<[^>]*>', '', idle_share_words(g, share))}")
        if cpu_words(g):
            lines.append(f"  note             {cpu_words(g)}")
        for row in r["configs"]:
            lines.append(f"  energy per goal  {row['policy']}: " + html.unescape(re.sub("<[^>]*>", "", answer_goal(row))).split(" ", 2)[2])
        waste = waste_of(r["configs"])
        if waste["set_aside"] is not None:
            lines.append(f"  waste            {waste_words(waste, total['unscored'], r['reasons'])}")
        if idle_words(g):
            lines.append(f"  idle power       {idle_words(g)}")
        against = "measurement" if g.measured else "the estimate"
        for of, words in (("model_above_idle", f"call model against {against}, model calls above idle"), ("time", "time of the model calls")):
            if c := closure(g, of):
                lines.append(f"  closure error    {closure_words(c)} ({words})")
        if stalled_words(g):
            n = int(flagged(g.rows, STALLED).sum())
            lines.append(f"  note             {plural(n, 'trajectory')} with a stalled call (flag {STALLED}); the report has closure with and without")
        if total["unscored"]:
            hint = " (with --partial they are still to come, for a batch that runs)" if total["missing"] else ""
            lines.append(f"  note             {unscored_words(total)}{hint}")
        if total["pending"]:
            lines.append(f"  note             {pending_words(total)}")
        if differs_words(g):
            lines.append(f"  note             {differs_words(g)} (flag outcome_differs)")
        if not g.measured:
            lines.append("  note             estimated from busy time: predictions from time or tokens are circular, nothing is claimed")
        if g.key["behaviour"] == "authored":
            lines.append("  note             replies were authored: outcomes and energy per goal demonstrate the method")
    lines += [f"note: {n}" for n in notes]
    lines.append(f"report: {Path(out) / 'report.html'}")
    return "\n".join(lines)
