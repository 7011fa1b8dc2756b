"""Judge a run again and write its page, its text and its HdrHistogram log."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtests.commands import arguments
from loadtests.driving.samples import Run
from loadtests.verdicts.curve import Curve
from loadtests.verdicts.hdrlog import write_log
from loadtests.verdicts.page import run_page
from loadtests.verdicts.slo import Objective
from loadtests.verdicts.summary import summarise
from loadtests.verdicts.text import curve_text, run_text

_MANY = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--curve", type=Path, help="a curve.json to show on the page")
    arguments.add_objective(parser)


def run(args: argparse.Namespace) -> int:
    curve = Curve.load(args.curve) if args.curve else None
    return publish(
        Run.load(args.run_folder), args.run_folder, arguments.objective(args), curve=curve
    )


def publish(run: Run, folder: Path, objective: Objective, *, curve: Curve | None = None) -> int:
    """Write `report.html`, `report.txt`, `latency.hlog`; print the text; return the verdict."""
    summary = summarise(run.samples)
    undone = sum(not fault.done for fault in run.description.faults)
    judged = objective.judge(summary, undone=undone)
    text = run_text(run, summary, judged)
    if curve is not None:
        text += "\n" + curve_text(curve)
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.html").write_text(run_page(run, summary, judged, curve))
    write_log(folder / "latency.hlog", run.samples)
    print(f"{text}\npage: {folder / 'report.html'}")
    if summary.degraded.get("unknown_items", 0) > _MANY * summary.served:
        print("most rankings were of items that the model does not know; see --items")
    return judged.verdict
