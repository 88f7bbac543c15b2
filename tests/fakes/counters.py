"""Simulated stepping counters in virtual time: the truth that sampler and energylib are scored against.

    counter = SteppingCounter(seed=1, period_s=0.1, jitter_s=0.0007)
    clock = VirtualClock(counter, latency)
    clock.read()       # advances the clock by the read's length, returns the counter as of a moment inside the read
"""

import bisect
import gzip
import random


class SteppingCounter:
    """A counter (mJ) that follows `power(t)` watts but moves only at its steps.

    Steps lie at phase + k x period, each displaced by Gaussian jitter (not accumulated); `drift` is the relative change of the
    period over `duration_s`. `edges` holds the true times, `values[i]` what the counter shows from edges[i] on."""

    def __init__(self, seed, period_s=0.1, jitter_s=0.0007, drift=0.0, duration_s=60.0, power=None, start_mj=55_000_000):
        rng = random.Random(seed)
        grid, period, t = [], period_s, -rng.random() * period_s - 1.0
        while t < duration_s + 2.0:
            grid.append(t)
            period = period_s * (1 + drift * min(1.0, max(0.0, t / duration_s)))
            t += period
        self.edges = sorted(t + rng.gauss(0, jitter_s) for t in grid)
        integral = integrate(power or (lambda t: 125.0))
        total, before = 0.0, self.edges[0]
        self.values = []
        for edge in self.edges:
            total += integral(before, edge)
            before = edge
            self.values.append(start_mj + int(total * 1e3))

    def at(self, t):
        return self.values[max(0, bisect.bisect_right(self.edges, t) - 1)]

    def true_edge(self, value):
        """Time at which the counter first showed `value`."""
        return self.edges[bisect.bisect_left(self.values, value)]


def integrate(power, resolution_s=0.0005):
    """joules(a, b) of power(t); exact when `power` has an attribute `joules`."""
    exact = getattr(power, "joules", None)
    if exact:
        return exact

    def joules(a, b):
        n = max(1, round((b - a) / resolution_s))
        return sum(power(a + (b - a) * (i + 0.5) / n) for i in range(n)) * (b - a) / n

    return joules


class RecordedCounter:
    """The recorded polls of a real GPU (t0, t1, mj) as a counter: each step lies in the middle of the two polls around it."""

    def __init__(self, path):
        with gzip.open(path, "rt") as f:
            rows = [line.split(",") for line in f.read().splitlines()[1:]]
        polls = [(float(r[0]), float(r[1]), int(r[2])) for r in rows]
        self.begin = polls[0][0]
        self.edges, self.values, self.halves = [-1.0], [polls[0][2]], [1.0]
        for (a0, _, a), (_, b1, b) in zip(polls, polls[1:], strict=False):
            if b != a:
                self.edges.append((a0 + b1) / 2 - self.begin)
                self.halves.append((b1 - a0) / 2)
                self.values.append(b)
        self.duration_s = polls[-1][1] - self.begin

    at = SteppingCounter.at
    true_edge = SteppingCounter.true_edge


class VirtualClock:
    """Time that passes only in reads and sleeps. `latency(rng)` gives a read's length; the counter is seen `where` of the way
    through it (0 begin, 1 end, None: anywhere)."""

    def __init__(self, counter, latency, seed=0, where=None, wake_s=0.00008):
        self.counter, self.latency, self.where, self.wake_s = counter, latency, where, wake_s
        self.rng, self.t, self.reads = random.Random(seed), 0.0, []

    def now(self):
        return self.t

    def sleep_until(self, t):
        self.t = max(self.t, t) + self.wake_s * self.rng.random()

    def read(self):
        length = self.latency(self.rng)
        share = self.rng.random() if self.where is None else self.where
        value = self.counter.at(self.t + share * length)
        self.reads.append(self.t)
        self.t += length
        return value


def latency_like_h200(median_s):
    """Lengths of reads: mostly near the median, one in fifty several times as long (3 ms median, 12 ms at the 99th percentile)."""

    def draw(rng):
        if rng.random() < 0.02:
            return median_s * (2.5 + 3 * rng.random())
        return median_s * rng.lognormvariate(0, 0.08)

    return draw
