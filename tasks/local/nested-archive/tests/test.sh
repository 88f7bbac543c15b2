#!/bin/bash
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
expected=$(printf 'juniper-58\nsaffron-93\ntangerine-41\nwalnut-07')
if [ "$(cat /app/tokens.txt)" = "$expected" ]; then
	echo "all four tokens found"
	echo 1 >/logs/verifier/reward.txt
else
	printf 'expected\n%s\nfound\n' "$expected"
	cat /app/tokens.txt
fi
