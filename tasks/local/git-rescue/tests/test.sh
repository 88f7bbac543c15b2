#!/bin/bash
# The file's content, the one new commit on top of the known history, and a clean tree.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/service || exit
(
	set -e
	[ "$(git rev-parse HEAD~1)" = "acebc5d8f1e9672defd1213ae6484d60c8984161" ] || {
		echo "HEAD~1 is not the old head"
		exit 1
	}
	[ "$(git symbolic-ref --short HEAD)" = main ] || {
		echo "not on main"
		exit 1
	}
	[ "$(git log -1 --format=%s)" = "Restore limits.ini" ] || {
		echo "wrong message"
		exit 1
	}
	[ "$(git diff --name-status HEAD~1 HEAD)" = "$(printf 'A\tconfig/limits.ini')" ] || {
		echo "the commit changes something else"
		exit 1
	}
	[ "$(git show HEAD:config/limits.ini)" = "$(printf '[limits]\nrequests = 50\ntimeout = 30\nburst = 8')" ] || {
		echo "wrong content"
		exit 1
	}
	[ -z "$(git status --porcelain)" ] || {
		echo "the tree is not clean"
		exit 1
	}
	echo "restored"
) && echo 1 >/logs/verifier/reward.txt
