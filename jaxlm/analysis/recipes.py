"""Training steps of Transformers models: inputs and loss for each objective, labels for each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxlm.data.labelled import Arrays
from jaxlm.errors import UserError
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.systems import system_of
from jaxlm.tasks.answers import Answers
from jaxlm.tasks.base import Task
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.tagging import Tagging

IGNORE = -100  # label of positions that Transformers' losses leave out
TEXT_INPUTS = ("input_ids", "token_type_ids", "attention_mask")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Pretraining step of an objective with Transformers.

    Attributes:
        inputs: Convert a corrupted batch of ours to the models' input arrays: (objective, example) -> arrays. They are
            made once, so the peer's step has no corruption.
        loss: Compute the scalar loss: (objective, models, inputs as tensors) -> tensor.
        share: Tie the parameters of new models exactly as ours are tied: (objective, models) -> None. None leaves
            them as Transformers ties them.
    """

    inputs: Callable[[Any, dict[str, np.ndarray]], dict[str, np.ndarray]]
    loss: Callable[[Any, list[Any], dict[str, Any]], Any]
    share: Callable[[Any, list[Any]], None] | None = None


def masked_labels(example: dict[str, np.ndarray]) -> np.ndarray:
    """Return labels [batch, length], IGNORE except at the predicted positions."""
    labels = np.full(example["input_ids"].shape, IGNORE, np.int64)
    rows, slots = np.nonzero(example["masked_weights"])
    labels[rows, example["masked_positions"][rows, slots]] = example["masked_labels"][rows, slots]
    return labels


def own_loss(_: Any, models: list[Any], inputs: dict[str, Any]) -> Any:
    """Return the loss that the Transformers class computes itself."""
    return models[0](**inputs).loss


def masked_inputs(objective: MaskedLM, example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs of a masked model, with the label of the pair task if there is one."""
    inputs = {name: example[name] for name in objective.model.template.inputs}
    inputs["labels"] = masked_labels(example)
    if objective.pair_task:
        name = f"{objective.pair_task.name}_label"
        inputs[name] = example[name + "s"]
    return inputs


def causal_inputs(_: CausalLM, example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs of a decoder; the class shifts the labels itself."""
    return {"input_ids": example["input_ids"], "labels": example["input_ids"]}


def t5_inputs(_: SpanCorruption, example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs of an encoder-decoder; the class shifts the labels itself."""
    labels = np.where(example["weights"] > 0, example["labels"], IGNORE)
    return {"input_ids": example["input_ids"], "attention_mask": example["attention_mask"], "labels": labels}


def t5_share(objective: SpanCorruption, models: list[Any]) -> None:
    """Untie the head of T5 1.1: Transformers ties the head of every T5 that is created from a configuration."""
    import torch

    if not objective.model.tied_head:
        weight = models[0].shared.weight.detach() * objective.model.hidden_size**-0.5  # scale of a new head
        models[0].lm_head.weight = torch.nn.Parameter(weight)


def xlnet_inputs(objective: PermutationLM, example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs of XLNet; rows that read backward follow the others, as `bi_data` expects."""
    order, length = np.argsort(example["is_backward"], kind="stable"), example["input_ids"].shape[1]
    example = {name: array[order] for name, array in example.items()}
    return {
        "input_ids": example["input_ids"], "token_type_ids": example["token_type_ids"],
        "perm_mask": example["rank"][:, None, :] >= example["limit"][:, :, None],
        "target_mapping": np.eye(length)[example["positions"]] * example["weights"][..., None],
        "labels": np.where(example["weights"] > 0, example["labels"], IGNORE),
    }


def xlnet_share(_: PermutationLM, models: list[Any]) -> None:
    """Make the second half of a batch read backward."""
    models[0].transformer.bi_data = True


def xlnet_loss(objective: PermutationLM, models: list[Any], inputs: dict[str, Any]) -> Any:
    """Return the loss with a zero recurrence memory of our length."""
    masks = {name: inputs[name].float() for name in ("perm_mask", "target_mapping")}
    rows, length = inputs["input_ids"].shape[0], objective.memory_length
    memory = [masks["perm_mask"].new_zeros(length, rows, objective.model.hidden_size)] * objective.model.num_layers
    return models[0](**inputs | masks, mems=memory if length else None).loss


def electra_share(objective: ReplacedTokens, models: list[Any]) -> None:
    """Tie the generator's embeddings and output projection to the discriminator's embeddings."""
    discriminator, generator = models
    if objective.model.share_embeddings:
        generator.electra.embeddings = discriminator.electra.embeddings
        generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight


def electra_inputs(_: ReplacedTokens, example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the generator's inputs and labels, and the uncorrupted ids."""
    return {name: example[name] for name in (*TEXT_INPUTS, "original_ids")} | {"labels": masked_labels(example)}


def electra_loss(objective: ReplacedTokens, models: list[Any], inputs: dict[str, Any]) -> Any:
    """Return the weighted sum of the generator's loss and the discriminator's on tokens sampled from the generator."""
    import torch

    discriminator, generator = models
    context = {name: inputs[name] for name in ("token_type_ids", "attention_mask") if name in inputs}
    guess = generator(input_ids=inputs["input_ids"], labels=inputs["labels"], **context)
    with torch.no_grad():
        masked = inputs["labels"] != IGNORE
        logits = guess.logits[masked].float() / objective.temperature
        drawn = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
        ids = inputs["original_ids"].masked_scatter(masked, drawn)
        replaced = (ids != inputs["original_ids"]).long()
    if objective.judge == "masked":
        logits = discriminator(input_ids=ids, **context).logits[masked]
        judged = torch.nn.functional.binary_cross_entropy_with_logits(logits, replaced[masked].float())
    else:
        judged = discriminator(input_ids=ids, labels=replaced, **context).loss
    return objective.generator_weight * guess.loss + objective.discriminator_weight * judged


RECIPES = {
    "masked_lm": Recipe(masked_inputs, own_loss),
    "causal_lm": Recipe(causal_inputs, own_loss),
    "span_corruption": Recipe(t5_inputs, own_loss, t5_share),
    "replaced_tokens": Recipe(electra_inputs, electra_loss, electra_share),
    "permutation_lm": Recipe(xlnet_inputs, xlnet_loss, xlnet_share),
}
"""Recipes by `System.peer` (see jaxlm.systems)."""


def recipe_of(objective: Any) -> Recipe:
    """Return the recipe of an objective and its model."""
    system = system_of(objective)
    if system is None or not system.peer:
        raise UserError(f"{type(objective).__name__} has no counterpart in Transformers; leave --peer out.")
    if objective.predicts_next:
        raise UserError("no class of Transformers predicts a mask at the position before it; leave --peer out.")
    return system.peer if isinstance(system.peer, Recipe) else RECIPES[system.peer]


def task_inputs(task: Task, example: Arrays) -> dict[str, Any]:
    """Return a labelled row as the Trainer's model takes it."""
    inputs = {name: example[name].tolist() for name in TEXT_INPUTS}
    if isinstance(task, Answers):
        return inputs | {"start_positions": int(example["start"]), "end_positions": int(example["end"])}
    if isinstance(task, Tagging):
        return inputs | {"labels": np.where(example["labels"] < 0, IGNORE, example["labels"]).tolist()}
    if isinstance(task, Classification) and not task.both_orders and not task.lm_coefficient:
        return inputs | {"labels": example["label"].item()}
    raise UserError(f"there is no recipe to fine-tune {task.name} with the Trainer; leave --peer out.")
