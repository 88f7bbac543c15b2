#!/usr/bin/env bash
# Loaded-idle baseline, then every task x policy x repetition through 04_run_trial.sh. Needs a running server (02_serve_vllm.sh).
# The plan is written first (DATA_DIR/traj/plan.csv) and the order interleaves repetitions. Resumable: what is finished is kept, so after any
# interruption the same command goes on. Infrastructure failures are not the agent's: they are run once more at the end, and the batch stops
# after MAX_INFRA_FAILURES in a row.
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
read_rows() { # the plan's rows of this shard, each with `measured` or `open`
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
# One baseline a start, so that a shift of the idle power since the calibration shows.
mkdir -p "$DATA_DIR/batch" logs
baseline=$DATA_DIR/batch/idle_loaded.$(date -u +%Y%m%dT%H%M%S).csv
measuring_lock
log "loaded-idle power: ${BATCH_IDLE_S} s of quiet"
sampler_args
supervise --log logs/sampler-batch.log -- "${SAMPLER[@]}" -o "$baseline" --duration "$BATCH_IDLE_S" || die "the sampler failed: $(tail -n 1 logs/sampler-batch.log)"
"$PY" stages/idle_check.py --idle "$baseline" --calib "$CALIB_RESULTS" >&2
measuring_unlock

begin=$SECONDS ran=0 in_a_row=0
failed=()
run_rows() { # rows of the plan, one by one; what failed for infrastructure reasons goes to `failed`
	local i task policy rep mode _ recording name rc
	for ((i = 1; i <= $#; i++)); do
		IFS=$'\t' read -r task policy rep mode _ recording <<<"${!i}"
		name=$(name_of "${!i}")
		if [[ -e $TRAJ_DIR/$name/trial.json ]]; then
			log "$i/$# $name: finished already"
			continue
		fi
		local eta=
		((ran == 0)) || eta=", about $(((SECONDS - begin) * ($# - i + 1) / ran / 60 + 1)) min left"
		log "$i/$# $name ($mode$eta)"
		rc=0
		MODE=$mode stage 04_run_trial.sh "$task" "$policy" "$rep" ${recording:+"$recording"} || rc=$?
		ran=$((ran + 1))
		case $rc in
		0) in_a_row=0 ;;
		130 | 143) die "interrupted at $name; the same command goes on from there" "$rc" ;;
		2) die "$name cannot be run (see above); the same command goes on once that is mended" 2 ;;
		*)
			failed+=("${!i}")
			in_a_row=$((in_a_row + 1))
			((in_a_row < MAX_INFRA_FAILURES)) || die "$in_a_row trials in a row failed for infrastructure reasons (MAX_INFRA_FAILURES), the last: $name; see $TRAJ_DIR/$name/logs"
			;;
		esac
	done
}
run_rows "${ROWS[@]}"
if ((${#failed[@]})); then
	log "${#failed[@]} trial(s) failed for infrastructure reasons: once more"
	again=("${failed[@]}")
	failed=() in_a_row=0 ran=0 begin=$SECONDS
	for row in "${again[@]}"; do set_aside "$(name_of "$row")"; done
	run_rows "${again[@]}"
fi
read_rows
log "$MEASURED of ${#ROWS[@]} trajectories are measured$([[ ${#failed[@]} -eq 0 ]] || echo ", ${#failed[@]} of them not scored (infrastructure)")"
log "next: $PY align_trial.py $TRAJ_DIR/*/ --calib $CALIB_RESULTS --out $RESULTS_DIR/trials.csv"
((MEASURED == ${#ROWS[@]} && ${#failed[@]} == 0)) || exit 3
