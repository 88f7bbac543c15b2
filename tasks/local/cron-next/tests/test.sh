#!/bin/bash
# next.txt, and what next.py prints for jobs and times that the agent has not seen.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/cron || exit
diff /tests/next.txt next.txt &&
	diff /tests/next.txt <(timeout 20 python3 next.py /tests/jobs.txt 2025-12-30T22:17 3) &&
	diff /tests/more.out <(timeout 20 python3 next.py /tests/more.txt 2024-02-28T23:59 4) &&
	echo 1 >/logs/verifier/reward.txt
