"""Tasks in context: what a pretrained model answers to prompts, with no gradient (Radford et al. 2019, section 3; Brown
et al. 2020, section 2.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import jaxlm
from jaxlm.errors import UserError
from jaxlm.inference.generate import Settings, max_length
from jaxlm.inference.score import Pair, Score, encode_pair, score, text_begin, windows
from jaxlm.inference.text import fit_prompts, write
from jaxlm.objectives.base import PretrainedModel
from jaxlm.paths import check_output
from jaxlm.tasks import metrics
from jaxlm.tasks.evaluate import write_predictions
from jaxlm.tasks.prompts import METRICS, Example, PromptTask, read_examples, read_task


class Result(NamedTuple):
    """metrics: by name. rows: one a prediction, with `id`, `prediction`, `gold` and scores. settings: what
    the model decided for the task, by name."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    settings: Mapping[str, Any] = MappingProxyType({})


def run(model_path: str, task_file: str, predictions: str = "", limit: int = 0) -> dict[str, Any]:
    """Evaluates a run or a Transformers folder on the task of a prompt file: {"task", "metrics", "examples"}, and of
    perplexity "length" and "stride" of the windows.

    predictions: a file for the rows, JSON lines. limit: only so many rows. UserError for a prompt file with a wrong
    field, rows that do not suit it, and models that cannot do such a task.
    """
    task = read_task(task_file)
    check_output(predictions, "--predictions", inputs=(task_file, task.data, task.shots_data))
    examples = read_examples(task, limit)
    loaded = jaxlm.load(model_path, to_answer=True)
    is_run = (Path(model_path) / "checkpoints").is_dir()
    result = evaluate(loaded, task, examples, is_run)
    if predictions:
        write_predictions(predictions, result.rows)
    return {"task": task.task, "metrics": result.metrics, "examples": len(examples), **result.settings}


def evaluate(loaded: PretrainedModel, task: PromptTask, examples: Sequence[Example], is_run: bool = False) -> Result:
    """The result of a task. is_run: the model is of a run of ours, whose objective says what it was pretrained for,
    which a Transformers folder does not."""
    can = {
        "choice": ("text", "masks"), "generate": ("text",), "last-word": ("text",), "perplexity": ("text",),
        "pseudo-likelihood": ("masks",),
    }[task.kind]
    metrics.require_packages(task.metrics)
    objective = loaded.objective
    if objective.answer_kind not in can or (task.kind == "perplexity" and objective.model.has_encoder):
        raise UserError(f"{type(objective).__name__} cannot do a task of the kind {task.kind}; {_ADVICE[task.kind]}.")
    sentinel = task.sentinel
    if sentinel is None:
        sentinel = is_run and getattr(objective, "task", "") == "spans"
    return _KINDS[task.kind](loaded, task, examples, sentinel)


_ADVICE = {
    "choice": "use a causal, an encoder-decoder or a masked model",
    "generate": "use a causal or an encoder-decoder model",
    "last-word": "use a causal or an encoder-decoder model",
    "perplexity": "use a causal model, or pseudo-likelihood for a masked one",
    "pseudo-likelihood": "use a masked model such as BERT, or perplexity for a causal one",
}


def _scores(loaded: PretrainedModel, pairs: Sequence[Pair]) -> list[Score]:
    return score(loaded.objective, loaded.params, pairs)


def _choice(loaded: PretrainedModel, task: PromptTask, examples: Sequence[Example], sentinel: bool) -> Result:
    """The likeliest choice of each example."""
    pairs = [
        encode_pair(loaded.objective, loaded.tokenizer, example.prompt, choice, sentinel)
        for example in examples for choice in example.choices
    ]
    found = iter(_scores(loaded, pairs))
    rows = []
    for example in examples:
        values = [
            each.total / _size(task.normalise, choice.removeprefix(task.delimiter), each)
            for choice, each in zip(example.choices, found, strict=False)
        ]
        best, labels = int(np.argmax(values)), example.labels
        rows.append({
            "id": example.id, "prediction": labels[best], "gold": labels[example.gold],
            "scores": dict(zip(labels, values, strict=True)),
        })
    return Result(_measured(task, [row["prediction"] for row in rows], [row["gold"] for row in rows], examples), rows)


def _size(normalise: str, text: str, found: Score) -> int:
    """What a log-likelihood is divided by."""
    sizes = {"none": 1, "tokens": len(found.log_probs), "characters": len(text), "bytes": len(text.encode())}
    return max(1, sizes[normalise])


