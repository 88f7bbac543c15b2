#!/bin/bash
python3 - <<'PY'
import json
import pathlib
import re

ROOT = pathlib.Path("/app/fleet")
TRUTH = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}
MS = {"ms": 1, "s": 1000, "": 1000, "m": 60000, "h": 3600000}
BYTES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def read(path):
    """({section: {key: value}}, owner) of a file and what it includes."""
    values, owner, own, section, own_owner = {}, None, {}, None, None
    for line in path.read_text().splitlines():
        line = line.strip()
        if m := re.match(r"# owner: (.*)", line):
            own_owner = m[1].strip()
        if not line or line[0] in "#;":
            continue
        if m := re.fullmatch(r"\[(\w+)\]", line):
            section = m[1].lower()
            continue
        key, _, value = (part.strip() for part in line.partition("="))
        if section is None and key == "include":
            for name in value.split():
                inner, inner_owner = read(path.parent / name)
                owner = inner_owner or owner
                for s, pairs in inner.items():
                    values.setdefault(s, {}).update(pairs)
        else:
            own.setdefault(section, {})[key if section == "env" else key.lower()] = value
    for s, pairs in own.items():
        values.setdefault(s, {}).update(pairs)
    return values, own_owner or owner


v2 = ROOT / "v2"
v2.mkdir(exist_ok=True)
disabled = []
for path in sorted((ROOT / "v1").glob("[!_]*.ini")):
    values, owner = read(path)
    service, limits = values["service"], values.get("limits", {})
    name, port = service["name"], service["port"]
    fill = lambda text: text.replace("${name}", name).replace("${port}", port)  # noqa: E731
    if not TRUTH[service.get("enabled", "yes").lower()]:
        disabled.append(name)
        continue
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h|)", limits.get("timeout", "10s")).groups()
    size, power = re.fullmatch(r"(\d+)([KMG]?)", limits.get("memory", "256M")).groups()
    upstreams = []
    for item in filter(None, (i.strip() for i in values.get("upstream", {}).get("hosts", "").split(","))):
        host, _, p = item.partition(":")
        if (entry := {"host": host, "port": int(p or 5432)}) not in upstreams:
            upstreams.append(entry)
    level = service.get("log", "info").lower()
    workers = service.get("workers", "1")
    doc = {
        "name": name,
        "owner": owner,
        "port": int(port),
        "workers": 0 if workers == "auto" else int(workers),
        "log_level": {"warn": "warning", "fatal": "critical"}.get(level, level),
        "limits": {
            "timeout_ms": int(number) * MS[unit],
            "memory_bytes": int(size) * BYTES[power],
            "retry": TRUTH[limits.get("retry", "no").lower()],
        },
        "upstreams": upstreams,
        "env": {k: fill(v) for k, v in values.get("env", {}).items() if not k.lower().startswith("legacy_")},
    }
    (v2 / f"{name}.json").write_text(json.dumps(doc, indent=2) + "\n")
(v2 / "disabled.txt").write_text("".join(f"{n}\n" for n in sorted(disabled)))
PY
