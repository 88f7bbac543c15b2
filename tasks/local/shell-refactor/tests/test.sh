#!/bin/bash
# The tests that the agent saw, where the functions stand, and cases that the agent did not see.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cd /app/snap || exit
(
	fail() {
		echo "FAIL $*"
		exit 1
	}
	is() { [ "$2" = "$3" ] || fail "$1: found '$2', expected '$3'"; }
	cp /tests/seen /app/snap/.seen && bash /app/snap/.seen || fail "the visible tests"
	for f in log die need_folder newest checksum; do
		is "definitions of $f" "$(grep -lE "^[[:space:]]*(function )?${f}[[:space:]]*(\(\)|\{)" ./* | tr '\n' ' ')" "./lib.sh "
	done
	is "functions defined twice" "$(grep -hoE '^[[:space:]]*[a-z_]+ *\(\)' snap verify restore prune lib.sh | tr -d ' \t' | sort | uniq -d)" ""
	work=$(mktemp -d) && cd "$work" || exit
	run() {
		bash /app/snap/"$1" "${@:2}" 2>err
		echo "exit $?"
	}
	mkdir web web-old -- -x
	echo 1 >web/a && echo 2 >web-old/a && echo 3 >./-x/a
	run snap web "my store" >/dev/null && run snap web-old "my store" >/dev/null
	is "other folders" "$(run snap web "my store")" $'web-0002.tar\nexit 0'
	is "verify leaves others" "$(run verify web "my store")" $'ok web-0001.tar\nok web-0002.tar\nexit 0'
	is "hyphen" "$(run snap -x "my store")" $'-x-0001.tar\nexit 0'
	is "hyphen restored" "$(run restore -x "my store" -- 2>&1 | tail -n 1)" "exit 0"
	touch -d '2001-01-01' "my store/web-0002.tar"
	is "newest by number" "$(run restore web "my store" back)" $'web-0002.tar\nexit 0'
	rm "my store/web-0001.tar.sum"
	is "no .sum" "$(run verify web "my store")" $'bad web-0001.tar\nok web-0002.tar\nexit 1'
	is "no snapshot" "$(run restore none "my store" new)" "exit 1"
	[ ! -e new ] || fail "a folder was made for nothing"
	is "message" "$(cut -c1-6 err)" "snap: "
	is "nothing to verify" "$(run verify none "my store")$(cat err)" "exit 0"
	is "KEEP 0" "$(run prune web "my store" 0)" "exit 2"
	is "KEEP larger" "$(run prune web "my store" 9)" "exit 0"
	is "prune leaves others" "$(run prune web "my store" 1)$(find "my store" -name "*old*" | wc -l)" $'web-0001.tar\nexit 02'
	is "no store" "$(run verify web nowhere)" "exit 1"
	for _ in 1 2 3 4 5 6 7 8 9; do run snap web s >/dev/null; done
	is "ten" "$(run snap web s)" $'web-0010.tar\nexit 0'
	is "numbers go on" "$(run prune web s 1 >/dev/null && run snap web s)" $'web-0011.tar\nexit 0'
	echo "all right"
) && echo 1 >/logs/verifier/reward.txt
