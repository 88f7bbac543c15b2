#!/usr/bin/env python3
"""Idle power, energy per call, and the call model: joules and seconds of one model call from its token counts.

    python3 calibrate.py --samples data/calib/samples.csv --calls data/calib/calls.jsonl --idle-loaded data/calib/idle_loaded.csv \\
        --idle-bare data/calib/idle_bare.csv --append data/calib/append_calls.jsonl --append-samples data/calib/append_samples.csv \\
        --out-dir results/calib_rerun

1. Idle power is the mean of an idle file; one that drifts, has bursts, or was busy is refused, the quiet between calls stands in for it.
2. Energy above idle of a call = the whole counter steps around it, less the power of the neighbouring quiet x their time.
3. Call model: per call, output token, uncached token (prefill; a floor for short ones, or for all calls), attention of both, cached token.
   Non-negative, relative error minimised, the fewest terms that held-out cells support; total = above idle + idle x time. The sum predicts;
   a single coefficient is no physical quantity: a call's overhead and the floor take up what belongs to others, so ratios of two may exceed
   the card's power limit.
4. Errors are held out: one cell, or one context, is left out and the form is chosen anew without it. Intervals: bootstrap over cells. Noise
   within cells: mean |call / mean of its n equal calls - 1|; around the true mean it is sqrt(n / (n - 1)) times that (n = 5: 12 % more).
5. Append calls are never fitted: they validate. What the design does not identify is said, not guessed.

--compare takes the calls of the same grid over another transport (streamed token-id completions, say): never fitted either, what differs
per cell is a result. Writes to --out-dir: params.json (last), calls_energy.csv, models.csv (models of the literature on the same data),
append_energy.csv, transports.csv, idle_after_call.csv, and the figures energy_model_*, energy_per_token_*, repeatability_*,
residuals_* (.png; numbers in .csv). "checks" in params.json is a list of {code, severity, text, ...}: what was "refused", is worth a
"warning" or a "note", or was tested and is "ok".
"""

import argparse
import fnmatch
import gzip
import importlib
import itertools
import json
import math
import os
import re
import sys
import time
from pathlib import Path

try:
    import numpy as np

    import energylib
    from energylib import DataError
    from stages import csvfiles
    from stages.arguments import parsed
except ModuleNotFoundError as e:
    if __name__ != "__main__":
        raise
    print(f"calibrate.py: {e.name} is missing: pip install numpy pandas matplotlib", file=sys.stderr)
    sys.exit(2)

# The terms of the call model, in the order of the columns. u = prompt - cached tokens, n = output tokens after the first
# (the first one comes out of the prefill), c = cached tokens, p = prompt tokens.
TERMS = {
    "call": "per call",
    "output": "per output token after the first",
    "uncached": "per uncached prompt token",
    "decode_attention": "per output token and token of context before it",
    "prefill_attention": "per uncached token and token of context before it",
    "cached": "per cached prompt token",
    "prefill_floor": "least cost of a prefill, per call",
}
NAMES = tuple(TERMS)
CALL, OUTPUT, UNCACHED, DECODE_ATTENTION, PREFILL_ATTENTION, CACHED, FLOOR = range(7)
BEGIN = 7  # behind the coefficients: more uncached tokens than this pay the floor (0: hits, too)
DECODE = [OUTPUT, DECODE_ATTENTION]
# Which of two terms that the data cannot tell apart is kept: the one that extrapolates best.
PRIORITY = [OUTPUT, UNCACHED, CALL, DECODE_ATTENTION, PREFILL_ATTENTION, CACHED]

NEIGHBOUR_S = 1.0  # quiet that counts as neighbouring: a GPU's idle power drifts by about 1 W in a minute of calls
TIED = 1e-4  # share of a column that other columns leave unexplained, below which its coefficient is noise (variance x 10,000)
MAX_ENDS = 8  # places tried for the end of the prefill floor
INNER_FOLDS = 10
SIMPLER = 1.0  # a form with fewer terms is taken when its held-out error is worse by less than this many standard errors (Breiman's rule)
INTERVAL = 0.95
BOUND_DRAWS = 400  # enough for a one-sided 95 % bound; each costs a fit of its own per term
SEED = 20260205
LINEARITY_TOLERANCE = 0.1
APPEND_TOLERANCE = 0.05
SAME_WORK = 0.01  # cells of two transports are compared when they differ by no more than this share of the prompt and of the output
GAIN = 0.05  # systematic: NVIDIA states +-5 % for the power reading that the counter integrates; cancels in ratios
# An idle file is refused when more than this share: power moves over its length ("trend") or between the means of its tenths ("tenths"), energy in
# bursts, energy above the power of its quiet seconds ("busy"), or power above that between calls ("between"; a GPU rests lower than after a call).
IDLE_LIMITS = {"gpu": {"trend": 0.03, "tenths": 0.03, "bursts": 0.01, "busy": 0.03, "between": 0.05},
               "cpu": {"trend": 0.15, "tenths": 0.35, "bursts": 0.10, "busy": 0.30, "between": 0.15}}  # fmt: skip
IDLE_LIMITS["dram"] = IDLE_LIMITS["cpu"]
QUIET = 0.05  # quantile of the power per second that quiet seconds have, when most of an idle file is busy, too
IDLE_MIN_S = 5.0
LEAST_SCALE = 0.05  # relative errors of cells below this share of the median cell are taken relative to that share
NOISY = 0.10  # coefficient of variation of equal calls above which the machine was not quiet (the H200 shows 0.01)
UNRELIABLE = 0.20  # held-out error above which a warning says that the model is not to be used
GPU_BUSY, CPU_BUSY = 5, 50  # % of utilisation, mean over an idle file's state.csv: a GPU that is busier is refused, a CPU warned about
UNKNOWN_CACHED = "cached tokens not reported"
AFTER_CALL_S = [0, 0.25, 0.5, 1, 2, 5, 10, 30, 60, np.inf]


# ---- the call model ----


def basis(prompt, cached, completion):
    """(k, 7) columns of the call model in the order of TERMS; the floor's column is 0 (it is not linear, see `evaluate`)."""
    prompt, cached, completion = (np.atleast_1d(np.asarray(a, float)) for a in (prompt, cached, completion))
    u, n = prompt - cached, np.maximum(completion - 1, 0)
    zero = np.zeros(len(u))
    return np.column_stack([zero + 1, n, u, n * (prompt + completion / 2), u * (cached + u / 2), cached, zero])


def evaluate(columns, coef, has_floor):
    """Model value of rows of `basis`; `has_floor`: rows whose prefill is long enough to pay the floor."""
    prefill = columns[:, [UNCACHED, PREFILL_ATTENTION]] @ coef[[UNCACHED, PREFILL_ATTENTION]]
    rest = columns[:, [CALL, OUTPUT, DECODE_ATTENTION, CACHED]] @ coef[[CALL, OUTPUT, DECODE_ATTENTION, CACHED]]
    return rest + np.where(has_floor, np.maximum(prefill, coef[FLOOR]), prefill)


def predict_fit(fit, prompt, cached, completion):
    """Value of one fitted quantity of params.json (an entry of "energy", or "time") for arrays of token counts."""
    coef = np.array([(fit["terms"].get(name) or {}).get("value") or 0.0 for name in NAMES])
    columns = basis(prompt, cached, completion)
    return evaluate(columns, coef, columns[:, UNCACHED] > fit["floor_above_uncached_tokens"])


def predict(params, prompt_tokens, cached_tokens, completion_tokens):
    """Energy above idle and time of calls from their token counts (arrays; NaN where a count is unknown).

    Returns {"gpu_above_idle_j", "cpu_above_idle_j", "dram_above_idle_j": array or None when it was not measured, "time_s": array}.
    Above idle is relative to `idle_power(params, "loaded")`."""
    tokens = [np.atleast_1d(np.asarray(a, float)) for a in (prompt_tokens, cached_tokens, completion_tokens)]
    out = {}
    for group in ("gpu", "cpu", "dram"):
        fit = params["energy"].get(group)
        out[f"{group}_above_idle_j"] = predict_fit(fit, *tokens) if fit else None
    out["time_s"] = predict_fit(params["time"], *tokens)
    return out


def idle_power(params, state="loaded"):
    """{domain: W} for `state`: "loaded" (model resident, between calls: what above-idle energies are relative to), "rested" (the loaded
    idle file: minutes without a call) or "bare" (no server). Domains without a value are left out."""
    if state not in ("loaded", "rested", "bare"):
        raise ValueError(f"state: found {state!r}, expected loaded, rested or bare")
    out = {}
    for domain, idle in params["idle"]["bare" if state == "bare" else "loaded"].items():
        watts = idle.get("between_calls_w") if state == "loaded" else None
        watts = idle["power_w"] if watts is None else watts
        if watts is not None:
            out[domain] = watts
    return out


def idle_like(params, domains, state="loaded"):
    """`idle_power` for the counters `domains` of another run on such hardware: by name or, where all counters of a kind have other names but
    are as many (GPU 1 instead of GPU 0), by order."""
    idle, out = idle_power(params, state), {}
    for kind in {d.rstrip("0123456789") for d in domains}:
        here, there = (sorted(d for d in names if d.rstrip("0123456789") == kind) for names in (domains, idle))
        by_order = len(here) == len(there) and not set(here) & set(there)
        out |= {d: idle[c] for d, c in zip(here, there if by_order else here, strict=True) if c in idle}
    return out


def nnls(gram, moment, free=None):
    """Least squares with non-negative coefficients from X'X and X'y (Lawson and Hanson, 1974). `free`: one index that may be negative."""
    scale = np.sqrt(np.diag(gram))
    scale = np.where(scale > 0, scale, 1.0)
    a = gram / np.outer(scale, scale) + 1e-12 * np.eye(len(moment))  # the ridge keeps a collinear pair from being singular
    b = moment / scale
    bound = np.ones(len(b), bool)
    if free is not None:
        bound[free] = False
    x = np.linalg.solve(a, b)
    if (x[bound] >= 0).all():  # nothing binds: by far the commonest case
        return x / scale
    x, active = np.zeros(len(b)), np.zeros(len(b), bool)
    if free is not None:
        active[free] = True
        x[free] = b[free] / a[free, free]
    tolerance = 1e-11 * max(np.abs(b).max(), 1e-300)
    for _ in range(10 * len(b)):
        gradient = np.where(active, -np.inf, b - a @ x)
        j = int(np.argmax(gradient))
        if gradient[j] <= tolerance:
            break
        active[j] = True
        while True:
            z = np.zeros(len(b))
            z[active] = np.linalg.solve(a[np.ix_(active, active)], b[active])
            negative = active & bound & (z <= 0)
            if not negative.any():
                break
            step = (x[negative] / (x[negative] - z[negative])).min()
            x = x + step * (z - x)
            active &= ~bound | (x > 1e-13 * np.abs(x).max())
            x[~active] = 0.0
            if not active.any():
                z = x
                break
        x = z
    return x / scale


