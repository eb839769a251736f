"""Tokens a second of greedy generation on this machine, beside Transformers' `generate` of the same model if asked."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlm.analysis.bench import ROUNDS, Report
from jaxlm.analysis.plan import described, published_vocabulary
from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError
from jaxlm.inference.generate import Settings, continuations
from jaxlm.objectives.base import Generator
from jaxlm.tokenizers.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class GenerationBench:
    """Seconds of each round in which `batch_size` prompts of `prompt` tokens get `new_tokens` each."""

    objective: str
    device: str
    dtype: str
    batch_size: int
    prompt: int
    new_tokens: int
    vocabulary: str
    seconds: list[float]
    peer: str | None = None
    peer_seconds: list[float] = dataclasses.field(default_factory=list)

    def tokens_per_second(self, seconds: list[float]) -> float:
        return self.batch_size * self.new_tokens / statistics.median(seconds)

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's tokens a second: the median over rounds, each of which timed both."""
        pairs = zip(self.peer_seconds, self.seconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs) if self.peer else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "tokens_per_second": self.tokens_per_second(self.seconds),
            "peer_tokens_per_second": self.tokens_per_second(self.peer_seconds) if self.peer else None,
            "ratio": self.ratio,
        }

    def report(self) -> str:
        """The result as text for a terminal."""
        lines = [
            f"{self.objective}, greedy, {self.batch_size} prompts of {self.prompt} tokens, {self.new_tokens} new ones "
            f"each, {self.vocabulary}; {self.dtype}, {self.device}; medians of {len(self.seconds)} rounds", "",
            f"{'':<36}{'new tokens/s':>14}{'seconds':>10}",
        ]
        for name, seconds in (("jaxlm", self.seconds), (self.peer, self.peer_seconds)):
            if name:
                lines.append(f"{name:<36}{self.tokens_per_second(seconds):>14,.1f}{statistics.median(seconds):>10,.2f}")
        return "\n".join(lines + ([f"ratio{self.ratio:>45.2f}"] if self.peer else []))


def bench_generate(
    experiment: Experiment, new_tokens: int, peer: str | None = None, report: Report = print,
    vocabulary: Vocabulary | None = None,
) -> GenerationBench:
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
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, timed in zip(sides, seconds, strict=True):
            timed.append(side())
    return GenerationBench(
        objective=type(objective).__name__, device=jax.devices()[0].device_kind, dtype=objective.model.dtype,
        batch_size=rows, prompt=prompt, new_tokens=new_tokens, vocabulary=described(experiment.objective, vocabulary),
        seconds=seconds[0], peer=name, peer_seconds=seconds[1] if peer else [],
    )


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
