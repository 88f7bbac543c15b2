#!/bin/bash
set -e
cd /app/service
deleted=$(git rev-list -n 1 HEAD -- config/limits.ini)
git checkout -q "$deleted^" -- config/limits.ini
git commit -q -m "Restore limits.ini"
