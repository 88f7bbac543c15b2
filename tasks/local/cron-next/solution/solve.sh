#!/bin/bash
cp /solution/next.py /app/cron/next.py
cd /app/cron && python3 next.py jobs.txt 2025-12-30T22:17 3 >next.txt
