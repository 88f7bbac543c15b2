#!/bin/bash
# The answers of the slow program for several shops, and the reads of the new one, counted by untouched tables.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
rm -rf /tmp/shop && mkdir /tmp/shop && cp /app/shop/report.py /tests/store.py /tmp/shop/ || exit
cp /tests/slow.py /tmp/shop/slow.py
cd /tmp/shop || exit
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import re

import report
import slow
import store

BUDGETS = {"best_customers": 950, "never_sold": 850, "orders_between": 120, "bought_together": 830, "longest_gap": 850}
assert not re.search(r"_rows|\.reads", open("report.py").read()), "report.py reaches into the tables"
for seed in (1, 2, 3, 77):
    for name, budget in BUDGETS.items():
        for args in [(100, 130), (0, 3), (364, 364), (200, 199)] if name == "orders_between" else [()]:
            shop = store.Shop(seed)
            found, expected = getattr(report, name)(shop, *args), getattr(slow, name)(store.Shop(seed), *args)
            assert found == expected, f"{name}{args}, seed {seed}: another answer"
            assert shop.reads() <= budget, f"{name}{args}, seed {seed}: {shop.reads()} reads, budget {budget}"
print("all questions are within their budgets")
PY
