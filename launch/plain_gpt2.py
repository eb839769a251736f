#!/usr/bin/env python3
"""Times a plain GPT-2 in PyTorch, as people write it today, beside `jaxlm bench gpt2 --objective.plain-stream True`.

    python launch/plain_gpt2.py [--rows 32] [--length 1024] [--layers 12] [--width 768] [--vocabulary 50304]

One product for queries, keys and values, `scaled_dot_product_attention` with `is_causal`, the loss inside the compiled
module, bfloat16 by autocast, the fused AdamW. Needs PyTorch alone; prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

ROUNDS, STEPS = 5, 10


class Block(nn.Module):
    """Pre-norm layer with heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 with a tied head; returns the loss."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)
        for table in (self.words, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = functional.linear(self.norm(self.blocks(x)), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("rows", 32), ("length", 1024), ("layers", 12), ("width", 768), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Gpt2(sizes.vocabulary, sizes.length, sizes.layers, sizes.width).to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, labels = torch.randint(0, sizes.vocabulary, (2, sizes.rows, sizes.length), device=device)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(tokens, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    first = run(1)
    run(3)
    seconds = statistics.median(run(STEPS) for _ in range(ROUNDS))
    print(json.dumps({
        "step_seconds": seconds, "tokens_per_second": sizes.rows * sizes.length / seconds,
        "compile_and_first_step_seconds": first, "torch": torch.__version__,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }))


if __name__ == "__main__":
    main()
