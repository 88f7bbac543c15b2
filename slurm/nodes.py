"""What the nodes of a cluster leave, sorted and put together.

    python slurm/nodes.py folders --traj data/h200/traj --calib results/h200/calib.node1     # trajectories measured under that calibration, one a line
    python slurm/nodes.py merge results/h200/trials.node1.csv results/h200/trials.node2.csv --out results/h200/trials.csv

Every trajectory names the calibration that was in force (trial.json, calib_sha256), so that a shard of any earlier run is aligned with the
calibration of the node that it ran on. `merge` refuses tables with different columns, and trajectories that stand in two of them. Exit code 2: bad input.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles  # noqa: E402


def folders(traj, calib):
    """Folders of finished trajectories that were measured under the calibration."""
    import energylib

    wanted = energylib.sha256(Path(calib) / "params.json")
    found = []
    for path in sorted(Path(traj).glob("*/trial.json")):
        try:
            if json.loads(path.read_text(encoding="utf-8")).get("calib_sha256") == wanted:
                found.append(path.parent)
        except (ValueError, AttributeError):
            print(f"nodes: {path} is no JSON object; left out", file=sys.stderr)
    return found


def merge(tables, out):
    """Write the rows of all tables into one, and return their number. Raises ValueError where they do not fit."""
    rows, where, columns = [], {}, None
    for table in tables:
        try:
            with open(table, encoding="utf-8-sig", newline="") as f:
                reader = csv.DictReader(f)
                header, body = reader.fieldnames, list(reader)
        except (UnicodeDecodeError, csv.Error) as e:
            raise ValueError(f"{table}: not a CSV file in UTF-8 ({e}); align its node's trajectories again") from None
        if "trajectory" not in (header or []):
            found = "the columns " + ",".join(header)[:60] if header else "no columns"
            raise ValueError(f"{table}: found {found}, expected a column trajectory as align_trial.py writes it")
        columns = columns or header
        if header != columns:
            raise ValueError(f"{table}: its columns differ from those of {tables[0]}; align all with the same version")
        for number, row in enumerate(body, 1):
            if None in row or None in row.values():
                raise ValueError(f"{table}: row {number}: found more or fewer cells than columns; align its node's trajectories again")
            name = row["trajectory"]
            if name in where:
                raise ValueError(f"{table}: {name} stands in {where[name]} too; a trajectory belongs to one node")
            where[name] = table
            rows.append(row)
    csvfiles.write(Path(out), columns, rows)
    return len(rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    q = sub.add_parser("folders")
    q.add_argument("--traj", required=True)
    q.add_argument("--calib", required=True)
    q = sub.add_parser("merge")
    q.add_argument("tables", nargs="+")
    q.add_argument("--out", required=True)
    a = p.parse_args()
    try:
        if a.what == "folders":
            for folder in folders(a.traj, a.calib):
                print(folder)
        else:
            print(f"{merge(a.tables, a.out)} trajectories of {len(a.tables)} table(s) -> {a.out}")
    except (OSError, ValueError) as e:
        print(f"nodes: {e.filename}: {e.strerror}" if isinstance(e, OSError) else f"nodes: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
