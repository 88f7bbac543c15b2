#!/bin/bash
python3 - <<'PY'
import datetime as dt
import re
import statistics

CEST = dt.timezone(dt.timedelta(hours=2))
sent, tenants, exceptions, current = [], {}, {}, None  # sent: (time, q, req)
for line in open("/app/logs/app.log"):
    m = re.match(r"(\d\d\.\d\d\.\d{4} [\d:]+,\d{3}) \[w\d\] (\w+) +(.*)", line)
    if not m:
        if current and (e := re.match(r"([\w.]+)(?::|$)", line)):
            exceptions[current] = e[1].rpartition(".")[2]
        continue
    t = dt.datetime.strptime(m[1], "%d.%m.%Y %H:%M:%S,%f").replace(tzinfo=CEST).timestamp()
    req = re.search(r"req=(\w+)", m[3])[1]
    current = req if m[2] == "ERROR" else None
    if s := re.match(r"start req=\w+ tenant=(\w+)", m[3]):
        tenants[req] = s[1]
    if s := re.search(r"sent q=(\d+)", m[3]):
        sent.append((t, s[1], req))
db = [(float(a), b, c) for a, b, c in (re.match(r"(\S+) q=(\d+) (.*)", line).groups() for line in open("/app/logs/db.log"))]
# every query is sent once and received once, in the same order
received = [row for row in db if row[2].startswith("recv")]
assert [q for _, q, _ in sent] == [q for _, q, _ in received]
offset = round(statistics.median(r[0] - s[0] for r, s in zip(received, sent)))
open("/app/offset.txt", "w").write(f"{offset}\n")
bad = {}
for t, q, text in db:
    req = next((r for s, number, r in reversed(sent) if number == q and s <= t - offset + 0.5), None)
    if "deadlock" in text:
        bad[req] = "deadlock"
    if (m := re.match(r"waited (\d+) ms", text)) and int(m[1]) > 1000:
        bad.setdefault(req, "lock")
with open("/app/incidents.csv", "w") as out:
    print("time,req,route,tenant,cause", file=out)
    for line in open("/app/logs/gateway.log"):
        m = re.match(r"(\S+) gw\d req=(\w+) (\w+ \S+) (\d+) ", line)
        if m and int(m[4]) >= 500:
            req = m[2]
            cause = "unreached" if req not in tenants else bad.get(req) or f"exception:{exceptions[req]}"
            print(m[1], req, m[3], tenants.get(req, ""), cause, sep=",", file=out)
PY
