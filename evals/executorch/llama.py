"""The model that export_llama.py exports: a llama whose KV cache is part of it."""

import json
import math
from pathlib import Path

import torch
from torch import nn


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
    """The model of a Hugging Face folder, in float32. Raises OSError, and ValueError where it is of another architecture."""
    from safetensors.torch import load_file

    c = json.loads((Path(folder) / "config.json").read_text())
    if c.get("model_type") != "llama" or c.get("rope_scaling"):
        raise ValueError(f"{folder}: model_type {c.get('model_type')!r}, expected a llama without rope scaling")
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
