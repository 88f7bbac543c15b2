#!/usr/bin/env bash
# The whole pipeline on a machine that has nothing: no GPU, no energy counters, no Docker. A real 135M model on llama.cpp, a small calibration,
# local tasks (replayed recordings: authored behaviour, measured energy; and one trial in which the small model acts for itself), alignment,
# evaluation, and a report. About 12 minutes on 2 cores after the downloads (about 700 MB installed). Safe to interrupt: a rerun goes on.
#
#   bash quickstart.sh
#   rm -r data/quickstart results/quickstart     # to measure anew
#
# Needs Linux on x86-64, 2 cores, 8 GB, a network for the packages. Leaves data/quickstart/ and results/quickstart/eval/report.html.
export PROFILE=${PROFILE:-cpu-smollm2}

# Ports that are free, unless they were asked for: this is meant to run anywhere.
for setting in PORT:8000 PROXY_PORT:8100; do
	name=${setting%:*} port=${setting#*:}
	[[ -z ${!name:-} ]] || continue
	while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
	export "$name=$port"
done

source "$(dirname "$0")/common.sh"
[[ $# -eq 0 ]] || die "unknown argument '$1' (see --help)" 2
[[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] || die "needs Linux on x86-64; this is $(uname -sm)" 2

# One quickstart at a time in a checkout.
mkdir -p .cache/run logs
exec {QUICK_FD}>.cache/run/quickstart.lock
flock -n "$QUICK_FD" || die "another quickstart.sh runs in this folder"

step() {
	STEP=$((${STEP:-0} + 1))
	printf '\n[%d/8] %s (%d min %02d s)\n' "$STEP" "$1" $((SECONDS / 60)) $((SECONDS % 60)) >&2
}

step "set-up: Python, packages, model"
bash 01_setup.sh
step "what this machine offers"
bash 00_env_check.sh >&2 || die "something is missing, see above"
step "idle power without a server"
stage 03_calibrate.sh --idle-bare
step "model server, then calibration: what does a model call cost?"
start_server logs/server.log
log "server is up: $SERVER_URL (log: logs/server.log)"
stage 03_calibrate.sh
step "reference solutions: which tasks work here?"
stage 05_oracle_check.sh tasks/quickstart.txt
step "trajectories: replayed recordings, two context policies, two repetitions"
batch=0
stage 06_run_batch.sh tasks/quickstart.txt "summarize-off summarize-2k" 2 || batch=$?
((batch == 0 || batch == 3)) || exit "$batch"
step "one live trajectory: the small model acts for itself, whatever it achieves"
MODE=live AGENT_TIMEOUT_S=${AGENT_TIMEOUT_S:-40} stage 06_run_batch.sh tasks/quickstart_live.txt summarize-off 1 || batch=$?
((batch == 0 || batch == 3)) || exit "$batch"
stop "$SERVER_PID" || true
step "alignment and evaluation: where did the energy go?"
"$PY" align_trial.py "$TRAJ_DIR"/*/ --calib "$CALIB_RESULTS" --out "$RESULTS_DIR/trials.csv" --timeline "$RESULTS_DIR/timelines"
"$PY" evaluate.py --trials "$RESULTS_DIR/trials.csv" --plan "$TRAJ_DIR/plan.csv" --calib "$CALIB_RESULTS" --out "$RESULTS_DIR/eval"
log "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; open $RESULTS_DIR/eval/report.html"
((batch == 0)) || die "some trajectories could not be scored for infrastructure reasons; run quickstart.sh again to retry them" 3
