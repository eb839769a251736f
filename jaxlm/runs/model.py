"""A trained model as Python code uses it: vectors, masks, text and scores."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jaxtyping import Float

from jaxlm import hub
from jaxlm.data.labelled import LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.huggingface.sentence_transformers import read
from jaxlm.inference.denoise import denoise_text
from jaxlm.inference.embed import BATCH, embed
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.inference.generate import Settings
from jaxlm.inference.score import Pair, Score, encode_pair, prompt_of, score, score_texts, window
from jaxlm.inference.text import Completion, generate_text
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.runs.load import load_model
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.rerank import Rerank
from jaxlm.trees import within
from jaxlm.types import Pooling, Role, Vectors


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params"],
    meta_fields=["objective", "tokenizer", "fresh", "path", "step", "length", "settings"],
)
@dataclasses.dataclass(frozen=True)
class TrainedModel(PretrainedModel):
    """A `PretrainedModel` with methods that read texts, in padded batches whose padding is masked.

    Rows are split over the mesh that shards the parameters. With several processes, each calls the same methods with
    the same texts, computes its own rows and gets all results.

    Every method raises UserError for a model that cannot do it, and for a single text in place of a list.
    """

    @property
    def vectors(self) -> Vectors:
        """Settings of its text vectors: those of a contrastive run or of sentence-transformers, else mean pooling."""
        if isinstance(self.objective, Rerank):
            raise UserError(f"{self.path} is a reranker and has no vectors of texts; `jaxlm evaluate` it on rows, or "
                            "call score_pairs.")
        found = self.settings.vectors
        if found is None and self.path:
            read(Path(hub.local(self.path)))  # refuses those of a folder that could not be kept
        return found or Vectors("mean", self.vector_length, False)

    def encode(
        self, texts: Sequence[str], pooling: Pooling | None = None, length: int | None = None,
        normalize: bool | None = None, prompt: str | None = None, role: Role = "", progress: bool = False,
        batch_size: int = BATCH,
    ) -> Float[np.ndarray, "texts width"] | list[Float[np.ndarray, "tokens width"]]:
        """Return one float32 vector per text; see `jaxlm.inference.embed.embed`, which has the other arguments.

        None stands for the setting of a contrastive run or a folder of sentence-transformers; other models have mean
        pooling, the length of their training (512 of a stream, at most 512 of a folder), and no prompt. A `prompt`
        stands before each text; a `role` is "query" or "document", for a model that has prompts for them.
        """
        settings = self.vectors
        if role not in get_args(Role):
            raise UserError(f"there is no role {role!r} of a text; give query or document.")
        prompt = settings.prompt_of(role) if prompt is None else prompt
        if prompt is None:
            raise UserError(
                f"{self.path} has the prompts {dict(settings.prompts)}; give the text of one as prompt (--prompt), or "
                "'' for none."
            )
        if prompt and not settings.pools_prompt:
            raise UserError(f"{self.path} pools texts without their prompt, which jaxlm does not support; give '' as "
                            "prompt (--prompt).")
        if pooling and settings.similarity == "maxsim":
            raise UserError(f"{self.path} has a vector per token, which are not pooled; leave out --pooling.")
        return embed(
            self, [prompt + text for text in _checked(texts)], pooling or settings.pooling,
            settings.length if length is None else length, settings.normalize if normalize is None else normalize,
            progress, batch_size, role,
        )

    def fill(self, texts: Sequence[str], top_k: int = 5) -> list[list[list[tuple[str, float]]]]:
        """Return the likeliest (piece, probability) of each [MASK] of each text, best first."""
        self.require_heads()
        return fill_mask(self, _checked(texts), top_k)

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], stop: Sequence[str] | str = (),
        on_text: Callable[[str], None] | None = None, skip_special: bool = False, **settings: Any,
    ) -> list[Completion]:
        """Continue prompts; a masked diffusion model fills their masks.

        Args:
            prompts: Texts, in which special tokens may stand, or token ids.
            stop: Strings, or one, that end a continuation and are left out.
            on_text: Receives the text of a single prompt in pieces while it is generated.
            skip_special: Leave special tokens out of the text.
            settings: Fields of `jaxlm.inference.generate.Settings`, such as max_new_tokens=20, temperature=0.8.
        """
        self.require_heads()
        stop = [stop] if isinstance(stop, str) else stop
        if self.objective.denoises and on_text:
            raise UserError("masked diffusion writes no text in pieces; leave on_text out.")
        if self.objective.denoises:
            return denoise_text(self, _checked(prompts), Settings(**settings), stop)
        if not _has_all(prompts, lambda prompt: isinstance(prompt, tuple | list)):
            texts = [self.tokenizer.encode_with_symbols(prompt) for prompt in _checked(prompts)]
            prompts = [prompt_of(self.objective, ids) for ids in texts]
        return generate_text(self, prompts, Settings(**settings), stop, on_text, skip_special)

    def score(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], stride: int = 0, sentinel: bool = False,
        keep_space: bool = False,
    ) -> list[Score]:
        """Return the log-probability of each token of each text, whose sum is `total`.

        A masked model predicts each token with only that one masked.

        Args:
            texts: Whole texts, or pairs of a context and its continuation, whose tokens alone are scored.
            stride: Tokens by which the window of a causal model moves over a whole text; 0: half of its length.
            sentinel: See `jaxlm.inference.score.encode_pair`, as for `keep_space`.
            keep_space: Of a pair.
        """
        self.require_heads()
        if _has_all(texts, _is_pair):
            return score(self, [encode_pair(self, *pair, sentinel, keep_space) for pair in texts])
        if self.objective.answer_kind == "masks":
            return score(self, [Pair([], self.tokenizer.encode(text)) for text in _checked(texts)])
        return score_texts(self, _checked(texts), stride or max(1, window(self) // 2))

    def score_pairs(self, pairs: Sequence[tuple[str, str]], length: int | None = None) -> Float[np.ndarray, " pairs"]:
        """Return a reranker's score of each query and passage, cut to `length` tokens together (see `encode`)."""
        task = self.objective
        is_number = isinstance(task, Classification) and task.target == "number"  # how Transformers names one logit
        if not isinstance(task, Rerank) and not is_number:
            raise UserError(f"{self.path} is no reranker; train one with `jaxlm finetune rerank`.")
        if not _has_all(pairs, _is_pair):
            raise UserError("give a list of pairs, each a query and a passage.")
        names = ("text", "text_pair") if is_number else ("query", "positive")
        values = [dict(zip(names, pair, strict=True)) | {"label": None, "negatives": []} for pair in pairs]
        source = LabelledSource(self.tokenizer, {"held_out": [Record("", "", each, ()) for each in values]}, True)
        length = length or self.length or task.model.max_length or 512
        answers = task.answers(self.params, source, min(length, task.model.max_length or length), 32)
        return np.array([np.ravel(answer.prediction)[0] for answer in answers], np.float32)

    def require_heads(self) -> None:
        """Raise UserError if the folder lacks parameters that predict tokens."""
        needs = self.objective.model.output_params
        missing = ", ".join(f for f in self.fresh if any(within(f, need) or within(need, f) for need in needs))
        if missing:
            raise UserError(
                f"{self.path} has no {missing}, so it would answer at random; `jaxlm import` and train it first."
            )


def load_trained(path: str | os.PathLike[str], mesh: Mapping[str, int] = {}) -> TrainedModel:
    """Load a model onto a mesh of all devices; see `jaxlm.runs.load.load_model` and `make_inference_mesh`."""
    return TrainedModel(**vars(load_model(path, mesh)))


def _has_all(values: Any, is_right: Callable[[Any], bool]) -> bool:
    """Return whether `values` is a collection of one right value or more; a generator has no length."""
    return isinstance(values, Sized) and len(values) > 0 and all(map(is_right, values))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _checked(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str) or not _has_all(texts, lambda text: isinstance(text, str)):
        raise UserError("give a list of one text or more.")
    return list(texts)
