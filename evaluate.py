# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy", "pandas", "matplotlib"]
# ///
"""Predictor comparison (RQ1), energy shares (RQ2), energy per accomplished goal, retry budget and report, from one table.

    python evaluate.py --trials results/trials_formal.csv --plan results/plan_formal.csv --partial --waste results/waste_formal.csv \\
        --calib results/calib --out results/eval_rerun
    python evaluate.py --trials results/quickstart/trials.csv --plan data/quickstart/traj/plan.csv \\
        --calib results/quickstart/calib --out results/quickstart/eval --carbon 363 --price 0.31 --pue 1.2

Reads the table that align_trial.py writes, one row per trajectory. Optionally the plan of the batch, so that runs that left
nothing behind still count; what attempts used that were set aside (waste.csv, which the batch writes beside the plan's folder);
and the folder of the calibration, for the text on the method and its own warnings. Writes to --out:

    configs.csv         outcomes, energy per trajectory and per accomplished goal, waste, per context policy
    rq1_predictors.csv  how well each predictor foretells a trajectory's energy on tasks that it has not seen
    rq1_paired.csv      the best predictor of each kind against the runner-up, on the same trajectories
    rq2_shares.csv      model, command and waiting energy per task and policy
    retry_budget.csv    success and expected energy when up to k attempts are allowed
    energy_cutoff.csv   what stopping an attempt at a number of joules saves, descriptive and on held-out tasks
    *.png, summary.json, report.html (one self-contained page)

Groups. Trajectories are pooled only when behaviour (live, recorded or authored), the energy domains in total_j, the source of
the energy, model, hardware, agent, profile and concurrency are the same. Every other combination is evaluated by itself.

Intervals are 95 % and clustered by task: with 10 or more tasks a studentised bootstrap over tasks, with 5 to 9 the t
distribution on task means, with fewer none. Energy per goal is a ratio of means, its interval the inverse of that of goals
per joule, which stays finite when few attempts succeed. Baselines are fitted by least mean absolute relative error with
coefficients that cannot be negative, and are scored on the task that was left out.

No success. Then energy per goal has a lower bound: mean energy by the exact 95 % upper limit of the success rate. It counts
attempts as independent, which those of one task are not, so it is a conclusion (column energy_per_goal_basis: bound) from 5
tasks on, like an interval; below, configs.csv and the table have it beside its n, and the answer is that nothing can be said.

Waste, per policy: set_aside_j, whole attempts that were set aside: failed for infrastructure reasons, stopped before their
end (killed or interrupted), or measured and then set aside by the user; infra_j, the agent's execution in unscored runs that
stayed; and in unscored runs set-up and verifier, too. waste_share is their part of all energy (all_j: spent_j + infra_j +
setup_verifier_j + set_aside_j). wasted_j, calls that failed, were aborted or repeated inside scored attempts, is a part of
spent_j and not of the waste. Only energy of the same domains and source is added.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import re
import sys
from collections import Counter
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd

from stages import report
from stages.report import ALL_POLICIES, ALL_TASKS, FIRST_CALLS, MIN_TASKS_BOOTSTRAP, MIN_TASKS_T, PHASES, policy_order, write_atomic

SEED = 20260101  # of the bootstrap; any number does, a fixed one makes the tables reproducible
RESAMPLES = 1999  # bootstrap resamples for ratios of sums; others take fewer on large tables
LEVEL = 0.95
MAX_TASKS_BOOTSTRAP = 2000  # beyond, the t distribution again: t* is normal by then, and resamples fill the memory
MAX_ROWS_RANKED = 5000  # beyond, medians and rank correlations have no interval: it would be tiny and take minutes
MAX_FOLDS = 40  # tasks are left out one by one up to this many; beyond, and on large tables, in fewer groups of whole tasks
MAX_RETRIES = 50  # the retry table ends here, however many attempts a task has
DOMAINS = ("gpu", "cpu", "dram")
GROUP_KEYS = ["behaviour", "total_domains", "source", "model", "hardware", "agent", "profile", "concurrency"]
TABLE_KEYS = ["group", "behaviour", "total_domains", "source"]  # the part of the key that every table repeats

TEXT = [
    *["trajectory", "task", "policy", "rep", "mode", "recording", "outcome", "model", "hardware", "total_domains", "gpu_source"],
    *["cpu_source"],
]
TEXT_OPTIONAL = [
    *["recording_source", "agent", "profile", "concurrency", "fail_reason", "flags", "quality", "split_source", "attribution"],
    *["calib_sha256", "est_domains", "idle_source", "server", "harbor"],
]
NUMBERS = (
    [
        *["calls", "turns", "prompt_tokens", "cached_tokens", "uncached_tokens", "completion_tokens", "total_s", "model_s"],
        *["command_s", "waiting_s", "total_j"],
    ]
    + [f"{d}_{p}_j" for d in DOMAINS for p in ("total", *PHASES)]
    + [
        *["gpu_above_idle_j", "cpu_above_idle_j"],
    ]
)
NUMBERS_OPTIONAL = [
    *["t_begin", "wasted_j", "setup_j", "verifier_j", "gpu_idle_j", "cpu_idle_j", "est_gpu_above_idle_j", "est_cpu_above_idle_j"],
    *["est_total_j", "closure_model_above_idle", "closure_time", "closure_total", "coverage", "throttled_s", "idle_w"],
] + [f"first{k}_{c}" for k in FIRST_CALLS for c in ("s", "total_j", "prompt_tokens", "completion_tokens")]
ANY_SIGN = ("above_idle", "closure")  # what is above idle may fall below it
WHOLE = [c for c in NUMBERS + NUMBERS_OPTIONAL if c in ("calls", "turns") or c.endswith("_tokens")]
ONE_OF = {
    "outcome": ("success", "fail", "unscored"),
    "mode": ("live", "replay"),
    "recording_source": ("authored", "recorded", ""),
    "split_source": ("recording", "agent_log", "trajectory", "calls", ""),
    "attribution": ("exclusive", "shared", ""),
    "idle_source": ("calibration", "batch", ""),
}
JOINED = {  # several of these, joined by +
    "total_domains": r"(gpu|cpu|dram)\d*",
    "est_domains": r"(gpu|cpu|dram)\d*",
    "gpu_source": r"nvml|nvml-power|estimated|model|none",
    "cpu_source": r"rapl|estimated|model|none",
    "domains": r"(gpu|cpu|dram)\d*",
    "sources": r"nvml|nvml-power|rapl|model",
}
PARTS = {"total_s": [f"{p}_s" for p in PHASES], "prompt_tokens": ["cached_tokens", "uncached_tokens"]}  # add up to the column
PARTS |= {f"{d}_total_j": [f"{d}_{p}_j" for p in PHASES] for d in DOMAINS}


class InputError(Exception):
    """The input cannot be evaluated; the text says what was found, what was expected and the way out."""


# ---------------------------------------------------------------------------------------------------- distributions


def beta_cdf(x, a, b):
    """Regularised incomplete beta function I_x(a, b), by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly only on this side
        return 1.0 - beta_cdf(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 10_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * value


def _invert(cdf, p, lo, hi):
    for _ in range(200):
        mid = (lo + hi) / 2
        if mid in (lo, hi):
            break
        lo, hi = (mid, hi) if cdf(mid) < p else (lo, mid)
    return (lo + hi) / 2


def beta_quantile(p, a, b):
    """x with I_x(a, b) = p."""
    return _invert(lambda x: beta_cdf(x, a, b), p, 0.0, 1.0)


def t_cdf(t, df):
    """Distribution function of Student's t."""
    tail = beta_cdf(df / (df + t * t), df / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=256)
def t_quantile(p, df):
    """Quantile of Student's t; 0.975 and 9 degrees of freedom give 2.262."""
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1 - p, df)
    return _invert(lambda t: t_cdf(t, df), p, 0.0, 1e6)


def clopper_pearson_upper(successes, n, level=LEVEL):
    """One-sided exact upper limit of a success rate; 0 of 5 at 95 % gives 0.4507."""
    return 1.0 if successes >= n else beta_quantile(level, successes + 1, n - successes)


def clopper_pearson_lower(successes, n, level=LEVEL):
    """One-sided exact lower limit of a success rate."""
    return 0.0 if successes <= 0 else 1 - clopper_pearson_upper(n - successes, n, level)


# -------------------------------------------------------------------------------------- intervals clustered by task


class Estimate(NamedTuple):
    """A value with its interval; None where nothing can be said. `method` is t, bootstrap, exact or none."""

    value: float | None
    lo: float | None = None
    hi: float | None = None
    method: str = "none"

    def clip(self, lo=None, hi=None):
        """The interval cut to what is possible, such as 0 to 1 for a share."""
        if self.lo is None:
            return self
        return self._replace(
            lo=max(self.lo, lo) if lo is not None else self.lo,
            hi=min(self.hi, hi) if hi is not None else self.hi,
        )


NOTHING = Estimate(None)


@lru_cache(maxsize=64)
def resamples(m, n=RESAMPLES):
    """(n, m) counts of how often each of m tasks is drawn in each bootstrap resample; the same for every statistic."""
    return np.random.default_rng(SEED + m).multinomial(m, np.full(m, 1 / m), size=n).astype(float)


@lru_cache(maxsize=256)
def _tail(m):
    """Tail probability for bootstrap quantiles, widened for few clusters (Hesterberg 2015): plain ones cover too little."""
    return NormalDist().cdf(-math.sqrt(m / (m - 1)) * t_quantile(0.5 + LEVEL / 2, m - 1))


def linearised(num, den):
    """Ratio of sums over tasks, its standard error, and the influence of each task on it."""
    m, total = len(num), den.sum()
    value = num.sum() / total
    influence = (num - value * den) / total
    return value, math.sqrt(m / (m - 1) * float(influence @ influence)) if m > 1 else math.nan, influence


