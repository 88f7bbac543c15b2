# Qwen3-Coder-30B-A3B-Instruct-FP8 over two NVIDIA L4 (24 GB each): settings that such a server ran with (AMD EPYC 7313P, Ubuntu 24.04,
# vLLM 0.30.0); no data of it come with the repository.
# shellcheck shell=bash

: "${SERVER_KIND=vllm}"
: "${MODEL=Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8}"
: "${TENSOR_PARALLEL=2}"                     # 30 GB of weights do not fit one card
: "${MAX_MODEL_LEN=32768}"                   # what two L4 hold beside the weights
: "${VLLM_ARGS=--disable-custom-all-reduce}" # its kernels need peer-to-peer access, which these cards do not offer across PCIe

# Read by NCCL and vLLM. `.venv-vllm/bin/python dist_test.py` shows whether a machine needs the first.
export NCCL_P2P_DISABLE=${NCCL_P2P_DISABLE:-1}                       # transfers between the cards hang with peer-to-peer on
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} # PyTorch's sampler: FlashInfer compiles kernels at run time
