# What the stages share: settings, messages, checks, processes. Sourced first by every stage; computes nothing.
# shellcheck shell=bash disable=SC2034,SC2153
# (SC2034, SC2153: stages use what is assigned here, and `spawn` assigns through a name)

set -Eeuo pipefail
shopt -s inherit_errexit 2>/dev/null || true
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
STAGE=$(basename "$0" .sh)

log() { printf '%s %s: %s\n' "$(date +%H:%M:%S)" "$STAGE" "$*" >&2; }
warn() { log "WARNING: $*"; }
# die MESSAGE [EXIT CODE]: 2 is bad input, 1 everything that went wrong later
die() {
	log "ERROR: $1"
	[[ -z ${ERROR_FILE:-} ]] || printf '%s\n' "$1" >"$ERROR_FILE" # for the batch, which says why a trial failed
	exit "${2:-1}"
}

# No silent end: a command that fails where nobody expected it says so.
trap 'log "ERROR: ${BASH_SOURCE[0]##*/} line $LINENO: \`${BASH_COMMAND}\` failed (exit $?)"' ERR

# shellcheck source=config.sh
source "$ROOT/config.sh"

PY=$ROOT/.venv/bin/python
SERVER_URL=http://127.0.0.1:$PORT
PROXY_URL=http://127.0.0.1:$PROXY_PORT
CALIB_DATA=$DATA_DIR/$CALIB_NAME
CALIB_RESULTS=$RESULTS_DIR/$CALIB_NAME
TRAJ_DIR=$DATA_DIR/traj
# Locks and notes of what runs on this machine: where a checkout is shared by several, each needs a folder of its own.
export TRAJOULE_RUN_DIR=${TRAJOULE_RUN_DIR:-$ROOT/.cache/run}
RUN_DIR=$TRAJOULE_RUN_DIR

# Harbor and litellm: no telemetry, no look-ups in the network; requests to our own ports never through a proxy of the environment.
export HARBOR_TELEMETRY=0 LITELLM_OFFLINE_MODE=true HF_HUB_DISABLE_TELEMETRY=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
export NO_PROXY=127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY} no_proxy=127.0.0.1,localhost${no_proxy:+,$no_proxy}
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
unset OPENAI_BASE_URL OPENAI_API_BASE

usage() { # the header comment of a stage is its help
	awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"
}
for _argument in "$@"; do
	if [[ $_argument == -h || $_argument == --help ]]; then
		usage
		exit 0
	fi
done

# setting NAME REGEX WHAT: a setting must look like this
setting() {
	[[ ${!1} =~ ^$2$ ]] || die "setting $1='${!1}': expected $3 (profile $PROFILE, config.sh or the environment)" 2
}

verify_config() {
	local number='[0-9]+([.][0-9]+)?' list='[0-9]+(,[0-9]+)*' name
	setting SERVER_KIND 'vllm|llamacpp|openai' 'vllm, llamacpp or openai'
	setting MODE 'live|replay' 'live or replay'
	setting REPLAY_MODE 'putback|force' 'putback or force'
	setting REPLAY_WORDS '[01]' '0 or 1'
	setting ENVIRONMENT 'auto|docker|local_env' 'auto, docker or local_env'
	setting CALIB_TRANSPORT 'chat|completions' 'chat or completions'
	for name in PORT PROXY_PORT MAX_MODEL_LEN TENSOR_PARALLEL SERVER_SLOTS CALIB_REPS BATCH_SEED CONCURRENCY DRIFT_EVERY MAX_INFRA_FAILURES MIN_FREE_MB MAX_OUTPUT_TOKENS; do
		setting "$name" '[0-9]+' 'a whole number'
	done
	for name in SAMPLER_HZ IDLE_S BATCH_IDLE_S CHECK_IDLE_S CHECK_WAIT_S DRIFT_TOLERANCE CALIB_QUIET_S CALIB_COOL_DOWN_S SERVER_READY_S LLM_TIMEOUT_S TRIAL_DEADLINE_S; do setting "$name" "$number" 'a number'; done
	[[ $REPLAY_MODE != force || $SERVER_KIND == vllm ]] || die "setting REPLAY_MODE='force': only vLLM can be made to emit a reply; use putback" 2
	for name in CALIB_CONTEXTS CALIB_OUTPUTS; do setting "$name" "$list" 'whole numbers with commas between them'; done
	for name in APPEND_CACHED APPEND_UNCACHED APPEND_OUTPUTS; do setting "$name" "($list)?" 'whole numbers with commas between them, or nothing'; done
	for name in MAX_TURNS AGENT_TIMEOUT_S; do setting "$name" '[0-9]*' 'a whole number, or nothing'; done
	setting TEMPERATURE "($number)?" 'a number, or nothing'
	setting SERVER_PYTHON '3[.][0-9]+' 'a version such as 3.12'
	setting CPU_MODEL_W "($number:$number)?" 'IDLE:BUSY watts per logical CPU, or nothing'
	((PORT != PROXY_PORT)) || die "settings PORT and PROXY_PORT are both $PORT: the server and its proxy need one each" 2
}
verify_config

