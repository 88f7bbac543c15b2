#!/bin/bash
set -e
cd /app/units
git bisect start main v1.0 >/dev/null
# a commit that does not run says nothing
# shellcheck disable=SC2016
git bisect run sh -c 'out=$(python3 -B units.py 5 km mi 2>/dev/null) || exit 125; [ "$out" = 3.10686 ]' >/dev/null
git rev-parse refs/bisect/bad >/app/bad.txt
git bisect reset 2>/dev/null
sed -i 's/Unit(kind, round(float(factor), .*))$/Unit(kind, float(factor))/' table.py
python3 test_units.py
git commit -q -am "Fix conversion of long distances"
