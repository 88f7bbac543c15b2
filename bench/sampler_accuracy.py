"""How well the energy of single calls is measured: a simulated GPU whose true energy is known, four ways to read its counter.

    python3 bench/sampler_accuracy.py                       # bench/sampler_accuracy.csv, bench/sampler_accuracy.png, bench/sampler_steps.csv
    python3 bench/sampler_accuracy.py --calls 50 --out /tmp

Truth: idle at 125 W, calls of 0.2 to 5 s at 200 to 700 W at random times, a counter in whole millijoules that steps every
100.000 ms with 0.7 ms of jitter, reads of 3 ms (one in fifty 8 to 16 ms) that see the counter anywhere inside them: what an H200 shows.

  naive    10 Hz rows, the value stamped with the row's time, interpolated
  zeus     the counter read at the two ends of the window (Zeus's way for Volta and later), difference taken
  edges    our sampler's steps, energy spread evenly inside each step
  phase    our sampler's steps, steps that a call's edge cuts apportioned by expected power (energylib's phase-aware form)

Error of the energy above idle: bias = mean signed error, mae = mean absolute error, both in percent of the true energy above
idle; `inside_2sd`: share of the calls whose true energy lies within two stated standard deviations (edges, phase).

The second table scores step tracking alone over periods, jitter, drift and read lengths: median half-width of the stated
interval, its limit max(5 ms, half the median read + 1 ms), the share of true steps inside the interval, reads per second (of the
counter that took most). The longest reads leave no room: a few settings with reads of 8 and 12 ms stay just outside, and counters of 20 ms whose
reads of 12 ms see them anywhere are read in pairs, half an interval 12 ms (see sampler.py).
`where` is the moment inside a read at which the counter is seen: 0 begin, 1 end, any: anywhere.
"""

import argparse
import bisect
import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

IDLE_W = 125.0
DURATIONS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
POWERS_W = (200.0, 300.0, 500.0, 700.0)


class Load:
    """Power over time: idle, with calls; `joules(a, b)` is exact."""

    def __init__(self, calls, watts):
        self.calls, self.watts = calls, watts
        self.begins = [a for a, _ in calls]
        self.above = [0.0]
        for a, b in calls:
            self.above.append(self.above[-1] + (b - a) * (watts - IDLE_W))

    def _until(self, t):
        k = bisect.bisect_right(self.begins, t)
        over = 0.0
        if k:
            a, b = self.calls[k - 1]
            over = max(0.0, b - t) * (self.watts - IDLE_W)
        return IDLE_W * t + self.above[k] - over

    def __call__(self, t):
        k = bisect.bisect_right(self.begins, t)
        return self.watts if k and t < self.calls[k - 1][1] else IDLE_W

    def joules(self, a, b):
        return self._until(b) - self._until(a)


