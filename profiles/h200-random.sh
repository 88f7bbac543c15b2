# The profile h200 with random weights: architecture, time and energy of Qwen3-Coder-30B-A3B-Instruct-FP8 without its 30 GB download. Text is
# noise, so trajectories replay recordings (behaviour is the recording's, energy and time are measured).
# shellcheck shell=bash

: "${MODEL=models/qwen3-30b-a3b-fp8-random}" # made by 01_setup.sh
: "${SERVED_MODEL=qwen3-30b-a3b-fp8-random}"
: "${LOAD_FORMAT=random}"
: "${MODE=replay}"
# Noise does not survive decoding and encoding, so it cannot be put back. Forcing cost 45 % of the decode time on an H200 with vLLM 0.26
# (bench/h200_pairs_force.csv): decode times and energies of such replays are too high by about that much, calibrations are not affected.
: "${REPLAY_MODE=force}"
# shellcheck source=profiles/h200.sh
source "$ROOT/profiles/h200.sh"
