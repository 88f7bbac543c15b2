#!/bin/bash
# Compares new.db, and what migrate.py makes of a database that the agent has not seen, with the dumps beside this file.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import json
import sqlite3
import subprocess
import sys

TABLES = {
    "person": "SELECT * FROM person ORDER BY id",
    "phone": "SELECT * FROM phone ORDER BY 1, 2",
    "visit": "SELECT person_id, h.name, day, minutes FROM visit JOIN hall h ON h.id = hall_id ORDER BY 1, 3, 2, 4",
    "reject": "SELECT * FROM reject ORDER BY 1, 3, 2",
}


def dump(path):
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    return {name: [list(row) for row in db.execute(query)] for name, query in TABLES.items()}


def compare(path, expected):
    found = dump(path)
    for name in TABLES:
        a, b = found[name], expected[name]
        wrong = next((pair for pair in zip(a, b) if pair[0] != pair[1]), (len(a), len(b)))
        assert a == b, f"{path}: {name}: found {wrong[0]}, expected {wrong[1]}"


def migrated(seed):
    subprocess.run([sys.executable, "/tests/make_db.py", f"/tmp/old{seed}.db", str(seed)], check=True)
    subprocess.run([sys.executable, "/app/club/migrate.py", f"/tmp/old{seed}.db", f"/tmp/new{seed}.db"], check=True, timeout=30)
    return f"/tmp/new{seed}.db"


expected = json.load(open("/tests/expected.json"))
compare("/app/club/new.db", expected["7"])
compare(migrated(7), expected["7"])
compare(migrated(23), expected["23"])
print("both databases are right")
PY
