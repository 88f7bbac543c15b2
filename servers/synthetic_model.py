"""Write a model folder with the architecture of Qwen3-Coder-30B-A3B-Instruct-FP8 and no weights, for energy work without a download.

    .venv/bin/python servers/gguf2hf.py --tokenizer-only --out models/tokenizer
    .venv/bin/python servers/synthetic_model.py --tokenizer models/tokenizer --out models/qwen3-30b-a3b-fp8-random

The tokenizer is padded to the architecture's vocabulary, so that every id that the model emits decodes. Serve it with LOAD_FORMAT=random (the
profile h200-random does). Energy and time are those of the architecture; text is noise, so behaviour must be replayed.
Exit codes: 0 written, 2 the tokenizer is missing or too large.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

VOCABULARY = 151936
# config.json of Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8, less what concerns its tokenizer.
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_qk_norm": True,
    "qkv_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}


def padded(tokenizer, size):
    """tokenizer.json with its vocabulary filled up to `size` entries. Raises ValueError when it is larger already."""
    vocabulary = tokenizer["model"]["vocab"]
    top = max(vocabulary.values()) + 1
    if top > size:
        raise ValueError(f"the tokenizer has {top} entries, the architecture {size}")
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": vocabulary | {f"<x{i}>": i for i in range(top, size)}}}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json, tokenizer_config.json, chat_template.jinja")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    try:
        special = json.loads((a.tokenizer / "generation_config.json").read_text())
        tokenizer = padded(json.loads((a.tokenizer / "tokenizer.json").read_text()), VOCABULARY)
        a.out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(a.tokenizer / name, a.out / name)
    except (OSError, ValueError, KeyError) as e:
        print(f"synthetic_model: --tokenizer {a.tokenizer}: {e}", file=sys.stderr)
        sys.exit(2)
    (a.out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    ids = {k: special[k] for k in ("bos_token_id", "eos_token_id") if k in special}
    (a.out / "config.json").write_text(json.dumps({**CONFIG, **ids}, indent=1))
    print(f"synthetic_model: {a.out}")


if __name__ == "__main__":
    main()
