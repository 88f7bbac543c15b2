#!/bin/bash
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
if [ "$(cat /app/answer.txt)" = "837799 525" ]; then
	echo "the answer is right"
	echo 1 >/logs/verifier/reward.txt
else
	echo "wrong answer: $(cat /app/answer.txt)"
fi
