#!/usr/bin/env bash
# Puts the tables of all nodes together and evaluates them (slurm/run.sh submits it after the shards).
# Needs RESULTS_DIR/trials.<node>.csv; leaves RESULTS_DIR/trials.csv and RESULTS_DIR/eval/.
#
#   bash slurm/collect.sh
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}" || exit 1
export ENVIRONMENT=${TRAJOULE_ENVIRONMENT:-auto} # Slurm has a variable of this name and sets it to BATCH
# shellcheck source=common.sh
source common.sh
[[ $# -eq 0 ]] || die "unknown argument '$1' (see --help)" 2
need_venv
tables=("$RESULTS_DIR"/trials.*.csv)
[[ -e ${tables[0]} ]] || die "no table $RESULTS_DIR/trials.<node>.csv: no shard has aligned anything yet (logs/slurm-*.log say why)"
"$PY" slurm/nodes.py merge "${tables[@]}" --out "$RESULTS_DIR/trials.csv" || exit $?
"$PY" evaluate.py --trials "$RESULTS_DIR/trials.csv" --plan "$TRAJ_DIR/plan.csv" --out "$RESULTS_DIR/eval" || exit $?
