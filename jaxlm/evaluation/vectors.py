"""Evaluation of text vectors without training: similarity of pairs, classification of pairs, retrieval.

Vectors are compared by their cosine, or by their product or MaxSim if the model was trained for it, in float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.data.readers import Columns
from jaxlm.errors import UserError
from jaxlm.objectives.contrastive import text_scores
from jaxlm.parallel.hosts import check_main_output, together
from jaxlm.tasks.evaluate import Result, bootstrap, rounded, text_groups, write_predictions
from jaxlm.tasks.metrics import CUTOFF, correlations, spaced
from jaxlm.tasks.tables import TableRow, read_table, whole_table
from jaxlm.types import Role

Encode = Callable[[Sequence[str], Role], Float[np.ndarray, "texts width"] | list[Float[np.ndarray, "tokens width"]]]
"""Function that returns the vectors of texts."""
PAIR, GOLDS, RETRIEVAL = ("sentence1", "sentence2"), ("score", "label"), ("query", "positive")
"""Columns that are found by their names."""
DEPTH = 100
"""Largest number of documents for recall."""
QUERIES, DOCUMENTS = 1024, 4096
"""Vectors of queries and of documents that are compared at once."""


class Retrieval(NamedTuple):
    """Texts of queries and of documents by id, and the gains above 0 of each query's relevant documents by id."""

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, float]]


def evaluate(
    encode: Encode, path: str, columns: Sequence[str] = (), limit: int = 0, predictions: str | None = None,
    resamples: int = 0, is_cosine: bool = True,
) -> Result:
    """Evaluate vectors on a file of pairs, of queries with their documents, or on a folder in BEIR's format.

    Args:
        encode: Returns vectors of texts.
        path: A table or JSON lines, or a folder with queries.jsonl, corpus.jsonl and qrels.tsv or qrels/test.tsv.
        columns: Two texts and a score or a 0/1 label; or a query and its relevant document or documents. Empty: those
            of `PAIR` and `GOLDS`, or of `RETRIEVAL`.
        limit: Number of pairs or of queries, from the first; 0 for all.
        predictions: File to write, one JSON object per pair or query.
        resamples: Number of resamples for the confidence intervals of the metrics; 0 for none.
        is_cosine: Compare vectors by their cosine, not by their product.

    Returns:
        The `Result` of the task "similarity" (scores), "pairs" (labels) or "retrieval".
    """
    check_main_output(predictions, "--predictions", inputs=(path,))
    encode = functools.partial(_encode_distinct, encode, is_cosine)
    if Path(path).is_dir():
        if columns:
            raise UserError(f"--columns is for a file, and {path} is a folder; leave it out.")
        found = _retrieval(encode, together(lambda: _read_folder(Path(path)), "all to read the texts"), limit, True)
    else:
        names = list(columns) or together(lambda: _columns(path), "all to read the columns")
        if len(names) not in (2, 3):
            raise UserError("--columns takes two texts and a score, or a query and its documents, between commas.")
        chosen = Columns(names, "Choose columns with --columns")
        table = together(lambda: whole_table(path, chosen), "all to read the texts")
        is_pairs = len(names) == 3
        found = _pairs(encode, table, names, limit) if is_pairs else _retrieval(encode, _paired(table, *names), limit)
    rows, result, texts, measure = found
    write_predictions(predictions, rows)
    result |= {"metrics": rounded(measure(np.arange(len(rows)))), "examples": len(rows)}
    return result | (bootstrap(text_groups(texts), measure, resamples) if resamples else {})


Evaluated = tuple[list[dict[str, Any]], Result, Sequence[tuple[str, ...]], Callable[[np.ndarray], dict[str, float]]]
"""Rows for --predictions, a part of the result, the texts of each row, and the metrics of any selection of rows."""


