"""Plots of a run's metrics."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from etils import epath

from jaxlm.errors import UserError
from jaxlm.paths import write_whole
from jaxlm.runs.folder import RunFolder
from jaxlm.training.metrics import read_metrics
from jaxlm.types import Report


def draw_curves(folder: epath.Path, report: Report, token_losses: Sequence[str] = ()) -> epath.Path | None:
    """Plot the training and held-out losses and accuracies of metrics.jsonl in curves.png.

    Args:
        folder: The run folder.
        report: Receives a message if the file cannot be written.
        token_losses: Names of losses to plot with the unigram entropy of the held-out text.

    Returns:
        The file, or None if there is nothing to plot or the file cannot be written.
    """
    from matplotlib.figure import Figure  # pyplot takes a second longer to import

    lines = read_metrics(folder)
    names = dict.fromkeys(name.removeprefix("eval_") for line in lines for name in line)
    metrics = ("loss", "accuracy", "precision", "recall", "f1", "exact_match", "matthews", "pearson", "spearman")
    names = [name for name in names if name.endswith(metrics)]
    if not names:
        return None
    entropy = RunFolder.read(folder).metadata.get("unigram_entropy")
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(6 * columns, 3.5 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for key, label, style in ((name, "training", "-"), (f"eval_{name}", "held out", "o-")):
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
        if entropy is not None and name in token_losses:
            axis.axhline(entropy, color="grey", linestyle=":", label="unigram entropy")
        axis.set(title=name, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(names):]:
        axis.set_visible(False)
    figure.tight_layout()
    path, image = folder / "curves.png", io.BytesIO()
    figure.savefig(image, dpi=100)
    try:
        write_whole(path, image.getvalue())
    except UserError as error:
        report(f"The curves are not drawn: {error}")
        return None
    return path
