"""measure.py [SEED]: row reads of every question, its budget, and a digest of its answer."""

import hashlib
import pathlib
import sys

import report
import store

QUESTIONS = [("best_customers", ()), ("never_sold", ()), ("orders_between", (100, 130)), ("bought_together", ()), ("longest_gap", ())]
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
budgets = dict(line.split() for line in (pathlib.Path(__file__).parent / "budgets.txt").read_text().splitlines())
over = 0
for name, args in QUESTIONS:
    shop = store.Shop(seed)
    answer = getattr(report, name)(shop, *args)
    reads, budget = shop.reads(), int(budgets[name])
    over += reads > budget
    digest = hashlib.sha256(repr(answer).encode()).hexdigest()[:10]
    print(f"{name:16} {reads:8} reads, budget {budget:5} {'OVER' if reads > budget else 'ok':4}  answer {digest}")
print(f"{over} over budget")
sys.exit(bool(over))
