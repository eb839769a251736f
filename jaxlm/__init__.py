"""jaxlm: pretrain language models in JAX, from raw text to a Transformers checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlm.objectives.base import PretrainedModel


def load(path: str, to_answer: bool = False) -> PretrainedModel:
    """Opens a run folder (its newest checkpoint) or a Transformers folder. UserError when it is neither.

    A Transformers folder may lack heads, which are then initialized: a warning names them. to_answer: whether the model
    is to fill masks or to generate, which a missing head makes impossible (UserError).
    """
    import warnings

    from jaxlm.errors import UserError
    from jaxlm.runs.load import load_model
    from jaxlm.trees import within

    loaded = load_model(path)
    needs = loaded.objective.model.output_params if to_answer else ()
    missing = ", ".join(f for f in loaded.fresh if any(within(f, need) or within(need, f) for need in needs))
    if missing:
        raise UserError(f"{path} has no {missing}, so it would answer at random; `jaxlm import` and train it first.")
    if loaded.fresh and not to_answer:
        warnings.warn(f"{path} has no {', '.join(loaded.fresh)}: initialized afresh.", stacklevel=2)
    return loaded