def ratio_interval(num, den):
    """Estimate of sum(num) / sum(den), where both hold one number per task (den at least 0, not all 0)."""
    num, den = np.asarray(num, float), np.asarray(den, float)
    keep = (den != 0) | (num != 0)
    num, den = num[keep], den[keep]
    m = len(num)
    if m == 0 or den.sum() <= 0:
        return NOTHING
    value, se, _ = linearised(num, den)
    if m < MIN_TASKS_T:
        return Estimate(value)
    if se <= 1e-12 * abs(value):
        return Estimate(value, value, value, "bootstrap" if MIN_TASKS_BOOTSTRAP <= m <= MAX_TASKS_BOOTSTRAP else "t")
    if m < MIN_TASKS_BOOTSTRAP or m > MAX_TASKS_BOOTSTRAP:
        half = t_quantile(0.5 + LEVEL / 2, m - 1) * se
        return Estimate(value, value - half, value + half, "t")
    w = resamples(m, RESAMPLES if m <= 200 else 499)  # with many tasks t* is all but normal, and fewer will do
    n, d, nn, nd, dd = (w @ np.column_stack([num, den, num**2, num * den, den**2])).T
    with np.errstate(divide="ignore", invalid="ignore"):
        r = n / d
        se_star = np.sqrt(m / (m - 1) * np.maximum(nn - 2 * r * nd + r**2 * dd, 0)) / d
    # A resample of almost equal tasks has next to no spread of its own and would make t* infinite; the floor keeps it an
    # outlier without letting it rule the interval (simulated: coverage 92 to 98 % for rates, shares, means, goals per joule).
    t = (r - value) / np.maximum(se_star, 0.25 * se)
    low, high = np.quantile(t[np.isfinite(t)], [_tail(m), 1 - _tail(m)])
    return Estimate(value, value - high * se, value - low * se, "bootstrap")


def rate_interval(success, n):
    """Success rate from successes and attempts per task; exact (Clopper-Pearson) when all or none succeed."""
    success, n = np.asarray(success, float), np.asarray(n, float)
    if n.sum() == 0:
        return NOTHING
    s, total = int(success.sum()), int(n.sum())
    if s in (0, total) and len(n) >= MIN_TASKS_T:
        return Estimate(s / total, clopper_pearson_lower(s, total), clopper_pearson_upper(s, total), "exact")
    return ratio_interval(success, n).clip(0, 1)


def inverse(goals_per_joule):
    """Energy per goal from goals per joule: limits swap places, and no upper limit exists when goals per joule may be 0."""
    e = goals_per_joule
    if not e.value:
        return NOTHING
    lo = 1 / e.hi if e.hi else None
    return Estimate(1 / e.value, lo, 1 / e.lo if e.lo is not None and e.lo > 0 else None, e.method)


def bca_interval(value, replicates, jackknife, tail):
    """Bias-corrected accelerated bootstrap interval for a statistic that is no ratio of sums (median, R2, rank correlation).

    `tail` is the probability that the bootstrap leaves at each end.
    """
    m, replicates = len(jackknife), replicates[np.isfinite(replicates)]
    jackknife = jackknife[np.isfinite(jackknife)]
    if m < MIN_TASKS_BOOTSTRAP or len(replicates) < 100 or len(jackknife) < m or value is None:
        return Estimate(value)
    d = jackknife.mean() - jackknife
    spread = float((d**2).sum())
    if spread == 0:
        return Estimate(value, value, value, "bootstrap")
    a, nd = float((d**3).sum()) / (6 * spread**1.5), NormalDist()
    share = ((replicates < value).mean() + (replicates <= value).mean()) / 2
    z0 = nd.inv_cdf(min(max(float(share), 1 / len(replicates)), 1 - 1 / len(replicates)))
    limits = []
    for p in (tail, 1 - tail):
        z = z0 + nd.inv_cdf(p)
        limits.append(float(np.quantile(replicates, nd.cdf(z0 + z / (1 - a * z)))))
    return Estimate(value, min(limits[0], value), max(limits[1], value), "bootstrap")


def sign_flip_p(differences):
    """Two-sided p of the sign-flip test on task differences: all 2^m signs up to 16 tasks, then 20,000 seeded ones.

    Beyond 500 tasks the sum over random signs is as good as normal, with the squares' sum as its variance.
    """
    d = np.asarray(differences, float)
    d = d[np.isfinite(d)]
    m = len(d)
    if m < MIN_TASKS_T:
        return None
    if m > 500:
        return 2 * NormalDist().cdf(-abs(d.sum()) / math.sqrt(float(d @ d))) if d.any() else 1.0
    if m <= 16:
        signs = 1.0 - 2.0 * ((np.arange(2**m)[:, None] >> np.arange(m)) & 1)
        extra = 0
    else:
        signs = np.random.default_rng(SEED + m).choice([-1.0, 1.0], size=(20_000, m))
        extra = 1  # the observed signs are one of the possible ones
    bound = abs(d.sum()) * (1 - 1e-9)
    return float((np.abs(signs @ d) >= bound).sum() + extra) / (len(signs) + extra)


# ------------------------------------------------------------------------------------------------------------ input


