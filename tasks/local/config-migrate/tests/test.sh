#!/bin/bash
# The values are known; v1 could have been changed, so it is not read again.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import json
import pathlib

v2 = pathlib.Path("/app/fleet/v2")
expected = json.load(open("/tests/expected.json"))
found = {p.stem: json.loads(p.read_text()) for p in v2.glob("*.json")}
assert set(found) == set(expected["services"]), f"files: {sorted(found)}"
for name, doc in expected["services"].items():
    for key, value in doc.items():
        assert found[name].get(key) == value, f"{name}: {key} is {found[name].get(key)!r}, expected {value!r}"
    assert set(found[name]) == set(doc), f"{name}: keys {sorted(found[name])}"
assert (v2 / "disabled.txt").read_text().split() == expected["disabled"], "disabled.txt"
print("v2 is right")
PY
