# What the stages share: settings, messages, checks, processes. Sourced first by every stage; computes nothing.
# shellcheck shell=bash disable=SC2034,SC2153
# (SC2034, SC2153: stages use what is assigned here, and `spawn` assigns through a name)

set -Eeuo pipefail
shopt -s inherit_errexit 2>/dev/null || true
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
STAGE=$(basename "$0" .sh)

usage() { # the header comment of a stage is its help
	awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"
}
for _argument in "$@"; do # before anything else: help must come whatever the settings are
	if [[ $_argument == -h || $_argument == --help ]]; then
		usage
		exit 0
	fi
done
cd "$ROOT"

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

port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Settings that came from outside, as they stand before a command: what a message tells to run then works as it is printed.
GIVEN=
mapfile -t SETTINGS < <(sed -nE 's/^: "\$\{([A-Z_0-9]+)=.*/\1/p' "$ROOT/config.sh")
for _name in "${SETTINGS[@]}" TRAJOULE_RUN_DIR; do
	[[ -z ${!_name+given} || ${!_name} == "$ROOT/.cache/run" ]] || GIVEN+=$(printf '%s=%q ' "$_name" "${!_name}")
done
THIS_COMMAND=$GIVEN"bash ${0#./}"
(($# == 0)) || THIS_COMMAND+=$(printf ' %q' "$@")
NESTED=${TRAJOULE_CALLER:-} # the stage that runs this one, if any: it speaks for both

# FREE_PORTS=1: ports that nothing listens on, unless they were asked for; for what is meant to run anywhere
if [[ -n ${FREE_PORTS:-} ]]; then
	for _name in PORT:8000 PROXY_PORT:8100; do
		_port=${_name#*:} _name=${_name%:*}
		[[ -z ${!_name:-} ]] || continue
		until port_free "$_port"; do _port=$((_port + 1)); done
		export "$_name=$_port"
	done
fi

# shellcheck source=config.sh
source "$ROOT/config.sh"

PY=$ROOT/.venv/bin/python
SERVER_URL=http://127.0.0.1:$PORT
PROXY_URL=http://127.0.0.1:$PROXY_PORT
CALIB_DATA=$DATA_DIR/$CALIB_NAME
CALIB_RESULTS=$RESULTS_DIR/$CALIB_NAME
TRAJ_DIR=$DATA_DIR/traj
# Notes of what runs on this machine: where a checkout is shared by several, each needs a folder of its own. The lock of who measures is the
# machine's, whatever the checkout; who sets TRAJOULE_RUN_DIR has it there, and answers for what else is measured at the same time.
export TRAJOULE_LOCK_DIR=${TRAJOULE_LOCK_DIR:-${TRAJOULE_RUN_DIR:-/tmp}}
export TRAJOULE_RUN_DIR=${TRAJOULE_RUN_DIR:-$ROOT/.cache/run}
RUN_DIR=$TRAJOULE_RUN_DIR

# Harbor and litellm: no telemetry, no look-ups in the network; requests to our own ports never through a proxy of the environment.
export HARBOR_TELEMETRY=0 LITELLM_OFFLINE_MODE=true HF_HUB_DISABLE_TELEMETRY=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
export NO_PROXY=127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY} no_proxy=127.0.0.1,localhost${no_proxy:+,$no_proxy}
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
unset OPENAI_BASE_URL OPENAI_API_BASE

# setting NAME REGEX WHAT: a setting must look like this
setting() {
	[[ ${!1} =~ ^$2$ ]] || die "setting $1='${!1}': expected $3 (profile $PROFILE, config.sh or the environment)" 2
}

verify_config() {
	# No leading zeros: bash would read 090 as an octal number, and refuse it in the middle of a stage.
	local whole='[1-9][0-9]{0,8}' decimals='[.][0-9]+' name
	local number="(0|$whole)($decimals)?" list="$whole(,$whole)*" some="($whole($decimals)?|0[.][0-9]*[1-9][0-9]*)"
	local gpu='([0-9]+|(GPU|MIG)-[A-Za-z0-9/-]+)'
	for name in DATA_DIR RESULTS_DIR ORACLE_DIR TASKS_DIR RECORDINGS_DIR; do setting "$name" '.*[^[:space:]].*' 'a folder'; done
	setting CALIB_NAME '[A-Za-z0-9_][A-Za-z0-9._-]*' "a folder's name, such as calib"
	setting SERVER_KIND 'vllm|llamacpp|openai' 'vllm, llamacpp or openai'
	setting MODE 'live|replay' 'live or replay'
	setting REPLAY_MODE 'putback|force' 'putback or force'
	setting REPLAY_WORDS '[01]' '0 or 1'
	setting ENVIRONMENT 'auto|docker|local_env' 'auto, docker or local_env'
	setting CALIB_TRANSPORT 'chat|completions' 'chat or completions'
	setting SERVED_MODEL '[^[:space:]]+' 'a name without spaces (the last part of MODEL, unless it is set)'
	for name in MAX_MODEL_LEN TENSOR_PARALLEL SERVER_THREADS SERVER_SLOTS CALIB_REPS CONCURRENCY ORACLE_JOBS MAX_INFRA_FAILURES MAX_OUTPUT_TOKENS; do
		setting "$name" "$whole" 'a whole number from 1 on'
	done
	for name in BATCH_SEED CALIB_COMPARE_REPS DRIFT_EVERY MIN_FREE_MB; do setting "$name" "(0|$whole)" 'a whole number'; done
	for name in PORT PROXY_PORT; do
		setting "$name" '[1-9][0-9]{0,4}' 'a port, 1 to 65535'
		((${!name} < 65536)) || die "setting $name='${!name}': expected a port, 1 to 65535 (profile $PROFILE, config.sh or the environment)" 2
	done
	for name in SAMPLER_HZ IDLE_S BATCH_IDLE_S SERVER_READY_S LLM_TIMEOUT_S TRIAL_DEADLINE_S DRIFT_TOLERANCE; do setting "$name" "$some" 'a number above 0, such as 90 or 0.5'; done
	((${SAMPLER_HZ%.*} < 100)) || setting SAMPLER_HZ '100([.]0+)?' 'at most 100 rows per second (reading faster disturbs what is measured)'
	for name in WARM_UP_S CHECK_IDLE_S CHECK_WAIT_S CALIB_QUIET_S CALIB_COOL_DOWN_S; do
		setting "$name" "$number" 'a number, such as 90 or 0.5'
		[[ ! ${!name} =~ ^0[.]0+$ ]] || printf -v "$name" 0 # stages compare with 0
	done
	setting GPU_MEMORY_UTILIZATION '0?[.][0-9]*[1-9][0-9]*|1([.]0*)?' 'a fraction above 0, at most 1'
	setting GPUS "auto|none|$gpu(,$gpu)*" 'auto, none, or a list such as 0,1'
	[[ $REPLAY_MODE != force || $SERVER_KIND == vllm ]] || die "setting REPLAY_MODE='force': only vLLM can be made to emit a reply; use putback" 2
	for name in CALIB_CONTEXTS CALIB_OUTPUTS; do setting "$name" "$list" 'whole numbers from 1 on with commas between them'; done
	for name in APPEND_CACHED APPEND_UNCACHED APPEND_OUTPUTS; do setting "$name" "($list)?" 'whole numbers from 1 on with commas between them, or nothing'; done
	for name in MAX_TURNS AGENT_TIMEOUT_S; do setting "$name" "($whole)?" 'a whole number from 1 on, or nothing'; done
	setting TEMPERATURE "($number)?" 'a number, or nothing'
	setting SERVER_PYTHON '3[.](0|[1-9][0-9]?)' 'a version such as 3.12'
	setting CPU_MODEL_W "($number:$number)?" 'IDLE:BUSY watts per logical CPU, or nothing'
	[[ -z $CPU_MODEL_W ]] || awk -F: '{ exit !($1 <= $2 && $2 > 0) }' <<<"$CPU_MODEL_W" ||
		die "setting CPU_MODEL_W='$CPU_MODEL_W': expected IDLE:BUSY watts per logical CPU, of which busy is the larger" 2
	((PORT < PROXY_PORT || PORT >= PROXY_PORT + CONCURRENCY)) || if ((CONCURRENCY == 1)); then
		die "settings PORT and PROXY_PORT are both $PORT: the server and its proxy need one each" 2
	else
		die "setting PORT='$PORT' is one of the $CONCURRENCY ports from PROXY_PORT=$PROXY_PORT on, which the proxies need (CONCURRENCY)" 2
	fi
	((PROXY_PORT + CONCURRENCY <= 65536)) || die "setting PROXY_PORT='$PROXY_PORT': CONCURRENCY=$CONCURRENCY proxies need as many ports from there on" 2
}
verify_config

# A misspelt setting would have no effect and nobody would know: what a profile writes as a setting must be one, and variables whose names are
# nearly a setting's are told, once a run.
verify_names() {
	local what name like
	while read -r what name like; do
		case $what in
		unknown) die "$PROFILE_FILE: $name is no setting; config.sh has them all" 2 ;;
		near) warn "$name is no setting and has no effect; is $like meant? (config.sh has them all)" ;;
		esac
	done < <(compgen -e | awk -v settings="${SETTINGS[*]}" -f stages/misspelt.awk "$(realpath "$PROFILE_FILE")" -)
}
[[ -n $NESTED ]] || verify_names

