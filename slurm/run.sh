#!/usr/bin/env bash
# Runs a batch on a Slurm cluster: an array job with one shard a node (slurm/shard.sh: calibration, trials, alignment), then a job that collects
# the nodes' tables and evaluates (slurm/collect.sh). The nodes share this folder; each has a calibration of its own.
#
#   bash slurm/run.sh tasks/final.txt "summarize-off summarize-8k" 3 --nodes 4
#   PROFILE=h200 bash slurm/run.sh tasks/final.txt summarize-off 1 --nodes 2 -- --partition gpu --gres gpu:1 --time 12:00:00
#
# What follows `--` goes to sbatch. Run `bash 01_setup.sh` once before. A rerun goes on: what is measured stays. Prints the two job numbers;
# RESULTS_DIR/status.html shows how the batch stands, RESULTS_DIR/eval/report.html what came out.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=common.sh
source common.sh
NODES=1
positional=()
while (($#)); do
	case $1 in
	--nodes)
		[[ $# -ge 2 && $2 != -* ]] || die "--nodes: expected a whole number behind it, such as 4" 2
		NODES=$2
		shift
		;;
	--)
		shift
		break
		;;
	-*) die "unknown option '$1' (see --help)" 2 ;;
	*) positional+=("$1") ;;
	esac
	shift
done
[[ ${#positional[@]} -eq 3 ]] || die "expected LIST \"POLICIES\" REPETITIONS, got ${#positional[@]} argument(s) (see --help)" 2
need_repetitions "${positional[2]}"
[[ $NODES =~ ^[1-9][0-9]{0,4}$ ]] || die "--nodes '$NODES': expected a whole number from 1 to 99999" 2
command -v sbatch >/dev/null || die "sbatch is not here: run this where Slurm's commands are"
need_venv
need_list "${positional[0]}"
folders logs "$DATA_DIR"
# The plan first: a mistake in the list shows here, not on the nodes.
"$PY" stages/plan.py --plan "$TRAJ_DIR/plan.csv" --list "${positional[0]}" --policies "${positional[1]}" --reps "${positional[2]}" --mode "$MODE" --seed "$BATCH_SEED" \
	--tasks-dir "$TASKS_DIR" --recordings "$RECORDINGS_DIR" --context "$MAX_MODEL_LEN" || exit 2

export TRAJOULE_ENVIRONMENT=$ENVIRONMENT # Slurm sets ENVIRONMENT itself
# --exclusive: two shards on one node would be in each other's counters
array=$(sbatch --parsable --job-name trajoule --array "1-$NODES" --exclusive --output "logs/slurm-%A_%a.log" "$@" slurm/shard.sh "${positional[@]}")
collect=$(sbatch --parsable --job-name trajoule-collect --dependency "afterany:$array" --output "logs/slurm-%j.log" "$@" slurm/collect.sh)
log "array job $array ($NODES shard(s)), then job $collect; logs: logs/slurm-$array*_*.log"
echo "$array $collect"
