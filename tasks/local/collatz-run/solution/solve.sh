#!/bin/bash
python3 /app/collatz.py 1800000 | sed -n 's/^result: //p' >/app/answer.txt
