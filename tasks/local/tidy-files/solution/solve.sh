#!/bin/bash
set -e
cd /app/inbox
for f in *; do
	case $f in *.*) ext=${f##*.} ext=${ext,,} ;; *) ext=other ;; esac
	mkdir -p "/app/sorted/$ext"
	mv -- "$f" "/app/sorted/$ext/$f"
done
cd /app/sorted
find . -type f ! -path ./index.txt | sed 's|^\./||' | LC_ALL=C sort >index.txt
