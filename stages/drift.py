"""Has the machine drifted since its calibration? The calibration's reference cell, sent again in the middle of a batch, against its first values.

    python stages/drift.py cell  --calib results/h200/calib                       # CONTEXT OUTPUT of the reference cell
    python stages/drift.py check --calib results/h200/calib --calls data/h200/batch/drift.x/calls.jsonl --samples data/h200/batch/drift.x/samples.csv \\
        --tolerance 0.05 --log data/h200/batch/drift.csv

Time and energy of each call, miss and hit apart, against the mean of the same cell in calls_energy.csv. A shift beyond the tolerance is warned
of; every check is a row per state in the log (t, state, n, time_s, time_shift, and energy and its shift per counter group).
Exit code: 0 within the tolerance, 4 beyond, 2 nothing to compare with or bad input.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles, idle_check  # noqa: E402

COLUMNS = ["context", "output", "state", "reference", "unused", "duration_s"]  # of calls_energy.csv, the energies apart
ANEW = "calibrate anew with FORCE=1 bash 03_calibrate.sh"
FIELDS = ["t", "state", "n", "time_s", "time_shift", "gpu_total_j", "gpu_shift", "cpu_total_j", "cpu_shift"]


def calibrated(calib):
    """Usable rows of calls_energy.csv and the reference cell (context, output). Raises ValueError when there is none."""
    path = Path(calib) / "calls_energy.csv"
    if not path.exists():
        raise ValueError(f"{path}: not found, expected the calls of a calibration (03_calibrate.sh)")
    rows = csvfiles.read(path)
    for number, r in enumerate(rows, 2):
        if lacking := [c for c in COLUMNS if r.get(c) is None]:
            raise ValueError(f"{path}: line {number}: no {', '.join(lacking)}; {ANEW}")
        for c in ("context", "output", "duration_s", "gpu_total_j", "cpu_total_j"):
            try:
                if (r.get(c) and not math.isfinite(float(r[c]))) or (c == "duration_s" and not r["unused"] and not float(r[c]) > 0):
                    raise ValueError
            except ValueError:
                raise ValueError(f"{path}: line {number}, {c}: found '{r[c]}', expected a number{' above 0' * (c == 'duration_s')}; {ANEW}") from None
    rows = [r for r in rows if not r["unused"]]
    try:
        cells = {(int(r["context"]), int(r["output"])) for r in rows if r["reference"]}
    except ValueError as e:
        raise ValueError(f"{path}: reference cell: {e}; {ANEW}") from None
    if len(cells) != 1:
        raise ValueError(f"{path}: {len(cells)} reference cells, expected one (microbench.py --reference)")
    return rows, cells.pop()


def mean(rows, column):
    values = [float(r[column]) for r in rows if r.get(column)]
    return sum(values) / len(values) if values else None


def compare(measured, known):
    """One row of the log for calls of one cell and state: `measured` and `known` are dicts with duration_s and <group>_total_j."""
    row = {"n": len(measured), "time_s": mean(measured, "duration_s")}
    row["time_shift"] = row["time_s"] / mean(known, "duration_s") - 1
    for g in ("gpu", "cpu"):
        now, then = mean(measured, f"{g}_total_j"), mean(known, f"{g}_total_j")
        row |= {f"{g}_total_j": now, f"{g}_shift": now / then - 1 if now is not None and then else None}
    return row


def check(a):
    import numpy as np

    import energylib

    known, cell = calibrated(a.calib)
    calls = []
    for number, c in enumerate(energylib.read_jsonl(a.calls), 1):
        try:
            times = [float(c[k]) for k in ("t_start", "t_end", "mono_start", "mono_end")] if c["valid"] else []
            if times and (c["cell"]["context"], c["cell"]["output"]) == cell and c["cell"]["state"] and np.isfinite(times).all():
                calls.append(c)
        except (KeyError, TypeError, ValueError) as e:
            said = f"no {e}" if isinstance(e, KeyError) else e
            raise ValueError(f"{a.calls}: call {number}: {said}; expected a call as microbench.py notes it") from None
    if not calls:
        raise ValueError(f"{a.calls}: no valid call of the reference cell {cell[0]}/{cell[1]}")
    samples = energylib.read_samples(a.samples)
    spans = np.array([(c["t_start"], c["t_end"]) for c in calls])
    (idle_w,) = idle_check.calibrated(a.calib, samples.domains, "loaded")
    joules = samples.energy(spans[:, 0], spans[:, 1], calls=spans, idle_w=idle_w).joules
    measured = []
    for i, c in enumerate(calls):
        row = {"state": c["cell"]["state"], "duration_s": c["mono_end"] - c["mono_start"]}
        for d in samples.domains:
            column = f"{energylib.group(d)}_total_j"
            row[column] = row.get(column, 0.0) + float(joules[d][i])
        measured.append(row)
    rows, code = [], 0
    for state in sorted({r["state"] for r in measured}):
        then = [r for r in known if (r["context"], r["output"], r["state"]) == (str(cell[0]), str(cell[1]), state)]
        if not then:
            continue
        row = {"t": f"{spans[-1, 1]:.3f}", "state": state} | compare([r for r in measured if r["state"] == state], then)
        rows.append({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        shifts = {k[:-6]: row[k] for k in ("time_shift", "gpu_shift", "cpu_shift") if row[k] is not None}
        beyond = any(abs(x) > a.tolerance for x in shifts.values())
        code = 4 if beyond else code
        print(f"{'WARNING: drift: ' if beyond else ''}reference cell {cell[0]}/{cell[1]} {state}: "
              + ", ".join(f"{k} {x:+.1%}" for k, x in shifts.items()) + " against the calibration")  # fmt: skip
    if not rows:
        states = " or ".join(sorted({r["state"] for r in measured}))
        raise ValueError(f"{a.calib}/calls_energy.csv: no usable call of the reference cell {cell[0]}/{cell[1]} {states}, expected one at least; {ANEW}")
    if a.log:
        csvfiles.append(a.log, FIELDS, rows)
    return code


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["cell", "check"])
    p.add_argument("--calib", required=True)
    p.add_argument("--calls")
    p.add_argument("--samples")
    p.add_argument("--tolerance", type=float, default=0.05)
    p.add_argument("--log", type=Path)
    a = p.parse_args()
    if a.what == "check" and (lacking := [f"--{k}" for k in ("calls", "samples") if not getattr(a, k)]):
        p.error(f"check needs {' and '.join(lacking)}")
    try:
        if a.what == "cell":
            print(*calibrated(a.calib)[1])
        else:
            sys.exit(check(a))
    except (OSError, ValueError) as e:
        print(f"drift: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
