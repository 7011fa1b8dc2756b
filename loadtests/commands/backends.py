"""Every engine that this host can run, on one model: parity, speed, memory, energy."""

from __future__ import annotations

from loadtests.bench_backend import add_arguments, run

__all__ = ["add_arguments", "run"]