def _pairs(encode: Encode, table: list[TableRow], names: Sequence[str], limit: int) -> Evaluated:
    """Score pairs by their vectors, and by the share of their words that they have in common."""
    ids = [i for i, row in enumerate(table[: limit or None]) if row.label(names[2]) is not None]
    labelled = [table[i] for i in ids]
    if not labelled:
        raise UserError(f"no row has a {names[2]}; choose another column with --columns.")
    golds = np.array([row.number(names[2]) for row in labelled])
    if len(np.unique(golds)) < 2:
        raise UserError(f"all values of {names[2]} are equal, which measures nothing; choose others with --columns.")
    texts = [(row.text(names[0]), row.text(names[1])) for row in labelled]
    vectors = encode([*itertools.chain(*texts)], "")
    if vectors.ndim > 2:
        raise UserError("vectors of late interaction rank documents for queries; give a file of these, not of pairs.")
    vectors = vectors.reshape(len(texts), 2, -1)
    scores = np.sum(vectors[:, 0] * vectors[:, 1], axis=1)
    overlaps = np.array([word_overlap(*pair) for pair in texts])
    is_label = bool(np.isin(golds, (0, 1)).all())

    def measure(chosen: np.ndarray) -> dict[str, float]:
        gold, metrics = golds[chosen], label_metrics if is_label else correlations
        return {
            f"{prefix}{name}": value for prefix, found in (("", scores), ("word_overlap_", overlaps))
            for name, value in metrics(found[chosen], gold).items()
        }

    columns = {"id": np.array(ids), "prediction": scores, "gold": golds, "word_overlap": overlaps}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(x.tolist() for x in columns.values()), strict=True)]
    counts = {"unlabelled": unlabelled} if (unlabelled := len(table[: limit or None]) - len(rows)) else {}
    return rows, {"task": "pairs" if is_label else "similarity"} | counts, texts, measure


def _retrieval(encode: Encode, data: Retrieval, limit: int, leaves_out_own: bool = False) -> Evaluated:
    """Rank all documents for each query that has a relevant one, or all but the document with the query's own id."""
    queries = [query for query in data.queries if data.relevant.get(query)][: limit or None]
    if not queries:
        raise UserError("no query has a relevant document; give queries and documents that belong together.")
    # The search keeps the first of equally good documents. trec_eval takes them in descending order of their ids.
    ids = sorted(data.documents, reverse=True)
    texts = [data.queries[query] for query in queries]
    vectors = encode([data.documents[name] for name in ids], "document")
    found, scores = search(encode(texts, "query"), vectors, min(DEPTH + 1, len(ids)))
    # Last and without a gain, as BEIR's own code leaves it out: in ArguAna each query is a document too.
    places = {name: place for place, name in enumerate(ids)} if leaves_out_own else {}
    own = found == np.array([[places.get(query, -1)] for query in queries])
    order = np.argsort(own, axis=1, kind="stable")[:, :DEPTH]
    found, scores, own = (np.take_along_axis(each, order, axis=1) for each in (found, scores, own))
    gains = ~own * np.array([
        [data.relevant[query].get(ids[i], 0.0) for i in ranked] for query, ranked in zip(queries, found, strict=True)
    ])
    figures = ranking_metrics(gains, [[*data.relevant[query].values()] for query in queries])
    shown = [np.flatnonzero(~each[:CUTOFF]) for each in own]
    rows = [
        {"id": query, "prediction": [ids[i] for i in found[n, shown[n]]], "gold": [*data.relevant[query]],
         "scores": scores[n, shown[n]].tolist()} | {name: float(values[n]) for name, values in figures.items()}
        for n, query in enumerate(queries)
    ]

    def measure(chosen: np.ndarray) -> dict[str, float]:
        return {name: float(values[chosen].mean()) for name, values in figures.items()}

    return rows, {"task": "retrieval", "documents": len(ids)}, [(text,) for text in texts], measure


def word_overlap(one: str, other: str) -> float:
    """Return the Jaccard index of the lower-case words of two texts; 1 if neither has any.

    Words are between white space; in scripts without it, they are characters.
    """
    first, second = (set(spaced(text.lower()).split()) for text in (one, other))
    return len(first & second) / len(first | second) if first | second else 1.0


