# The profile h200 with random weights: architecture, time and energy of Qwen3-Coder-30B-A3B-Instruct-FP8 without its 30 GB download. Text is
# noise, so trajectories replay recordings (behaviour is the recording's, energy and time are measured).
# shellcheck shell=bash

: "${MODEL=models/qwen3-30b-a3b-fp8-random}" # made by 01_setup.sh
: "${SERVED_MODEL=qwen3-30b-a3b-fp8-random}"
: "${LOAD_FORMAT=random}"
: "${MODE=replay}"
# shellcheck source=profiles/h200.sh
source "$ROOT/profiles/h200.sh"
