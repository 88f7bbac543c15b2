#!/bin/bash
# The cases that the agent saw, as they were, and more.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
rm -rf /tmp/leaf && mkdir -p /tmp/leaf/cases && cp /app/leaf/leaf.py /tests/run_cases.py /tmp/leaf/ || exit
cp /tests/seen/* /tests/more/* /tmp/leaf/cases/
python3 /tmp/leaf/run_cases.py && echo 1 >/logs/verifier/reward.txt
