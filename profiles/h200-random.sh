# The profile h200 with random weights: architecture, time and energy of Qwen3-Coder-30B-A3B-Instruct-FP8 without its 30 GB download. Text is
# noise, so trajectories replay recordings (behaviour is the recording's, energy and time are measured).
# shellcheck shell=bash

: "${MODEL=models/qwen3-30b-a3b-fp8-random}" # made by 01_setup.sh
: "${SERVED_MODEL=qwen3-30b-a3b-fp8-random}"
: "${LOAD_FORMAT=random}"
: "${MODE=replay}"
# Noise does not survive decoding and encoding, so the server may write only whole words, which do; that costs nothing that 12 pairs could show
# (+0.06 +- 0.19 % of the decode time, bench/h200_pairs_words.csv). The other way, REPLAY_MODE=force, cost 45 % on an H200 with vLLM 0.26
# (bench/h200_pairs_force.csv).
: "${REPLAY_WORDS=1}"
# shellcheck source=profiles/h200.sh
source "$ROOT/profiles/h200.sh"
