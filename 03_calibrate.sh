#!/usr/bin/env bash
# Calibrates the energy of a model call: idle power with the model loaded, the microbenchmark under the sampler (the agent's own transport,
# through the proxy), append cells that validate the model, then calibrate.py.
# Needs a running server (02_serve_vllm.sh) and, for the bare-idle power, DATA_DIR/calib/idle_bare.csv, taken before the server was started:
#
#   bash 03_calibrate.sh --idle-bare     # no server running: the bare-idle baseline, IDLE_S seconds
#   bash 03_calibrate.sh                 # everything else
#   bash 03_calibrate.sh --idle-loaded   # the loaded idle again and the fit, as after a baseline that was refused
#   FORCE=1 bash 03_calibrate.sh         # anew, all but the bare idle; the old calibration moves to calib.<time>
#   FORCE=1 bash 03_calibrate.sh --idle-bare   # the bare idle again
#
# Run again after an interruption it keeps what is whole: an idle baseline, a grid of calls, the append cells. What was under way starts over.
# A grid of another model or server version is measured again, and so is the loaded idle of another start of the server.
# CALIB_COMPARE_REPS=3 measures the grid over the other transport too (streamed token ids, when the agent's chat is the first) and writes
# what differs per cell to transports.csv.
#
# Leaves DATA_DIR/calib/ (idle_bare, idle_loaded, samples, calls, append_calls) and RESULTS_DIR/calib/ (params.json, calls_energy.csv, figures).
source "$(dirname "$0")/common.sh"
[[ $# -eq 0 || $* == --idle-bare || $* == --idle-loaded ]] || die "unknown arguments '$*' (see --help)" 2
OTHER_TRANSPORT=completions
[[ $CALIB_TRANSPORT == chat ]] || OTHER_TRANSPORT=chat
((CALIB_COMPARE_REPS == 0)) || [[ $SERVER_KIND != openai ]] ||
	die "setting CALIB_COMPARE_REPS='$CALIB_COMPARE_REPS': a server of kind openai has no token ids to compare chat with; set it to 0" 2
need_venv
folders "$CALIB_DATA" logs

idle_baseline() { # NAME WHAT
	log "$2 power: $IDLE_S s of quiet"
	# Under a temporary name, so that an interrupted baseline is never taken for a whole one.
	quiet "$CALIB_DATA/$1.partial.csv" "$IDLE_S" "logs/$CALIB_NAME.$1.log"
	local suffix
	for suffix in state.csv meta.json csv; do
		[[ ! -e $CALIB_DATA/$1.partial.$suffix ]] || mv "$CALIB_DATA/$1.partial.$suffix" "$CALIB_DATA/$1.$suffix"
	done
}

fit() { # calibrate.py on what is there, and what to do about an idle baseline that it refuses
	local args=() part state
	[[ ! -e $CALIB_DATA/idle_bare.csv ]] || args+=(--idle-bare "$CALIB_DATA/idle_bare.csv")
	for part in append compare; do
		! cmp -s "$CALIB_DATA/${part}_samples.done" "$CALIB_DATA/samples.done" || args+=("--$part" "$CALIB_DATA/${part}_calls.jsonl" "--$part-samples" "$CALIB_DATA/${part}_samples.csv")
	done
	TRAJOULE_CALLER=$STAGE supervise -- "$PY" calibrate.py --samples "$CALIB_DATA/samples.csv" --calls "$CALIB_DATA/calls.jsonl" --idle-loaded "$CALIB_DATA/idle_loaded.csv" "${args[@]}" \
		--out-dir "$CALIB_RESULTS" || exit $?
	for state in $("$PY" -c 'import json, sys
checks = json.load(open(sys.argv[1]))["checks"]
print(*sorted({c["state"] for c in checks if (c["code"], c["severity"]) == ("idle", "refused")}))' "$CALIB_RESULTS/params.json"); do
		case $state in
		bare) warn "the bare-idle power was refused (see above): stop the server and take it again with \`FORCE=1 ${GIVEN}bash 03_calibrate.sh --idle-bare\`" ;;
		loaded) warn "the loaded-idle power was refused (see above), the quiet between calls stands in: take it again with \`${GIVEN}bash 03_calibrate.sh --idle-loaded\`" ;;
		esac
	done
}

if [[ $* == --idle-bare ]]; then
	if [[ -e $CALIB_DATA/idle_bare.csv && -z ${FORCE:-} ]]; then
		log "bare-idle power: $CALIB_DATA/idle_bare.csv is there already (\`FORCE=1 ${GIVEN}bash 03_calibrate.sh --idle-bare\` takes it again)"
	else
		measuring_lock
		port_free "$PORT" || die "something listens on port $PORT: the bare-idle power is measured without a server; stop it first"
		idle_baseline idle_bare "bare-idle"
		[[ ! -e $CALIB_RESULTS/params.json || ! -e $CALIB_DATA/samples.done ]] || fit
	fi
	next "\`${GIVEN}bash 02_serve_vllm.sh\` in a terminal of its own, then \`${GIVEN}bash 03_calibrate.sh\`"
	exit 0
fi

if [[ -e $CALIB_RESULTS/params.json && -z ${FORCE:-} && $# -eq 0 ]]; then
	log "calibrated already: $CALIB_RESULTS/params.json (\`FORCE=1 ${GIVEN}bash 03_calibrate.sh\` measures anew and keeps the old one aside)"
	exit 0
fi
measuring_lock
need_server
if [[ -n ${FORCE:-} && $# -eq 0 ]]; then
	stamp=$(date -u +%Y%m%dT%H%M%S)
	[[ ! -e $CALIB_RESULTS ]] || mv "$CALIB_RESULTS" "$CALIB_RESULTS.$stamp"
	mv "$CALIB_DATA" "$CALIB_DATA.$stamp"
	mkdir "$CALIB_DATA"
	for old in "$CALIB_DATA.$stamp"/idle_bare.*; do [[ ! -e $old ]] || cp "$old" "$CALIB_DATA"; done
fi
[[ -e $CALIB_DATA/idle_bare.csv ]] ||
	warn "no bare-idle baseline ($CALIB_DATA/idle_bare.csv): params.json will have none; take it with \`${GIVEN}bash 03_calibrate.sh --idle-bare\` while no server runs"

# What is measured belongs to a model on a server of one version, the loaded idle to one start of it, too (a server that was not started here
# does not tell, and counts as another one).
server="$SERVER_KIND $(adapter model) $(adapter version || true)"
start=$({ tr -d ' \n' <"$RUN_DIR/server-$PORT.json" | grep -oE '"(pid|start)":[0-9]+' | tr '\n' ' '; } 2>/dev/null) || start="unknown $(date +%s)"
is_of() { # NOTE SERVER
	[[ -e $1 && $(<"$1") == "$2" ]]
}
[[ ! -e $CALIB_RESULTS/params.json || ! -e $CALIB_DATA/samples.done ]] || is_of "$CALIB_DATA/samples.done" "$server" ||
	die "$CALIB_RESULTS is of another model or server ($(<"$CALIB_DATA/samples.done")) than the one that runs ($server): \`FORCE=1 ${GIVEN}bash 03_calibrate.sh\` measures anew and keeps the old one aside" 2

cached=$(adapter probe)
[[ $cached != "not reported" ]] || warn "the server does not report cached tokens: the cost of a cache hit cannot be fitted (vLLM: --enable-prompt-tokens-details)"
adapter reset || warn "the prefix cache cannot be cleared; misses rely on fresh random prompts"
if [[ $* == --idle-loaded ]] || ! is_of "$CALIB_DATA/idle_loaded.server" "$server $start"; then
	[[ ! -e $CALIB_DATA/idle_loaded.server || $* == --idle-loaded ]] || log "loaded-idle power: that of an earlier start of the server is taken again"
	rm -f "$CALIB_DATA/idle_loaded.server"
	idle_baseline idle_loaded "loaded-idle"
	echo "$server $start" >"$CALIB_DATA/idle_loaded.server"
else
	log "loaded-idle power: kept, $CALIB_DATA/idle_loaded.csv is of this start of the server"
fi

measure() { # NAME CALLS_JSONL [ARGS of the microbenchmark]
	local name=$1 calls=$CALIB_DATA/$2
	shift 2
	if is_of "$CALIB_DATA/$name.done" "$server"; then
		log "$calls: kept, it is whole"
		return
	fi
	# Samples and calls belong together, and the samples of an interrupted run ended with it.
	[[ ! -e $calls || -e $CALIB_DATA/$name.done ]] || log "$calls: it was interrupted and starts over"
	[[ ! -e $CALIB_DATA/$name.done ]] || log "$calls: it is of another model or server ($(<"$CALIB_DATA/$name.done")) and is measured again"
	rm -f "${CALIB_DATA:?}/$name".* "$calls"*
	bench "$CALIB_DATA/$name.csv" "$calls" "logs/$CALIB_NAME.$name" --cool-down-s "$CALIB_COOL_DOWN_S" "$@" || die "the microbenchmark failed (exit $?)"
	echo "$server" >"$CALIB_DATA/$name.done"
}
measure samples calls.jsonl --contexts "$CALIB_CONTEXTS" --outputs "$CALIB_OUTPUTS" --reps "$CALIB_REPS"
[[ -z $APPEND_CACHED ]] ||
	measure append_samples append_calls.jsonl --append --append-cached "$APPEND_CACHED" --append-uncached "$APPEND_UNCACHED" --outputs "$APPEND_OUTPUTS" --reps 1
((CALIB_COMPARE_REPS == 0)) ||
	measure compare_samples compare_calls.jsonl --transport "$OTHER_TRANSPORT" --contexts "$CALIB_CONTEXTS" --outputs "$CALIB_OUTPUTS" --reps "$CALIB_COMPARE_REPS"
fit
next "\`${GIVEN}bash 05_oracle_check.sh tasks/local.txt\`, then \`${GIVEN}bash 06_run_batch.sh $ORACLE_DIR/oracle_ok.txt summarize-off 3\`"
