"""Latencies as an HdrHistogram log, which its plotters and other tools read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogWriter

from loadtests.driving.samples import Samples
from loadtests.verdicts.summary import timed

_HIGHEST_US = 3_600_000_000
_FIGURES = 3
_MOST_INTERVALS = 60


def write_log(path: Path, samples: Samples) -> None:
    """Intervals of at least a second, values in µs told in ms, 3 significant figures."""
    rows = timed(samples)
    due_s, latency_us = samples.due_s[rows], (samples.latency_s[rows] * 1e6).astype(np.int64)
    length_s = max(1.0, float(due_s[-1]) / _MOST_INTERVALS) if len(due_s) else 1.0
    interval = (due_s / length_s).astype(np.int64)
    with path.open("w") as file:
        log = HistogramLogWriter(file)
        log.output_log_format_version()
        log.output_legend()
        for number in np.unique(interval):
            histogram = HdrHistogram(1, _HIGHEST_US, _FIGURES)
            values, counts = np.unique(latency_us[interval == number], return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                histogram.record_value(max(value, 1), count)
            start_s = float(number) * length_s
            log.output_interval_histogram(histogram, start_s, start_s + length_s, 1000.0)
