#!/usr/bin/env bash
# Calibrates the energy of a model call: idle power with the model loaded, the microbenchmark under the sampler (the agent's own transport,
# through the proxy), append cells that validate the model, then calibrate.py.
# Needs a running server (02_serve_vllm.sh) and, for the bare-idle power, DATA_DIR/calib/idle_bare.csv, taken before the server was started:
#
#   bash 03_calibrate.sh --idle-bare     # no server running: the bare-idle baseline, IDLE_S seconds
#   bash 03_calibrate.sh                 # everything else; interrupted, it goes on from there
#   FORCE=1 bash 03_calibrate.sh         # anew; the old calibration moves to calib.<time>
#
# CALIB_COMPARE_REPS=3 measures the grid over the other transport too (streamed token ids, when the agent's chat is the first) and writes
# what differs per cell to transports.csv.
#
# Leaves DATA_DIR/calib/ (idle_bare, idle_loaded, samples, calls, append_calls) and RESULTS_DIR/calib/ (params.json, calls_energy.csv, figures).
source "$(dirname "$0")/common.sh"
[[ $# -eq 0 || $* == --idle-bare ]] || die "unknown arguments '$*' (see --help)" 2
setting CALIB_COMPARE_REPS '[0-9]+' 'a whole number'
OTHER_TRANSPORT=completions
[[ $CALIB_TRANSPORT == chat ]] || OTHER_TRANSPORT=chat
((CALIB_COMPARE_REPS == 0)) || [[ $SERVER_KIND != openai ]] ||
	die "setting CALIB_COMPARE_REPS='$CALIB_COMPARE_REPS': a server of kind openai has no token ids to compare chat with; set it to 0" 2
need_venv
mkdir -p "$CALIB_DATA" logs

idle_baseline() { # NAME WHAT
	if [[ -e $CALIB_DATA/$1.csv && -z ${FORCE:-} ]]; then
		log "$2 power: $CALIB_DATA/$1.csv is there already"
		return
	fi
	log "$2 power: $IDLE_S s of quiet"
	sampler_args
	# Under a temporary name, so that an interrupted baseline is never taken for a whole one.
	supervise --log "logs/sampler-$1.log" -- "${SAMPLER[@]}" -o "$CALIB_DATA/$1.partial.csv" --duration "$IDLE_S" ||
		die "the sampler failed: $(tail -n 1 "logs/sampler-$1.log")"
	local suffix
	for suffix in state.csv meta.json csv; do
		[[ ! -e $CALIB_DATA/$1.partial.$suffix ]] || mv "$CALIB_DATA/$1.partial.$suffix" "$CALIB_DATA/$1.$suffix"
	done
}

if [[ $* == --idle-bare ]]; then
	measuring_lock
	port_free "$PORT" || die "something listens on port $PORT: the bare-idle power is measured without a server; stop it first"
	idle_baseline idle_bare "bare-idle"
	log "next: bash 02_serve_vllm.sh in a terminal of its own, then bash 03_calibrate.sh"
	exit 0
fi

if [[ -e $CALIB_RESULTS/params.json && -z ${FORCE:-} ]]; then
	log "calibrated already: $CALIB_RESULTS/params.json (FORCE=1 measures anew and keeps the old one aside)"
	exit 0
fi
measuring_lock
adapter wait --timeout 10 || die "no model server at $SERVER_URL: start it with \`bash 02_serve_vllm.sh\`"
if [[ -n ${FORCE:-} ]]; then
	stamp=$(date -u +%Y%m%dT%H%M%S)
	[[ ! -e $CALIB_RESULTS ]] || mv "$CALIB_RESULTS" "$CALIB_RESULTS.$stamp"
	[[ ! -e $CALIB_DATA ]] || { mv "$CALIB_DATA" "$CALIB_DATA.$stamp" && mkdir -p "$CALIB_DATA"; }
	for old in "$CALIB_DATA.$stamp"/idle_bare.*; do [[ ! -e $old ]] || cp "$old" "$CALIB_DATA"; done
	unset FORCE
fi
[[ -e $CALIB_DATA/idle_bare.csv ]] || warn "no bare-idle baseline ($CALIB_DATA/idle_bare.csv): params.json will have none; take it with \`bash 03_calibrate.sh --idle-bare\` while no server runs"

cached=$(adapter probe)
[[ $cached != "not reported" ]] || warn "the server does not report cached tokens: the cost of a cache hit cannot be fitted (vLLM: --enable-prompt-tokens-details)"
adapter reset || warn "the prefix cache cannot be cleared; misses rely on fresh random prompts"
idle_baseline idle_loaded "loaded-idle"

bench() { # NAME CALLS_JSONL [ARGS]: the microbenchmark under the sampler
	local name=$1 calls=$2 rc=0
	shift 2
	if [[ -e $CALIB_DATA/$name.done ]]; then
		log "$calls: measured already"
		return
	fi
	# A sampler run per start: an interrupted grid is measured again from its first call, since its samples ended with it.
	rm -f "${CALIB_DATA:?}/$name".* "${CALIB_DATA:?}/$calls"*
	start_proxy "$CALIB_DATA/$name.proxy.jsonl" "logs/proxy-calib.log"
	start_sampler "$CALIB_DATA/$name.csv" "logs/sampler-$name.log"
	supervise -- "$PY" microbench.py --base-url "$SERVER_URL" --proxy-url "$PROXY_URL" --server-kind "$SERVER_KIND" --out "$CALIB_DATA/$calls" \
		--transport "$CALIB_TRANSPORT" --quiet-s "$CALIB_QUIET_S" --cool-down-s "$CALIB_COOL_DOWN_S" "$@" || rc=$?
	stop "$SAMPLER_PID" || warn "the sampler ended badly (exit $?): see logs/sampler-$name.log"
	stop "$PROXY_PID" || true
	((rc == 0)) || die "the microbenchmark failed (exit $rc)"
	touch "$CALIB_DATA/$name.done"
}
bench samples calls.jsonl --contexts "$CALIB_CONTEXTS" --outputs "$CALIB_OUTPUTS" --reps "$CALIB_REPS"
append=()
if [[ -n $APPEND_CACHED ]]; then
	bench append_samples append_calls.jsonl --append --append-cached "$APPEND_CACHED" --append-uncached "$APPEND_UNCACHED" --outputs "$APPEND_OUTPUTS" --reps 1
	append=(--append "$CALIB_DATA/append_calls.jsonl" --append-samples "$CALIB_DATA/append_samples.csv")
fi
compare=()
if ((CALIB_COMPARE_REPS > 0)); then
	bench compare_samples compare_calls.jsonl --transport "$OTHER_TRANSPORT" --contexts "$CALIB_CONTEXTS" --outputs "$CALIB_OUTPUTS" --reps "$CALIB_COMPARE_REPS"
	compare=(--compare "$CALIB_DATA/compare_calls.jsonl" --compare-samples "$CALIB_DATA/compare_samples.csv")
fi

bare=()
[[ ! -e $CALIB_DATA/idle_bare.csv ]] || bare=(--idle-bare "$CALIB_DATA/idle_bare.csv")
"$PY" calibrate.py --samples "$CALIB_DATA/samples.csv" --calls "$CALIB_DATA/calls.jsonl" --idle-loaded "$CALIB_DATA/idle_loaded.csv" "${bare[@]}" "${append[@]}" \
	"${compare[@]}" --out-dir "$CALIB_RESULTS"
log "next: bash 05_oracle_check.sh LIST, then bash 06_run_batch.sh LIST \"POLICIES\" REPETITIONS"
