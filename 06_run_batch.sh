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
		SHARD=${2:-}
		shift
		;;
	-*) die "unknown option '$1' (see --help)" 2 ;;
	*) positional+=("$1") ;;
	esac
	shift
done
[[ ${#positional[@]} -eq 3 ]] || die "expected LIST \"POLICIES\" REPETITIONS, got ${#positional[@]} argument(s) (see --help)" 2
LIST=${positional[0]} POLICIES=${positional[1]} REPS=${positional[2]}
[[ -r $LIST ]] || die "task list '$LIST' is missing" 2
[[ $REPS =~ ^[1-9][0-9]*$ ]] || die "REPETITIONS='$REPS': expected a whole number from 1 on" 2
((CONCURRENCY >= 1)) || die "setting CONCURRENCY='$CONCURRENCY': expected a whole number from 1 on" 2
[[ $SERVER_KIND != llamacpp ]] || ((CONCURRENCY <= SERVER_SLOTS)) ||
	die "setting CONCURRENCY='$CONCURRENCY': the server has SERVER_SLOTS=$SERVER_SLOTS slots and would make calls wait; restart it with more" 2
need_venv

PLAN=$TRAJ_DIR/plan.csv
plan_args=(--list "$LIST" --policies "$POLICIES" --reps "$REPS" --mode "$MODE" --seed "$BATCH_SEED" --recordings "$RECORDINGS_DIR" --shard "$SHARD" --show)
if [[ -n $DRY ]]; then
	scratch=$(mktemp -d)
	[[ ! -e $PLAN ]] || cp "$PLAN" "$scratch"
	"$PY" stages/plan.py --plan "$scratch/plan.csv" "${plan_args[@]}"
	rm -rf "$scratch"
	exit 0
fi
read_rows() { # the plan's rows of this shard, each with `open`, `measured` or `failed` (for infrastructure reasons)
	local rows
	rows=$("$PY" stages/plan.py --plan "$PLAN" "${plan_args[@]}") || exit 2
	mapfile -t ROWS <<<"$rows"
	MEASURED=$(grep -c $'\tmeasured\t' <<<"$rows") || true
}
name_of() { # ROW of the plan: its trajectory
	local task policy rep
	IFS=$'\t' read -r task policy rep _ <<<"$1"
	echo "$(basename "$task")__${policy}__r$rep"
}
read_rows
if ((MEASURED == ${#ROWS[@]})); then
	log "all ${#ROWS[@]} trajectories are measured already"
	exit 0
fi

adapter wait --timeout 10 || die "no model server at $SERVER_URL: start it with \`bash 02_serve_vllm.sh\`"
BATCH_DIR=$DATA_DIR/batch${CALIB_NAME#calib} # nodes that share a checkout have a calibration, and so a folder, of their own
mkdir -p "$BATCH_DIR" logs
export ERROR_FILE=$BATCH_DIR/last_error

idle_power() { # CSV SECONDS [ARGS of idle_check]: the idle power now against the calibration; 4 when it is another
	local csv=$1 code=0
	sampler_args
	measuring_lock
	supervise --log "$BATCH_DIR/sampler.log" -- "${SAMPLER[@]}" -o "$csv" --duration "$2" || die "the sampler failed: $(tail -n 1 "$BATCH_DIR/sampler.log")"
	measuring_unlock
	"$PY" stages/idle_check.py --idle "$csv" --calib "$CALIB_RESULTS" "${@:3}" >&2 || code=$?
	return "$code"
}
# One baseline a start, so that a shift of the idle power since the calibration shows.
log "loaded-idle power: ${BATCH_IDLE_S} s of quiet"
idle_power "$BATCH_DIR/idle_loaded.$(date -u +%Y%m%dT%H%M%S).csv" "$BATCH_IDLE_S" || true

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
	start_proxy "$folder/proxy.jsonl" "$folder/proxy.log"
	start_sampler "$folder/samples.csv" "$folder/sampler.log"
	supervise --log "$folder/microbench.log" -- "$PY" microbench.py --base-url "$SERVER_URL" --proxy-url "$PROXY_URL" --server-kind "$SERVER_KIND" --out "$folder/calls.jsonl" \
		--transport "$CALIB_TRANSPORT" --quiet-s "$CALIB_QUIET_S" --contexts "${cell% *}" --outputs "${cell#* }" --reps 1 --reference none || rc=$?
	sleep 0.3
	stop "$SAMPLER_PID" || true
	stop "$PROXY_PID" || true
	measuring_unlock
	if ((rc != 0)); then
		warn "the drift check failed (exit $rc): $(tail -n 1 "$folder/microbench.log")"
	else
		"$PY" stages/drift.py check --calib "$CALIB_RESULTS" --calls "$folder/calls.jsonl" --samples "$folder/samples.csv" --tolerance "$DRIFT_TOLERANCE" \
			--log "$BATCH_DIR/drift.csv" >&2 || true
	fi
}

status() { "$PY" stages/status.py --traj "$TRAJ_DIR" --waste "$DATA_DIR/waste.csv" --out "$RESULTS_DIR/status.html" --title "$PROFILE: $LIST" || true; }
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
	local name
	name=$(name_of "$1")
	ran=$((ran + 1))
	case $2 in
	0) in_a_row=0 ;;
	130 | 143) die "interrupted at $name; the same command goes on from there" "$2" ;;
	2) die "$name cannot be run (see above); the same command goes on once that is mended" 2 ;;
	*)
		failed+=("$1")
		in_a_row=$((in_a_row + 1))
		log "$name failed for infrastructure reasons: $(reason_of "$name" "$2")"
		((in_a_row < MAX_INFRA_FAILURES)) ||
			die "$in_a_row trials in a row failed for infrastructure reasons (MAX_INFRA_FAILURES), the last, $name: $(reason_of "$name" "$2"); logs: $TRAJ_DIR/$name/logs"
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
	export GROUP_DIR GROUP_MEMBERS=""
	GROUP_DIR=$DATA_DIR/traj_groups/$(date -u +%Y%m%dT%H%M%S).$(hostname)
	for row in "$@"; do GROUP_MEMBERS+="$(name_of "$row") "; done
	mkdir -p "$GROUP_DIR"
	measuring_lock
	cold_cache "a group of $#"
	start_sampler "$GROUP_DIR/samples.csv" "$GROUP_DIR/sampler.log"
	for row in "$@"; do
		IFS=$'\t' read -r task policy rep mode _ recording <<<"$row"
		MODE=$mode PROXY_PORT=$((PROXY_PORT + i)) ERROR_FILE=$ERROR_FILE.$i spawn pid -- bash 04_run_trial.sh "$task" "$policy" "$rep" ${recording:+"$recording"}
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
	unset GROUP_DIR GROUP_MEMBERS
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
		names=$(for row in "${@:i:CONCURRENCY}"; do name_of "$row"; done)
		((DRIFT_EVERY == 0 || (ran > 0 && ran / DRIFT_EVERY == before / DRIFT_EVERY))) || drift_check
		before=$ran
		check_machine "${names//$'\n'/ }"
		log "$i/$# ${names//$'\n'/ }"
		rm -f "$ERROR_FILE"*
		if ((CONCURRENCY > 1 && i < $#)); then run_group "${@:i:CONCURRENCY}"; else run_alone "${!i}"; fi
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
log "next: $PY align_trial.py $TRAJ_DIR/*/ --calib $CALIB_RESULTS --out $RESULTS_DIR/trials.csv"
((MEASURED == ${#ROWS[@]})) || exit 3
