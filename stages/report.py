"""What a person reads of an evaluation: numbers in words, the figures, report.html and the lines on the terminal.

evaluate.py computes and calls this; nothing here computes a statistic. A `result` is what evaluate.py knows of one group of
trajectories that may be pooled: `group` (its key and rows) and the rows of each table, by name.
"""

import base64
import html
import io
import math
import os
import re
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd

MIN_TASKS_T, MIN_TASKS_BOOTSTRAP = 5, 10  # fewer tasks: no interval; fewer: t instead of the bootstrap
ALL_TASKS, ALL_POLICIES = "(all tasks)", "(all policies)"  # rows of rq2_shares.csv that pool
FIRST_CALLS = (1, 2, 5, 10)
PHASES = ("model", "command", "waiting")


# ------------------------------------------------------------------------------------------------------------ words


def write_atomic(path, data):
    """Write text or bytes under a temporary name, then rename: a reader never sees half a file."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(temporary, path)


def joules(value, digits=3):
    """1234 -> '1.23 kJ'."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, unit in ((1e6, "MJ"), (1e3, "kJ"), (0, "J")):
        if abs(value) >= limit * 0.9995 or limit == 0:
            return f"{significant(value / (limit or 1), digits)} {unit}"
    return "–"


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


def closure(group):
    """Median, median size and number of the headline closure error; None without any."""
    v = group.rows["closure_model_above_idle"].to_numpy(float)
    v = v[np.isfinite(v)]
    return (float(np.median(v)), float(np.median(np.abs(v))), len(v)) if len(v) else None


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
    height = 1.05 + 0.42 * len(rows)
    figure, ax = plt.subplots(figsize=(FIGURE_WIDTH, height))
    figure.stamp = stamp(group)
    for i, r in enumerate(rows):
        for name, offset, marker, colour in (("energy_per_trajectory_j", -0.16, "o", GREY), ("energy_per_goal_j", 0.16, "D", BLUE)):
            value, lo, hi = r[name], r.get(f"{name}_lo"), r.get(f"{name}_hi")
            edge = "#5a6675" if colour == GREY else colour
            if value is None:
                bound = r["energy_per_goal_lower_bound_j"]
                if bound is not None:  # an arrow: no goal was accomplished, the cost is somewhere to the right
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
            ax.annotate(
                joules(value), (value, i + offset), (0, 5 if offset < 0 else -11), textcoords="offset points", fontsize=7, ha="center"
            )
    ax.set_yticks(range(len(rows)), [shorten(r["policy"], 18) for r in rows])
    ax.set_ylim(len(rows) - 0.45, -0.6)
    left, right = ax.get_xlim()
    ax.set_xlim(0, right + 0.08 * (right - left))
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
    policy = f"<code>{esc(row['policy'])}</code>"
    attempts = row["success"] + row["fail"]
    if row["energy_per_goal_j"] is not None:
        ci = span(row, "energy_per_goal_j", joules)
        ci = f"95 % interval {ci}, {plural(row['tasks'], 'task')}" if ci else f"no interval from {plural(row['tasks'], 'task')}"
        return (
            f"Under {policy} an accomplished goal took <strong>{joules(row['energy_per_goal_j'])}</strong> ({ci}); "
            f"{row['success']} of {plural(attempts, 'scored attempt')} succeeded."
        )
    if row["energy_per_goal_lower_bound_j"] is not None:
        tried = "the only scored attempt failed" if attempts == 1 else f"none of {attempts} scored attempts succeeded"
        return (
            f"Under {policy} {tried}: {joules(row['spent_j'])} were spent, and a goal costs "
            f"<strong>at least {joules(row['energy_per_goal_lower_bound_j'])}</strong> (with 95 % confidence)."
        )
    if attempts == 0:
        counts = f"{row['unscored']} unscored, {row['pending']} pending"
        return f"Under {policy} no attempt could be scored ({counts}), so nothing is known about the energy of a goal."
    return f"Under {policy} no scored attempt has a known energy."


