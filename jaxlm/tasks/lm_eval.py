"""Our models under the Language Model Evaluation Harness (package lm-eval, extra [eval]), with no export.

    from lm_eval import simple_evaluate
    from jaxlm.tasks.lm_eval import JaxLM

    simple_evaluate(model=JaxLM("runs/gpt2"), tasks=["lambada_openai"])

or with lm_eval's own options: python -m jaxlm.tasks.lm_eval --model jaxlm --model_args path=runs/gpt2 --tasks …
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    from jaxlm.errors import UserError

    raise UserError("lm-eval is not installed; in the clone, run `pip install -e '.[eval]'`.") from error

import jaxlm
from jaxlm.errors import UserError
from jaxlm.inference.generate import Settings, max_length
from jaxlm.inference.score import Pair, encode_pair, score, text_begin, windows
from jaxlm.inference.text import cut, fit_prompts, write

MAX_NEW_TOKENS = 256
"""Where a task names no number of new tokens, as in lm_eval's own classes."""


@register_model("jaxlm")
class JaxLM(LM):
    """A run or a Transformers folder as lm_eval asks models. Causal and encoder-decoder models; what an encoder-decoder
    is asked, it is asked plainly, with no sentinel. The arguments after the path are lm_eval's own, which it always
    gives; nothing depends on them. UserError for other models."""

    def __init__(
        self, path: str | os.PathLike[str], batch_size: Any = None, max_batch_size: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.loaded = jaxlm.load(os.fspath(path), to_answer=True)
        if self.loaded.objective.answer_kind != "text":
            raise UserError(f"{path} is of {type(self.loaded.objective).__name__}; lm_eval asks causal and "
                            "encoder-decoder models.")
        self.tokenizer = self.loaded.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """What lm_eval's cache of requests tells tokenizers apart by."""
        return self.tokenizer.fingerprint

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding would write it) of each (context, continuation)."""
        found = self._scores([self._pair(*request.args) for request in requests])
        return [(each.total, bool(each.is_likeliest.all())) for each in found]

    def _pair(self, context: str, continuation: str) -> Pair:
        if not self.loaded.objective.model.has_encoder:
            return encode_pair(self.loaded.objective, self.tokenizer, context, continuation)
        # As lm_eval has it, a space at the beginning of a text is one.
        text = context.rstrip()
        return Pair(self.tokenizer.encode(text), self.tokenizer.encode(context[len(text) :] + continuation))

    def _scores(self, pairs: Sequence[Pair]) -> list[Any]:
        return score(self.loaded.objective, self.loaded.params, pairs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that do not overlap."""
        if self.loaded.objective.model.has_encoder:
            raise UserError("texts on their own have a likelihood under causal models only.")
        begin, length = text_begin(self.tokenizer), max_length(self.loaded.objective)
        pairs = [list(windows(self.tokenizer.encode(r.args[0]), begin, length, length)) for r in requests]
        found = iter(self._scores([pair for parts in pairs for pair in parts]))
        return [sum(next(found).total for _ in parts) for parts in pairs]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the texts in `until`, for requests of (context, options). UserError for options other
        than until, max_gen_toks, do_sample, temperature, top_k, top_p and num_beams."""
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items(), key=str))].append(number)
        answers = [""] * len(requests)
        for numbers in groups.values():
            options = dict(requests[numbers[0]].args[1])
            until = options.pop("until", None) or []
            settings = _settings(options)
            prompts = [self.tokenizer.encode(requests[i].args[0]) for i in numbers]
            # lm_eval leaves a place for the last new token, too, which is never read.
            objective, params, tokenizer, _ = self.loaded
            prompts = fit_prompts(objective, self.tokenizer, prompts, settings.max_new_tokens + 1)
            stop = [until] if isinstance(until, str) else [text for text in until if text]
            found = write(objective, params, tokenizer, prompts, settings, stop, skip_special=True)
            for i, answer in zip(numbers, found, strict=True):
                answers[i], _ = cut(self.tokenizer.decode(answer.ids), stop)  # alone, so with no leading space
        return answers


def _settings(options: dict[str, Any]) -> Settings:
    """Settings from the options of a task, as lm_eval names them."""
    draws = options.pop("do_sample", None)
    temperature = options.pop("temperature", 1.0 if draws else 0.0)
    names = {"max_gen_toks": "max_new_tokens", "num_beams": "beams", "top_k": "top_k", "top_p": "top_p"}
    if unknown := options.keys() - names.keys():
        raise UserError(f"a task asks for {sorted(unknown)[0]} while generating, which jaxlm does not have.")
    given = {names[name]: value for name, value in options.items()}
    given.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    return Settings(temperature=0.0 if draws is False else float(temperature), **given)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"jaxlm: {error}")
