"""Tokens a second of greedy generation on this machine, beside Transformers' `generate` of the same model if asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlm.analysis.bench import Report
from jaxlm.analysis.plan import described, published_vocabulary
from jaxlm.analysis.rounds import Rounds, in_turns
from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError
from jaxlm.inference.generate import Settings, continuations
from jaxlm.objectives.base import Generator
from jaxlm.tokenizers.vocabulary import Vocabulary


def bench_generate(
    experiment: Experiment, new_tokens: int, peer: str | None = None, report: Report = print,
    vocabulary: Vocabulary | None = None,
) -> Rounds:
    """Times greedy generation with fresh parameters: as many prompts as the batch size, of random tokens, half of the
    sequence length long; none stops. The first run, which compiles, does not count. UserError where the model writes no
    text, or the peer cannot be had."""
    experiment.validate()
    rows, prompt = experiment.train.batch_size, max(1, experiment.data.length // 2)
    vocabulary_of = vocabulary or published_vocabulary(experiment.objective)
    objective = experiment.objective.bind(vocabulary_of, experiment.data.length)
    if not isinstance(objective, Generator):
        raise UserError(f"{type(objective).__name__} trains no model that writes text; leave --generate out.")
    text = np.flatnonzero(~vocabulary_of.special)
    prompts = np.random.default_rng(0).choice(text, (rows, prompt)).tolist()
    params = jax.device_put(jax.jit(objective.init)(jax.random.key(experiment.train.seed)))
    settings = Settings(max_new_tokens=new_tokens, stop_ids=())

    def ours() -> float:
        start = time.perf_counter()
        continuations(objective, params, prompts, settings)
        return time.perf_counter() - start

    name, sides = None, [ours]
    if peer:
        name, theirs = _peer(objective, prompts, new_tokens)
        sides.append(theirs)
    for side in sides:
        report(f"First run: {side():,.1f} s")
    seconds = in_turns(sides)
    named, device = described(experiment.objective, vocabulary), jax.devices()[0].device_kind
    heading = (
        f"{type(objective).__name__}, greedy, {rows} prompts of {prompt} tokens, {new_tokens} new ones each, {named}; "
        f"{objective.model.dtype}, {device}"
    )
    facts = dict(
        objective=type(objective).__name__, device=device, dtype=objective.model.dtype, batch_size=rows, prompt=prompt,
        new_tokens=new_tokens, vocabulary=named,
    )
    return Rounds(heading, "tokens", rows * new_tokens, facts, seconds[0], name, seconds[1] if peer else [])


def _peer(objective: Any, prompts: list[list[int]], new_tokens: int) -> tuple[str, Callable[[], float]]:
    """(the name of the Transformers class of the same sizes, a runner of its `generate`, eager, with its own cache, in
    our compute type)."""
    from jaxlm.analysis.peer import require_torch

    require_torch(objective)
    import torch
    import transformers

    from jaxlm.huggingface.families import family_of

    (counterpart,) = family_of(objective).models(objective)
    facts = dict(counterpart.config)
    config = transformers.AutoConfig.for_model(facts.pop("model_type"), **facts)
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    model = getattr(transformers, counterpart.architecture)(config).eval()
    model = model.to(device, getattr(torch, objective.model.dtype))
    ids = torch.tensor(objective.prepare_prompts(prompts, new_tokens)).to(device)

    def run() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )
        if device == "cuda":
            torch.cuda.synchronize()
        assert out.shape[1] >= new_tokens
        return time.perf_counter() - start

    return f"{counterpart.architecture}.generate", run