def answer_shares(row):
    if not row:
        return ""
    ci = span(row, "model_share", percent)
    ci = f" (95 % interval {ci})" if ci else ""
    return (
        f"Model calls took <strong>{percent(row['model_share'])}</strong> of the energy{ci}, "
        f"commands {percent(row['command_share'])}, waiting {percent(row['waiting_share'])}."
    )


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
            best.append(f"{words} the best predictor ({esc(r['predictor'])}) is off by {percent(r['mape'])}{f' ({ci})' if ci else ''}")
    text = "; ".join(best)
    return f"{text[:1].upper()}{text[1:]}, on average over tasks that it has not seen." if text else ""


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
    if source not in ("measured", ""):
        out.append(
            f"<strong>Estimated energy.</strong> {esc(source[:1].upper() + source[1:])}: where no energy counter was readable, joules are busy "
            "time times a stated power. Differences between rows are then differences in processor time."
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
            goal = with_span(f"≥ {joules(r['energy_per_goal_lower_bound_j'])}", f"{joules(r['spent_j'])} spent")
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


def signed_joules(v):
    return ("+" if v > 0 else "−" if v < 0 else "") + joules(abs(v))


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
        name = f"{esc(r['predictor'])}<small>{note or ('not fitted' if r['fitted'] == 'no' else r['fitted'])}</small>"
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


def values_of(group, column):
    return sorted({v for v in group.rows[column] if v})


def method_list(group, params, cost):
    """The facts of the method section as a definition list."""
    key, r = group.key, group.rows
    recordings = sorted({v.split("@")[0] for v in values_of(group, "recording")})
    counters = [", ".join(v for v in values_of(group, f"{d}_source") if v != "none") if d in group.domains else "" for d in ("gpu", "cpu")]
    c = closure(group)
    pairs = [
        ("model, hardware", " on ".join(x for x in (key["model"], key["hardware"]) if x)),
        ("agent", ", ".join(x for x in (key["agent"], key["profile"] and f"profile {key['profile']}") if x)),
        ("behaviour", behaviour_words(group) + (f" ({', '.join(recordings[:12])})" if recordings else "")),
        ("energy", f"{source_words(group)}; domains {key['total_domains'] or 'none'}"),
        ("source of GPU energy", counters[0]),
        ("source of CPU energy", counters[1]),
        ("phases told apart by", ", ".join(values_of(group, "split_source"))),
        ("run on", span_of_dates(group)),
        ("size", f"{plural(len(group.scored), 'scored trajectory')}, {plural(r['task'].nunique(), 'task')}"),
        ("trajectories at a time", key["concurrency"]),
        *(calibration_words(params) if params else ()),
    ]
    if c:
        text = f"median {100 * c[0]:+.1f} %, typical size {percent(c[1], 1)}, {plural(c[2], 'trajectory')}"
        text += ": tokens and calibration against the model calls above idle"
        pairs.append(("closure error", text))
    if cost:
        rates = {"carbon": "g CO₂ per kWh", "price": "per kWh"}
        text = ", ".join(f"{cost[k]:g} {unit}" for k, unit in rates.items() if cost.get(k) is not None)
        pairs.append(("carbon and price", f"{text}, times a PUE of {cost['pue']:g}; energies are without it"))
    return "<dl>" + "".join(f"<dt>{esc(k)}</dt><dd>{esc(str(v))}</dd>" for k, v in pairs if v) + "</dl>"


def estimated_list(group):
    items = []
    source = group.key["source"]
    if source == "estimated":
        items.append("All joules: busy time of the processors times a stated power per logical CPU.")
    elif source not in ("measured", ""):
        items.append(f"Part of the joules ({esc(source)}): the estimated part is busy time times a stated power.")
    if any("nvml-power" in s for s in values_of(group, "gpu_source")):
        items.append("GPU energy is integrated from power readings, because the energy counter was not readable.")
    items.append("The call model (closure error, and the predictor of that name): energy from token counts and the calibration.")
    if "dram" not in group.domains:
        items.append("Memory is not counted apart: no DRAM counter is part of these totals.")
    return "".join(tag("li", i) for i in items)


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
    total = {k: sum(row[k] for row in rows) for k in ("unscored", "missing", "pending", "no_energy", "planned")}
    if total["unscored"]:
        gone = f", {total['missing']} of them left no row" if total["missing"] else ""
        out.append(f"{total['unscored']} of {total['planned']} planned runs are unscored{gone}; the table bounds what they could change.")
    if total["pending"]:
        out.append(f"{total['pending']} of {total['planned']} planned runs are still to come: every number here is provisional.")
    if total["no_energy"]:
        out.append(f"{plural(total['no_energy'], 'scored run')} without energy: taken at the mean of the same task and policy.")
    c = closure(group)
    if c is None:
        out.append("There is no closure error: estimate and measurement were never both there.")
    elif c[1] > 0.1:
        out.append(f"The call model typically misses the model calls' energy above idle by {percent(c[1])}: its predictions are rough.")
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
    if (r["attribution"] == "shared").any():
        out.append("Calls overlapped; their energy was shared out by calibrated power. Compare shares rather than joules.")
    flags = pd.Series([code for text in r["flags"] for code in re.split(r"[\s,;|]+", text) if code], dtype=object).value_counts()
    if len(flags):
        listing = ", ".join(f"<code>{esc(k)}</code> ({v})" for k, v in sorted(flags.items(), key=lambda x: (-x[1], x[0]))[:12])
        out.append(f"Flags raised by the alignment, with the number of trajectories: {listing}.")
    return "".join(tag("li", i) for i in [*out, *map(esc, notes)])


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
    key = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in g.key.items() if v)
    parts = [f"<h2>Not pooled with the above: {esc(stamp(g))}</h2>", tag("p", esc(key), "kicker"), notice(g)]
    parts += [*(tag("p", answer_goal(r)) for r in result["configs"][:6]), config_table(g, result["configs"], cost)]
    parts.append(difference_sentences(g, result["configs"]))
    if result["shares"]:
        parts += [tag("p", answer_shares(overall_shares(result["shares"]))), share_table(g, result["shares"])]
    return "".join([*parts, "<h3>What to distrust about these</h3>", tag("ul", caveats(g, result["configs"]))])