def measure(duration_s, watts, calls, seed):
    """{method: (joules array, sd array or None)} and the true joules above idle of each call."""
    import random

    import numpy as np
    from fakes.counters import SteppingCounter, VirtualClock, latency_like_h200

    from energylib import Samples
    from sampler import Tracker

    rng = random.Random(seed)
    windows, t = [], 5.0
    for _ in range(calls):
        t += 0.8 + 0.7 * rng.random()
        windows.append((t, t + duration_s))
        t += duration_s
    end = t + 2.0
    load = Load(windows, watts)
    counter = SteppingCounter(seed, duration_s=end, power=load)
    windows = np.array(windows)

    clock, found = VirtualClock(counter, latency_like_h200(0.003), seed), []
    tracker = Tracker(clock.read, clock.now, clock.sleep_until, lambda *step: found.append(step), stopped=lambda: clock.t > end)
    tracker.run()
    value, edge, half, at = np.array(found).T
    columns = {"gpu0_mj": value, "gpu0_edge": edge, "gpu0_edge_err": half}
    samples = Samples(at, at, columns, {"hz": 10}, [], domains=["gpu0"], source={"gpu0": "nvml"}, scope={"gpu0": "gpu"})
    idle = IDLE_W * duration_s
    result = {}
    e = samples.energy(windows[:, 0], windows[:, 1])
    result["edges"] = (e.joules["gpu0"] - idle, e.err["gpu0"])
    e = samples.energy(windows[:, 0], windows[:, 1], calls=windows, idle_w={"gpu0": IDLE_W})
    result["phase"] = (e.joules["gpu0"] - idle, e.err["gpu0"])

    rows_t, rows_v, plain = [], [], VirtualClock(counter, latency_like_h200(0.003), seed + 1)
    while plain.t < end:
        rows_t.append(plain.t)
        rows_v.append(plain.read() * 1e-3)
        plain.sleep_until(rows_t[0] + 0.1 * len(rows_t))
    naive = np.interp(windows, rows_t, rows_v)
    result["naive"] = (naive[:, 1] - naive[:, 0] - idle, None)

    # at a window's begin the read ends before the work begins; at its end it begins after the work
    draw, lat = random.Random(seed + 2), latency_like_h200(0.003)
    ends = []
    for a, b in windows:
        first, last = lat(draw), lat(draw)
        ends.append(1e-3 * (counter.at(b + draw.random() * last) - counter.at(a - first * draw.random())))
    result["zeus"] = (np.array(ends) - idle, None)
    return result, duration_s * (watts - IDLE_W), tracker.reads / end


def accuracy(calls):
    """Rows of the first table."""
    import numpy as np

    rows = []
    for duration in DURATIONS_S:
        for watts in POWERS_W:
            result, true, reads = measure(duration, watts, calls, seed=round(duration * 10 + watts))
            for method in ("naive", "zeus", "edges", "phase"):
                joules, sd = result[method]
                error = joules - true
                inside = None if sd is None else round(float(np.mean(np.abs(error) <= 2 * sd)), 3)
                se = float(np.std(error, ddof=1) / np.sqrt(len(error)))
                rows.append(
                    {
                        "duration_s": duration, "power_w": watts, "method": method, "n": len(error), "above_idle_j": round(true, 2),
                        "bias_pct": round(100 * float(error.mean()) / true, 3), "bias_se_pct": round(100 * se / true, 3),
                        "mae_pct": round(100 * float(np.abs(error).mean()) / true, 3), "mae_j": round(float(np.abs(error).mean()), 3),
                        "inside_2sd": inside, "reads_per_s": round(reads, 1) if method in ("edges", "phase") else None,
                    }
                )  # fmt: skip
    return rows


def tracking(seconds, runs):
    """Rows of the second table."""
    import numpy as np
    from fakes.counters import RecordedCounter, SteppingCounter, VirtualClock, latency_like_h200

    from sampler import Tracker

    def one(counters, latency, where, duration):
        """Scores of one tracker per counter, their steps taken together."""
        halves, inside, trackers = [], [], []
        for seed, counter in enumerate(counters):
            clock, found = VirtualClock(counter, latency, seed, where), []
            tracker = Tracker(
                clock.read, clock.now, clock.sleep_until, lambda *s, f=found: f.append(s), stopped=lambda c=clock: c.t > duration
            )
            tracker.run()
            inside += [abs(counter.true_edge(value) - edge) <= half + 1e-9 for value, edge, half, _ in found]
            halves += [half for _, _, half, _ in found]
            trackers.append(tracker)
        median = float(np.median([np.median(t.latency) for t in trackers]))
        return {
            "half_ms": round(1e3 * float(np.median(halves)), 2), "limit_ms": round(max(5.0, 500 * median + 1), 2),
            "inside": round(float(np.mean(inside)), 4), "reads_per_s": round(max(t.reads for t in trackers) / duration, 1),
            "steps_per_s": round(len(halves) / duration / len(trackers), 2), "locks": max(t.locks for t in trackers), "n": len(halves),
        }  # fmt: skip

    rows = []
    for period in (0.02, 0.05, 0.1):
        for latency in (0.0001, 0.001, 0.003, 0.004, 0.006, 0.008, 0.012):
            for drift in (0.0, 0.01):
                for where in (None, 0.0, 0.5, 1.0):
                    counters = [SteppingCounter(seed, period, 0.0007, drift, seconds) for seed in range(runs)]
                    scores = one(counters, latency_like_h200(latency), where, seconds)
                    name = "any" if where is None else f"{where:g}"
                    rows.append(
                        {
                            "counter": "simulated",
                            "period_ms": period * 1e3,
                            "read_ms": latency * 1e3,
                            "drift": drift,
                            "where": name,
                            **scores,
                        }
                    )
    recorded = RecordedCounter(ROOT / "tests/data/h200_qwen3_30b_a3b/nvml_poll.csv.gz")
    scores = one([recorded], latency_like_h200(0.003), None, min(recorded.duration_s, 340))
    rows.append({"counter": "recorded H200 polls", "period_ms": 100.0, "read_ms": 3.0, "drift": None, "where": "any", **scores})
    return rows


