#!/usr/bin/env bash
# Runs the reference solution of every task of a list, to find the tasks whose environment works on this machine. Needs no model server.
# Resumable: a task with a row in oracle_times.csv is not run again (remove the row, or FORCE=1).
#
#   bash 05_oracle_check.sh tasks/local.txt
#   FORCE=1 ENVIRONMENT=local_env bash 05_oracle_check.sh tasks/local.txt
#
# Leaves oracle_ok.txt and oracle_times.csv in ORACLE_DIR and Harbor's folders in DATA_DIR/oracle/. Exit code 1 when no task works.
source "$(dirname "$0")/common.sh"
[[ $# -eq 1 ]] || die "expected one task list, got $# argument(s) (see --help)" 2
need_venv
[[ -r $1 ]] || die "task list '$1' is missing; local tasks: tasks/local.txt" 2
mapfile -t TASKS < <("$PY" -c 'import sys; from stages.plan import read_list; print("\n".join(read_list(sys.argv[1])))' "$1")
((${#TASKS[@]})) || die "no task in $1" 2
TIMES=$ORACLE_DIR/oracle_times.csv OK=$ORACLE_DIR/oracle_ok.txt KIND=$(environment_kind)
[[ -z ${FORCE:-} ]] || rm -f "$TIMES" "$OK"
export OPENAI_API_KEY=unused

done_before() { [[ -e $TIMES ]] && cut -d, -f1 "$TIMES" | grep -qxF "$1"; }
begin=$SECONDS ran=0
for i in "${!TASKS[@]}"; do
	task=${TASKS[i]} name=$(basename "${TASKS[i]}") job=$DATA_DIR/oracle/$(basename "${TASKS[i]}") code=0
	done_before "$name" && continue
	eta=
	((ran == 0)) || eta=", about $(((SECONDS - begin) * (${#TASKS[@]} - i) / ran)) s left"
	log "$((i + 1))/${#TASKS[@]} $name ($KIND$eta)"
	rm -rf "$job"
	mkdir -p "$job"
	target=(-p "$task")
	if [[ -e $TASKS_DIR/$task/task.toml ]]; then
		target=(-p "$TASKS_DIR/$task")
	elif [[ $task == *@*/* ]]; then
		target=(-d "${task%/*}" -i "$name")
	fi
	environment=(-e docker)
	[[ $KIND == docker ]] || environment=(-e local_env:LocalEnvironment)
	t0=$EPOCHREALTIME
	supervise --log "$job/harbor.log" --deadline "$TRIAL_DEADLINE_S" -- .venv/bin/harbor run "${target[@]}" -a oracle "${environment[@]}" \
		-o "$job" --job-name harbor -n 1 -q -y || code=$?
	((code != 130 && code != 143)) || die "interrupted; a rerun goes on with $name"
	"$PY" stages/oracle.py --task "$name" --job "$job/harbor" --exit "$code" --wall "$("$PY" -c "print($EPOCHREALTIME - $t0)")" \
		--environment "$KIND" --times "$TIMES" --ok "$OK" >&2
	ran=$((ran + 1))
done
works=$(grep -cv '^#' "$OK" || true)
log "$works task(s) work here: $OK (times and reasons: $TIMES)"
((works > 0)) || die "no task works here: see the reasons in $TIMES and Harbor's logs under $DATA_DIR/oracle"
log "next: bash 06_run_batch.sh LIST \"summarize-off summarize-8k\" REPETITIONS"
