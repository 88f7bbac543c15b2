"""Files that programs leave: put in place whole, and CSV files read whole or appended to."""

import csv
import os


def read(path):
    """Rows as dicts, none when there is no such file."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as f:
            return list(csv.DictReader(f))
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, csv.Error) as e:
        raise ValueError(f"{path}: not a CSV file in UTF-8 ({e})") from None


def put_whole(path, write):
    """Let `write` fill a file beside `path`, then put it in its place: a killed program or a full disk leaves the earlier one as it was.
    Raises OSError that names `path`, which the error of a full disk does not by itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp{os.getpid()}{path.suffix}")
    try:
        write(beside)
        os.replace(beside, path)
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def replace(path, body):
    """Put a text file in place, whole or not at all: `body` writes it to the open file that it is given."""

    def write(beside):
        with open(beside, "w", newline="", encoding="utf-8") as f:
            body(f)

    put_whole(path, write)


def write(path, fields, rows, extra="raise"):
    """Put rows in place of an earlier file. `extra`: what to do about keys that are no column, "raise" (ValueError) or "ignore"."""

    def body(f):
        w = csv.DictWriter(f, fields, lineterminator="\n", extrasaction=extra)
        w.writeheader()
        w.writerows(rows)

    replace(path, body)


def append(path, fields, rows):
    """Add rows, all or none; a new file begins with the columns' names. Raises OSError that names `path`."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", newline="", encoding="utf-8") as f:
            w = csv.DictWriter(f, fields, lineterminator="\n")
            if not size:
                w.writeheader()
            w.writerows(rows)
    except OSError as e:
        if path.exists():
            os.truncate(path, size)
        raise OSError(e.errno, e.strerror, str(path)) from None
