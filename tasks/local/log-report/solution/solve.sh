#!/bin/bash
python3 - <<'PY'
import collections
import json
import re

clients, hours, durations, n, errors = collections.Counter(), collections.Counter(), collections.defaultdict(list), 0, 0
for line in open("/app/access.log"):
    m = re.match(r'(\S+) \[\d+-\d+-\d+T(\d+):\S+\] "\S+ (\S+)" (\d+) (\d+)ms$', line)
    if not m:
        continue
    n += 1
    hours[int(m[2])] += 1
    durations[m[3]].append(int(m[5]))
    if int(m[4]) >= 500:
        errors += 1
        clients[m[1]] += 1
slowest = max(durations, key=lambda p: sum(durations[p]) / len(durations[p]))
summary = {"requests": n, "errors": errors, "worst_client": clients.most_common(1)[0][0], "slowest_path": slowest,
           "busiest_hour": hours.most_common(1)[0][0]}
json.dump(summary, open("/app/summary.json", "w"), indent=1)
PY
