"""The pictures of a report, as small PNG files; no screen is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from models.metrics import Values
from models.quantize import Range

DPI = 110
COLOURS = ("#1f6f8b", "#d1603d", "#5b8c5a", "#7d5ba6", "#8a817c")


def variants(points: Mapping[str, tuple[float, float, float, float]], path: Path) -> None:
    """MB, and the loss of NDCG@10 in % with its interval, a row a graph."""
    figure = Figure(figsize=(6.6, 1.3 + 0.36 * len(points)), layout="constrained")
    small, lost = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(points))[::-1]
    small.set_title("size, MB", loc="left", fontsize=11)
    bars = small.barh(rows, [point[0] for point in points.values()], 0.6, color=COLOURS[0])
    small.bar_label(bars, fmt="%.2f", padding=3)
    small.set_yticks(rows, list(points))
    small.margins(x=0.2)
    lost.set_title("NDCG@10 lost against fp32, %", loc="left", fontsize=11)
    for row, (_, loss, low, high) in zip(rows, points.values(), strict=True):
        error = [[loss - low], [high - loss]]
        lost.errorbar([loss], [row], xerr=error, fmt="o", capsize=4, color=COLOURS[1])
    lost.axvline(0, color="#999999", linewidth=0.8)
    for axes in (small, lost):
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def latency(times_ms: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Milliseconds of a batch by graph, a group of bars for each number of users."""
    figure = _figure("time of a batch, one thread", "users with 100 candidates each", "ms, median")
    (axes,) = figure.axes
    sizes = list(next(iter(times_ms.values())))
    width = 0.8 / len(times_ms)
    for at, ((name, times), colour) in enumerate(
        zip(times_ms.items(), _colours(times_ms), strict=True)
    ):
        places = np.arange(len(sizes)) + (at - (len(times_ms) - 1) / 2) * width
        bars = axes.bar(places, [times[size] for size in sizes], width, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.set_xticks(np.arange(len(sizes)), [str(size) for size in sizes])
    axes.legend(frameon=False)
    axes.margins(y=0.15)
    _save(figure, path)


def training(epochs: Sequence[Mapping[str, float]], path: Path) -> None:
    """The loss of each epoch, and what validation slates told, where there were any."""
    figure = _figure("training", "epoch", "loss on training slates")
    (axes,) = figure.axes
    at = [int(epoch["epoch"]) + 1 for epoch in epochs]
    lines = axes.plot(at, [epoch["loss"] for epoch in epochs], "o-", color=COLOURS[0], label="loss")
    if all("ndcg10" in epoch for epoch in epochs):
        other = axes.twinx()
        other.set_ylabel("on validation slates")
        for name, label, colour in (("ndcg10", "NDCG@10", COLOURS[1]), ("auc", "AUC", COLOURS[2])):
            values = [epoch[name] for epoch in epochs]
            lines += other.plot(at, values, "s--", color=colour, label=label)
        other.spines["top"].set_visible(False)
    axes.set_xticks(at)
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False)
    _save(figure, path)


def ranges(chosen: Mapping[str, Mapping[str, Range]], path: Path) -> None:
    """Of each activation the extremes that were seen, and the part that INT8 keeps."""
    figure = _figure("calibrated ranges of activations", "value", "")
    figure.set_figheight(1.5 + 0.28 * len(chosen))
    (axes,) = figure.axes
    places = np.arange(len(chosen))[::-1]
    for name, height, colour in (("seen", 0.7, "#d9d4cf"), ("u8", 0.35, COLOURS[0])):
        lows = [each[name].low for each in chosen.values()]
        widths = [each[name].high - each[name].low for each in chosen.values()]
        label = "seen" if name == "seen" else "kept by INT8"
        axes.barh(places, widths, height, left=lows, color=colour, label=label)
    axes.set_yticks(places, [_short(name) for name in chosen], fontsize=7)
    axes.use_sticky_edges = False
    axes.margins(x=0.05)
    figure.legend(frameon=False, ncols=2, loc="outside lower center")
    _save(figure, path)


def changes(differences: Mapping[str, Values], path: Path) -> None:
    """How many slates each variant changes by how much of NDCG@10."""
    figure = _figure("change of each slate", "NDCG@10 against fp32", "slates")
    (axes,) = figure.axes
    most = max(float(np.abs(values).max()) for values in differences.values()) or 0.01
    edges = np.linspace(-most, most, 42)
    for (name, values), colour in zip(differences.items(), _colours(differences), strict=True):
        axes.hist(values, edges.tolist(), histtype="step", label=name, color=colour, linewidth=1.4)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    _save(figure, path)


def _figure(title: str, across: str, up: str) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e2de", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure


def _colours(names: Mapping[str, object]) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(len(names))]


def _short(name: str) -> str:
    return name if len(name) <= 36 else f"...{name[-33:]}"


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
