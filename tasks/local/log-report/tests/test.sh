#!/bin/bash
# The answer is known; the log could have been changed, so it is not read again.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import json

expected = {"requests": 260, "errors": 34, "worst_client": "10.0.0.7", "slowest_path": "/api/search", "busiest_hour": 8}
found = json.load(open("/app/summary.json"))
assert found == expected, f"expected {expected}, found {found}"
print("summary.json is right")
PY
