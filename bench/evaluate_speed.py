"""How fast evaluate.py is on a large table of synthetic trajectories. The target is 100,000 rows in under 30 s on 2 cores.

    python bench/evaluate_speed.py
    python bench/evaluate_speed.py --tasks 89 --reps 562
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tasks", type=int, default=5000, help="tasks, each under two policies (default %(default)s)")
    p.add_argument("--reps", type=int, default=10, help="repetitions of each (default %(default)s)")
    args = p.parse_args()
    from fakes import trials_table

    with tempfile.TemporaryDirectory() as tmp:
        table = trials_table.rows(tasks=args.tasks, reps=args.reps)
        trials_table.write(Path(tmp) / "trials.csv", table)
        begin = time.monotonic()
        command = [sys.executable, str(REPO / "evaluate.py"), "--trials", f"{tmp}/trials.csv", "--out", f"{tmp}/eval"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        spent = time.monotonic() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(table)} rows: {spent:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU time, {used.ru_maxrss / 1e6:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
