"""Export a small Hugging Face llama to ExecuTorch: one .pte with a KV cache of its own.

    python export_llama.py --model ../../models/smollm2-hf --out smollm2.pte --max-context 2048

The method `forward(tokens (1, n), position (1,))` appends n tokens at `position` to the cache and returns the logits of the last one, float32
(1, vocabulary). Needs executorch, torch and safetensors; 01_setup.sh with PROFILE=cpu-vllm makes the folder models/smollm2-hf, and so does
`servers/gguf2hf.py --out models/smollm2-hf`.
"""

import argparse
import os
import sys
from pathlib import Path

LONGEST = 256  # tokens of one call


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, type=Path, help="folder with config.json and model.safetensors")
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--max-context", type=int, default=2048, help="tokens; the cache has room for so many")
    p.add_argument("--backend", choices=["xnnpack", "portable"], default="xnnpack", help="portable lowers faster and runs slower")
    a = p.parse_args()
    try:
        import torch
        from executorch.exir import to_edge_transform_and_lower
        from llama import load
    except ModuleNotFoundError as e:
        sys.exit(f"export_llama: {e.name} is missing: pip install executorch torch safetensors")
    partitioner = []
    if a.backend == "xnnpack":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioner.append(XnnpackPartitioner())
    try:
        model = load(a.model, a.max_context)
    except (OSError, ValueError) as e:
        print(f"export_llama: {e}", file=sys.stderr)
        sys.exit(2)
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
