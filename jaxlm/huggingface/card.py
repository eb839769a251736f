"""Model card: the README.md of an exported folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxlm import __version__
from jaxlm.huggingface.family import TransformersModel
from jaxlm.huggingface.sentence_transformers import MULTI_VECTOR
from jaxlm.huggingface.tasks import SETTINGS_KEY
from jaxlm.objectives.base import Objective
from jaxlm.tasks.rerank import Rerank
from jaxlm.types import Vectors


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """What the parameters do not show."""

    rows: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Rows about the training, by their title; empty ones are left out."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Last evaluation on held-out documents, by the names of metrics.jsonl (`eval_loss`, ...)."""


def render(
    card: ModelCard, objective: Objective, models: tuple[TransformersModel, ...], parameters: int, name: str,
    vectors: Vectors | None = None,
) -> str:
    """Render the card as Markdown with the hub's YAML header.

    The first of `models` is the main one. `vectors` are those of a folder for sentence-transformers.
    """
    main, m = models[0], objective.model
    threshold = main.config.get(SETTINGS_KEY, {}).get("threshold")
    model_type = main.config["model_type"]
    is_reranker = isinstance(objective, Rerank)
    library = "sentence-transformers" if is_reranker or (vectors and vectors.similarity) else "transformers"
    header = ["---", f"library_name: {library}", f"pipeline_tag: {main.pipeline_tag}", "tags:", "- jaxlm",
              f"- {model_type}", "---"]
    rows: list[tuple[str, object]] = [
        ("Family", f"{model_type} ({', '.join(model.architecture for model in models)})"),
        ("Objective", type(objective).__name__),
        ("Labels", ", ".join(main.config.get("id2label", {}).values())),
        ("Predicted labels", f"those with a sigmoid above {threshold:g}" if threshold else ""),
        ("Parameters", f"{parameters:,}"),
        ("Layers, width, heads", f"{m.num_layers}, {m.hidden_size}, {m.num_heads}"),
        *card.rows.items(),
        ("Written by", f"jaxlm {__version__}"),
    ]
    lines = [*header, "", f"# {name}", ""]
    lines += [f"Trained with jaxlm and saved as a Transformers {main.architecture}.", "", "| | |", "|---|---|"]
    lines += [f"| {cell(key)} | {cell(value)} |" for key, value in rows if value not in ("", None)]
    lines += ["", "## Held-out evaluation", ""]
    if card.metrics:
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| {cell(key)} | {decimal(value)} |" for key, value in card.metrics.items()]
        if "eval_loss" in card.metrics:
            lines += [
                "", "Losses are means in nats per prediction, over documents that training did not see; `eval_loss` is "
                "what training minimises: the weighted sum of the others, averaged over batches.",
            ]
    else:
        lines += ["No evaluation was recorded."]
    return "\n".join([*lines, "", "## Use", "", *_use(models, name, vectors, is_reranker)])


def _use(
    models: tuple[TransformersModel, ...], name: str, vectors: Vectors | None, is_reranker: bool
) -> list[str]:
    """Return the lines that say how the folder is loaded; the arguments are those of `render`."""
    lines = []
    if is_reranker:
        lines += [
            "```python",
            "from sentence_transformers import CrossEncoder",
            f"scores = CrossEncoder({name!r}).predict([('A query', 'a passage'), ('A query', 'another one')])",
            "```",
            "",
        ]
    for model in models:
        where = f"{name}/{model.folder}".rstrip("/")
        lines += [
            "```python",
            *([f"import {model.module}"] if model.module else []),
            f"from transformers import {model.auto_class}, AutoTokenizer",
            f"tokenizer = AutoTokenizer.from_pretrained({where!r})",
            f"model = {model.auto_class}.from_pretrained({where!r})",
            "```",
            "",
            *([model.remark, ""] if model.remark else []),
        ]
    lines += [
        "Other classes (`AutoModel`, those of tasks) report layers that they do not have as UNEXPECTED, such as heads "
        "of pretraining, and layers of their own that are not in the folder as MISSING: these begin with random values "
        "and are to be trained. Neither is a fault of the folder.", "",
    ]
    if vectors:
        shorter = f"  # truncate_dim={vectors.widths[0]} for shorter vectors" if vectors.widths else ""
        is_late = vectors.similarity == "maxsim"
        kind, pooling = (MULTI_VECTOR, "") if is_late else ("SentenceTransformer", f" --pooling {vectors.pooling}")
        lines += [
            f"For vectors of texts, those of `jaxlm embed{pooling}`:", "",
            "```python",
            f"from sentence_transformers import {kind}",
            f"model = {kind}({name!r}){shorter}",
        ]
        if is_late or any(text for _, text in vectors.prompts):
            lines += ["queries = model.encode_query(['A query'])", "passages = model.encode_document(['A passage.'])"]
        else:
            lines.append("vectors = model.encode(['A sentence.'])")
        lines += ["```", ""]
    return lines


def decimal(value: float) -> str:
    """Format a metric with four decimals or, if large, four significant digits."""
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:.4g}"


def cell(value: object) -> str:
    """Format a table cell: one line, with pipes escaped."""
    return " ".join(str(value).split()).replace("|", "\\|")
