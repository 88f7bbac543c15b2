#!/bin/bash
# Behaviour on cases that the visible tests do not hold, arguments left alone included.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app || exit
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import sys

sys.path.insert(0, "/app")
from stats import median, moving_average, outliers

values = [5, 3, 9, 1]
assert median(values) == 4, median(values)
assert values == [5, 3, 9, 1], f"median changed its argument: {values}"
assert median([7]) == 7 and median([2, 1]) == 1.5 and median([9, 1, 5]) == 5
assert moving_average([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]
assert moving_average([4, 6], 2) == [5.0] and moving_average([1], 2) == [] and moving_average([1, 2, 3], 1) == [1, 2, 3]
readings = [10, 90, 11, 9, 10, 12]
assert outliers(readings) == [90], outliers(readings)
assert readings == [10, 90, 11, 9, 10, 12], f"outliers changed its argument: {readings}"
print("all functions are right")
PY
