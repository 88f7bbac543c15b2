"""Export a small Hugging Face llama to ExecuTorch: one .pte with a KV cache of its own.

    python export_llama.py --model ../../models/smollm2-hf --out smollm2.pte --max-context 2048

The method `forward(tokens (1, n), position (1,))` appends n tokens at `position` to the cache and returns the logits of the last one, float32
(1, vocabulary). Needs executorch, torch and safetensors; 01_setup.sh with PROFILE=cpu-vllm makes the folder models/smollm2-hf, and so does
`servers/gguf2hf.py --out models/smollm2-hf`.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
from torch import nn

LONGEST = 256  # tokens of one call


class Layer(nn.Module):
    def __init__(self, c, length):
        super().__init__()
        self.heads, self.groups = c["num_attention_heads"], c["num_key_value_heads"]
        self.width = c.get("head_dim") or c["hidden_size"] // self.heads
        size, inner, self.eps = c["hidden_size"], c["intermediate_size"], c["rms_norm_eps"]
        for name, (i, o) in {
            "q_proj": (size, self.heads * self.width),
            "k_proj": (size, self.groups * self.width),
            "v_proj": (size, self.groups * self.width),
            "o_proj": (self.heads * self.width, size),
            "gate_proj": (size, inner),
            "up_proj": (size, inner),
            "down_proj": (inner, size),
        }.items():
            setattr(self, name, nn.Linear(i, o, bias=False))
        self.before, self.after = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.groups, length, self.width), persistent=False)

    def forward(self, x, where, cos, sin, mask):
        h = norm(x, self.before, self.eps)
        n = h.shape[1]
        q = turn(self.q_proj(h).view(1, n, self.heads, self.width).transpose(1, 2), cos, sin)
        k = turn(self.k_proj(h).view(1, n, self.groups, self.width).transpose(1, 2), cos, sin)
        v = self.v_proj(h).view(1, n, self.groups, self.width).transpose(1, 2)
        self.keys.index_copy_(2, where, k)
        self.values.index_copy_(2, where, v)
        keys = self.keys.repeat_interleave(self.heads // self.groups, dim=1)
        values = self.values.repeat_interleave(self.heads // self.groups, dim=1)
        weights = torch.softmax(torch.matmul(q, keys.transpose(2, 3)) / math.sqrt(self.width) + mask, dim=-1)
        x = x + self.o_proj(torch.matmul(weights, values).transpose(1, 2).reshape(1, n, self.heads * self.width))
        h = norm(x, self.after, self.eps)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


def norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x, cos, sin):
    """Rotary position: Hugging Face's halves, not Meta's pairs."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Llama(nn.Module):
    def __init__(self, c, length):
        super().__init__()
        width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        angles = torch.outer(torch.arange(length).float(), 1.0 / c["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("order", torch.arange(length), persistent=False)
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, length) for _ in range(c["num_hidden_layers"]))
        self.last, self.eps = nn.Parameter(torch.ones(c["hidden_size"])), c["rms_norm_eps"]
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, tokens, position):
        where = position + torch.arange(tokens.shape[1])
        cos, sin = self.cos[where], self.sin[where]
        mask = torch.where(self.order[None, :] <= where[:, None], 0.0, -1e9)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, where, cos, sin, mask)
        return self.head(norm(x[:, -1], self.last, self.eps))


def load(folder, length):
    """The model of a Hugging Face folder, in float32."""
    from safetensors.torch import load_file

    c = json.loads((Path(folder) / "config.json").read_text())
    if c.get("model_type") != "llama" or c.get("rope_scaling"):
        sys.exit(f"export_llama: {folder}: model_type {c.get('model_type')!r}, expected a llama without rope scaling")
    names = {"embed_tokens.weight": "embed.weight", "norm.weight": "last", "lm_head.weight": "head.weight"}
    weights = {}
    for key, value in load_file(Path(folder) / "model.safetensors").items():
        key = key.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
        key = key.replace("input_layernorm.weight", "before").replace("post_attention_layernorm.weight", "after")
        weights[names.get(key, key)] = value.float()
    weights.setdefault("head.weight", weights["embed.weight"])
    model = Llama(c, length)
    model.load_state_dict(weights)
    return model.eval()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, type=Path, help="folder with config.json and model.safetensors")
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--max-context", type=int, default=2048, help="tokens; the cache has room for so many")
    p.add_argument("--backend", choices=["xnnpack", "portable"], default="xnnpack", help="portable lowers faster and runs slower")
    a = p.parse_args()
    from executorch.exir import to_edge_transform_and_lower

    partitioner = []
    if a.backend == "xnnpack":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioner.append(XnnpackPartitioner())
    model = load(a.model, a.max_context)
    n = torch.export.Dim("n", min=1, max=LONGEST)
    with torch.no_grad():
        example = (torch.ones(1, 8, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        program = torch.export.export(model, example, dynamic_shapes=({1: n}, None), strict=False)
        lowered = to_edge_transform_and_lower(program, partitioner=partitioner).to_executorch()
    tmp = a.out.with_name(f".{a.out.name}.tmp")
    with open(tmp, "wb") as f:
        lowered.write_to_file(f)
    os.replace(tmp, a.out)
    print(f"{a.out}: {a.out.stat().st_size / 1e6:.0f} MB, context {a.max_context}")


if __name__ == "__main__":
    main()
