"""CSV files of the stages: read whole, put in place whole, or appended to."""

import csv
import os


def read(path):
    """Rows as dicts, none when there is no such file."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as f:
            return list(csv.DictReader(f))
    except FileNotFoundError:
        return []


def replace(path, body):
    """Put a file in place of an earlier one, whole or not at all: `body` writes it to the open file that it is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.tmp{os.getpid()}")
    with open(tmp, "w", newline="", encoding="utf-8") as f:
        body(f)
    os.replace(tmp, path)


def write(path, fields, rows, extra="raise"):
    """Put rows in place of an earlier file. `extra`: what to do about keys that are no column, "raise" (ValueError) or "ignore"."""

    def body(f):
        w = csv.DictWriter(f, fields, lineterminator="\n", extrasaction=extra)
        w.writeheader()
        w.writerows(rows)

    replace(path, body)


def append(path, fields, rows):
    """Add rows; a new file begins with the columns' names."""
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as f:
        w = csv.DictWriter(f, fields, lineterminator="\n")
        if new:
            w.writeheader()
        w.writerows(rows)