# A folder or file that a stage needs, and the command that makes it
need() { [[ -e $1 ]] || die "$1 is missing: run \`$GIVEN$2\` first" 2; }
need_venv() {
	[[ -x $PY ]] && "$PY" -c '' 2>/dev/null && return 0
	die ".venv is missing or broken: run \`${GIVEN}bash 01_setup.sh\` first" 2
}
need_list() { # TASK_LIST
	[[ -f $1 && -r $1 ]] || die "task list '$1': no such file, or not readable; lists of local tasks are in tasks/, such as tasks/local.txt" 2
}
need_repetitions() { # TEXT
	[[ $1 =~ ^[1-9][0-9]{0,4}$ ]] || die "REPETITIONS='$1': expected a whole number from 1 to 99999" 2
}
folders() { # FOLDER...: made where they are missing
	local why
	why=$(mkdir -p "$@" 2>&1 | head -n 1) || die "${why#mkdir: }: see DATA_DIR=$DATA_DIR, RESULTS_DIR=$RESULTS_DIR" 2
}
next() { [[ -n $NESTED ]] || log "next: $*"; } # what to run after this stage, unless another one runs it

trajectory_name() { echo "$(basename "$1")__$2__r$3"; } # TASK POLICY REP: the name that its folder has (plan.py's `name`)

