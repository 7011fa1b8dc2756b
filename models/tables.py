"""Tables in Markdown, as pages and terminals show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line for the head, one for the rule below it, and one a row."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])