def read_table(path, required, optional, what):
    """Columns of a CSV as {name: list of strings} and notes. Takes a BOM, CRLF and a torn last line; raises InputError."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise InputError(f"{path}: cannot read {what}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: byte {e.start} is not UTF-8; expected {what} as UTF-8 CSV") from None
    try:
        lines = [r for r in csv.reader(io.StringIO(text.replace("\r\n", "\n"), newline="")) if r]
    except csv.Error as e:
        raise InputError(f"{path}: no CSV ({e}); expected {what}") from None
    if not lines:
        raise InputError(f"{path}: the file is empty; expected {what} with a header")
    names, rows, notes = [c.strip() for c in lines[0]], lines[1:], []
    missing = [c for c in required if c not in names]
    if missing:
        raise InputError(f"{path}: column{'s' * (len(missing) > 1)} missing: {', '.join(missing)}; expected {what}")
    twice = sorted({c for c in names if names.count(c) > 1})
    if twice:
        raise InputError(f"{path}: column{'s' * (len(twice) > 1)} twice in the header: {', '.join(twice)}")
    if rows and not text.endswith("\n") and len(rows[-1]) < len(names):
        rows.pop()
        notes.append(f"{Path(path).name}: the last line is torn and was left out")
    for number, r in enumerate(rows, 1):
        if len(r) != len(names):
            raise InputError(f"{path}: row {number}: found {len(r)} cells, expected {len(names)} as in the header")
    use = [c for c in names if c in {*required, *optional}]
    return {c: [r[k] for r in rows] for c, k in ((c, names.index(c)) for c in use)}, notes


def to_number(path, column, cells):
    """Floats from cells, empty as NaN; anything else that is no finite number is an InputError naming row and column."""
    try:
        values = np.array([float(c) if c else math.nan for c in cells])
        if np.isfinite(values).sum() + cells.count("") == len(cells):
            return values
    except ValueError:
        pass
    values = np.full(len(cells), np.nan)
    for i, c in enumerate(cells):
        if not c.strip():
            continue
        try:
            values[i] = float(c)
        except ValueError:
            values[i] = math.inf
        if not math.isfinite(values[i]):
            raise InputError(f"{path}: row {i + 1}, column {column}: found {c!r}, expected a number or an empty cell")
    return values


def behaviour(mode, recording_source):
    """live, authored, recorded, or replay when a replayed row does not say where its recording came from."""
    if mode == "live":
        return "live"
    return recording_source if recording_source in ("authored", "recorded") else "replay"


@lru_cache(maxsize=1024)
def domain_names(text):
    """The domains of total_domains or est_domains in a fixed order, GPU first."""
    return sorted((d for d in re.split(r"[\s+,;|&]+", text) if d), key=lambda d: ([d.startswith(g) for g in DOMAINS][::-1], d))


def domain_groups(text):
    """gpu, cpu, dram as far as total_j sums them; `gpu0+gpu1+cpu0` gives [gpu, cpu]."""
    found = {re.sub(r"\d+$", "", d) for d in domain_names(text)}
    return [d for d in DOMAINS if d in found]


@lru_cache(maxsize=1024)
def energy_source(domains, gpu_source, cpu_source):
    """measured, estimated (a power model times busy time), or both named; empty where there is no energy."""
    sources = {d: (gpu_source if d == "gpu" else cpu_source) for d in domain_groups(domains)}
    estimated = [d for d, s in sources.items() if {"model", "estimated"} & set(re.split(r"[+\s]", s))]
    if not sources:
        return ""
    if not estimated:
        return "measured"
    if len(estimated) == len(sources):
        return "estimated"
    return "measured " + "+".join(d for d in sources if d not in estimated) + ", estimated " + "+".join(estimated)


def refuse(path, frame, column, bad, expected):
    """Raise InputError for the first row that is `bad`, with what was found there; nothing when none is."""
    if np.any(bad):
        i = int(np.argmax(bad))
        value = frame[column].iloc[i]
        found = "an empty cell" if value == "" or value != value else repr(value) if isinstance(value, str) else f"{value:.10g}"
        raise InputError(f"{path}: row {i + 1}, column {column}: found {found}, expected {expected}")


def check_repetitions(path, frame):
    """Repetitions as plain numbers, 1 or more; `r3` means 3."""
    frame["rep"] = [re.sub(r"^r", "", r) for r in frame["rep"]]
    refuse(path, frame, "rep", [not re.fullmatch(r"0*[1-9]\d*", r) for r in frame["rep"]], "the number of the repetition, 1 or more")


def check_joined(path, frame, column):
    kinds = JOINED[column]
    known = {v: all(re.fullmatch(kinds, x) for x in domain_names(v)) for v in set(frame[column])}
    words = kinds.replace("(gpu|cpu|dram)\\d*", "gpu, cpu, dram (numbered or not)").replace("|", ", ")
    refuse(path, frame, column, [not known[v] for v in frame[column]], f"{words}, joined by +, or an empty cell")


def check_rows(path, frame):
    """What no table of align_trial.py holds: unknown names, impossible numbers, parts that are not their total. Raises InputError."""
    for column in ("trajectory", "task", "policy"):
        refuse(path, frame, column, (frame[column] == "").to_numpy(), "a name; every trajectory has one")
    for column, allowed in ONE_OF.items():
        words = " or ".join(a or "an empty cell" for a in allowed)
        refuse(path, frame, column, ~frame[column].isin(allowed).to_numpy(), words)
    check_repetitions(path, frame)
    refuse(path, frame, "concurrency", [not re.fullmatch(r"([1-9]\d*)?", c) for c in frame["concurrency"]], "a whole number, 1 or more")
    for column in ("total_domains", "est_domains", "gpu_source", "cpu_source"):
        check_joined(path, frame, column)
    for column in NUMBERS + NUMBERS_OPTIONAL:
        if not any(part in column for part in ANY_SIGN):
            refuse(path, frame, column, (frame[column] < 0).to_numpy(), "0 or more; a reading that is missing is an empty cell")
    for column in WHOLE:
        refuse(path, frame, column, (frame[column] % 1 > 0).to_numpy(), "a whole number")
    refuse(path, frame, "coverage", (frame["coverage"] > 1 + 1e-6).to_numpy(), "a share from 0 to 1")
    nameless = ((frame["total_domains"] == "") & frame["total_j"].notna()).to_numpy()
    refuse(path, frame, "total_domains", nameless, "which domains total_j sums; rerun align_trial.py")
    for column in ("gpu_source", "cpu_source"):
        with_it = [d for d in set(frame["total_domains"]) if column[:3] in domain_groups(d)]
        bad = frame["total_domains"].isin(with_it) & frame["total_j"].notna() & frame[column].isin(("", "none"))
        refuse(path, frame, column, bad.to_numpy(), "the source of the energy that total_j sums")
    for column, parts in PARTS.items():
        check_sum(path, frame, column, parts, slice(None))
    for domains in set(frame["total_domains"]) - {""}:
        check_sum(path, frame, "total_j", [f"{d}_total_j" for d in domain_groups(domains)], (frame["total_domains"] == domains).to_numpy())


def check_sum(path, frame, column, parts, rows):
    """Parts add up to their total wherever all of them are known; a thousandth is allowed for whoever rounded the table."""
    off = np.zeros(len(frame), bool)
    total, found = frame[column].to_numpy(float), frame[parts].to_numpy(float).sum(axis=1)
    off[rows] = (np.abs(found - total) > 1e-3 * total + 0.01)[rows]
    if off.any():
        refuse(path, frame, column, off, f"{found[int(np.argmax(off))]:.10g}, the sum of {' + '.join(parts)}")


def read_trials(path):
    """The table of align_trial.py as a frame in a canonical order, and notes on what was odd about it."""
    cells, notes = read_table(path, TEXT + NUMBERS, TEXT_OPTIONAL + NUMBERS_OPTIONAL, "the table that align_trial.py writes")
    size = len(cells["trajectory"])
    if not size:
        raise InputError(f"{path}: no trajectory in the table; run align_trial.py on finished trajectory folders first")
    columns = {c: [v.strip() for v in cells.get(c, [""] * size)] for c in TEXT + TEXT_OPTIONAL}
    columns |= {c: to_number(path, c, cells.get(c, [""] * size)) for c in NUMBERS + NUMBERS_OPTIONAL}
    frame = pd.DataFrame({c: pd.Series(v, dtype=object if isinstance(v, list) else float) for c, v in columns.items()})

    check_rows(path, frame)

    again = frame["trajectory"].duplicated(keep=False)
    if again.any():
        before = len(frame)
        frame = frame.drop_duplicates()
        if len(frame) < before:
            notes.append(f"{before - len(frame)} row(s) stood twice in the table and count once")
        again = frame["trajectory"].duplicated(keep=False)
    if again.any():
        name = sorted(set(frame.loc[again, "trajectory"]))[0]
        raise InputError(f"{path}: trajectory {name} stands in the table more than once with different numbers; keep the row that is right")
    double = frame.duplicated(["task", "policy", "rep", "mode"])
    if double.any():
        name = min(frame.loc[double, "trajectory"])
        notes.append(f"{int(double.sum())} row(s) repeat the task, policy, repetition and mode of another, such as {name}; each counts as an attempt")
    frame["behaviour"] = [behaviour(m, s) for m, s in zip(frame["mode"], frame["recording_source"], strict=True)]
    # A total without energy must not look like a group of its own with no energy in it.
    frame["total_domains"] = [
        "+".join(domain_names(d)) if j == j else "" for d, j in zip(frame["total_domains"], frame["total_j"], strict=True)
    ]
    frame["est_domains"] = ["+".join(domain_names(d)) for d in frame["est_domains"]]
    frame["source"] = [
        energy_source(d, g, c) for d, g, c in zip(frame["total_domains"], frame["gpu_source"], frame["cpu_source"], strict=True)
    ]
    frame["planned_only"] = False
    return frame.sort_values("trajectory", kind="stable").reset_index(drop=True), notes


def read_plan(path):
    """task, policy, rep, mode, recording of every planned run; double entries are an InputError."""
    cells, notes = read_table(path, ["task", "policy", "rep", "mode"], ["recording"], "the plan that the batch writes")
    cells.setdefault("recording", [""] * len(cells["task"]))
    plan = pd.DataFrame({c: pd.Series([x.strip() for x in v], dtype=object) for c, v in cells.items()})
    for column in ("task", "policy"):
        refuse(path, plan, column, (plan[column] == "").to_numpy(), "a name; every planned run has one")
    refuse(path, plan, "mode", ~plan["mode"].isin(ONE_OF["mode"]).to_numpy(), " or ".join(ONE_OF["mode"]))
    check_repetitions(path, plan)
    if plan.duplicated(["task", "policy", "rep", "mode"]).any():
        row = plan[plan.duplicated(["task", "policy", "rep", "mode"])].iloc[0]
        raise InputError(f"{path}: {row['task']}, {row['policy']}, repetition {row['rep']} ({row['mode']}) is planned twice")
    return plan, notes


def read_waste(path):
    """waste.csv as the batch writes it: a row for every attempt that was set aside, its energy that of the whole attempt."""
    cells, notes = read_table(path, ["trajectory", "energy_j", "domains", "sources"], ["reason"], "the waste.csv that the batch writes (stages/status.py)")
    cells.setdefault("reason", [""] * len(cells["trajectory"]))
    columns = {c: pd.Series([v.strip() for v in cells[c]], dtype=object) for c in ("trajectory", "reason", "domains", "sources")}
    frame = pd.DataFrame(columns | {"energy_j": to_number(path, "energy_j", cells["energy_j"])})
    refuse(path, frame, "trajectory", (frame["trajectory"] == "").to_numpy(), "the name of the trajectory")
    refuse(path, frame, "energy_j", (frame["energy_j"] < 0).to_numpy(), "0 or more; an energy that is not known is an empty cell")
    for column in ("domains", "sources"):
        check_joined(path, frame, column)
    nameless = ((frame["domains"] == "") & frame["energy_j"].notna()).to_numpy()
    refuse(path, frame, "domains", nameless, "the domains that energy_j sums")
    frame["groups"] = ["+".join(domain_groups(d)) for d in frame["domains"]]
    frame["source"] = [energy_source(d, *waste_sources(x)) for d, x in zip(frame["domains"], frame["sources"], strict=True)]
    return frame, notes


@lru_cache(maxsize=64)
def waste_sources(text):
    """(of the GPU, of the CPU) among sources that waste.csv gives for all domains together."""
    found = domain_names(text)
    gpu = [s for s in found if s.startswith("nvml")]
    return "+".join(gpu) or "model", "rapl" if "rapl" in found else "model"


def share_waste(waste, groups):
    """Column `run` of the waste: (number of the group, policy) that the attempt belongs to, None where it is none of the table or the plan."""
    home = {}
    for number, group in enumerate(groups):
        for planned_only, name, policy in zip(group.rows["planned_only"], group.rows["trajectory"], group.rows["policy"], strict=True):
            if name not in home or not planned_only:
                home[name] = (number, policy)
    return waste.assign(run=pd.Series([home.get(t) for t in waste["trajectory"]], index=waste.index, dtype=object))


def waste_totals(waste):
    """All attempts that were set aside, by the domains and the source of their energy, for summary.json."""
    kinds = []
    for (domains, source), r in waste.groupby(["groups", "source"], sort=True):
        known = r["energy_j"].dropna()
        kinds.append(
            {"total_domains": domains, "source": source, "attempts": len(r), "without_energy": len(r) - len(known)}
            | {"energy_j": plain(float(known.sum())) if len(known) else None}
        )
    return {"attempts": len(waste), "of_no_run_in_the_table": int(waste["run"].isna().sum()), "by_source": kinds}


def add_missing(trials, plan):
    """The trials plus one row for every planned run that left none: nobody may drop out of a denominator by crashing."""
    key = ["task", "policy", "rep", "mode"]
    plan = plan.copy()
    known = set(trials["task"])  # a plan may name a task by its folder, a trajectory by its name
    plan["task"] = [t if t in known else Path(t).name or t for t in plan["task"]]
    rows = list(map(tuple, trials[key].to_numpy()))
    have = set(rows)
    missing = [i for i, row in enumerate(plan[key].to_numpy()) if tuple(row) not in have]
    planned = set(map(tuple, plan[key].to_numpy()))
    notes = []
    unplanned = [k for k in rows if k not in planned]
    if unplanned:
        notes.append(f"{len(unplanned)} row(s) of the table are not in the plan; they count as planned too")
    runs = {k[:3] for k in planned}
    other_mode = [k for k in unplanned if k[:3] in runs]
    if other_mode:
        task, policy, rep, mode = min(other_mode)
        notes.append(
            f"{len(other_mode)} row(s) ran in another mode than planned, such as {task}, {policy}, repetition {rep}: found {mode}; "
            "what was planned counts as missing unless it ran too"
        )
    if not missing:
        return trials, notes
    sources = {r.split("@")[0]: s for r, s in zip(trials["recording"], trials["recording_source"], strict=True) if s}
    kinds = set(sources.values())
    rows = []
    for i in missing:
        task, policy, rep, mode = plan[key].to_numpy()[i]
        source = sources.get(Path(plan["recording"].iloc[i].split("@")[0]).stem, next(iter(kinds)) if len(kinds) == 1 else "")
        rows.append(
            {
                "trajectory": f"{task}__{policy}__r{rep}",
                "task": task,
                "policy": policy,
                "rep": rep,
                "mode": mode,
                "outcome": "unscored",
                "fail_reason": "no row",
                "behaviour": behaviour(mode, source),
                "planned_only": True,
            }
        )
    extra = pd.DataFrame(rows)
    texts = [c for c in trials.columns if trials[c].dtype == object or pd.api.types.is_string_dtype(trials[c])]
    for c in trials.columns:
        if c not in extra:
            extra[c] = "" if c in texts else np.nan
    return pd.concat([trials, extra[trials.columns]], ignore_index=True), notes


class Group(NamedTuple):
    """Trajectories that may be pooled."""

    name: str
    key: dict
    rows: pd.DataFrame  # every planned run, in a fixed order
    scored: pd.DataFrame  # successes and fails whose energy is known: what RQ1 and RQ2 look at
    domains: list  # gpu, cpu, dram as far as total_j has them

    @property
    def measured(self):
        return self.key["source"] == "measured"

    def head(self):
        return {"group": self.name, **{k: self.key[k] for k in TABLE_KEYS[1:]}}


def split_groups(trials):
    """Groups, the largest first, and notes. A row without energy or hardware joins the largest group that it does not contradict."""
    trials = trials.copy()
    keys = [tuple(k) for k in trials[GROUP_KEYS].to_numpy()]
    full = {}
    for k, missing in zip(keys, trials["total_domains"] == "", strict=True):
        if not missing:
            full[k] = full.get(k, 0) + 1
    order = sorted(full, key=lambda k: (-full[k], k))
    home, moved = [], 0
    for k in keys:
        if k in full:
            home.append(k)
            continue
        fits = [f for f in order if all(a in ("", b) for a, b in zip(k, f, strict=True))]
        home.append(fits[0] if fits else k)
        moved += len(fits) > 1
    notes = []
    if moved:
        notes.append(f"{moved} run(s) without energy fit more than one group and count in the largest")
    trials["_home"] = pd.Series(home, index=trials.index, dtype=object)
    sizes = {}
    for k in home:
        sizes[k] = sizes.get(k, 0) + 1
    ranked = sorted(sizes, key=lambda k: (-full.get(k, 0), -sizes[k], k))
    groups = []
    for k in ranked:
        key = dict(zip(GROUP_KEYS, k, strict=True))
        mine = [h == k for h in home]
        rows = trials[mine].drop(columns="_home").sort_values(["task", "policy", "rep", "trajectory"], kind="stable").reset_index(drop=True)
        groups.append([key, rows])
    varying = [c for c in GROUP_KEYS if len({g[0][c] for g in groups}) > 1]
    out = []
    for number, (key, rows) in enumerate(groups, 1):
        label = ", ".join(str(key[c]) or f"no {c.replace('_', ' ')}" for c in varying) or key["behaviour"]
        scored = rows[(rows["outcome"] != "unscored") & rows["total_j"].notna()]
        out.append(Group(f"{number}: {label}", key, rows, scored, domain_groups(key["total_domains"])))
    return out, notes


# -------------------------------------------------------------------------------------------------- RQ1: predictors


def fit_relative(x, y):
    """Coefficients b >= 0 that minimise mean |x b / y - 1|; y is positive.

    One column: exact, the weighted median of y/x with weights x/y. Several: iteratively reweighted least squares, the
    non-negative solution found among all subsets of columns.
    """
    z = np.ascontiguousarray((x / y[:, None]).T)  # a row per coefficient: sums run along memory
    scale = np.abs(z).mean(axis=1)
    scale[scale == 0] = 1
    z /= scale[:, None]
    p = len(z)
    if p == 1:
        weight = z[0]
        use = weight > 0
        if not use.any():
            return np.zeros(1)
        ratio = 1 / weight[use]
        order = np.argsort(ratio, kind="stable")
        total = np.cumsum(weight[use][order])
        return np.array([ratio[order][np.searchsorted(total, total[-1] / 2)]]) / scale
    weights, best, best_loss = np.ones(len(y)), np.zeros(p), math.inf
    for step in range(20):
        zw = z * weights
        found = non_negative(zw @ z.T, zw.sum(axis=1))
        residual = np.abs(found @ z - 1)
        loss = residual.mean()
        stalled = loss > best_loss * (1 - 1e-4)
        if loss < best_loss:
            best, best_loss = found, loss
        if stalled and step > 6:
            break
        weights = 1 / np.maximum(residual, max(1e-3, 0.1 * 0.5**step))
    return best / scale


def non_negative(gram, moment):
    """Least squares with coefficients of at least 0 from X'X and X'y, for a handful of columns: the best of all feasible subsets."""
    p = len(moment)
    ridge = 1e-10 * np.trace(gram) / p * np.eye(p)  # keeps columns that say the same from being singular
    b = np.linalg.solve(gram + ridge, moment)
    if (b >= 0).all():  # no constraint binds, so no subset does better
        return b
    found, found_gain = np.zeros(p), 0.0
    for s in (list(s) for k in range(1, p) for s in combinations(range(p), k)):
        b = np.linalg.solve((gram + ridge)[np.ix_(s, s)], moment[s])
        gain = float(b @ moment[s])  # how far the sum of squares falls
        if (b >= 0).all() and gain > found_gain * (1 + 1e-12):
            found, found_gain = np.zeros(p), gain
            found[s] = b
    return found


def leave_one_task_out(x, y, tasks, cells=None):
    """Out-of-task predictions of the fitted baseline; NaN where nothing can be fitted (a single task).

    `cells`: codes of a category (policy); then a constant is fitted in each, x is not used.
    """
    names = np.unique(tasks)
    prediction = np.full(len(y), np.nan)
    if len(names) < 2:
        return prediction
    fold = np.arange(len(names)) % min(len(names), max(5, min(MAX_FOLDS, 800_000 // len(y))))
    fold_of_row = fold[np.searchsorted(names, tasks)]
    for f in range(fold.max() + 1):
        out = fold_of_row == f
        if cells is None:
            if (~out).sum() >= x.shape[1]:
                prediction[out] = x[out] @ fit_relative(x[~out], y[~out])
            continue
        for c in np.unique(cells[out]):
            train = ~out & (cells == c)
            if train.any():
                prediction[out & (cells == c)] = fit_relative(np.ones((train.sum(), 1)), y[train])[0]
    return prediction


def same_task(y, tasks, policies):
    """Median of the other trajectories of the same task and policy; NaN where there is none."""
    prediction = np.full(len(y), np.nan)
    cell = pd.factorize(pd.Series(list(zip(tasks, policies, strict=True)), dtype=object))[0]
    order = np.argsort(cell, kind="stable")
    for block in np.split(order, np.flatnonzero(np.diff(cell[order])) + 1):
        n = len(block)
        if n > 1:
            ranked = block[np.argsort(y[block], kind="stable")]
            v, i = y[ranked], np.arange(n)
            low, high = (n - 2) // 2, (n - 1) // 2  # middle of the n - 1 others, counted without the one left out
            prediction[ranked] = (v[low + (low >= i)] + v[high + (high >= i)]) / 2
    return prediction


class Prediction(NamedTuple):
    """What one predictor says about each trajectory. Predictors are compared within `family` only."""

    name: str
    kind: str
    family: str
    fitted: str
    values: np.ndarray


def call_model(group, rows, target):
    """What calibration and token counts alone say, in the domains of the target."""
    if target == "total_j":
        same = (rows["est_domains"] == group.key["total_domains"]).to_numpy()
        # Where the estimate lacks a domain (DRAM), only its ratio to the measurement in the same domains can be compared.
        ratio = rows["total_j"].to_numpy(float) * (1 + rows["closure_total"].to_numpy(float))
        return np.where(same, rows["est_total_j"].to_numpy(float), ratio)
    parts = [rows[f"est_{d}_above_idle_j"].to_numpy(float) for d in group.domains if d != "dram"]
    return np.sum(parts, axis=0) if parts else np.full(len(rows), np.nan)


def above_idle(group, rows):
    """Energy above idle over the domains that have an idle power (all but DRAM)."""
    parts = [rows[f"{d}_above_idle_j"].to_numpy(float) for d in group.domains if d != "dram"]
    return np.sum(parts, axis=0) if parts else np.full(len(rows), np.nan)


def predictions(group, rows, y, target):
    """Every predictor of one target, each scored on tasks that it has not seen."""
    tasks, policies = (pd.factorize(rows[c], sort=True)[0] for c in ("task", "policy"))
    n, ones = len(rows), np.ones(len(rows))
    usable = np.isfinite(y) & (y > 0)
    out = []

    def fitted(name, kind, columns, family=None, where=None):
        x = np.column_stack(columns)
        use = usable & np.isfinite(x).all(axis=1) & (where if where is not None else True)
        values = np.full(n, np.nan)
        if use.any():
            values[use] = leave_one_task_out(x[use], y[use], tasks[use])
        out.append(Prediction(name, kind, family or kind, f"{x.shape[1]} coefficient{'s' * (x.shape[1] > 1)}", values))

    col = {c: rows[c].to_numpy(float) for c in NUMBERS + NUMBERS_OPTIONAL}
    fitted("constant", "ex-ante", [ones])
    if policies.max(initial=0) > 0:
        values = np.full(n, np.nan)
        if usable.any():
            values[usable] = leave_one_task_out(np.ones((usable.sum(), 1)), y[usable], tasks[usable], cells=policies[usable])
        out.append(Prediction("policy", "ex-ante", "ex-ante", f"{policies.max() + 1} coefficients", values))
    values = np.full(n, np.nan)
    if usable.any():
        values[usable] = same_task(y[usable], tasks[usable], policies[usable])
    out.append(Prediction("other repetitions of the same task", "ex-ante, task seen", "ex-ante, task seen", "median", values))

    for k in FIRST_CALLS:
        family = f"early, {k} call{'s' * (k > 1)}"
        have = np.isfinite(col[f"first{k}_total_j"])
        if not have.any():
            continue
        word = report.first_calls(k)
        fitted(f"{word}: that there are so many", "early", [ones], family, have)
        fitted(f"{word}: energy", "early", [ones, col[f"first{k}_total_j"]], family, have)
        fitted(f"{word}: tokens", "early", [ones, col[f"first{k}_prompt_tokens"], col[f"first{k}_completion_tokens"]], family, have)

    fitted("calls", "post-hoc", [col["calls"]])
    fitted("output tokens", "post-hoc", [col["completion_tokens"]])
    fitted("all tokens", "post-hoc", [col["prompt_tokens"] + col["completion_tokens"]])
    fitted("tokens by kind", "post-hoc", [col["uncached_tokens"], col["cached_tokens"], col["completion_tokens"]])
    fitted("calls and tokens by kind", "post-hoc", [col["calls"], col["uncached_tokens"], col["cached_tokens"], col["completion_tokens"]])
    fitted("wall time", "post-hoc", [col["total_s"]])
    fitted("model and other time", "post-hoc", [col["model_s"], col["command_s"] + col["waiting_s"]])
    values = call_model(group, rows, target)
    out.append(Prediction("call model (calibration)", "post-hoc", "post-hoc", "no", np.where(usable, values, np.nan)))
    return out


def weighted_median(sorted_values, weights):
    total = np.cumsum(weights)
    half = total[-1] / 2
    i = int(np.searchsorted(total, half))
    j = i + 1 if total[i] == half and i + 1 < len(total) else i
    while j < len(total) - 1 and weights[j] == 0:
        j += 1
    return (sorted_values[i] + sorted_values[j]) / 2


def weighted_ranks(codes, weights):
    """Mid-ranks of values given as dense codes, where each row counts `weights` times."""
    per = np.bincount(codes, weights=weights)
    return (np.cumsum(per) - per / 2)[codes]


def weighted_correlation(a, b, w):
    total = w.sum()
    a = a - (w @ a) / total
    b = b - (w @ b) / total
    norm = math.sqrt(float(w @ a**2) * float(w @ b**2))
    return float(w @ (a * b)) / norm if norm > 1e-12 * total else math.nan


def scores(y, predicted, tasks):
    """mape, mdape, mae_j, r2, spearman of a prediction, each an Estimate clustered by task."""
    names, codes = np.unique(tasks, return_inverse=True)
    m, n = len(names), len(y)
    ape, error = np.abs(predicted / y - 1), np.abs(predicted - y)

    def per_task(v):
        return np.bincount(codes, weights=v, minlength=m)

    size = per_task(np.ones(n))
    result = {"mape": ratio_interval(per_task(ape), size).clip(lo=0), "mae_j": ratio_interval(per_task(error), size).clip(lo=0)}

    order = np.argsort(ape, kind="stable")
    sums = np.column_stack([per_task(v) for v in (np.ones(n), y, y**2, error**2)])
    y_code, p_code = (np.unique(v, return_inverse=True)[1] for v in (y, predicted))

    def r2(totals):
        """For each row of totals of the columns of `sums`."""
        count, total, squares, residual = totals.T
        spread = squares - total**2 / count
        return 1 - residual / np.where(spread > 1e-12 * squares, spread, np.nan)

    def median(w):
        return weighted_median(ape[order], w[codes][order])

    def rank_correlation(w):
        return weighted_correlation(weighted_ranks(y_code, w[codes]), weighted_ranks(p_code, w[codes]), w[codes])

    whole = sums.sum(axis=0, keepdims=True)
    values = {"mdape": median(np.ones(m)), "r2": r2(whole)[0] if n > 1 else math.nan, "spearman": rank_correlation(np.ones(m)) if n > 1 else math.nan}
    result |= {k: Estimate(float(v) if math.isfinite(v) else None) for k, v in values.items()}
    if not MIN_TASKS_BOOTSTRAP <= m <= MAX_TASKS_BOOTSTRAP:
        return result
    # R2 hangs on the few largest trajectories: simulated, 20 tasks, the usual tails cover 88 %, an eighth of them 95 %
    result["r2"] = bca_interval(result["r2"].value, r2(resamples(m) @ sums), r2(whole - sums), _tail(m) / 8)
    if n > MAX_ROWS_RANKED:
        return result
    drawn = resamples(m)[: int(min(999, max(199, 1e6 // n)))]
    without = [1.0 - (np.arange(m) % min(m, 100) == g) for g in range(min(m, 100))]  # tasks left out one by one, many of them in groups
    for name, of in (("mdape", median), ("spearman", rank_correlation)):
        result[name] = bca_interval(result[name].value, np.array([of(w) for w in drawn]), np.array([of(w) for w in without]), _tail(m))
    return result


def rq1(group):
    """rq1_predictors rows, rq1_paired rows, and the predictions for the figure."""
    rows = group.scored
    tasks = pd.factorize(rows["task"], sort=True)[0]
    table, paired, kept = [], [], {}
    for target, y in (("total_j", rows["total_j"].to_numpy(float)), ("above_idle_j", above_idle(group, rows))):
        found = predictions(group, rows, y, target)
        kept[target] = (y, found)
        for p in found:
            use = np.isfinite(p.values)
            row = {**group.head(), "predictor": p.name, "kind": p.kind, "fitted": p.fitted, "target": target, "n": int(use.sum())}
            row |= {"tasks": len(np.unique(tasks[use])), "circular": "no" if group.measured else "yes"}
            if use.any():
                for metric, e in scores(y[use], p.values[use], tasks[use]).items():
                    row |= {metric: e.value, f"{metric}_lo": e.lo, f"{metric}_hi": e.hi}
            table.append(row)
        for family in dict.fromkeys(p.family for p in found):
            row = compare(group, target, family, [p for p in found if p.family == family], y, tasks)
            if row:
                paired.append(row)
    return table, paired, kept


def compare(group, target, family, found, y, tasks):
    """Best predictor of a family against the runner-up, on the trajectories that all of them cover."""
    covered = [int(np.isfinite(p.values).sum()) for p in found]
    # A predictor that few trajectories have (a call model without calibration for most) must not shrink the comparison to those.
    found = [p for p, n in zip(found, covered, strict=True) if n and n >= 0.8 * max(covered)]
    common = np.all([np.isfinite(p.values) for p in found], axis=0)
    if len(found) < 2 or not common.any():
        return None
    codes = np.unique(tasks[common], return_inverse=True)[1]
    size = np.bincount(codes).astype(float)
    ape = {p.name: np.abs(p.values[common] / y[common] - 1) for p in found}
    ranked = sorted(found, key=lambda p: (ape[p.name].mean(), p.name))
    best, second = ranked[:2]
    difference = np.bincount(codes, weights=ape[second.name] - ape[best.name])
    e = ratio_interval(difference, size)
    row = {**group.head(), "target": target, "kind": best.kind, "compared": family, "n": int(common.sum()), "tasks": len(size)}
    row |= {"best": best.name, "best_mape": float(ape[best.name].mean()), "runner_up": second.name}
    row |= {"runner_up_mape": float(ape[second.name].mean()), "difference": e.value}
    if group.measured:  # where energy is estimated from busy time a test would confirm our own assumption
        row |= {"difference_lo": e.lo, "difference_hi": e.hi, "p_sign_flip": sign_flip_p(difference / size), "interval": e.method}
    row["circular"] = "no" if group.measured else "yes"
    return row


# ------------------------------------------------------------------------------------------------------ RQ2: shares


def rq2(group):
    """Mean energy and share per component and domain for each task and policy, then for all tasks with intervals."""
    rows = group.scored
    if rows.empty:
        return []
    parts = [f"{d}_{p}" for d in group.domains for p in PHASES]
    columns = {p: rows[f"{p}_j"].to_numpy(float) for p in parts}
    for p in PHASES:
        columns[p] = np.sum([columns[f"{d}_{p}"] for d in group.domains], axis=0)
    for d in group.domains:
        columns[f"{d}_total"] = rows[f"{d}_total_j"].to_numpy(float)
    idle = [rows[f"{d}_idle_j"].to_numpy(float) for d in group.domains if d != "dram"]
    if idle:
        columns["idle"] = np.sum(idle, axis=0)
    columns["wasted"] = rows["wasted_j"].to_numpy(float)
    total, seconds = rows["total_j"].to_numpy(float), rows["total_s"].to_numpy(float)
    tasks, task_names = pd.factorize(rows["task"], sort=True)
    with_interval = (*PHASES, *(f"{d}_total" for d in group.domains), "idle")

    def blocks(codes, names):
        """A row for each (task, policy) of `names`, over the trajectories with its code."""

        def sums(values, use):
            return np.bincount(codes[use], weights=values[use], minlength=len(names))

        every, timed = np.ones(len(codes), bool), np.isfinite(seconds)
        n, time_n = sums(every, every), sums(timed, timed)
        total_j, total_s = sums(total, every) / n, sums(seconds, timed)
        out = []
        for i, (task, policy) in enumerate(names):
            row = {**group.head(), "task": task, "policy": policy, "n": int(n[i])}
            row |= {"tasks": len(np.unique(tasks[codes == i])) if task == ALL_TASKS else 1}
            out.append(row | {"total_j": float(total_j[i]), "total_s": float(total_s[i] / time_n[i]) if time_n[i] else None})
        for i, row in enumerate(out):
            if row["task"] == ALL_TASKS:
                e = ratio_interval(*(np.bincount(tasks[codes == i], weights=v[codes == i]) for v in (total, every))).clip(lo=0)
                row |= {"total_j_lo": e.lo, "total_j_hi": e.hi}
        for name, values in columns.items():
            use = np.isfinite(values)
            for row, k, part, whole in zip(out, sums(use, use), sums(values, use), sums(total, use), strict=True):
                row[f"{name}_j"] = float(part / k) if k else None
                row[f"{name}_share"] = float(part / whole) if k and whole > 0 else None
            for i, row in enumerate(out if name in with_interval else ()):
                if row["task"] == ALL_TASKS and row[f"{name}_share"] is not None:
                    mine = use & (codes == i)
                    e = ratio_interval(*(np.bincount(tasks[mine], weights=v[mine]) for v in (values, total))).clip(0, 1)
                    row |= {f"{name}_share_lo": e.lo, f"{name}_share_hi": e.hi}
        return out

    policy_names = policy_order(rows["policy"].unique())
    policies = pd.Index(policy_names).get_indexer(rows["policy"])
    by_name = np.argsort(np.argsort(policy_names))
    cells, cell_of = np.unique(tasks * len(policy_names) + by_name[policies], return_inverse=True)
    out = blocks(cell_of, [(task_names[c // len(policy_names)], sorted(policy_names)[c % len(policy_names)]) for c in cells])
    out += blocks(policies, [(ALL_TASKS, p) for p in policy_names])
    if len(policy_names) > 1:
        out += blocks(np.zeros(len(rows), int), [(ALL_TASKS, ALL_POLICIES)])
    return out


# --------------------------------------------------------------------------------------------- energy per goal (configs)


def per_task_sums(rows, tasks):
    """Per task: scored attempts, successes, energy of the scored attempts whose energy is known, and how many those are."""
    code = {t: i for i, t in enumerate(tasks)}
    c = np.array([code[t] for t in rows["task"]], int)
    scored = (rows["outcome"] != "unscored").to_numpy()
    success = (rows["outcome"] == "success").to_numpy()
    energy = rows["total_j"].to_numpy(float)
    known = scored & np.isfinite(energy)

    def add(mask, weights=None):
        return np.bincount(c[mask], weights=None if weights is None else weights[mask], minlength=len(tasks)).astype(float)

    return {"n": add(scored), "success": add(success), "known": add(known), "energy": add(known, energy)}


def goals_per_joule(s):
    """Ratio of means per task sums: success rate over mean energy. Attempts whose energy was lost count at their task's mean."""
    known = s["known"] > 0
    mean = np.divide(s["energy"], s["known"], out=np.zeros_like(s["energy"]), where=known)
    lost = np.where(known, s["n"] - s["known"], 0)
    whole_loss = ~known & (s["n"] > 0)  # a task without any known energy: the overall mean
    overall = s["energy"].sum() / s["known"].sum() if s["known"].sum() else 0.0
    spent = s["energy"] + lost * mean + np.where(whole_loss, s["n"] * overall, 0)
    return s["success"], spent


