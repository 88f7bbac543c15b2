#!/bin/bash
# Runs the script on folders of its own and looks at what is left.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
work=$(mktemp -d)
check() { # KEEP, expected output, expected number of files left
	rm -rf "$work/my backups"
	mkdir "$work/my backups" "$work/my backups/backup-20200101.tar"
	for day in 20250301 20241231 20250115 20250228; do echo "$day" >"$work/my backups/backup-$day.tar"; done
	touch -d 2001-01-01 "$work/my backups/backup-20250301.tar"
	touch "$work/my backups/backup-2025.tar" "$work/my backups/backup-20250101.tar.gz" "$work/my backups/notes.txt"
	found=$(bash /app/rotate.sh "$work/my backups" ${1:+"$1"} 2>/dev/null)
	status=$?
	left=$(find "$work/my backups" -type f | wc -l)
	[ "$found" = "$2" ] && [ "$left" = "$3" ] && return
	printf 'KEEP=%s: printed\n%s\nexpected\n%s\n%s files left, expected %s\n' "$1" "$found" "$2" "$left" "$3"
	return 1
}
[ -f /app/rotate.sh ] &&
	check 2 "$(printf 'backup-20241231.tar\nbackup-20250115.tar')" 5 && [ "$status" = 0 ] &&
	check 1 "$(printf 'backup-20241231.tar\nbackup-20250115.tar\nbackup-20250228.tar')" 4 &&
	check 9 "" 7 && [ "$status" = 0 ] &&
	check 0 "$(printf 'backup-20241231.tar\nbackup-20250115.tar\nbackup-20250228.tar\nbackup-20250301.tar')" 3 &&
	check "" "" 7 && [ "$status" = 2 ] &&
	check x "" 7 && [ "$status" = 2 ] &&
	echo "rotate.sh does what it should" && echo 1 >/logs/verifier/reward.txt
rm -rf "$work"
