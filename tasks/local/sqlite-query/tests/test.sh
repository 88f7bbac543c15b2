#!/bin/bash
# The answer is known; the agent could change the database, so it is not asked again.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
expected='Ada,276064
Chen,207228
Ines,134685
Goran,132951
Hana,74148'
if [ "$(tr -d '\r' </app/top.csv)" = "$expected" ]; then
	echo "top.csv is right"
	echo 1 >/logs/verifier/reward.txt
else
	printf 'expected\n%s\nfound\n' "$expected"
	cat /app/top.csv
fi
