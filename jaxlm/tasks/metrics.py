"""Metrics of tasks, as their official scripts define them. Predictions come first, gold answers second."""

from __future__ import annotations

import collections
import functools
import importlib.util
import itertools
import math
import re
import string
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxlm.errors import UserError, install
from jaxlm.tokenizers.tokenizer import UNSPACED

CUTOFF = 10
"""Number of ranked documents for nDCG and MRR."""
_PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu"}


def require_packages(names: Iterable[str]) -> None:
    """Raise UserError if one of these metrics needs a package that is not installed."""
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
            package = _PACKAGES[name].replace("_", "-")
            raise UserError(f"{name.upper()} needs the package {package}; {install('eval')}.")


def label_order(label: str) -> tuple[float, str]:
    """Return the sort key of a label: numbers by their value, then other labels as text."""
    is_number = re.fullmatch(r"\s*[+-]?\d+([.]\d*)?([eE][+-]?\d+)?\s*", label)
    return float(label) if is_number else math.inf, label


def class_metrics(predictions: Sequence[str], gold: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Return accuracy, f1 and matthews of classes. All predictions that are no label count as one class.

    F1 is that of the second of two labels, as in GLUE, or the mean over more labels that are predicted or gold (macro).
    """
    names = list(dict.fromkeys([*labels, *gold]))
    table = _confusion(predictions, gold, names).astype(float)
    hits, own, theirs = np.diag(table), table.sum(axis=0), table.sum(axis=1)
    is_scored = np.arange(len(own)) == 1 if len(labels) == 2 else own + theirs > 0
    is_scored[-1] = False
    f1 = _shares(hits, own, theirs)[2][is_scored]
    spread = (len(gold) ** 2 - own @ own) * (len(gold) ** 2 - theirs @ theirs)
    return {
        "accuracy": accuracy(predictions, gold), "f1": float(f1.sum() / max(1, len(f1))),
        "matthews": float((len(gold) * hits.sum() - own @ theirs) / np.sqrt(spread)) if spread > 0 else 0.0,
    }


def class_details(predictions: Sequence[str], gold: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Return `classes`, with precision, recall, f1 and rows of each label, and the `confusion` matrix.

    A row of the matrix is a gold label, a column a predicted one, both in the order of `labels` and then of gold labels
    that training had not seen. It has no column for texts that a model wrote and that are no label. A figure without
    any rows to divide by is 0.
    """
    names = [*labels, *sorted(set(gold).difference(labels), key=label_order)]
    table = _confusion(predictions, gold, names)[:-1]
    counts = np.stack([np.diag(table), table.sum(axis=0)[:-1], table.sum(axis=1)])
    return {"classes": _class_figures(names, counts), "confusion": table[:, :-1].tolist()}


def _class_figures(names: Sequence[str], counts: np.ndarray) -> dict[str, dict[str, float]]:
    """Return precision, recall, f1 and rows of each label; `counts`, [3, labels], are the arguments of `_shares`."""
    return {
        name: dict(zip(("precision", "recall", "f1"), values.round(6).tolist(), strict=True)) | {"rows": int(rows)}
        for name, values, rows in zip(names, _shares(*counts).T, counts[2], strict=True)
    }


def _confusion(predictions: Sequence[str], gold: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Return how often each name is gold (row) and predicted (column), int; the last of both stands for others."""
    numbers = {name: number for number, name in enumerate(names)}
    size = len(names) + 1
    own, theirs = (np.array([numbers.get(label, size - 1) for label in each], int) for each in (predictions, gold))
    return np.bincount(theirs * size + own, minlength=size**2).reshape(size, size)


def _shares(hits: np.ndarray, own: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return precision, recall and F1, given how often labels are right, predicted and gold; 0 instead of 0 / 0."""
    return np.stack([hits / np.maximum(own, 1), hits / np.maximum(theirs, 1), 2 * hits / np.maximum(own + theirs, 1)])


def text_metrics(names: Iterable[str], predictions: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return metrics of texts, given the gold texts of each: any of exact_match, f1, rouge and bleu.

    F1 counts words, or characters where most letters of the gold texts are of scripts without spaces. Punctuation of
    all scripts is left out. A text that SQuAD's normalization leaves without a letter keeps its signs and decimal
    points, or all if nothing else is left.
    """
    def normalized(text: str, normalize: Normalize = normalize_answer) -> str:
        text = "".join(char for char in text if char.isascii() or unicodedata.category(char)[0] != "P") or text
        if any(map(str.isalpha, found := normalize(text))):
            return found
        kept = re.sub(r"(?![-+.]\d)[^\w\s]", "", text.lower())
        without_articles = re.sub(r"\b(a|an|the)\b", " ", kept)
        return " ".join((without_articles.strip() or kept.strip() or text).split())

    found: dict[str, float] = {}
    for name in names:
        if name == "rouge":
            found |= rouge(predictions, golds)
        elif name == "bleu":
            found[name] = bleu(predictions, golds)
        else:
            measure = functools.partial(exact_match, normalize=normalized)
            if name == "f1":
                words = split_characters if _num_unspaced(golds)[1] else normalize_answer
                measure = functools.partial(token_f1, normalize=functools.partial(normalized, normalize=words))
            found[name] = float(np.mean([measure(*pair) for pair in zip(predictions, golds, strict=True)]))
    return found


def _num_unspaced(golds: Sequence[Sequence[str]]) -> tuple[int, bool]:
    """Return the number of characters of scripts without spaces, and whether they are most of the letters."""
    text = "".join(itertools.chain.from_iterable(golds))
    count = len(re.findall(f"[{UNSPACED}]", text))
    return count, 2 * count > sum(map(str.isalpha, text))


def accuracy(predictions: Sequence[Hashable], gold: Sequence[Hashable]) -> float:
    """Return the share of predictions that equal the gold answer; 0 for none."""
    return sum(p == g for p, g in zip(predictions, gold, strict=True)) / max(1, len(gold))


def correlations(predictions: Sequence[float], gold: Sequence[float]) -> dict[str, float]:
    """Return `pearson` and `spearman`, the correlations: 0 if either side is constant; {} for fewer than two rows."""
    import scipy.stats  # 60 MB, which pretraining does not need

    is_constant = len(gold) < 2 or np.ptp(predictions) == 0 or np.ptp(gold) == 0
    measures = {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr} if len(gold) > 1 else {}
    return {name: 0.0 if is_constant else float(measure(predictions, gold)[0]) for name, measure in measures.items()}


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
    return " ".join(spaced(text).split())


def spaced(text: str) -> str:
    """Return a text with spaces around each character of a script without spaces."""
    return re.sub(f"([{UNSPACED}])", r" \1 ", text)


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


def _words_f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = sum((collections.Counter(predicted) & collections.Counter(gold)).values())
    return 2 * common / (len(predicted) + len(gold))


RowLabels = Sequence[Sequence[str]]
"""The labels of each row, or the tags of its words."""


class Scheme(NamedTuple):
    """Way to mark entities in the tags of words, such as B-PER and I-PER.

    The patterns are regular expressions of two neighbouring tags: both prefixes, then "=" if the types are equal, or
    "!". An entity begins where `starts` fits, goes on while `inside` fits, and counts if `ends` fits then.
    """

    prefixes: str
    starts: str
    inside: str
    ends: str


SCHEMES = {
    "IOB2": Scheme("BIO", ".B.", "[BI]I=", "..."),
    "IOB1": Scheme("BIO", "OI.|BI.|II!|[BI]B=", "[BI]I=", "I..|B[IO].|BB="),
    "IOE2": Scheme("IOE", "[OE][IE].|I[IE]!", "I[IE]=", "E.."),
    "IOE1": Scheme("IOE", "[OE]I.|II!|EE=", "I[IE]=", "I..|E[IE]="),
    "IOBES": Scheme("BIOES", ".[BS].", "[BI][IE]=", "[SE].."),
    "BILOU": Scheme("BILOU", ".[BU].", "[BI][IL]=", "[UL].."),
}
"""Schemes as in the strict mode of seqeval; of those that fit some tags equally well, the first is meant."""
CONLLEVAL = Scheme("BIO", ".B.|OI.|[BI]I!", "[BI]I=", "...")
"""Reading of IOB1 and IOB2 by the script conlleval of CoNLL 2000 to 2003, where an I-X may begin an entity."""


def entity_schemes(tags: Iterable[str]) -> list[str]:
    """Return the names of the schemes that these tags may belong to; [] for tags that mark no entities."""
    prefixes = {tag[0] if re.fullmatch("O|[BIELSU](-.*)?", tag) else "other" for tag in tags}
    return [name for name, scheme in SCHEMES.items() if prefixes <= set(scheme.prefixes)]


@functools.lru_cache(maxsize=2**17)  # a bootstrap reads the same sentences again
def entities(tags: tuple[str, ...], scheme: Scheme) -> frozenset[tuple[int, int, str]]:
    """Return the entities of a sentence: first word, last word and type. Tags of another scheme count as O."""
    found, start, before = set(), None, ("O", "")
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        current = (prefix, kind) if prefix in tuple(scheme.prefixes) else ("O", "")
        pair = before[0] + current[0] + ("=" if before[1] == current[1] else "!")
        if start is not None and not re.fullmatch(scheme.inside, pair):
            if re.fullmatch(scheme.ends, pair):
                found.add((start, place - 1, before[1]))
            start = None
        if start is None and re.fullmatch(scheme.starts, pair):
            start = place
        before = current
    return frozenset(found)


def entity_f1(predictions: RowLabels, gold: RowLabels, labels: Sequence[str] = ()) -> dict[str, float]:
    """Return precision, recall and f1 over whole entities, in the scheme that reads most of the gold tags.

    They are those of seqeval's strict mode. For IOB1, the scheme of CoNLL 2003 (Tjong Kim Sang & De Meulder 2003), and
    IOB2 there is also `conlleval_f1`, which the script of that task returns.

    `labels` are further tags of the data, which these sentences may lack.
    """
    tags = {*labels, *itertools.chain(*gold)}
    schemes = [SCHEMES[name] for name in entity_schemes(tags)]
    if not schemes:
        raise UserError(
            f"the tags {', '.join(sorted(tags)):.100} do not mark entities in {', '.join(SCHEMES)}; set "
            "--objective.metric accuracy, or rewrite the tags."
        )
    num_read = [sum(last - first + 1 for row in gold for first, last, _ in entities(tuple(row), s)) for s in schemes]
    scheme = schemes[num_read.index(max(num_read))]
    found = _entity_figures(predictions, gold, scheme)
    if scheme.prefixes == CONLLEVAL.prefixes:
        found["conlleval_f1"] = _entity_figures(predictions, gold, CONLLEVAL)["f1"]
    return found


def _entity_figures(predictions: RowLabels, gold: RowLabels, scheme: Scheme) -> dict[str, float]:
    counts = np.zeros(3, int)
    for pair in zip(predictions, gold, strict=True):
        own, right = (entities(tuple(tags), scheme) for tags in pair)
        counts += len(own & right), len(own), len(right)
    hits, num_predicted, num_gold = counts.tolist()
    return _precision_recall("", hits / max(1, num_predicted), hits / max(1, num_gold))


def label_set_metrics(predictions: RowLabels, golds: RowLabels) -> dict[str, float]:
    """Return the metrics of sets of labels (Ling & Weld 2012, section 5.2).

    "accuracy" is the share of sets that are right as a whole (strict). Loose macro precision and recall are means over
    rows of the right share of the predicted and of the gold labels, 0 for a row without any; loose micro ones are
    shares of all predicted and of all gold labels.
    """
    pairs = [(set(labels), set(gold)) for labels, gold in zip(predictions, golds, strict=True)]
    sums = np.array([[len(labels & gold), len(labels), len(gold)] for labels, gold in pairs], float).reshape(-1, 3)
    hits, num_predicted, num_gold = sums.T
    macro = np.sum(hits / np.maximum(num_predicted, 1)), np.sum(hits / np.maximum(num_gold, 1))
    total_hits, total_predicted, total_gold = sums.sum(axis=0)
    return {
        "accuracy": accuracy([pair[0] for pair in pairs], [pair[1] for pair in pairs]),
        **_precision_recall("macro_", *(value / max(1, len(pairs)) for value in macro)),
        **_precision_recall("micro_", total_hits / max(1, total_predicted), total_hits / max(1, total_gold)),
    }


def multi_label_metrics(predictions: RowLabels, golds: RowLabels, labels: Sequence[str]) -> dict[str, float]:
    """Return the metrics of multi-label classification, as scikit-learn defines them; a figure of 0 / 0 is 0.

    They are micro precision, recall and F1 over all labels of all rows; macro ones, the means over `labels` and gold
    labels that training had not seen; and "accuracy", the share of rows whose set of labels is right (subset accuracy).
    """
    names = list(dict.fromkeys(itertools.chain(labels, *golds)))
    means = _shares(*_label_counts(predictions, golds, names)).sum(axis=1) / max(1, len(names))
    found = label_set_metrics(predictions, golds)
    found |= dict(zip(("macro_precision", "macro_recall", "macro_f1"), means.tolist(), strict=True))
    return {"micro_f1": found["micro_f1"]} | found  # the first metric is that of --sweep


def multi_label_details(predictions: RowLabels, golds: RowLabels, labels: Sequence[str]) -> dict[str, Any]:
    """Return `classes` as `class_details` does; there is no confusion matrix of sets of labels."""
    names = [*labels, *sorted(set(itertools.chain(*golds)).difference(labels), key=label_order)]
    return {"classes": _class_figures(names, _label_counts(predictions, golds, names))}


def _label_counts(predictions: RowLabels, golds: RowLabels, names: Sequence[str]) -> np.ndarray:
    """Return how often labels are right, predicted and gold, int [3, labels]."""
    pairs = [(set(labels), set(gold)) for labels, gold in zip(predictions, golds, strict=True)]
    sets = [[labels & gold for labels, gold in pairs], *([pair[side] for pair in pairs] for side in (0, 1))]
    counts = [collections.Counter(itertools.chain(*each)) for each in sets]
    return np.array([[count[name] for name in names] for count in counts], int)


def best_threshold(scores: Float[np.ndarray, "rows labels"], golds: Bool[np.ndarray, "rows labels"]) -> float:
    """Return the threshold above which scores between 0 and 1 have the best micro F1.

    It lies halfway between two scores, or is 0.5 if that does not change the predictions. Among equally good thresholds
    it is the one that is closest to 0.5.
    """
    if not golds.any():
        return 0.5  # every threshold has an F1 of 0
    order = np.argsort(-scores, axis=None, kind="stable")
    upper = scores.ravel()[order]
    lower = np.append(upper[1:], 0.0)
    f1 = 2 * np.cumsum(golds.ravel()[order]) / (np.arange(1, len(order) + 1) + golds.sum())
    thresholds = np.where((lower <= 0.5) & (upper > 0.5), 0.5, (lower + upper) / 2)
    f1[lower == upper] = -1.0  # no threshold divides equal scores
    best = thresholds[f1 == f1.max()]
    return float(best[np.argmin(np.abs(best - 0.5))])


def relation_metrics(predictions: Sequence[str], golds: Sequence[str], no_relation: str) -> dict[str, float]:
    """Return the metrics of relations.

    They are accuracy; precision, recall and F1 as means over the labels that are gold or predicted (FewRel); and over
    all rows together without `no_relation`, which is no answer (TACRED); where nothing is predicted, that precision is
    1, as in the official scorer.
    """
    names = sorted({*predictions, *golds})
    table = _confusion(predictions, golds, names)[:-1, :-1]
    counts = np.stack([np.diag(table), table.sum(axis=0), table.sum(axis=1)])
    means = _shares(*counts).sum(axis=1) / max(1, len(names))
    hits, own, theirs = counts[:, [name != no_relation for name in names]].sum(axis=1)
    return {
        "accuracy": accuracy(predictions, golds),
        **dict(zip(("macro_precision", "macro_recall", "macro_f1"), means.tolist(), strict=True)),
        **_precision_recall("micro_", hits / own if own else 1.0, hits / max(1, theirs)),
    }


def _precision_recall(prefix: str, precision: float, recall: float) -> dict[str, float]:
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {f"{prefix}precision": float(precision), f"{prefix}recall": float(recall), f"{prefix}f1": float(f1)}


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return rouge1, rouge2, rougeL: mean F of the best reference, with stemming (package rouge-score), from 0 to 1.

    The package knows only the letters a to z. If more than one of 500 letters of the references is another, as in all
    but English with a few names, its words are those of `split_characters`, without stemming.
    """
    require_packages(["rouge"])
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    letters = [char for char in "".join(itertools.chain.from_iterable(references)) if char.isalpha()]
    is_other = sum(not char.isascii() for char in letters) > len(letters) / 500
    scorer = RougeScorer(names, use_stemmer=True, tokenizer=_Words() if is_other else None)
    rows = [scorer.score_multi(list(golds), text) for text, golds in zip(predictions, references, strict=True)]
    return {name: float(np.mean([row[name].fmeasure for row in rows])) if rows else 0.0 for name in names}


class _Words:
    """Tokenizer of `RougeScorer` for any script."""

    def tokenize(self, text: str) -> list[str]:
        return split_characters(text).split()


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus BLEU of detokenized text (package sacrebleu), from 0 to 100.

    Its tokenization is 13a, zh for references in Chinese, and char for those in another script without spaces (a tenth
    of their characters: a Chinese text may have a few of Japanese).
    """
    require_packages(["bleu"])
    import sacrebleu

    others = len(re.findall("[\u0e00-\u17ff\u3040-\u30ff]", "".join(itertools.chain.from_iterable(references))))
    unspaced, is_unspaced = _num_unspaced(references)
    tokenize = "13a" if not is_unspaced else "char" if 10 * others > unspaced else "zh"
    most = max((len(golds) for golds in references), default=1)
    streams = [[golds[i] if i < len(golds) else None for golds in references] for i in range(most)]
    return float(sacrebleu.corpus_bleu(list(predictions), streams, tokenize=tokenize).score) if predictions else 0.0
