#!/bin/bash
# What was written, and what convert.py makes of an export that the agent has not seen.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/feed || exit
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import json
import subprocess
import sys


def same(json_path, rejects_path, expected):
    found, wanted = json.load(open(json_path)), json.load(open(f"/tests/{expected}.json"))
    wrong = next((pair for pair in zip(found, wanted) if pair[0] != pair[1]), (len(found), len(wanted)))
    assert found == wanted, f"{json_path}: found {wrong[0]}, expected {wrong[1]}"
    rejects = open(rejects_path).read().split()
    assert rejects == open(f"/tests/{expected}-rejects.csv").read().split(), f"{rejects_path}: {rejects}"


same("products.json", "rejects.csv", "products")
subprocess.run([sys.executable, "convert.py", "/tests/other.csv", "/tmp/other.json", "/tmp/other.csv"], check=True, timeout=30)
same("/tmp/other.json", "/tmp/other.csv", "other")
print("both exports are right")
PY
