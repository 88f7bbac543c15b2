"""Checks the shape of the files in v2: keys, types, ranges. Values are not compared with v1."""

import json
import pathlib
import sys

SHAPE = {
    "name": str,
    "owner": (str, type(None)),
    "port": int,
    "workers": int,
    "log_level": str,
    "limits": dict,
    "upstreams": list,
    "env": dict,
}
LEVELS = {"debug", "info", "warning", "error", "critical"}
v2 = pathlib.Path(__file__).parent / "v2"
faults = []
for path in sorted(v2.glob("*.json")):
    doc = json.loads(path.read_text())

    def fault(text, path=path):
        faults.append(f"{path.name}: {text}")

    for key, kind in SHAPE.items():
        if key not in doc:
            fault(f"{key} is missing")
        elif not isinstance(doc[key], kind) or isinstance(doc[key], bool):
            fault(f"{key} is {doc[key]!r}")
    for key in set(doc) - set(SHAPE):
        fault(f"unknown key {key}")
    if doc.get("log_level") not in LEVELS:
        fault(f"log_level {doc.get('log_level')!r}")
    if set(doc.get("limits", {})) != {"timeout_ms", "memory_bytes", "retry"}:
        fault(f"limits has {sorted(doc.get('limits', {}))}")
    for up in doc.get("upstreams", []):
        if set(up) != {"host", "port"} or not isinstance(up["port"], int):
            fault(f"upstream {up!r}")
    for key, value in doc.get("env", {}).items():
        if not isinstance(value, str) or "${" in value:
            fault(f"env {key} = {value!r}")
    if doc.get("name") != path.stem:
        fault(f"name is {doc.get('name')!r}")
if not (v2 / "disabled.txt").exists():
    faults.append("disabled.txt is missing")
print(*faults, sep="\n")
print(f"{len(list(v2.glob('*.json')))} files, {len(faults)} faults")
sys.exit(bool(faults))
