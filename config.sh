# Settings of every stage. The environment wins over the profile, the profile over the values here:
#   PROFILE=h200 MAX_MODEL_LEN=16384 bash 02_serve_vllm.sh
# Sourced by common.sh; it computes nothing. `bash 00_env_check.sh --settings` prints what is in force.
# shellcheck shell=bash disable=SC2034

: "${PROFILE=l4x2-qwen3-coder}" # a file of profiles/ without .sh, or the path of one
if [[ $PROFILE == */* ]]; then PROFILE_FILE=$PROFILE; else PROFILE_FILE=$ROOT/profiles/$PROFILE.sh; fi
if [[ ! -f $PROFILE_FILE || ! -r $PROFILE_FILE ]]; then
	echo "config.sh: PROFILE=$PROFILE: no file $PROFILE_FILE; there are: $(cd "$ROOT/profiles" && printf '%s ' *.sh)" >&2
	exit 2
fi
# shellcheck source=profiles/cpu-smollm2.sh
source "$PROFILE_FILE"

# Where things lie. data/ and results/ themselves hold the measurements that come with the repository; yours go beside them, never over them.
PROFILE_NAME=$(basename "$PROFILE_FILE" .sh)
: "${DATA_DIR=data/$PROFILE_NAME}"       # raw data: calib/, traj/
: "${RESULTS_DIR=results/$PROFILE_NAME}" # derived: calib/, trials.csv, eval/
: "${CALIB_NAME=calib}"                  # folder of the calibration in both; nodes that share a checkout need one each
: "${ORACLE_DIR=$DATA_DIR}"              # oracle_ok.txt, oracle_times.csv

# The server
: "${SERVER_KIND=vllm}"                            # vllm, llamacpp, or openai (a server that you start yourself)
: "${SERVER_VENV=.venv-vllm}"                      # virtual environment that the server runs in: vLLM's pins clash with Harbor's
: "${SERVER_PYTHON=3.12}"                          # Python of an environment of the server's own
: "${SERVER_PACKAGES=vllm-0.30}"                   # section of env_freeze.txt that the server needs; empty: none
: "${MODEL=Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8}" # hub name or folder; a GGUF file for llamacpp (empty: the packaged SmolLM2)
: "${SERVED_MODEL=${MODEL##*/}}"                   # name that clients use
: "${MAX_MODEL_LEN=32768}"                         # context, tokens
: "${TENSOR_PARALLEL=1}"                           # GPUs that share the model
: "${GPU_MEMORY_UTILIZATION=0.90}"                 # fraction of GPU memory for weights and KV cache
: "${LOAD_FORMAT=auto}"                            # vLLM's --load-format; random: values like a checkpoint's, for energy work without weights
: "${VLLM_ARGS=}"                                  # more arguments, split at spaces
: "${SERVER_THREADS=$(nproc)}"                     # llama.cpp: threads for prefill and decode
: "${SERVER_SLOTS=2}"                              # llama.cpp: slots of MAX_MODEL_LEN tokens each (one would lose the chat's prefix at a summary)
: "${SERVER_HOST=127.0.0.1}"                       # address that the server binds; agents that run inside containers need 0.0.0.0
: "${PORT=8000}"                                   # server
: "${PROXY_PORT=8001}"                             # logging proxy
: "${SERVER_READY_S=1200}"                         # s until the server must answer (first start: weights, kernels)

# The sampler
: "${SAMPLER_HZ=10}"                    # rows per second
: "${GPUS=auto}"                        # auto: CUDA_VISIBLE_DEVICES or all; none; or a list such as 0,1
: "${POWERCAP_DIR=/sys/class/powercap}" # RAPL counters
: "${CPU_MODEL_W=}"                     # IDLE:BUSY watts per logical CPU, for machines without RAPL; labelled estimated; empty: none

# Calibration
: "${IDLE_S=300}"                                # s of each idle baseline
: "${CALIB_CONTEXTS=1024,4096,8192,16384,30000}" # prompt lengths, tokens
: "${CALIB_OUTPUTS=64,192,512}"                  # output lengths, tokens
: "${CALIB_REPS=5}"                              # repetitions; each prompt is sent twice: miss, then hit
: "${CALIB_QUIET_S=0.5}"                         # s between calls: at least 3 counter steps
: "${CALIB_COOL_DOWN_S=10}"                      # s of rest after the warm-up and before each reference cell; 0: none
: "${CALIB_TRANSPORT=chat}"                      # chat: as the agent does, through the proxy; completions: token ids, streamed
: "${CALIB_COMPARE_REPS=0}"                      # repetitions of the grid over the other transport, which are compared, not fitted; 0: none
: "${APPEND_CACHED=4096,16384,28672}"            # append cells validate the call model; empty: none
: "${APPEND_UNCACHED=64,256,1024,2048}"
: "${APPEND_OUTPUTS=64,256}"

# Trajectories
: "${MODE=live}"             # live: the served model acts; replay: the proxy answers from tasks/recordings
: "${REPLAY_MODE=putback}"   # how a replay keeps the prefix cache as in a live run: putback (any server), force (vLLM emits the recorded reply)
: "${REPLAY_WORDS=0}"        # 1: with putback, the server writes only words that survive being put back (vLLM; for random weights)
: "${ENVIRONMENT=auto}"      # docker, local_env (Linux namespaces), auto: docker when an engine answers
: "${TASKS_DIR=tasks/local}" # where a bare task name is looked up
: "${TASK_REGISTRY=}"        # where data sets such as terminal-bench@2.0 are looked up: a JSON file or URL; empty: Harbor's registry
: "${RECORDINGS_DIR=tasks/recordings}"
: "${TEMPERATURE=}"           # empty: the model's default
: "${MAX_TURNS=}"             # empty: no limit but the task's time
: "${MAX_OUTPUT_TOKENS=4096}" # per call; a runaway reply ends here
: "${RESPONSE_SCHEMA=}"       # JSON schema file that replies must follow (small models need it)
: "${AGENT_TIMEOUT_S=}"       # empty: the task's own
: "${ORACLE_JOBS=2}"          # reference solutions at a time; they wait more than they compute, but their time limits count
: "${LLM_TIMEOUT_S=3600}"     # s that the agent waits for one call
: "${TRIAL_DEADLINE_S=7200}"  # s for one whole trial, beyond which it is an infrastructure failure; never less than the task's own limits
: "${CONCURRENCY=1}"          # trajectories of a batch at a time; their energy is shared out by the call model
: "${BATCH_SEED=1}"           # order of a batch: repetitions interleaved, shuffled within
: "${BATCH_IDLE_S=60}"        # s of the loaded-idle baseline before a batch
: "${WARM_UP_S=0}"            # s that calls of many sizes may take before a batch, until none waits for kernels to be compiled; 0: none
: "${CHECK_IDLE_S=3}"         # s of quiet before each trial, whose power is compared with the calibration's; 0: not measured
: "${CHECK_WAIT_S=60}"        # s that a trial waits for disk, port, GPUs and idle power to become as they should
: "${DRIFT_EVERY=20}"         # after every so many trials the calibration's reference cell runs again; 0: never
: "${DRIFT_TOLERANCE=0.05}"   # relative shift of its time or energy that is warned of
: "${MAX_INFRA_FAILURES=3}"   # a batch stops after so many in a row
: "${MIN_FREE_MB=2000}"       # a trial does not start with less disk than this
