#!/bin/bash
# The answer is known; the logs could have been changed, so they are not read again.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
(
	diff /tests/incidents.csv <(tr -d '\r' </app/incidents.csv) || exit
	[ "$(tr -d ' \n' </app/offset.txt)" = "-43" ] || {
		echo "offset.txt is wrong"
		exit 1
	}
	echo "both files are right"
) && echo 1 >/logs/verifier/reward.txt
