#!/usr/bin/env bash
# Loaded-idle baseline, then every task x policy x repetition through 04_run_trial.sh. Needs a running server (02_serve_vllm.sh).
# The plan is written first (DATA_DIR/traj/plan.csv) and the order interleaves repetitions. Resumable: what is finished is kept, so after any
# interruption the same command goes on. Infrastructure failures are not the agent's: they are run once more at the end (their first attempt's
# energy is waste: DATA_DIR/waste.csv), and the batch stops after MAX_INFRA_FAILURES in a row.
# Before each trial: disk, port, processes on the GPUs that are not the server's, idle power against the calibration (CHECK_IDLE_S of quiet).
# CONCURRENCY trajectories at a time share the server and one sampler (DATA_DIR/traj_groups/); the next ones start when all of them have ended.
# At the start and every DRIFT_EVERY trials the calibration's reference cell runs again (DATA_DIR/batch/drift.csv).
# RESULTS_DIR/status.html shows how it stands.
#
#   bash 06_run_batch.sh tasks/final.txt "summarize-off summarize-8k" 3
#   bash 06_run_batch.sh tasks/final.txt summarize-off 1 --dry-run      # the plan, nothing runs
#   bash 06_run_batch.sh tasks/final.txt summarize-off 3 --shard 2/4    # one of four parts
#
# Exit code: 0 every planned trajectory is measured, 3 some are not, 2 bad input, 1 the batch stopped.
source "$(dirname "$0")/common.sh"
SHARD=1/1 DRY=
positional=()
while (($#)); do
	case $1 in
	--dry-run) DRY=1 ;;
	--shard)
		[[ $# -ge 2 ]] || die "--shard: expected i/n behind it, such as 2/4" 2
		SHARD=$2
		shift
		;;
	-*) die "unknown option '$1' (see --help)" 2 ;;
	*) positional+=("$1") ;;
	esac
	shift
