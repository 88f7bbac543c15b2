"""Is this machine as quiet as when it was calibrated? Idle power against the calibration's, and processes on the GPUs that are not the server's.

    python stages/idle_check.py --idle data/h200/batch/idle_loaded.csv --calib results/h200/calib
    python stages/idle_check.py --idle data/h200/batch/check.csv --calib results/h200/calib --log data/h200/batch/checks.csv --before fix-bug__summarize-off__r1
    python stages/idle_check.py --processes --gpus auto --server .cache/run/server-8000.json

Idle power should lie between the calibration's rested power and its power between calls, give or take 3 %; beyond, something else runs or the
machine has changed. Without a calibration, and for estimated powers, they are printed without a verdict. --processes prints those that hold
memory on the GPUs in use and are neither the server (its note under .cache/run tells which) nor below it; without a note nothing is foreign.
Exit code: 0 as expected, 4 not (the lines say what), 2 bad input.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles  # noqa: E402

TOLERANCE = 0.03  # a trajectory's own quiet power is flagged at the same difference
NOT_AS_EXPECTED = 4


def compare(power_w, rested_w, between_w):
    """Relative shift of an idle power from the nearer end of what the calibration saw; 0 inside, None when it saw nothing."""
    known = [w for w in (rested_w, between_w) if w]
    if not known:
        return None
    low, high = min(known), max(known)
    return power_w / high - 1 if power_w > high else power_w / low - 1 if power_w < low else 0.0


def calibrated(calib, domains, *states):
    """{domain: W} of each state of the idle power in a calibration's params.json. Raises ValueError that names the file, OSError."""
    import calibrate

    path = Path(calib) / "params.json"
    try:
        params = json.loads(path.read_text(encoding="utf-8-sig"))
        found = [calibrate.idle_like(params, domains, state) for state in states]
        if wrong := [w for idle in found for w in idle.values() if isinstance(w, bool) or not 0 <= w < math.inf]:
            raise ValueError(f"found {wrong[0]}, expected watts")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        said = f"no {e}" if isinstance(e, KeyError) else e
        raise ValueError(f"{path}: idle: {said}: not a params.json as calibrate.py writes it; calibrate anew with FORCE=1 bash 03_calibrate.sh") from None
    return found


def idle(a):
    import numpy as np

    import energylib

    samples = energylib.read_samples(a.idle)
    rested, between = {}, {}
    if a.calib and (a.calib / "params.json").exists():
        rested, between = calibrated(a.calib, samples.domains, "rested", "loaded")
    begin, end = samples.t[0], samples.t[-1]
    if not end > begin:
        raise ValueError(f"{a.idle}: found one sample, expected two at least; the sampler died early (see its log)")
    energy = samples.energy(np.array([begin]), np.array([end]))
    rows, code, unknown = [], 0, []
    for d in samples.domains:
        power_w = float(energy.joules[d][0]) / (end - begin)
        if not math.isfinite(power_w):
            unknown.append(d)
            continue
        shift = compare(power_w, rested.get(d), between.get(d))
        estimated = samples.source[d] == "model"  # from busy time: noise of a few per cent, and no meter that could show a fault
        line = f"idle power {d}: {power_w:.2f} W ({'estimated' if estimated else samples.source[d]})"
        if shift is not None:
            line += f", {shift:+.1%} against the calibration"
        if shift is not None and abs(shift) > TOLERANCE and not estimated:
            line = f"WARNING: {line}: something else runs, or the machine has changed since; calibrate anew with FORCE=1 bash 03_calibrate.sh"
            code = NOT_AS_EXPECTED
        print(line)
        rows.append({"t": f"{end:.3f}", "before": a.before, "domain": d, "power_w": f"{power_w:.3f}", "seconds": f"{end - begin:.2f}",
                     "shift": "" if shift is None else f"{shift:.4f}"})  # fmt: skip
    if a.log and rows:
        csvfiles.append(a.log, list(rows[0]), rows)
    if unknown:
        raise ValueError(f"{a.idle}: {', '.join(unknown)}: found too few readings for a power, expected two at least")
    return code


def foreign(running, ours):
    """Pids on the GPUs that are not ours. In a container NVML may name pids of the host, which mean nothing here: those are left out."""
    return sorted(pid for pid in running if pid not in ours and Path(f"/proc/{pid}").exists())


def processes(a):
    import sampler
    from stages import supervise

    try:
        nvml = sampler.Nvml(a.gpus)
    except (sampler.SamplerError, ImportError) as e:
        raise ValueError(f"--gpus {a.gpus}: the package nvidia-ml-py is missing; pip install nvidia-ml-py" if isinstance(e, ImportError) else e) from None
    running = set()
    for gpu in nvml.gpus:
        for kind in ("Compute", "Graphics"):
            asked = (nvml.ask(f"nvmlDeviceGet{kind}RunningProcesses{version}", gpu["handle"]) for version in ("_v3", "_v2"))  # older drivers have _v2
            running |= {p.pid for p in next((found for found in asked if found is not None), [])}
    if not running:
        return 0
    try:
        note = json.loads(a.server.read_text())
        roots = [note["pid"], note["supervisor"]]
    except (OSError, ValueError):
        return 0
    except (KeyError, TypeError):
        raise ValueError(f"{a.server}: found no pid and supervisor, expected the note of stages/supervise.py; stop the server and start it anew") from None
    found = foreign(running, {os.getpid(), *roots, *(p for r in roots for p in supervise.descendants(r))})
    for pid in found:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        print(f"process {pid} is on a GPU that is measured and is not the server's: {command[:120].strip()}")
    return NOT_AS_EXPECTED if found else 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--idle", help="samples of a quiet time")
    what.add_argument("--processes", action="store_true")
    p.add_argument("--calib", type=Path)
    p.add_argument("--log", type=Path, help="append what was found to this CSV")
    p.add_argument("--before", default="", help="what comes next, for the log")
    p.add_argument("--gpus", default="auto")
    p.add_argument("--server", type=Path, default=Path("none"), help="the note of the server's process group")
    a = p.parse_args()
    try:
        sys.exit(idle(a) if a.idle else processes(a))
    except (OSError, ValueError) as e:
        print(f"idle_check: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