def label_metrics(scores: Float[np.ndarray, " pairs"], labels: Float[np.ndarray, " pairs"]) -> dict[str, float]:
    """Return the average precision of 0/1 labels, and the best accuracy and F1 of any threshold on the same pairs.

    As scikit-learn's average_precision_score: Σ (R_n - R_{n-1}) P_n over the thresholds, so that the order of equal
    scores does not matter. Without a 1 there are no figures.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    hits = np.cumsum(labels[order])[ends]
    predicted, total = ends + 1, labels.sum()
    if not total:
        return {}
    correct = np.append(2 * hits - predicted, 0) + len(labels) - total  # the last: nothing is predicted as 1
    return {
        "average_precision": float(np.sum(np.diff(hits, prepend=0) / total * hits / predicted)),
        "best_accuracy": float(correct.max() / len(labels)),
        "best_f1": float(np.max(2 * hits / (predicted + total))),
    }


def ranking_metrics(
    gains: Float[np.ndarray, "queries depth"], relevant: Sequence[Sequence[float]]
) -> dict[str, Float[np.ndarray, " queries"]]:
    """Return nDCG, MRR and recall of each query, as trec_eval defines them: the gain of nDCG is linear.

    `gains` are those of the ranked documents, best first, 0 for one that is not relevant; `relevant` has the gains of
    all relevant ones. A depth below `DEPTH` is the number of all documents.
    """
    top, ranks = gains[:, :CUTOFF], np.arange(1, min(CUTOFF, gains.shape[1]) + 1)
    ideal = [sum(gain / math.log2(i + 2) for i, gain in enumerate(sorted(row)[: -CUTOFF - 1 : -1])) for row in relevant]
    counts = np.array([len(row) for row in relevant])
    return {
        f"ndcg_at_{CUTOFF}": np.sum(top / np.log2(ranks + 1), axis=1) / ideal,
        f"mrr_at_{CUTOFF}": np.max((top > 0) / ranks, axis=1),
    } | {f"recall_at_{k}": np.sum(gains[:, :k] > 0, axis=1) / counts for k in (CUTOFF, DEPTH)}


def search(
    queries: Float[np.ndarray, "queries *tokens width"], documents: Float[np.ndarray, "documents *words width"],
    depth: int,
) -> tuple[Int[np.ndarray, "queries depth"], Float[np.ndarray, "queries depth"]]:
    """Return the documents with the largest scores for each query, best first, and the scores.

    Equal scores are in the order of the documents. The search is exact, in blocks of documents with a running top-k.
    """
    def block(rows: np.ndarray, start: int, size: int) -> np.ndarray:
        part = rows[start : start + size]
        return np.pad(part, ((0, min(size, len(rows)) - len(part)), *[(0, 0)] * (rows.ndim - 1)))

    num_queries, num_documents = (max(1, most // math.prod(x.shape[1:-1])) for x, most in (
        (queries, QUERIES), (documents, DOCUMENTS)))
    parts = [jnp.asarray(block(queries, start, num_queries)) for start in range(0, len(queries), num_queries)]
    shape = (min(num_queries, len(queries)), depth)
    best = [(jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32)) for _ in parts]
    for first in range(0, len(documents), num_documents):
        part = jnp.asarray(block(documents, first, num_documents))
        is_document = jnp.arange(len(part)) < len(documents) - first
        best = [
            _merge(*found, rows, part, is_document, jnp.int32(first)) for rows, found in zip(parts, best, strict=True)
        ]
    scores, found = (np.concatenate([np.asarray(each[i]) for each in best])[: len(queries)] for i in (0, 1))
    return found, scores


@jax.jit
def _merge(
    best: Float[Array, "queries depth"], rows: Int[Array, "queries depth"],
    queries: Float[Array, "queries *tokens width"], documents: Float[Array, "block *words width"],
    is_document: Bool[Array, " block"], first: Int[Array, ""],
) -> tuple[Float[Array, "queries depth"], Int[Array, "queries depth"]]:
    """Return the best of the scores so far and of those of a block; `top_k` keeps the order of equal ones."""
    scores = text_scores(queries, documents)
    scores = jnp.concatenate([best, jnp.where(is_document, scores, -jnp.inf)], axis=1)
    own = jnp.broadcast_to(first + jnp.arange(len(documents), dtype=jnp.int32), (len(queries), len(documents)))
    best, at = jax.lax.top_k(scores, best.shape[1])
    return best, jnp.take_along_axis(jnp.concatenate([rows, own], axis=1), at, axis=1)


def _encode_distinct(
    encode: Encode, is_unit: bool, texts: Sequence[str], role: Role
) -> Float[np.ndarray, "texts *tokens width"]:
    """Return vectors, padded with zeros. Each distinct text is encoded once, so that equal ones have equal vectors."""
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    vectors = encode(list(number), role)
    if isinstance(vectors, list):
        padded = np.zeros((len(vectors), max(map(len, vectors)), vectors[0].shape[1]), np.float32)
        for i, each in enumerate(vectors):
            padded[i, : len(each)] = each
        vectors = padded
    if is_unit:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors if len(number) == len(texts) else vectors[[number[text] for text in texts]]


def _columns(path: str) -> list[str]:
    """Return the columns of a file that are known by their names."""
    first = next(iter(read_table(path, Columns((), "", (*PAIR, *GOLDS, *RETRIEVAL)))), None)
    found = first.values if isinstance(first, TableRow) else {}
    if set(RETRIEVAL) <= found.keys():
        return list(RETRIEVAL)
    golds = [name for name in GOLDS if name in found]
    if not golds or not set(PAIR) <= found.keys():
        raise UserError(f"{path} has neither the columns {', '.join(PAIR)} and {' or '.join(GOLDS)} nor "
                        f"{' and '.join(RETRIEVAL)}; name others with --columns TEXT,TEXT,SCORE or QUERY,DOCUMENTS.")
    return [*PAIR, golds[0]]


def _paired(rows: list[TableRow], query: str, documents: str) -> Retrieval:
    """Return the retrieval of each row's documents among those of all rows."""
    relevant: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        relevant[row.text(query)] |= dict.fromkeys(filter(str.strip, row.texts(documents)), 1.0)
    names = {text: str(n) for n, text in enumerate(dict.fromkeys(itertools.chain(*relevant.values())))}
    gains = {text: {names[each]: gain for each, gain in texts.items()} for text, texts in relevant.items()}
    return Retrieval({text: text for text in gains}, {name: text for text, name in names.items()}, gains)


