#!/usr/bin/env bash
# Starts the profile's model server in the foreground: vLLM, or llama.cpp in the embedded default. Ctrl-C stops it with everything it started.
# Prefix caching is on, cached tokens are reported in every answer, and the cache can be reset: calibration and trajectories need all three.
# Needs 01_setup.sh. Serves http://127.0.0.1:PORT (8000).
#
#   bash 02_serve_vllm.sh
#   PROFILE=h200 MAX_MODEL_LEN=16384 bash 02_serve_vllm.sh
source "$(dirname "$0")/common.sh"
[[ $# -eq 0 ]] || die "unknown argument '$1' (see --help)" 2
need_venv
need "$SERVER_VENV/bin/python" "bash 01_setup.sh"
SERVER_PY=$ROOT/$SERVER_VENV/bin/python

case $SERVER_KIND in
llamacpp)
	SERVER=("$SERVER_PY" servers/llamacpp.py --host "$SERVER_HOST" --port "$PORT" --alias "$SERVED_MODEL" --ctx "$MAX_MODEL_LEN"
		--parallel "$SERVER_SLOTS" --threads "$SERVER_THREADS" ${MODEL:+--model "$MODEL"})
	;;
vllm)
	export VLLM_SERVER_DEV_MODE=1 # without it there is no cache reset
	read -ra more <<<"$VLLM_ARGS"
	[[ $MODE != replay || $REPLAY_MODE != force ]] || more+=(--logits-processors servers.force_reply:ForceReply)
	if [[ $LOAD_FORMAT == random ]]; then # weights like a real checkpoint's, see servers/vllm_plugins
		export PYTHONPATH=$ROOT/servers/vllm_plugins:$PYTHONPATH
		LOAD_FORMAT=dummy
	fi
	SERVER=("$SERVER_PY" -m vllm.entrypoints.openai.api_server --host "$SERVER_HOST" --port "$PORT" --model "$MODEL" --served-model-name "$SERVED_MODEL"
		--max-model-len "$MAX_MODEL_LEN" --tensor-parallel-size "$TENSOR_PARALLEL" --gpu-memory-utilization "$GPU_MEMORY_UTILIZATION"
		--load-format "$LOAD_FORMAT" --enable-prefix-caching --enable-prompt-tokens-details "${more[@]}")
	[[ ! -e $MODEL ]] || export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
	;;
openai) die "SERVER_KIND=openai means a server that you start yourself: start it on port $PORT, then go on with \`${GIVEN}bash 03_calibrate.sh\`" 2 ;;
esac

port_free "$PORT" || [[ -e $RUN_DIR/server-$PORT.json ]] || die "port $PORT is taken: stop what listens there, or set PORT"
log "starting: ${SERVER[*]}"
exec "$PY" stages/supervise.py --name "server-$PORT" --grace 30 --detachable -- "${SERVER[@]}"
