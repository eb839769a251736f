"""A plain GPT-2 in PyTorch, as people write it today, timed by `jaxlm bench gpt2 --peer plain`.

One product for queries, keys and values, `scaled_dot_product_attention` with `is_causal`, bfloat16 by autocast,
torch.compile, the fused AdamW. It trains on rows without documents, as `--objective.plain-stream True` does.
"""

from __future__ import annotations

from typing import Any

from jaxlm.analysis.peer import make_optimizer, synchronize, torch_device
from jaxlm.analysis.timing import Side
from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError
from jaxlm.models.gpt2 import Gpt2
from jaxlm.types import TokenBatch


def plain_side(experiment: Experiment, batch: TokenBatch) -> Side:
    """Return the side that trains a plain GPT-2 of the preset's sizes on one fixed batch.

    Raises:
        UserError: The preset is no GPT-2 with AdamW, or PyTorch is not available.
    """
    model = experiment.objective.model
    if type(model) is not Gpt2 or experiment.optimizer.name != "adamw" or model.dropout or model.attention_dropout:
        raise UserError("--peer plain is a GPT-2 without dropout, trained by AdamW; take --peer huggingface.")
    device = torch_device()
    import numpy as np
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    net = _net(model).to(device)
    compiled = torch.compile(net)
    optimizer, _ = make_optimizer(experiment.optimizer, list(net.parameters()))
    tokens = torch.from_numpy(np.array(batch.tokens, np.int64)).to(device)

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=model.dtype == "bfloat16"):
                loss = compiled(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), experiment.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)

    def describe() -> dict[str, Any]:
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
        return {"peak_memory_bytes": memory, "note": f"PyTorch {torch.__version__}, torch.compile, fused AdamW"}

    return Side("plain GPT-2", run, describe)


def _net(model: Gpt2) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = model.hidden_size, model.num_heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, model.norm_eps) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
            query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # A vocabulary of a multiple of 64 is what makes the logits' products fast.
            self.words = nn.Embedding(-(-model.vocab_size // 64) * 64, width)
            self.positions = nn.Embedding(model.max_positions, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(model.num_layers)))
            self.norm = nn.LayerNorm(width, model.norm_eps)
            for table in (self.words, self.positions):
                nn.init.normal_(table.weight, std=0.02)

        def forward(self, tokens: Any) -> Any:
            x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            logits = functional.linear(self.norm(self.blocks(x)), self.words.weight)
            # Every position is predicted, the last one as if the row began again; so no array is copied.
            return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())

    return Plain()
