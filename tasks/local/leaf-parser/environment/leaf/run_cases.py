"""Runs leaf.py on cases/*.leaf and compares with the .json or .err beside each. Names of cases as arguments: only those, in full."""

import json
import pathlib
import subprocess
import sys

here = pathlib.Path(__file__).parent
wanted = sys.argv[1:]
passed = failed = 0
for case in sorted((here / "cases").glob("*.leaf")):
    if wanted and case.stem not in wanted:
        continue
    p = subprocess.run([sys.executable, here / "leaf.py", case], capture_output=True, text=True)
    fault = case.with_suffix(".err")
    if fault.exists():
        expected, found = fault.read_text().strip(), p.stdout.strip()
        ok = found == expected and p.returncode == 1
    else:
        expected = json.loads(case.with_suffix(".json").read_text())
        try:
            found = json.loads(p.stdout)
        except ValueError:
            found = p.stdout.strip() or (p.stderr.strip().splitlines() or ["(nothing)"])[-1]
        # 1 and 1.0 and true are different things here
        ok = p.returncode == 0 and json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
    passed, failed = passed + ok, failed + (not ok)
    if not ok:
        print(f"FAIL {case.stem}\n  expected {json.dumps(expected)[:300]}\n  found    {json.dumps(found)[:300]}")
    if wanted:
        print(case.read_text())
print(f"{passed} passed, {failed} failed")
sys.exit(bool(failed))