def set_aside(group, waste):
    """Columns on attempts that were set aside, from their rows of the waste; empty without a table of them (None)."""
    if waste is None:
        return {"set_aside": None, "set_aside_no_energy": None, "set_aside_j": None}
    same = waste[(waste["groups"] == "+".join(group.domains)) & (waste["source"] == group.key["source"])]
    known = same["energy_j"].dropna()  # joules of other domains or another source are none of these
    joules = float(known.sum()) if len(known) or waste.empty else None
    return {"set_aside": len(waste), "set_aside_no_energy": len(waste) - len(known), "set_aside_j": joules}


def reasons(group, partial, aside):
    """{set_aside, unscored}: {reason: attempts}. `aside` {policy: its attempts set aside}, None where no table says."""
    rows = group.rows
    left = rows[(rows["outcome"] == "unscored").to_numpy() & ~(partial & rows["planned_only"].to_numpy(bool))]
    return {"set_aside": dict(Counter(x for w in (aside or {}).values() for x in w["reason"])), "unscored": dict(Counter(left["fail_reason"]))}


def waste_columns(row, unscored):
    """Energy that bought nothing and its part of all energy, and of how many attempts none is known; empty without a table of the waste."""
    outside, inside = unscored[["setup_j", "verifier_j"]].to_numpy(float), unscored["total_j"].to_numpy(float)
    known = [x for x in (row["set_aside_j"], *inside, *outside.ravel()) if x is not None and math.isfinite(x)]
    if row["set_aside"] is None or (row["set_aside"] or len(unscored)) and not known:
        return {"waste_j": None, "all_j": None, "waste_share": None, "waste_no_energy": None}
    waste = float(sum(known))
    whole = sum(row[c] or 0.0 for c in ("spent_j", "infra_j", "setup_verifier_j", "set_aside_j"))
    row = {"waste_j": waste, "all_j": whole, "waste_share": waste / whole if whole > 0 else None, "waste_no_energy": row["set_aside_no_energy"]}
    row["waste_no_energy"] += int((np.isnan(inside) & np.isnan(outside).all(axis=1)).sum())
    return row


