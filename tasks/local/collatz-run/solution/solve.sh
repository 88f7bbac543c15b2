#!/bin/bash
python3 /app/collatz.py 1000000 | sed -n 's/^result: //p' >/app/answer.txt
