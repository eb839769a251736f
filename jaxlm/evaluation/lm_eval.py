"""Models of jaxlm under the Language Model Evaluation Harness (package lm-eval, extra [eval]), without export.

    from lm_eval import simple_evaluate
    from jaxlm.evaluation.lm_eval import JaxLM

    simple_evaluate(model=JaxLM("runs/gpt2"), tasks=["lambada_openai"])

or with lm_eval's own options: python -m jaxlm.evaluation.lm_eval --model jaxlm --model_args path=runs/gpt2 --tasks …
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from jaxlm.config.presets import run_preset
from jaxlm.errors import UserError, install
from jaxlm.inference.score import prompt_of, score_texts, window
from jaxlm.inference.text import cut, fit_prompts, stop_strings
from jaxlm.runs.model import load_trained

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise UserError(f"lm-eval is not installed; {install('eval')}.") from error

MAX_NEW_TOKENS = 256
"""Number of new tokens unless a task gives one, as in lm_eval's own classes."""


@register_model("jaxlm")
class JaxLM(LM):
    """A causal or encoder-decoder model, from a run or a Transformers folder, under lm_eval's interface.

    An encoder-decoder is prompted without a sentinel.
    """

    def __init__(
        self, path: str, preset: str = "", batch_size: Any = None, max_batch_size: Any = None, device: Any = None
    ) -> None:
        """Load the model, with the preset of its own classes; lm_eval always gives the rest, which has no effect."""
        super().__init__()
        if preset:
            run_preset(preset)
        self.loaded = load_trained(path)
        self.loaded.require_heads()
        if self.loaded.objective.answer_kind != "text":
            raise UserError(f"{path} is of {type(self.loaded.objective).__name__}; lm_eval asks causal and "
                            "encoder-decoder models.")

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer, by which lm_eval caches requests."""
        return self.loaded.tokenizer.fingerprint

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (context, continuation), and whether greedy decoding would write it."""
        found = self.loaded.score([request.args for request in requests], keep_space=True)
        return [(each.total, bool(each.is_likeliest.all())) for each in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that do not overlap."""
        texts = [request.args[0] for request in requests]
        return [each.total for each in score_texts(self.loaded, texts, window(self.loaded), symbols=True)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to the texts in `until`, for requests of (context, options).

        As of scores, a context begins with what the tokenizer puts before a text: lm_eval's hf with add_bos_token.
        """
        tokenizer = self.loaded.tokenizer
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items(), key=str))].append(number)
        answers = [""] * len(requests)
        for numbers in groups.values():
            options = dict(requests[numbers[0]].args[1])
            until = options.pop("until", None) or []
            settings = _settings(options)
            texts = [tokenizer.encode_with_symbols(requests[i].args[0]) for i in numbers]
            prompts = [prompt_of(self.loaded.objective, ids) for ids in texts]
            # lm_eval leaves room for the last new token, which is never read.
            prompts = fit_prompts(self.loaded, prompts, settings["max_new_tokens"] + 1)
            stop = [until] if isinstance(until, str) else [text for text in until if text]
            found = self.loaded.generate(prompts, stop, skip_special=True, **settings)
            for i, answer in zip(numbers, found, strict=True):
                text = tokenizer.decode(answer.ids)  # decoded alone: no leading space
                answers[i], _ = cut(text, stop_strings(tokenizer, stop))
        return answers


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return generation settings from the options of a task, as lm_eval names them."""
    samples = options.pop("do_sample", None)
    temperature = options.pop("temperature", 1.0 if samples else 0.0)
    names = {"max_gen_toks": "max_new_tokens", "num_beams": "beams", "top_k": "top_k", "top_p": "top_p"}
    lengths = [options.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens",
                                                    "max_completion_tokens")]
    if length := next(filter(None, lengths), None):  # as in lm_eval, the first name counts
        options["max_gen_toks"] = length
    if unknown := options.keys() - names.keys():
        raise UserError(
            f"a task sets the generation option {sorted(unknown)[0]}, which jaxlm does not support; choose another."
        )
    settings = {"max_new_tokens": MAX_NEW_TOKENS} | {names[name]: value for name, value in options.items()}
    return settings | {"temperature": 0.0 if samples is False else float(temperature)}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"jaxlm: {error}")