def configs(group, partial=False, cost=None, waste=None):
    """One row per policy: outcomes, energy per trajectory and per goal with intervals, paired differences to a reference policy.

    `waste` {policy: attempts of it that were set aside, as rows of read_waste}, None where no table says.
    """
    cost = cost or {}
    rows = group.rows
    policies = policy_order(rows["policy"].unique())
    reference = policies[0]
    tasks = sorted(rows["task"].unique())
    sums, out = {}, []
    for policy in policies:
        r = rows[rows["policy"] == policy]
        gone = int(r["planned_only"].sum())
        pending = gone if partial else 0
        count = {o: int((r["outcome"] == o).sum()) for o in ("success", "fail", "unscored")}
        count["unscored"] -= pending
        planned, missing = len(r), gone - pending
        if count["success"] + count["fail"] + count["unscored"] + pending != planned:
            raise AssertionError(f"{policy}: outcomes do not add up to the {planned} planned runs")
        s = sums[policy] = per_task_sums(r, tasks)
        n = s["n"].sum()
        energy = r["total_j"].to_numpy(float)
        scored = (r["outcome"] != "unscored").to_numpy()
        extra = r[["setup_j", "verifier_j"]].to_numpy(float)
        success, spent = goals_per_joule(s)
        row = {**group.head(), "policy": policy, "planned": planned, "n": planned - gone, **count}
        row |= {
            "missing": missing,
            "pending": pending,
            "tasks": int((s["n"] > 0).sum()),
            "no_energy": int((scored & np.isnan(energy)).sum()),
        }
        row |= columns("success_rate", rate_interval(s["success"][s["n"] > 0], s["n"][s["n"] > 0]))
        known = s["known"].sum() > 0
        per_trajectory = ratio_interval(s["energy"], s["known"]).clip(lo=0)
        row |= columns("energy_per_trajectory_j", per_trajectory)
        row["spent_j"] = float(s["energy"].sum()) if known else None
        lost = energy[~scored & np.isfinite(energy)]
        row["infra_j"] = float(lost.sum()) if len(lost) else (0.0 if count["unscored"] == 0 else None)
        row["setup_verifier_j"] = float(np.nansum(extra)) if np.isfinite(extra).any() else None
        within = r["wasted_j"].to_numpy(float)[scored]
        row["wasted_j"] = float(np.nansum(within)) if np.isfinite(within).any() else None
        row |= set_aside(group, None if waste is None else waste[policy])
        row |= waste_columns(row, r[~scored & ~(partial & r["planned_only"].to_numpy(bool))])
        goal = inverse(ratio_interval(success, spent)) if known else NOTHING
        row |= columns("energy_per_goal_j", goal)
        bound = None
        if known and n and success.sum() == 0:
            bound = per_trajectory.value / clopper_pearson_upper(0, int(n))
        row["energy_per_goal_lower_bound_j"] = bound
        # Attempts of a task resemble each other, so tasks decide what may be concluded, as they do for intervals.
        few = row["tasks"] < MIN_TASKS_T
        row["energy_per_goal_basis"] = "goals" if goal.value is not None else None if bound is None else "too few tasks" if few else "bound"
        # Bounds over what the unscored runs might have been; one that left no energy is taken at the mean of its policy.
        if known and count["unscored"]:
            everything = float(spent.sum() + lost.sum() + (count["unscored"] - len(lost)) * per_trajectory.value)
            row["energy_per_goal_if_unscored_fail_j"] = everything / count["success"] if count["success"] else None
            row["energy_per_goal_if_unscored_succeed_j"] = everything / (count["success"] + count["unscored"])
        else:
            row["energy_per_goal_if_unscored_fail_j"] = row["energy_per_goal_if_unscored_succeed_j"] = goal.value
        row["interval"] = per_trajectory.method
        for name, key in (("carbon", "carbon"), ("price", "price")):
            if cost.get(key) is not None:
                per_joule = cost[key] * cost.get("pue", 1.0) / 3.6e6
                unit = "_g" if name == "carbon" else ""
                row[f"{name}_per_trajectory{unit}"] = per_trajectory.value * per_joule if per_trajectory.value is not None else None
                row[f"{name}_per_goal{unit}"] = goal.value * per_joule if goal.value is not None else None
        if cost:
            row["pue"] = cost.get("pue", 1.0)
        out.append(row)
    for row in out:
        row |= {"reference_policy": reference if len(policies) > 1 else None}
        if row["policy"] != reference:
            row |= policy_difference(sums[row["policy"]], sums[reference])
    return out


