"""Compare an idle baseline with the calibration's loaded-idle power, so that a leftover process or a changed machine shows before a batch.

    python stages/idle_check.py --idle data/batch/idle_loaded.csv --calib results/calib

Prints one line a counter; warns beyond 3 %. Without a calibration it prints the powers alone. Exit code 0 unless the file cannot be read (2).
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
TOLERANCE = 0.03  # a trajectory's own quiet power is flagged at the same difference


def main():
    import numpy as np

    import calibrate
    import energylib

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--idle", required=True)
    p.add_argument("--calib", type=Path, required=True)
    a = p.parse_args()
    try:
        samples = energylib.read_samples(a.idle)
    except (OSError, ValueError) as e:
        print(f"idle_check: {e}", file=sys.stderr)
        sys.exit(2)
    known = {}
    if (a.calib / "params.json").exists():
        known = calibrate.idle_power(json.loads((a.calib / "params.json").read_text()), "rested")
    begin, end = samples.t[0], samples.t[-1]
    energy = samples.energy(np.array([begin]), np.array([end]))
    for d in samples.domains:
        power_w = float(energy.joules[d][0]) / (end - begin)
        label = "estimated" if samples.source[d] == "model" else samples.source[d]
        line = f"idle power {d}: {power_w:.2f} W ({label})"
        if known.get(d):
            shift = power_w / known[d] - 1
            line += f", {shift:+.1%} against the calibration's rested power"
            if abs(shift) > TOLERANCE:
                line = (
                    "WARNING: "
                    + line
                    + ": something else runs, or the machine has changed since; calibrate anew with FORCE=1 bash 03_calibrate.sh"
                )
        print(line)


if __name__ == "__main__":
    main()
