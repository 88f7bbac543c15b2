#!/usr/bin/env bash
# The whole pipeline on a machine that has nothing: no GPU, no energy counters, no Docker. A real 135M model on llama.cpp, a small calibration,
# local tasks (replayed recordings: authored behaviour, energy measured where there are counters, else estimated; and one trial in which the small
# model acts for itself), alignment, evaluation, and a report. About 10 minutes on 2 cores that have nothing else to do, after the downloads (about 700 MB installed); each step is
# computing, so a machine that is half busy takes twice that. Safe to interrupt: a rerun goes on.
#
#   bash quickstart.sh
#   rm -r data/quickstart results/quickstart     # to measure anew
#
# Needs Linux on x86-64, 2 cores, 8 GB, a network for the packages. Leaves data/quickstart/ and results/quickstart/eval/report.html.
export PROFILE=${PROFILE:-cpu-smollm2}
FREE_PORTS=1
source "$(dirname "$0")/common.sh"
[[ $# -eq 0 ]] || die "unknown argument '$1' (see --help)" 2
[[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] || die "needs Linux on x86-64; this is $(uname -sm)" 2

# One quickstart at a time in a checkout.
folders .cache/run logs
exec {QUICK_FD}>.cache/run/quickstart.lock
flock -w 3 "$QUICK_FD" || die "another quickstart.sh runs in this folder"

USUAL_S=(1 10 12 141 3 453 78 8) # each step on two cores that have nothing else to do
STEP=0 STEP_BEGIN=0 SLOWER=100
step() {
	local took=$((SECONDS - STEP_BEGIN)) left=0 s
	# The calibration always computes the same, so it shows how busy this machine is.
	((STEP != 4 || took <= USUAL_S[3])) || SLOWER=$((100 * took / USUAL_S[3]))
	for s in "${USUAL_S[@]:STEP}"; do left=$((left + s)); done
	STEP=$((STEP + 1)) STEP_BEGIN=$SECONDS
	printf '\n[%d/8] %s (%d min %02d s; about %d min to go)\n' "$STEP" "$1" $((SECONDS / 60)) $((SECONDS % 60)) $(((left * SLOWER / 100 + 59) / 60)) >&2
}

# The set-up makes the Python that stages run on: any other one supervises it, and where there is none, it has a process group that ends with us.
SETUP=
wrap_up() { [[ -z $SETUP ]] || kill -TERM -- "-$SETUP" 2>/dev/null || true; }
set_up() {
	local python code=0
	for python in "$PY" $(type -ap python3 || true); do
		"$python" -c 'import ctypes, sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || continue
		PY=$python stage 01_setup.sh
		return
	done
	TRAJOULE_CALLER=$STAGE setsid bash 01_setup.sh {QUICK_FD}>&- &
	SETUP=$!
	wait "$SETUP" || code=$?
	SETUP=
	return "$code"
}

step "set-up: Python, packages, model"
set_up || exit $? # what goes wrong in a stage it says itself
step "what this machine offers"
stage 00_env_check.sh >&2 || die "something is missing, see above"
step "idle power without a server"
stage 03_calibrate.sh --idle-bare || exit $?
step "model server, then calibration: what does a model call cost?"
start_server logs/server.log
log "server is up: $SERVER_URL (log: logs/server.log)"
stage 03_calibrate.sh || exit $?
step "reference solutions: which tasks work here?"
stage 05_oracle_check.sh tasks/quickstart.txt || exit $?
step "trajectories: replayed recordings, two context policies, two repetitions"
batch=0
stage 06_run_batch.sh tasks/quickstart.txt "summarize-off summarize-2k" 2 || batch=$?
((batch == 0 || batch == 3)) || exit "$batch"
step "one live trajectory: the small model acts for itself, whatever it achieves"
MODE=live AGENT_TIMEOUT_S=${AGENT_TIMEOUT_S:-40} stage 06_run_batch.sh tasks/quickstart_live.txt summarize-off 1 || batch=$?
((batch == 0 || batch == 3)) || exit "$batch"
stop "$SERVER_PID" || true
step "alignment and evaluation: where did the energy go?"
supervise -- "$PY" align_trial.py "$TRAJ_DIR"/*/ --calib "$CALIB_RESULTS" --out "$RESULTS_DIR/trials.csv" --timeline "$RESULTS_DIR/timelines" || exit $?
supervise -- "$PY" evaluate.py --trials "$RESULTS_DIR/trials.csv" --plan "$TRAJ_DIR/plan.csv" --calib "$CALIB_RESULTS" --out "$RESULTS_DIR/eval" || exit $?
log "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; open $RESULTS_DIR/eval/report.html"
((batch == 0)) || die "some trajectories could not be scored for infrastructure reasons; run quickstart.sh again to retry them" 3
