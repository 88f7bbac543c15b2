#!/bin/bash
# The guilty commit, one new commit on top of the known history, what it changes, and that everything works.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/units || exit
export PYTHONDONTWRITEBYTECODE=1
(
	fail() {
		echo "$*"
		exit 1
	}
	[ "$(tr -d ' \n' </app/bad.txt)" = fea08cd68147a8f798b48c3d44f4e5fd0fc37347 ] || fail "bad.txt names another commit"
	[ "$(git rev-parse HEAD~1)" = 07809c7c8b3614305572b4ead733713bc2efe867 ] || fail "HEAD~1 is not the old head"
	[ "$(git symbolic-ref --short HEAD)" = main ] || fail "not on main"
	[ "$(git log -1 --format=%s)" = "Fix conversion of long distances" ] || fail "wrong message"
	[ "$(git diff --numstat HEAD~1 HEAD)" = "$(printf '1\t1\ttable.py')" ] || fail "the commit changes more than one line of table.py"
	[ -z "$(git status --porcelain)" ] || fail "the tree is not clean"
	[ ! -e .git/BISECT_LOG ] || fail "a bisection is still going on"
	while read -r value from to result; do
		[ "$(python3 units.py "$value" "$from" "$to")" = "$result" ] || fail "$value $from in $to is not $result"
	done <<'CASES'
5 km mi 3.10686
2 nmi m 3704
1 year d 365.25
3 fathom m 5.4864
1 acre m2 4046.86
1 gallon pint 8
1 um m 1e-06
CASES
	python3 test_units.py
) && echo 1 >/logs/verifier/reward.txt
