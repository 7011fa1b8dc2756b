"""When requests come: arrival times in seconds from counts, stamps and models. Pure.

Models give a rate over time; its arrivals are a Poisson process unless told otherwise.
Every function takes its random generator, so a seed gives the same trace again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Rate = Callable[[FloatArray], FloatArray]
"""Requests a second at each time in seconds."""


def from_counts(counts: NDArray[np.int64], chance: np.random.Generator) -> FloatArray:
    """Arrivals of per-second counts, spread evenly at random inside each second."""
    seconds = np.repeat(np.arange(len(counts)), counts)
    return np.sort(seconds + chance.random(len(seconds)))


def poisson(rate: float, duration_s: float, chance: np.random.Generator) -> FloatArray:
    """A Poisson process: its count is random, its arrivals uniform given the count."""
    return np.sort(chance.random(chance.poisson(rate * duration_s)) * duration_s)


def gamma(rate: float, cv: float, duration_s: float, chance: np.random.Generator) -> FloatArray:
    """A renewal process whose gaps are gamma with coefficient of variation `cv`; 1 is Poisson."""
    shape = 1 / cv**2
    times = np.empty(0)
    last_s = 0.0
    while last_s < duration_s:
        more = max(int(rate * (duration_s - last_s) * 1.1), 1000)
        fresh = last_s + np.cumsum(chance.gamma(shape, 1 / (rate * shape), more))
        times = np.concatenate([times, fresh])
        last_s = float(times[-1])
    return times[times < duration_s]


def mmpp(
    rates: tuple[float, float],
    stays_s: tuple[float, float],
    duration_s: float,
    chance: np.random.Generator,
) -> FloatArray:
    """A Poisson process switching between two rates, with exponential stays in each."""
    parts: list[FloatArray] = []
    start_s, state = 0.0, 0
    while start_s < duration_s:
        stay_s = min(chance.exponential(stays_s[state]), duration_s - start_s)
        parts.append(start_s + poisson(rates[state], stay_s, chance))
        start_s, state = start_s + stay_s, 1 - state
    return np.concatenate(parts)


def varying(
    rate: Rate, highest: float, duration_s: float, chance: np.random.Generator
) -> FloatArray:
    """A Poisson process of a varying rate, by thinning one of the highest rate."""
    times = poisson(highest, duration_s, chance)
    return times[chance.random(len(times)) * highest < rate(times)]


def diurnal(low: float, high: float, day_s: float) -> Rate:
    """A day as a sine: lowest at its start, highest at its middle."""
    return lambda t: low + (high - low) * (1 - np.cos(2 * np.pi * t / day_s)) / 2


def step(low: float, high: float, at_s: float) -> Rate:
    """One rate until `at_s`, another after."""
    return lambda t: np.where(t < at_s, low, high)


def ramp(low: float, high: float, duration_s: float) -> Rate:
    """A straight line over the whole duration."""
    return lambda t: low + (high - low) * t / duration_s


def spike(low: float, high: float, at_s: float, for_s: float) -> Rate:
    """A high rate for a while, at once there and at once gone."""
    return lambda t: np.where((t >= at_s) & (t < at_s + for_s), high, low)


def flash_sale(low: float, high: float, at_s: float, half_life_s: float) -> Rate:
    """A jump at `at_s` that halves its excess every `half_life_s`."""
    return lambda t: np.where(
        t < at_s, low, low + (high - low) * 0.5 ** (np.maximum(t - at_s, 0) / half_life_s)
    )


def dispersion(times_s: FloatArray, window_s: float = 1.0) -> float:
    """Index of dispersion: variance over mean of the counts in windows; 1 is Poisson."""
    windows = int(times_s[-1] / window_s) if len(times_s) else 0
    if windows < 2:
        return float("nan")
    counts = np.bincount((times_s / window_s).astype(np.int64), minlength=windows)[:windows]
    return float(counts.var() / counts.mean())
