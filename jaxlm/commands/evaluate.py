"""Score a fine-tuned model on rows of its task, any model on prompts, or the vectors of any model.

jaxlm evaluate RUN_OR_HF_DIR [--data.source FILE] [--predictions OUT.jsonl] [--data.field VALUE …]
jaxlm evaluate RUN_OR_HF_DIR --against RUN_OR_HF_DIR [--data.source FILE]
jaxlm evaluate RUN_OR_HF_DIR --task FILE
jaxlm evaluate RUN_OR_HF_DIR --vectors FILE_OR_FOLDER [--columns TEXT,TEXT,SCORE] [--pooling cls]

Without --data.source the rows are the held-out ones. --against compares with another model on the same rows, by a
paired bootstrap. --task scores any decoder, T5 or masked language model on prompts, without training (see
jaxlm/evaluation/in_context.md). --vectors compares the model's text vectors, also without training: pairs with a score
or a 0/1 label, or queries with their documents (see jaxlm/evaluation/vectors.md).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from jaxlm.commands.common import (
    Parser,
    bootstrap_option,
    count,
    mesh_of,
    mesh_options,
    output_option,
    remark_length,
    standard_output,
    start_jax,
    vector_options,
)
from jaxlm.errors import UserError

RESAMPLES = 1000
"""Resamples of a comparison."""
MAX_CLASSES = 50  # in a table
VECTORS = ("columns", "pooling", "length", "prompt", "document_prompt")
"""Options of --vectors."""


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm evaluate", __doc__)
    parser.add_argument("model", help="a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]")
    parser.add_argument("--task", default=None, help="file of prompts, for a model without fine-tuning")
    parser.add_argument("--limit", type=count, default=0, help="prompts, pairs or queries to use; 0 for all")
    output_option(parser, "--predictions", "file for the answers, one JSON object a row")
    bootstrap_option(parser)
    parser.add_argument("--against", default=None, metavar="RUN_OR_HF_DIR", help="another model of the same task")
    parser.add_argument("--vectors", default=None, metavar="FILE_OR_FOLDER",
                        help="pairs with a score or a 0/1 label, or queries with their documents")
    parser.add_argument("--columns", default="", metavar="NAMES", help=(
        "columns of --vectors: TEXT,TEXT,SCORE or QUERY,DOCUMENTS; by default sentence1,sentence2,score (or label), or "
        "query,positive"))
    vector_options(parser)
    mesh_options(parser)
    parser.add_argument("--document-prompt", default=None, help=(
        "text before each document of a retrieval, such as 'passage: '; --prompt is then before queries only; by "
        "default the model's own, else none"))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options, rest = parser.parse_known_args(arguments or ["--help"])
    start_jax()
    import jax

    from jaxlm.parallel.hosts import check_main_output

    check_main_output(options.predictions, "--predictions", options.overwrite)
    mesh = mesh_of(options)
    with standard_output(options):
        if options.vectors:
            if options.task or options.against or rest:
                wrong = "--task" if options.task else "--against" if options.against else rest[0]
                raise UserError(f"{wrong} cannot be combined with --vectors; leave one out.")
            result = evaluate_vectors(options)
        elif wrong := next((name for name in VECTORS if getattr(options, name)), None):
            more = "; --data.length is that of a task" * (wrong == "length")
            raise UserError(f"--{wrong.replace('_', '-')} is for --vectors; leave it out{more}.")
        elif options.task is None:
            if options.limit:
                raise UserError("--limit is for prompts and vectors; give --task FILE, or leave it out.")
            from jaxlm.runs.resolve import open_evaluation
            from jaxlm.tasks.evaluate import answer_rows, compare, evaluate

            if options.against is None:
                result = evaluate(open_evaluation(options.model, rest, mesh), options.predictions, options.bootstrap)
            elif options.predictions:
                raise UserError("--predictions is for one model; leave out --against.")
            else:
                answers = (answer_rows(open_evaluation(path, rest, mesh)) for path in (options.model, options.against))
                result = compare(*answers, options.bootstrap or RESAMPLES)
        else:
            if options.bootstrap or options.against:
                raise UserError("--bootstrap and --against are for fine-tuned models; leave them out with --task.")
            if rest:
                raise UserError(f"{rest[0]} cannot be combined with --task; set it in the task file.")
            from jaxlm.evaluation.in_context import run

            result = run(options.model, options.task, options.predictions or "", options.limit, mesh)
    if jax.process_index() == 0:
        print(json.dumps(result)) if options.json else print_result(result)


def evaluate_vectors(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a model's vectors; see `jaxlm.evaluation.vectors.evaluate`."""
    from jaxlm.evaluation.vectors import evaluate
    from jaxlm.runs.model import load_trained
    from jaxlm.types import Role

    model = load_trained(options.model, mesh_of(options))
    remark_length(options.length, model)
    if (similarity := model.vectors.similarity) not in ("", "cosine", "dot", "maxsim"):
        raise UserError(f"{options.model} compares vectors by {similarity}; here they are cosine, dot and maxsim.")

    def encode(texts: Sequence[str], role: Role) -> Any:
        prompt = options.document_prompt if role == "document" else options.prompt
        return model.encode(texts, options.pooling, options.length, None, prompt, role, progress=True)

    columns = [name.strip() for name in options.columns.split(",") if name.strip()]
    return evaluate(encode, options.vectors, columns, options.limit, options.predictions, options.bootstrap,
                    is_cosine=similarity in ("", "cosine"))


