"""Plots of a run's metrics."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from etils import epath

from jaxlm.errors import UserError
from jaxlm.paths import absolute, write_whole
from jaxlm.runs.folder import RunFolder
from jaxlm.training.metrics import read_metrics
from jaxlm.types import Report


def draw_curves(folder: epath.Path, report: Report, token_losses: Sequence[str] = ()) -> epath.Path | None:
    """Plot the losses, accuracies and learning rate of metrics.jsonl in curves.png, with lines where phases begin.

    Losses of the names `token_losses` are plotted with the unigram entropy of the held-out text.

    Returns:
        The file, or None if there is nothing to plot or the file cannot be written.
    """
    from matplotlib.figure import Figure  # pyplot takes a second longer to import

    lines = read_metrics(folder)
    panels = _panels(lines)
    if not panels:
        return None
    run = RunFolder.read(folder)
    entropy, phases = run.metadata.get("unigram_entropy"), run.experiment.phases[1:] if run.experiment else ()
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6 * columns, 3.5 * rows))
    figure.suptitle(absolute(folder).name)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for key, label, style in curves:
            points = [(line["step"], line[key]) for line in lines if key in line]
            axis.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
        if entropy is not None and title in token_losses:
            axis.axhline(entropy, color="grey", linestyle=":", label="unigram entropy")
        for phase in phases:
            if phase.after < lines[-1]["step"]:
                axis.axvline(phase.after, color="grey", linestyle="--", linewidth=1)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(panels):]:
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


def _panels(lines: Sequence[Mapping[str, float]]) -> dict[str, list[tuple[str, str, str]]]:
    """Return (key in `lines`, label, style) of the curves of each panel, by its title.

    The figures of a source, such as wiki_mlm_loss, are those of evaluations, and are drawn with mlm_loss.
    """
    keys = dict.fromkeys(key for line in lines for key in line)
    metrics = ("loss", "accuracy", "precision", "recall", "f1", "exact_match", "matthews", "pearson", "spearman")
    shown = [key for key in keys if key.endswith(metrics)] + [key for key in keys if key == "learning_rate"]
    panels: dict[str, list[tuple[str, str, str]]] = {}
    for key in shown:
        name = key.removeprefix("eval_")
        wholes = [other for other in keys if name not in keys and name.endswith(f"_{other}")]
        title = max(wholes, key=len, default=name)
        source = f" ({name.removesuffix(title).rstrip('_')})" * (title != name)
        curve = (key, f"held out{source}", "o-") if key != name else (key, "training", "-")
        panels.setdefault(title, []).append(curve)
    return panels