def columns(name, e):
    return {name: e.value, f"{name}_lo": e.lo, f"{name}_hi": e.hi}


def policy_difference(a, b):
    """Policy minus reference on the tasks that both have scored, paired by task; energy per goal as a ratio."""
    both = (a["known"] > 0) & (b["known"] > 0)
    m = int(both.sum())
    row = {"paired_tasks": m}
    if m == 0:
        return row
    one = np.ones(m)
    energy = (a["energy"] / np.maximum(a["known"], 1) - b["energy"] / np.maximum(b["known"], 1))[both]
    rate = (a["success"] / np.maximum(a["n"], 1) - b["success"] / np.maximum(b["n"], 1))[both]
    for name, d in (("energy_difference_j", energy), ("success_rate_difference", rate)):
        row |= columns(name, ratio_interval(d, one)) | {f"{name}_p": sign_flip_p(d)}
    if a["success"][both].sum() and b["success"][both].sum():
        # log ratio of goals per joule, linearised over tasks: influence of policy minus influence of reference
        parts = []
        for s in (a, b):
            success, spent = goals_per_joule(s)
            value, _, influence = linearised(success[both], spent[both])
            parts.append((math.log(value), influence / value))
        log_ratio, influence = parts[1][0] - parts[0][0], parts[1][1] - parts[0][1]
        ratio = Estimate(math.exp(log_ratio))
        if m >= MIN_TASKS_T:
            half = t_quantile(0.5 + LEVEL / 2, m - 1) * math.sqrt(m / (m - 1) * float(influence @ influence))
            ratio = Estimate(math.exp(log_ratio), math.exp(log_ratio - half), math.exp(log_ratio + half), "t")
        row |= columns("energy_per_goal_ratio", ratio)
    return row


