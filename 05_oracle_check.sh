#!/usr/bin/env bash
# Runs the reference solution of every task of a list, ORACLE_JOBS at a time, to find the tasks whose environment works on this machine. Needs no
# model server. Resumable: a task with a row in oracle_times.csv is not run again (RETRY=1: those that failed are; FORCE=1: all).
#
#   bash 05_oracle_check.sh tasks/local.txt
#   echo terminal-bench@2.0 >tasks/tb2.txt && bash 05_oracle_check.sh tasks/tb2.txt     # a whole data set; stages/datasets.py --help: what a line may be
#   ORACLE_JOBS=8 bash 05_oracle_check.sh tasks/tb2.txt
#   FORCE=1 ENVIRONMENT=local_env bash 05_oracle_check.sh tasks/local.txt
#
# Leaves oracle_ok.txt (the tasks of the list that work, in this environment) and oracle_times.csv (seconds of pull, build, start, solution and
# verifier; why a task does not work) in ORACLE_DIR and Harbor's folders in DATA_DIR/oracle/. Exit code 1 when no task of the list works.
source "$(dirname "$0")/common.sh"
[[ $# -eq 1 ]] || die "expected one task list, got $# argument(s) (see --help)" 2
need_venv
need_list "$1"
folders "$ORACLE_DIR" "$DATA_DIR/oracle"
TIMES=$ORACLE_DIR/oracle_times.csv OK=$ORACLE_DIR/oracle_ok.txt
[[ ! $1 -ef $OK ]] || die "task list '$1' is what this stage writes: give it the list that it was made from" 2
measuring_lock # the solutions would be in another stage's counters
[[ -z ${FORCE:-} ]] || rm -f "$TIMES" "$OK"
clean_containers() { remove_containers "$DATA_DIR"/oracle/*; }
clean_containers # of a check that was ended by kill -9
export OPENAI_API_KEY=unused
code=0
supervise -- "$PY" stages/oracle.py --list "$1" --tasks-dir "$TASKS_DIR" --registry "$TASK_REGISTRY" --jobs "$ORACLE_JOBS" --environment "$(environment_kind)" \
	--folder "$DATA_DIR/oracle" --times "$TIMES" --ok "$OK" --deadline "$TRIAL_DEADLINE_S" ${RETRY:+--retry} >&2 || code=$?
((code != 130 && code != 143)) || interrupted "$code"
((code != 2)) || exit 2 # what is wrong was said
((code == 0)) || die "the check failed (exit $code)" "$code"
works=$(grep -cv '^#' "$OK") || true
log "$works task(s) work here: $OK (times and reasons: $TIMES)"
((works > 0)) || die "no task works here: see the reasons in $TIMES and Harbor's logs under $DATA_DIR/oracle"
next "\`${GIVEN}bash 06_run_batch.sh $OK summarize-off 3\`"
