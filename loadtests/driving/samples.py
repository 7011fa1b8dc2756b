"""What a replay saw, one row a request, and the description of the run; on disk as a folder."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtests.driving.client import Fault

FAULTS: tuple[Fault, ...] = get_args(Fault)
_VERSIONS_OF = ("httptools", "msgspec", "numpy", "uvloop", "fastapi", "uvicorn", "onnxruntime")


class RunFault(Exception):
    """A run, or a folder of one, that cannot be used."""


class Samples(msgspec.Struct, kw_only=True):
    """Columns of n requests, all [n], in order of their due time."""

    due_s: NDArray[np.float64]
    """When the request should have been sent, from the run's start."""
    late_s: NDArray[np.float64]
    """How much later the generator took it up: its own fault."""
    latency_s: NDArray[np.float64]
    """From the due time to the end, whatever the end was."""
    kind: NDArray[np.uint8]
    """Place in `spool.KINDS`."""
    status: NDArray[np.int16]
    """0 where no answer came."""
    fault: NDArray[np.uint8]
    """Place in FAULTS."""
    degraded: NDArray[np.uint16]
    """Place in the words: the header `X-Degraded`."""
    version: NDArray[np.uint16]
    """Place in the words: the header `X-Model-Version`."""
    signal_age_ms: NDArray[np.float32]
    """Age of the newest signal used, of a sample of the answers; NaN elsewhere."""
    behind_ms: NDArray[np.float32]
    """How much older the newest signal used is than the user's last click that had been
    acknowledged when the ranking was sent: 0 if it is not, infinite if no signal was used, NaN
    where no click was."""
    stages: dict[str, NDArray[np.float32]]
    """Durations in ms by name, from `Server-Timing`; NaN where not told."""
    words: list[str]
    """What `degraded` and `version` point to; the first is empty."""

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def served(self) -> NDArray[np.bool_]:
        """True for answers with a status from 200 to 299."""
        return (self.status >= 200) & (self.status < 300)

    def save(self, path: Path) -> None:
        """One compressed npz file."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {f"stage:{name}": values for name, values in self.stages.items()}
        words = np.array(self.words, dtype=np.str_)
        np.savez_compressed(path, allow_pickle=False, words=words, **columns)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `save`; raises RunFault."""
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            words = [str(word) for word in columns.pop("words")]
            stages = {
                name.removeprefix("stage:"): columns.pop(name)
                for name in list(columns)
                if name.startswith("stage:")
            }
            return cls(**columns, stages=stages, words=words)
        except Exception as error:  # numpy raises BadZipFile, ValueError, KeyError, OSError
            raise RunFault(f"{path}: not the samples of a run: {error}") from error

    @classmethod
    def merge(cls, parts: list[Self]) -> Self:
        """The rows of several generators, in order of due time."""
        words = [""]
        for part in parts:
            words += [word for word in part.words if word not in words]
        order = np.argsort(np.concatenate([part.due_s for part in parts]), kind="stable")
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])[order]
            for name in _COLUMNS
            if name not in {"degraded", "version"}
        }
        for name in ("degraded", "version"):
            places = [
                np.array([words.index(word) for word in part.words], np.uint16)[getattr(part, name)]
                for part in parts
            ]
            columns[name] = np.concatenate(places)[order]
        stages = {
            name: np.concatenate(
                [part.stages.get(name, np.full(len(part), np.nan, np.float32)) for part in parts]
            )[order]
            for name in sorted({name for part in parts for name in part.stages})
        }
        return cls(**columns, stages=stages, words=words)


_COLUMNS = tuple(name for name in Samples.__struct_fields__ if name not in {"stages", "words"})


class AppliedFault(msgspec.Struct, frozen=True):
    """One line of the schedule, as it went."""

    at_s: float
    what: str
    result: str
    done: bool = True
    """Whether it happened."""


class Description(msgspec.Struct, kw_only=True):
    """What was run, where and when: the run's `run.json`."""

    name: str
    url: str
    trace: str
    started_at: str
    timeout_ms: float
    processes: int
    max_connections: int
    generator_cpu_s: float = 0.0
    faults: list[AppliedFault] = []
    batches: dict[str, float] = {}
    """Upper bound of a batch's size to count, from the server's metrics."""
    machine: dict[str, Any] = {}


class Run(msgspec.Struct):
    """One replay: its description and its samples."""

    description: Description
    samples: Samples

    def save(self, folder: Path) -> None:
        """Write `run.json` and `samples.npz` below `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.samples.save(folder / "samples.npz")
        content = msgspec.json.format(msgspec.json.encode(self.description), indent=2)
        (folder / "run.json").write_bytes(content + b"\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `save`; raises RunFault."""
        try:
            content = (folder / "run.json").read_bytes()
            description = msgspec.json.decode(content, type=Description)
        except (OSError, msgspec.DecodeError) as error:
            raise RunFault(f"{folder}: not the folder of a run: {error}") from error
        return cls(description, Samples.load(folder / "samples.npz"))


def machine() -> dict[str, Any]:
    """Processor, cores, kernel, Python, libraries and commit of the generator's side."""
    versions = {}
    for name in _VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        **versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