# A folder or file that a stage needs, and the command that makes it
need() { [[ -e $1 ]] || die "$1 is missing: run \`$2\` first" 2; }
need_venv() {
	[[ -x $PY ]] && "$PY" -c '' 2>/dev/null && return 0
	die ".venv is missing or broken: run \`PROFILE=$PROFILE bash 01_setup.sh\` first" 2
}

port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

adapter() { # WHAT [ARGS]: ask the server, whatever its kind
	local what=$1
	shift
	"$PY" servers/adapter.py "$what" --kind "$SERVER_KIND" --url "$SERVER_URL" "$@"
}

# Background processes of a stage, ended in reverse order however the stage ends. `spawn VARIABLE ARGS` puts the pid into VARIABLE:
# in a $(...) the process would be a grandchild that this shell can neither wait for nor be watched by.
SPAWNED=()
spawn() {
	local -n pid_of=$1
	local me=$BASHPID
	shift
	"$PY" stages/supervise.py --parent "$me" "$@" &
	pid_of=$!
	SPAWNED+=("$pid_of")
}
# supervise ARGS...: run something to its end in a process group that cannot outlive us (see stages/supervise.py). In the background and
# waited for, since bash answers a signal only once its foreground command has ended.
supervise() {
	local pid code=0
	spawn pid "$@"
	ended "$pid" || code=$?
	return "$code"
}
# stage SCRIPT ARGS...: run another stage
stage() { supervise -- bash "$@"; }
# ended PID: wait for one background process and return its exit code
ended() {
	local code=0 pid left=()
	wait "$1" || code=$?
	for pid in "${SPAWNED[@]}"; do [[ $pid == "$1" ]] || left+=("$pid"); done
	SPAWNED=("${left[@]}")
	return "$code"
}
# stop PID: end one background process and return its exit code
stop() {
	kill -TERM "$1" 2>/dev/null || true
	ended "$1"
}
stop_spawned() {
	while ((${#SPAWNED[@]})); do stop "${SPAWNED[-1]}" 2>/dev/null || true; done
}
trap stop_spawned EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# One measurement at a time on a machine: another one would be in our counters.
measuring_lock() { # until measuring_unlock or the stage's end
	mkdir -p "$RUN_DIR"
	exec {LOCK_FD}>"$RUN_DIR/measuring.lock"
	flock -n "$LOCK_FD" || die "another stage is measuring on this machine (it holds $RUN_DIR/measuring.lock): wait for it, or stop it"
}

measuring_unlock() { exec {LOCK_FD}>&-; }

sampler_args() {
	SAMPLER=("$PY" sampler.py --hz "$SAMPLER_HZ" --gpus "$GPUS" --powercap "$POWERCAP_DIR")
	[[ -z $CPU_MODEL_W ]] || SAMPLER+=(--cpu-model "$CPU_MODEL_W")
}

# start_sampler CSV LOG: sampler in the background (pid in SAMPLER_PID); returns when the first row is on disk
start_sampler() {
	sampler_args
	spawn SAMPLER_PID --log "$2" -- "${SAMPLER[@]}" -o "$1"
	local i
	for ((i = 0; i < 300; i++)); do
		[[ $(head -c 4096 "$1" 2>/dev/null | wc -l) -ge 2 ]] && return 0
		kill -0 "$SAMPLER_PID" 2>/dev/null || break
		sleep 0.1
	done
	die "the sampler gave no row: $(tail -n 1 "$2" 2>/dev/null) (log: $2)"
}

# start_proxy CALLS_JSONL LOG [ARGS]: logging proxy in the background (pid in PROXY_PID); returns when it answers
start_proxy() {
	local calls=$1 logfile=$2 i
	shift 2
	port_free "$PROXY_PORT" || die "port $PROXY_PORT is taken, the logging proxy needs it: stop what listens there, or set PROXY_PORT"
	spawn PROXY_PID --name "proxy-$PROXY_PORT" --log "$logfile" -- "$PY" llm_proxy.py --upstream "$SERVER_URL" --port "$PROXY_PORT" --log "$calls" \
		--server-kind "$SERVER_KIND" "$@"
	for ((i = 0; i < 300; i++)); do
		curl -fsS -o /dev/null "$PROXY_URL/trajoule/health" 2>/dev/null && return 0
		kill -0 "$PROXY_PID" 2>/dev/null || break
		sleep 0.1
	done
	die "the proxy did not start: $(tail -n 1 "$logfile" 2>/dev/null) (log: $logfile)"
}

# start_server LOG: the profile's server in the background (pid in SERVER_PID); returns when it answers
start_server() {
	port_free "$PORT" || die "port $PORT is taken, the model server needs it: stop what listens there, or set PORT"
	spawn SERVER_PID --log "$1" -- bash 02_serve_vllm.sh
	local end=$((SECONDS + ${SERVER_READY_S%.*}))
	until adapter wait --timeout 2 2>/dev/null; do
		kill -0 "$SERVER_PID" 2>/dev/null || die "the server ended before it was ready: $(tail -n 1 "$1") (log: $1)"
		((SECONDS < end)) || die "no server at $SERVER_URL after $SERVER_READY_S s (log: $1); SERVER_READY_S allows more"
	done
}

# cold_cache WHAT: empty the server's prefix cache
cold_cache() {
	adapter reset && return 0
	[[ $SERVER_KIND == openai ]] || die "the prefix cache could not be cleared, so $1 would not start cold"
	warn "a server of this kind has no cache reset: $1 may start with cached prompts, which its cached_tokens show"
}

# remove_containers FOLDER: what a Harbor that was killed left running in Docker, by the names of the trials in the folder
remove_containers() {
	local trial project left
	for trial in "$1"/harbor/*__*/; do
		project=$(basename "$trial")__env
		left=$(docker ps -aq --filter "label=com.docker.compose.project=${project,,}" 2>/dev/null) || return 0
		[[ -z $left ]] || {
			log "removing the containers that ${project%__env} left"
			# shellcheck disable=SC2086
			docker rm -f $left >/dev/null
			docker network ls -q --filter "label=com.docker.compose.project=${project,,}" | xargs -r docker network rm >/dev/null || true
		}
	done
}

# set_aside TRAJECTORY: its folder moves to traj_unfinished, where its energy stays on record
set_aside() {
	[[ -e $TRAJ_DIR/$1 ]] || return 0
	remove_containers "$TRAJ_DIR/$1"
	mkdir -p "$DATA_DIR/traj_unfinished"
	mv "$TRAJ_DIR/$1" "$DATA_DIR/traj_unfinished/$1.$(date -u +%Y%m%dT%H%M%S)"
	log "$1 was not finished or failed: its remains went to $DATA_DIR/traj_unfinished"
}

# environment_kind: docker or local_env, from ENVIRONMENT
environment_kind() {
	case $ENVIRONMENT in
	auto) if timeout 10 docker info >/dev/null 2>&1; then echo docker; else echo local_env; fi ;;
	*) echo "$ENVIRONMENT" ;;
	esac
}

free_mb() { df -Pm "$1" | awk 'NR == 2 { print $4 }'; }