def cards(first):
    """The three or four numbers that stand out."""
    g, rows, share, c = first["group"], first["configs"], overall_shares(first["shares"]), closure(first["group"])
    out = []
    goals = sorted(r["energy_per_goal_j"] for r in rows if r["energy_per_goal_j"] is not None)
    bounds = [r["energy_per_goal_lower_bound_j"] for r in rows if r["energy_per_goal_lower_bound_j"] is not None]
    if goals:
        low, high = joules(goals[0]), joules(goals[-1])
        text = low if low == high else f"{low.split()[0] if low.split()[1] == high.split()[1] else low} – {high}"
        out.append((text, "per accomplished goal" + (", by policy" if low != high else "")))
    elif bounds:
        out.append((f"≥ {joules(min(bounds))}", "per accomplished goal (none was)"))
    if share:
        seconds = "" if share["total_s"] is None else f" of {share['total_s']:.0f} s"
        out += [(joules(share["total_j"]), f"per trajectory{seconds}"), (percent(share["model_share"]), "of it in model calls")]
    if c:
        against = "measurement" if g.measured else "energy from busy time (circular)"
        out.append((f"{100 * c[0]:+.1f} %", f"closure error: estimate from tokens against {against}, median of {c[2]}"))
    return "".join(f'<div class="card"><b>{esc(a)}</b><span>{esc(b)}</span></div>' for a, b in out)


def build_report(results, notes, params, cost, fingerprint, source_name):
    """The whole page as text: the template with the largest group told in full, the others after it and by themselves."""
    first = results[0]
    g, figures, rows, share = first["group"], first["figures"], first["configs"], overall_shares(first["shares"])
    others = "; ".join(f"{len(r['group'].rows)} {behaviour_words(r['group'])}, {source_words(r['group'])}" for r in results[1:])
    if others:
        others = f"This page tells the largest set of comparable runs first. Not pooled with it, at the end: {others}."
    prediction = answer_prediction(g, first["predictors"], first["paired"])
    fields = {
        "title": f"Trajoule: {esc(g.key['model'] or 'energy of agent trajectories')}",
        "kicker": esc(" · ".join(x for x in (g.key["model"], g.key["hardware"], span_of_dates(g)) if x)),
        "notice": notice(g),
        "answer": " ".join(answer_goal(r) for r in rows[:4]),
        "answer_more": " ".join(x for x in (answer_shares(share), prediction) if x),
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
        "share_table": share_table(g, first["shares"]) if share else tag("p", "No scored trajectory has a known energy."),
        "prediction": tag("p", prediction),
        "scatter_figure": embed(
            figures.get("scatter"),
            "Predicted against actual energy of each trajectory",
            "Each trajectory's energy as foretold without having seen its task; the band is ±20 %. Best predictor of each kind, and the call "
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
        "fingerprint": fingerprint[:16],
    }
    template = Template(Path(__file__).with_name("report_template.html").read_text(encoding="utf-8"))
    return template.substitute(fields)


def terminal_summary(results, notes, out):
    """The lines that end the program: joules, shares, energy per goal, closure, sources."""
    lines = []
    for r in results:
        g, share, c = r["group"], overall_shares(r["shares"]), closure(r["group"])
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
        for row in r["configs"]:
            lines.append(f"  energy per goal  {row['policy']}: " + html.unescape(re.sub("<[^>]*>", "", answer_goal(row))).split(" ", 2)[2])
        if c:
            lines.append(
                f"  closure error    median {100 * c[0]:+.1f} %, size {percent(c[1], 1)}, {plural(c[2], 'trajectory')} (call model, above idle)"
            )
        if not g.measured:
            lines.append("  note             estimated from busy time: predictions from time or tokens are circular, nothing is claimed")
        if g.key["behaviour"] == "authored":
            lines.append("  note             replies were authored: outcomes and energy per goal demonstrate the method")
    lines += [f"note: {n}" for n in notes]
    lines.append(f"report: {Path(out) / 'report.html'}")
    return "\n".join(lines)
