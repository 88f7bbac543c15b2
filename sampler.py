"""Read the machine's cumulative energy counters into a CSV, and know when each counter stepped.

    python3 sampler.py -o run/samples.csv                             # every GPU of CUDA_VISIBLE_DEVICES and every CPU package
    python3 sampler.py -o run/samples.csv --gpus 2,3 --duration 60
    python3 sampler.py -o run/samples.csv --cpu-model 0.74:3.5        # no counters here: estimate, labelled "model"

It runs until --duration is over or SIGTERM or SIGINT comes, and ends with exit code 0. It has begun when the CSV has a data row.
Beside NAME.csv it writes NAME.meta.json (what every column is; a footer at the end says how well it went) and state.csv
(NAME.state.csv unless NAME is "samples"): temperature, clocks, throttle reasons, utilisation, once a second.

Sources
  nvml        GPU energy counter (Volta and later), millijoules. It steps about every 0.1 s: a thread per GPU learns period and
              phase and reads just before and just after each expected step, 20 to 30 reads a second. gpu<i>_edge is the step's
              time, gpu<i>_edge_err half the interval it is known to lie in.
  nvml-power  no energy counter: power readings (gpu<i>_w), integrated by energylib
  rapl        CPU packages and their DRAM through Linux powercap, raw microjoules. Needs read access (sudo_setup.sh gives it).
  model       only when asked for with --cpu-model and no RAPL can be read: watts per logical CPU, idle and busy, times busy time
              of /proc/stat. An estimate: its columns are named cpu<k>_est_uj. Without a value --cpu-model takes 0.74:3.5,
              the averages per vCPU of Cloud Carbon Footprint for AWS (SPECpower; GCP 0.71:4.26, Azure 0.78:3.76):
              https://www.cloudcarbonfootprint.org/docs/methodology/

gpu<i> counts the GPUs in use, in the order of --gpus or CUDA_VISIBLE_DEVICES, as CUDA does; the sidecar has their UUIDs.
An unreadable value is an empty cell. Exit code 2: nothing to measure, or bad arguments; 1: failure at run time.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import resource
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

CPU_MODEL_DEFAULT = "0.74:3.5"  # W per logical CPU, idle and busy: Cloud Carbon Footprint, AWS averages (see the docstring)
CPU_MODEL_SOURCE = "https://www.cloudcarbonfootprint.org/docs/methodology/"
POWERCAP = "/sys/class/powercap"
NOT_READABLE = "run `sudo bash sudo_setup.sh` (RAPL is root-only since CVE-2020-8694)"


class SamplerError(Exception):
    """Nothing to measure or a bad argument; the message is one line for the user."""


_said = set()


def say(text, key=None):
    """One line on stderr; with `key` only the first time."""
    if key is not None:
        if key in _said:
            return
        _said.add(key)
    print(f"sampler.py: {text}", file=sys.stderr, flush=True)


# --- counter steps -----------------------------------------------------------------------------------------------------------


class ReadFailed(Exception):
    """A counter could not be read, retries included."""


class Tracker:
    """Finds the steps of one cumulative counter with few reads.

    `read()` returns the counter or raises OSError/ValueError; `now()` is the monotonic clock, `sleep_until(t)` waits; both can be
    simulated. `emit(value, edge, half, at)` gets every step found: value, time of the step and half the width of the interval it
    lies in (both seconds, monotonic), time at which the value was read. `between()` is called once per step, when no read is due.

    A read begun at t0 and ended at t1 saw the counter somewhere in between. Reads that begin before the flip time F (step time
    minus the unknown delay inside a read) see the old value, later ones the new one; the step lies in [F, F + latency]. F, the
    period and its change are estimated with their covariance from these yes-or-no answers (a Gaussian filter with probit likelihood).
    Short reads bracket each step: one read ends up before it, the next after it, and the interval is certain. When reads are so
    long that two of them would be too wide (median above PROBE_S), one read per step is begun at F: what it sees bounds the step
    on one side with certainty, F bounds it on the other.

    Where the limit lies: what a read of length L saw may be L old or brand new, and no series of reads can tell, so no interval
    is narrower than L. F adds its scatter: with a counter that steps as regularly as an H200's (0.7 ms), half an interval is about
    L/2 + 1 ms. A step that scatters more than JITTER_S is covered less often than 99 % when reads are that long.

    A counter that steps every 20 ms (below FAST_S) leaves most of its steps unseen at 30 reads a second, and with long reads a prediction
    that has slipped gets nearly the answers of a right one. What tells are pairs of reads begun less than a period apart: they differ
    when a flip lies between their begins. So the search reads back to back and takes the period and the flip that make its answers
    most likely (_fold); each probe is the middle of three reads, back to back; and every second the latest pairs are folded over the
    period again (_check): where they say otherwise the flip moves there, and until they agree, only what two reads enclose is said.
    Where the moment inside such a read varies at random over more than half a period, flips cannot be told apart: then the counter
    is read in pairs until the value changes, certain, seven to ten steps a second, half an interval L.
    """

    PROBE_S = 0.0036  # two reads of this length still bracket a step to +-5 ms
    FAST_S = 0.04  # a counter that steps faster, with reads longer than PROBE_S, is searched and followed by pairs of reads
    SEARCH, GAIN = 100, 5.0  # so many reads for that search, and by so much the log-likelihood must be better than that of no period
    PAIRS, CHECK = 60, 20  # so many pairs are kept, and looked at again after so many new ones
    AGREES, MOVES = 2.0, 5.0  # a flip elsewhere that is more likely by so much (log) raises doubt, or is taken
    FAST_SETTLED_S, FAST_WANDER = 0.0035, 0.04  # instead of SETTLED_S, and a factor on WANDER (steps are closer together)
    ALIASED = 0.5  # when more than this share of the reads in a row see a new value, steps cannot be told from each other
    # A probed step's interval is WIDTH_S wide, or SPARE_S wider than the usual read; wider when in doubt. What read lengths scatter (SPREAD
    # of the middle half of them) is taken off, so that half of the intervals stay within SPARE_S although the usual length is an estimate.
    WIDTH_S, SPARE_S, SPREAD = 0.0098, 0.00198, 0.15
    JITTER_S = 0.0007  # an H200's; scatter of F beyond this is that of the delay inside a read, which the read's length covers
    ENOUGH, ENOUGH_OLD = 1.8, 2.15  # standard deviations of F that such an interval must leave before F, and behind F + latency
    BEHIND_S = 0.0014  # and so much behind the end of a read that saw the old value
    DOUBTED = 0.15  # running share of surprises above which the flip says nothing about a step any more
    STREAK = 7  # so many equal answers in a row: F is less certain than thought
    SETTLED_S = 0.0015
    # Reads: a reserve for finding the period, then at most so many per second
    BURST, RATE = 110, 27.0
    AIM_S = 0.00006  # so much after the expected flip a single read is begun
    NEAREST_S = 0.0004  # shortest distance kept from the expected flip
    MIN_TRACK_S = 0.08  # faster counters: only every n-th step is located
    NOISE_S = (0.0003, 0.004)  # scatter of F: the counter's jitter and the delay inside a read
    SHARES = (0.0, 0.5, 1.0)  # parts of a read's length after which the counter may be seen
    # How flip, period and its change may wander from step to step (variances); a period that changes by 1 % in 40 s bends by 2.5 us a step
    BEND_S, WANDER_FLIP, WANDER, WANDER_BEND = 2e-6, 5e-10, 5e-13, 5e-18

    def __init__(self, read, now, sleep_until, emit, tick_s=0.1, stopped=lambda: False, between=lambda: None):
        self.read, self.now, self.sleep_until, self.emit = read, now, sleep_until, emit
        self.tick_s, self.stopped, self.between = tick_s, stopped, between
        self.period = None
        self.latency = deque(maxlen=301)
        self.reads = self.errors = self.failures = self.locks = self.backward = self.steps = 0
        self.halves = deque(maxlen=2001)
        self.last = None  # (t0, t1, value) of the latest read
        self.last_ok = None
        self.tokens, self.refilled = float(self.BURST), None
        self._median = None
        self.pairs, self.unchecked, self.agrees, self.narrow = deque(maxlen=self.PAIRS), 0, True, 0.5

    # reading

    def _read(self):
        """One read with two quick retries -> (t0, t1, value). Raises ReadFailed."""
        for attempt in range(3):
            if attempt:
                self.sleep_until(self.now() + 0.002)
            self.reads += 1
            t0 = self.now()
            self.tokens -= 1
            try:
                value = self.read()
            except (OSError, ValueError) as e:
                self.errors += 1
                error = e
                continue
            t1 = self.now()
            self.latency.append(t1 - t0)
            self._median = None
            if self.last is not None and value < self.last[2]:
                self.backward += 1
            self.last, self.last_ok = (t0, t1, value), t1
            return self.last
        self.failures += 1
        raise ReadFailed(str(error))

    def _latency(self):
        if self._median is None:
            recent = sorted(list(self.latency)[-41:])
            self._median = recent[len(recent) // 2]
        return self._median

    def _wait(self, t):
        """Sleep until t, later when the budget of reads is spent."""
        now = self.now()
        if self.refilled is not None:
            self.tokens = min(float(self.BURST), self.tokens + (now - self.refilled) * self.RATE)
        self.refilled = now
        if self.tokens < 1:
            t = max(t, now + (1 - self.tokens) / self.RATE)
        if t > now:
            self.sleep_until(t)

    def _found(self, value, lo, hi):
        half = (hi - lo) / 2
        self.steps += 1
        self.halves.append(half)
        self.emit(value, (lo + hi) / 2, half, self.last[1])

    # the loop

    def run(self):
        """Until stopped() is true: find the period, follow the steps; begin again when they are lost."""
        pause = 0.05
        while not self.stopped():
            try:
                if self._acquire():
                    self.locks += 1
                    while not self.stopped() and self._follow():
                        pause = 0.05
            except ReadFailed:
                self.last = None
                self.sleep_until(self.now() + pause)
                pause = min(0.25, pause * 2)

    def _acquire(self):
        """Poll until the period is known. True: locked (period, flip). False: not yet (the caller calls again)."""
        flips = []  # (begin of the last read that saw the old value, begin and end of the first that saw the new)
        polls, told = [], -math.inf  # (read, next read) of all; when a step of a fast counter was last told: one a tick is enough
        # reads held back by the budget would miss steps and see a new value every time
        self._wait(self.now() + (60 - self.tokens) / self.RATE)
        begin = old = self._read()
        seen, changes, fast, quiet = 1, 0, False, begin[0]
        while not self.stopped():
            # close together at first: a counter that steps twice in the first 12 reads is a fast one
            spacing = max(0.004 if seen < 12 or fast else 0.007, self._latency())
            if not flips and seen > 300:
                spacing = 0.04  # it does not step at all, or less than every few seconds
            self._wait(old[0] + spacing)
            new = self._read()
            seen += 1
            polls.append((old, new))
            if new[2] != old[2]:
                flips.append((old[0], new[0], new[1]))
                changes += 1
                if not fast or old[0] - told >= self.tick_s:
                    self._found(new[2], old[0], new[1])
                    told = old[0]
            if new[2] != old[2] or new[0] - quiet > 2 * self.tick_s:  # a counter that stands still must not hide the power
                quiet = new[0]
                self.between()
            old = new
            fast |= seen == 12 and len(flips) >= 2
            by_pairs = fast and self._latency() >= self.PROBE_S and old[0] - begin[0] < self.FAST_S * changes
            if seen >= 24 and changes > (0.85 if by_pairs else self.ALIASED) * seen:
                return self._fast(changes < 0.85 * seen)
            if by_pairs and seen >= self.SEARCH:
                return self._fold(polls) or self._fast(True)
            if new[0] - old[0] > 0.03 + 2 * spacing:
                seen, changes, flips, polls, begin = 0, 0, [], [], new  # the budget is spent after all
            if fast and new[1] - old[0] > spacing + 0.6 * self._latency() + 0.002:
                flips = []  # held up: steps of a fast counter may have been missed
            enough = 7 if fast or self._latency() > self.PROBE_S else 4
            if not by_pairs and seen >= 24 and len(flips) >= enough and self._fit(flips):
                return True
            if len(flips) >= 16:
                flips = flips[-8:]
        return False

    def _fit(self, flips):
        """Period and next flip from the flips of the search, if they agree with a constant period."""
        middle = [(a + b) / 2 for a, b, _ in flips]
        width = max(b - a for a, b, _ in flips)
        gaps = [b - a for a, b in zip(middle, middle[1:], strict=False)]
        base = sorted(gaps)[len(gaps) // 4]
        # either every step was seen, or a slow read made some be missed: then gaps are multiples of the shorter ones
        best = None
        for counts in ([1] * len(gaps), [max(1, round(gap / base)) for gap in gaps]):
            index = [sum(counts[:k]) for k in range(len(middle))]
            n = len(index)
            mean_i, mean_t = sum(index) / n, sum(middle) / n
            spread = sum((i - mean_i) ** 2 for i in index)
            period = sum((i - mean_i) * (t - mean_t) for i, t in zip(index, middle, strict=True)) / spread
            worst = max(abs(t - mean_t - period * (i - mean_i)) for i, t in zip(index, middle, strict=True))
            if best is None or worst < 0.7 * best[0]:
                best = worst, period, mean_t, mean_i, spread, index
        worst, period, mean_t, mean_i, spread, index = best
        n = len(index)
        if worst > 0.8 * width or period < 0.9 * width:
            return False
        sd = width / 3
        slope, ahead = sd**2 / spread, index[-1] - mean_i
        self._lock(period, mean_t + period * ahead, sd**2 / n + slope * ahead**2, slope * ahead, slope, 0.0007)
        return True

    def _lock(self, period, flip, flip_var, both, period_var, noise):
        """Follow from here: period, next flip, their variances and covariance, scatter of the flip."""
        self.period, self.flip, self.noise = period, flip, noise
        # covariance of (flip, period, change of the period per step)
        self.cov = [flip_var, both, period_var, 0.0, 0.0, self.BEND_S**2]
        self.bend, self.fit = 0.0, [0.0] * len(self.SHARES)
        self.lost, self.astray, self.fitted, self.turn, self.doubt = 0, 0.0, period, 0, 0
        self.streak, self.answer = 0, None
        self.pairs.clear()
        self.unchecked, self.agrees, self.narrow = 0, True, 0.5

    # pairs of reads, for fast counters with long reads

    def _pair(self, a, b):
        """(begins of two reads, whether they differ), None when one was held up: it may have seen anything."""
        held = 1.3 * self._latency()
        return None if max(a[1] - a[0], b[1] - b[0], b[0] - a[0]) > held else (a[0], b[0], a[2] != b[2])

    @staticmethod
    def _likelihood(pairs, flip, period, sd):
        """Logarithm of the chance of the answers of `pairs`; sd: scatter of the flip."""
        total, root = 0.0, sd * math.sqrt(2)
        for a, b, changed in pairs:
            since = (a - flip) % period
            p = 0.5 * (math.erfc(since / root) + math.erfc((period - since - (b - a)) / root))
            p = min(max(p, 0.03), 0.97)
            total += math.log(p if changed else 1 - p)
        return total

    def _fold(self, polls):
        """Period and flip that make the answers of reads taken back to back most likely: a coarse grid, then a fine one."""
        latency, end = self._latency(), polls[-1][1][1]
        pairs = [(p[0] - end, p[1] - end, p[2]) for p in (self._pair(a, b) for a, b in polls) if p]
        changes = sum(changed for *_, changed in pairs)
        if not 0 < changes < len(pairs):
            return False
        guess = sum(b - a for a, b, _ in pairs) / changes
        grid = ((guess * (1 + 0.003 * i), guess * j / 12) for i in range(-40, 41) for j in range(12))
        _, period, flip = max((self._likelihood(pairs, -at, period, 0.2 * latency), period, -at) for period, at in grid)
        spreads = (0.0009, 0.1 * latency, 0.15 * latency, 0.29 * latency)  # the last one: seen anywhere inside the read
        fine = [(period * (1 + 0.0006 * i), flip + period * j / 48, sd) for i in range(-7, 8) for j in range(-6, 7) for sd in spreads]
        found = [(self._likelihood(pairs, at, p, sd), p, at, sd) for p, at, sd in fine]
        best, period, flip, sd = max(found)
        share = changes / len(pairs)
        chance = sum(math.log(share if changed else 1 - share) for *_, changed in pairs)
        settled = max(x[0] for x in found if x[3] < spreads[-1])
        if best - chance < self.GAIN or (best - settled > self.AGREES and latency > 0.5 * period):
            return False
        weights = [(math.exp(value - best), p - period, at - flip) for value, p, at, _ in found if value > best - 8]
        total = sum(w for w, _, _ in weights)
        p, f = (sum(x[0] * x[k] for x in weights) / total for k in (1, 2))
        vp, vf = (sum(x[0] * (x[k] - m) ** 2 for x in weights) / total for k, m in ((1, p), (2, f)))
        both = sum(w * (x - p) * (y - f) for w, x, y in weights) / total
        period, flip_var = period + p, vf + (period / 48) ** 2
        if flip_var > self.SETTLED_S**2:  # the covariance shrinks along, or it would be none
            both *= self.SETTLED_S / math.sqrt(flip_var)
            flip_var = self.SETTLED_S**2
        self._lock(period, end + flip + f, flip_var, both, vp + (0.0003 * period) ** 2, min(max(sd, self.JITTER_S), self.NOISE_S[1]))
        return True

    def _check(self, *reads):
        """Take in reads in a row; every CHECK pairs ask all that are kept whether the flip is where it is thought to be."""
        new = [p for p in (self._pair(a, b) for a, b in zip(reads, reads[1:], strict=False)) if p]
        self.pairs.extend(new)
        self.unchecked += len(new)
        if self.unchecked < self.CHECK or len(self.pairs) < self.PAIRS // 2:
            return
        self.unchecked = 0
        pairs = [(a - self.flip, b - self.flip, changed) for a, b, changed in self.pairs]
        turn = self.period**2 / 8 / (pairs[-1][1] - pairs[0][0])  # a change of the period that moves the oldest flips by an eighth
        found = []
        for sd in (0.0012, 0.29 * self._latency()):
            for period in (self.period - turn, self.period, self.period + turn):
                found += [(self._likelihood(pairs, at, period, sd), at) for at in (self.period * (j / 24 - 0.5) for j in range(24))]
        best, at = max(found)
        here = max(value for value, at in found if abs(at) < self.period / 15)
        self.agrees = best - here < self.AGREES
        if best - here > self.MOVES:
            self.flip += at
            self.cov[0] = max(self.cov[0], (self.period / 24) ** 2)
            self.astray = 0.0

    def _advance(self, skip):
        """The filter's prediction for `skip` steps ahead."""
        pp, pt, tt, pb, tb, bb = self.cov
        k, h = skip, skip * skip / 2
        calm = self.FAST_WANDER if self._paired() else 1.0
        p, q, r = pp + k * pt + h * pb, pt + k * tt + h * tb, pb + k * tb + h * bb
        u, v = tt + k * tb, tb + k * bb
        wander_flip, wander, wander_bend = (k * calm * x for x in (self.WANDER_FLIP, self.WANDER, self.WANDER_BEND))
        self.cov = [p + k * q + h * r + wander_flip, q + k * r, u + k * v + wander, r, v, bb + wander_bend]
        self.flip += k * self.period + h * self.bend
        self.period += k * self.bend

    def _saw(self, read, new):
        """`read` saw the new value or still the old one: update flip, period, covariance, noise."""
        t0, t1, _ = read
        longer = t1 - t0 - self._latency()
        if longer > 0.5 * self._latency():
            if new:
                return  # a read held up somewhere: that it saw the new value says little about its begin
            longer = 0.0
        pp, pt, tt, pb, tb, bb = self.cov
        v = math.sqrt(pp + self.noise**2)
        side = -1.0 if new else 1.0
        # Where inside a read the counter is seen moves F with the read's length, by a share of it. The share that explains the
        # answers best is taken; it says nothing about the part of the delay that does not vary, so intervals do not rest on it.
        for k, share in enumerate(self.SHARES):
            tail = 0.5 * math.erfc(-side * (self.flip - t0 - share * longer) / v / math.sqrt(2))
            self.fit[k] = 0.99 * self.fit[k] + math.log(max(tail, 1e-3))
        share = self.SHARES[self.fit.index(max(self.fit))]
        u = side * (self.flip - t0 - share * longer) / v
        tail = 0.5 * math.erfc(-u / math.sqrt(2))
        r = math.exp(-u * u / 2) / math.sqrt(2 * math.pi) / tail if u > -6 else -u
        shrink, step = r * (r + u) / (v * v), side * r / v
        self.flip += step * pp
        self.period += step * pt
        self.bend += step * pb
        self.cov = [
            pp - shrink * pp * pp, pt - shrink * pp * pt, tt - shrink * pt * pt,
            pb - shrink * pp * pb, tb - shrink * pt * pb, bb - shrink * pb * pb,
        ]  # fmt: skip
        lowest, highest = self.NOISE_S
        self._surprised(u < -2)
        if u < -1:  # one answer in six or less
            self.noise = min(highest, self.noise * 1.2)
        elif 1 < u < 2.5:
            self.noise = max(lowest, self.noise * 0.98)

    def _fast(self, pairs):
        """The counter changes with every read: the read's own time is the step, one read a tick. `pairs`: it changes with most
        reads, because a read takes nearly as long as a step: read on until it changes, the step lies in the last two reads."""
        self.period = None
        due = self.now()
        for _ in range(round((300 if pairs else 30) / self.tick_s)):  # then look again
            if self.stopped():
                break
            due = max(due + self.tick_s, self.now())
            # a pair that is begun must not wait for the budget in the middle
            self._wait(max(due, self.now() + (6 - self.tokens) / self.RATE) if pairs else due)
            new = old = self._read()
            if pairs:
                old, new = self._later(old, old[1] + self.tick_s, 0.0, 0.0) or (None, None)
            if new is not None:
                self._found(new[2], old[0], new[1])
            self.between()
        return False

    def _again(self, new):
        """The same answer many times in a row: F is less certain than thought."""
        self.streak = self.streak + 1 if new == self.answer else 1
        self.answer = new
        if self.streak >= self.STREAK:
            self.cov[0] += (0.5 * self.noise) ** 2
            self.cov[2] += (0.05 * self.noise) ** 2

    def _surprised(self, yes):
        """Remember how often the step was not where it should have been."""
        self.astray += 0.1 * (yes - self.astray)

    def _paired(self):
        return self.period < self.FAST_S and self._latency() >= self.PROBE_S

    def _follow(self):
        """Locate the next step. False when the counter was lost."""
        skip = max(1, round(max(self.tick_s, self.MIN_TRACK_S) / self.period - 0.05)) if self.period < 0.95 * self.tick_s else 1
        latency = self._latency()
        # fresh from the search the flip is known to several milliseconds: bracket every step until it is known better
        settled_s = self.FAST_SETTLED_S if self._paired() else self.SETTLED_S
        settled = self.cov[0] < settled_s**2
        probe = latency >= self.PROBE_S and settled
        if not settled:
            skip = 1
        pp, pt, tt = self.cov[:3]
        while skip > 1 and pp + 2 * skip * pt + skip * skip * tt > settled_s**2:  # too far ahead to know which step it is
            skip -= 1
        reach = max(self.NEAREST_S, 1.5 * math.sqrt(self.cov[0] + self.noise**2))
        lead = reach + (1.2 * latency + 0.0015 if skip > 1 and probe else 0.0)
        every = skip
        while self.flip + skip * self.period - lead < self.now() - reach / 2:  # late: that one is past
            skip += 1
        # short of reads: rather miss a step than read at the wrong moment
        if self.tokens < 4 and (settled or self.period < self.MIN_TRACK_S):
            skip += every
        self._advance(skip)
        found = self._probe(skip, latency) if probe else self._bracket(skip, min(reach, self.period / 4))
        self.lost = 0 if found else self.lost + 1
        self.between()
        # wrong answers all the time, or a period far from the one found: locked to something that is not there
        return self.lost < 5 and self.astray < 0.6 and self.doubt < 4 and abs(self.period / self.fitted - 1) < 0.2

    def _bracket(self, skip, reach):
        """Read before and after the flip; the step's interval is certain. Whether the step was where it was expected."""
        known, seen_at = (self.last[2] if skip == 1 else None), self.last[0]
        flip = self.flip
        self._wait(flip - reach)
        a = self._read()
        if known is not None and a[2] != known:
            # surprised again and again, the flip is no longer believed: what is certain is said, since the last read of the old value
            return self._early(a, seen_at if self.astray > self.DOUBTED else max(seen_at, flip - 3 * reach), flip)
        self._wait(max(a[1], flip + reach))
        b = self._read()
        if skip > 1 and b[1] - a[0] > 0.8 * self.period:
            return True  # a read was held up: which step changed the value cannot be told
        if b[2] != a[2]:
            self._saw(a, False)
            self._saw(b, True)
            self._found(b[2], a[0], b[1])
            self._surprised(False)
            return True
        late = self._later(b, flip + 0.45 * self.period, reach)
        if late is not None:
            old, new = late
            self._saw(old, False)
            self._saw(new, True)
            self._found(new[2], old[0], new[1])
            self._surprised(True)
            return old[0] - flip < 0.25 * self.period
        if known is None:  # unchanged on both sides and for half a period on: the step came before the first read
            return self._early(a, flip - (self.period / 2 if self.astray > self.DOUBTED else 3 * reach), flip)
        return False

    def _early(self, a, since, flip):
        """The value had changed already when read `a` began."""
        self._saw(a, True)
        self._surprised(True)
        self._found(a[2], min(since, a[0] - self.NEAREST_S), a[1])
        return flip - a[0] < 0.25 * self.period

    def _later(self, old, until, pause, least=0.001):
        """Read on until the value changes -> (last old read, first new one), or None."""
        while old[1] < until and not self.stopped():
            self._wait(old[1] + pause)
            new = self._read()
            if new[2] != old[2]:
                return old, new
            old, pause = new, max(least, 2 * pause)
        return None

    def _probe(self, skip, latency):
        """One read begun at the flip. Whether the step was where it was expected."""
        sd = math.sqrt(self.cov[0] + self.noise**2)
        old, paired = self.last, self._paired()
        if skip > 1 or self.lost or paired:  # what is the value before this step? If steps are close, a read too early would see an older one
            self._wait(self.flip - (1.03 * latency if paired else 1.2 * latency + 0.0015))
            old = self._read()
            if old[1] > self.flip + 0.3 * self.period:
                return True  # held up: it may have seen another step
        flip = self.flip
        # A little late, so that most reads see the new value: they need no second read, and their interval is the narrow one.
        # Every twelfth is early enough to see the old one: that shows when F is late, and how much it scatters.
        self.turn = (self.turn + 1) % 12
        self._wait(flip + (self.AIM_S if self.turn else -1.4 * sd))
        x = self._read()
        new = x[2] != old[2]
        if x[0] < flip - sd:
            self.doubt = self.doubt + 1 if new else 0
        else:
            self._again(new)
        # The interval is as wide as it usually is where that leaves room for the scatter of F, and wide where it does not
        lengths = sorted(self.latency)
        low, usual, high = (lengths[len(lengths) * k // 4] for k in (1, 2, 3))
        width = max(self.WIDTH_S, usual + self.SPARE_S - self.SPREAD * (high - low))
        scatter = math.sqrt(min(self.cov[0], 0.0006**2) + self.JITTER_S**2)
        # A delay that scatters by s cannot lie at the ends of the read on average: its mean m obeys m (latency - m) >= s^2
        ends = latency - math.sqrt(max(0.0, latency**2 - 4 * max(0.0, self.noise**2 - self.JITTER_S**2)))
        # Where steps are close the flip is known less well: half of the intervals shall stay narrow all the same
        enough = self.ENOUGH - (0.6 if paired and self.narrow < 0.58 else 0.0)
        early, late = enough * scatter - ends / 2, self.ENOUGH_OLD * scatter - ends / 2
        certain = paired and not self.agrees
        wide = max(early, min(3.2 * sd, 0.0034))
        if new:
            self._saw(x, True)
            lo = x[1] - width
            self.narrow += 0.05 * ((lo <= flip - early) - self.narrow)
            if lo > flip - early:
                lo = flip - wide
            self._found(x[2], min(old[0] if certain else max(old[0], lo), x[0] - self.NEAREST_S), x[1])
            if paired:
                self._check(old, x, *([self._read()] if self.tokens > 30 or self.turn % 2 else []))
            return True
        pair = self._later(x, max(flip + 0.6 * self.period, x[1] + 0.001), 0.0)
        if pair is None:
            return False
        last_old, new = pair
        if paired:
            self.narrow += 0.05 * (1 - self.narrow)
            self._check(old, x) if last_old is not x else self._check(old, x, new)
        self._saw(last_old, False)
        hi = max(last_old[0] + width, flip + latency + late, last_old[1] + self.BEHIND_S)
        if certain or new[1] - new[0] > 1.5 * latency:  # held up: it may have seen the next step
            hi = new[1]
        self._found(new[2], last_old[0], min(new[1], hi))
        return last_old[0] - flip < 0.25 * self.period


# --- sources -----------------------------------------------------------------------------------------------------------------


class Rapl:
    """CPU packages and their DRAM from a powercap tree; one reading per package and domain. `columns`: {column: zone}."""

    def __init__(self, root=POWERCAP):
        self.root = Path(root)
        self.columns, self.left_out, self.files = {}, [], {}
        zones = self._zones()
        chosen = []
        for zone in sorted((z for z in zones if z["parent"] is None), key=lambda z: (z["type"] != "intel-rapl", z["type"], z["number"])):
            name = zone["name"]
            if not name.startswith("package"):
                why = "psys contains the packages, never added" if name == "psys" else "not a package"
                self._leave(zone, why)
            elif any(name == other["name"] for other in chosen):
                self._leave(zone, f"same package as {next(o['path'] for o in chosen if o['name'] == name)}")
            elif self._readable(zone):
                mirror = next((o for o in chosen if self._mirrors(o, zone)), None)
                if mirror:
                    self._leave(zone, f"mirrors {mirror['path']}: same counter seen from another die")
                else:
                    chosen.append(zone)
        for k, zone in enumerate(sorted(chosen, key=lambda z: (int((re.findall(r"\d+", z["name"]) or [0])[0]), z["name"]))):
            self.columns[f"cpu{k}_uj"] = zone
            for child in (z for z in zones if z["parent"] == zone["id"]):
                if child["name"] != "dram":
                    self._leave(child, f"part of {zone['name']}")
                elif f"dram{k}_uj" not in self.columns and self._readable(child):
                    self.columns[f"dram{k}_uj"] = child
        for column, zone in self.columns.items():
            self.files[column] = os.open(f"{zone['path']}/energy_uj", os.O_RDONLY)

    def _zones(self):
        """Every zone of the tree, once, whether the tree is flat (sysfs) or nested."""
        found = {}
        level = [self.root]
        for _ in range(4):
            below = []
            for folder in level:
                try:
                    entries = sorted(folder.iterdir())
                except OSError:
                    continue
                below += [e for e in entries if ":" in e.name or (folder == self.root and e.is_dir())]
            for path in below:
                match = re.fullmatch(r"([^:]+):(\d+)(?::(\d+))?(?::\d+)*", path.name)
                if match and path.name not in found and path.name.count(":") <= 2:
                    try:
                        name = (path / "name").read_text().strip()
                    except OSError:
                        continue
                    kind, number, child = match.groups()
                    parent = f"{kind}:{number}" if child is not None else None
                    found[path.name] = {
                        "id": path.name, "type": kind, "number": int(number), "parent": parent, "name": name, "path": str(path),
                    }  # fmt: skip
            level = below
        return list(found.values())

    def _leave(self, zone, why):
        self.left_out.append({"zone": zone["path"], "name": zone["name"], "why": why})

    def _value(self, zone):
        with open(f"{zone['path']}/energy_uj") as f:
            return int(f.read())

    def _readable(self, zone):
        try:
            self._value(zone)
            return True
        except PermissionError:
            say(f"{zone['path']}/energy_uj: permission denied; {NOT_READABLE}", "rapl")
            self._leave(zone, "permission denied")
        except (OSError, ValueError) as e:
            say(f"{zone['path']}/energy_uj: not readable ({e}); left out", zone["path"])
            self._leave(zone, f"not readable: {e}")
        return False

    def _mirrors(self, one, other):
        """Whether two dies of one package show the same counter (some machines list every die with the package's value)."""
        if one["name"].split("-die-")[0] != other["name"].split("-die-")[0]:
            return False
        for _ in range(2):
            a, b, c = self._value(one), self._value(other), self._value(one)
            if not min(a, c) - 1000 <= b <= max(a, c) + 1000:
                return False
            time.sleep(0.02)
        return True

    def read(self, column):
        """Raw microjoules. Raises OSError or ValueError."""
        return int(os.pread(self.files[column], 64, 0))

    def describe(self, column):
        zone = self.columns[column]
        limits = []
        for i in range(3):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(Path(zone["path"], f"constraint_{i}_power_limit_uw").read_text()) * 1e-6)
        try:
            span = int(Path(zone["path"], "max_energy_range_uj").read_text()) or None
        except (OSError, ValueError):
            span = None
            say(f"{zone['path']}/max_energy_range_uj: not readable; intervals over a counter wrap will be unknown", f"range {zone['path']}")
        scope = "package" if column.startswith("cpu") else "dram"
        return {
            "source": "rapl", "unit": "uJ", "name": zone["name"], "zone": zone["path"], "max_range_uj": span, "scope": scope,
            "power_limit_w": max(limits) if limits and max(limits) > 0 else None, "update_period_s": 0.001,
        }  # fmt: skip


class CpuModel:
    """Labelled estimate: watts per logical CPU, idle and busy, times the busy time of /proc/stat."""

    def __init__(self, idle_w, busy_w, stat="/proc/stat"):
        self.idle_w, self.busy_w = idle_w, busy_w
        self.hz, self.cpus = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_NPROCESSORS_ONLN")
        self.fd = os.open(stat, os.O_RDONLY)
        self.begin, self.busy_begin = time.monotonic(), self.busy_s()

    def busy_s(self):
        """Busy seconds of all CPUs since boot. Steal and waiting for I/O are not busy. Raises OSError, ValueError."""
        # the first line only: the kernel makes the rest of the file anyhow, but it need not be copied and parsed
        user, nice, system, _, _, irq, softirq = (int(x) for x in os.pread(self.fd, 256, 0).split(b"\n", 1)[0].split()[1:8])
        return (user + nice + system + irq + softirq) / self.hz

    def read(self, column):
        busy = self.busy_s()
        spent = self.cpus * self.idle_w * (time.monotonic() - self.begin) + (self.busy_w - self.idle_w) * (busy - self.busy_begin)
        return round(spent * 1e6)

    def describe(self, column):
        return {
            "source": "model", "unit": "uJ", "name": "estimated from busy time, not measured", "scope": "package", "max_range_uj": None,
            "idle_w_per_cpu": self.idle_w, "busy_w_per_cpu": self.busy_w, "logical_cpus": self.cpus, "update_period_s": 1 / self.hz,
            "reference": CPU_MODEL_SOURCE if f"{self.idle_w:g}:{self.busy_w:g}" == CPU_MODEL_DEFAULT else None,
        }  # fmt: skip


class Nvml:
    """The GPUs in use, through nvidia-ml-py. Raises SamplerError when `wanted` names one that is not there."""

    def __init__(self, wanted):
        import pynvml

        self.lib = pynvml
        self.left_out, self.gpus = [], []
        if wanted == "none":
            return
        asked = wanted if wanted != "auto" else os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            if wanted != "auto":
                raise SamplerError(f"--gpus {wanted}: NVML does not start ({e}); install the NVIDIA driver or use --gpus none") from None
            self.left_out.append({"counter": "nvml", "why": f"NVML does not start: {e}"})
            absent = e.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if asked and asked not in ("-1", "NoDevFiles"):
                why = f"CUDA_VISIBLE_DEVICES={asked}, but NVML does not start ({e})"
                if not absent:
                    raise SamplerError(f"{why}; mend the driver, or use --gpus none to measure without GPUs") from None
                say(f"{why}: no GPU energy will be recorded")
            elif not absent:
                say(f"NVML does not start ({e}): no GPU energy will be recorded")
            return
        known = self._known()
        picked = known if asked is None else self._resolve(asked, known, strict=wanted != "auto")
        order = os.environ.get("CUDA_DEVICE_ORDER")
        names = {self._text(pynvml.nvmlDeviceGetName(h)) for h, _ in known}
        if wanted == "auto" and asked and re.search(r"(^|,)\s*\d", asked) and len(names) > 1 and order != "PCI_BUS_ID":
            say("GPUs of different kinds and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA may mean another GPU by an index; use UUIDs")
        for handle, uuid in picked:
            self._probe(handle, uuid)

    def _known(self):
        """[(handle, UUID)] of the GPUs that may be opened. NVML counts others too (a job's own devices, a lost card); CUDA does not."""
        known = []
        for i in range(self.lib.nvmlDeviceGetCount()):
            try:
                handle = self.lib.nvmlDeviceGetHandleByIndex(i)
                known.append((handle, self._text(self.lib.nvmlDeviceGetUUID(handle))))
            except self.lib.NVMLError as e:
                self.left_out.append({"nvml_index": i, "why": str(e)})
                say(f"GPU {i} cannot be opened ({e}); left out")
        return known

    @staticmethod
    def _text(value):
        return value.decode() if isinstance(value, bytes) else value

    def _resolve(self, asked, known, strict):
        """Handles for a list of indices, UUIDs, short UUIDs and MIG ids; a parent counts once. CUDA's list ends at the first bad entry."""
        picked = []
        for entry in (e.strip() for e in asked.split(",")):
            found = None
            if re.fullmatch(r"\d+", entry):
                found = known[int(entry)] if int(entry) < len(known) else None
            elif entry.startswith("MIG-"):
                found = self._mig_parent(entry, known)
            elif entry.startswith("GPU-"):
                match = [k for k in known if k[1].startswith(entry)]
                found = match[0] if len(match) == 1 else None
            if found is None:
                if strict:
                    have = ", ".join(f"{i}={uuid}" for i, (_, uuid) in enumerate(known)) or "no GPU"
                    raise SamplerError(f"--gpus: found {entry!r}, expected an index, UUID or MIG id of: {have}")
                if entry not in ("", "-1", "NoDevFiles"):
                    say(f"CUDA_VISIBLE_DEVICES: {entry!r} names no GPU here; it and what follows is ignored, as CUDA does")
                break
            if found[1] not in [uuid for _, uuid in picked]:
                picked.append(found)
        return picked

    def _mig_parent(self, entry, known):
        old = re.match(r"MIG-(GPU-[0-9a-f-]+)/", entry)
        if old:
            return next((k for k in known if k[1] == old.group(1)), None)
        try:
            mig = self.lib.nvmlDeviceGetHandleByUUID(entry.encode())
            parent = self.lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
            uuid = self._text(self.lib.nvmlDeviceGetUUID(parent))
        except self.lib.NVMLError:
            return None
        return next((k for k in known if k[1] == uuid), None)

    def _probe(self, handle, uuid):
        """Which counter this GPU answers; asked once."""
        lib = self.lib
        name = self._text(lib.nvmlDeviceGetName(handle))
        gpu = {"handle": handle, "uuid": uuid, "name": name, "source": None, "power": False}
        trouble = []
        for what, query in (("nvml", lib.nvmlDeviceGetTotalEnergyConsumption), ("nvml-power", lib.nvmlDeviceGetPowerUsage)):
            for attempt in range(3):
                try:
                    query(handle)
                except lib.NVMLError as e:
                    if attempt < 2 and e.value != lib.NVML_ERROR_NOT_SUPPORTED:
                        time.sleep(0.01)
                        continue
                    trouble.append(f"{what}: {e}")
                else:
                    gpu["source"] = gpu["source"] or what
                    gpu["power"] |= what == "nvml-power"
                break
        if gpu["source"] is None:
            self.left_out.append({"uuid": uuid, "name": name, "why": "; ".join(trouble)})
            say(f"GPU {uuid} ({name}) answers neither energy nor power ({'; '.join(trouble)}); left out")
            return
        if gpu["source"] == "nvml-power":
            say(f"GPU {uuid} ({name}) has no energy counter ({trouble[0]}); its power readings are integrated instead")
            self.left_out.append({"uuid": uuid, "counter": "total energy", "why": trouble[0]})
        self.gpus.append(gpu)

    def energy_mj(self, gpu):
        """Millijoules since the driver was loaded. Raises OSError."""
        try:
            return self.lib.nvmlDeviceGetTotalEnergyConsumption(gpu["handle"])
        except self.lib.NVMLError as e:
            raise OSError(str(e)) from None

    def power_w(self, gpu):
        """Watts, or None when it could not be read."""
        try:
            return self.lib.nvmlDeviceGetPowerUsage(gpu["handle"]) / 1000
        except self.lib.NVMLError:
            return None

    def ask(self, query, *args):
        """A query's value, or None where the GPU or the driver does not know it."""
        function = getattr(self.lib, query, None)
        if function is None:
            return None
        try:
            return function(*args)
        except (self.lib.NVMLError, TypeError):
            return None

    def describe(self, gpu):
        lib, h = self.lib, gpu["handle"]
        pci, ecc, mig = self.ask("nvmlDeviceGetPciInfo", h), self.ask("nvmlDeviceGetEccMode", h), self.ask("nvmlDeviceGetMigMode", h)
        limit, default = self.ask("nvmlDeviceGetEnforcedPowerLimit", h), self.ask("nvmlDeviceGetPowerManagementDefaultLimit", h)
        return {
            "uuid": gpu["uuid"], "pci": self._text(pci.busId) if pci is not None else None, "name": gpu["name"],
            "nvml_index": self.ask("nvmlDeviceGetIndex", h), "source": gpu["source"],
            # on Grace Hopper the counter covers the module, CPU and memory included
            "scope": "module" if "GH200" in gpu["name"] else "gpu",
            "power_limit_w": limit / 1000 if limit is not None else None,
            "power_limit_default_w": default / 1000 if default is not None else None,
            "persistence_mode": self.ask("nvmlDeviceGetPersistenceMode", h),
            "application_clocks_mhz": {
                "sm": self.ask("nvmlDeviceGetApplicationsClock", h, lib.NVML_CLOCK_SM),
                "memory": self.ask("nvmlDeviceGetApplicationsClock", h, lib.NVML_CLOCK_MEM),
            },
            "ecc": ecc[0] if ecc is not None else None,
            "mig": mig[0] if mig is not None else None,
        }  # fmt: skip

    def state(self, gpu):
        """(temperature C, SM MHz, memory MHz, throttle reasons, utilisation %), None where unknown."""
        lib, h = self.lib, gpu["handle"]
        use = self.ask("nvmlDeviceGetUtilizationRates", h)
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons", h)
        if reasons is None:
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", h)
        return (
            self.ask("nvmlDeviceGetTemperature", h, lib.NVML_TEMPERATURE_GPU),
            self.ask("nvmlDeviceGetClockInfo", h, lib.NVML_CLOCK_SM),
            self.ask("nvmlDeviceGetClockInfo", h, lib.NVML_CLOCK_MEM),
            reasons,
            use.gpu if use is not None else None,
        )


# --- the program -------------------------------------------------------------------------------------------------------------


def _sleep_until(t):
    left = t - time.monotonic()
    if left > 0:
        time.sleep(left)


class GpuThread(threading.Thread):
    """Follows one GPU's counter; `take()` gives a row its cells. Reads of one GPU never wait for another's."""

    def __init__(self, nvml, gpu, tick_s):
        super().__init__(daemon=True, name=f"gpu-{gpu['uuid']}")
        self.nvml, self.gpu, self.tick_s = nvml, gpu, tick_s
        self.lock, self.halt = threading.Lock(), threading.Event()
        self.events, self.current, self.watts = deque(), None, None
        self.count = self.skipped = 0
        self.tracker = Tracker(
            lambda: nvml.energy_mj(gpu), time.monotonic, _sleep_until, self._emit, tick_s, self.halt.is_set, self._between
        )  # fmt: skip

    def _emit(self, value, edge, half, at):
        with self.lock:
            self.events.append((value, edge, half))
            while len(self.events) > 3:  # the counter is faster than the rows
                self.events.popleft()
                self.skipped += 1

    def _between(self):
        self.count += 1
        if self.gpu["power"] and self.count % 2:
            watts = self.nvml.power_w(self.gpu)
            with self.lock:
                self.watts = watts

    def run(self):
        if self.gpu["source"] == "nvml":
            self.tracker.run()
            return
        due = time.monotonic()
        while not self.halt.is_set():
            t0 = time.monotonic()
            watts = self.nvml.power_w(self.gpu)
            self.tracker.latency.append(time.monotonic() - t0)
            self.tracker.reads += 1
            self.tracker.errors += watts is None
            with self.lock:
                self.watts = watts
            due = max(due + self.tick_s, time.monotonic())
            _sleep_until(due)

    def ready(self):
        with self.lock:
            return bool(self.events or self.current) if self.gpu["source"] == "nvml" else self.watts is not None

    def take(self, now):
        """(value, edge, half, watts) for a row: the oldest step not written yet, else the latest one; None where not read lately."""
        with self.lock:
            watts, self.watts = self.watts, None
            if self.events:
                self.current = self.events.popleft()
            value, edge, half = self.current or (None, None, None)
            seen = self.tracker.last_ok
            if seen is None or now - seen > max(3 * self.tick_s, 2 * (self.tracker.period or 0)):
                value = edge = half = None
            return value, edge, half, watts

    def latest_edge(self):
        with self.lock:
            newest = self.events[-1] if self.events else self.current
            return newest[1] if newest else None


def percentiles_ms(seconds):
    """{p50, p90, p99, max} in milliseconds, None without data."""
    values = sorted(seconds)
    if not values:
        return None
    pick = {name: values[min(len(values) - 1, int(q * len(values)))] for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {name: round(v * 1e3, 3) for name, v in (*pick.items(), ("max", values[-1]))}


def host_info(nvml):
    cpuinfo = ""
    with contextlib.suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo)
    container = next((kind for path, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")) if os.path.exists(path)), None)
    driver = nvml.ask("nvmlSystemGetDriverVersion") if nvml and nvml.gpus else None
    return {
        "cpu": model.group(1) if model else platform.machine(), "logical_cpus": os.cpu_count(),
        "kernel": platform.release(), "machine": platform.machine(),
        "virtual_machine": bool(re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo, re.M)), "container": container,
        "driver": Nvml._text(driver) if driver is not None else None, "python": platform.python_version(),
    }  # fmt: skip


def write_json(path, obj):
    """Atomically, so that a reader never sees half a sidecar."""
    tmp = f"{path}.tmp{os.getpid()}"
    with open(tmp, "w", encoding="utf-8", newline="\n") as f:
        json.dump(obj, f, indent=1, allow_nan=False)
        f.write("\n")
    os.replace(tmp, path)


class Sampler:
    """Opens the sources, writes rows until told to stop, leaves sidecar and footer. Raises SamplerError, OSError."""

    def __init__(self, output, hz=10.0, gpus="auto", powercap=POWERCAP, cpu_model=None, state=None, meta=None):
        self.output, self.hz, self.tick_s = Path(output), hz, 1.0 / hz
        name = self.output.name.removesuffix(".csv")
        self.meta_path = Path(meta) if meta else self.output.with_name(f"{name}.meta.json")
        self.state_path = Path(state) if state else self.output.with_name("state.csv" if name == "samples" else f"{name}.state.csv")
        if len({path.resolve() for path in (self.output, self.meta_path, self.state_path)}) < 3:
            raise SamplerError(
                f"-o {self.output}, --meta {self.meta_path}, --state {self.state_path}: found one file twice, expected three different ones"
            )
        self.stop = threading.Event()
        self.why = "stopped"
        self.nvml = self._nvml(gpus)
        self.rapl = Rapl(powercap)
        self.left_out = self.rapl.left_out + (self.nvml.left_out if self.nvml else [])
        self.cpu = self.rapl if self.rapl.columns else None
        self.cpu_columns = list(self.rapl.columns)
        if not self.cpu_columns:
            why = f"{powercap}: no readable CPU package"
            self.left_out.append({"counter": "rapl", "why": why})
            if cpu_model:
                self.cpu, self.cpu_columns = CpuModel(*cpu_model), ["cpu0_est_uj"]
                say(f"{why}; CPU energy is estimated from busy time ({cpu_model[0]:g} W idle, {cpu_model[1]:g} W busy per logical CPU)")
            elif self.nvml and self.nvml.gpus:
                say(f"{why}; no CPU energy will be recorded")
        if not self.cpu_columns and not (self.nvml and self.nvml.gpus):
            raise SamplerError(
                f"nothing to measure: no GPU energy through NVML, {powercap} has no readable package; "
                f"{NOT_READABLE}, or take the labelled estimate with --cpu-model {CPU_MODEL_DEFAULT}"
            )
        self.threads = [GpuThread(self.nvml, gpu, self.tick_s) for gpu in (self.nvml.gpus if self.nvml else [])]
        self.cpu_latency = deque(maxlen=20_000)
        self.cpu_errors = dict.fromkeys(self.cpu_columns, 0)

    def _nvml(self, gpus):
        if gpus == "none":
            return None
        try:
            return Nvml(gpus)
        except ImportError:
            if gpus != "auto":
                raise SamplerError(f"--gpus {gpus}: the package nvidia-ml-py is missing; pip install nvidia-ml-py") from None
            say("the package nvidia-ml-py is missing: no GPU energy will be recorded")
            return None

    def header(self):
        names = ["t", "mono"]
        for i, thread in enumerate(self.threads):
            if thread.gpu["source"] == "nvml":
                names += [f"gpu{i}_mj", f"gpu{i}_edge", f"gpu{i}_edge_err"]
            names += [f"gpu{i}_w"] if thread.gpu["power"] else []
        return names + self.cpu_columns

    def describe(self):
        """The sidecar without its footer."""
        counters, gpus = {}, []
        for i, thread in enumerate(self.threads):
            info = self.nvml.describe(thread.gpu)
            gpus.append({"gpu": i, **info})
            common = {k: info[k] for k in ("uuid", "pci", "name", "scope", "power_limit_w")}
            latency = percentiles_ms(list(thread.tracker.latency)) or {}
            measured = {
                "update_period_s": round(thread.tracker.period, 6) if thread.tracker.period else None,
                "read_ms_median": latency.get("p50"), "read_ms_p99": latency.get("p99"),
            }  # fmt: skip
            if info["source"] == "nvml":
                counters[f"gpu{i}_mj"] = {"source": "nvml", "unit": "mJ", **common, **measured, "max_range_uj": None}
                counters[f"gpu{i}_edge"] = {"source": "nvml", "unit": "s", "name": "Unix time of the counter step"}
                counters[f"gpu{i}_edge_err"] = {"source": "nvml", "unit": "s", "name": "half the interval the step lies in"}
            if thread.gpu["power"]:
                counters[f"gpu{i}_w"] = {"source": "nvml-power", "unit": "W", **common}
        for column in self.cpu_columns:
            counters[column] = self.cpu.describe(column)
        return {
            "schema": 1, "program": "sampler.py", "t_begin": self.t_begin, "hz": self.hz, "pid": os.getpid(), "host": host_info(self.nvml),
            "counters": counters, "gpus": gpus, "left_out": self.left_out, "state": self.state_path.name,
        }  # fmt: skip

    def run(self, duration=None):
        """Write until `stop` is set or `duration` seconds are over."""
        for thread in self.threads:
            thread.start()
        begin = time.monotonic()
        while not all(t.ready() for t in self.threads) and time.monotonic() - begin < 2 and not self.stop.wait(0.01):
            pass
        self.t_begin = round(time.time(), 6)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.meta_path, self.describe())
        self.rows = self.missed = 0
        self.largest_gap = 0.0
        out = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        state = threading.Thread(target=self._state, daemon=True, name="state")
        try:
            self._write(out, ",".join(self.header()))
            self.cpu_begin = self._cpu_s()  # starting Python and NVML is not sampling
            state.start()
            self._rows(out, duration)
        finally:
            self.stop.set()
            os.close(out)
            for thread in self.threads:
                thread.halt.set()
            for thread in [*self.threads, state]:
                if thread.ident is not None:
                    thread.join(1.0)
        write_json(self.meta_path, {**self.describe(), "footer": self.footer()})

    @staticmethod
    def _write(fd, line):
        data = (line + "\n").encode()
        while data:
            data = data[os.write(fd, data) :]

    def _rows(self, out, duration):
        self.first = previous = due = time.monotonic()
        end = None if duration is None else self.first + duration
        described = False
        last_call = None
        while True:
            now = time.monotonic()
            if last_call is None and (self.stop.is_set() or (end is not None and now >= end)):
                self.why = self.why if self.stop.is_set() else "duration"
                last_call = now  # the step that holds this moment must still be seen
            self._write(out, self._row())
            self.rows += 1
            self.largest_gap = max(self.largest_gap, now - previous)
            previous = self.last = now
            if last_call is not None:
                edges = [t.latest_edge() for t in self.threads if t.gpu["source"] == "nvml"]
                if all(e is None or (e > last_call and not t.events) for e, t in zip(edges, self.threads, strict=False)):
                    return
                if now - last_call > 0.5:
                    return
            if not described and now - self.first > 10:  # a sampler that is killed later leaves the measured periods behind
                described = True
                write_json(self.meta_path, self.describe())
            due += self.tick_s
            late = time.monotonic() - due
            if late > 0:
                lost = int(late / self.tick_s)
                self.missed += lost
                due += lost * self.tick_s
            if last_call is not None:
                _sleep_until(due)
            else:
                until = due if end is None else min(due, end)
                while not self.stop.is_set() and (left := until - time.monotonic()) > 0:
                    self.stop.wait(left)

    def _row(self):
        m0 = time.monotonic()
        cpu = []
        for column in self.cpu_columns:
            try:
                cpu.append(str(self.cpu.read(column)))
            except (OSError, ValueError) as e:
                self.cpu_errors[column] += 1
                cpu.append("")
                say(f"{column}: not readable ({e}); its cells stay empty until it is, further errors are counted only", column)
        # two clocks, one moment: the pair with the least time between the two readings of the monotonic clock
        best = None
        for _ in range(3):
            a = time.monotonic()
            t = time.time()
            b = time.monotonic()
            if best is None or b - a < best[0]:
                best = (b - a, t, (a + b) / 2)
        _, t, mono = best
        if self.cpu_columns:
            self.cpu_latency.append(mono - m0)
        cells = [f"{t:.6f}", f"{mono:.6f}"]
        for thread in self.threads:
            value, edge, half, watts = thread.take(mono)
            if thread.gpu["source"] == "nvml":
                if value is None:
                    cells += ["", "", ""]
                    say(f"GPU {thread.gpu['uuid']}: energy counter not read for a while; its cells stay empty until it is", thread.name)
                else:
                    cells += [str(value), f"{t + (edge - mono):.6f}", f"{half:.6f}"]
            if thread.gpu["power"]:
                cells.append("" if watts is None else f"{watts:.3f}")
        return ",".join(cells + cpu)

    def _state(self):
        """state.csv once a second; slow queries stay in this thread."""
        fields = ("temp_c", "sm_mhz", "mem_mhz", "throttle_reasons", "util_pct")
        names = ["t", "mono", *(f"gpu{i}_{f}" for i in range(len(self.threads)) for f in fields), "cpu_util_pct"]
        model = CpuModel(0.0, 0.0)
        busy, at = model.busy_begin, time.monotonic()
        due = at
        try:
            fd = os.open(self.state_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._write(fd, ",".join(names))
            while not self.stop.wait(max(0.0, due + 1.0 - time.monotonic())):
                due = max(due + 1.0, time.monotonic() - 1.0)
                cells = [f"{time.time():.6f}", f"{time.monotonic():.6f}"]
                for thread in self.threads:
                    cells += ["" if v is None else str(v) for v in self.nvml.state(thread.gpu)]
                now_busy, now = model.busy_s(), time.monotonic()
                cells.append(f"{100 * (now_busy - busy) / max(1e-9, (now - at) * model.cpus):.1f}")
                busy, at = now_busy, now
                self._write(fd, ",".join(cells))
            os.close(fd)
        except OSError as e:
            say(f"{self.state_path}: {e}; the state of the hardware is not recorded", "state")

    @staticmethod
    def _cpu_s():
        spent = resource.getrusage(resource.RUSAGE_SELF)
        return spent.ru_utime + spent.ru_stime

    def footer(self):
        cpu_s, wall = self._cpu_s() - self.cpu_begin, max(1e-9, self.last - self.first)
        gpus = {}
        for i, thread in enumerate(self.threads):
            t = thread.tracker
            halves = sorted(t.halves)
            gpus[f"gpu{i}"] = {
                "reads": t.reads, "reads_per_s": round(t.reads / wall, 2), "read_ms": percentiles_ms(list(t.latency)),
                "read_errors": t.errors, "steps": t.steps, "steps_not_written": thread.skipped, "locks": t.locks,
                "backward_steps": t.backward, "edge_err_ms_median": round(halves[len(halves) // 2] * 1e3, 3) if halves else None,
            }  # fmt: skip
        return {
            "t_end": round(time.time(), 6), "ended": self.why, "rows": self.rows, "seconds": round(wall, 3),
            "achieved_hz": round((self.rows - 1) / wall, 4) if self.rows > 1 else None, "largest_gap_s": round(self.largest_gap, 4),
            "missed_ticks": self.missed, "gpus": gpus,
            "cpu_read_ms": percentiles_ms(list(self.cpu_latency)), "cpu_read_errors": self.cpu_errors,
            "sampler_cpu_s": round(cpu_s, 3), "sampler_cpu_pct": round(100 * cpu_s / wall, 3),
        }  # fmt: skip


def cpu_model(text):
    """'0.74:3.5' -> (0.74, 3.5)."""
    try:
        idle, busy = (float(x) for x in text.split(":"))
        if not 0 <= idle <= busy < 1e4:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected IDLE_W:BUSY_W per logical CPU with 0 <= IDLE_W <= BUSY_W") from None
    return idle, busy


def positive(text):
    """A number above 0."""
    try:
        value = float(text)
        if not 0 < value < 1e9:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number above 0") from None
    return value


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, metavar="NAME.csv", help="where the rows go; an existing file is replaced")
    parser.add_argument("--hz", type=positive, default=10.0, help="rows per second (default 10)")
    parser.add_argument("--duration", type=positive, metavar="S", help="stop after so many seconds (default: run until SIGTERM or SIGINT)")
    parser.add_argument(
        "--gpus", default="auto", metavar="auto|none|LIST",
        help="indices, UUIDs, short UUIDs or MIG ids; auto: CUDA_VISIBLE_DEVICES, else all",
    )  # fmt: skip
    parser.add_argument("--powercap", default=POWERCAP, metavar="DIR", help=f"powercap tree (default {POWERCAP})")
    parser.add_argument(
        "--cpu-model", nargs="?", const=cpu_model(CPU_MODEL_DEFAULT), type=cpu_model, metavar="IDLE_W:BUSY_W",
        help=f"estimate CPU energy where no RAPL can be read: W per logical CPU (without a value {CPU_MODEL_DEFAULT})",
    )  # fmt: skip
    parser.add_argument("--state", metavar="PATH", help="default: state.csv beside samples.csv, else NAME.state.csv")
    parser.add_argument("--meta", metavar="PATH", help="default: NAME.meta.json")
    args = parser.parse_args(argv)
    if args.hz > 100:
        parser.error(f"--hz: found {args.hz:g}, expected at most 100 (reading faster disturbs what is measured)")
    if os.path.isdir(args.output):
        parser.error(f"-o {args.output}: is a folder, expected a file such as samples.csv")
    try:
        sampler = Sampler(args.output, args.hz, args.gpus, args.powercap, args.cpu_model, args.state, args.meta)
    except SamplerError as e:
        say(str(e))
        return 2

    def on_signal(number, frame):
        sampler.why = signal.Signals(number).name
        sampler.stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        sampler.run(args.duration)
    except OSError as e:
        say(f"{e.filename or args.output}: {e.strerror or e}; rows up to here are valid")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