adapter() { # WHAT [ARGS]: ask the server, whatever its kind
	local what=$1
	shift
	"$PY" servers/adapter.py "$what" --kind "$SERVER_KIND" --url "$SERVER_URL" "$@"
}
need_server() { # a server that answers and is what the settings say
	local why='' code=1
	if ! port_free "$PORT"; then
		code=0
		why=$(adapter wait --timeout 10 --model "$SERVED_MODEL" 2>&1) || code=$?
	fi
	case $code in
	0) return ;;
	2) die "${why#adapter: }: stop it and start \`${GIVEN}bash 02_serve_vllm.sh\`, or change the settings" 2 ;;
	esac
	[[ -z $why ]] || die "${why#adapter: }"
	die "no model server at $SERVER_URL: start it with \`${GIVEN}bash 02_serve_vllm.sh\`"
}

served_model() { # the name that the server serves, and its context in tokens: SERVED, CONTEXT
	local model
	model=$(adapter model) || die "the server at $SERVER_URL does not say what it serves (see above)"
	read -r SERVED CONTEXT <<<"$model"
	[[ $CONTEXT != - ]] || CONTEXT=$MAX_MODEL_LEN
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
# stage SCRIPT ARGS...: run another stage. It has time to end what it runs, and that to end what it runs.
stage() { TRAJOULE_CALLER=$STAGE supervise --grace 40 -- bash "$@"; }
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
# A container belongs to Docker's engine, not to a process group. A stage that may leave some says which; they go first, since that takes a
# second, while Harbor may be killed before it comes to them, and again, for what Harbor started meanwhile.
clean_containers() { :; }
wrap_up() { :; } # what else a stage does however it ends, once nothing of it runs
at_exit() {
	clean_containers
	if ((${#SPAWNED[@]})); then
		stop_spawned
		clean_containers
	fi
	wrap_up
}
interrupted() { # EXIT_CODE
	[[ -n $NESTED ]] || log "interrupted; \`$THIS_COMMAND\` goes on"
	exit "$1"
}
trap at_exit EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP

# One measurement at a time on a machine: another one would be in our counters. Two are fine when both name their GPUs (GPUS or
# CUDA_VISIBLE_DEVICES) and have none in common; the CPU's counters are then of both.
measuring_lock() { # until measuring_unlock or the stage's end
	local gpus=$GPUS gpu
	[[ $gpus != auto ]] || gpus=${CUDA_VISIBLE_DEVICES:-none}
	LOCKS=()
	if [[ $gpus == none ]]; then
		take_lock -x ""
		return
	fi
	take_lock -s ""
	for gpu in ${gpus//,/ }; do take_lock -x "-gpu${gpu//\//_}"; done
}
take_lock() { # -x|-s NAME
	local file=$TRAJOULE_LOCK_DIR/trajoule-measuring$2.lock fd
	[[ -e $file ]] || { mkdir -p "$TRAJOULE_LOCK_DIR" && (umask 0 && : >"$file"); } || die "$file cannot be made: see TRAJOULE_RUN_DIR"
	exec {fd}<"$file" # read only: the file may be another user's
	LOCKS+=("$fd")
	flock -n "$1" "$fd" && return 0
	exec {fd}<&-
	die "something else is measuring on this machine (process $(pids_on "$file") holds $file): wait for it, or stop it"
}
pids_on() { # FILE: processes that have it open, as far as they may be looked at
	local pids
	pids=$(find /proc/[0-9]*/fd -lname "$1" -printf '%h\n' 2>/dev/null | cut -d/ -f3 | sort -nu) || true
	echo "${pids//$'\n'/ }"
}
measuring_unlock() {
	local fd
	for fd in "${LOCKS[@]}"; do exec {fd}<&-; done
}

sampler_args() {
	SAMPLER=("$PY" sampler.py --hz "$SAMPLER_HZ" --gpus "$GPUS" --powercap "$POWERCAP_DIR")
	[[ -z $CPU_MODEL_W ]] || SAMPLER+=(--cpu-model "$CPU_MODEL_W")
}

# quiet CSV SECONDS LOG: the sampler for so long, nothing else
quiet() {
	sampler_args
	supervise --log "$3" -- "${SAMPLER[@]}" -o "$1" --duration "$2" || die "the sampler failed (exit $?): $(tail -n 1 "$3") (log: $3)"
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
	TRAJOULE_CALLER=$STAGE spawn SERVER_PID --log "$1" -- bash 02_serve_vllm.sh
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

# bench SAMPLES_CSV CALLS_JSONL LOGS [ARGS]: the microbenchmark through the proxy and under the sampler; logs are LOGS.{proxy,sampler}.log,
# and with BENCH_LOG the microbenchmark's own output goes there
bench() {
	local samples=$1 calls=$2 logs=$3 rc=0
	shift 3
	start_proxy "${samples%.csv}.proxy.jsonl" "$logs.proxy.log"
	start_sampler "$samples" "$logs.sampler.log"
	TRAJOULE_CALLER=$STAGE supervise --needs "$SAMPLER_PID" --needs "$PROXY_PID" ${BENCH_LOG:+--log "$BENCH_LOG"} -- "$PY" microbench.py --base-url "$SERVER_URL" --proxy-url "$PROXY_URL" --server-kind "$SERVER_KIND" --out "$calls" \
		--transport "$CALIB_TRANSPORT" --quiet-s "$CALIB_QUIET_S" "$@" || rc=$?
	sleep 0.3 # the counters' last step is then in the file
	stop "$SAMPLER_PID" || {
		warn "the sampler ended badly (exit $?): see $logs.sampler.log"
		rc=1
	}
	stop "$PROXY_PID" || ((rc != 123)) || warn "the proxy ended badly: see $logs.proxy.log"
	return "$rc"
}

# remove_containers FOLDER...: what a Harbor that was killed left running in Docker, by the names of the trials in the folders
remove_containers() {
	local all folder trial name left
	all=$(timeout 20 docker ps -a --format '{{.ID}} {{.Label "com.docker.compose.project"}}' 2>/dev/null) && [[ -n $all ]] || return 0
	for folder in "$@"; do
		for trial in "$folder"/harbor/*__*/; do
			name=${trial%/} name=${name##*/}
			left=$(awk -v project="${name,,}__env" '$2 == project { print $1 }' <<<"$all")
			[[ -n $left ]] || continue
			log "removing the containers that $name left"
			# shellcheck disable=SC2086
			docker rm -f $left >/dev/null || true
			docker network ls -q --filter "label=com.docker.compose.project=${name,,}__env" | xargs -r docker network rm >/dev/null || true
		done
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

free_mb() { # FOLDER, or what of it exists already
	local there=$1
	until [[ -e $there || $there == . || $there == / ]]; do there=$(dirname -- "$there"); done
	df -Pm -- "$there" | awk 'NR == 2 { print $4 }'
}