class Design:
    """One regression: token counts, what they cost, and the cells that are left out together.

    Sums of squares are kept per cell, so that leaving cells out, or drawing them again, costs no pass over the calls. Errors are
    relative to the cell's mean (not to the single call, which would favour calls that came out low).
    `floor_above`: uncached tokens above which the prefill floor may apply, one or more to choose from; `terms`: indices of the only terms
    that may be fitted (default: all)."""

    def __init__(self, tokens, y, cell, context, floor_above=(0,), terms=None):
        self.terms = terms
        self.columns = basis(*tokens)
        self.y, self.cell = np.asarray(y, float), np.asarray(cell)
        self.cells = int(self.cell.max()) + 1
        self.count = np.bincount(self.cell, minlength=self.cells)
        mean = np.bincount(self.cell, self.y, self.cells) / self.count
        # a cell that barely rises above idle must not outweigh all others by its small mean
        self.weight = (1 / np.maximum(mean, LEAST_SCALE * np.median(mean)))[self.cell]
        self.context = np.zeros(self.cells, int)
        self.context[self.cell] = context
        u = self.columns[:, UNCACHED]
        long = u > max(floor_above)
        # the floor ends somewhere between two prompt sizes, and two sizes above it must identify the slope
        of_call = self.context[self.cell]
        with np.errstate(invalid="ignore"):
            sizes = np.bincount(of_call, u * long) / np.bincount(of_call, long)
        sizes = np.unique(sizes[np.isfinite(sizes)].round())
        ends = (sizes[:-1] + sizes[1:])[:-1] / 2 if len(sizes) > 2 else np.empty(0)
        ends = ends[np.linspace(0, len(ends) - 1, min(len(ends), MAX_ENDS)).round().astype(int)] if len(ends) else []
        self.floors = list(itertools.product(floor_above, ends))
        self.gram, self.moment = {}, {}
        for floor in [None, *self.floors]:
            x = self.columns.copy()
            if floor is not None:
                short = (u > floor[0]) & (u <= floor[1])
                x[np.ix_(short, [UNCACHED, PREFILL_ATTENTION])] = 0.0
                x[short, FLOOR] = 1.0
            x *= self.weight[:, None]
            self.gram[floor] = np.zeros((self.cells, 7, 7))
            self.moment[floor] = np.zeros((self.cells, 7))
            np.add.at(self.gram[floor], self.cell, x[:, :, None] * x[:, None, :])
            np.add.at(self.moment[floor], self.cell, x * (self.weight * self.y)[:, None])
        self._cache = {}

    def identified(self, keep):
        """(terms that the cells in `keep` can tell apart, {term that is not: terms it is tied to})."""
        gram = self.gram[None][keep].sum(axis=0)
        scale = np.sqrt(np.diag(gram))
        good, tied = [], {}
        for j in PRIORITY:
            if self.terms is not None and j not in self.terms:
                continue
            if scale[j] == 0:
                tied[j] = []
                continue
            if good:
                a = gram[np.ix_(good, good)] / np.outer(scale[good], scale[good])
                b = gram[good, j] / scale[good] / scale[j]
                c = np.linalg.lstsq(a, b, rcond=1e-10)[0]
                if 1 - b @ c < TIED:
                    tied[j] = [g for g, size in zip(good, np.abs(c), strict=True) if size > 0.05]
                    continue
            good.append(j)
        return good, tied

    def forms(self, keep):
        """Sets of terms that may be fitted to the cells in `keep`, at most 0.6 x (cells + 1) of them."""
        good, _ = self.identified(keep)
        base = [j for j in (CALL, OUTPUT, UNCACHED) if j in good]
        options = [j for j in (DECODE_ATTENTION, PREFILL_ATTENTION, CACHED) if j in good]
        if self.floors and UNCACHED in good and (self.terms is None or FLOOR in self.terms):
            options.append(FLOOR)
        most = max(len(base), int(0.6 * (np.count_nonzero(keep) + 1)))
        sets = (base + list(s) for r in range(len(options) + 1) for s in itertools.combinations(options, r))
        return [tuple(s) for s in sets if len(s) <= most]

    def fit(self, weights, form, free=None):
        """Coefficients of `form` and BEGIN, (8,), cells weighted by `weights` (0: left out); the floor is the one that fits best."""
        best, best_loss = None, np.inf
        for floor in self.floors if FLOOR in form else [None]:
            gram = np.tensordot(weights, self.gram[floor], 1)
            moment = weights @ self.moment[floor]
            used = [j for j in form if gram[j, j] > 0]
            coef = np.zeros(8)
            coef[BEGIN] = floor[0] if floor else 0.0
            if used:
                coef[used] = nnls(gram[np.ix_(used, used)], moment[used], used.index(free) if free in used else None)
            if FLOOR not in form:
                return coef
            loss = weights[self.cell] @ ((self.value(coef) - self.y) * self.weight) ** 2
            if loss < best_loss:
                best, best_loss = coef, loss
        return best

    def value(self, coef):
        return evaluate(self.columns, coef, self.columns[:, UNCACHED] > coef[BEGIN])

    def cell_errors(self, values):
        """Mean absolute relative error of every cell."""
        return np.bincount(self.cell, np.abs(values - self.y) * self.weight, self.cells) / self.count

    def choose(self, keep):
        """The form for the cells in `keep`: the fewest terms whose error on held-out cells is as good as the best form's."""
        forms = self.forms(keep)
        cells = np.flatnonzero(keep)
        if len(forms) == 1 or len(cells) < 4:
            return forms[0]
        errors = np.zeros((len(forms), len(cells)))
        for fold in range(min(INNER_FOLDS, len(cells))):
            out = np.arange(len(cells)) % min(INNER_FOLDS, len(cells)) == fold
            weights = keep.astype(float)
            weights[cells[out]] = 0.0
            for i, form in enumerate(forms):
                errors[i, out] = self.cell_errors(self.value(self._fit_cached(weights, form)))[cells[out]]
        mean = errors.mean(axis=1)
        worse = errors - errors[np.argmin(mean)]
        limit = SIMPLER * worse.std(axis=1, ddof=1) / np.sqrt(len(cells))
        fit = [i for i in range(len(forms)) if worse[i].mean() <= limit[i] + 1e-15]
        return forms[min(fit, key=lambda i: (len(forms[i]), mean[i]))]

    def _fit_cached(self, weights, form):
        key = (weights.tobytes(), form)
        if key not in self._cache:
            self._cache[key] = self.fit(weights, form)
        return self._cache[key]

    def held_out(self, groups):
        """Predictions of every call with the calls of its group (one of `groups` per cell) left out, form chosen without them, and
        how often each form was chosen. None when fewer than three groups would remain to learn from."""
        if len(np.unique(groups)) < 3:
            return None, {}
        values, chosen = np.zeros(len(self.y)), {}
        for g in np.unique(groups):
            keep = groups != g
            form = self.choose(keep)
            rows = ~keep[self.cell]
            values[rows] = self.value(self.fit(keep.astype(float), form))[rows]
            chosen[form] = chosen.get(form, 0) + 1
        return values, chosen


# ---- reading ----


def read_calls(path):
    """Calls of a calls.jsonl as a table in order of time, one row per HTTP attempt. Column `unused` says why a call is not fitted
    (empty: it may be). Raises DataError on a file that holds no call or a call without times."""
    import pandas as pd

    records = energylib.read_jsonl(path)
    if not records:
        raise DataError(f"{path}: found no call, expected one JSON object per line as microbench.py writes them")
    rows = []
    for number, r in enumerate(records, 1):
        start, end = _number(r.get("t_start")), _number(r.get("t_end"))
        if not (np.isfinite(start) and np.isfinite(end) and end > start):
            raise DataError(f"{path}: call {number}: found t_start={r.get('t_start')!r}, t_end={r.get('t_end')!r}, expected two Unix times")
        cell = r.get("cell") or {}
        row = {"t_start": start, "t_end": end} | {name: r.get(name) for name in ("id", "seq", "model", "transport")}
        row |= {"mono_start": _number(r.get("mono_start")), "mono_end": _number(r.get("mono_end"))}
        mono = row["mono_end"] - row["mono_start"]  # no clock is set in between, where both were written
        row["duration_s"] = mono if mono > 0 else end - start
        row["first_token_s"] = _number(r.get("t_first")) - start
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            row[name] = _number(r.get(name))
        row |= {"context": _number(cell.get("context")), "output": _number(cell.get("output")), "state": cell.get("state"),
                "rep": _number(cell.get("rep")), "cell_cached": _number(cell.get("cached")), "cell_uncached": _number(cell.get("uncached")),
                "reference": cell.get("reference")}  # fmt: skip
        row["unused"] = _unused(r, row)
        rows.append(row)
    calls = pd.DataFrame(rows).sort_values("t_start", kind="stable").reset_index(drop=True)
    # a request that was made a miss (new prompt, cache reset) and whose server reports nothing read nothing from the cache
    silent = calls["cached_tokens"].isna() & (calls["state"] == "miss")
    calls["cached_assumed"] = silent
    calls.loc[silent, "cached_tokens"] = 0.0
    unknown = calls["cached_tokens"].isna() & (calls["unused"] == "")
    calls.loc[unknown, "unused"] = UNKNOWN_CACHED
    return calls


def _number(value):
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else np.nan


def _unused(record, row):
    if record.get("valid") is False:
        return str(record.get("reason") or "marked invalid")
    if record.get("error") or record.get("complete") is False or record.get("status") not in (200, None):
        return f"failed: {record.get('error') or record.get('status')}"
    if not (row["prompt_tokens"] > 0 and row["completion_tokens"] > 0):
        return "token counts not reported"
    if row["cached_tokens"] > row["prompt_tokens"]:
        return f"more cached tokens ({row['cached_tokens']:.0f}) than prompt tokens ({row['prompt_tokens']:.0f})"
    return ""


def cell_names(calls, append=False):
    """Name of the cell of every call, from the plan's cell where there is one, else from the measured tokens."""
    names = []
    for c in calls.itertuples():
        state = c.state if isinstance(c.state, str) else "hit" if c.cached_tokens > c.prompt_tokens / 2 else "miss"
        if append:
            cached = c.cell_cached if np.isfinite(c.cell_cached) else c.cached_tokens
            uncached = c.cell_uncached if np.isfinite(c.cell_uncached) else c.prompt_tokens - c.cached_tokens
            names.append((cached, uncached, c.output if np.isfinite(c.output) else c.completion_tokens, "append"))
        else:
            context = c.context if np.isfinite(c.context) else c.prompt_tokens
            names.append((context, c.output if np.isfinite(c.output) else c.completion_tokens, state))
    return names


def cell_label(name):
    """ "4096/64 miss": context/output and state; "4096+256/64 append": cached + uncached/output."""
    *sizes, output, state = [f"{part:g}" if isinstance(part, float) else str(part) for part in name]
    return f"{'+'.join(sizes)}/{output} {state}"


# ---- idle ----


def blocks(samples, domain, seconds):
    """(begin, joules, length) of consecutive stretches of whole counter steps, each about `seconds` long; the file's own clock."""
    grid = np.arange(samples.mono[0], samples.mono[-1], seconds)
    edge = samples.whole_steps(domain, grid, grid, clock="mono")[:, 0]
    edge = np.unique(edge[np.isfinite(edge)])
    ws = samples.whole_steps(domain, edge[:-1], edge[1:], clock="mono")
    good = np.isfinite(ws[:, 2])
    return ws[good, 0], ws[good, 2], (ws[:, 1] - ws[:, 0])[good]


def idle_of_file(samples, domain):
    """Mean power of an idle file: {"power_w", "se_w", "source", "seconds", "trend", "bursts", "refused": None or why}.

    `trend`: change over the file by a straight line, `bursts`: share of the energy above 1.25 x the median; both as fractions."""
    limits = IDLE_LIMITS[energylib.group(domain)]
    out = {"power_w": None, "se_w": None, "source": samples.source[domain], "seconds": None, "trend": None, "bursts": None, "refused": None}
    begin, joules, length = blocks(samples, domain, 1.0)
    out["seconds"] = float(length.sum())
    if length.sum() < IDLE_MIN_S or len(length) < 4:
        out["refused"] = f"{length.sum():.1f} s of counter readings, at least {IDLE_MIN_S:g} s are needed"
        return out
    power = joules / length
    mean, median = joules.sum() / length.sum(), float(np.median(power))
    spread = 1.4826 * np.median(np.abs(power - median))
    high = power > max(1.25 * median, median + 5 * spread)
    out["bursts"] = float(((power - median) * length)[high].sum() / joules.sum())
    calm = ~high
    slope, cut = np.polyfit(begin[calm] - begin[0], power[calm], 1) if calm.sum() > 3 else (0.0, mean)
    left = power[calm] - cut - slope * (begin[calm] - begin[0])
    slope_se = left.std(ddof=2) / (np.std(begin[calm]) * np.sqrt(calm.sum())) if calm.sum() > 3 else np.inf
    out["trend"] = float(slope * (begin[-1] - begin[0]) / mean)
    if out["bursts"] > limits["bursts"]:
        at = begin[high][0] - samples.mono[0]
        out["refused"] = (f"{high.sum()} of {len(power)} seconds are bursts (first at {at:.0f} s, up to {power.max():.0f} W, median "
                          f"{median:.0f} W): {out['bursts']:.1%} of the energy, at most {limits['bursts']:.0%} is idle")  # fmt: skip
    elif abs(out["trend"]) > limits["trend"] and abs(slope) > 4 * slope_se:
        out["refused"] = (f"power moves by {out['trend']:+.1%} over {out['seconds']:.0f} s ({power[:3].mean():.1f} W to "
                          f"{power[-3:].mean():.1f} W), at most {limits['trend']:.0%} is idle; wait until it has settled")  # fmt: skip
    else:
        out["refused"] = busy_part(power, calm, limits)
    if out["refused"]:
        return out
    d = power - power.mean()
    r = float(np.clip((d[1:] * d[:-1]).sum() / max((d * d).sum(), 1e-30), 0, 0.9))  # neighbouring seconds are not independent
    out["power_w"] = float(mean)
    out["se_w"] = float(power.std(ddof=1) / np.sqrt(len(power)) * np.sqrt((1 + r) / (1 - r)))
    return out


