"""Reads the part of the Dockerfile language that our Dockerfile uses; anything else is a fault."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_INERT = {"LABEL", "EXPOSE", "HEALTHCHECK"}
_KNOWN = {"ARG", "COPY", "ENTRYPOINT", "ENV", "RUN", "USER", "WORKDIR"} | _INERT


class DockerfileFault(Exception):
    """The file holds something that is not read here."""


@dataclass(frozen=True)
class Step:
    """One instruction; `text` is without line breaks and its word."""

    word: str
    text: str

    def variables(self) -> dict[str, str]:
        """The names and values of an ENV or ARG step; an ARG without a value has none."""
        pairs = re.findall(r"(\w+)=(?:\"([^\"]*)\"|(\S*))", self.text)
        return {name: quoted or plain for name, quoted, plain in pairs}


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    steps: list[Step] = field(default_factory=list)

    @property
    def entrypoint(self) -> list[str]:
        """The words of the ENTRYPOINT, which must be in exec form."""
        words = [step.text for step in self.steps if step.word == "ENTRYPOINT"]
        if not words or not words[-1].startswith("["):
            raise DockerfileFault("the stage has no ENTRYPOINT in exec form")
        return [str(word) for word in json.loads(words[-1])]

    @property
    def user(self) -> str:
        """The last USER, root if none."""
        return next((step.text for step in reversed(self.steps) if step.word == "USER"), "0:0")

    def sources(self) -> list[str]:
        """Other stages that this one copies from."""
        return [found for step in self.steps for found in re.findall(r"--from=(\S+)", step.text)]


def read_stages(text: str) -> dict[str, Stage]:
    """Stages by name; raises DockerfileFault."""
    stages: dict[str, Stage] = {}
    shared: dict[str, str] = {}
    stage: Stage | None = None
    for line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        step = Step(word.upper(), rest.strip())
        if step.word == "FROM":
            base, _, name = step.text.partition(" AS ")
            stage = stages[name] = Stage(expand(base, shared))
        elif step.word not in _KNOWN:
            raise DockerfileFault(f"instruction {word} is not read here")
        elif stage is None:
            shared |= step.variables()
        else:
            stage.steps.append(step)
    return stages


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $NAME and ${NAME}; raises DockerfileFault for an unknown one."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise DockerfileFault(f"no value for ${name} in: {text}")
        return variables[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def _logical_lines(text: str) -> list[str]:
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(kept)).splitlines()
