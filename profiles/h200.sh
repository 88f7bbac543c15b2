# Qwen3-Coder-30B-A3B-Instruct-FP8 on one NVIDIA H200 (141 GB). Few CUDA graphs and no DeepGEMM warm-up: ready in 2 minutes instead of 5;
# kernels are then compiled at their first use, for seconds at a time: microbench.py warms up every shape, and a batch begins with a warm-up.
# shellcheck shell=bash

: "${SERVER_KIND=vllm}"
: "${SERVER_PACKAGES=vllm-0.26}"
: "${MODEL=Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8}"
: "${TENSOR_PARALLEL=1}"
: "${MAX_MODEL_LEN=32768}"
: "${WARM_UP_S=180}"
: "${VLLM_ARGS=--max-num-seqs 4 --cudagraph-capture-sizes 1 2 4}"

export VLLM_DEEP_GEMM_WARMUP=${VLLM_DEEP_GEMM_WARMUP:-skip}
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} # PyTorch's sampler: FlashInfer compiles kernels at run time
