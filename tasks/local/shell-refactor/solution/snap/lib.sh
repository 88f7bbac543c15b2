# shellcheck shell=bash
# What the four scripts share. Sourced, not run.
log() {
	[ "${SNAP_VERBOSE:-}" != 1 ] || printf 'snap: [%(%H:%M:%S)T] %s\n' -1 "$*" >&2
}

die() { # MESSAGE [EXIT CODE]
	printf 'snap: %s\n' "$1" >&2
	exit "${2:-1}"
}

need_folder() {
	[ -d "$1" ] || die "no folder '$1'"
}

snapshots() { # NAME STORE: the names of NAME's snapshots, oldest first
	local file
	for file in "$2/$1"-[0-9][0-9][0-9][0-9].tar; do
		[ ! -f "$file" ] || printf '%s\n' "${file##*/}"
	done
}

newest() { # NAME STORE
	snapshots "$1" "$2" | tail -n 1
}

checksum() {
	cksum <"$1" | cut -d' ' -f1,2
}

good() { # FILE: its checksum is the one beside it
	[ -f "$1.sum" ] && [ "$(checksum "$1")" = "$(cat <"$1.sum")" ]
}

name_of() { # FOLDER
	basename -- "$1"
}

absolute() { # a path that no program takes for an option
	case $1 in
	/*) printf '%s\n' "$1" ;;
	*) printf '%s\n' "$PWD/$1" ;;
	esac
}
