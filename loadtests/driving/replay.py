"""A replay: generators in processes of their own, faults on schedule, progress, one Run."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from loadtests.driving import faults, generator
from loadtests.driving.generator import Order, Pulse
from loadtests.driving.samples import AppliedFault, Description, Run, RunFault, Samples, machine
from loadtests.driving.spool import Spool, Wire
from loadtests.driving.target import Target
from loadtests.traces.trace import Record

_LEAD_S = 0.3
"""From the word to start until time 0 of the trace."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is replayed."""

    name: str = "replay"
    trace: str = ""
    timeout_s: float = 1.0
    processes: int = 1
    targets: Sequence[Target] = ()
    """Servers that the processes take in turn, in place of the wire's one."""
    connections: int = 32
    """Warm connections of each process before the start."""
    max_connections: int = 1024
    """Most connections of each process."""
    cores: Sequence[int] = ()
    realtime: bool = False
    """Generators go before every ordinary process of their cores; needs the right to."""
    schedule: Sequence[faults.Entry] = ()
    pids: Mapping[str, int] = {}
    quiet: bool = False


def replay(records: Sequence[Record], wire: Wire, plan: Plan) -> Run:
    """Send every record on time; raises RunFault where no generator could start."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        Spool.build(records, wire, Path(folder), total=len(records))
        return asyncio.run(_replay(Path(folder), wire, plan))


async def _replay(folder: Path, wire: Wire, plan: Plan) -> Run:
    context = multiprocessing.get_context("spawn")
    crew = []
    for part in range(plan.processes):
        ours, theirs = context.Pipe()
        order = Order(
            folder=str(folder),
            part=part,
            parts=plan.processes,
            target=plan.targets[part % len(plan.targets)] if plan.targets else wire.target,
            connections=plan.connections,
            max_connections=plan.max_connections,
            timeout_s=plan.timeout_s,
            core=plan.cores[part % len(plan.cores)] if plan.cores else None,
            realtime=plan.realtime,
        )
        process = context.Process(target=generator.work, args=(order, theirs), daemon=True)
        process.start()
        theirs.close()
        crew.append((process, ours))
    try:
        for _, pipe in crew:
            await _receive(pipe)
        description = Description(
            name=plan.name,
            url=", ".join(
                f"{target.host}:{target.port}{target.path}"
                for target in plan.targets or [wire.target]
            ),
            trace=plan.trace,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            timeout_ms=plan.timeout_s * 1e3,
            processes=plan.processes,
            max_connections=plan.max_connections,
            machine=machine(),
        )
        start_s = perf_counter() + _LEAD_S
        for _, pipe in crew:
            pipe.send(start_s)
        pending = [
            asyncio.create_task(
                faults.apply(entry, start_s=start_s, target=wire.target, processes=plan.pids)
            )
            for entry in plan.schedule
        ]
        progress = Progress(len(crew), quiet=plan.quiet)
        results = await asyncio.gather(
            *(_follow(pipe, part, progress) for part, (_, pipe) in enumerate(crew))
        )
        description.faults = await _finished(plan.schedule, pending, perf_counter() - start_s)
        description.generator_cpu_s = sum(cpu_s for _, cpu_s in results)
        samples = Samples.merge([Samples.load(Path(path)) for path, _ in results])
    except BaseException:
        for process, _ in crew:
            process.terminate()
        raise
    finally:
        for process, pipe in crew:
            process.join()
            pipe.close()
    return Run(description, samples)


async def _finished(
    schedule: Sequence[faults.Entry], pending: list[asyncio.Task[AppliedFault]], ended_s: float
) -> list[AppliedFault]:
    """What came of each entry; one whose time lies beyond the trace is not waited for."""
    results = []
    for entry, task in zip(schedule, pending, strict=True):
        if entry.at_s > ended_s:
            task.cancel()
            results.append(
                AppliedFault(entry.at_s, entry.what, "not reached: the trace ended", done=False)
            )
        else:
            results.append(await task)
    return results


async def _receive(pipe: Connection) -> object:
    try:
        message = await asyncio.to_thread(pipe.recv)
    except EOFError as error:
        raise RunFault("a generator died; its error stands above") from error
    if isinstance(message, str) and message != "ready":
        raise RunFault(message)
    return message


async def _follow(pipe: Connection, part: int, progress: Progress) -> tuple[str, float]:
    while True:
        message = await _receive(pipe)
        if isinstance(message, Pulse):
            progress.take(part, message)
        else:
            assert isinstance(message, tuple)
            path, cpu_s = message
            return str(path), float(cpu_s)


class Progress:
    """One line on stderr: each second on a terminal, each tenth second elsewhere."""

    def __init__(self, parts: int, *, quiet: bool) -> None:
        self._latest: dict[int, Pulse] = {}
        self._parts = parts
        self._quiet = quiet
        self._seconds = 0

    def take(self, part: int, pulse: Pulse) -> None:
        """Note one generator's second; print once all have told theirs."""
        self._latest[part] = pulse
        if len(self._latest) < self._parts:
            return
        pulses = list(self._latest.values())
        self._latest = {}
        self._seconds += 1
        terminal = sys.stderr.isatty()
        if self._quiet or not (terminal or self._seconds % 10 == 0):
            return
        latencies_s = np.concatenate([pulse.latencies_s for pulse in pulses])
        p99_ms = np.percentile(latencies_s, 99) * 1e3 if len(latencies_s) else float("nan")
        sent, done, failed, answers = (
            sum(getattr(pulse, name) for pulse in pulses)
            for name in ("sent", "done", "failed", "answers")
        )
        print(
            f"{self._seconds:5d} s  sent {sent}  on the way {sent - done}  failed {failed}  "
            f"last second: {answers} answers, p99 {p99_ms:.2f} ms",
            end="\r" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
