#!/usr/bin/env bash
# The one step that needs root: lets members of the group `powercap` read the RAPL energy counters (root-only since CVE-2020-8694, because
# energy readings can leak secrets of other users; so a group, not everybody), by a udev rule that survives a reboot, and adds you to it and to
# the group `docker`. Shows what it would do and asks first.
#
#   sudo bash sudo_setup.sh            # show, ask, do
#   sudo bash sudo_setup.sh --yes      # show and do
#   bash sudo_setup.sh --dry-run       # only show
#   sudo bash sudo_setup.sh --undo     # take it back
#
# Log in again afterwards: groups apply to new sessions. ENERGY_USER names another user than the one who called sudo.
set -euo pipefail

die() {
	echo "sudo_setup: ERROR: $1" >&2
	exit "${2:-1}"
}
ACTION=set-up ASK=1
for argument in "$@"; do
	case $argument in
	--undo) ACTION=undo ;;
	--dry-run) ACTION=show ;;
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
RULE=/etc/udev/rules.d/60-trajoule-powercap.rules
COUNTERS=/sys/class/powercap
TEXT='SUBSYSTEM=="powercap", KERNEL=="intel-rapl*", ACTION=="add", RUN+="/bin/sh -c '"'"'chgrp powercap /sys%p/energy_uj; chmod g+r /sys%p/energy_uj'"'"'"'

steps=()
if [[ $ACTION == undo ]]; then
	steps+=("rm -f $RULE" "udevadm control --reload || true")
	for counter in "$COUNTERS"/intel-rapl*/energy_uj; do
		[[ ! -e $counter ]] || steps+=("chgrp root $counter && chmod 400 $counter")
	done
	steps+=("gpasswd -d $WHO powercap || true")
else
	steps+=("groupadd -f --system powercap" "usermod -aG powercap $WHO" "printf '%s\n' $(printf '%q' "$TEXT") > $RULE" "udevadm control --reload || true")
	for counter in "$COUNTERS"/intel-rapl*/energy_uj; do
		[[ ! -e $counter ]] || steps+=("chgrp powercap $counter && chmod 440 $counter")
	done
	if getent group docker >/dev/null; then
		steps+=("usermod -aG docker $WHO   # this group is as good as root on this machine")
	else
		echo "no group docker: Docker is not installed (apt-get install -y docker.io docker-compose-v2, or Docker's own packages); the rest goes on"
	fi
fi
compgen -G "$COUNTERS/intel-rapl*/energy_uj" >/dev/null || echo "no RAPL counters under $COUNTERS (usual in virtual machines): the rule waits for a kernel that has them"

echo "as root, for user $WHO:"
printf '  %s\n' "${steps[@]}"
[[ $ACTION != show ]] || exit 0
[[ $(id -u) == 0 ]] || die "needs root: sudo bash sudo_setup.sh" 2
if [[ -n $ASK ]]; then
	read -r -p "do this? [y/N] " answer || answer=
	[[ $answer == [yY]* ]] || die "nothing was changed" 1
fi
for step in "${steps[@]}"; do
	bash -c "$step" || die "failed: $step"
done
echo "done; log in again so that the groups apply, then: bash 00_env_check.sh"