def plot(rows, path):
    """Bias and mean absolute error over the length of a call, per method, over all powers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    style = {
        "naive": ("10 Hz time stamps", "o", ":"), "zeus": ("read at both ends", "s", "-."),
        "edges": ("located steps, spread evenly", "^", "--"), "phase": ("located steps, apportioned (ours)", "D", "-"),
    }  # fmt: skip
    shades = {"naive": "0.65", "zeus": "0.45", "edges": "0.25", "phase": "black"}
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.0), sharex=True)
    for method, (label, marker, line) in style.items():
        mine = [r for r in rows if r["method"] == method]
        for axis, key in zip(axes, ("bias_pct", "mae_pct"), strict=True):
            by_length = [[r[key] for r in mine if r["duration_s"] == d] for d in DURATIONS_S]
            middle = np.array([np.mean(v) for v in by_length])
            spread = np.array([[m - min(v), max(v) - m] for m, v in zip(middle, by_length, strict=True)]).T
            axis.errorbar(DURATIONS_S, middle, spread, label=label, marker=marker, ls=line, ms=4, lw=1.2, capsize=2, color=shades[method])
    axes[0].axhspan(-0.5, 0.5, color="0.9", zorder=0)
    axes[0].set(ylabel="mean signed error\n(% of energy above idle)", xlabel="length of the call (s)", xscale="log")
    axes[0].set_yscale("symlog", linthresh=0.5)
    axes[1].set(ylabel="mean absolute error\n(% of energy above idle)", xlabel="length of the call (s)", yscale="log")
    for axis in axes:
        axis.set_xticks(DURATIONS_S, [f"{d:g}" for d in DURATIONS_S])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_yticks([-30, -10, -3, -0.5, 0, 0.5], ["-30", "-10", "-3", "-0.5", "0", "0.5"])
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncol=4, fontsize=7, frameon=False)
    figure.savefig(path, dpi=200, metadata={"Software": None})


def save(rows, path):
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="calls per length and power (default 200)")
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated seconds per counter of the second table (default 40)")
    parser.add_argument("--runs", type=int, default=6, help="counters per row of the second table (default 6)")
    parser.add_argument("--out", default=str(ROOT / "bench"), help="folder (default bench/)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    rows = accuracy(args.calls)
    save(rows, out / "sampler_accuracy.csv")
    plot(rows, out / "sampler_accuracy.png")
    for r in rows:
        print(
            "{duration_s:4g} s {power_w:4g} W  {method:6s} bias {bias_pct:8.3f} % (se {bias_se_pct:.3f})  mae {mae_pct:7.3f} %".format(**r)
        )
    steps = tracking(args.seconds, args.runs)
    save(steps, out / "sampler_steps.csv")
    short = [r for r in steps if r["half_ms"] > r["limit_ms"] or r["inside"] < 0.99 or r["reads_per_s"] > 30]
    print(f"steps: {len(steps)} settings, {len(steps) - len(short)} within limit, 99 % inside, at most 30 reads a second")
    for r in short:
        print(
            "  {period_ms:g} ms, reads {read_ms:g} ms seen {where}, drift {drift}: {half_ms} ms (limit {limit_ms}), inside {inside}".format(
                **r
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