# ------------------------------------------------------------------------------------------- retry budget and cut-off


def retry_curve(success, energy, most=MAX_RETRIES):
    """(probability of a success, expected joules) for k = 1, 2, ... attempts, drawn in random order, stopping at the first success.

    Ends at the number of attempts: what a further one would have done is not known.
    """
    n, c = len(success), int(np.sum(success))
    fails = n - c
    good = float(np.mean(energy[success])) if c else 0.0
    bad = float(np.mean(energy[~success])) if fails else 0.0
    expected, reach, curve = 0.0, 1.0, []  # reach: probability that the first j attempts all failed, C(fails, j) / C(n, j)
    for j in range(min(n, most)):
        expected += reach * (c * good + (fails - j) * bad) / (n - j) if reach else 0.0
        reach *= (fails - j) / (n - j) if reach else 0.0
        curve.append((1 - reach, expected))
    return curve


def retry_budget(group):
    """One row per policy and k; tasks with fewer than k attempts are left out of that k and counted."""
    rows = group.scored
    out = []
    for policy in policy_order(rows["policy"].unique()):
        r = rows[rows["policy"] == policy]
        success, energy = (r["outcome"] == "success").to_numpy(), r["total_j"].to_numpy(float)
        cells = [np.asarray(i) for _, i in sorted(r.groupby("task", sort=True).indices.items())]
        curves = [retry_curve(success[i], energy[i]) for i in cells]
        for k in range(1, max(map(len, curves)) + 1):
            p, e = (np.array(v) for v in zip(*(x[k - 1] for x in curves if len(x) >= k), strict=True))
            m = np.ones(len(p))
            row = {**group.head(), "policy": policy, "k": k, "tasks": len(p), "tasks_with_fewer_attempts": len(cells) - len(p)}
            row |= columns("success_within_k", rate_interval(p, m) if set(np.unique(p)) <= {0.0, 1.0} else ratio_interval(p, m).clip(0, 1))
            row |= columns("expected_energy_j", ratio_interval(e, m).clip(lo=0))
            row |= columns("energy_per_success_j", inverse(ratio_interval(p, e)))
            out.append(row)
    return out


def cutoff(group):
    """Descriptive curve (stop an attempt at x joules) and, from 5 tasks, a cut-off chosen on the other tasks and scored on each."""
    rows = group.scored
    out = []
    for policy in policy_order(rows["policy"].unique()):
        r = rows[rows["policy"] == policy]
        success, energy = (r["outcome"] == "success").to_numpy(), r["total_j"].to_numpy(float)
        tasks, codes = np.unique(r["task"].to_numpy(str), return_inverse=True)
        m = len(tasks)
        head = {**group.head(), "policy": policy}
        if not success.any():
            continue
        # Only the energy of a success can be optimal: anything between two of them costs more and wins nothing.
        candidates = np.unique(energy[success])
        if len(candidates) > 60:
            candidates = np.unique(np.quantile(energy[success], np.linspace(0, 1, 60), method="higher"))
        candidates = np.append(candidates, max(energy.max(), candidates[-1]))
        spent = np.stack([np.bincount(codes, weights=np.minimum(energy, x), minlength=m) for x in candidates], axis=1)
        won = np.stack([np.bincount(codes, weights=success & (energy <= x), minlength=m) for x in candidates], axis=1)
        for x, s, w in zip(candidates, spent.sum(axis=0), won.sum(axis=0), strict=True):
            out.append(
                {**head, "kind": "descriptive", "cutoff_j": float(x), "tasks": m, "n": len(r), "successes_kept": int(w)}
                | {"successes_lost": int(success.sum() - w), "spent_j": float(s), "energy_per_success_j": float(s / w) if w else None}
            )
        if m < MIN_TASKS_T:
            continue
        rest_spent, rest_won = spent.sum(axis=0) - spent, won.sum(axis=0) - won
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(rest_won > 0, rest_spent / rest_won, np.inf)
        chosen = np.where(np.isfinite(price).any(axis=1), price.argmin(axis=1), len(candidates) - 1)
        i = np.arange(m)
        held_spent, held_won = spent[i, chosen], won[i, chosen].astype(float)
        all_spent, all_won = np.bincount(codes, weights=energy, minlength=m), np.bincount(codes, weights=success, minlength=m)
        row = {**head, "kind": "held-out", "cutoff_j": float(np.median(candidates[chosen])), "tasks": m, "n": len(r)}
        row |= {
            "successes_kept": int(held_won.sum()),
            "successes_lost": int(all_won.sum() - held_won.sum()),
            "spent_j": float(held_spent.sum()),
        }
        row |= columns("energy_per_success_j", inverse(ratio_interval(held_won, held_spent)))
        if held_won.sum():
            with_cut, without = linearised(held_won, held_spent), linearised(all_won, all_spent)
            log_ratio = math.log(without[0] / with_cut[0])
            d = without[2] / without[0] - with_cut[2] / with_cut[0]
            half = t_quantile(0.5 + LEVEL / 2, m - 1) * math.sqrt(m / (m - 1) * float(d @ d))
            row |= {
                "saving": 1 - math.exp(log_ratio),
                "saving_lo": 1 - math.exp(log_ratio + half),
                "saving_hi": 1 - math.exp(log_ratio - half),
            }
            row["recommended"] = "yes" if row["saving_lo"] > 0 else "no"
        else:
            row["recommended"] = "no"
        out.append(row)
    return out


# ---------------------------------------------------------------------------------------------------------- output

CONFIG_COLUMNS = TABLE_KEYS + [
    *["policy", "planned", "n", "success", "fail", "unscored", "missing", "pending", "tasks", "no_energy", "success_rate"],
    *["success_rate_lo", "success_rate_hi", "energy_per_trajectory_j", "energy_per_trajectory_j_lo", "energy_per_trajectory_j_hi"],
    *["spent_j", "wasted_j", "infra_j", "setup_verifier_j", "set_aside", "set_aside_no_energy", "set_aside_j", "waste_j", "all_j"],
    *["waste_share", "waste_no_energy", "energy_per_goal_j", "energy_per_goal_j_lo", "energy_per_goal_j_hi"],
    *["energy_per_goal_basis", "energy_per_goal_lower_bound_j", "energy_per_goal_if_unscored_fail_j", "energy_per_goal_if_unscored_succeed_j", "interval"],
    *["reference_policy", "paired_tasks", "energy_difference_j", "energy_difference_j_lo", "energy_difference_j_hi"],
    *["energy_difference_j_p", "success_rate_difference", "success_rate_difference_lo", "success_rate_difference_hi"],
    *["success_rate_difference_p", "energy_per_goal_ratio", "energy_per_goal_ratio_lo", "energy_per_goal_ratio_hi"],
]
PREDICTOR_COLUMNS = (
    TABLE_KEYS
    + [
        *["predictor", "kind", "fitted", "target", "n", "tasks", "circular"],
    ]
    + [f"{m}{end}" for m in ("mape", "mdape", "mae_j", "r2", "spearman") for end in ("", "_lo", "_hi")]
)
PAIRED_COLUMNS = TABLE_KEYS + [
    *["target", "kind", "compared", "n", "tasks", "best", "best_mape", "runner_up", "runner_up_mape", "difference"],
    *["difference_lo", "difference_hi", "p_sign_flip", "interval", "circular"],
]
SHARE_COLUMNS = TABLE_KEYS + [
    *["task", "policy", "n", "tasks", "total_j", "total_s", "model_j", "model_share", "command_j", "command_share", "waiting_j"],
    *["waiting_share"],
]
RETRY_COLUMNS = TABLE_KEYS + [
    *["policy", "k", "tasks", "tasks_with_fewer_attempts", "success_within_k", "success_within_k_lo", "success_within_k_hi"],
    *["expected_energy_j", "expected_energy_j_lo", "expected_energy_j_hi", "energy_per_success_j", "energy_per_success_j_lo"],
    *["energy_per_success_j_hi"],
]
CUTOFF_COLUMNS = TABLE_KEYS + [
    *["policy", "kind", "cutoff_j", "tasks", "n", "successes_kept", "successes_lost", "spent_j", "energy_per_success_j"],
    *["energy_per_success_j_lo", "energy_per_success_j_hi", "saving", "saving_lo", "saving_hi", "recommended"],
]


