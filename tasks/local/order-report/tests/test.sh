#!/bin/bash
# The report is recomputed from the orders; a changed orders.csv is noticed by its checksum.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import csv
import hashlib
from decimal import Decimal

data = open("/app/orders.csv", "rb").read()
assert hashlib.sha256(data).hexdigest() == "c629aa6e65467e8cf4933c05bb5019f6292b13840e7f023fac08a4fec9b58e38", "orders.csv was changed"
totals = {}
for row in csv.DictReader(data.decode().splitlines()):
    if row["status"] != "cancelled":
        n, revenue = totals.get(row["region"], (0, Decimal(0)))
        totals[row["region"]] = n + 1, revenue + int(row["quantity"]) * Decimal(row["unit_price"])
expected = "".join(f"{r}\t{n}\t{v:.2f}\n" for r, (n, v) in sorted(totals.items(), key=lambda x: -x[1][1]))
found = open("/app/report.tsv").read()
assert found == expected, f"expected\n{expected}found\n{found}"
print("the report is right")
PY