done
[[ ${#positional[@]} -eq 3 ]] || die "expected LIST \"POLICIES\" REPETITIONS, got ${#positional[@]} argument(s) (see --help)" 2
LIST=${positional[0]} POLICIES=${positional[1]} REPS=${positional[2]}
need_list "$LIST"
need_repetitions "$REPS"
[[ $SERVER_KIND != llamacpp ]] || ((CONCURRENCY <= SERVER_SLOTS)) ||
	die "setting CONCURRENCY='$CONCURRENCY': the server has SERVER_SLOTS=$SERVER_SLOTS slots and would make calls wait; restart it with more" 2
need_venv

PLAN=$TRAJ_DIR/plan.csv
plan_args=(--list "$LIST" --policies "$POLICIES" --reps "$REPS" --mode "$MODE" --seed "$BATCH_SEED" --tasks-dir "$TASKS_DIR" --recordings "$RECORDINGS_DIR" --shard "$SHARD" --show)
if [[ -n $DRY ]]; then
	"$PY" stages/plan.py --plan "$PLAN" "${plan_args[@]}" --dry-run || exit $?
	exit 0
fi
read_rows() { # [--dry-run]: the plan's rows of this shard, each with `open`, `measured` or `failed` (for infrastructure reasons)
	local rows
	rows=$("$PY" stages/plan.py --plan "$PLAN" "${plan_args[@]}" "$@") || exit 2
	ROWS=()
	[[ -z $rows ]] || mapfile -t ROWS <<<"$rows"
	MEASURED=$(grep -c $'\tmeasured\t' <<<"$rows") || true
}
name_of() { # ROW of the plan: its trajectory
	local task policy rep
	IFS=$'\t' read -r task policy rep _ <<<"$1"
	trajectory_name "$task" "$policy" "$rep"
}
read_rows --dry-run
if ((${#ROWS[@]} == 0)); then
	log "shard $SHARD has nothing to do: the list, policies and repetitions make fewer trajectories than shards"
	exit 0
fi
if ((MEASURED == ${#ROWS[@]})); then
	log "all ${#ROWS[@]} trajectories are measured already"
	exit 0
fi

folders "$DATA_DIR" "$RESULTS_DIR"
need_server
served_model
plan_args+=(--context "$CONTEXT")
# Only now is the plan written: a batch that never began has planned nothing.
read_rows
BATCH_DIR=$DATA_DIR/batch${CALIB_NAME#calib} # nodes that share a checkout have a calibration, and so a folder, of their own
folders "$BATCH_DIR"
export ERROR_FILE=$BATCH_DIR/last_error

idle_power() { # CSV SECONDS [ARGS of idle_check]: the idle power now against the calibration; 4 when it is another
	local csv=$1 code=0
	measuring_lock
	quiet "$csv" "$2" "$BATCH_DIR/sampler.log"
	measuring_unlock
	"$PY" stages/idle_check.py --idle "$csv" --calib "$CALIB_RESULTS" "${@:3}" >&2 || code=$?
	return "$code"
}
[[ $(environment_kind) != local_env ]] || command -v asciinema >/dev/null ||
	warn "no asciinema here: without terminal recordings the time of a command is the wait that the agent asked for (apt-get install -y asciinema)"
if [[ $WARM_UP_S != 0 && -e $CALIB_RESULTS/params.json ]]; then
	log "warm-up: calls of many sizes, at most $WARM_UP_S s"
	measuring_lock # nothing is measured here, but its calls would be in another stage's counters
	supervise --log "$BATCH_DIR/warm_up.log" -- "$PY" stages/warm_up.py --url "$SERVER_URL" --kind "$SERVER_KIND" --calib "$CALIB_RESULTS" \
		--limit-s "$WARM_UP_S" || true
	measuring_unlock
	log "$(tail -n 1 "$BATCH_DIR/warm_up.log")"
fi
# One baseline a start: a shift of the idle power since the calibration shows, and the trajectories are aligned with what is true now.
log "loaded-idle power: ${BATCH_IDLE_S} s of quiet"
export IDLE_BASELINE
IDLE_BASELINE=$BATCH_DIR/idle_loaded.$(date -u +%Y%m%dT%H%M%S).csv
idle_power "$IDLE_BASELINE" "$BATCH_IDLE_S" || true

unready() { # why no trial can start now, nothing when one can
	(($(free_mb "$DATA_DIR") >= MIN_FREE_MB)) || echo "$(free_mb "$DATA_DIR") MB of disk are free, a trial needs MIN_FREE_MB=$MIN_FREE_MB"
	local port
	for ((port = PROXY_PORT; port < PROXY_PORT + CONCURRENCY; port++)); do
		port_free "$port" || echo "port $port is taken, the logging proxy needs it: stop what listens there, or set PROXY_PORT"
	done
	[[ $GPUS == none ]] || ! command -v nvidia-smi >/dev/null ||
		"$PY" stages/idle_check.py --processes --gpus "$GPUS" --server "$RUN_DIR/server-$PORT.json" || true
}
check_machine() { # NAME of the trial that comes next
	local end=$((SECONDS + ${CHECK_WAIT_S%.*})) why said=
	while why=$(unready) && [[ -n $why ]]; do
		((SECONDS < end)) || die "$1 was not started: $why"
		[[ $why == "$said" ]] || log "waiting, for at most $CHECK_WAIT_S s: $why"
		said=$why
		sleep 1
	done
	[[ $CHECK_IDLE_S != 0 ]] || return 0
	until idle_power "$BATCH_DIR/check.csv" "$CHECK_IDLE_S" --log "$BATCH_DIR/checks.csv" --before "$1"; do
		((SECONDS < end)) || break # warned of and recorded; the trajectory's own quiet power will be flagged too
	done
}

drift_check() { # the calibration's reference cell again
	local cell folder rc=0
	folder=$BATCH_DIR/drift.$(date -u +%Y%m%dT%H%M%S)
	if ! cell=$("$PY" stages/drift.py cell --calib "$CALIB_RESULTS"); then
		warn "no drift check (see above)"
		return
	fi
	log "drift check: reference cell ${cell/ //}"
	measuring_lock
	mkdir -p "$folder"
	BENCH_LOG=$folder/microbench.log bench "$folder/samples.csv" "$folder/calls.jsonl" "$folder/bench" --contexts "${cell% *}" --outputs "${cell#* }" \
		--reps 1 --reference none || rc=$?
	measuring_unlock
	if ((rc != 0)); then
		warn "the drift check failed (exit $rc): $(tail -n 1 "$folder/microbench.log")"
	else
		"$PY" stages/drift.py check --calib "$CALIB_RESULTS" --calls "$folder/calls.jsonl" --samples "$folder/samples.csv" --tolerance "$DRIFT_TOLERANCE" \
			--log "$BATCH_DIR/drift.csv" >&2 || true
	fi
}

status() { "$PY" stages/status.py --traj "$TRAJ_DIR" --waste "$DATA_DIR/waste.csv" --out "$RESULTS_DIR/status.html" --title "$PROFILE: $LIST" || true; }
UNDER_WAY=() # names of the trials that run
wrap_up() {  # an attempt that was cut off is waste at once, not when its trial runs again
	local name
	for name in "${UNDER_WAY[@]}"; do [[ -e $TRAJ_DIR/$name/trial.json ]] || set_aside "$name"; done
	status >/dev/null
}
reason_of() { # NAME EXIT_CODE: why its trial failed
	"$PY" -c 'import json, sys; from stages.plan import infra_failure; print(infra_failure(json.load(open(sys.argv[1]))))' "$TRAJ_DIR/$1/trial.json" 2>/dev/null ||
		cat "$ERROR_FILE" 2>/dev/null || echo "04_run_trial.sh ended with exit code $2"
}

# One Harbor for all trials: its imports take longer than a short trial.
export HARBOR_SOCKET=$RUN_DIR/harbor-$$.sock
spawn HARBOR_PID --log "$BATCH_DIR/harbor.log" -- "$PY" stages/warm_harbor.py serve "$HARBOR_SOCKET"
until [[ -S $HARBOR_SOCKET ]]; do
	kill -0 "$HARBOR_PID" 2>/dev/null || die "Harbor cannot be loaded: $(tail -n 1 "$BATCH_DIR/harbor.log") (log: $BATCH_DIR/harbor.log)"
	sleep 0.1
done

ran=0 in_a_row=0
failed=()
settle() { # ROW EXIT_CODE of its trial
	local name why
	name=$(name_of "$1")
	ran=$((ran + 1))
	case $2 in
	0) in_a_row=0 ;;
	130 | 143) interrupted "$2" ;;
	2) die "$name cannot be run (see above); the same command goes on once that is mended" 2 ;;
	*)
		failed+=("$1")
		in_a_row=$((in_a_row + 1))
		why=$(reason_of "$name" "$2")
		log "$name failed for infrastructure reasons: $why"
		((in_a_row < MAX_INFRA_FAILURES)) ||
			die "$in_a_row trials in a row failed for infrastructure reasons (MAX_INFRA_FAILURES), the last, $name: $why; logs: $TRAJ_DIR/$name/logs"
		;;
	esac
}
run_alone() { # ROW
	local task policy rep mode recording rc=0
	IFS=$'\t' read -r task policy rep mode _ recording <<<"$1"
	MODE=$mode stage 04_run_trial.sh "$task" "$policy" "$rep" ${recording:+"$recording"} || rc=$?
	settle "$1" "$rc"
}
run_group() { # ROWS that run at the same time: one server, one sampler, a proxy each
	local task policy rep mode recording row pid rc i=0 pids=() codes=() broken=
	export GROUP_DIR GROUP_MEMBERS="" GROUP_SAMPLER
	GROUP_DIR=$DATA_DIR/traj_groups/$(date -u +%Y%m%dT%H%M%S).$(hostname)
	for row in "$@"; do GROUP_MEMBERS+="$(name_of "$row") "; done
	mkdir -p "$GROUP_DIR"
	measuring_lock
	cold_cache "a group of $#"
	start_sampler "$GROUP_DIR/samples.csv" "$GROUP_DIR/sampler.log"
	GROUP_SAMPLER=$SAMPLER_PID
	for row in "$@"; do
		IFS=$'\t' read -r task policy rep mode _ recording <<<"$row"
		MODE=$mode PROXY_PORT=$((PROXY_PORT + i)) ERROR_FILE=$ERROR_FILE.$i TRAJOULE_CALLER=$STAGE spawn pid --grace 40 -- bash 04_run_trial.sh "$task" "$policy" "$rep" ${recording:+"$recording"}
		pids+=("$pid")
		i=$((i + 1))
	done
	for pid in "${pids[@]}"; do
		rc=0
		ended "$pid" || rc=$?
		codes+=("$rc")
	done
	stop "$SAMPLER_PID" || broken="the sampler ended badly (exit $?): see $GROUP_DIR/sampler.log"
	measuring_unlock
	unset GROUP_DIR GROUP_MEMBERS GROUP_SAMPLER
	i=0
	for row in "$@"; do
		rm -f "$ERROR_FILE"
		cp "$ERROR_FILE.$i" "$ERROR_FILE" 2>/dev/null || true
		if [[ -n $broken && ${codes[i]} == 0 ]]; then # what it should have measured is lost for all
			echo "$broken" >"$ERROR_FILE"
			codes[i]=3
			set_aside "$(name_of "$row")"
		fi
		settle "$row" "${codes[i]}"
		i=$((i + 1))
	done
}
run_rows() { # rows of the plan, CONCURRENCY at a time; what failed for infrastructure reasons goes to `failed`
	local i names before=$ran
	for ((i = 1; i <= $#; i += CONCURRENCY)); do
		mapfile -t names < <(for row in "${@:i:CONCURRENCY}"; do name_of "$row"; done)
		((DRIFT_EVERY == 0 || (ran > 0 && ran / DRIFT_EVERY == before / DRIFT_EVERY))) || drift_check
		before=$ran
		check_machine "${names[*]}"
		log "$i/$# ${names[*]}"
		rm -f "$ERROR_FILE"*
		UNDER_WAY=("${names[@]}")
		if ((CONCURRENCY > 1 && i < $#)); then run_group "${@:i:CONCURRENCY}"; else run_alone "${!i}"; fi
		UNDER_WAY=()
		log "$(status)"
	done
}
# What failed in an earlier batch comes last, as what fails in this one does.
again=() open=()
for row in "${ROWS[@]}"; do
	case $row in
	*$'\topen\t'*) open+=("$row") ;;
	*$'\tfailed\t'*) again+=("$row") ;;
	esac
done
run_rows "${open[@]}"
again+=("${failed[@]}")
if ((${#again[@]})); then
	log "${#again[@]} trial(s) failed for infrastructure reasons: once more"
	failed=() in_a_row=0
	for row in "${again[@]}"; do set_aside "$(name_of "$row")"; done
	run_rows "${again[@]}"
fi
read_rows
next "\`$PY align_trial.py $TRAJ_DIR/*/ --calib $CALIB_RESULTS --out $RESULTS_DIR/trials.csv\`"
((MEASURED == ${#ROWS[@]})) || exit 3
