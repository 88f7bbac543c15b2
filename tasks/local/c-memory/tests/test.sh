#!/bin/bash
# Builds the sources with a fresh checking allocator and compares with a dictionary of Python's on many sequences of commands.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/kv || exit
cp /tests/memcheck.c /tests/memcheck.h /tmp/ || exit
gcc -std=c11 -O1 -g -I. -include /tmp/memcheck.h -o /tmp/kv-verify main.c table.c strbuf.c /tmp/memcheck.c || exit
make check || exit
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import random
import subprocess


def answers(commands):
    store = {}
    for line in commands:
        command, _, rest = line.partition(" ")
        key, _, value = rest.partition(" ")
        if command == "set":
            store[key] = value
        elif command == "append":
            store[key] = store.get(key, "") + value
        elif command == "get":
            yield store.get(key, "(none)")
        elif command == "del":
            yield "deleted" if store.pop(key, None) is not None else "(none)"
        elif command == "count":
            yield str(len(store))
        elif command == "list":
            yield from (f"{k}={store[k]}" for k in sorted(store))
        elif command == "clear":
            store.clear()
        elif command:
            yield f"? {command}"


r = random.Random(5)
for n in range(60):
    keys = [f"k{i}" * (1 + i % 3) for i in range(1 + n)]
    commands = []
    for _ in range(5 + 4 * n):
        what = ["set", "set", "append", "get", "get", "del", "count", "list", "", "what", "clear"][int(r.random() ** 1.2 * 11)]
        key, value = keys[int(r.random() * len(keys))], "v" * int(r.random() * 40) + " x"
        commands.append(f"{what} {key} {value}" if what in ("set", "append") else f"{what} {key}" if what in ("get", "del") else what)
    p = subprocess.run(["/tmp/kv-verify"], input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=20)
    assert p.returncode == 0, f"sequence {n}: exit {p.returncode} {p.stderr[:500]}"
    assert p.stdout.splitlines() == list(answers(commands)), f"sequence {n}: wrong output"
print("kv is right")
PY
