"""A page on one trained network: its ranking, its variants, its speed on this CPU, its training.

Tells figures of slates, never who or what was in them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from models import plots, speed, tracking
from models.build import Checkpoint, choose_slates
from models.compress import Subject, calibration_slates
from models.evaluate import (
    Figure,
    Report,
    as_markdown,
    evaluate,
    paired_lead,
    plain_baselines,
)
from models.log import Log
from models.metrics import SlateFigures
from models.tables import markdown
from models.variants import KINDS, Made, make_variants
from service.domain import Float32Array
from service.encoding.slate import blend
from service.inference.backends.ways import cpu_model

WORST = 8
NO_DEVICE = "not yet measured on hardware"


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page tells."""

    log: Log
    checkpoint: Checkpoint
    figures: Report
    lead: Figure
    """In NDCG@10 on clicks over the best plain order, paired by slate."""
    made: Made
    full_bytes: int
    times_ms: dict[str, dict[int, float]]
    reference: SlateFigures
    by_variant: dict[str, SlateFigures]
    steps_s: dict[str, float]


def write_report(
    log: Log, checkpoint: Checkpoint, out: Path, *, command: str, mlflow: str = ""
) -> Path:
    """Measure, and write `out/README.md` with its pictures; shows progress.

    `mlflow` is the URI of a tracking server or database that gets the run too.
    """
    if mlflow:
        tracking.check(mlflow)
    findings = _find(log, checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    made, figures = findings.made, findings.by_variant
    points = {"fp32": (findings.full_bytes / 1e6, 0.0, 0.0, 0.0)} | {
        entry.name: (
            len(entry.graph) / 1e6,
            *(100 * value for value in msgspec.structs.astuple(entry.verdict.ndcg_loss)),
        )
        for entry in made.variants
    }
    plots.variants(points, out / "variants.png")
    plots.latency(findings.times_ms, out / "latency.png")
    plots.ranges(made.ranges(), out / "ranges.png")
    plots.changes(
        {name: each.ndcg - findings.reference.ndcg for name, each in figures.items()},
        out / "changes.png",
    )
    if _has_losses(checkpoint):
        plots.training(checkpoint.epochs, out / "training.png")
    page = out / "README.md"
    page.write_text("\n\n".join(_sections(findings, command)) + "\n")
    if mlflow:
        tracking.track(mlflow, _run_of(findings), out)
    return page


def _run_of(found: Findings) -> tracking.Run:
    """What MLflow is told."""
    metrics = {
        f"{scorer.replace(' ', '_')}.{label}.{name}": figure.value
        for scorer, labels in found.figures.items()
        for label, each in labels.items()
        for name, figure in each.items()
    }
    for entry in found.made.variants:
        metrics[f"{entry.name}.ndcg10_loss"] = entry.verdict.ndcg_loss.value
        metrics[f"{entry.name}.bytes"] = float(len(entry.graph))
        metrics[f"{entry.name}.passed"] = float(entry.verdict.passed)
    checkpoint = found.checkpoint
    preset = msgspec.to_builtins(checkpoint.network.preset)
    return tracking.Run(
        experiment=f"ranker-{found.log.name}",
        params={**preset, **msgspec.to_builtins(checkpoint.recipe)},
        tags={"log_sha256": checkpoint.log_sha256},
        metrics=metrics,
        epochs=checkpoint.epochs,
    )


def _find(log: Log, checkpoint: Checkpoint) -> Findings:
    steps_s: dict[str, float] = {}

    @contextmanager
    def step(name: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        steps_s[name] = time.monotonic() - started_s

    subject, seed = Subject.of_checkpoint(checkpoint), checkpoint.recipe.seed
    with step("encode the test slates"):
        slates = choose_slates(log, checkpoint.network.preset)
    with step("evaluate, with intervals"):
        baselines = plain_baselines(log, slates.shown, subject.spec.tile_width, seed=seed)
        figures = evaluate(checkpoint.network, slates.encoded, baselines, subject.output, seed=seed)
    with step("calibrate, quantize and judge every variant"):
        calibration = calibration_slates(log, subject.spec)
        made = make_variants(subject.graph, calibration, slates.encoded, subject.output)
    label = slates.encoded.click.astype(np.float64)

    def each_slate(logits: Float32Array) -> SlateFigures:
        return SlateFigures(blend(logits, subject.output), label, slates.encoded.tile_user)

    with step("time the graphs for the CPU"):
        on_cpu = {e.name: e.graph for e in made.variants if KINDS[e.name].on_cpu}
        times_ms = speed.compare({"fp32": subject.graph, **on_cpu}, slates.encoded)
    reference = each_slate(made.reference)
    plain = SlateFigures(baselines[_best_baseline(figures)], label, slates.encoded.tile_user)
    return Findings(
        log=log,
        checkpoint=checkpoint,
        figures=figures,
        lead=paired_lead(reference.ndcg, plain.ndcg, seed=seed),
        made=made,
        full_bytes=len(subject.graph),
        times_ms=times_ms,
        reference=reference,
        by_variant={entry.name: each_slate(entry.logits) for entry in made.variants},
        steps_s=steps_s,
    )


def _sections(found: Findings, command: str) -> list[str]:
    preset = found.checkpoint.network.preset
    cpu = cpu_model() or "an unknown CPU"
    title = f"# {found.log.name}: width {preset.width}, {preset.encoder_layers} encoder layers"
    training = (
        "![training](training.png)"
        if _has_losses(found.checkpoint)
        else "This checkpoint does not tell the losses of its epochs."
    )
    return [
        title,
        _summary(found),
        f"Written by `{_without_folders(command)}`.",
        "## Ranking",
        f"{len(found.reference):,} slates of the test days, 95% intervals over slates.",
        as_markdown(found.figures),
        "## Graphs",
        _variants(found),
        "![size and quality](variants.png)",
        "![time of a batch](latency.png)",
        f"Times are of {cpu}, ONNX Runtime, one thread, the graphs in turn in one process.",
        "## Slates",
        "![change of each slate](changes.png)",
        _worst(found),
        "## Calibration",
        "Ranges that INT8 keeps of each activation, from slates before the test days.",
        "![calibrated ranges](ranges.png)",
        "## Training",
        training,
        "## Time",
        markdown(("step", "s"), ((name, f"{took:.1f}") for name, took in found.steps_s.items())),
    ]


def _summary(found: Findings) -> str:
    """A paragraph for who decides."""
    network, plain = found.figures["network"]["click"], _best_baseline(found.figures)
    baseline = found.figures[plain]["click"]
    passed = [entry for entry in found.made.variants if entry.verdict.passed]
    ours = f"NDCG@10 {network['ndcg10']} and AUC {network['auc']}"
    theirs = f"{baseline['ndcg10']} and {baseline['auc']}"
    told = [
        _trained_on(found),
        f"On clicks it has {ours}; the best plain order, by {plain}, has {theirs}.",
    ]
    told.append(f"Paired by slate, its lead in NDCG@10 is {found.lead}: {_meaning(found.lead)}.")
    if passed:
        smallest = min(passed, key=lambda entry: len(entry.graph))
        ratio = found.full_bytes / len(smallest.graph)
        told.append(
            f"The smallest graph that passes the gate, {smallest.name}, is {ratio:.2f} times "
            f"smaller than fp32 and loses {smallest.verdict.ndcg_loss} of NDCG@10, where the gate "
            f"allows {smallest.verdict.limits.max_ndcg_loss:.1%}; below 0 is a gain."
        )
        if (times := found.times_ms.get(smallest.name)) is not None:
            each = ", ".join(
                f"{took:.2f} ms against {found.times_ms['fp32'][users]:.2f} ms for {_users(users)}"
                for users, took in times.items()
            )
            told.append(f"On this CPU it takes, against fp32, {each}.")
    failed = [entry.name for entry in found.made.variants if not entry.verdict.passed]
    told.append(f"The gate refused {', '.join(failed) if failed else 'no graph'}.")
    return " ".join(told)


def _meaning(lead: Figure) -> str:
    if lead.low > 0:
        return "above 0"
    return "it is behind" if lead.high < 0 else "these slates show no lead for sure"


def _trained_on(found: Findings) -> str:
    rows = found.log.before(found.log.validate_from_ms)
    first, last = (
        time.strftime("%d %B %Y", time.gmtime(rows["at_ms"][at] / 1e3)).lstrip("0")
        for at in (0, -1)
    )
    return (
        f"To learn from, the network had {len(rows):,} impressions of {rows['user'].n_unique():,} "
        f"users, {first} to {last} (UTC); it is judged on the days after them."
    )


def _best_baseline(figures: Report) -> str:
    plain = [name for name in figures if not name.startswith("network")]
    return max(plain, key=lambda name: figures[name]["click"]["ndcg10"].value)


def _variants(found: Findings) -> str:
    users = list(found.times_ms["fp32"])
    head = ("graph", "MB", "smaller", "NDCG@10 lost", "first ten", "tau", "gate")
    rows = [("fp32", f"{found.full_bytes / 1e6:.2f}", "", "", "", "", "", *_times(found, "fp32"))]
    for entry in found.made.variants:
        verdict = entry.verdict
        rows.append(
            (
                entry.name,
                f"{len(entry.graph) / 1e6:.2f}",
                f"{found.full_bytes / len(entry.graph):.2f}",
                str(verdict.ndcg_loss),
                f"{verdict.overlap:.3f}",
                f"{verdict.kendall_tau:.3f}",
                "passes" if verdict.passed else "; ".join(verdict.failures),
                *_times(found, entry.name),
            )
        )
    return markdown((*head, *(f"ms, {_users(count)}" for count in users)), rows)


def _times(found: Findings, name: str) -> list[str]:
    if name in found.times_ms:
        return [f"{took:.2f}" for took in found.times_ms[name].values()]
    return [NO_DEVICE] * len(found.times_ms["fp32"])


def _worst(found: Findings) -> str:
    """The slates that fp32 ranks worst, and those that a graph for the CPU changes most."""
    name = next((each for each in found.by_variant if KINDS[each].on_cpu), "")
    reference, size = found.reference, found.reference.size
    clicks = np.bincount(reference.owner, reference.labels).astype(int)
    variant = found.by_variant[name].ndcg if name else reference.ndcg
    chosen = {
        "ranked worst": np.lexsort((-size, reference.ndcg))[:WORST],
        f"{name} loses most": np.argsort(variant - reference.ndcg, kind="stable")[:WORST],
    }
    rows = [
        (why, str(at), str(size[at]), str(clicks[at]), f"{reference.ndcg[at]:.3f}",
         f"{variant[at]:.3f}")
        for why, places in chosen.items()
        for at in places.tolist()
    ]  # fmt: skip
    head = ("why", "slate", "candidates", "clicked", "NDCG@10, fp32", f"NDCG@10, {name or 'fp32'}")
    return markdown(head, rows)


def _users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def _without_folders(command: str) -> str:
    """A command line whose paths from elsewhere are cut to their names, without URIs."""

    def cut(word: str) -> str:
        option, equals, path = word.rpartition("=")
        if "://" in path:
            return f"{option}{equals}URI"
        elsewhere = path.startswith(("/", ".."))
        return f"{option}{equals}{Path(path).name}" if elsewhere else word

    return shlex.join(cut(word) for word in shlex.split(command))


def _has_losses(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.epochs) and all("loss" in epoch for epoch in checkpoint.epochs)