def plain(value):
    """A value for CSV and JSON: numpy types unwrapped, anything that is not a finite number or text as None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value


def write_csv(path, rows, first):
    """Rows (dicts) as CSV, columns `first` in this order, then what else occurs; a missing value is an empty cell."""
    names = first + [c for c in dict.fromkeys(c for r in rows for c in r) if c not in first]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for r in rows:
        writer.writerow(["" if (v := plain(r.get(c))) is None else v for c in names])
    write_atomic(path, out.getvalue())


def read_params(calib):
    """params.json of a calibration, given by its folder or path, and its SHA-256; (None, None) without one. Raises InputError."""
    if calib is None:
        return None, None
    path = Path(calib) if Path(calib).suffix == ".json" else Path(calib) / "params.json"
    mend = f"03_calibrate.sh or calibrate.py --out-dir {path.parent} makes one; or leave --calib out"
    try:
        data = path.read_bytes()
        found = json.loads(data.decode("utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"--calib {calib}: no {path}; {mend}") from None
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: cannot be read as JSON ({e}); {mend}") from None
    kinds = {"hardware": str, "model": str, "idle": dict, "energy": dict, "checks": list}
    wrong = [k for k, kind in kinds.items() if not (isinstance(found, dict) and isinstance(found.get(k), kind))]
    if not wrong and not all(isinstance(c, dict) and {"code", "severity", "text"} <= c.keys() for c in found["checks"]):
        wrong = ["checks (a list of code, severity, text)"]
    if wrong:
        raise InputError(f"{path}: found no {', '.join(wrong)}, expected what calibrate.py of this version writes; {mend}")
    return found, hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------------------------------------------------- main


def fingerprint_of(path):
    """SHA-256 over the sorted lines, so that the order of the rows does not matter."""
    text = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    return hashlib.sha256("\n".join(sorted(set(text.strip("\n").split("\n")))).encode()).hexdigest()


def find_waste(plan_path, waste_path):
    """Where the waste is told: what was given, else waste.csv beside the folder of the plan; None where there is none."""
    beside = Path(plan_path).resolve().parent.parent / "waste.csv" if plan_path else None
    return waste_path or (beside if beside and beside.exists() else None)


def evaluate(trials_path, out, plan_path=None, calib=None, partial=False, cost=None, formats=(), waste_path=None):
    """Evaluate the table, write every file to `out`, and return what the terminal summary needs. Raises InputError."""
    trials, notes = read_trials(trials_path)
    if plan_path:
        plan, more = read_plan(plan_path)
        trials, extra = add_missing(trials, plan)
        notes += more + extra
    else:
        notes.append("No plan was given: runs that left no row at all cannot be counted.")
    waste_path, waste = find_waste(plan_path, waste_path), None
    if waste_path:
        waste, more = read_waste(waste_path)
        notes += more
    else:
        notes.append("No waste.csv was given or found beside the plan's folder: what attempts used that were set aside is not known.")
    params, sha256 = read_params(calib)
    if params and not (trials["calib_sha256"] == sha256).any() and (trials["calib_sha256"] != "").any():
        notes.append(f"The calibration given (SHA-256 {sha256[:12]}…) is none that the table was made with; what is said of it may not hold here.")
    groups, extra = split_groups(trials)
    notes += extra
    if waste is not None:
        waste = share_waste(waste, groups)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{out}: cannot be made a folder ({e.strerror}); give another --out") from None
    report.remove_figures_of_groups(out)
    results = []
    for number, group in enumerate(groups, 1):
        aside = None
        if waste is not None:
            aside = {p: waste[np.array([run == (number - 1, p) for run in waste["run"]], bool)] for p in group.rows["policy"].unique()}
        predictors, paired, kept = rq1(group) if len(group.scored) else ([], [], {})
        r = {"group": group, "predictors": predictors, "paired": paired, "shares": rq2(group)}
        r |= {"configs": configs(group, partial, cost, aside), "retry": retry_budget(group), "cutoff": cutoff(group)}
        r["reasons"] = reasons(group, partial, aside)
        r["figures"] = report.draw_all(r, number, kept, out, formats)
        results.append(r)
    for name, key, first in (
        ("configs", "configs", CONFIG_COLUMNS),
        ("rq1_predictors", "predictors", PREDICTOR_COLUMNS),
        ("rq1_paired", "paired", PAIRED_COLUMNS),
        ("rq2_shares", "shares", SHARE_COLUMNS),
        ("retry_budget", "retry", RETRY_COLUMNS),
        ("energy_cutoff", "cutoff", CUTOFF_COLUMNS),
    ):
        write_csv(out / f"{name}.csv", [row for r in results for row in r[key]], first)
    summary = {"schema": 1, "fingerprint": fingerprint_of(trials_path), "notes": notes}
    summary["calibration_checks"] = [{k: c[k] for k in ("code", "severity", "text")} for c in params["checks"]] if params else None
    summary |= {"set_aside": None if waste is None else waste_totals(waste), "groups": []}
    for r in results:
        g = r["group"]
        entry = {**g.key, "group": g.name, "trajectories": len(g.scored), "tasks": int(g.scored["task"].nunique())}
        entry |= {"shares": {k: plain(v) for k, v in (report.overall_shares(r["shares"]) or {}).items()}}
        for of in report.CLOSURES:
            for which, stalled in (("", True), ("_without_stalled_calls", False)):
                c = report.closure(g, of, stalled)
                entry |= {f"closure_{of}{which}_{k}": plain(getattr(c, k, None)) for k in ("median", "median_abs", "mean_abs")}
                entry[f"closure_{of}{which}_n"] = c.n if c else 0
        entry["stalled_call"], entry["requested_durations"] = int(report.flagged(g.rows, report.STALLED).sum()), report.requested(g)
        entry["outcome_differs"], entry["idle_w"] = report.outcome_differs(g), report.idle_powers(g)
        entry["waste"] = {c: plain(v) for c, v in report.waste_of(r["configs"]).items()} | {"reasons": r["reasons"]}
        entry["configs"] = [{k: plain(v) for k, v in row.items()} for row in r["configs"]]
        summary["groups"].append(entry)
    write_atomic(out / "summary.json", json.dumps(summary, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    page = report.build_report(results, notes, params, cost or {}, summary, Path(trials_path).name)
    write_atomic(out / "report.html", page)
    return results, notes, params


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", required=True, type=Path, help="table of align_trial.py, one row per trajectory")
    parser.add_argument("--out", required=True, type=Path, help="folder for tables, figures and report.html")
    parser.add_argument("--plan", type=Path, help="plan.csv of the batch: planned runs without a row count as unscored")
    parser.add_argument("--partial", action="store_true", help="the batch still runs: planned runs without a row are pending, not unscored")
    parser.add_argument("--waste", type=Path, help="waste.csv of the batch (default: beside the folder of the plan, where there is one)")
    parser.add_argument("--calib", type=Path, help="folder with params.json, for the text on the method and its warnings")
    parser.add_argument("--carbon", type=float, help="grams of CO2 per kWh, adds carbon columns")
    parser.add_argument("--price", type=float, help="price of a kWh, adds price columns")
    parser.add_argument(
        "--pue", type=float, default=1.0, help="power usage effectiveness that carbon and price are multiplied by (default 1)"
    )
    parser.add_argument("--format", action="append", choices=["pdf", "svg"], default=[], help="write the figures in this format too")
    args = parser.parse_args(argv)
    if args.partial and not args.plan:
        parser.error("--partial needs --plan: without a plan nothing is known to be pending")
    for name in ("carbon", "price"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            parser.error(f"--{name}: found {value}, expected 0 or more")
    if not (math.isfinite(args.pue) and args.pue >= 1):
        parser.error(f"--pue: found {args.pue}, expected 1 or more")
    cost = {k: getattr(args, k) for k in ("carbon", "price") if getattr(args, k) is not None}
    if args.pue != 1 and not cost:
        parser.error("--pue scales carbon and price; give --carbon or --price with it")
    if cost:
        cost["pue"] = args.pue
    try:
        results, notes, params = evaluate(args.trials, args.out, args.plan, args.calib, args.partial, cost, args.format, args.waste)
    except InputError as e:
        print(f"evaluate.py: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"evaluate.py: {e.filename or args.out}: {e.strerror or e}", file=sys.stderr)
        return 1
    print(report.terminal_summary(results, notes, params, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
