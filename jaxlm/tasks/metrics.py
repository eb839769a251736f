"""Metrics of tasks, as their official scripts define them. Predictions come first, gold answers second."""

from __future__ import annotations

import collections
import importlib.util
import math
import re
import string
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxlm.errors import UserError

_WITHOUT_SPACES = (  # as ranges of a regular expression
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao and Tibetan, Burmese, Khmer
    "\u2e80-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese and Japanese
)
_PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu"}


def require_packages(names: Iterable[str]) -> None:
    """Raise UserError if one of these metrics needs a package that is not installed."""
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
            package = _PACKAGES[name].replace("_", "-")
            raise UserError(
                f"{name.upper()} needs the package {package}; in the clone, run `pip install -e '.[eval]'`."
            )


def label_order(label: str) -> tuple[float, str]:
    """Return the sort key of a label: numbers by their value, then other labels as text."""
    is_number = re.fullmatch(r"\s*[+-]?\d+([.]\d*)?([eE][+-]?\d+)?\s*", label)
    return float(label) if is_number else math.inf, label


def class_metrics(predictions: Sequence[str], gold: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Return accuracy, f1 and matthews of classes. All predictions that are no label count as one class."""
    known = {*labels, *gold}
    return {
        "accuracy": accuracy(predictions, gold), "f1": f1(predictions, gold, labels),
        "matthews": matthews([label if label in known else "" for label in predictions], gold),
    }


def class_details(predictions: Sequence[str], gold: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Return `classes`, with precision, recall, f1 and rows of each label, and the `confusion` matrix.

    A row of the matrix is a gold label, a column a predicted one, both in the order of `labels` and then of gold labels
    that training had not seen. It has no column for texts that a model wrote and that are no label. A figure without
    any rows to divide by is 0, as in scikit-learn.
    """
    names = [*labels, *sorted(set(gold).difference(labels), key=label_order)]
    pairs = collections.Counter(zip(gold, predictions, strict=True))
    table = np.array([[pairs[row, column] for column in names] for row in names])
    hits = np.diag(table)
    rows, predicted = (
        np.array([counts[name] for name in names]) for counts in map(collections.Counter, (gold, predictions))
    )
    figures = {
        "precision": hits / np.maximum(predicted, 1), "recall": hits / np.maximum(rows, 1),
        "f1": 2 * hits / np.maximum(rows + predicted, 1),
    }
    classes = {
        name: {figure: round(float(values[i]), 6) for figure, values in figures.items()} | {"rows": int(rows[i])}
        for i, name in enumerate(names)
    }
    return {"classes": classes, "confusion": table.tolist()}


def text_metrics(names: Iterable[str], predictions: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return metrics of texts, given the gold texts of each: any of exact_match, f1, rouge and bleu."""
    found: dict[str, float] = {}
    for name in names:
        if name == "rouge":
            found |= rouge(predictions, golds)
        elif name == "bleu":
            found[name] = bleu(predictions, golds)
        else:
            measure = {"exact_match": exact_match, "f1": token_f1}[name]
            found[name] = float(np.mean([measure(*pair) for pair in zip(predictions, golds, strict=True)]))
    return found


def accuracy(predictions: Sequence[Hashable], gold: Sequence[Hashable]) -> float:
    """Return the share of predictions that equal the gold answer; 0 for none."""
    return sum(p == g for p, g in zip(predictions, gold, strict=True)) / max(1, len(gold))


def f1(predictions: Sequence[str], gold: Sequence[str], labels: Sequence[str]) -> float:
    """Return F1 of the second of two labels, as in GLUE, or the mean over more labels (macro).

    The mean is over labels that are predicted or gold, as in scikit-learn.
    """
    present, every = {*predictions, *gold}, dict.fromkeys([*labels, *gold])
    wanted = labels[1:] if len(labels) == 2 else [label for label in every if label in present]
    scores = []
    for label in wanted:
        hits = sum(p == g == label for p, g in zip(predictions, gold, strict=True))
        total = sum(p == label for p in predictions) + sum(g == label for g in gold)
        scores.append(2 * hits / total if total else 0.0)
    return float(np.mean(scores)) if scores else 0.0


def matthews(predictions: Sequence[str], gold: Sequence[str]) -> float:
    """Return the Matthews correlation for any number of classes (Gorodkin 2004); 0 if either has one class."""
    labels = {label: number for number, label in enumerate(sorted({*predictions, *gold}))}
    table = np.zeros((len(labels), len(labels)))
    for p, g in zip(predictions, gold, strict=True):
        table[labels[g], labels[p]] += 1
    predicted, true, total = table.sum(0), table.sum(1), table.sum()
    spread = (total**2 - predicted @ predicted) * (total**2 - true @ true)
    return float((np.trace(table) * total - predicted @ true) / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(predictions: Sequence[float], gold: Sequence[float]) -> float:
    """Return the Pearson correlation; 0 if either is constant."""
    return _correlation("pearsonr", predictions, gold)


def spearman(predictions: Sequence[float], gold: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 if either is constant."""
    return _correlation("spearmanr", predictions, gold)


def _correlation(function: str, predictions: Sequence[float], gold: Sequence[float]) -> float:
    import scipy.stats  # 60 MB, which pretraining does not need

    if len(gold) < 2 or np.ptp(predictions) == 0 or np.ptp(gold) == 0:
        return 0.0
    return float(getattr(scipy.stats, function)(predictions, gold)[0])


def normalize_answer(text: str) -> str:
    """Return lower case without punctuation, articles and extra white space, as in SQuAD's script."""
    text = "".join(char for char in text.lower() if char not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def split_characters(text: str) -> str:
    """Return lower case without punctuation, with each character of a script without spaces between spaces.

    As MLQA's script does for Chinese (Lewis et al. 2020), and here for more scripts.
    """
    text = "".join(
        char for char in text.lower() if char not in string.punctuation and unicodedata.category(char)[0] != "P"
    )
    return " ".join(re.sub(f"([{_WITHOUT_SPACES}])", r" \1 ", text).split())


Normalize = Callable[[str], str]
"""Function that makes a text comparable: `normalize_answer` or `split_characters`."""


def exact_match(prediction: str, golds: Sequence[str], normalize: Normalize = normalize_answer) -> float:
    """Return 1 if the normalized prediction equals a gold answer, as in SQuAD; no gold answer is the empty one."""
    return float(any(normalize(prediction) == normalize(gold) for gold in golds or [""]))


def token_f1(prediction: str, golds: Sequence[str], normalize: Normalize = normalize_answer) -> float:
    """Return the best F1 of the prediction's words with those of a gold answer, as in SQuAD 2.0.

    If either has no words, it is 1 if both have none, else 0.
    """
    return max(_words_f1(normalize(prediction).split(), normalize(gold).split()) for gold in golds or [""])


def _words_f1(own: Sequence[str], theirs: Sequence[str]) -> float:
    if not own or not theirs:
        return float(own == theirs)
    common = sum((collections.Counter(own) & collections.Counter(theirs)).values())
    return 2 * common / (len(own) + len(theirs))


Entity = tuple[int, int, int, str]
"""Sentence, first word, last word, type."""


def entities(tags: Sequence[Sequence[str]]) -> set[Entity]:
    """Return the entities of sentences of IOB2 tags, strictly.

    An entity begins with B-X and continues with I-X; an I-X after anything else is no entity.
    """
    found: set[Entity] = set()
    for number, sentence in enumerate(tags):
        start, kind = 0, None  # a tag may be a bare B, of a type without a name
        for place, tag in enumerate([*sentence, "O"]):
            prefix, _, name = tag.partition("-")
            if kind is not None and not (prefix == "I" and name == kind):
                found.add((number, start, place - 1, kind))
                kind = None
            if prefix == "B":
                start, kind = place, name
    return found


def entity_f1(predictions: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return precision, recall and f1 over whole entities (CoNLL 2003), strict IOB2."""
    own, theirs = entities(predictions), entities(gold)
    hits = len(own & theirs)
    return {
        "precision": hits / len(own) if own else 0.0,
        "recall": hits / len(theirs) if theirs else 0.0,
        "f1": 2 * hits / (len(own) + len(theirs)) if own or theirs else 0.0,
    }


def label_set_metrics(predictions: Sequence[Sequence[str]], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the metrics of sets of labels (Ling & Weld 2012, section 5.2).

    "accuracy" is the share of sets that are right as a whole (strict). Loose macro precision and recall are means over
    rows of the right share of the predicted and of the gold labels, 0 for a row without any; loose micro ones are
    shares of all predicted and of all gold labels.
    """
    pairs = [(set(own), set(theirs)) for own, theirs in zip(predictions, golds, strict=True)]
    sums = np.array([[len(own & theirs), len(own), len(theirs)] for own, theirs in pairs], float).reshape(-1, 3)
    hits, own, theirs = sums.T
    macro = np.sum(hits / np.maximum(own, 1)), np.sum(hits / np.maximum(theirs, 1))
    total_hits, total_own, total_theirs = sums.sum(axis=0)
    return {
        "accuracy": accuracy([pair[0] for pair in pairs], [pair[1] for pair in pairs]),
        **_precision_recall("macro_", *(value / max(1, len(pairs)) for value in macro)),
        **_precision_recall("micro_", total_hits / max(1, total_own), total_hits / max(1, total_theirs)),
    }


def relation_metrics(predictions: Sequence[str], golds: Sequence[str], no_relation: str) -> dict[str, float]:
    """Return the metrics of relations.

    They are accuracy; precision, recall and F1 as means over the labels that are gold or predicted (FewRel); and over
    all rows together without `no_relation`, which is no answer (TACRED); where nothing is predicted, that precision is
    1, as in the official scorer.
    """
    pairs = list(zip(predictions, golds, strict=True))
    hits, own, theirs = (collections.Counter(labels) for labels in (
        (p for p, g in pairs if p == g), predictions, golds,
    ))
    labels = sorted({*own, *theirs})
    shares = [
        (hits[label] / max(1, own[label]), hits[label] / max(1, theirs[label]),
         2 * hits[label] / (own[label] + theirs[label]))
        for label in labels
    ]
    means = [float(np.mean(column)) for column in zip(*shares, strict=True)] if shares else [0.0] * 3
    counted = [sum(count for label, count in counts.items() if label != no_relation) for counts in (hits, own, theirs)]
    return {
        "accuracy": accuracy(predictions, golds),
        **dict(zip(("macro_precision", "macro_recall", "macro_f1"), means, strict=True)),
        **_precision_recall("micro_", counted[0] / counted[1] if counted[1] else 1.0, counted[0] / max(1, counted[2])),
    }


def _precision_recall(prefix: str, precision: float, recall: float) -> dict[str, float]:
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {f"{prefix}precision": float(precision), f"{prefix}recall": float(recall), f"{prefix}f1": float(f1)}


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return rouge1, rouge2, rougeL: mean F of the best reference, with stemming (package rouge-score), from 0 to 1."""
    require_packages(["rouge"])
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(names, use_stemmer=True)
    rows = [scorer.score_multi(list(golds), text) for text, golds in zip(predictions, references, strict=True)]
    return {name: float(np.mean([row[name].fmeasure for row in rows])) if rows else 0.0 for name in names}


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus BLEU of detokenized text (package sacrebleu), from 0 to 100."""
    require_packages(["bleu"])
    import sacrebleu

    most = max((len(golds) for golds in references), default=1)
    streams = [[golds[i] if i < len(golds) else None for golds in references] for i in range(most)]
    return float(sacrebleu.corpus_bleu(list(predictions), streams).score) if predictions else 0.0