def print_result(result: dict[str, Any]) -> None:
    """Print the metrics on one line, with the number of rows without a label and with a new one."""
    spread = {name: f" ± {value:.4f}" for name, value in result.get("deviations", {}).items()}
    intervals = result.get("intervals", {})
    for name, difference in result.get("differences", {}).items():
        low, high = intervals.get(name, (math.nan, math.nan))  # one group of rows has none
        bounds = f" [{low:+.4f}, {high:+.4f}]" * (name in intervals)
        spread[name] = f" (the other {result['against'][name]:.4f}, difference {difference:+.4f}{bounds})"
    if "against" not in result:
        spread |= {name: f" [{low:.4f}, {high:.4f}]" for name, (low, high) in intervals.items()}
    figures = "  ".join(f"{name} {value:.4f}{spread.get(name, '')}" for name, value in result["metrics"].items())
    seeds = f", {result['seeds']} seeds" if "seeds" in result else ""
    counts = f"{result['examples']:,} examples"
    for name, remark in (("skipped", "left out, which have no text or cannot be used"),
                         ("groups", "groups of rows (those that share texts are resampled together)"),
                         ("documents", "documents to find"),
                         ("unlabelled", "without a label and not scored"),
                         ("unread", "words beyond --data.length and so not read (raise it)"),
                         ("unseen", "with a label that training had not seen and scored as wrong")):
        counts += f", {result[name]:,} {remark}" if name in result else ""
    counts += f", threshold {result['threshold']:g}" if "threshold" in result else ""
    print(f"{result['task']}, {counts}{seeds}: {figures or 'too few rows have a label or negatives to score'}")
    if "classes" in result and "seeds" not in result:
        _print_classes(result["classes"], result.get("confusion") or [[]] * len(result["classes"]))


def _print_classes(classes: dict[str, dict[str, float]], confusion: list[list[int]]) -> None:
    """Print a table with the figures of the most frequent classes, and the confusion matrix of up to ten classes.

    The rows of the matrix are empty if there is none.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from jaxlm.tasks.remarks import quoted

    shows_confusion = len(classes) <= 10 and any(confusion)
    shown = sorted(classes, key=lambda name: -classes[name]["rows"])[:MAX_CLASSES]
    predicted = [name for name, *counts in zip(classes, *confusion, strict=False) if any(counts)]
    print("Per class:" if not shows_confusion else "Per class, with the confusion matrix:")
    table = Table(box=None)
    table.add_column("class", max_width=30)
    for name in ("precision", "recall", "f1", "rows", *(map(quoted, classes) if shows_confusion else ())):
        table.add_column(Text(name), justify="right", max_width=12)  # as it is: [b] in a name is no markup
    for (name, figures), row in zip(classes.items(), confusion, strict=True):
        if name not in shown:
            continue
        cells = [f"{figures[figure]:.3f}" for figure in ("precision", "recall", "f1")]
        predictions = [f"{n:,}" for n in row] if shows_confusion else ()
        table.add_row(Text(quoted(name)), *cells, f"{figures['rows']:,}", *predictions)
    Console(soft_wrap=False).print(table)
    if len(shown) < len(classes):
        print(f"and {len(classes) - len(shown):,} less frequent classes (--json has all)")
    if len(predicted) == 1 < len(classes):
        print(f"All rows are predicted as {predicted[0]!r}: the model does not tell the classes apart.")
        print("Try other rates (finetune --sweep optimizer.learning-rate=1e-5,1e-4,1e-3) and longer training.")
