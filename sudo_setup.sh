#!/usr/bin/env bash
# The one step that needs root: lets members of the group `powercap` read the RAPL energy counters (root-only since CVE-2020-8694, because
# energy readings can leak secrets of other users; so a group, not everybody), by a udev rule that survives a reboot, and adds you to it and to
# the group `docker`. Shows what it would do and asks first.
#
#   sudo bash sudo_setup.sh            # show, ask, do
#   sudo bash sudo_setup.sh --yes      # show and do
#   bash sudo_setup.sh --dry-run       # only show; also with --undo
#   sudo bash sudo_setup.sh --undo     # take back what it did, for every user that it was done for
#
# Log in again afterwards: groups apply to new sessions. ENERGY_USER names another user than the one who called sudo.
set -euo pipefail

die() {
	echo "sudo_setup: ERROR: $1" >&2
	exit "${2:-1}"
}
ACTION=set-up ASK=1 SHOW=
for argument in "$@"; do
	case $argument in
	--undo) ACTION=undo ;;
	--dry-run) SHOW=1 ;;
	--yes) ASK= ;;
	-h | --help)
		awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"
		exit 0
		;;
	*) die "unknown argument '$argument' (see --help)" 2 ;;
	esac
done
WHO=${ENERGY_USER:-${SUDO_USER:-$(id -un)}}
id "$WHO" >/dev/null 2>&1 || die "there is no user '$WHO' (ENERGY_USER)" 2
RULE=${ENERGY_RULE:-/etc/udev/rules.d/60-trajoule-powercap.rules} # elsewhere for the tests
COUNTERS=/sys/class/powercap
TEXT='SUBSYSTEM=="powercap", KERNEL=="intel-rapl*", ACTION=="add", RUN+="/bin/sh -c '"'"'chgrp powercap /sys%p/energy_uj; chmod g+r /sys%p/energy_uj'"'"'"'

# What was done is noted in the rule's file, so that --undo takes back that and nothing else: who was in a group before stays in it.
NOTES=$(sed -n 's/^# done: //p' "$RULE" 2>/dev/null || true)
steps=() notes=()
note() { # WHAT STEP: unless it was noted before
	steps+=("$2")
	grep -qxF "$1" <<<"$NOTES" || notes+=("$1")
}
member() { id -nG "$WHO" | tr ' ' '\n' | grep -qx "$1"; }
if [[ $ACTION == undo ]]; then
	steps+=("rm -f $RULE" "udevadm control --reload || true")
	for counter in "$COUNTERS"/intel-rapl*/energy_uj; do
		[[ ! -e $counter ]] || steps+=("chgrp root $counter && chmod 400 $counter")
	done
	while read -r what group user; do
		case $what in
		member) steps+=("gpasswd -d $user $group") ;;
		esac
	done <<<"$NOTES"
	! grep -qx 'group powercap' <<<"$NOTES" || steps+=("groupdel powercap")
	[[ -n $NOTES ]] || echo "no note in $RULE of who was added to a group: memberships stay (\`gpasswd -d USER powercap\`, \`gpasswd -d USER docker\`)"
else
	if getent group powercap >/dev/null; then :; else note "group powercap" "groupadd --system powercap"; fi
	if member powercap; then :; else note "member powercap $WHO" "usermod -aG powercap $WHO"; fi
	if ! getent group docker >/dev/null; then
		echo "no group docker: Docker is not installed (https://docs.docker.com/engine/install has packages with the compose plugin that Harbor needs); the rest goes on"
	elif ! member docker; then
		note "member docker $WHO" "usermod -aG docker $WHO   # this group is as good as root on this machine"
	fi
	mapfile -t lines < <(printf '%s\n' "$NOTES" "${notes[@]}" | sed -n 's/^./# done: &/p')
	steps+=("printf '%s\n'$(printf ' %q' "${lines[@]}" "$TEXT") > $RULE" "udevadm control --reload || true")
	for counter in "$COUNTERS"/intel-rapl*/energy_uj; do
		[[ ! -e $counter ]] || steps+=("chgrp powercap $counter && chmod 440 $counter")
	done
fi
compgen -G "$COUNTERS/intel-rapl*/energy_uj" >/dev/null || echo "no RAPL counters under $COUNTERS (usual in virtual machines): the rule waits for a kernel that has them"

echo "as root, for user $WHO:"
printf '  %s\n' "${steps[@]}"
[[ -z $SHOW ]] || exit 0
[[ $(id -u) == 0 ]] || die "needs root: sudo bash sudo_setup.sh" 2
if [[ -n $ASK ]]; then
	read -r -p "do this? [y/N] " answer || answer=
	[[ $answer == [yY]* ]] || die "nothing was changed" 1
fi
for step in "${steps[@]}"; do
	bash -c "$step" || die "failed: $step"
done
if [[ $ACTION == undo ]]; then echo "done; groups apply to new sessions"; else echo "done; log in again so that the groups apply, then: bash 00_env_check.sh"; fi
