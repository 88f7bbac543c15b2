#!/bin/bash
# Builds from scratch what the agent left and asks the program itself.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/calc || exit
(
	set -e
	[ -x calc ] || {
		echo "calc was not built"
		exit 1
	}
	rm -f calc ./*.o
	make || {
		echo "make fails"
		exit 1
	}
	while IFS='=' read -r expression result; do
		found=$(./calc "$expression")
		[ "$found" = "$result" ] || {
			echo "$expression gives $found, not $result"
			exit 1
		}
	done <<'CASES'
1 + 2 * 3=7
(1 + 2) * 3=9
2 ^ 10=1024
10 - 4 - 3=3
7 - (2 - 5)=10
2 ^ 3 ^ 2=512
9 / 4 - 1=1.25
CASES
	make test
) && echo 1 >/logs/verifier/reward.txt
