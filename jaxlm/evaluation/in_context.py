"""Tasks in context: answers of a pretrained model to prompts, without training.

See Radford et al. 2019, section 3, and Brown et al. 2020, section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.errors import UserError
from jaxlm.evaluation.prompts import METRICS, PromptRow, PromptTask, read_examples, read_task
from jaxlm.inference.score import Score, prompt_of, window
from jaxlm.inference.text import cut, fit_prompts, stop_strings
from jaxlm.parallel.hosts import check_main_output, together
from jaxlm.runs.model import TrainedModel, load_trained
from jaxlm.tasks import metrics
from jaxlm.tasks.evaluate import write_predictions
from jaxlm.tokenizers.unknown import summarize_unknown

Result = tuple[list[dict[str, Any]], dict[str, float], dict[str, int]]
"""A row per prediction (`prediction`, `gold`, scores), metrics, and settings that depend on the model, by name."""


def run(
    model_path: str, task_file: str, predictions: str = "", limit: int = 0, mesh: Mapping[str, int] = {}
) -> dict[str, Any]:
    """Evaluate a run or a Transformers folder on the task of a prompt file.

    The rows of the result are written to `predictions` as JSON lines; a `limit` of 0 reads all rows.

    Returns:
        {"task", "metrics", "examples"}, for perplexity also "length" and "stride" of the windows.
    """
    task = together(lambda: read_task(task_file), "all to read the task")
    check_main_output(predictions, "--predictions", inputs=(task_file, task.data, task.shots_data))
    examples = together(lambda: read_examples(task, limit), "all to read the prompts")
    loaded = load_trained(model_path, mesh)
    loaded.require_heads()
    tokenizer, prompts = loaded.tokenizer, [example.prompt for example in examples]
    unknown = summarize_unknown(tokenizer, [(tokenizer.encode_arrays([text])[0], [text]) for text in prompts])
    if unknown and jax.process_index() == 0:
        print(unknown)
    rows, found, settings = evaluate(loaded, task, examples)
    write_predictions(predictions, ({"id": example.id} | row for example, row in zip(examples, rows, strict=True)))
    return {"task": task.task, "metrics": found, "examples": len(examples)} | settings


def evaluate(loaded: TrainedModel, task: PromptTask, examples: Sequence[PromptRow]) -> Result:
    """Return the result of a task."""
    function, answer_kinds, models = _KINDS[task.kind]
    metrics.require_packages(task.metrics)
    objective = loaded.objective
    if objective.answer_kind not in answer_kinds:
        raise UserError(f"{type(objective).__name__} cannot do a task of the kind {task.kind}; use {models}.")
    sentinel = task.sentinel
    if sentinel is None:  # a run tells the objective of its pretraining, a Transformers folder does not
        sentinel = loaded.step > 0 and getattr(objective, "task", "") == "spans"
    return function(loaded, task, examples, sentinel)


def _choice(loaded: TrainedModel, task: PromptTask, examples: Sequence[PromptRow], sentinel: bool) -> Result:
    """Choose the likeliest continuation of each prompt."""
    pairs = [(example.prompt, choice) for example in examples for choice in example.choices]
    choices = dict.fromkeys(choice for _, choice in pairs)
    priors = dict.fromkeys(choices, 0.0)
    if task.normalise == "unconditional":
        found = loaded.score([(task.unconditional_prompt, choice) for choice in choices], sentinel=sentinel)
        priors = {choice: each.total for choice, each in zip(choices, found, strict=True)}
    found, rows = iter(loaded.score(pairs, sentinel=sentinel)), []
    for example in examples:
        values = [
            (each.total - priors[choice]) / _size(task.normalise, choice.removeprefix(task.delimiter), each)
            for choice, each in zip(example.choices, found, strict=False)
        ]
        labels = example.labels
        rows.append({
            "prediction": labels[int(np.argmax(values))], "gold": labels[example.gold],
            "scores": dict(zip(labels, values, strict=True)),
        })
    names = list(dict.fromkeys(label for example in examples for label in example.labels))
    known = metrics.class_metrics([row["prediction"] for row in rows], [row["gold"] for row in rows], names)
    return rows, {name: known[name] for name in task.metrics or METRICS["choice"][:1]}, {}


def _size(normalise: str, text: str, found: Score) -> int:
    """Return the number of units by which a log-likelihood is divided."""
    sizes = {"tokens": len(found.log_probs), "characters": len(text), "bytes": len(text.encode())}
    return max(1, sizes.get(normalise, 1))


def _generate(loaded: TrainedModel, task: PromptTask, examples: Sequence[PromptRow], sentinel: bool) -> Result:
    """Write free answers, by greedy decoding or beam search."""
    tokenizer, v, ends = loaded.tokenizer, loaded.tokenizer.vocabulary, None
    if sentinel:  # the span ends at the next sentinel
        v.require("sentinel", purpose="the continuation of a sentinel")
        ends = [*(loaded.settings.stop_ids or [v.eos]), v.sentinel + v.sentinel_step]
    # Tokenizers join the space after the prompt to the answer.
    texts = [tokenizer.encode_with_symbols((example.prompt + task.delimiter).rstrip(" ")) for example in examples]
    prompts = [prompt_of(loaded.objective, ids + [v.sentinel] * sentinel) for ids in texts]
    prompts = fit_prompts(loaded, prompts, task.max_new_tokens)
    answers = loaded.generate(
        prompts, task.stop, skip_special=True, max_new_tokens=task.max_new_tokens, beams=task.beams,
        length_penalty=task.length_penalty, stop_ids=ends,
    )
    texts, golds = [answer.text.strip() for answer in answers], [list(example.answers) for example in examples]
    if sentinel:  # which is a word of text in mT5, and bytes in ByT5
        written = (tokenizer.decode([i for i in answer.ids if i not in (v.sentinel, *ends)]) for answer in answers)
        texts = [cut(text, stop_strings(tokenizer, task.stop))[0].strip() for text in written]
    rows = [
        {"prediction": text, "gold": gold, "log_likelihood": sum(answer.log_probs)}
        for text, gold, answer in zip(texts, golds, answers, strict=True)
    ]
    # The vocabulary may have no form of an answer as it stands: NFKC takes Thai ำ apart.
    golds = [list(dict.fromkeys([*gold, *map(tokenizer.spelled, gold)])) for gold in golds]
    return rows, metrics.text_metrics(task.metrics or METRICS["generate"][:1], texts, golds), {}


def _last_word(loaded: TrainedModel, task: PromptTask, examples: Sequence[PromptRow], sentinel: bool) -> Result:
    """Predict the last word of each text (LAMBADA).

    A word is right if each of its tokens is the likeliest. The token metrics are those of its last token given the
    others, as OpenAI counted them.
    """
    texts = [example.prompt.rstrip() for example in examples]
    cuts = [max(text.rfind(space) for space in (" ", "\n", "\t")) for text in texts]
    for example, end in zip(examples, cuts, strict=True):
        if end < 1:
            raise UserError(
                f"{example.place}: the text needs two words or more, since the last one is predicted; remove the row."
            )
    found = loaded.score([(text[:end], text[end:]) for text, end in zip(texts, cuts, strict=True)], sentinel=sentinel)
    rows = [
        {
            "prediction": bool(each.is_likeliest.all()), "gold": text[start + 1 :], "log_likelihood": each.total,
            "last_token": bool(each.is_likeliest[-1]),
        }
        for text, start, each in zip(texts, cuts, found, strict=True)
    ]
    return rows, {
        "word_accuracy": float(np.mean([row["prediction"] for row in rows])),
        "token_accuracy": float(np.mean([row["last_token"] for row in rows])),
        "word_perplexity": _exp(-np.mean([each.total for each in found])),
        "token_perplexity": _exp(-np.mean([each.log_probs[-1] for each in found])),
    }, {}


def _perplexity(loaded: TrainedModel, task: PromptTask, examples: Sequence[PromptRow], sentinel: bool) -> Result:
    """Score whole texts: perplexity per token and per word (between white space), and bits per byte."""
    length = window(loaded)
    stride = task.stride or max(1, length // 2)
    found = loaded.score([example.prompt for example in examples], stride)
    rows = [
        {
            "log_likelihood": each.total, "tokens": len(each.log_probs), "words": len(example.prompt.split()),
            "bytes": len(example.prompt.encode()),
        }
        for example, each in zip(examples, found, strict=True)
    ]
    nats, tokens, words, size = (sum(values) for values in zip(*(row.values() for row in rows), strict=True))
    units = sum(len(metrics.split_characters(example.prompt).split()) for example in examples)
    has_words = units <= 2 * words  # otherwise most of the text is of a script without spaces
    return rows, {
        "perplexity": _exp(-nats / max(1, tokens)),
        **({"word_perplexity": _exp(-nats / max(1, words))} if has_words else {}),
        "bits_per_byte": -nats / math.log(2) / max(1, size),
    }, {"length": length, "stride": stride}


def _pseudo_likelihood(
    loaded: TrainedModel, task: PromptTask, examples: Sequence[PromptRow], sentinel: bool
) -> Result:
    """Score whole texts: pseudo-perplexity, the exponential of the mean over all tokens."""
    found = loaded.score([example.prompt for example in examples])
    rows = [{"log_likelihood": each.total, "tokens": len(each.log_probs)} for each in found]
    nats, tokens = (sum(values) for values in zip(*(row.values() for row in rows), strict=True))
    return rows, {"pseudo_perplexity": _exp(-nats / max(1, tokens)), "pseudo_log_likelihood": nats / len(rows)}, {}


def _exp(nats: float) -> float:
    return float(np.exp(min(float(nats), 700.0)))  # the largest exponential of a float


_WRITERS = "a causal or an encoder-decoder model"
_KINDS: dict[str, tuple[Callable[..., Result], tuple[str, ...], str]] = {
    "choice": (_choice, ("text", "masks"), f"{_WRITERS}, or a masked one"),
    "generate": (_generate, ("text",), _WRITERS),
    "last-word": (_last_word, ("text",), _WRITERS),
    "perplexity": (_perplexity, ("text",), "a causal model, or pseudo-likelihood for a masked one"),
    "pseudo-likelihood": (_pseudo_likelihood, ("masks",), "a masked model, or perplexity for a causal one"),
}
"""Function of each kind, `answer_kind` of the objectives that it takes, and the models to use."""
