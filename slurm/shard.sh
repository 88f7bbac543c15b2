#!/usr/bin/env bash
# One shard of a batch on one node, as an array job of Slurm (slurm/run.sh submits it): calibration of this node unless it has one, model server,
# drift check, the shard's trials, their alignment. Leaves RESULTS_DIR/trials.<node>.csv.
#
#   sbatch --array 1-4 --exclusive slurm/shard.sh tasks/final.txt "summarize-off summarize-8k" 3
#
# Exit code: 06_run_batch.sh's (0 every trajectory of the shard is measured, 3 some are not).
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}" || exit 1
export ENVIRONMENT=${TRAJOULE_ENVIRONMENT:-auto} # Slurm has a variable of this name and sets it to BATCH
NODE=${SLURMD_NODENAME:-$(hostname -s)}
# The checkout is shared: what concerns this machine alone lies outside of it.
TRAJOULE_RUN_DIR=${TMPDIR:-/tmp}/trajoule-$(id -u)-$NODE
export TRAJOULE_RUN_DIR
export CALIB_NAME=calib.$NODE
FREE_PORTS=1
# shellcheck source=common.sh
source common.sh
NESTED=slurm # which runs a copy of this file: there is no command to repeat
[[ $# -eq 3 ]] || die "expected LIST \"POLICIES\" REPETITIONS, got $# argument(s) (see --help)" 2
log "shard ${SLURM_ARRAY_TASK_ID:-1} of ${SLURM_ARRAY_TASK_COUNT:-1} on $NODE, server port $PORT"

SHARD=${SLURM_ARRAY_TASK_ID:-1}/${SLURM_ARRAY_TASK_COUNT:-1}
part=$(TRAJOULE_CALLER=$STAGE bash 06_run_batch.sh "$@" --shard "$SHARD" --dry-run) || exit $?
if [[ -z $part ]]; then
	log "nothing to do: there are fewer trajectories than shards"
	exit 0
fi
[[ -e $CALIB_RESULTS/params.json || -e $CALIB_DATA/idle_bare.csv ]] || stage 03_calibrate.sh --idle-bare || exit $?
start_server "logs/server.$NODE.log"
stage 03_calibrate.sh || exit $?
code=0
stage 06_run_batch.sh "$@" --shard "$SHARD" || code=$?
stop "$SERVER_PID" || true
mapfile -t folders < <("$PY" slurm/nodes.py folders --traj "$TRAJ_DIR" --calib "$CALIB_RESULTS")
((${#folders[@]} == 0)) ||
	"$PY" align_trial.py "${folders[@]}" --calib "$CALIB_RESULTS" --out "$RESULTS_DIR/trials.$NODE.csv" || exit $?
exit "$code"