def _read_folder(folder: Path) -> Retrieval:
    """Read a folder in BEIR's format; the text of a document is its title and its text."""
    def rows(file: Path, *names: str, optional: Sequence[str] = ()) -> list[TableRow]:
        return whole_table(str(file), Columns(names, "Write it as in BEIR", optional))

    queries = {row.text("_id"): row.text("text") for row in rows(folder / "queries.jsonl", "_id", "text")}
    documents = {
        row.text("_id"): f"{row.values.get('title') or ''} {row.text('text')}".strip()
        for row in rows(folder / "corpus.jsonl", "_id", "text", optional=("title",))
    }
    relevant: dict[str, dict[str, float]] = defaultdict(dict)
    qrels = next((file for file in (folder / "qrels.tsv", folder / "qrels/test.tsv") if file.is_file()), None)
    if qrels is None:
        raise UserError(f"{folder} has neither qrels.tsv nor qrels/test.tsv, the table of relevant documents; add it.")
    for row in rows(qrels, "query-id", "corpus-id", "score"):
        query, document, gain = row.text("query-id"), row.text("corpus-id"), row.number("score")
        for name, known, kind in ((query, queries, "queries.jsonl"), (document, documents, "corpus.jsonl")):
            if name not in known:
                raise UserError(f"{row.place}: {kind} has no _id {name!r}; fix or remove the row.")
        if gain > 0:
            relevant[query][document] = gain
    return Retrieval(queries, documents, relevant)