def busy_part(power, calm, limits):
    """Why a file of these powers per second was not idle all the time, or None: humps (means of its tenths, without bursts: `calm`), and work
    in so many of its seconds that the median is that of the busy ones."""
    parts = [part for part in np.array_split(power[calm], min(10, calm.sum() // 3)) if len(part) > 2] if calm.sum() > 8 else []
    if parts:
        means = np.array([part.mean() for part in parts])
        noise = np.sqrt(np.median([part.var(ddof=1) / len(part) for part in parts]))
        if np.ptp(means) > max(limits["tenths"] * power.mean(), 6 * noise):  # ten means of noise spread by 3 standard errors, seldom by 5
            return (f"power moves between {means.min():.1f} W and {means.max():.1f} W (means of {len(parts)} parts of the file, the highest is no. "
                    f"{np.argmax(means) + 1}), at most {limits['tenths']:.0%} is idle")  # fmt: skip
    quiet = np.quantile(power, QUIET)
    above = 1 - quiet / power.mean()
    if above > limits["busy"]:
        near = (power > (quiet + power.max()) / 2).mean()
        return (f"{power.mean():.1f} W on average, {quiet:.1f} W in its quiet seconds ({near:.0%} of the time nearer to {power.max():.0f} W): "
                f"{above:.0%} of the energy lies above the quiet, at most {limits['busy']:.0%} is idle")  # fmt: skip
    return None


# ---- energy per call ----


def measure_calls(samples, calls, others=None):
    """Energy of every call from whole counter steps. {domain: arrays} with `above_idle_j`, `idle_w` (neighbouring quiet), `window_s`
    (length of the whole steps) and `why` ("" where it is measured); {domain: quiet stretches `power_w`, `length_s`}.

    All calls of the table count as activity, also those that are not fitted, and so do `others` (another table, or None)."""
    start, end = samples.to_mono(calls["t_start"].to_numpy()), samples.to_mono(calls["t_end"].to_numpy())
    busy = np.c_[start, end]
    if others is not None:
        busy = np.r_[busy, np.c_[samples.to_mono(others["t_start"].to_numpy()), samples.to_mono(others["t_end"].to_numpy())]]
        busy = busy[np.argsort(busy[:, 0], kind="stable")]
    first, last = np.searchsorted(busy[:, 0], start, "left"), np.searchsorted(busy[:, 0], start, "right")
    before = np.r_[-np.inf, np.maximum.accumulate(busy[:, 1])][first]
    after = np.where(last - first > 1, -np.inf, np.r_[busy[:, 0], np.inf][last])  # two that begin at once are never apart
    out, quiet = {}, {}
    for domain in samples.domains:
        ws = samples.whole_steps(domain, start, end, clock="mono")
        apart = (ws[:, 0] >= before) & (ws[:, 1] <= after)
        window = ws[:, 1] - ws[:, 0]

        def stretch(a, b, domain=domain):
            """Whole steps inside [a, b]: their length and joules."""
            a, b = np.clip(a, samples.mono[0], samples.mono[-1]), np.clip(b, samples.mono[0], samples.mono[-1])
            first = samples.whole_steps(domain, a, a, clock="mono")[:, 1]
            last = samples.whole_steps(domain, b, b, clock="mono")[:, 0]
            inside = samples.whole_steps(domain, first, np.where(last > first, last, np.nan), clock="mono")
            return inside[:, 1] - inside[:, 0], inside[:, 2]

        left_s, left_j = stretch(np.maximum(before, start - NEIGHBOUR_S), start)
        right_s, right_j = stretch(end, np.minimum(after, end + NEIGHBOUR_S))
        left_w, right_w = left_j / left_s, right_j / right_s
        found = np.r_[left_w[np.isfinite(left_w)], right_w[np.isfinite(right_w)]]
        median = np.median(found) if len(found) else np.nan
        spread = 1.4826 * np.median(np.abs(found - median)) if len(found) else np.nan
        loud = median + max(6 * spread, 0.05 * median)  # work that no record tells of, such as a warm-up just before
        with np.errstate(invalid="ignore"):
            noisy = (left_w > loud) | (right_w > loud)
            left_ok, right_ok = np.isfinite(left_w) & (left_w <= loud), np.isfinite(right_w) & (right_w <= loud)
        length = np.where(left_ok, left_s, 0.0) + np.where(right_ok, right_s, 0.0)
        joules = np.where(left_ok, left_j, 0.0) + np.where(right_ok, right_j, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            idle = np.where(length > 0, joules / length, np.nan)
        why = np.full(len(calls), "", object)
        why[~np.isfinite(idle)] = "no quiet counter step beside it"
        why[noisy] = "the time beside it is not quiet"
        why[~apart] = "shares a counter step with another call"
        why[~np.isfinite(ws[:, 2])] = "not covered by the samples"
        above = np.where(why == "", ws[:, 2] - idle * window, np.nan)
        out[domain] = {"above_idle_j": above, "idle_w": idle, "window_s": window, "why": why}
        quiet[domain] = {"power_w": np.r_[left_w[left_ok], right_w[right_ok]], "length_s": np.r_[left_s[left_ok], right_s[right_ok]]}
    return out, quiet


def after_call(samples, domain, calls):
    """Power by time since the last call ended: rows {from_s, to_s, power_w, se_w, n, seconds}; what no gap reaches is left out."""
    start, end = samples.to_mono(calls["t_start"].to_numpy()), np.maximum.accumulate(samples.to_mono(calls["t_end"].to_numpy()))
    stop = np.r_[start[1:], samples.mono[-1]]
    rows = []
    for a, b in itertools.pairwise(AFTER_CALL_S):
        lo, hi = np.clip(end + a, None, samples.mono[-1]), np.minimum(end + b, stop)
        first = samples.whole_steps(domain, lo, lo, clock="mono")[:, 1]
        # a step belongs to the bin in which it begins, so that a bin of 0.25 s holds two steps of 0.1 s or three
        last = samples.whole_steps(domain, hi, hi, clock="mono")[:, 0]
        ws = samples.whole_steps(domain, first, np.where(last > first, last, np.nan), clock="mono")
        good = np.isfinite(ws[:, 2])
        length = (ws[:, 1] - ws[:, 0])[good]
        if length.sum() < 1.0:
            continue
        power = ws[good, 2].sum() / length.sum()
        each = ws[good, 2] / length
        se = float(np.sqrt(np.average((each - power) ** 2, weights=length) / max(good.sum() - 1, 1))) if good.sum() > 1 else None
        row = {"from_s": float(a), "to_s": None if b == np.inf else float(b), "power_w": float(power), "se_w": se}
        rows.append({**row, "n": int(good.sum()), "seconds": float(length.sum())})
    return rows


def linearity(samples, domain, calls, idle_w):
    """Self-test of a GPU's counter: energy of the step in which a call ends against the share of the step that it was busy.

    A GPU that samples its power only part of the time shows a slope away from 1. {"slope", "se", "n"} or None when too few ends fit."""
    start, end = samples.to_mono(calls["t_start"].to_numpy()), samples.to_mono(calls["t_end"].to_numpy())
    ws = samples.whole_steps(domain, end, end, clock="mono")
    a, b, joules = ws.T
    length = b - a
    inside = samples.whole_steps(domain, a - length / 2, a, clock="mono")  # the step before, busy from end to end
    with np.errstate(invalid="ignore", divide="ignore"):
        busy_w = inside[:, 2] / (inside[:, 1] - inside[:, 0])
        share = (end - a) / length
        energy = (joules - idle_w * length) / ((busy_w - idle_w) * length)
        ok = np.isfinite(energy) & (inside[:, 0] >= start) & (busy_w > 1.2 * idle_w) & (np.r_[start[1:], np.inf] > b)
    if ok.sum() < 10 or np.ptp(share[ok]) < 0.5:
        return None
    x, y = share[ok] - share[ok].mean(), energy[ok] - energy[ok].mean()
    slope = (x * y).sum() / (x * x).sum()
    se = np.sqrt(((y - slope * x) ** 2).sum() / (ok.sum() - 2) / (x * x).sum())
    return {"slope": float(slope), "se": float(se), "n": int(ok.sum())}


# ---- fits and their errors ----


def usable(values, calls):
    """(mask of the calls that can be fitted, names of the cells that cannot because their mean is not above zero)."""
    rows = (calls["unused"] == "").to_numpy() & np.isfinite(values)
    sums = {}
    for name, value in zip(calls["cell"][rows], values[rows], strict=True):
        sums[name] = sums.get(name, 0.0) + value
    empty = sorted(name for name, total in sums.items() if total <= 0)
    return rows & ~calls["cell"].isin(empty).to_numpy(), empty


def floor_bracket(calls):
    """(most uncached tokens of a hit, fewest of a miss): the prefill floor begins somewhere between; (0, fewest) without hits."""
    good = calls[calls["unused"] == ""]
    u = good["prompt_tokens"] - good["cached_tokens"]
    hit = good["cached_tokens"] > 0.5 * good["prompt_tokens"]
    return (float(u[hit].max()) if hit.any() else 0.0), (float(u[~hit].min()) if (~hit).any() else None)


def make_design(calls, rows, y, floor_above, terms=None):
    """Design over `rows` (mask) of the calls, and the cells' names. `terms`: the only ones that may be fitted."""
    part = calls[rows]
    names = [calls["cell"].iloc[i] for i in np.flatnonzero(rows)]
    order = sorted(set(names))
    contexts = sorted({name[0] for name in order})
    cell = np.array([order.index(name) for name in names])
    context = np.array([contexts.index(name[0]) for name in names])
    tokens = [part[name].to_numpy(float) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
    return Design(tokens, y[rows], cell, context, floor_above, terms), order


def errors(values, truth, cells):
    """{"mape", "worst_cell_mape", "worst_cell", "bias", "p95"}: errors of predictions as fractions of the cell's mean (a call that came
    out low would count double otherwise, and one near zero without bound). None without a prediction. "left_out": cells whose mean is not
    above 0, which have no relative error; only where there are such."""
    ok = np.isfinite(values) & np.isfinite(truth)
    groups = {}
    for name, value, y in zip(np.asarray(cells, object)[ok], values[ok], truth[ok], strict=True):
        groups.setdefault(name, []).append((value, y))
    by_cell = {}
    for name, pairs in groups.items():
        value, y = np.array(pairs).T
        if y.mean() > 0:
            by_cell[name] = (value - y) / y.mean()
    if not by_cell:
        return None
    relative = np.concatenate(list(by_cell.values()))
    worst = max(sorted(by_cell), key=lambda name: np.abs(by_cell[name]).mean())
    return {"mape": float(np.abs(relative).mean()), "bias": float(relative.mean()), "p95": float(np.quantile(np.abs(relative), 0.95)),
            "worst_cell_mape": float(np.abs(by_cell[worst]).mean()), "worst_cell": cell_label(worst),
            **({"left_out": len(groups) - len(by_cell)} if len(groups) > len(by_cell) else {})}  # fmt: skip


def spread_in_cells(truth, cells):
    """(mean relative distance of calls from the mean of their own cell; {cell: coefficient of variation}).

    The first is what no model of token counts can beat by much: the mean follows its n calls, so around the true mean they lie
    sqrt(n / (n - 1)) times as far off."""
    groups = {}
    for name, y in zip(cells, truth, strict=True):
        if np.isfinite(y):
            groups.setdefault(name, []).append(y)
    several = {name: np.array(ys) for name, ys in sorted(groups.items()) if len(ys) > 1 and np.mean(ys) > 0}
    if not several:
        return None, {}
    distance = np.concatenate([np.abs(ys / ys.mean() - 1) for ys in several.values()])
    return float(distance.mean()), {name: float(ys.std(ddof=1) / ys.mean()) for name, ys in several.items()}


def repeatability(variation):
    if not variation:
        return None
    values = np.array(list(variation.values()))
    worst = max(variation, key=variation.get)
    return {"median": float(np.median(values)), "p90": float(np.quantile(values, 0.9)), "worst": float(values.max()),
            "worst_cell": cell_label(worst), "cells": len(values)}  # fmt: skip


def fit_quantity(design, unit, draws, rng):
    """Fit of one quantity: form, terms with intervals, what is not identified. Intervals from `draws` bootstrap draws of the cells."""
    everything = np.ones(design.cells)
    good, tied = design.identified(everything > 0)
    form = design.choose(everything > 0)
    coef = design.fit(everything, form)
    terms, missing = {}, []
    weights = rng.multinomial(design.cells, np.full(design.cells, 1 / design.cells), size=draws).astype(float)
    enough = draws > 0 and design.cells >= 2 * len(form)
    boot = np.array([design.fit(w, form) for w in weights]) if enough else None
    possible = [j for j in range(7) if design.terms is None or j in design.terms]
    for j in possible:
        name = NAMES[j]
        term = {"value": float(coef[j]), "unit": unit, "meaning": TERMS[name], "lo": None, "hi": None, "bound": None, "status": "fitted"}
        if j in tied or (j == FLOOR and not design.floors):
            term |= {"value": None, "status": "not identified", "note": why_tied(design, j, tied.get(j, []))}
            missing.append(name)
        elif j not in form and j not in good and j != FLOOR:
            continue
        else:
            inside = j in form
            if boot is not None and inside:
                term["lo"], term["hi"] = (float(q) for q in np.quantile(boot[:, j], [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]))
            if not inside or coef[j] <= 0 or (term["lo"] is not None and term["lo"] <= 0):
                # at the boundary a point estimate says nothing: how large could it be if it were allowed to vary freely?
                wide = form if inside else tuple(sorted((*form, j)))
                free = np.array([design.fit(w, wide, free=j)[j] for w in weights[:BOUND_DRAWS]]) if enough else None
                term["lo"], term["bound"] = 0.0, "upper"
                term["hi"] = None if free is None else float(max(np.quantile(free, INTERVAL), 0.0))
                term["status"] = "not needed" if not inside else "zero" if coef[j] <= 0 else "fitted"
        terms[name] = term
    fit = {"terms": terms, "form": [NAMES[j] for j in sorted(form)], "not_identified": missing,
           "floor_above_uncached_tokens": float(coef[BEGIN]), "n": len(design.y), "cells": design.cells,
           "intervals": f"{INTERVAL:.0%}, {draws} bootstrap draws of cells" if enough else
                        f"none: {design.cells} cells are too few for {len(form)} terms"}  # fmt: skip
    return fit, coef


def why_tied(design, j, partners):
    """In words, why a term cannot be told apart, and what measurement would."""
    contexts, outputs = len(np.unique(design.context)), len(np.unique(design.columns[:, OUTPUT]))
    with_what = f" (tied to: {', '.join(NAMES[p] for p in partners)})" if partners else ""
    if j == CACHED and not design.columns[:, CACHED].any():
        return "no call has cached tokens: measure cache hits (send every prompt twice)"
    if j == FLOOR:
        return "needs prefills of at least three lengths"
    if outputs == 1 and j in (OUTPUT, CALL, DECODE_ATTENTION):
        return f"only one output length{with_what}: measure at least two"
    if contexts == 1:
        return f"only one context length{with_what}: measure at least three"
    if contexts == 2 and j in (PREFILL_ATTENTION, DECODE_ATTENTION):
        return f"only two context lengths{with_what}: measure at least three"
    return f"varies together with other terms{with_what}: vary contexts and outputs independently"


def compare(design, cells, misses):
    """Models of the literature on the same calls, each fitted as it stands (non-negative, relative error): rows for models.csv."""
    p = design.columns[:, UNCACHED] + design.columns[:, CACHED]
    n = design.columns[:, OUTPUT] + 1
    one, u, cached = design.columns[:, CALL], design.columns[:, UNCACHED], design.columns[:, CACHED]
    models = {
        "one constant per token": ("prompt + output", [p + n]),
        "constants per prompt and output token": ("prompt, output", [p, n]),
        "linear in tokens": ("1, uncached, cached, output", [one, u, cached, n]),
        "tokens x context": ("1, uncached, cached, output, output x (prompt + output/2)", [one, u, cached, n, n * (p + n / 2)]),
        "SweetSpot (arXiv 2602.05695), no cache": (
            "1, prompt, prompt^2, output, output x prompt, output^2",
            [one, p, p * p, n, n * p, n * n],
        ),
    }
    rows = []
    for which, mask in (("all", np.ones(len(p), bool)), ("misses", misses)):
        for name, (terms, columns) in models.items():
            row = {"model": name, "terms": terms, "parameters": len(columns), "calls": which}
            x = np.column_stack(columns) * design.weight[:, None]
            y = design.y * design.weight
            for label, groups in (("cell", design.cell), ("context", design.context[design.cell])):
                held = np.full(len(y), np.nan)
                for g in np.unique(groups[mask]):
                    train, test = mask & (groups != g), mask & (groups == g)
                    if train.any():
                        held[test] = x[test] @ nnls(x[train].T @ x[train], x[train].T @ y[train]) / design.weight[test]
                row[f"_{label}"] = held
            rows.append(row)
    return rows


# ---- the whole of it ----


def calibrate(samples_path, calls_path, idle_loaded=None, idle_bare=None, append=None, append_samples=None, *, out_dir,
              hardware=None, model=None, floor_above=None, draws=1000, figures=True, compare=None, compare_samples=None, state=None):  # fmt: skip
    """Measure, fit, write (see the module's text) and return what params.json holds. Raises DataError on input that cannot be used.

    `state`: the hardware's state during the calls (default: the sampler's file beside the samples, where there is one)."""
    import pandas as pd

    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    checks = []

    def check(code, severity, text, **values):
        checks.append({"code": code, "severity": severity, "text": text, **values})

    samples = energylib.read_samples(samples_path)
    if state is None and energylib.state_path(samples_path).exists():
        state = energylib.state_path(samples_path)
    calls = read_calls(calls_path)
    check_complete(calls, calls_path, check)
    calls.loc[calls["state"].isin(["append", "fill"]) & (calls["unused"] == ""), "unused"] = "append cells validate, they are never fitted"
    calls["cell"] = cell_names(calls)
    check_calls(calls, calls_path, samples, check)
    low, high = floor_bracket(calls)
    if floor_above is not None:
        floor_above = (floor_above,)
    elif low:  # a floor of misses (a graph replaces the launches of short prefills), or of every call: each fit takes its own
        floor_above = (round((low + (low if high is None else high)) / 2), 0)
    else:
        floor_above = (0,)
    idle = read_idle({"loaded": idle_loaded, "bare": idle_bare}, samples, check)
    more = {"append": (append, append_samples), "compare": (compare, compare_samples)}
    runs = {"calls": (calls, samples_path)} | {name: (read_calls(path), own or samples_path) for name, (path, own) in more.items() if path}
    for name, (table, _) in runs.items():
        if name != "calls":
            check_complete(table, more[name][0], check)

    def others_of(name):
        """Calls of the other files that fell into the same samples: activity beside those of `name`."""
        tables = [table for other, (table, path) in runs.items() if other != name and str(path) == str(runs[name][1])]
        return pd.concat(tables, ignore_index=True) if tables else None

    measured, quiet = measure_calls(samples, calls, others_of("calls"))
    domains = check_domains(samples, calls, measured, quiet, idle, check, idle_loaded)
    missing = check_members(samples, domains, check)

    rng = np.random.default_rng(SEED)
    params = {"schema": 1, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "inputs": {}}
    for name, path in (("samples", samples_path), ("state", state), ("calls", calls_path), ("idle_loaded", idle_loaded), ("idle_bare", idle_bare),
                       ("append", append), ("append_samples", append_samples if append else None),
                       ("compare", compare), ("compare_samples", compare_samples if compare else None)):  # fmt: skip
        if path:
            params["inputs"][name] = {"path": str(path), "sha256": energylib.sha256(path)}
    served = sorted({m for m in calls["model"] if isinstance(m, str)})
    params["hardware"] = hardware or energylib.hardware_name(samples.meta)
    params["model"] = model or (", ".join(served) if served else None)
    params["transport"] = ", ".join(sorted({t for t in calls["transport"] if isinstance(t, str)})) or None
    params["range"] = {
        name: [float(calls.loc[calls["unused"] == "", name].min()), float(calls.loc[calls["unused"] == "", name].max())]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    }
    params["floor_bracket_uncached_tokens"] = [low, high]
    params["idle"] = idle

    # time, whole calls; and apart where the first token was seen
    duration = calls["duration_s"].to_numpy()
    quantities = {}
    rows, _ = usable(duration, calls)
    params["time"], time_held = fit_and_test(calls, rows, duration, "s", floor_above, draws, rng, quantities, "time_s")
    params["time_parts"] = fit_parts(calls, rows, floor_above, draws, rng)

    params["energy"], table = {}, calls_table(calls)
    table["est_s"], table["heldout_s"] = predict_fit(params["time"], *tokens_of(calls)), time_held["cell"]
    literature = []
    for group, members in grouped(domains, missing).items():
        above = sum(measured[d]["above_idle_j"] for d in members)
        idle_w = sum(measured[d]["idle_w"] for d in members)
        base_w = sum(idle["loaded"][d]["between_calls_w"] for d in members)
        total = above + idle_w * duration
        rows, empty = usable(above, calls)
        if empty:
            names = ", ".join(cell_label(name) for name in empty)
            of = calls["cell"][(calls["unused"] == "") & np.isfinite(above)].nunique()
            text = f"{group}: {len(empty)} of {of} cells do not rise above idle: they are neither fitted nor in its errors: {names}"
            check("above_idle", "warning", text, group=group, n=len(empty), of=of)
        if not rows.any():
            check("above_idle", "refused", f"{group}: no call rises above idle power: nothing can be fitted", group=group)
            continue
        fit, held = fit_and_test(calls, rows, above, "J", floor_above, draws, rng, quantities, f"{group}_above_idle_j")
        for kind in ("cell", "context"):
            if held[kind] is not None and time_held[kind] is not None:
                held[f"total_{kind}"] = held[kind] + base_w * time_held[kind]
                fit["held_out"][f"leave_one_{kind}_out"]["total"] = errors(held[f"total_{kind}"][rows], total[rows], calls["cell"][rows])
        fit["noise_floor"]["total"], variation = spread_in_cells(total[rows], calls["cell"][rows])
        quantities[f"{group}_total_j"] = variation
        sources = sorted({samples.source[d] for d in members})
        fit |= {"domains": members, "source": "+".join(sources), "estimated": "model" in sources, "idle_w": float(base_w)}
        params["energy"][group] = fit
        table[f"{group}_above_idle_j"], table[f"{group}_idle_w"], table[f"{group}_total_j"] = above, idle_w, total
        table[f"{group}_unused"] = first_reason([measured[d]["why"] for d in members])
        table[f"est_{group}_above_idle_j"] = predict_fit(fit, *tokens_of(calls))
        table[f"est_{group}_total_j"] = table[f"est_{group}_above_idle_j"] + base_w * table["est_s"]
        for name in ("cell", "total_cell"):
            if held.get(name) is not None:
                table[f"heldout_{group}_{'total' if name == 'total_cell' else 'above_idle'}_j"] = held[name]
        literature += literature_rows(calls, group, rows, above, total, duration, base_w, floor_above, fit, params["time"], held, time_held)
    if state is not None:
        check_throttling(state, calls, table, [g for g in params["energy"] if g == "gpu"], check)
    elif any(energylib.group(d) == "gpu" for d in domains):
        text = f"whether a GPU was throttled is not known: found no {energylib.state_path(samples_path)}"
        check("throttling", "note", text)
    params["repeatability"] = {name: repeatability(variation) for name, variation in quantities.items()}
    for name, found in params["repeatability"].items():
        if found and found["median"] > NOISY:
            text = f"{name}: equal calls differ by {found['median']:.0%} (median over cells): something else ran on this machine"
            check("repeatability", "warning", text, quantity=name)
    for name, fit in [*params["energy"].items(), ("time", params["time"])]:
        found = fit["held_out"]["leave_one_cell_out"].get("time" if name == "time" else "total")
        if found and found["mape"] > UNRELIABLE:
            text = f"{name}: held-out error {found['mape']:.0%}: this call model is no basis for estimates; calibrate on a quiet machine"
            check("accuracy", "warning", text, quantity=name)
        own = fit["held_out"]["leave_one_cell_out"].get("time" if name == "time" else "above_idle")
        if own and own["mape"] > UNRELIABLE and (not found or found["mape"] <= UNRELIABLE):
            text = f"{name}: held-out error {own['mape']:.0%} above idle" + (f" ({found['mape']:.0%} in total, idle power included)" if found else "")
            check("accuracy", "warning", text + ": this call model is no basis for estimates above idle; calibrate on a quiet machine", quantity=name)
        far = fit["held_out"]["leave_one_context_out"].get("time" if name == "time" else "above_idle")
        if far and far["worst_cell_mape"] > UNRELIABLE and not any(e and e["mape"] > UNRELIABLE for e in (found, own)):
            text = f"{name}: with a context left out, its cells are predicted up to {far['worst_cell_mape']:.0%} off ({far['worst_cell']}): "
            text += "do not use the model beyond the contexts measured"
            check("extrapolation", "warning", text, quantity=name, worst_cell_mape=far["worst_cell_mape"], worst_cell=far["worst_cell"])
        for term in fit["not_identified"]:
            if term == "cached" and (calls["unused"] == UNKNOWN_CACHED).any():
                fit["terms"][term]["note"] = "the server does not report cached tokens (vLLM: --enable-prompt-tokens-details)"
            text = f"{name}: {term} cannot be fitted: {fit['terms'][term]['note']}"
            check("identified", "note" if term == "prefill_floor" else "warning", text, quantity=name, term=term)
    params["validation"] = None
    if append:
        validate(params, append, append_samples or samples_path, samples, others_of("append"), out_dir, check)
    if compare:
        of_samples = samples if compare_samples is None else energylib.read_samples(compare_samples)
        compare_transports(params, (calls, samples, measured), (compare, runs["compare"][0], of_samples, others_of("compare")), out_dir, check)
    params["checks"] = checks

    save_table(pd.DataFrame(literature), out_dir / "models.csv")
    save_table(table, out_dir / "calls_energy.csv", 9)
    write_after_call(idle, out_dir)
    write_tables(params, quantities, out_dir)
    if figures:
        draw(params, table, quantities, out_dir)
    energylib.write_json_atomic(out_dir / "params.json", params)
    return params


def calls_table(calls):
    """The calls as they are written to CSV files: times with microseconds, cells by name."""
    table = calls.drop(columns=["unused", "cell", "mono_start", "mono_end", "cell_cached", "cell_uncached", "model"]).copy()
    for name in ("t_start", "t_end"):
        table[name] = [f"{t:.6f}" for t in calls[name]]
    table["cell"] = [cell_label(name) for name in calls["cell"]]
    table["unused"] = calls["unused"]
    return table


def tokens_of(calls):
    return [calls[name].to_numpy(float) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]


def grouped(domains, missing=()):
    """{"gpu": members, …} for the sums that are fitted, and every GPU by itself when there are several. A group in `missing`, of which not
    every member can be fitted, has no sum, only its members."""
    groups = {}
    for d in domains:
        groups.setdefault(energylib.group(d), []).append(d)
    ordered = {g: groups[g] for g in ("gpu", "cpu", "dram") if g in groups and g not in missing}
    for g in groups:
        if g in missing or (g == "gpu" and len(groups[g]) > 1):
            ordered |= {d: [d] for d in groups[g]}
    return ordered


def check_members(samples, domains, check):
    """{group: its counters, named by the samples or their sidecar, that are not among the fitted `domains`}, of groups with others that are."""
    named = {m.group() for name in samples.meta.get("counters") or {} if (m := re.match(r"(gpu|cpu|dram)\d+(?=_)", name))}
    missing = {}
    for d in sorted(named.union(samples.domains) - set(domains)):
        missing.setdefault(energylib.group(d), []).append(d)
    missing = {g: lost for g, lost in missing.items() if g in map(energylib.group, domains)}
    for g, lost in missing.items():
        there = [d for d in domains if energylib.group(d) == g]
        text = f"{g}: {', '.join(lost)} of {len(there) + len(lost)} has no readings for any call in {samples.path}: no sum is fitted, "
        text += f"only {', '.join(there)}; mend its counter and calibrate again" + (", or sample the server's GPUs only (sampler.py --gpus)" * (g == "gpu"))
        check("incomplete", "refused", text, group=g, missing=lost)
    return missing


def first_reason(columns):
    """Per call the first reason that is not empty."""
    return ["; ".join(dict.fromkeys(r for r in row if r)) for row in zip(*columns, strict=True)]


def planned_calls(path):
    """{cell and repetition, as `check_complete` names them} of the plan that microbench.py left beside a calls file; None without one."""
    sidecar = Path(f"{path}.plan.json")
    if not sidecar.exists():
        return None
    import microbench

    found = json.loads(sidecar.read_bytes())
    plan = found["plan"]
    if plan["mode"] == "append":
        longest = min((run["max_context"] for run in found["runs"] if run.get("max_context")), default=None)
        pairs, _ = microbench.plan_append(plan["cached"], plan["uncached"], plan["outputs"], plan["reps"], plan["seed"], longest)
        return {((c["cached"], c["uncached"], c["output"], "append"), c["rep"]) for c in pairs}
    pairs = microbench.plan_pairs(plan["contexts"], plan["outputs"], plan["reps"], plan["seed"], plan["reference"])
    return {((c["context"], c["output"], state), c["rep"]) for c in pairs for state in microbench.measured_states(c)}


def check_complete(calls, path, check):
    """Warns of a torn last line and of calls that the plan beside the file has and the file has not; without a plan, of repetitions that
    some cells lack."""
    data = gzip.decompress(Path(path).read_bytes()) if str(path).endswith(".gz") else Path(path).read_bytes()
    last = data.rpartition(b"\n")[2]
    try:
        json.loads(last.strip() or b"0")
    except ValueError:
        text = f"{path}: the last line is torn ({len(last)} bytes, not JSON) and was skipped: the writer died, or the file was not copied whole"
        check("torn", "warning", text)
    found, reps = set(), {}
    for c in calls[calls["unused"].isin(["", UNKNOWN_CACHED]) & calls["state"].notna() & (calls["rep"] >= 0)].itertuples():
        size = (c.cell_cached, c.cell_uncached) if c.state == "append" else (c.context,)
        found.add(((*size, c.output, c.state), c.rep))
        if not isinstance(c.reference, str):  # its repetitions count on from those of the grid
            reps.setdefault((*size, c.output, c.state), set()).add(c.rep)
    try:
        expected = planned_calls(path)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        check("complete", "warning", f"{path}.plan.json: not a plan of microbench.py ({type(e).__name__}: {e}): whether calls are missing is not known")
        return
    whose = "of its plan" if expected is not None else "that its cells have where each is repeated as often as the others"
    if expected is None:
        every = set().union(*reps.values())
        expected = {(cell, rep) for cell in reps for rep in every}
    missing = expected - found
    if missing:
        cells = {cell for cell, _ in expected} - {cell for cell, _ in found}
        text = f"{path}: {len(missing)} of the {len(expected)} calls {whose} are missing or not valid"
        text += f", among them all of {', '.join(sorted(map(cell_label, cells)))}" if cells else ""
        check("complete", "warning", text + ": measure the rest (the same microbench.py command goes on)", n=len(missing), of=len(expected))


def check_calls(calls, path, samples, check):
    """What was left out of the fit and why; refuses a file without a call to fit."""
    left = calls.loc[calls["unused"] != "", "unused"].value_counts()
    for reason in sorted(left.index):
        check("calls", "note", f"{left[reason]} calls are not fitted: {reason}", n=int(left[reason]))
    good = calls[calls["unused"] == ""]
    if good.empty:
        raise DataError(f"{path}: none of {len(calls)} calls can be fitted: " + "; ".join(f"{n} x {r}" for r, n in sorted(left.items())))
    if calls["cached_assumed"].any():
        check("cached_tokens", "note", f"{int(calls['cached_assumed'].sum())} misses without a cached count are taken as 0 cached tokens")
    share = good["cached_tokens"] / good["prompt_tokens"]
    for state, odd in (("miss", (good["state"] == "miss") & (share > 0.01)), ("hit", (good["state"] == "hit") & (share < 0.5))):
        if odd.any():
            some = "some" if state == "miss" else "few"
            text = f"{odd.sum()} calls planned as a {state} had {some} cached tokens; fitted on what was measured"
            check("cached_tokens", "warning", text, n=int(odd.sum()))
    off = np.abs(samples.to_mono(good["t_start"].to_numpy()) - good["mono_start"].to_numpy())
    if np.isfinite(off).any() and 0.02 < np.nanmedian(off) < 60:  # further apart: another machine's clock, which says nothing
        text = f"the clocks of calls and samples disagree by {np.nanmedian(off) * 1e3:.0f} ms (20 ms allowed); was the clock set?"
        check("clock", "warning", text)
    inside = (good["t_start"] >= samples.t_begin) & (good["t_end"] <= samples.t_end)
    if not inside.any():
        raise DataError(f"{samples.path}: covers {samples.t_begin:.0f} to {samples.t_end:.0f}, but the calls of {path} lie between "
                        f"{good['t_start'].min():.0f} and {good['t_end'].max():.0f}; give the samples of the same run")  # fmt: skip
    if not inside.all():
        check("coverage", "warning", f"{int((~inside).sum())} calls lie outside the samples", n=int((~inside).sum()))
    drift = {}
    for r in good[good["reference"].notna()].itertuples():
        drift.setdefault((r.state, r.reference), []).append(r.duration_s)
    for state in ("miss", "hit"):
        if (state, "start") in drift and (state, "end") in drift:
            change = float(np.mean(drift[state, "end"]) / np.mean(drift[state, "start"]) - 1)
            same = good.loc[(good["state"] == state) & good["cell"].isin(good.loc[good["reference"].notna(), "cell"]), "duration_s"]
            spread = float(same.std(ddof=1) / same.mean())
            text = f"reference cell, {state}: time at the end {change:+.1%} against the start (all {len(same)} such calls of the run: "
            text += f"standard deviation {spread:.1%})"
            check("drift", "warning" if abs(change) > 0.03 else "ok", text, value=change, spread=spread)


TAKE_AGAIN = {  # how an idle file is measured anew
    "bare": "stop the server and take it again: `FORCE=1 bash 03_calibrate.sh --idle-bare`",
    "loaded": "take it again: `bash 03_calibrate.sh --idle-loaded`",
}


def mean_utilisation(path):
    """{"gpu0": %, …, "cpu": %}: means over the state.csv beside an idle file; what is not known is left out."""
    try:
        state = energylib.read_state(energylib.state_path(path))
    except FileNotFoundError:
        return {}
    columns = {name.removesuffix("_util_pct"): column for name, column in state.items() if name.endswith("_util_pct")}
    return {name: float(np.nanmean(column)) for name, column in columns.items() if np.isfinite(column).any()}


def read_idle(paths, samples, check):
    """params["idle"] from the idle files: every domain of the samples, null where it is not known."""
    idle = {}
    for state, path in paths.items():
        idle[state] = {}
        if not path:
            check("idle", "warning", f"no {state} idle file: " + ("the quiet between calls stands in" if state == "loaded" else "unknown"))
        source = energylib.read_samples(path) if path else None
        used = mean_utilisation(path) if path else {}
        if used.get("cpu", 0) > CPU_BUSY:
            text = f"{path}: taken while the CPUs were busy ({used['cpu']:.0f} % on average): other work ran; {TAKE_AGAIN[state]}"
            check("idle_busy", "warning", text, state=state, cpu_util_pct=used["cpu"])
        for domain in samples.domains:
            if source is None or domain not in source.domains:
                idle[state][domain] = {"power_w": None, "se_w": None, "source": None, "refused": "not measured"}
                if source is not None:
                    check("idle", "warning", f"{path}: found no counter of {domain}, which the samples have", domain=domain)
                continue
            idle[state][domain] = found = idle_of_file(source, domain)
            if used.get(domain, 0) > GPU_BUSY:
                found |= {"power_w": None, "se_w": None, "refused": f"the GPU was busy, utilisation {used[domain]:.0f} % on average"}
            if found["refused"]:
                text = f"{path}: {domain} is not idle: {found['refused']}; {TAKE_AGAIN[state]}"
                check("idle", "refused", text, domain=domain, state=state)
    for domain, bare in idle["bare"].items():
        loaded = idle["loaded"][domain]
        if None in (bare["power_w"], loaded["power_w"]):
            continue
        more = bare["power_w"] - loaded["power_w"]
        if more > max(0.01 * loaded["power_w"], 3 * math.hypot(bare["se_w"], loaded["se_w"])):
            text = f"{domain}: {bare['power_w']:.1f} W without a server ({paths['bare']}) is more than the {loaded['power_w']:.1f} W with the model "
            text += f"loaded: something else ran; {TAKE_AGAIN['bare']}"
            check("idle_order", "warning", text, domain=domain, bare_w=bare["power_w"], loaded_w=loaded["power_w"])
    return idle


def check_throttling(path, calls, table, groups, check):
    """Calls that met a slowed GPU, by state.csv: how many, for which reasons, and whether the call model misses them by more than others."""
    state = energylib.read_state(path)
    masks = [column for name, column in state.items() if re.fullmatch(r"gpu\d+_throttle_reasons", name) and np.isfinite(column).any()]
    if not masks:
        check("throttling", "note", f"whether a GPU was throttled is not known: {path} has no throttle reasons")
        return
    bits = np.bitwise_or.reduce([np.nan_to_num(column).astype(np.int64) for column in masks])
    good = (calls["unused"] == "").to_numpy()
    first = np.searchsorted(state["t"], calls["t_start"].to_numpy(), "left")
    last = np.searchsorted(state["t"], calls["t_end"].to_numpy(), "right")
    reasons, met = {}, np.zeros(len(calls), bool)
    for bit, name in energylib.THROTTLE_REASONS.items():
        seen = np.r_[0, np.cumsum(bits & bit > 0)]
        with_it = good & (seen[last] > seen[first])
        if with_it.any():
            reasons[name] = int(with_it.sum())
        met |= with_it
    rows = int((bits & sum(energylib.THROTTLE_REASONS) > 0).sum())
    unseen = int((good & (first == last)).sum())
    values = {"n": int(met.sum()), "of": int(good.sum()), "unseen": unseen, "rows": rows, "of_rows": len(bits), "reasons": reasons}
    where = f"{rows} of {len(bits)} rows of {path}"
    if unseen == good.sum():
        check("throttling", "note", f"whether a GPU was throttled is not known: {path} covers no call", **values)
        return
    if not met.any():
        check("throttling", "ok", f"no call met a throttled GPU ({where}; {unseen} of {good.sum()} calls fell between two rows)", **values)
        return
    said, residuals = [], {}
    for name, held, measured in [(f"{g} above idle", f"heldout_{g}_above_idle_j", f"{g}_above_idle_j") for g in groups] + [
        ("time", "heldout_s", "duration_s")
    ]:
        if held not in table:
            continue
        relative = table[held].to_numpy(float) / table[measured].to_numpy(float) - 1  # NaN where no cell could be left out
        a, b = (relative[pick & np.isfinite(relative)] for pick in (good & met, good & ~met))
        if min(len(a), len(b)) < 2:
            continue
        difference, se = float(a.mean() - b.mean()), math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
        residuals[measured] = {"throttled": float(a.mean()), "others": float(b.mean()), "difference": difference, "se": se}
        said.append(f"{name} {a.mean():+.1%} against {b.mean():+.1%} (difference {difference:+.1%} +- {se:.1%})")
    text = f"{met.sum()} of {good.sum()} calls met a throttled GPU ({', '.join(f'{name}: {n}' for name, n in reasons.items())}; {where}, another "
    text += f"{unseen} calls fell between two rows): the call model holds for a machine that is slowed like this one"
    if said:
        text += ". Held-out model / measured - 1 of these calls against the others: " + "; ".join(said)
    check("throttling", "warning", text, **values, residuals=residuals)


def check_domains(samples, calls, measured, quiet, idle, check, path=None):
    """Completes idle["loaded"] (of the file `path`) by the quiet between calls, tests the counters, returns the domains that can be fitted."""
    good = (calls["unused"] == "").to_numpy()
    fitted = []
    for domain in samples.domains:
        why = measured[domain]["why"][good]
        for reason in sorted(set(why) - {""}):
            check("isolated", "note", f"{domain}: {int((why == reason).sum())} calls: {reason}", domain=domain)
        loaded = idle["loaded"][domain]
        power, length = quiet[domain]["power_w"], quiet[domain]["length_s"]
        if len(power):
            mean = float(np.average(power, weights=length))
            se = float(power.std(ddof=1) / np.sqrt(len(power))) if len(power) > 1 else None
            loaded |= {"between_calls_w": mean, "between_calls_se_w": se}
        else:
            loaded |= {"between_calls_w": loaded["power_w"], "between_calls_se_w": loaded["se_w"]}
        loaded["by_time_since_call"] = after_call(samples, domain, calls)
        loaded["source"] = loaded["source"] or samples.source[domain]
        if (why == "").sum() == 0:
            check("isolated", "refused", f"{domain}: no call could be measured", domain=domain)
            continue
        fitted.append(domain)
        more = loaded["power_w"] / loaded["between_calls_w"] - 1 if loaded["power_w"] and loaded["between_calls_w"] else 0.0
        limit = IDLE_LIMITS[energylib.group(domain)]["between"]
        se = math.hypot(loaded["se_w"] or 0.0, loaded["between_calls_se_w"] or 0.0)
        if more > limit and more * loaded["between_calls_w"] > 3 * se:
            why = f"{loaded['power_w']:.1f} W rested is {more:.0%} more than the {loaded['between_calls_w']:.1f} W between calls, "
            why += f"at most {limit:.0%} is idle: something else ran all the time"
            loaded |= {"power_w": None, "se_w": None, "refused": why}
            check("idle", "refused", f"{path}: {domain} is not idle: {why}; {TAKE_AGAIN['loaded']}", domain=domain, state="loaded")
        if loaded["power_w"] is not None and loaded["between_calls_w"] / loaded["power_w"] > 1.1:
            check("idle", "warning", f"{domain}: {loaded['between_calls_w']:.1f} W between calls against {loaded['power_w']:.1f} W rested: "
                  "above-idle energies are relative to the former", domain=domain)  # fmt: skip
        if samples.source[domain] == "model":
            check("source", "note", f"{domain}: estimated from a stated power model, not measured", domain=domain)
        if samples.source[domain] == "nvml-power":
            text = f"{domain}: no energy counter; the power reading is an average over up to a second, which smears short calls"
            if f"{domain}_mj" in (samples.meta.get("counters") or {}):
                text += f". {samples.path} has no column {domain}_mj, though its sidecar names it: was the file changed?"
            check("source", "warning", text, domain=domain)
        if samples.source[domain] == "nvml":
            test = linearity(samples, domain, calls, loaded["between_calls_w"])
            if test is None:
                check("linearity", "note", f"{domain}: too few calls end inside a counter step", domain=domain)
            else:
                bad = abs(test["slope"] - 1) > LINEARITY_TOLERANCE + 2 * test["se"]
                text = f"{domain}: step energy against busy share has slope {test['slope']:.3f} +- {test['se']:.3f} over {test['n']} ends"
                text += ": the counter samples power only part of the time, short calls are unsafe" if bad else " (1 +- 0.1 expected)"
                check("linearity", "warning" if bad else "ok", text, domain=domain, **test)
    if not fitted:
        reasons = "; ".join(f"{d}: {', '.join(sorted(set(m['why'][good]) - {''}))}" for d, m in measured.items())
        raise DataError(f"{samples.path}: no call could be measured ({reasons}); leave at least three counter steps of quiet between calls")
    return fitted


def fit_and_test(calls, rows, y, unit, floor_above, draws, rng, quantities, name):
    """(entry for params.json with held-out errors, {"cell", "context": held-out predictions for every call or None})."""
    design, _ = make_design(calls, rows, y, floor_above)
    fit, _ = fit_quantity(design, unit, draws, rng)
    key = "time" if unit == "s" else "above_idle"
    fit["held_out"], held = {}, {}
    for kind, groups in (("cell", np.arange(design.cells)), ("context", design.context)):
        values, chosen = design.held_out(groups)
        held[kind] = None
        entry = {key: None, "forms": {"+".join(NAMES[j] for j in sorted(form)): n for form, n in sorted(chosen.items())}}
        if values is not None:
            held[kind] = np.full(len(calls), np.nan)
            held[kind][rows] = values
            entry[key] = errors(values, y[rows], calls["cell"][rows])
        else:
            entry["reason"] = f"needs three {kind}s"
        fit["held_out"][f"leave_one_{kind}_out"] = entry
    noise, variation = spread_in_cells(y[rows], calls["cell"][rows])
    fit["noise_floor"] = {key: noise}
    quantities[name] = variation
    return fit, held


def fit_parts(calls, rows, floor_above, draws, rng):
    """Time to first token and decode time fitted apart, where the client saw the first token; None elsewhere.

    Apart, they identify the time of a cached token. Their sum is not the headline: a server that overlaps steps delivers the first
    token late and the rest early, which the total does not see."""
    first = calls["first_token_s"].to_numpy()
    rows = rows & np.isfinite(first) & (first > 0)
    if rows.sum() < 4:
        return None
    out = {}
    prefill = make_design(calls, rows, first, floor_above, terms=[CALL, UNCACHED, PREFILL_ATTENTION, CACHED, FLOOR])[0]
    out["first_token"], coef = fit_quantity(prefill, "s", draws, rng)
    total = prefill.value(coef)
    rest = calls["duration_s"].to_numpy() - first
    several = rows & (calls["completion_tokens"] > 1).to_numpy() & (rest > 0)
    if several.sum() >= 4:
        decode = make_design(calls, several, rest, floor_above, terms=DECODE)[0]
        out["decode"], coef = fit_quantity(decode, "s", draws, rng)
        total = predict_fit(out["first_token"], *tokens_of(calls[several])) + decode.value(coef)
        out["sum"] = errors(total, calls["duration_s"].to_numpy()[several], calls["cell"][several])
    return out


def literature_rows(calls, group, rows, above, total, duration, base_w, floor_above, fit, time_fit, held, time_held):
    """Rows of models.csv: the literature's models and this one, held out on the same calls. Each is fitted to energy and to time; the total
    is made of both, so it has the parameters of both."""
    names = calls["cell"][rows]
    misses = (calls["cached_tokens"] == 0).to_numpy()[rows]
    a = compare(make_design(calls, rows, above, floor_above)[0], names, misses)
    t = compare(make_design(calls, rows, duration, floor_above)[0], names, misses)
    truths = {"above_idle_j": above[rows], "total_j": total[rows], "time_s": duration[rows]}
    out = []
    own, own_time = ({"model": "this one", "terms": ", ".join(f["form"]), "parameters": len(f["form"])} for f in (fit, time_fit))
    for which, mask in (("all", np.ones(rows.sum(), bool)), ("misses", misses)):
        row_a, row_t = dict(own, calls=which), dict(own_time, calls=which)
        for kind in ("cell", "context"):
            for row, values in ((row_a, held[kind]), (row_t, time_held[kind])):
                row[f"_{kind}"] = np.full(rows.sum(), np.nan) if values is None else np.where(mask, values[rows], np.nan)
        a.append(row_a)
        t.append(row_t)
    for row_a, row_t in zip(a, t, strict=True):
        for quantity, truth in truths.items():
            line = {"group": group, "estimated": fit["estimated"], "quantity": quantity, "calls": row_a["calls"], "model": row_a["model"]}
            if quantity == "total_j":
                terms = row_a["terms"], row_t["terms"]
                line["terms"] = f"{terms[0]}; for energy and for time" if terms[0] == terms[1] else f"energy: {terms[0]}; time: {terms[1]}"
                line["parameters"] = row_a["parameters"] + row_t["parameters"]
            else:
                line |= {k: (row_t if quantity == "time_s" else row_a)[k] for k in ("terms", "parameters")}
            for kind in ("cell", "context"):
                values = (row_t if quantity == "time_s" else row_a)[f"_{kind}"]
                if quantity == "total_j":
                    values = row_a[f"_{kind}"] + base_w * row_t[f"_{kind}"]
                e = errors(values, truth, names)
                line[f"leave_one_{kind}_out_mape"] = e and e["mape"]
                line[f"leave_one_{kind}_out_worst_cell"] = e and e["worst_cell_mape"]
            out.append(line)
    order = {"above_idle_j": 0, "total_j": 1, "time_s": 2}
    return sorted(out, key=lambda r: (r["calls"], order[r["quantity"]]))


def validate(params, path, samples_path, samples, others, out_dir, check):
    """Append calls: measured as the others, predicted by the model, never fitted. Fills params["validation"], writes append_energy.csv."""

    if str(samples_path) != samples.path:
        samples = energylib.read_samples(samples_path)
    calls = read_calls(path)
    calls["cell"] = cell_names(calls, append=True)
    good = (calls["unused"] == "").to_numpy()
    if not good.any():
        check("append", "warning", f"{path}: no append call can be used")
        return
    measured, _ = measure_calls(samples, calls, others)
    table = calls_table(calls)
    table["est_s"] = predict_fit(params["time"], *tokens_of(calls))
    duration = calls["duration_s"].to_numpy()
    result = {"n": int(good.sum()), "time_s": errors(table["est_s"].to_numpy()[good], duration[good], calls["cell"][good])}
    where = {"time_s": table["est_s"].to_numpy() / duration - 1}
    for group, fit in params["energy"].items():
        if not all(d in measured for d in fit["domains"]):
            check("append", "warning", f"{samples_path}: has no counter of {group}")
            continue
        above = sum(measured[d]["above_idle_j"] for d in fit["domains"])
        total = above + sum(measured[d]["idle_w"] for d in fit["domains"]) * duration
        est = predict_fit(fit, *tokens_of(calls))
        est_total = est + fit["idle_w"] * table["est_s"].to_numpy()
        for name, truth, value in ((f"{group}_above_idle_j", above, est), (f"{group}_total_j", total, est_total)):
            table[name], table[f"est_{name}"] = truth, value
            result[name] = errors(value[good], truth[good], calls["cell"][good])
            where[name] = value / truth - 1
    save_table(table[table["unused"] == ""], out_dir / "append_energy.csv", 9)
    params["validation"] = {"append": result}
    low, high = params["floor_bracket_uncached_tokens"]
    floored = any(f["floor_above_uncached_tokens"] for f in (params["time"], *params["energy"].values()))
    for name, error in result.items():
        if name == "n":
            continue
        if error is None:
            check("append", "warning", f"append calls, {name}: no error is known: no cell was measured above 0", quantity=name)
            continue
        ok = error["mape"] <= APPEND_TOLERANCE
        text = f"append calls, {name}: mean error {error['mape']:.1%}, bias {error['bias']:+.1%}, "
        text += f"worst cell {error['worst_cell_mape']:.1%} ({error['worst_cell']})"
        text += f", without {error['left_out']} cells that do not rise above 0" if "left_out" in error else ""
        if not ok or error["worst_cell_mape"] > APPEND_TOLERANCE:
            text += ". By uncached tokens: "
            u = np.array([cell[1] for cell in calls["cell"]])
            parts = []
            for size in sorted(set(u[good])):
                r = where[name][good & (u == size)]
                r = r[np.isfinite(r)]
                inside = floored and high is not None and low < size < high
                why = " (between hits and misses of the grid: whether the prefill floor applies is not known there)" if inside else ""
                parts += [f"{size:g}: {r.mean():+.1%}{why}"] if len(r) else []
            text += ", ".join(parts)
        check("append", "ok" if ok else "warning", text, quantity=name)


def compare_transports(params, here, there, out_dir, check):
    """The same cells over two transports: fills params["validation"]["transports"], writes transports.csv.

    `here`: (calls, samples, what measure_calls says of them); `there`: (path, calls, samples, other calls in these samples)."""
    import pandas as pd

    (calls, own_samples, measured), (path, other, samples, beside) = here, there
    other.loc[other["state"].isin(["append", "fill"]) & (other["unused"] == ""), "unused"] = "append cells are not compared"
    other["cell"] = cell_names(other)
    names = [(energylib.hardware_name(s.meta), ", ".join(sorted({m for m in c["model"] if isinstance(m, str)})))
             for s, c in ((own_samples, calls), (samples, other))]  # fmt: skip
    for name, expected, found in zip(("hardware", "model"), *names, strict=True):
        if found and expected and found != expected:
            check("transports", "warning", f"{path}: {name}: found {found}, the calls that it is compared with have {expected}")
    sides = [per_call(params, calls, measured), per_call(params, other, measure_calls(samples, other, beside)[0])]
    cells = [set(c.loc[c["unused"] == "", "cell"]) for c in (calls, other)]
    both, unlike, rows = sorted(cells[0] & cells[1]), [], []
    for cell in both:
        picks = [((c["unused"] == "") & (c["cell"] == cell)).to_numpy() for c in (calls, other)]
        tokens = [np.array([t[pick].mean() for t in tokens_of(c)]) for c, pick in zip((calls, other), picks, strict=True)]
        if (np.abs(tokens[1] - tokens[0]) > SAME_WORK * tokens[0][[0, 0, 2]]).any():
            unlike.append(cell_label(cell))
            continue
        row = dict(zip(("context", "output", "state"), cell, strict=True))
        for name in sides[0]:
            if name in sides[1]:
                a, b = (side[name][pick] for side, pick in zip(sides, picks, strict=True))
                rows.append({"cell": cell_label(cell), **row, "quantity": name, **ratio_of(a[np.isfinite(a)], b[np.isfinite(b)])})
    columns = ["cell", "context", "output", "state", "quantity", "n", "mean", "sd", "compare_n", "compare_mean", "compare_sd", "difference",
               "ratio", "ratio_lo", "ratio_hi"]  # fmt: skip
    table = pd.DataFrame(rows, columns=columns)
    save_table(table, out_dir / "transports.csv", 9)
    said = sorted({t for t in other["transport"] if isinstance(t, str)})
    result = {"transport": params["transport"], "compare_transport": ", ".join(said) or None, "cells": len(both) - len(unlike)}
    result |= {"not_compared": sorted(unlike + [cell_label(c) for c in cells[0] ^ cells[1]])}
    for name in dict.fromkeys(table["quantity"]):
        part = table[(table["quantity"] == name) & table["ratio"].notna()]
        if len(part):
            result[name] = overall_ratio(part["ratio"].to_numpy(float), list(part["cell"]))
    params["validation"] = {**(params["validation"] or {}), "transports": result}
    if unlike:
        check("transports", "warning", f"{len(unlike)} cells are not compared, their token counts differ: {', '.join(unlike)}")
    parts = []
    for name, found in result.items():
        if isinstance(found, dict):
            inside = "" if found["lo"] is None else f" ({found['lo'] - 1:+.2%} to {found['hi'] - 1:+.2%})"
            parts.append(f"{name} {found['ratio'] - 1:+.2%}{inside}, most {found['largest'] - 1:+.1%} ({found['largest_cell']})")
    words = f"{result['compare_transport'] or 'the compared calls'} against {result['transport'] or 'the fitted calls'}"
    if not parts:
        check("transports", "warning", f"{path}: no cell in common with the fitted calls: nothing to compare")
    else:
        check("transports", "ok", f"{words}, mean of {result['cells']} cells: " + "; ".join(parts))


def per_call(params, calls, measured):
    """{quantity: values of every call}: its time, and energy above idle and in total for what was fitted and is measured here."""
    duration = calls["duration_s"].to_numpy()
    out = {"time_s": duration}
    for group, fit in params["energy"].items():
        if all(d in measured for d in fit["domains"]):
            out[f"{group}_above_idle_j"] = sum(measured[d]["above_idle_j"] for d in fit["domains"])
            out[f"{group}_total_j"] = out[f"{group}_above_idle_j"] + sum(measured[d]["idle_w"] for d in fit["domains"]) * duration
    return out


def ratio_of(a, b):
    """Means of two samples of one cell, their difference (b - a) and ratio (b / a) with the interval of Welch's t on the logarithm."""
    out = {"n": len(a), "mean": a.mean() if len(a) else np.nan, "sd": a.std(ddof=1) if len(a) > 1 else np.nan}
    out |= {"compare_n": len(b), "compare_mean": b.mean() if len(b) else np.nan, "compare_sd": b.std(ddof=1) if len(b) > 1 else np.nan}
    out["difference"] = out["compare_mean"] - out["mean"]
    positive = out["mean"] > 0 and out["compare_mean"] > 0
    ratio = out["ratio"] = out["compare_mean"] / out["mean"] if positive else np.nan
    out["ratio_lo"] = out["ratio_hi"] = np.nan
    if positive and len(a) > 1 and len(b) > 1:
        parts = [(x.std(ddof=1) / x.mean()) ** 2 / len(x) for x in (a, b)]
        if sum(parts) > 0:
            free = sum(parts) ** 2 / sum(v * v / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
            wide = np.exp(t_quantile(free) * np.sqrt(sum(parts)))
            out["ratio_lo"], out["ratio_hi"] = ratio / wide, ratio * wide
    return out


def overall_ratio(ratios, cells):
    """Geometric mean of the cells' ratios with a t interval over cells, and the cell that is furthest from 1."""
    logs = np.log(ratios)
    half = t_quantile(len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else None
    worst = int(np.argmax(np.abs(logs)))
    lo, hi = (None, None) if half is None else (float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half)))
    return {"ratio": float(np.exp(logs.mean())), "lo": lo, "hi": hi, "cells": len(logs), "largest": float(ratios[worst]),
            "largest_cell": cells[worst]}  # fmt: skip


def t_quantile(free):
    """Two-sided quantile of Student's t for INTERVAL at `free` degrees of freedom: the distribution's integral, solved by halving."""
    x = np.tan(np.linspace(0, np.pi / 2, 200_001)[:-1])  # t = tan(angle) makes the integral one over a finite, smooth stretch
    angle = np.arctan(x)
    density = (1 + x * x / free) ** (-(free + 1) / 2) / np.cos(angle) ** 2
    mass = np.r_[0.0, np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angle))]
    return float(np.interp(INTERVAL, mass / mass[-1], x))


def write_after_call(idle, out_dir):
    import pandas as pd

    rows = [{"domain": d, **row} for d, entry in idle["loaded"].items() for row in entry.get("by_time_since_call") or []]
    columns = ["domain", "from_s", "to_s", "power_w", "se_w", "n", "seconds"]
    save_table(pd.DataFrame(rows, columns=columns), out_dir / "idle_after_call.csv")


# ---- tables and figures ----


def energy_per_token(params, group, contexts):
    """Rows {context, kind, above_idle_j, total_j, total_hi_j}: joules of one uncached, cached and output token at a context length.

    `total` adds the idle power for the time that the token takes. A cached token whose cost is not resolved has only `total_hi_j`."""
    fit, clock = params["energy"][group], params["time"]

    def both(p, c, n):
        a = predict_fit(fit, [p], [c], [n])[0]
        return np.array([a, a + fit["idle_w"] * predict_fit(clock, [p], [c], [n])[0]])

    rows = []
    start = both(0, 0, 1)
    cached = [quantity["terms"].get("cached") or {} for quantity in (fit, clock)]
    for context in contexts:
        uncached = (both(context, 0, 1) - start) / context
        output = (both(context, context, 101) - both(context, context, 1)) / 100
        for kind, (above, total) in (("uncached", uncached), ("output", output)):
            rows.append({"context": context, "kind": kind, "above_idle_j": above, "total_j": total, "total_hi_j": None})
        if all(c.get("value") is not None for c in cached):
            hi = [c["hi"] for c in cached]
            top = None if None in hi else hi[0] + fit["idle_w"] * hi[1]
            above, extra = cached[0]["value"], fit["idle_w"] * cached[1]["value"]
            resolved = cached[0]["bound"] is None or cached[1]["bound"] is None
            rows.append({"context": context, "kind": "cached", "above_idle_j": above if cached[0]["bound"] is None else None,
                         "total_j": above + extra if resolved else None, "total_hi_j": top})  # fmt: skip
    return rows


def write_tables(params, quantities, out_dir):
    """energy_per_token.csv and repeatability.csv: the numbers of the figures."""
    import pandas as pd

    rows = []
    for group, fit in params["energy"].items():
        rows += [{"group": group, "estimated": fit["estimated"], **r} for r in energy_per_token(params, group, token_contexts(params))]
    save_table(pd.DataFrame(rows), out_dir / "energy_per_token.csv")
    rows = [{"quantity": q, "cell": cell_label(c), "cv": v} for q, variation in quantities.items() for c, v in variation.items()]
    save_table(pd.DataFrame(rows, columns=["quantity", "cell", "cv"]), out_dir / "repeatability.csv")


def token_contexts(params):
    low, high = params["range"]["prompt_tokens"]
    return [float(c) for c in np.unique(np.geomspace(low, high, 25).round())]


def draw(params, table, quantities, out_dir):
    """The figures: grey, one column wide, units on the axes; the numbers are in calls_energy.csv and the CSV beside each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.0,
             "figure.constrained_layout.use": True, "savefig.dpi": 200, "legend.frameon": False, "legend.fontsize": 7}  # fmt: skip
    groups = {g: f for g, f in params["energy"].items() if g in ("gpu", "cpu", "dram")}
    with plt.rc_context(style):
        for group, fit in groups.items():
            word = f"{group.upper()} energy" + (" (estimated)" if fit["estimated"] else "")
            for name, figure in (
                (f"energy_model_{group}", draw_model(plt, fit, table, group, word)),
                (f"energy_per_token_{group}", draw_per_token(plt, params, group, word)),
                (f"residuals_{group}", draw_residuals(plt, params, fit, table, group, word)),
            ):
                if figure is not None:
                    save(plt, figure, out_dir / f"{name}.png")
        figure = draw_repeatability(plt, params, quantities, groups)
        if figure is not None:
            save(plt, figure, out_dir / "repeatability.png")


def save_table(table, path, digits=6):
    csvfiles.put_whole(path, lambda beside: table.to_csv(beside, index=False, lineterminator="\n", float_format=f"%.{digits}g"))


def save(plt, figure, path):
    csvfiles.put_whole(path, lambda beside: figure.savefig(beside, metadata={"Software": None}))  # the version of matplotlib would make equal runs differ
    plt.close(figure)


def log_axis(axis):
    """Plain numbers at 1, 2, 5 on a logarithmic axis (at decades only where it spans many)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 40 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


STATES = {"miss": {"marker": "o", "markerfacecolor": "white"}, "hit": {"marker": "^", "markerfacecolor": "0.35"}}


def states_of(table):
    return np.where(table["cached_tokens"] > 0.5 * table["prompt_tokens"], "hit", "miss")


def draw_model(plt, fit, table, group, word):
    held = f"heldout_{group}_above_idle_j"
    if held not in table:
        return None
    e = fit["held_out"]["leave_one_cell_out"]["above_idle"]
    ok = (table[held] > 0) & (table[f"{group}_above_idle_j"] > 0)
    if not ok.any():
        return None
    figure, ax = plt.subplots(figsize=(3.4, 3.0))
    x, y, state = table.loc[ok, held], table.loc[ok, f"{group}_above_idle_j"], states_of(table)[ok]
    ends = np.array([min(x.min(), y.min()) / 1.2, max(x.max(), y.max()) * 1.2])
    ax.fill_between(ends, ends * (1 - e["p95"]), ends * (1 + e["p95"]), color="0.85", lw=0, label=f"95 % of calls: ±{e['p95']:.1%}")
    ax.plot(ends, ends, color="black", lw=0.7, label="equal")
    for name, look in STATES.items():
        ax.plot(x[state == name], y[state == name], ls="", ms=3.5, mew=0.6, color="black", label=f"cache {name}", **look)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"held-out model (J per call)\n{word} above idle")
    ax.set_ylabel("counter (J per call)" if not fit["estimated"] else "power model (J per call)")
    log_axis(ax.xaxis)
    log_axis(ax.yaxis)
    ax.legend(loc="upper left", title=f"mean error {e['mape']:.2%}", title_fontsize=7, alignment="left")
    return figure


def draw_per_token(plt, params, group, word):
    rows = energy_per_token(params, group, token_contexts(params))
    figure, ax = plt.subplots(figsize=(3.4, 2.7))
    looks = {"output": ("-", "output token"), "uncached": ("--", "uncached prompt token"), "cached": (":", "cached prompt token")}
    for kind, (line, label) in looks.items():
        part = [r for r in rows if r["kind"] == kind]
        x = [r["context"] for r in part]
        for key, look, text in (
            ("total_j", {"ls": line, "color": "black"}, label),
            ("total_hi_j", {"color": "0.5", "lw": 0.7}, f"{label}, at most"),
        ):
            y = np.array([np.nan if r[key] is None else 1e3 * r[key] for r in part])
            if np.isfinite(y).any() and np.nanmax(y) > 0:
                ax.plot(x, y, **look)
                below = key == "total_j" and kind == "cached"  # its bound is written above it
                ax.annotate(text, (x[0], y[0]), xytext=(2, -9 if below else 3), textcoords="offset points", fontsize=7, color=look["color"])
    ax.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel=f"{word}, idle included\n(mJ per token)")
    low, high = ax.get_ylim()
    ax.set_ylim(low / 1.6, high * 1.6)
    log_axis(ax.xaxis)
    log_axis(ax.yaxis)
    return figure


def draw_residuals(plt, params, fit, table, group, word):
    panels, name = [], f"{group}_above_idle_j"
    if f"heldout_{name}" in table:
        panels.append((f"{word}\nabove idle", table[f"heldout_{name}"] / table[name] - 1, fit, "above_idle"))
    if np.isfinite(table["heldout_s"].astype(float)).any():
        panels.append(("time", table["heldout_s"].astype(float) / table["duration_s"] - 1, params["time"], "time"))
    if not panels:
        return None
    figure, axes = plt.subplots(len(panels), 1, figsize=(3.4, 1.7 * len(panels) + 0.4), sharex=True, squeeze=False)
    state = states_of(table)
    outputs = sorted(table["completion_tokens"].dropna().unique())
    # calls of one context lie side by side, short outputs left; otherwise they cover each other
    shift = np.array([0.0 if len(outputs) < 2 else outputs.index(n) / (len(outputs) - 1) - 0.5 if n in outputs else 0.0
                      for n in table["completion_tokens"]])  # fmt: skip
    for ax, (label, relative, of, key) in zip(axes[:, 0], panels, strict=True):
        noise = of["noise_floor"][key]
        if noise:
            ax.axhspan(-100 * noise, 100 * noise, color="0.85", lw=0, label="noise within cells")
        ax.axhline(0, color="black", lw=0.6)
        for name, look in STATES.items():
            pick = state == name
            ax.plot(table["prompt_tokens"][pick] * np.exp(0.25 * shift[pick]), 100 * relative[pick], ls="", ms=3, mew=0.5, color="black",
                    label=f"cache {name}", **look)  # fmt: skip
        ax.set(xscale="log", ylabel=f"{label}\nmodel / measured − 1 (%)")
    log_axis(axes[-1, 0].xaxis)
    axes[-1, 0].set_xlabel("prompt (tokens); short outputs left")
    axes[0, 0].legend(loc="lower right", ncols=3, columnspacing=0.8, handletextpad=0.2, bbox_to_anchor=(1, 1))
    return figure


def draw_repeatability(plt, params, quantities, groups):
    shown = {"time_s": "time"}
    for g, f in groups.items():
        word = " (est.)" if f["estimated"] else ""
        shown |= {f"{g}_above_idle_j": f"{g.upper()} above idle{word}", f"{g}_total_j": f"{g.upper()} total{word}"}
    shown = {q: label for q, label in shown.items() if quantities.get(q)}
    if not shown:
        return None
    figure, ax = plt.subplots(figsize=(3.4, 2.6))
    lines = itertools.cycle(["-", "--", ":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1))])
    for (q, label), line in zip(shown.items(), lines, strict=False):
        v = np.sort(list(quantities[q].values())) * 100
        ax.step(np.r_[v, v[-1]], np.r_[0:1:len(v) * 1j, 1] if len(v) > 1 else [0, 1], where="post", ls=line, color="black",
                label=f"{label} (median {np.median(v):.2f} %)")  # fmt: skip
    ax.set(xlabel="standard deviation of equal calls / mean (%)", ylabel="share of cells", ylim=(0, 1.02))
    ax.set_xlim(left=0)
    ax.legend(loc="lower right")
    return figure


# ---- the terminal ----


def summary(params, out_dir):
    """What was found, as lines for the terminal."""

    def pct(e, key="mape"):
        return "     -" if e is None else f"{100 * (e if isinstance(e, float) else e[key]):5.2f}%"

    lines = [f"{params['hardware']}, {params['model'] or 'model not named'}", ""]
    for state in ("bare", "loaded"):
        for domain, idle in params["idle"][state].items():
            value = "not known" if idle["power_w"] is None else f"{idle['power_w']:.2f} +- {idle['se_w']:.2f} W"
            between = idle.get("between_calls_w")
            word = " (estimated)" if idle["source"] == "model" else ""
            value += "" if between is None else f"; between calls {between:.2f} W, which is what is subtracted from calls"
            lines.append(f"idle {state:6} {domain:6} {value}{word}")
    lines += ["", f"{'':28}{'calls':>6}{'cells':>6}   leave one cell out   leave one context out   noise",
              f"{'':28}{'':6}{'':6}   {'mean':>6} {'worst cell':>12}   {'mean':>6} {'worst cell':>12}     within cells*"]  # fmt: skip
    rows = []
    for group, fit in params["energy"].items():
        word = " (estimated)" if fit["estimated"] else ""
        rows += [(f"{group} energy{word}", fit, "total"), (f"{group} above idle{word}", fit, "above_idle")]
    rows.append(("time", params["time"], "time"))
    for label, fit, key in rows:
        cell, context = (fit["held_out"][f"leave_one_{kind}_out"].get(key) for kind in ("cell", "context"))
        lines.append(f"{label:28}{fit['n']:6}{fit['cells']:6}   {pct(cell)} {pct(cell, 'worst_cell_mape'):>12}   "
                     f"{pct(context)} {pct(context, 'worst_cell_mape'):>12}     {pct(fit['noise_floor'][key])}")  # fmt: skip
    lines.append("* mean |call / mean of its cell - 1|")
    for label, fit in [*((f"{g}, J above idle", f) for g, f in params["energy"].items()), ("time, s", params["time"])]:
        lines += ["", f"{label}:"]
        for name, term in fit["terms"].items():
            if term["status"] == "not identified":
                text = "not identified: " + term["note"]
            elif term["bound"] == "upper" and term["value"] <= 0:
                text = "not resolved" + ("" if term["hi"] is None else f", at most {term['hi']:.3g}") + f" {term['unit']} {term['meaning']}"
            else:
                interval = "" if term["hi"] is None else f" ({term['lo']:.3g} to {term['hi']:.3g})"
                begin = fit["floor_above_uncached_tokens"]
                whose = "" if name != "prefill_floor" else f", above {begin:g} uncached tokens" if begin else ", hits included"
                text = f"{term['value']:.4g}{interval} {term['unit']} {term['meaning']}{whose}"
            lines.append(f"  {name:18} {text}")
    lines += ["", "Only sums of these terms are predictions: single coefficients, and watts made of two of them, are not physical quantities."]
    parts = params["time_parts"]
    cached = parts and parts["first_token"]["terms"].get("cached")
    if cached and cached.get("value"):
        lines += ["", f"time to first token on hits grows by {cached['value'] * 1e6:.2f} microseconds per cached token"]
    told = [c for c in params["checks"] if c["severity"] in ("warning", "refused") or c["code"] in ("append", "linearity", "throttling", "transports")]
    lines += [""] + [f"{c['severity']}: {c['text']}" for c in told]
    lines += floor_end(params)
    lines += ["", f"wrote {out_dir}/params.json, models.csv, calls_energy.csv and figures"]
    if not os.environ.get("TRAJOULE_CALLER"):  # a stage names the next command itself
        lines.append(f"next: trajectories (06_run_batch.sh), then align_trial.py FOLDER... --calib {out_dir} --out trials.csv")
    return lines


def floor_end(params):
    """Why append cells may be off where the floor is that of every call: a line for the terminal that names them, or none."""
    low, high = params["floor_bracket_uncached_tokens"]
    fits = [f for f in (params["time"], *params["energy"].values()) if "prefill_floor" in f["form"] and f["floor_above_uncached_tokens"] == 0]
    if high is None or not fits:
        return []
    worst = {e["worst_cell"] for e in ((params["validation"] or {}).get("append") or {}).values()
             if isinstance(e, dict) and e["worst_cell_mape"] > APPEND_TOLERANCE}  # fmt: skip
    between = sorted(c for c in worst if low < float(c.partition("+")[2].partition("/")[0]) < high)
    text = f"append, {', '.join(between)}: the grid has no call between {low:g} and {high:g} uncached tokens: "
    return [text + "how far the prefill floor, fitted there to hits and misses alike, holds for them is not known"] if between else []


def whole(text):
    """A number of draws, for argparse."""
    return parsed(int, text, lambda n: 0 <= n <= 100_000, "a whole number from 0 to 100000")


def tokens(text):
    """A number of tokens, for argparse."""
    return parsed(float, text, lambda n: 0 <= n < 1e9, "a number of tokens, 0 or more")


RESULTS = ("*_energy.csv", "models.csv", "transports.csv", "idle_after_call.csv", "energy_per_token.csv", "repeatability.csv", "repeatability.png",
           "energy_model_*.png", "energy_per_token_*.png", "residuals_*.png", "params.json*")  # fmt: skip


def check_out_dir(out_dir, measured):
    """Raises DataError when `out_dir` is no folder, holds files of others, or results of other measurements ({name: path}), which would be lost."""
    if Path(out_dir).exists() and not Path(out_dir).is_dir():
        raise DataError(f"--out-dir {out_dir}: is a file, expected a folder")
    path = Path(out_dir) / "params.json"
    if not path.exists():
        # without params.json, which is written last, its own other files are those of a run that was interrupted
        names = sorted(p.name for p in Path(out_dir).glob("*") if not p.name.startswith("."))
        others = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in RESULTS)]
        if others:
            raise DataError(f"--out-dir {out_dir}: found {others[0]} and no params.json, expected an empty folder or one of calibrate.py; "
                            "give another --out-dir, or --force to write into it")  # fmt: skip
        return
    try:
        old = json.loads(path.read_bytes())["inputs"]
        differ = [name for name, of in measured.items() if old[name]["sha256"] != energylib.sha256(of)]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: not written by calibrate.py; give another --out-dir, or --force to replace it") from None
    if differ:
        raise DataError(f"{path}: was computed from other measurements ({', '.join(differ)}); give another --out-dir, or --force to replace it")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", required=True, help="samples.csv of the calibration run")
    parser.add_argument("--calls", required=True, help="calls.jsonl of the grid (microbench.py)")
    parser.add_argument("--state", help="state of the hardware during the calls: tells which met a throttled GPU (default: the sampler's file "
                                        "beside --samples, state.csv for samples.csv, else NAME.state.csv)")  # fmt: skip
    parser.add_argument("--idle-loaded", help="samples with the model resident and no request; NAME.state.csv beside it tells what was busy")
    parser.add_argument("--idle-bare", help="samples without a server")
    parser.add_argument("--append", help="calls.jsonl of the append cells: validation, never fitted")
    parser.add_argument("--append-samples", help="samples of the append cells (default: --samples)")
    parser.add_argument("--compare", help="calls.jsonl of the same grid over another transport: compared cell by cell, never fitted")
    parser.add_argument("--compare-samples", help="samples of these calls (default: --samples)")
    parser.add_argument("--out-dir", required=True, help="folder for the results; those of the same samples and calls are replaced")
    parser.add_argument("--force", action="store_true", help="write into --out-dir whatever it holds: results of other samples or calls are replaced")
    parser.add_argument("--hardware", help="the machine in words (default: from the sampler's sidecar)")
    parser.add_argument("--model", help="the model's name (default: from the calls)")
    parser.add_argument("--floor-above", type=tokens, metavar="TOKENS",
                        help="a prefill floor applies above so many uncached tokens (vLLM: the largest captured CUDA graph, 512; default: "
                             "halfway between the grid's hits and misses, or to every call, whichever fits better)")  # fmt: skip
    parser.add_argument("--bootstrap", type=whole, default=1000, metavar="DRAWS", help="draws for the intervals (default: %(default)s)")
    parser.add_argument("--no-figures", action="store_true", help="tables only")
    a = parser.parse_args(argv)
    try:
        for name in ("pandas",) if a.no_figures else ("pandas", "matplotlib"):
            importlib.import_module(name)
    except ModuleNotFoundError as e:
        print(f"calibrate.py: {e.name} is missing: pip install numpy pandas matplotlib", file=sys.stderr)
        return 2
    try:
        if not a.force:
            check_out_dir(a.out_dir, {"samples": a.samples, "calls": a.calls})
        params = calibrate(a.samples, a.calls, a.idle_loaded, a.idle_bare, a.append, a.append_samples, out_dir=a.out_dir,
                           hardware=a.hardware, model=a.model, floor_above=a.floor_above, draws=a.bootstrap, figures=not a.no_figures,
                           compare=a.compare, compare_samples=a.compare_samples, state=a.state)  # fmt: skip
    except (DataError, FileNotFoundError, IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError) as e:
        print(f"calibrate.py: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"calibrate.py: {e}", file=sys.stderr)
        return 1
    print("\n".join(summary(params, a.out_dir)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
