#!/bin/bash
cp /solution/convert.py /app/feed/convert.py
cd /app/feed && python3 convert.py products.csv products.json rejects.csv