def _measured(
    task: PromptTask, predictions: list[str], gold: list[Any], examples: Sequence[Example]
) -> dict[str, float]:
    """The metrics that a task names. gold: a label, or the right answers, for each prediction."""
    def mean(metric: Callable[[str, Sequence[str]], float]) -> float:
        return float(np.mean([metric(*pair) for pair in zip(predictions, gold, strict=True)]))

    known: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: metrics.accuracy(predictions, gold),
        "matthews": lambda: metrics.matthews(predictions, gold),
        "exact_match": lambda: mean(metrics.exact_match),
        "f1": lambda: mean(metrics.token_f1) if task.kind == "generate" else metrics.f1(
            predictions, gold, list(dict.fromkeys(label for example in examples for label in example.labels))
        ),
        "rouge": lambda: metrics.rouge(predictions, gold),
        "bleu": lambda: metrics.bleu(predictions, gold),
    }
    found: dict[str, float] = {}
    for name in task.metrics or METRICS[task.kind][:1]:
        value = known[name]()
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _generate(loaded: PretrainedModel, task: PromptTask, examples: Sequence[Example], sentinel: bool) -> Result:
    """Free answers, greedy or by beam search."""
    objective, tokenizer, v = loaded.objective, loaded.tokenizer, loaded.tokenizer.vocabulary
    stops = task.stop
    if sentinel:  # the span ends where the next sentinel stands
        v.require("sentinel", purpose="the continuation of a sentinel")
        stops = (*stops, tokenizer.piece(v.sentinel - 1))
    # The space after the prompt belongs to the answer, as tokenizers cut it.
    prompts = [tokenizer.encode(example.prompt.rstrip(" ")) + [v.sentinel] * sentinel for example in examples]
    prompts = fit_prompts(objective, tokenizer, prompts, task.max_new_tokens)
    settings = Settings(max_new_tokens=task.max_new_tokens, beams=task.beams, length_penalty=task.length_penalty)
    rows = []
    answers = write(loaded.objective, loaded.params, loaded.tokenizer, prompts, settings, stops, skip_special=True)
    for example, answer in zip(examples, answers, strict=True):
        rows.append({
            "id": example.id, "prediction": answer.text.strip(), "gold": list(example.answers),
            "log_likelihood": sum(answer.log_probs),
        })
    gold = [list(example.answers) for example in examples]
    return Result(_measured(task, [row["prediction"] for row in rows], gold, examples), rows)


def _last_word(loaded: PretrainedModel, task: PromptTask, examples: Sequence[Example], sentinel: bool) -> Result:
    """LAMBADA. The word is right where every token of it is the likeliest; the figures of the token are of the word's
    last one, with the tokens before it given, as OpenAI counted it."""
    texts = [example.prompt.rstrip() for example in examples]
    cuts = [max(text.rfind(space) for space in (" ", "\n", "\t")) for text in texts]
    for example, cut in zip(examples, cuts, strict=True):
        if cut < 1:
            raise UserError(f"{example.place}: the text has no last word after others.")
    found = _scores(loaded, [
        encode_pair(loaded.objective, loaded.tokenizer, text[:cut], text[cut:], sentinel)
        for text, cut in zip(texts, cuts, strict=True)
    ])
    rows = [
        {
            "id": example.id, "prediction": bool(each.is_likeliest.all()), "gold": text[cut + 1 :],
            "log_likelihood": each.total, "last_token": bool(each.is_likeliest[-1]),
        }
        for example, text, cut, each in zip(examples, texts, cuts, found, strict=True)
    ]
    return Result({
        "word_accuracy": float(np.mean([row["prediction"] for row in rows])),
        "token_accuracy": float(np.mean([row["last_token"] for row in rows])),
        "word_perplexity": _exp(-np.mean([each.total for each in found])),
        "token_perplexity": _exp(-np.mean([each.log_probs[-1] for each in found])),
    }, rows)


def _perplexity(loaded: PretrainedModel, task: PromptTask, examples: Sequence[Example], sentinel: bool) -> Result:
    """Perplexity per token and per word (what white space divides), and bits per byte, of texts on their own."""
    length = max_length(loaded.objective)
    stride = task.stride or max(1, length // 2)
    if stride > length:
        raise UserError(f"stride is {stride}; it must be at most what the model reads at a time, {length} tokens.")
    begin, encode = text_begin(loaded.tokenizer), loaded.tokenizer.encode
    pairs = [list(windows(encode(example.prompt), begin, length, stride)) for example in examples]
    found = iter(_scores(loaded, [pair for parts in pairs for pair in parts]))
    rows = []
    for example, parts in zip(examples, pairs, strict=True):
        total = sum(next(found).total for _ in parts)
        rows.append({
            "id": example.id, "log_likelihood": total, "tokens": sum(len(pair.targets) for pair in parts),
            "words": len(example.prompt.split()), "bytes": len(example.prompt.encode()),
        })
    sums = {name: sum(row[name] for row in rows) for name in ("log_likelihood", "tokens", "words", "bytes")}
    nats = -sums["log_likelihood"]
    return Result({
        "perplexity": _exp(nats / max(1, sums["tokens"])), "word_perplexity": _exp(nats / max(1, sums["words"])),
        "bits_per_byte": nats / math.log(2) / max(1, sums["bytes"]),
    }, rows, {"length": length, "stride": stride})


def _pseudo_likelihood(
    loaded: PretrainedModel, task: PromptTask, examples: Sequence[Example], sentinel: bool
) -> Result:
    """Pseudo-perplexity of texts: the exponential of the mean over all tokens."""
    found = _scores(loaded, [Pair([], loaded.tokenizer.encode(example.prompt)) for example in examples])
    rows = [
        {"id": example.id, "log_likelihood": each.total, "tokens": len(each.log_probs)}
        for example, each in zip(examples, found, strict=True)
    ]
    nats, tokens = (sum(row[name] for row in rows) for name in ("log_likelihood", "tokens"))
    return Result({"pseudo_perplexity": _exp(-nats / max(1, tokens)), "pseudo_log_likelihood": nats / len(rows)}, rows)


def _exp(nats: float) -> float:
    return float(np.exp(min(float(nats), 700.0)))  # the largest that a float holds


_KINDS: dict[str, Callable[[PretrainedModel, PromptTask, Sequence[Example], bool], Result]] = {
    "choice": _choice, "generate": _generate, "last-word": _last_word, "perplexity": _perplexity,
    "pseudo-likelihood": _pseudo_likelihood,
}
