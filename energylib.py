"""Energy between two timestamps from cumulative counters; the only file that knows what a counter is.

    from energylib import read_samples
    samples = read_samples("data/calib/samples.csv")
    energy = samples.energy(t0, t1, calls=calls, idle_w={"gpu0": 124.9})
    energy.joules["gpu0"], energy.err["gpu0"], energy.method["gpu0"], energy.covered

As a program it prints what a file holds, and the energy of the whole of it or of one interval:

    python3 energylib.py data/calib/samples.csv
    python3 energylib.py data/calib/samples.csv --from 1796053902.287 --to 1796053904.602   # one call

Counters are cumulative and step. A step table (time of the step, joules up to it) is made of every counter: unwrapped
(RAPL: one range per backward step), resets and glitches found, duplicate and out-of-order rows removed. Energy is the
difference of one cumulative function E(t) at the two ends, so that the parts of an interval add up to the whole to rounding.

Inside a step E(t) is one of
  phase   the step straddles the edge of a model call: time without a call takes idle power x its duration, the remainder goes
          to the calls (in proportion to their power where several share the step). Needs `calls` and `idle_w`.
  edges   the time of every step is known, energy is spread evenly inside it
  linear  the time of the steps is not known (only between which two rows they lie); spread evenly between the middles
A step whose remainder would be negative falls back to an even spread. Even spreading smears (P - P_idle) x period / 3 per call,
on average; that bias is part of `err`.

What is not known is NaN, never 0: time before the first and after the last step (but for one and a half periods, which take
the power next to them), a counter reset, a backward RAPL step without a known range, an impossible jump.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

# A package or a GPU never exceeds these on average over a step; a counter that says so jumped. Limits in the sidecar replace them.
MAX_POWER_W = {"gpu": 10_000.0, "cpu": 2_000.0, "dram": 1_000.0}
READ_EDGE_SD_S = {"rapl": 0.0005, "model": 0.003}  # RAPL updates about every millisecond; /proc/stat counts in 10 ms ticks
GAP_TICKS = 5  # rows further apart than this many ticks do not cover the time between them
CLOCK_STEP_S = 0.05  # t - mono moves by less than this while no one sets the clock
CHUNK_BYTES = 2 << 20  # parsing stays in the processor's cache
QUERIES = 1 << 14  # so many points in time are looked up at once, for the same reason
UNIT_J = {"_mj": 1e-3, "_est_uj": 1e-6, "_uj": 1e-6}
# Reasons of NVML (a bit mask) for which a GPU runs slower than its user wants. Idle (0x1) and clocks that somebody set (0x2, 0x100) are none.
THROTTLE_REASONS = {0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
COUNTER = re.compile(r"^(gpu\d+|cpu\d+|dram\d+)(_mj|_est_uj|_uj)$")


class DataError(ValueError):
    """Bad input: the message names the file, the line or column, what was found, what was expected."""


def hardware_name(meta):
    """The machine in words, from the sampler's sidecar: GPUs and CPU; "unknown" when it names neither."""
    found = {}
    for column, counter in (meta.get("counters") or {}).items():
        if str(counter.get("source")).startswith("nvml") and counter.get("name"):
            found[column.partition("_")[0]] = counter["name"]
    names = list(found.values())
    parts = [f"{names.count(name)}x {name}" for name in sorted(set(names))]
    host = meta.get("host") or {}
    if host.get("cpu"):
        parts.append(str(host["cpu"]) + (f" ({host['logical_cpus']} logical CPUs)" if host.get("logical_cpus") else ""))
    return "; ".join(parts) or "unknown"


def group(domain):
    """'gpu', 'cpu' or 'dram' for a domain such as 'gpu0'."""
    return domain.rstrip("0123456789")


