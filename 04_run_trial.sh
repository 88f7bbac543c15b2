#!/usr/bin/env bash
# Runs one trajectory: clears the prefix cache, starts the logging proxy and the sampler, runs Harbor with Terminus-2, stops both, records
# how it ended. Needs a running server (02_serve_vllm.sh).
#
#   bash 04_run_trial.sh TASK POLICY REP [RECORDING]
#   bash 04_run_trial.sh terminal-bench@2.0/fix-git summarize-8k 1
#   PROFILE=cpu-smollm2 bash 04_run_trial.sh log-report summarize-2k 1 tasks/recordings/log-report/01-solve.json
#
# TASK is a folder, a name in TASKS_DIR, or DATASET@VERSION/NAME. POLICY: summarize-off, summarize-<N>k (once the history exceeds N x 1024
# tokens), summarize-on (the agent's default). With MODE=replay the proxy answers from RECORDING (default: the task's recordings in turn).
# Leaves DATA_DIR/traj/<task>__<policy>__r<rep>/ with trial.json written last. A finished trajectory is kept, with its exit code; an unfinished one
# is moved to DATA_DIR/traj_unfinished/ and run again. Exit code 0: measured (whatever the reward), 3: infrastructure failed, 2: bad input.
# Several at a time (06_run_batch.sh with CONCURRENCY) share the server, its cache and one sampler, that of the group in GROUP_DIR.
source "$(dirname "$0")/common.sh"
[[ $# -ge 3 && $# -le 4 ]] || die "expected TASK POLICY REP [RECORDING], got $# argument(s) (see --help)" 2
TASK=$1 POLICY=$2 REP=$3
[[ $REP =~ ^[1-9][0-9]{0,4}$ ]] || die "REP='$REP': expected 1, 2, 3 …" 2
[[ $MODE == replay || $# -eq 3 ]] || die "RECORDING='$4': with MODE=$MODE nothing is replayed; leave it out, or set MODE=replay" 2
need_venv
"$PY" stages/trial.py check --task "$TASK" --tasks-dir "$TASKS_DIR" --registry "$TASK_REGISTRY" --policy "$POLICY" || exit 2
NAME=$(trajectory_name "$TASK" "$POLICY" "$REP")
DIR=$TRAJ_DIR/$NAME

RECORDING=
if [[ $MODE == replay ]]; then
	mapfile -t recordings < <(printf '%s\n' "$RECORDINGS_DIR/$(basename "$TASK")"/*.json | sort)
	RECORDING=${4:-${recordings[$(((REP - 1) % ${#recordings[@]}))]}}
	[[ -r $RECORDING ]] || die "MODE=replay needs a recording of $(basename "$TASK"): $RECORDING is missing" 2
fi
if [[ -e $DIR/trial.json ]]; then
	"$PY" stages/trial.py kept --dir "$DIR" --mode "$MODE" --recording "$RECORDING" >&2 || exit $?
	exit 0
fi
(($(free_mb "$DATA_DIR") >= MIN_FREE_MB)) || die "$(free_mb "$DATA_DIR") MB of disk are free in $DATA_DIR, a trial needs MIN_FREE_MB=$MIN_FREE_MB"
GROUP_DIR=${GROUP_DIR:-}
[[ -n $GROUP_DIR ]] || measuring_lock # a group's lock is the batch's
clean_containers() { remove_containers "$DIR"; }
set_aside "$NAME"

need_server
served_model
deadline_s=$("$PY" stages/trial.py prepare --dir "$DIR" --task "$TASK" --tasks-dir "$TASKS_DIR" --registry "$TASK_REGISTRY" --policy "$POLICY" --rep "$REP" --mode "$MODE" \
	--recording "$RECORDING" --model "$SERVED" --context "$CONTEXT" --profile "$PROFILE" --environment "$(environment_kind)" \
	--server-kind "$SERVER_KIND" --server-version "$(adapter version || echo -)" --proxy-url "$PROXY_URL" --temperature "$TEMPERATURE" \
	--max-turns "$MAX_TURNS" --max-output-tokens "$MAX_OUTPUT_TOKENS" --agent-timeout "$AGENT_TIMEOUT_S" --llm-timeout "$LLM_TIMEOUT_S" \
	--schema "$RESPONSE_SCHEMA" --deadline "$TRIAL_DEADLINE_S" ${IDLE_BASELINE:+--idle "$IDLE_BASELINE"} \
	${GROUP_DIR:+--group "$GROUP_DIR" --members "$GROUP_MEMBERS"}) || exit 2
mkdir -p "$DIR/logs"

if [[ -n $GROUP_DIR ]]; then
	for file in samples.csv samples.meta.json state.csv; do ln -s "$(realpath --relative-to "$DIR" "$GROUP_DIR")/$file" "$DIR/$file"; done
else
	cold_cache "$NAME"
fi
proxy_args=(--trial "$NAME")
[[ -z $RECORDING ]] || proxy_args+=(--replay "$RECORDING" --replay-mode "$REPLAY_MODE")
[[ -z $RECORDING || $REPLAY_MODE$REPLAY_WORDS != putback1 ]] || proxy_args+=(--replay-words)
start_proxy "$DIR/calls.jsonl" "$DIR/logs/proxy.log" "${proxy_args[@]}"
[[ -n $GROUP_DIR ]] || start_sampler "$DIR/samples.csv" "$DIR/logs/sampler.log"

# The agent's key: local servers take any, but litellm wants one.
export OPENAI_API_KEY=${OPENAI_API_KEY:-unused}
T_BEGIN=$(date +%s.%6N) code=0
supervise --log "$DIR/logs/harbor.log" --needs "$PROXY_PID" --needs "${SAMPLER_PID:-$GROUP_SAMPLER}" --deadline "$deadline_s" -- "$PY" stages/warm_harbor.py run -c "$DIR/job.json" -y || code=$?
T_END=$(date +%s.%6N)
sleep 0.3 # the counters' last step is then in the file
broken=
((code != 123)) || broken="the sampler or the proxy ended while Harbor ran: see $DIR/logs${GROUP_DIR:+ and $GROUP_DIR}"
[[ -n $GROUP_DIR ]] || stop "$SAMPLER_PID" || broken="the sampler ended badly (exit $?): see $DIR/logs/sampler.log"
stop "$PROXY_PID" || broken="the proxy ended badly (exit $?): see $DIR/logs/proxy.log"
clean_containers
down=()
adapter wait --timeout 5 2>/dev/null || down=(--server-down)
rc=0
"$PY" stages/trial.py finish --dir "$DIR" --harbor-exit "$code" --deadline "$deadline_s" --t-begin "$T_BEGIN" --t-end "$T_END" \
	--calib "$CALIB_RESULTS" "${down[@]}" ${broken:+--broken "$broken"} >&2 || rc=$?
exit "$rc"
