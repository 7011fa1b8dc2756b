"""A peer's server beside the service itself, on the same bundle and the same Valkey."""

import argparse
import os
import sys
import time
from pathlib import Path

import pytest
import redis

from loadtests.commands import peers
from loadtests.commands.bench import Workload, newest_bundle
from loadtests.driving import processes, venvs
from loadtests.driving.peers import _SHARED, PEERS, Peer
from loadtests.driving.spool import Catalogue


@pytest.fixture
def naive(tmp_path: Path) -> Peer:
    """The FastAPI peer in an environment that is ours, as if it had been made for it."""
    (peer,) = (peer for peer in PEERS if peer.name == "fastapi")
    folder = tmp_path / peer.name
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = [*venvs.pinned_as_here(_SHARED), *peer.requirements]
    (folder / ".requirements").write_text("\n".join(made))
    return peer


def test_a_peer_that_ranks_as_ours_does_is_measured_and_another_is_not(
    valkey_url: str, naive: Peer, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    short = "--duration-s 0.3 --warm-up-s 0.2 --connections 4 --users 20 --candidates 20"
    args = parser.parse_args([*short.split(), "--environments", str(tmp_path)])
    bundle = newest_bundle(args.store)
    items = [f"sku-{number:05}" for number in range(300)]
    with redis.Redis.from_url(valkey_url) as store:
        Workload(items, 20, 20, 50).fill_histories(store)
        bench = peers.Bench(
            bundle=bundle,
            redis_url=valkey_url,
            redis_pid=int(store.info("server")["process_id"]),
            bodies=peers.bodies(args, Catalogue(items)),
            args=args,
        )
        ours, scores = peers.measure_ours(bench, tmp_path)
        good = peers.measure_peer(naive, bench, scores, tmp_path)
        wrong = [[score + 0.01 for score in answer] for answer in scores]
        bad = peers.measure_peer(naive, bench, wrong, tmp_path)

    assert len({score for answer in scores for score in answer}) > 30
    for row in (ours, good):
        assert row.figures is not None, row.reason
        assert row.figures.rate > 0
        assert row.figures.cpu_us > 100
        assert row.figures.open_rate > 0
    assert (bad.figures, bad.reason) == (None, "it does not rank as ours does")


def test_a_server_that_ends_at_once_is_a_row_with_its_last_words(
    naive: Peer, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    args = parser.parse_args(["--environments", str(tmp_path)])
    bench = peers.Bench(
        bundle=newest_bundle(args.store),
        redis_url="nonsense://",
        redis_pid=os.getpid(),
        bodies=peers.bodies(args, Catalogue(["a"])),
        args=args,
    )

    row = peers.measure_peer(naive, bench, [], tmp_path)

    assert row.figures is None
    assert "Redis URL must specify one of the following schemes" in row.reason


def test_children_that_outlive_their_server_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FORKING]
    with processes.running(command, log=tmp_path / "log") as process:
        ends_s = time.monotonic() + 10
        while len(pids := processes.tree(process.pid)) < 2 and time.monotonic() < ends_s:
            time.sleep(0.05)
        child = pids[1]
        os.kill(child, 0)

    ends_s = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or "Z" in _state(child)


_FORKING = """
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(300)
"""


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