def sha256(path):
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def write_json_atomic(path, obj):
    """Write `obj` as JSON through a temporary file and a rename, so that the file is there whole or not at all.

    Raises ValueError for NaN and Infinity, which JSON does not have (use None), and OSError that names `path`."""
    text = json.dumps(obj, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    tmp = f"{path}.tmp{os.getpid()}"
    try:
        with open(tmp, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
    finally:
        if os.path.exists(tmp):
            os.unlink(tmp)


def _open(path):
    return gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb")


def read_jsonl(path):
    """The objects of a JSON-lines file. A torn last line (no newline, not JSON) is skipped; any other bad line is a DataError."""
    with _open(path) as f:
        data = f.read()
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    lines = data.split(b"\n")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:  # UnicodeDecodeError is one too
            if number == len(lines):  # no newline behind it: the writer died in the middle of it
                break
            raise DataError(f"{path}: line {number}: not JSON ({e}); mend or delete the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number}: found {type(row).__name__}, expected a JSON object")
        out.append(row)
    return out


def state_path(samples_path):
    """Where the sampler writes the state of the hardware beside `samples_path`: state.csv for samples.csv, else NAME.state.csv."""
    path = Path(samples_path)
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return path.with_name("state.csv" if name == "samples" else f"{name}.state.csv")


def read_state(path):
    """{column: float array in order of time} of a state.csv (sampler.py), NaN for empty cells. Raises DataError as for samples."""
    table, _ = _read_columns(path, lambda name, header: True)
    if "t" not in table:
        raise DataError(f"{path}: found no column t, expected the state.csv that sampler.py writes")
    order = np.argsort(table["t"], kind="stable")
    return {name: column[order] for name, column in table.items()}


def _read_columns(path, wanted):
    """{column: float array} of a CSV, NaN for empty cells; `wanted(name, header)` says which columns. Second value: flags.

    Reads in chunks and parses a column of numbers at a time: a day of ten counters at 10 Hz is 400 MB of text."""
    flags, line = [], 2
    table, used = None, 0
    with _open(path) as f:
        first = f.readline().removeprefix(b"\xef\xbb\xbf")
        if not first.endswith(b"\n"):
            raise DataError(f"{path}: found {'no line' if not first else 'a torn header'}, expected the header t,mono,... and rows")
        header = [name.strip().strip('"') for name in first.decode("utf-8", "replace").split(",")]
        picks = [(i, name) for i, name in enumerate(header) if wanted(name, header)]
        rest = b""
        while True:
            block = f.read(CHUNK_BYTES)
            data = rest + block
            cut = data.rfind(b"\n") + 1
            data, rest = data[:cut], data[cut:]
            if data:
                rows, count = _parse_block(path, data, header, picks, line)
                line += count
                new = len(rows[0]) if rows else 0
                if table is None or used + new > table.shape[1]:
                    table = _grown(table, used, len(picks), _rows_expected(path, used + new, f) if table is None else 2 * used + new)
                for k, values in enumerate(rows):
                    table[k, used : used + new] = values
                used += new
            if not block:
                break
    if rest.strip(b"\0 \r"):  # the writer died inside a line: its last number may be cut
        flags.append("torn_last_line")
    return {name: np.empty(0) if table is None else table[k, :used] for k, (_, name) in enumerate(picks)}, flags


def _rows_expected(path, rows, f):
    """Rows of the whole file, with some to spare, when `rows` of them are read; memory that is not written to is not used."""
    size = os.path.getsize(path)
    return rows + 1000 if str(path).endswith(".gz") else int(1.05 * rows * max(1.0, size / max(1, f.tell()))) + 1000


def _grown(table, used, width, rows):
    """A table of `rows` rows with the first `used` of `table`."""
    larger = np.empty((width, rows))
    if table is not None:
        larger[:, :used] = table[:, :used]
    return larger


def _parse_block(path, data, header, picks, line):
    """Float arrays of the picked columns from whole lines, and the number of lines."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    pad = 16  # numbers are read eight bytes at a time, from their end
    raw = np.frombuffer(b"0" * pad + data, np.uint8)
    ends = np.flatnonzero(raw < 45)  # commas, line ends, and what has no place in a plain file: spaces, quotes, signs
    n = len(header)
    table = ends.reshape(-1, n) if len(ends) % n == 0 else np.empty((0, n), int)
    # every row ends with a line end, and there are no other marks below a comma: then the rest are commas
    if not len(table) or (raw[table[:, -1]] != 10).any() or np.count_nonzero(raw < 44) != len(table):
        return _parse_slowly(path, data, header, picks, line), data.count(b"\n")
    table = np.ascontiguousarray(table.T)
    plain = int(raw.max()) <= 57  # nothing above the digits: no exponent, no word
    words = np.ndarray((len(raw) - 7,), "<u8", buffer=raw.data, strides=(1,))
    out = []
    for i, name in picks:
        starts = table[i - 1] + 1 if i else np.r_[pad, table[-1, :-1] + 1]
        values = _parse_even(raw, words, starts, table[i]) if plain else None
        out.append(_parse_column(path, raw, words, starts, table[i], name, line) if values is None else values)
    return out, table.shape[1]


def _parse_even(raw, words, starts, ends):
    """Numbers of equal length with the point at the same place, digits otherwise, at most 16 before and 7 behind the point; None
    when they are not that. Takes for granted that no byte is above the digits."""
    length = ends - starts
    longest = int(length.max())
    if longest == 0 or int(length.min()) != longest:
        return None
    first = raw[starts[0] : ends[0]].tobytes()
    decimals = longest - first.index(b".") - 1 if b"." in first else 0
    whole = longest - (decimals + 1 if decimals else 0)
    if not (1 <= whole <= 16 and decimals <= 7 and (decimals or b"." not in first)):
        return None
    parts = [(ends - 8, decimals, 1)] if decimals else []
    point = ends - (decimals + 1) if decimals else ends
    parts.append((point - 8, min(whole, 8), 10**decimals))
    if whole > 8:
        parts.append((point - 16, whole - 8, 10 ** (decimals + 8)))
    value = None
    for begin, digits, factor in parts:
        word = words[begin]
        every, some = int(np.bitwise_and.reduce(word)), int(np.bitwise_or.reduce(word))
        keep = (ONES << (8 * (8 - digits))) & ONES
        if every & keep & DIGIT != keep & DIGIT:  # of what may be in a cell only digits have this bit
            return None
        if factor == 1 and decimals:
            at = 8 * (7 - decimals)
            if (every >> at) & 255 != 46 or (some >> at) & 255 != 46:
                return None
        if every & keep == some & keep:  # the same digits in every row, as the leading ones of times
            word = word[:1]
        word &= np.uint64(keep)
        word |= np.uint64(int(ZEROS) & ~keep & ONES)
        part = _eight(word)
        if factor > 1:
            part *= np.uint64(factor % 2**64)
        value = part if value is None else value + part
    if whole + decimals > 15 and (whole + decimals > 16 or int(value.max()) >= 2**53):
        return None
    value = value.astype(np.float64)
    if decimals:  # both are exact, the division rounds once, as float() does
        value /= 10.0**decimals
    return value if len(value) == len(ends) else np.full(len(ends), value[0])


def _parse_column(path, raw, words, starts, ends, name, line):
    """Decimal numbers between starts and ends (byte positions), all with as many decimals as the first one."""
    length = ends - starts
    shortest, longest = int(length.min()), int(length.max())
    if longest == 0:
        return np.full(len(starts), np.nan)
    k = int(np.argmax(length > 0))
    first = raw[starts[k] : ends[k]].tobytes()
    decimals = len(first) - first.index(b".") - 1 if b"." in first else 0
    tail = decimals + 1 if decimals else 0
    point = ends - tail
    if shortest == longest:  # the usual case: one number instead of a column of lengths
        whole = longest - tail
        ok = np.full(len(ends), 1 <= whole <= 16 and decimals <= 8)
        whole, many = max(0, min(whole, 16)), whole > 8
    else:
        whole = length - tail
        ok = (whole >= 1) & (whole <= 16) & (decimals <= 8)
        whole, many = np.clip(whole, 0, 16), bool((whole > 8).any())
    if decimals:
        ok &= raw[np.maximum(point, 0)] == 46
    value, good = _digits(words[point - 8], np.minimum(whole, 8))
    ok &= good
    if many:
        high, good = _digits(words[point - 16], np.maximum(whole - 8, 0))
        value = value + high * 1e8
        ok &= good
    if decimals:
        fraction, good = _digits(words[ends - 8], min(decimals, 8))
        value = value * 10.0**decimals + fraction
        ok &= good & (value < 2**53)  # then it is an integer, and the division rounds once, as float() does
        value = value / 10.0**decimals
    if len(value) < len(ends):
        value = np.full(len(ends), value[0])
    if not ok.all():
        value[~ok] = np.nan
        for k in np.flatnonzero(~ok & (length > 0)):  # signs, exponents, other decimals, nonsense
            text = raw[starts[k] : ends[k]].tobytes()
            value[k] = _number(path, text.decode("utf-8", "replace"), name, line + int(k))
    return value


ONES, DIGIT = 0xFFFFFFFFFFFFFFFF, 0x1010101010101010
ZEROS, HIGH, SIXES = np.uint64(0x3030303030303030), np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(0x0606060606060606)
THREES, LOW, TEN = np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(10)
PAIRS, LEFT, RIGHT = np.uint64(0x000000FF000000FF), np.uint64(0x000F424000000064), np.uint64(0x0000271000000001)
FOUR, EIGHT, SIXTEEN, HALF = np.uint64(4), np.uint64(8), np.uint64(16), np.uint64(32)


def _digits(word, length):
    """Last `length` (0 to 8) of eight ASCII digits, little-endian in 64-bit words -> (float array, whether they are digits).

    Changes `word`. One value comes back for a whole column of equal ones (the leading digits of times)."""
    if np.ndim(length) == 0:
        keep = (ONES << (8 * (8 - int(length)))) & ONES
        word &= np.uint64(keep)
        word |= np.uint64(int(ZEROS) & ~keep & ONES)
    else:
        keep = np.uint64(ONES) << (8 * (8 - np.maximum(length, 1))).astype(np.uint64)
        keep = np.where(length > 0, keep, np.uint64(0))
        word = (word & keep) | (ZEROS & ~keep)
    if word[0] == word[-1] and (word == word[0]).all():
        word = word[:1]
    check = word + SIXES
    check &= HIGH
    check >>= FOUR
    check |= word & HIGH
    good = check == THREES
    return _eight(word).astype(np.float64), good


def _eight(word):
    """Eight ASCII digits in each 64-bit word, little-endian, as a number. Changes `word`."""
    word &= LOW
    tens = word * TEN  # pairs of digits, then fours, then all eight
    word >>= EIGHT
    word += tens
    left = word & PAIRS
    left *= LEFT
    word >>= SIXTEEN
    word &= PAIRS
    word *= RIGHT
    word += left
    word >>= HALF
    return word


def _parse_slowly(path, data, header, picks, line):
    """The same for lines with quotes, empty lines or too few cells; those are a DataError with their number."""
    out = [[] for _ in picks]
    for number, row in enumerate(csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline="")), line):
        if not row or not "".join(row).strip("\0 "):
            continue
        if len(row) != len(header):
            raise DataError(f"{path}: line {number}: found {len(row)} cells, expected {len(header)} as in the header")
        for values, (i, name) in zip(out, picks, strict=True):
            values.append(_number(path, row[i], name, number))
    return [np.array(values, float) for values in out]


def _number(path, text, name, line):
    if not text.strip():
        return np.nan
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{path}: line {line}, column {name}: found {text!r}, expected a number or nothing") from None


@dataclass
class Steps:
    """A counter as steps: at mono time `t[i]` (1 sd `sd[i]`) it had counted `j[i]` joules; `bad[i]` marks an unknown step i -> i+1.

    `upto[r]`: number of the last step that row r or an earlier one shows (None: every row shows one), `delay`: how many rows after
    it happened a step is shown; both only say where to look first."""

    t: np.ndarray
    j: np.ndarray
    sd: np.ndarray
    bad: np.ndarray
    method: str
    upto: np.ndarray | None = None
    delay: float = 0.0

    def __post_init__(self):
        n = len(self.t) - 1
        k = np.arange(0, max(0, n), max(1, n // 20_000))
        self.usual = float(np.median(self.t[k + 1] - self.t[k])) if len(k) else np.nan
        self.contrast = np.zeros(max(0, n), np.float32)  # range of the power of a step and its neighbours
        for a in range(0, n if n > 1 else 0, 4 * QUERIES):  # in pieces: memory that is touched first is slow
            b = min(n, a + 4 * QUERIES)
            lo, hi = max(0, a - 1), min(n, b + 1)
            watts = np.diff(self.j[lo : hi + 1]) / np.diff(self.t[lo : hi + 1])
            before = np.r_[watts[:1], watts[:-1]] if a == 0 else watts[: b - a]
            after = watts[a + 1 - lo :] if b < n else np.r_[watts[a + 1 - lo :], watts[-1:]]
            before, own = before[: b - a], watts[a - lo : b - lo]
            highest, lowest = np.maximum(before, own), np.minimum(before, own)
            np.maximum(highest, after, out=highest)
            np.minimum(lowest, after, out=lowest)
            np.subtract(highest, lowest, out=self.contrast[a:b], casting="same_kind")
        self.lost = np.r_[0, np.cumsum(self.bad)] if self.bad.any() else None

    def find(self, t, row):
        """(i, t[i], t[i + 1]) of the step that holds each time; the first and the last one for times beyond. `row`: its row, as a
        fractional number."""
        guess = row + self.delay
        np.fmax(guess, 0.0, out=guess)
        if self.upto is None:
            i = guess.astype(np.intp)
        else:
            i = self.upto[np.fmin(guess, len(self.upto) - 1.0, out=guess).astype(np.intp)].astype(np.intp)
        return _find(self.t, t, i)


def _find(table, t, i):
    """searchsorted(table, t, "right") - 1, kept within 0 and len(table) - 2, begun at the guess `i`; and the entries around t."""
    top = len(table) - 2
    np.maximum(i, 0, out=i)
    np.minimum(i, top, out=i)
    lo, hi = table.take(i, mode="clip"), table[1:].take(i, mode="clip")
    off = np.flatnonzero((t < lo) | (t >= hi))
    for attempt in (1, 2):
        if not len(off):
            break
        k, at = i[off], t[off]
        if attempt == 1 and len(off) < len(t):
            k = np.clip(np.where(at < lo[off], k - 1, k + 1), 0, top)
        else:
            k = np.clip(np.searchsorted(table, at, "right") - 1, 0, top)
        i[off], lo[off], hi[off] = k, table[k], table[k + 1]
        off = off[((at < lo[off]) & (k > 0)) | ((at >= hi[off]) & (k < top))]
    return i, lo, hi


@dataclass
class Energy:
    """Joules per domain and interval. `err`: one standard deviation of the random part (counter steps); gain errors are not in it."""

    joules: dict
    err: dict
    method: dict
    covered: np.ndarray

    def total(self, domains):
        """Sum over `domains` and its uncertainty; NaN where one of them is not known."""
        return sum(self.joules[d] for d in domains), np.sqrt(sum(self.err[d] ** 2 for d in domains))


@dataclass
class Samples:
    """A samples.csv in memory. Times `t` (Unix) and `mono` per row, seconds; `domains`, `source` and `scope` per domain.

    `flags`: what was wrong with the file ("gaps", "clock_step", "torn_last_line" …) and, once steps() or energy() has looked at
    a counter, with that ("cpu0:wrapped", "gpu0:counter_reset" …)."""

    t: np.ndarray
    mono: np.ndarray
    columns: dict
    meta: dict
    flags: list
    path: str = ""
    count: int = 0
    moved: np.ndarray | None = None
    domains: list = field(default_factory=list)
    source: dict = field(default_factory=dict)
    scope: dict = field(default_factory=dict)
    _steps: dict = field(default_factory=dict)

    @property
    def t_begin(self):
        return float(self.t[0])

    @property
    def t_end(self):
        return float(self.t[-1])

    @cached_property
    def tick_s(self):
        """Period of the rows: as asked for (sidecar), else the median distance."""
        if self.meta.get("hz"):
            return 1.0 / self.meta["hz"]
        return float(np.median(np.diff(self.mono))) if len(self.mono) > 1 else np.nan

    @property
    def total_domains(self):
        """Domains that may be summed: a GPU counter that covers its whole module (GH200) already holds CPU and memory."""
        if any(scope == "module" for scope in self.scope.values()):
            return [d for d in self.domains if group(d) == "gpu"]
        return list(self.domains)

    @cached_property
    def _clock(self):
        """[(first row, row after the last, offset, range of the offset)] of the parts in which t - mono does not jump."""
        offset = self.t - self.mono
        cuts = np.flatnonzero(np.abs(np.diff(offset)) > CLOCK_STEP_S) + 1
        parts = zip([0, *cuts], [*cuts, len(offset)], strict=True)
        return [(a, b, float(np.median(offset[a:b])), float(np.ptp(offset[a:b]))) for a, b in parts]

    def to_mono(self, t):
        """Unix seconds -> this file's monotonic clock, through its own (t, mono) pairs. After a backward clock step an ambiguous
        time takes the earlier meaning."""
        t = np.asarray(t, float)
        out, nearest = None, None
        for a, b, offset, span in self._clock:
            part = t - offset
            if span > 2e-3:  # a drifting pair of clocks: follow it row by row
                part = np.interp(t, self.t[a:b], self.mono[a:b])
                part = np.where(t < self.t[a], t - (self.t[a] - self.mono[a]), part)
                part = np.where(t > self.t[b - 1], t - (self.t[b - 1] - self.mono[b - 1]), part)
            if len(self._clock) == 1:
                return part
            away = np.maximum(np.maximum(self.t[a] - t, t - self.t[b - 1]), 0.0)
            out = part if out is None else np.where(away < nearest, part, out)
            nearest = away if nearest is None else np.fmin(away, nearest)
        return out

    def to_unix(self, mono):
        """This file's monotonic clock -> Unix seconds."""
        mono = np.asarray(mono, float)
        if len(self._clock) == 1 and self._clock[0][3] <= 2e-3:
            return mono + self._clock[0][2]
        row = np.clip(np.searchsorted(self.mono, mono, "right") - 1, 0, len(self.mono) - 1)
        return mono + (self.t - self.mono)[row]

    def _rows(self, mono):
        """The row of each time as a fractional number."""
        n = len(self.mono)
        if n < 2:
            return np.zeros(len(mono))
        guess = (mono - self.mono[0]) * ((n - 1) / (self.mono[-1] - self.mono[0]))
        i, lo, hi = _find(self.mono, mono, np.fmin(np.fmax(guess, 0.0), n).astype(np.intp))
        return i + (mono - lo) / (hi - lo)

    def power_w(self, domain):
        """Power readings of a GPU per row (W, NaN where there is none), read from the file now; None without such a column."""
        name = f"{domain}_w"
        if name in self.columns:
            return self.columns[name]
        found = _read_columns(self.path, lambda column, header: column == name)[0] if self.path else {}
        if name not in found:
            return None
        values = found[name][: self.count]
        return values if self.moved is None else values[self.moved]

    def steps(self, domain):
        """The counter's step table (Steps); made once per domain. KeyError for a domain the file does not have."""
        if domain not in self._steps:
            self._steps[domain] = _make_steps(self, domain)
        return self._steps[domain]

    def whole_steps(self, domain, t0, t1, clock="unix"):
        """(k, 3): time of the last step at or before t0, of the first at or after t1, joules between them; NaN where not known."""
        t0, t1 = _pair(t0, t1)
        if clock == "unix":
            t0, t1 = self.to_mono(t0), self.to_mono(t1)
        s = self.steps(domain)
        out = np.full((len(t0), 3), np.nan)
        if len(s.t) < 2:
            return out
        with np.errstate(invalid="ignore"):
            i = np.searchsorted(s.t, t0, "right") - 1
            j = np.searchsorted(s.t, t1, "left")
            ok = (i >= 0) & (j < len(s.t)) & (t1 >= t0)
        i, j = np.clip(i, 0, len(s.t) - 1), np.clip(j, 0, len(s.t) - 1)
        if s.lost is not None:
            ok &= s.lost[j] == s.lost[i]
        edges = self.to_unix(np.c_[s.t[i], s.t[j]]) if clock == "unix" else np.c_[s.t[i], s.t[j]]
        out[ok, :2] = edges[ok]
        out[ok, 2] = (s.j[j] - s.j[i])[ok]
        return out

    def energy(self, t0, t1, calls=None, idle_w=None, call_power_w=None, clock="unix"):
        """Energy of every domain in the intervals [t0, t1] (seconds, Unix or `clock="mono"`).

        `calls` (m, 2): start and end of *all* model calls of the file's time, same clock; `idle_w` {domain: W}; `call_power_w` (m,)
        or {domain: (m,)}: relative power of the calls. With calls and idle_w the phase-aware form is used.
        The parts of an interval add up to it for the same calls, idle_w and call_power_w."""
        t0, t1 = _pair(t0, t1)
        order = None
        if calls is not None:
            calls = np.asarray(calls, float).reshape(-1, 2)
            keep = np.isfinite(calls).all(axis=1) & (calls[:, 1] > calls[:, 0])
            calls, order = calls[keep], keep
        if clock == "unix":
            t0, t1 = self.to_mono(t0), self.to_mono(t1)
            calls = None if calls is None else self.to_mono(calls)
        elif clock != "mono":
            raise ValueError(f"clock: found {clock!r}, expected 'unix' or 'mono'")
        joules, err, method = {}, {}, {}
        t = np.concatenate([t0, t1])
        row = self._rows(t)
        edges = _Edges(self, calls, t) if calls is not None else None
        for domain in self.domains:
            power = call_power_w.get(domain) if isinstance(call_power_w, dict) else call_power_w
            if power is not None and order is not None:
                power = np.asarray(power, float)[order]
            idle = (idle_w or {}).get(domain)
            joules[domain], err[domain], method[domain] = _energy(self.steps(domain), t, row, edges, idle, power)
        return Energy(joules, err, method, self._covered(t0, t1))

    @cached_property
    def _holes(self):
        """Begins and ends of the gaps without rows, in order, and the seconds without rows up to each."""
        gap = np.diff(self.mono)
        k = np.flatnonzero(~(gap < GAP_TICKS * self.tick_s))
        return np.c_[self.mono[k], self.mono[k + 1]].ravel(), np.c_[np.cumsum(gap[k]) - gap[k], np.cumsum(gap[k])].ravel()

    def _seen(self, mono):
        """Seconds with rows up to each time."""
        at, lost = self._holes
        since = np.clip(mono, self.mono[0], self.mono[-1]) - self.mono[0]
        return since - np.interp(mono, at, lost) if len(at) else since

    def _covered(self, t0, t1):
        with np.errstate(invalid="ignore", divide="ignore"):
            out = np.clip((self._seen(t1) - self._seen(t0)) / (t1 - t0), 0.0, 1.0)
            out[~(t1 >= t0)] = np.nan
            same = np.flatnonzero(t1 == t0)
            # a point is covered when the gap it lies in is short: half a microsecond around it says so
            out[same] = self._seen(t1[same] + 5e-7) - self._seen(t0[same] - 5e-7) > 2.5e-7
        return out


def _pair(t0, t1):
    t0, t1 = np.broadcast_arrays(np.atleast_1d(np.asarray(t0, float)), np.atleast_1d(np.asarray(t1, float)))
    if t0.ndim != 1:
        raise ValueError(f"t0, t1: found shape {t0.shape}, expected (k,)")
    return t0, t1


def read_samples(path, meta=None):
    """Read a samples.csv (also .gz) and its sidecar (`meta`: path, or what it says; default NAME.meta.json beside it; may be missing).

    Takes BOM, CRLF, a torn last line, missing cells, duplicate and out-of-order rows; what it mended is in `.flags`.
    Raises DataError when there is no usable row or column, OSError when the file cannot be read."""
    path = Path(path)
    columns, flags = _read_columns(path, _needed)
    if "t" not in columns:
        raise DataError(f"{path}: line 1: found no column t, expected a header 't,mono,...' as sampler.py writes it")
    t = columns.pop("t")
    mono = columns.pop("mono", t)
    count, moved = len(t), None
    ok = np.isfinite(t) & np.isfinite(mono)
    if not ok.any():
        raise DataError(f"{path}: found no row, expected at least one; the sampler died before its first reading (see its log)")
    if not ok.all():
        flags.append("rows_without_time")
    if np.any(np.diff(mono[ok]) < -60) and np.all(np.diff(t[ok]) > -60):
        mono = t  # the host was restarted inside the file: its monotonic clock began anew
        flags.append("mono_restarted")
    if np.any(np.diff(mono[ok]) < 0):
        flags.append("rows_out_of_order")
    order = np.flatnonzero(ok)
    order = order[np.argsort(mono[ok], kind="stable")]
    first = np.r_[True, np.diff(mono[order]) > 0]
    if not first.all():
        flags.append("duplicate_rows")
    order = order[first]
    if len(order) < len(t) or np.any(np.diff(order) != 1):
        t, mono = t[order], mono[order]
        columns = {name: values[order] for name, values in columns.items()}
        moved = order
    if np.any(np.abs(np.diff(t - mono)) > CLOCK_STEP_S):
        flags.append("clock_step")
    samples = Samples(t, mono, columns, _read_meta(path, meta, flags), flags, str(path), count, moved)
    counters = samples.meta.get("counters") or {}
    for name in columns:
        match = COUNTER.match(name)
        domain = match.group(1) if match else name[:-2]
        if match or (name.endswith("_w") and f"{domain}_mj" not in columns):
            default = {"_mj": "nvml", "_uj": "rapl", "_est_uj": "model"}[match.group(2)] if match else "nvml-power"
            info = counters.get(name) or {}
            samples.domains.append(domain)
            samples.source[domain] = info.get("source") or default
            samples.scope[domain] = info.get("scope") or {"gpu": "gpu", "cpu": "package", "dram": "dram"}[group(domain)]
    if not samples.domains:
        raise DataError(f"{path}: line 1: found no counter column, expected at least one of gpu<i>_mj, cpu<k>_uj, cpu<k>_est_uj")
    if np.any(np.diff(mono) > GAP_TICKS * samples.tick_s):
        flags.append("gaps")
    return samples


def _needed(name, header):
    """Times, counters, edges; power only where it is the counter (else it is read when a counter is in doubt)."""
    if name.startswith("gpu") and name.endswith("_w"):
        return bool(re.match(r"^gpu\d+_w$", name)) and name[:-2] + "_mj" not in header
    return name in ("t", "mono") or bool(COUNTER.match(name) or re.match(r"^gpu\d+_(edge|edge_err)$", name))


def _read_meta(path, meta, flags):
    if isinstance(meta, dict):
        return meta
    if meta is None:
        name = path.name.removesuffix(".gz").removesuffix(".csv")
        meta = path.with_name(f"{name}.meta.json")
        if not meta.exists():
            flags.append("no_sidecar")
            return {}
    try:
        with open(meta, encoding="utf-8-sig") as f:
            found = json.load(f)
    except ValueError as e:
        raise DataError(f"{meta}: not JSON ({e}); delete it to go on without limits and ranges") from None
    if not isinstance(found, dict):
        raise DataError(f"{meta}: found {type(found).__name__}, expected an object")
    return found


def _flag(samples, text):
    if text not in samples.flags:
        samples.flags.append(text)


def _make_steps(samples, domain):
    """Step table of one domain; sets flags such as 'cpu0:wrap_ambiguous' on the samples."""
    source = samples.source[domain]
    suffix = next((s for s in UNIT_J if domain + s in samples.columns), None)
    info = (samples.meta.get("counters") or {}).get(domain + (suffix or "_w")) or {}
    if suffix is None:
        return _integrate_power(samples, domain)
    raw = samples.columns[domain + suffix]
    there = np.isfinite(raw)
    rows, which = slice(None), None  # every row, without copying, is the usual case
    if not there.all():
        rows = which = np.flatnonzero(there)
        _flag(samples, f"{domain}:missing_cells")
        since = np.diff(samples.mono[which])
        if np.any((since > GAP_TICKS * samples.tick_s) & (np.diff(which) > 1)):
            _flag(samples, f"{domain}:counter_gap")
    value, mono = raw[rows] * UNIT_J[suffix], samples.mono[rows]
    limit = 3 * info["power_limit_w"] if info.get("power_limit_w") else MAX_POWER_W[group(domain)]
    span = info.get("max_range_uj")
    span = span * 1e-6 if span and source == "rapl" else None
    rise, bad, keep = _unwrap(samples, domain, value, mono, limit, span)
    if not keep.any():
        return Steps(np.empty(0), np.empty(0), np.empty(0), np.empty(0, bool), "edges")
    # a value read again is no new step, and a counter that stands still has not counted zero joules
    point = keep if source == "model" else keep & ((rise > 0) | bad)
    total = np.cumsum(rise if keep.all() else np.where(keep, rise, 0.0), out=rise)
    edge = samples.columns.get(f"{domain}_edge")
    if source in READ_EDGE_SD_S:
        point[np.argmax(keep)] = True
        t, sd, method = mono, np.full(len(mono), READ_EDGE_SD_S[source], np.float32), "edges"
    else:
        known = np.zeros(len(mono), bool)
        if edge is not None:
            edge = _edge_mono(samples, edge[rows], mono, rows)
            known = edge <= mono + 0.05
        half = samples.columns.get(f"{domain}_edge_err")
        half = np.full(len(mono), np.nan, np.float32) if half is None else half[rows].astype(np.float32)
        half[np.isnan(half)] = 0.5 * samples.tick_s
        t = edge
        if not known.all():
            before = np.r_[np.nan, mono[:-1]]
            t = (before + mono) / 2 if edge is None else np.where(known, edge, (before + mono) / 2)
            half = np.where(known, half, (mono - before) / 2).astype(np.float32)
        first = np.argmax(keep)
        point[first] = known[first]
        half /= np.float32(np.sqrt(3))  # half-width of an even distribution -> standard deviation
        sd = half
        method = "edges" if point.any() and known[point].mean() > 0.5 else "linear"
    lost = np.cumsum(bad) if bad.any() else None
    t, j, sd, lost, which = _pick(point, which, t, total, sd, lost)
    if (t[1:] < t[:-1]).any():
        t = np.maximum.accumulate(t)
    # of several steps at one time the last holds them all
    t, j, sd, lost, which = _pick(np.r_[t[1:] > t[:-1], np.ones(min(1, len(t)), bool)], which, t, j, sd, lost)
    steps = Steps(t, j, sd, np.zeros(max(0, len(t) - 1), bool) if lost is None else np.diff(lost) > 0, method)
    if len(t):
        some = np.arange(0, len(t), max(1, len(t) // 2000))
        shown = samples.mono[some if which is None else which[some]]
        steps.delay = float(np.median(shown - t[some]) / samples.tick_s) if samples.tick_s > 0 else 0.0
        if which is not None:
            mark = np.zeros(len(samples.mono), np.int32)
            mark[which] = 1
            steps.upto = np.cumsum(mark, dtype=np.int32) - np.int32(1)
    _check_still(samples, domain, steps, mono if keep.all() else mono[keep])
    return steps


def _edge_mono(samples, edge, mono, rows):
    """Times of steps on the monotonic clock. They are taken relative to the row's own time: then neither a clock step nor its
    repair moves them. A file whose edges kept the clock of its first row is read that way when the row's own clock would place
    them elsewhere."""
    own = edge - samples.t[rows]
    own += mono
    offset = [part[2] for part in samples._clock]
    if max(offset) - min(offset) + max(part[3] for part in samples._clock) < 0.4:
        return own
    base = edge - (samples.t[0] - samples.mono[0])
    return np.where(np.abs(mono - own) > np.abs(mono - base) + 0.5, base, own)


def _pick(mask, which, *arrays):
    """Each array where `mask` is true, and the rows they come from; None stays None, and nothing is copied when all of it is."""
    if mask.all():
        return *arrays, which
    return *(None if a is None else a[mask] for a in arrays), np.flatnonzero(mask) if which is None else which[mask]


def _unwrap(samples, domain, value, mono, limit_w, span):
    """Rise from kept row to kept row (joules), rows whose rise is unknown, rows kept. `span`: RAPL range in joules or None."""
    n = len(value)
    keep, bad = np.ones(n, bool), np.zeros(n, bool)
    rise = np.empty(n)
    rise[:1] = 0.0
    np.subtract(value[1:], value[:-1], out=rise[1:])
    slack = 0.25 * limit_w  # a value may belong to a step up to 0.2 s older than its row
    if span is not None:
        since = mono[1:] - mono[:-1]
        may_wrap = since * limit_w / 3 > span
        if may_wrap.any():
            bad[1:] = may_wrap & (since > GAP_TICKS * samples.tick_s)  # how often it wrapped there cannot be told
            _flag(samples, f"{domain}:wrap_ambiguous")
    if not n or (rise.min() >= 0 and rise.max() <= slack):
        return rise, bad, keep
    dt = np.r_[0.0, np.diff(mono)]

    def fits(a, b, extra=0.0):
        return 0 <= value[b] - value[a] + extra <= limit_w * (mono[b] - mono[a]) + slack

    for r in np.flatnonzero((rise < 0) | (rise > limit_w * dt + slack)):
        if not keep[r]:
            continue
        before = np.flatnonzero(keep[max(0, r - 50) : r]) + max(0, r - 50)
        if not len(before):
            continue
        p = before[-1]
        if fits(p, r):
            rise[r] = value[r] - value[p]
            continue
        if value[r] < value[p] and span is not None and fits(p, r, span):
            rise[r] = value[r] - value[p] + span
            _flag(samples, f"{domain}:wrapped")
            continue
        # a few wrong values, then the counter is where it should be; one that stays up has jumped
        back = next((q for q in range(r + 1, min(r + 6, n)) if fits(p, q) and (value[r] < value[p] or value[q] < value[r])), None)
        if back is not None:
            keep[r:back] = False
            rise[back] = value[back] - value[p]
            _flag(samples, f"{domain}:counter_glitch")
        elif len(before) > 1 and value[r] < value[p] and fits(before[-2], r):
            keep[p] = False
            rise[r] = value[r] - value[before[-2]]
            _flag(samples, f"{domain}:counter_glitch")
        else:
            rise[r], bad[r] = 0.0, True
            why = "counter_jump" if value[r] > value[p] else "counter_reset"
            if why == "counter_reset" and samples.source[domain] == "rapl":
                why = "wrap_unknown_range" if span is None else "counter_reset"
            _flag(samples, f"{domain}:{why}")
    return rise, bad, keep


def _check_still(samples, domain, steps, mono):
    """A counter that stands still is flagged; where its own power reading, or the power right before and after, says that energy flowed
    uncounted, it is unknown."""
    if samples.source[domain] == "model":
        return
    long = 2.0 if len(steps.t) < 3 else max(2.0, 10 * steps.usual)
    gap = np.flatnonzero(np.diff(steps.t) > long)
    end = steps.t[-1] if len(steps.t) else mono[0]
    if len(mono) and mono[-1] - end > long:
        _flag(samples, f"{domain}:counter_stuck")
    power = samples.power_w(domain) if len(gap) and group(domain) == "gpu" else None
    for g in gap:
        a, b = np.searchsorted(samples.mono, [steps.t[g], steps.t[g + 1]])
        inside = (mono > steps.t[g]) & (mono < steps.t[g + 1])
        if inside.sum() < 3:
            continue  # no rows: a gap of the sampler, not of the counter
        _flag(samples, f"{domain}:counter_stuck")
        watts = power[a:b][np.isfinite(power[a:b])] if power is not None else np.empty(0)
        if not len(watts) and 0 < g < len(steps.t) - 2:
            around = slice(g - 1, g + 3)
            watts = np.min((np.diff(steps.j[around]) / np.diff(steps.t[around]))[::2], keepdims=True)
        if len(watts) and watts.mean() * (steps.t[g + 1] - steps.t[g]) > 2 * (steps.j[g + 1] - steps.j[g]):
            steps.bad[g] = True
            steps.lost = np.r_[0, np.cumsum(steps.bad)]


def _integrate_power(samples, domain):
    """nvml-power: no energy counter, power readings integrated (trapezoids between rows). What was drawn in a gap is unknown."""
    raw = samples.columns[f"{domain}_w"]
    ok = np.isfinite(raw)
    if not ok.all():
        _flag(samples, f"{domain}:missing_cells")
    t, w = samples.mono[ok], raw[ok]
    if not len(t):
        return Steps(np.empty(0), np.empty(0), np.empty(0), np.empty(0, bool), "linear")
    joules = np.r_[0.0, np.cumsum((w[1:] + w[:-1]) / 2 * np.diff(t))]
    # the reading may be an average over a second (Ampere and later): where power changes, its time is not known better than that
    change = np.abs(np.interp(t + 0.5, t, w) - np.interp(t - 0.5, t, w))
    sd = 0.005 + 0.25 * change / np.maximum(w, 1.0)
    return Steps(t, joules, sd, np.diff(t) > GAP_TICKS * samples.tick_s, "linear")


class _Edges:
    """Begins and ends of all model calls in order of time, and how many lie at or before each time that is asked for."""

    def __init__(self, samples, calls, t):
        both = np.concatenate([calls[:, 0], calls[:, 1]])
        self.order = np.argsort(both, kind="stable")
        self.t = both[self.order]
        self.row = samples._rows(self.t)
        self.change = np.repeat([1, -1], len(calls))[self.order]
        self.active = np.cumsum(self.change)  # calls that go on after each edge
        self.before = np.searchsorted(self.t, t, "right")
        self.same = (self.active > 0).astype(float)

    def weight(self, call_power):
        """Weight of the calls after each edge: what they draw together, 1 while there is one when that is not known."""
        if call_power is None:
            return self.same
        total = np.cumsum(np.concatenate([call_power, call_power])[self.order] * self.change)
        return self.same * np.maximum(total, 0.0)


def _energy(s, t, row, edges, idle, call_power):
    """Joules and standard deviation of the intervals from each time of the first half of `t` (mono) to that of the second half,
    from one step table, and the method used."""
    k = len(t) // 2
    phase = edges is not None and idle is not None and s.method == "edges"
    method = "phase" if phase else s.method
    if len(s.t) < 2:
        return np.full(k, np.nan), np.full(k, np.nan), method
    profile = _profile(s, edges, idle, call_power) if phase else None
    joules, variance = np.empty(2 * k), np.empty(2 * k)
    step = None if s.lost is None else np.empty(2 * k, np.intp)
    with np.errstate(invalid="ignore"):
        # begins and ends of the same intervals one after the other: they lie in the same part of the table
        for a, b, is_end in ((a, min(a + QUERIES, k), is_end) for a in range(0, k, QUERIES) for is_end in (False, True)):
            part = slice(k + a, k + b) if is_end else slice(a, b)
            i, since = _at(s, t[part], row[part], profile, edges.before[part] if phase else None, joules[part], variance[part])
            if step is not None:  # an interval that ends with a step does not touch the next one
                step[part] = np.maximum(i - (since == 0), 0) if is_end else i
        out, sd = joules[k:] - joules[:k], np.sqrt(variance[k:] + variance[:k])
        unknown = ~(t[k:] >= t[:k]) | np.isnan(out)
    if step is not None:
        unknown |= s.lost[np.maximum(step[k:] + 1, step[:k])] > s.lost[step[:k]]
    out[unknown] = sd[unknown] = np.nan
    return out, sd, method


@dataclass
class _Profile:
    """The calls' edges within the steps: for each its time, its step, joules up to it, watts before and after it, and whether its
    step had to be spread evenly. `skipped` edges lie before the first step. An entry without a step stands at either end."""

    skipped: int
    t: np.ndarray
    step: np.ndarray
    joules: np.ndarray
    before: np.ndarray
    after: np.ndarray
    even: np.ndarray


def _profile(s, edges, idle, call_power):
    lo, hi = np.searchsorted(edges.t, [s.t[0], s.t[-1]])
    n = hi - lo
    p = _Profile(lo, *np.zeros((1, n + 2)), np.full(n + 2, -1), *np.zeros((3, n + 2)), np.zeros(n + 2, bool))
    if not n:
        return p
    weight = edges.weight(call_power)
    busy = edges.active > 0
    p.t[1:-1] = edges.t[lo:hi]
    i, begin, end = s.find(edges.t[lo:hi], edges.row[lo:hi])
    p.step[1:-1] = i
    a = 0
    while a < n:  # in pieces that end with a step
        b = min(a + QUERIES, n)
        while b < n and i[b] == i[b - 1]:
            b += 1
        part, out = slice(a, b), slice(a + 1, b + 1)
        prior = slice(lo + a - 1, lo + b) if lo + a else slice(0, b)
        weights, is_busy = weight[prior], busy[prior]
        if not lo + a:
            weights, is_busy = np.r_[0.0, weights], np.r_[False, is_busy]
        found = _apportion(s, p.t[out], i[part], begin[part], end[part], weights, is_busy, idle)
        p.joules[out], p.before[out], p.after[out], p.even[out] = found
        a = b
    return p


def _apportion(s, t, i, begin, end, weight, busy, idle):
    """Joules up to each edge, watts before and after it, whether its step is spread evenly. `weight` and `busy` of the calls after
    each edge, the one before the first edge included."""
    first = np.r_[True, i[1:] != i[:-1]]
    start = np.flatnonzero(first)
    slot = np.cumsum(first) - 1
    # slices: from each edge to the next one or the end of its step, and from the begin of a step to its first edge
    length = np.where(np.r_[first[1:], True], end, np.r_[t[1:], 0.0]) - t
    lead = t[start] - begin[start]
    rest_s = np.add.reduceat(np.where(busy[1:], 0.0, length), start) + np.where(busy[start], 0.0, lead)
    work = np.add.reduceat(weight[1:] * length, start) + weight[start] * lead
    at = i[start]
    total = s.j[at]
    joules = s.j[at + 1] - total
    remainder = joules - idle * rest_s
    # no call time at all, or less energy than idle power alone would take: spread evenly
    even = (work <= 0) | (remainder < 0)
    mean = (joules / (end - begin)[start])[slot]
    per_weight = (remainder / np.where(even, 1.0, work))[slot]
    spread = even[slot]
    before = np.where(spread, mean, np.where(busy[:-1], per_weight * weight[:-1], idle))
    after = np.where(spread, mean, np.where(busy[1:], per_weight * weight[1:], idle))
    spent = np.r_[0.0, (after * length)[:-1]]
    spent[start] = before[start] * lead
    up_to = np.cumsum(spent)
    up_to += (total - (up_to - spent)[start])[slot]
    # an edge at the very begin of a step cuts nothing
    even &= t[np.r_[start[1:], len(t)] - 1] > begin[start]
    return up_to, before, after, even[slot]


def _at(s, t, row, profile, edges_before, joules, variance):
    """Writes E(t) and its variance; gives the step of each time and how long ago it began."""
    i, begin, end = s.find(t, row)
    width, since = np.subtract(end, begin, out=end), np.subtract(t, begin, out=begin)
    far = np.flatnonzero((since < 0) | (since > width) | np.isnan(t)) if not (t.min() >= s.t[0] and t.max() <= s.t[-1]) else ()
    j = s.j.take(i, mode="clip")
    watts = s.j[1:].take(i, mode="clip")
    watts -= j
    watts /= width
    np.multiply(watts, since, out=joules)
    joules += j
    # single precision is plenty for an uncertainty, and half the memory
    f = np.divide(since, width, dtype=np.float32, casting="same_kind")
    if len(far):
        np.clip(f, 0, 1, out=f)
    rest = 1 - f
    spread = np.square(rest * s.sd.take(i, mode="clip")) + np.square(f * s.sd[1:].take(i, mode="clip"))
    smeared = slice(None)
    if profile is not None:
        # phases known: nothing is smeared but in steps that a gap made long and in those spread evenly for want of better
        smear = width > GAP_TICKS * s.usual
        a = np.clip(edges_before - profile.skipped, 0, len(profile.t) - 2)
        inside = (since >= 0) & (since <= width)
        behind = (profile.step[a] == i) & inside
        ahead = np.flatnonzero((profile.step[a + 1] == i) & inside & ~behind)
        b = a[ahead] + 1
        joules[ahead] = j[ahead] + profile.before[b] * since[ahead]
        watts[ahead] = profile.before[b]
        smear[ahead] |= profile.even[b]
        behind = np.flatnonzero(behind)
        b = a[behind]
        away, power = t[behind] - profile.t[b], profile.after[b]
        joules[behind] = profile.joules[b] + power * away
        # at a call's very edge the error is that of the idle side: moving the counter step moves only idle energy
        watts[behind] = np.where(away < 1e-6, np.minimum(power, profile.before[b]), power)
        smear[behind] |= profile.even[b]
        smeared = np.flatnonzero(smear)
    spread *= np.square(watts, dtype=np.float32, casting="same_kind")
    if profile is None or len(smeared):
        spread[smeared] += np.square(
            f[smeared] * rest[smeared] * width[smeared].astype(np.float32) * s.contrast.take(i[smeared], mode="clip")
        )
    variance[:] = spread
    if len(far):
        outside = np.maximum(s.t[0] - t[far], t[far] - s.t[-1])
        joules[far[~(outside <= 1.5 * s.usual)]] = np.nan
        variance[far] += (0.5 * outside * np.abs(watts[far])) ** 2  # the power beyond the last step is a guess
    return i, since


def unix_time(text):
    """A moment, for argparse."""
    from stages.arguments import parsed

    return parsed(float, text, lambda t: abs(t) < 1e11, "a Unix time in seconds")  # milliseconds since 1970 are above


def main(argv=None):
    import argparse
    import sys

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", help="samples.csv as sampler.py writes it")
    parser.add_argument("--from", dest="t0", type=unix_time, metavar="T", help="begin, Unix seconds (default: first row)")
    parser.add_argument("--to", dest="t1", type=unix_time, metavar="T", help="end, Unix seconds (default: last row)")
    args = parser.parse_args(argv)
    try:
        samples = read_samples(args.samples)
        t0 = samples.t_begin if args.t0 is None else args.t0
        t1 = samples.t_end if args.t1 is None else args.t1
        covers = f"{args.samples} covers {samples.t_begin:.3f} to {samples.t_end:.3f}"
        if t0 >= t1:
            raise DataError(f"--from {t0:.3f} --to {t1:.3f}: expected a begin before the end ({covers})")
        if t1 < samples.t_begin or t0 > samples.t_end:
            raise DataError(f"--from {t0:.3f} --to {t1:.3f}: {covers}")
    except (DataError, OSError) as e:
        print(f"energylib.py: {e}", file=sys.stderr)
        return 2
    energy = samples.energy([t0], [t1])
    print(f"{args.samples}: {len(samples.t)} rows, tick {samples.tick_s:.3f} s, {t1 - t0:.3f} s, covered {energy.covered[0]:.3f}")
    for domain in samples.domains:
        joules, err = energy.joules[domain][0], energy.err[domain][0]
        text = "unknown" if np.isnan(joules) else f"{joules:.3f} J +- {err:.3f}, {joules / (t1 - t0):.2f} W"
        print(f"  {domain}: {text} ({samples.source[domain]}, {energy.method[domain]})")
    if samples.flags:
        print("  flags: " + ", ".join(samples.flags))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
