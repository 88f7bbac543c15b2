#!/bin/sh
# config.sh SETTINGS: prints them as C.
echo "/* made from $1 */"
sed -n 's/^site_name=\(.*\)/#define SITE_NAME "\1"/p; s/^width=\(.*\)/#define WIDTH \1/p' "$1"
