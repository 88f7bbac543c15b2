"""Do two folders of results, or two files, say the same? CSV and JSON, number by number; figures are not compared.

    python stages/compare.py results/calib results/calib_rerun
    python stages/compare.py results/trials_formal.csv results/trials_rerun.csv

Numbers may differ by a ten-thousandth (another processor, another numpy), the time of creation may be another. Names the first difference of
each file. Exit code 0 when there is none, 1 when there is one, 2 when there is nothing to compare.
"""

import argparse
import json
import math
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles  # noqa: E402

TOLERANCE = 1e-4  # relative
KINDS = (".csv", ".json")


def difference(a, b, where=""):
    """None, or in words the first place where two values of JSON or CSV differ by more than the rounding of other arithmetic."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where or 'top'}: only in one of them: {', '.join(sorted(map(str, a.keys() ^ b.keys())))}"
        return next((d for k in a if (d := difference(a[k], b[k], f"{where}.{k}".lstrip(".")))), None)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{where or 'top'}: {len(a)} entries against {len(b)}"
        return next((d for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := difference(x, y, f"{where}[{i}]"))), None)
    x, y = number(a), number(b)
    same = a == b if x is None or y is None else math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=1e-9)
    return None if same else f"{where}: {a!r} against {b!r}"


def number(value):
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def load(path):
    """The values of a CSV (rows as dicts) or JSON file, without the time of its creation. Raises ValueError, OSError."""
    if path.suffix == ".csv":
        return csvfiles.read(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise ValueError(f"{path}: cannot be read as JSON ({e})") from None
    if isinstance(found, dict):
        found.pop("created", None)
    return found


def compare(a, b):
    """[(file, first difference or None)] of the CSV and JSON files of two folders, or of two such files. Raises ValueError, OSError."""
    kinds = ["a folder" if stat.S_ISDIR(path.stat().st_mode) else path.suffix or "a file without suffix" for path in (a, b)]
    if kinds[0] != kinds[1] or kinds[0] not in ("a folder", *KINDS):
        raise ValueError(f"{a} and {b}: found {' and '.join(kinds)}, expected two folders, two .csv or two .json files")
    if kinds[0] != "a folder":
        return [(a.name if a.name == b.name else f"{a.name}, {b.name}", difference(load(a), load(b)))]
    names = sorted({p.name for folder in (a, b) for p in folder.iterdir() if p.suffix in KINDS})
    out = []
    for name in names:
        gone = [str(folder) for folder in (a, b) if not (folder / name).exists()]
        out.append((name, f"not in {gone[0]}" if gone else difference(load(a / name), load(b / name))))
    return out


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("a", type=Path, metavar="ONE", help="a folder, or a CSV or JSON file")
    p.add_argument("b", type=Path, metavar="OTHER", help="what it is compared with, of the same kind")
    args = p.parse_args(argv)
    try:
        found = compare(args.a, args.b)
    except (OSError, ValueError) as e:
        print(f"compare: {e.filename}: {e.strerror}" if isinstance(e, OSError) else f"compare: {e}", file=sys.stderr)
        return 2
    if not found:
        print(f"compare: no CSV or JSON file in {args.a} or {args.b}", file=sys.stderr)
        return 2
    for name, how in found:
        print(f"{name}: {how or 'the same'}")
    different = sum(how is not None for _, how in found)
    print(f"{len(found) - different} of {len(found)} files are the same")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
