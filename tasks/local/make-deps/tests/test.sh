#!/bin/bash
# Works on a copy of what the agent left, with the other files as they were.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
[ -s /app/site/out/index.html ] && [ -x /app/site/build/render ] || exit
rm -rf /tmp/site && cp -r /tests/site /tmp/site && cp /app/site/Makefile /tmp/site/ && python3 /tests/check.py && echo 1 >/logs/verifier/reward.txt
