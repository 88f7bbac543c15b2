#!/bin/sh
# Builds /app/service: six commits with fixed dates, so that their ids are the same everywhere.
set -e
mkdir -p /app/service/config
cd /app/service
git init -q -b main .
git config user.name "Robin"
git config user.email "robin@example.org"
n=0
commit() {
	n=$((n + 1))
	git add -A
	GIT_AUTHOR_DATE="2025-03-0$n 10:00:00 +0000" GIT_COMMITTER_DATE="2025-03-0$n 10:00:00 +0000" git commit -q -m "$1"
}
printf 'print("service")\n' >app.py
printf '[limits]\nrequests = 10\ntimeout = 5\n' >config/limits.ini
commit "First version"
printf 'level = info\n' >config/logging.ini
commit "Add logging settings"
printf '[limits]\nrequests = 50\ntimeout = 30\nburst = 8\n' >config/limits.ini
commit "Raise the limits"
printf 'print("service 2")\n' >app.py
commit "Second version"
git rm -q config/limits.ini
printf 'level = debug\n' >config/logging.ini
commit "Clean up settings"
printf 'Runs the service.\n' >README
commit "Add README"
