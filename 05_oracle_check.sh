#!/usr/bin/env bash
# Runs the reference solution of every task of a list, ORACLE_JOBS at a time, to find the tasks whose environment works on this machine. Needs no
# model server. Resumable: a task with a row in oracle_times.csv is not run again (RETRY=1: those that failed are; FORCE=1: all).
#
#   bash 05_oracle_check.sh tasks/local.txt
#   echo terminal-bench@2.0 >tasks/tb2.txt && bash 05_oracle_check.sh tasks/tb2.txt     # a whole data set; stages/datasets.py --help: what a line may be
#   ORACLE_JOBS=8 bash 05_oracle_check.sh tasks/tb2.txt
#   FORCE=1 ENVIRONMENT=local_env bash 05_oracle_check.sh tasks/local.txt
#
# Leaves oracle_ok.txt and oracle_times.csv (seconds of pull, build, start, solution and verifier; why a task does not work) in ORACLE_DIR and
# Harbor's folders in DATA_DIR/oracle/. Exit code 1 when no task works.
source "$(dirname "$0")/common.sh"
[[ $# -eq 1 ]] || die "expected one task list, got $# argument(s) (see --help)" 2
setting ORACLE_JOBS '[1-9][0-9]*' 'a whole number from 1 on'
need_venv
[[ -r $1 ]] || die "task list '$1' is missing; local tasks: tasks/local.txt" 2
TIMES=$ORACLE_DIR/oracle_times.csv OK=$ORACLE_DIR/oracle_ok.txt
measuring_lock # the solutions would be in another stage's counters
[[ -z ${FORCE:-} ]] || rm -f "$TIMES" "$OK"
export OPENAI_API_KEY=unused
code=0
supervise -- "$PY" stages/oracle.py --list "$1" --tasks-dir "$TASKS_DIR" --registry "$TASK_REGISTRY" --jobs "$ORACLE_JOBS" --environment "$(environment_kind)" \
	--folder "$DATA_DIR/oracle" --times "$TIMES" --ok "$OK" --deadline "$TRIAL_DEADLINE_S" ${RETRY:+--retry} >&2 || code=$?
((code != 130 && code != 143)) || die "interrupted; the same command goes on" "$code"
((code == 0)) || die "the check failed (exit $code)" "$code"
works=$(grep -cv '^#' "$OK" || true)
log "$works task(s) work here: $OK (times and reasons: $TIMES)"
((works > 0)) || die "no task works here: see the reasons in $TIMES and Harbor's logs under $DATA_DIR/oracle"
log "next: bash 06_run_batch.sh LIST \"summarize-off summarize-8k\" REPETITIONS"
