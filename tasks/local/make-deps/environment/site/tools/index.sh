#!/bin/sh
# index.sh HTML...: prints a list of links to these pages.
echo "<ul>"
for page in "$@"; do
	title=$(sed -n 's/.*<title>\(.*\)<\/title>.*/\1/p' "$page")
	echo "<li><a href=\"$(basename "$page")\">$title</a></li>"
done
echo "</ul>"
