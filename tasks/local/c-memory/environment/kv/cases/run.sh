#!/bin/sh
# Feeds every NAME.in to kv-check and compares with NAME.out.
passed=0 failed=0
for input in cases/*.in; do
	name=$(basename "$input" .in)
	timeout 10 ./kv-check <"$input" >/tmp/kv.out 2>/tmp/kv.err
	rc=$?
	if [ $rc -eq 0 ] && cmp -s /tmp/kv.out "cases/$name.out"; then
		passed=$((passed + 1))
		continue
	fi
	failed=$((failed + 1))
	echo "FAIL $name (exit $rc)"
	diff "cases/$name.out" /tmp/kv.out | head -n 6
	head -n 4 /tmp/kv.err
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
