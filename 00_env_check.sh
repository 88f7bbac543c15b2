#!/usr/bin/env bash
# Read-only probe of this machine for the profile in force: Docker, counters, GPUs, disk, ports, clock, packages. Says what is missing and the
# command that mends it. Changes nothing.
#
#   bash 00_env_check.sh
#   bash 00_env_check.sh --settings           # every setting in force
#   bash 00_env_check.sh --tasks tasks/local.txt  # also what these tasks need: images, network of their verifiers, memory, time
#
# Exit code: 0 everything that the profile needs is there, 1 something is missing.
source "$(dirname "$0")/common.sh"

if [[ ${1:-} == --settings ]]; then
	[[ $# -eq 1 ]] || die "unknown argument '$2' (see --help)" 2
	for name in "${SETTINGS[@]}"; do printf '%s=%q\n' "$name" "${!name}"; done
	exit 0
fi
TASK_LIST=
if [[ ${1:-} == --tasks ]]; then
	TASK_LIST=${2:-}
	need_list "$TASK_LIST"
	shift 2
fi
[[ $# -eq 0 ]] || die "unknown argument '$1' (see --help)" 2

# Debian 12 has no such package, only version 1, a program of its own; Debian 13 and Ubuntu have it under different names.
compose_command() {
	local package
	for package in docker-compose-plugin docker-compose-v2 docker-compose; do
		[[ $(apt-cache policy "$package" 2>/dev/null | sed -n 's/ *Candidate: //p') =~ ^([0-9]+:)?[2-9] ]] || continue
		echo "apt-get install -y $package"
		return
	done
	echo "install docker-compose-plugin from Docker's own packages (https://docs.docker.com/engine/install), this system has none"
}

MISSING=0
ok() { printf '  ok       %s\n' "$1"; }
note() { printf '  note     %s\n' "$1"; }
missing() { # WHAT MENDING
	printf '  MISSING  %s\n           mend: %s\n' "$1" "$2"
	MISSING=$((MISSING + 1))
}

echo "Trajoule, profile $PROFILE (server $SERVER_KIND, mode $MODE)"

echo "software"
if [[ -x $PY ]] && "$PY" -c 'import harbor' 2>/dev/null; then
	ok "Harbor $("$PY" -c 'from importlib.metadata import version; print(version("harbor"))') on Python $("$PY" -c 'import platform; print(platform.python_version())')"
else
	missing ".venv with Harbor" "${GIVEN}bash 01_setup.sh"
fi
if [[ -n $SERVER_PACKAGES ]]; then
	if [[ -x $SERVER_VENV/bin/python ]]; then ok "the server's environment $SERVER_VENV"; else missing "the server's environment $SERVER_VENV" "${GIVEN}bash 01_setup.sh"; fi
fi
for command in curl git flock; do
	command -v "$command" >/dev/null || missing "$command" "apt-get install -y $command (as root)"
done

echo "where tasks run"
kind=$(environment_kind)
if docker_says=$(timeout 10 docker info --format '{{.ServerVersion}}' 2>&1); then
	ok "Docker engine $docker_says"
	if docker compose version >/dev/null 2>&1; then ok "Docker Compose"; else missing "Docker's compose plugin (Harbor needs it)" "as root $(compose_command)"; fi
	networks=$(docker network ls -q 2>/dev/null | wc -l)
	((networks < 25)) || note "$networks Docker networks: about 31 are possible; \`docker network prune\` removes unused ones"
elif [[ $kind == docker ]]; then
	missing "a Docker engine that answers ($(tail -n 1 <<<"$docker_says"))" "sudo bash sudo_setup.sh, then log in again; or ENVIRONMENT=local_env"
else
	note "no Docker engine: tasks run in Linux namespaces (local_env.py), which suits the local tasks only"
fi
if [[ $kind == local_env ]]; then
	command -v asciinema >/dev/null || note "no asciinema: trajectories have no terminal recording, command times come from the agent's log (apt-get install -y asciinema)"
	if [[ ! -x $PY ]]; then
		note "not checked before set-up: namespaces for the tasks"
	elif says=$("$PY" local_env.py --check 2>&1); then
		while read -r line; do ok "$line"; done <<<"$says"
	else
		missing "namespaces for the tasks" "$says"
	fi
fi

echo "energy counters"
gpus=0
if command -v nvidia-smi >/dev/null && gpu_list=$(nvidia-smi --query-gpu=index,name,driver_version,power.limit --format=csv,noheader 2>/dev/null); then
	gpus=$(grep -c . <<<"$gpu_list")
	while read -r line; do ok "GPU $line"; done <<<"$gpu_list"
	busy=$(nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv,noheader 2>/dev/null || true)
	[[ -z $busy ]] || note "processes on the GPUs, which would be in the measurement: $(tr '\n' ';' <<<"$busy")"
elif [[ $SERVER_KIND == vllm && $GPUS != none ]]; then
	missing "an NVIDIA GPU with its driver (nvidia-smi)" "install the driver; without a GPU use PROFILE=cpu-smollm2"
else
	note "no NVIDIA GPU"
fi
zones=()
unreadable=()
for zone in "$POWERCAP_DIR"/intel-rapl:*; do
	[[ -e $zone/energy_uj && $(cat "$zone/name" 2>/dev/null) == package-* ]] || continue
	if [[ -r $zone/energy_uj ]]; then zones+=("$zone"); else unreadable+=("$zone"); fi
done
if ((${#zones[@]})); then
	ok "RAPL: ${#zones[@]} package counter(s) readable"
elif ((${#unreadable[@]})); then
	missing "read access to RAPL (${unreadable[0]}/energy_uj)" "sudo bash sudo_setup.sh, then log in again"
elif [[ -n $CPU_MODEL_W ]]; then
	note "no RAPL (usual in virtual machines): CPU energy is ESTIMATED from busy time at $CPU_MODEL_W W per logical CPU, and labelled so"
else
	note "no RAPL (usual in virtual machines): no CPU energy is recorded"
fi
if ((gpus == 0 && ${#zones[@]} == 0)) && [[ -z $CPU_MODEL_W ]]; then
	missing "any energy counter" "run on a machine with NVML or RAPL, or allow the labelled estimate: CPU_MODEL_W=0.74:3.50"
fi

echo "machine"
space=$(free_mb "$DATA_DIR")
if ((space >= MIN_FREE_MB)); then ok "$space MB of disk free"; else missing "disk: $space MB free, MIN_FREE_MB=$MIN_FREE_MB" "free some, or move DATA_DIR to another disk"; fi
for name in PORT PROXY_PORT; do
	if port_free "${!name}"; then
		ok "port ${!name} ($name) is free"
	elif [[ $name == PORT ]] && adapter wait --timeout 1 2>/dev/null; then
		ok "port ${!name} ($name): a model server answers"
	else
		missing "port ${!name} ($name) is taken" "stop what listens there, or set $name"
	fi
done
if command -v timedatectl >/dev/null && [[ $(timedatectl show -p NTPSynchronized --value 2>/dev/null) == no ]]; then
	note "the clock is not synchronised; intervals are unaffected (monotonic clock), absolute times may be off"
fi
governor=$(cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor 2>/dev/null || true)
[[ -z $governor || $governor == performance ]] || note "CPU frequency governor '$governor': runs repeat better with performance"
((gpus == 0)) || [[ $(nvidia-smi --query-gpu=persistence_mode --format=csv,noheader 2>/dev/null | sort -u) == Enabled ]] || note "persistence mode is off: idle power is steadier with \`sudo nvidia-smi -pm 1\`"

if [[ -n $TASK_LIST ]]; then
	echo "tasks of $TASK_LIST"
	need_venv
	code=0
	findings=$("$PY" stages/datasets.py check "$TASK_LIST" --tasks-dir "$TASKS_DIR" --registry "$TASK_REGISTRY" --deadline "$TRIAL_DEADLINE_S" 2>&1) || code=$?
	if ((code != 0)) && [[ $findings != missing$'\t'* && $findings != *$'\n'missing$'\t'* ]]; then
		findings=missing$'\t'"the check of the tasks failed: ${findings##*$'\n'}"$'\t'"mend the task, or leave it out of the list" # it came to no finding
	fi
	while IFS=$'\t' read -r level text way; do
		case $level in
		missing) missing "$text" "$way" ;;
		note) note "$text" ;;
		ok) ok "$text" ;;
		esac
	done <<<"$findings"
fi

if ((MISSING)); then
	echo "$MISSING thing(s) missing for profile $PROFILE"
	exit 1
fi
echo "everything that profile $PROFILE needs is here"
next "\`${GIVEN}bash 03_calibrate.sh --idle-bare\`, then \`${GIVEN}bash 02_serve_vllm.sh\` in a terminal of its own"
