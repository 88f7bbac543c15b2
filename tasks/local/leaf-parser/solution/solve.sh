#!/bin/bash
cp /solution/leaf.py /app/leaf/leaf.py
cd /app/leaf && python3 run_cases.py
