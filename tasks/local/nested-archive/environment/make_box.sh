#!/bin/sh
# Builds /app/box.tar.gz: archives within archives, one of them with a misleading name, and several token files.
set -e
work=$(mktemp -d)
cd "$work"
mkdir -p outer/docs outer/parts inner deep/keys
echo 'token: tangerine-41' >outer/docs/token.txt
echo 'Old notes, nothing here.' >outer/docs/notes.txt
echo 'token: walnut-07' >inner/token.txt
echo 'token: saffron-93' >deep/keys/token.txt
echo 'token: juniper-58' >deep/keys/token.bak
tar -czf inner/picture.jpg deep
tar -cf outer/parts/part2.tar inner
gzip -n outer/parts/part2.tar
echo 'empty' >outer/parts/part1.txt
tar -czf /app/box.tar.gz outer
cd /
rm -rf "$work"
