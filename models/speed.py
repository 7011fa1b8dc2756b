"""How long graphs take on this CPU, side by side: one process, one batch of each in turn.

`compare` times graphs in ONNX Runtime on given slates; `race` times engines, graphs and tile
widths as the service runs them, on random requests.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from models.calibrate import observe
from models.dataset import Examples
from models.export import to_onnx
from models.network import Network
from models.presets import Preset
from models.session import Feeds, open_session
from models.tables import markdown
from models.tune import libraries
from models.variants import KINDS
from service.bundle import BatchSpec
from service.domain import BackendKind, Float32Array, Int32Array
from service.encoding.batch import Batch
from service.encoding.history import CONTEXT_WIDTH
from service.encoding.rows import AGE_BUCKETS, BLOCK_SIZES, BLOCK_START, HASHED_ROWS_START
from service.errors import BackendFault, BundleFault, ManifestFault
from service.inference.backends.base import Backend
from service.inference.backends.cuda import Unavailable
from service.inference.backends.select import Source, open_backend
from service.inference.backends.ways import ON_CPU, cpu_model, precision_of

CANDIDATES = 100
USERS = (1, 8)
RACE_USERS = (1, 8, 32)
EACH_S = 3.0
"""Default of seconds for each engine and number of users."""
_RUNS = 16
"""Users in the runs of one turn of an engine."""
_SLATES = 32
"""Random requests."""
_FEW_WORDS = 50
"""Values of a word like a category or a surface."""
_EXTENSIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_WARM = 5
_ROUNDS = 200


def batch_of(examples: Examples, users: int) -> Feeds:
    """Slates of `CANDIDATES` for so many users, made of the examples' own rows."""
    tiles = -(-CANDIDATES // examples.cand_ids.shape[1])
    people = np.arange(users) % len(examples.at_ms)
    return {
        "hist_ids": examples.hist_ids[people],
        "hist_age": examples.hist_age[people],
        "hist_mask": examples.hist_mask[people],
        "ctx_ids": examples.ctx_ids[people],
        "cand_ids": examples.cand_ids[np.arange(users * tiles) % len(examples.cand_ids)],
        "tile_user": np.repeat(np.arange(users, dtype=np.int32), tiles),
    }


def compare(
    graphs: Mapping[str, bytes],
    examples: Examples,
    *,
    users: Sequence[int] = USERS,
    threads: int = 1,
    rounds: int = _ROUNDS,
) -> dict[str, dict[int, float]]:
    """Median milliseconds of a run, by graph and number of users."""
    sessions = {name: open_session(graph, threads=threads) for name, graph in graphs.items()}
    found: dict[str, dict[int, float]] = {name: {} for name in graphs}
    for count in users:
        feeds = batch_of(examples, count)
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in tqdm(range(rounds), desc=f"time {count} users", leave=False, mininterval=1):
            for name, session in sessions.items():
                taken[name].append(_time_ms(session, feeds))
        for name, values in taken.items():
            found[name][count] = float(np.median(values[_WARM:]))
    return found


def _time_ms(session: Any, feeds: Feeds) -> float:
    started_s = time.perf_counter()
    session.run(None, feeds)
    return (time.perf_counter() - started_s) * 1e3


class Entrant(NamedTuple):
    """A way to run a network."""

    engine: BackendKind
    graph: str
    tile_width: int


BASELINE = Entrant("onnx-cpu", "fp32", CANDIDATES)
"""One tile a request, one thread."""


class Lap(NamedTuple):
    """Median µs a request of one number of users, and how many times as fast as the baseline."""

    users: int
    us: float
    ratios: tuple[float, float, float]
    """Quartiles over turns, each against the baseline's turn before it."""


def race(
    network: Network, *, users: Sequence[int] = RACE_USERS, each_s: float = EACH_S
) -> dict[Entrant, list[Lap]]:
    """Time every engine, graph and tile width with one thread; the baseline first.

    Ranges of quantized graphs come from the random requests: times hold, scores do not.
    """
    widths = dict.fromkeys((CANDIDATES, network.preset.tile_width))
    examples = {width: random_examples(_tiled(network.preset, width)) for width in widths}
    with ExitStack() as opened:
        engines: dict[Entrant, Backend] = {}
        batches: dict[tuple[Entrant, int], Batch] = {}
        for source, entrant in _entrants(network, examples, users):
            fed = {
                (entrant, count): Batch(**batch_of(examples[entrant.tile_width], count))
                for count in users
            }
            try:
                engine = opened.enter_context(closing(open_backend(entrant.engine, source)))
                for batch in fed.values():
                    engine.score(batch)
            except (Unavailable, BundleFault, BackendFault) as error:
                tqdm.write(f"{entrant}: left out: {str(error).splitlines()[0]}")
                continue
            engines[entrant] = engine
            batches |= fed
        if BASELINE not in engines:
            raise ManifestFault("the baseline does not run here")
        laps: dict[Entrant, list[Lap]] = {entrant: [] for entrant in engines}
        for count in users:
            turns = {entrant: (engines[entrant], batches[entrant, count]) for entrant in engines}
            times_us = _take_turns(turns, count, each_s * len(engines))
            for entrant, taken in times_us.items():
                low, middle, high = map(
                    float, np.percentile(times_us[BASELINE] / taken, (25, 50, 75))
                )
                laps[entrant].append(Lap(count, float(np.median(taken)), (low, middle, high)))
    return laps


def _tiled(preset: Preset, width: int) -> Preset:
    return msgspec.structs.replace(preset, tile_width=width)


def _entrants(
    network: Network, examples: Mapping[int, Examples], users: Sequence[int]
) -> Iterator[tuple[Source, Entrant]]:
    for width, seen in examples.items():
        tiled = copy.copy(network)
        tiled.preset = _tiled(network.preset, width)
        fp32 = to_onnx(tiled)
        int8 = KINDS["int8-cpu"].rewrite(fp32, observe(fp32, seen))
        tiles = -(-CANDIDATES // width)
        limits = BatchSpec(
            max_users=max(users), tile_buckets=tuple(sorted(count * tiles for count in users))
        )
        for engine in reversed(ON_CPU):
            for name, graph in (("fp32", fp32), ("int8-cpu", int8)):
                source = Source(
                    name="race",
                    graph=graph,
                    precision=precision_of(name),
                    spec=tiled.preset.input_spec(),
                    limits=limits,
                )
                yield source, Entrant(engine, name, width)


def _take_turns(
    turns: Mapping[Entrant, tuple[Backend, Batch]], users: int, whole_s: float
) -> dict[Entrant, Float32Array]:
    """Microseconds a request of each engine's turns, until the time is over."""
    runs = max(1, _RUNS // users)
    taken: dict[Entrant, list[float]] = {entrant: [] for entrant in turns}
    ends_s = time.perf_counter() + whole_s
    with tqdm(desc=f"race {users} users", leave=False, mininterval=1) as progress:
        while time.perf_counter() < ends_s or not all(taken.values()):
            for entrant, (engine, batch) in turns.items():
                engine.score(batch)  # untimed: the engine before left the caches full of its own
                started_s = time.perf_counter()
                for _ in range(runs):
                    engine.score(batch)
                spent_s = time.perf_counter() - started_s
                taken[entrant].append(spent_s * 1e6 / runs / users)
            progress.update()
    return {entrant: np.array(times, np.float32) for entrant, times in taken.items()}


def random_examples(preset: Preset, *, seed: int = 1) -> Examples:
    """Slates of `CANDIDATES` with full histories; ids lie where the service's encoding puts them.

    Items and authors anywhere in their tables, buckets in their blocks, other words among few.
    """
    rng = np.random.default_rng(seed)
    tiles = _SLATES * -(-CANDIDATES // preset.tile_width)
    items = [(2, preset.item1_rows), (2, preset.item2_rows)]
    word = (HASHED_ROWS_START, HASHED_ROWS_START + _FEW_WORDS)
    author = (HASHED_ROWS_START, preset.feature_rows)

    def block(name: str) -> tuple[int, int]:
        return BLOCK_START[name], BLOCK_START[name] + BLOCK_SIZES[name]

    def ids(columns: Iterable[tuple[int, int]], *shape: int) -> Int32Array:
        return np.stack([rng.integers(*bounds, shape, np.int32) for bounds in columns], axis=-1)

    candidate = [*map(block, ("item_age", "popularity", "ctr", "duration")), word]
    shape = tiles, preset.tile_width
    history = _SLATES, preset.history_len
    return Examples(
        hist_ids=ids([*items, word, block("action_dwell"), block("gap"), word], *history),
        hist_age=rng.integers(0, AGE_BUCKETS, history, np.int32),
        hist_mask=np.zeros(history, np.float32),
        ctx_ids=ids([word] * CONTEXT_WIDTH, _SLATES),
        cand_ids=ids([*items, word, author, *candidate], *shape),
        tile_user=np.repeat(np.arange(_SLATES, dtype=np.int32), tiles // _SLATES),
        click=np.zeros(shape, np.float32),
        long_dwell=np.zeros(shape, np.float32),
        position=np.zeros(shape, np.int64),
        at_ms=np.zeros(_SLATES, np.int64),
    )


def as_table(laps: Mapping[Entrant, Sequence[Lap]]) -> str:
    """Markdown: µs a request, times as fast as the baseline (quartiles), and what ran it."""
    counts = [lap.users for lap in next(iter(laps.values()))]
    head = ["engine", "graph", "tile", *(f"µs, {count} users" for count in counts)]
    head += [f"ratio, {count} users" for count in counts]
    rows = []
    for entrant, run in laps.items():
        ratios = [
            f"{middle:.2f} ({low:.2f} to {high:.2f})"
            for low, middle, high in (lap.ratios for lap in run)
        ]
        rows.append([*map(str, entrant), *(f"{lap.us:.0f}" for lap in run), *ratios])
    versions = ", ".join(f"{name} {number}" for name, number in libraries())
    return f"{markdown(head, rows)}\n\n{cpu_model()}; {extensions()}; {versions}; one thread"


def extensions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What this CPU has of the instructions that matrix products are made of."""
    try:
        flags = set(cpuinfo.read_text().split())
    except OSError:
        return ""
    return " ".join(name for name in _EXTENSIONS if name in flags)
