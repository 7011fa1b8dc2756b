"""Line charts as inline SVG, drawn without a library so that a page works offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec
import numpy as np
from numpy.typing import NDArray

_WIDTH, _HEIGHT = 960, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 34
_MOST_POINTS = 1200
_COLOURS = 7
"""Classes c0 to c6 of the page's style."""

FloatArray = NDArray[np.float64]


class Line(msgspec.Struct, frozen=True):
    """One named curve; NaN leaves a gap."""

    name: str
    x: FloatArray
    y: FloatArray


class Mark(msgspec.Struct, frozen=True):
    """A vertical line with a word, such as a fault."""

    x: float
    label: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn; `log_x` and `log_y` want positive values."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    marks: Sequence[Mark] = ()
    bound: float | None = None
    """A horizontal line: the objective."""
    log_x: bool = False
    log_y: bool = False
    dots: bool = False

    def svg(self) -> str:
        """The picture; empty text where there is nothing to draw."""
        x_values = _finite([line.x for line in self.lines], positive=self.log_x)
        y_values = _finite([line.y for line in self.lines], positive=self.log_y)
        if not len(x_values) or not len(y_values):
            return ""
        if self.bound is not None:
            y_values = np.append(y_values, self.bound)
        across = _Axis(x_values, _LEFT, _WIDTH - _RIGHT, log=self.log_x, from_zero=False)
        upward = _Axis(y_values, _HEIGHT - _BOTTOM, _TOP, log=self.log_y, from_zero=True)
        label = f"{escape(self.y_label)} over {escape(self.x_label)}"
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
        parts += self._grid(across, upward)
        for number, mark in enumerate(self.marks, 1):
            x = across.place(mark.x)
            parts.append(
                f'<g class="mark"><title>{escape(mark.label)}</title>'
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
                f'<text x="{x + 3:.1f}" y="{_TOP + 10}">{number}</text></g>'
            )
        if self.bound is not None:
            y = upward.place(self.bound)
            parts.append(
                f'<line class="bound" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        for place, line in enumerate(self.lines):
            parts.append(self._curve(line, place % _COLOURS, across, upward))
        parts.append("</svg>")
        legend = "".join(
            f'<span class="c{place % _COLOURS}">{escape(line.name)}</span>'
            for place, line in enumerate(self.lines)
        )
        return f"<figure>{''.join(parts)}<figcaption>{legend}</figcaption></figure>"

    def _grid(self, across: _Axis, upward: _Axis) -> list[str]:
        parts = []
        for value in upward.ticks():
            y = upward.place(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="up" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:g}</text>'
            )
        for value in across.ticks():
            x = across.place(value)
            parts.append(
                f'<text class="across" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}">{value:g}</text>'
            )
        parts.append(
            f'<text class="across" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 3}">'
            f"{escape(self.x_label)}</text>"
            f'<text class="up" transform="translate(12 {_TOP}) rotate(-90)">'
            f"{escape(self.y_label)}</text>"
        )
        return parts

    def _curve(self, line: Line, colour: int, across: _Axis, upward: _Axis) -> str:
        x, y = _thinned(line.x, line.y)
        steps, pen_down = [], False
        dots = []
        for x_value, y_value in zip(x.tolist(), y.tolist(), strict=True):
            drawable = math.isfinite(y_value) and (y_value > 0 or not self.log_y)
            if drawable:
                at = f"{across.place(x_value):.1f} {upward.place(y_value):.1f}"
                steps.append(f"{'L' if pen_down else 'M'}{at}")
                if self.dots:
                    x_at, y_at = at.split()
                    dots.append(
                        f'<circle class="c{colour}" cx="{x_at}" cy="{y_at}" r="4">'
                        f"<title>{escape(line.name)}: {y_value:g}</title></circle>"
                    )
            pen_down = drawable
        return f'<path class="c{colour}" d="{"".join(steps)}"/>{"".join(dots)}'


class _Axis:
    def __init__(
        self, values: FloatArray, start: float, end: float, *, log: bool, from_zero: bool
    ) -> None:
        self._log = log
        self._start, self._end = start, end
        low, high = float(values.min()), float(values.max())
        if not log and from_zero:
            low = min(low, 0.0)
        if low == high:
            high = low * 2 if log else low + 1
        self._low, self._high = low, high

    def place(self, value: float) -> float:
        low, high = self._low, self._high
        if self._log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-12))
        return self._start + (self._end - self._start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self._log:
            first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [value for value in values if self._low <= value <= self._high]
        rough = (self._high - self._low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough)
        first_step = math.ceil(self._low / step)
        return [round(step * at, 12) for at in range(first_step, math.floor(self._high / step) + 1)]


def _finite(arrays: list[FloatArray], *, positive: bool) -> FloatArray:
    values: FloatArray = np.concatenate([*arrays, np.empty(0)])
    wanted = np.isfinite(values) & ((values > 0) | (not positive))
    return values[wanted]


def _thinned(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most _MOST_POINTS points: of each stretch the highest, so that no spike is lost."""
    if len(x) <= _MOST_POINTS:
        return x, y
    size = -(-len(x) // _MOST_POINTS)
    rows = -(-len(x) // size)
    padded = np.full(rows * size, -np.inf)
    padded[: len(y)] = np.where(np.isnan(y), -np.inf, y)
    best = np.minimum(
        padded.reshape(rows, size).argmax(axis=1) + np.arange(rows) * size, len(x) - 1
    )
    return x[best], y[best]
