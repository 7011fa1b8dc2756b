"""The servers that are measured beside ours: what each needs, and how it is started.

A peer has an environment of its own; numpy, the engine and the Redis client have our versions.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtests.driving import venvs

_SHARED = ("numpy", "msgspec", "xxhash", "onnxruntime", "redis", "hiredis")
_MODULE = "loadtests.peers"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One framework."""

    name: str
    requirements: tuple[str, ...]
    script: str = "python"
    """The program of its environment that starts it."""
    words: tuple[str, ...]
    """What follows the program; `{port}` stands for the port."""
    env: dict[str, str] = {}
    listed: bool = False
    """Its batched route takes a list, so each body is a list of one."""

    @property
    def version(self) -> str:
        """The framework's version."""
        return self.requirements[0].rpartition("==")[2]

    def prepare(self, folder: Path) -> Path:
        """Make its environment below `folder`; its program there. Raises StartFault."""
        shared = venvs.pinned_as_here(_SHARED)
        python = venvs.make(folder / self.name, [*shared, *self.requirements])
        return python.with_name(self.script)

    def command(self, program: Path, port: int) -> list[str]:
        """What starts it."""
        return [str(program), *(word.format(port=port) for word in self.words)]

    def environment(self, *, bundle: Path, redis_url: str, port: int) -> dict[str, str]:
        """Variables for its process."""
        return {
            "PEER_BUNDLE": str(bundle),
            "PEER_REDIS_URL": redis_url,
            "PEER_PORT": str(port),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            # one engine thread each, as ours; nothing else may start a pool of threads
            "OMP_NUM_THREADS": "1",
        } | self.env


PEERS = (
    Peer(
        name="mosec",
        requirements=("mosec==0.9.8",),
        words=(
            *("-m", f"{_MODULE}.mosec_server"),
            *("--address", "127.0.0.1", "--port", "{port}", "--log-level", "error"),
        ),
    ),
    Peer(
        name="litserve",
        requirements=("litserve==0.2.19", "uvloop", "httptools"),
        words=("-m", f"{_MODULE}.litserve_server"),
    ),
    Peer(
        name="bentoml",
        requirements=("bentoml==1.4.40", "uvloop", "httptools"),
        script="bentoml",
        words=(
            *("serve", f"{_MODULE}.bentoml_server:Ranker"),
            *("--host", "127.0.0.1", "--port", "{port}"),
        ),
        env={"BENTOML_DO_NOT_TRACK": "True"},
        listed=True,
    ),
    Peer(
        name="ray",
        requirements=("ray[serve]==2.60.0",),
        words=("-m", f"{_MODULE}.ray_server"),
        env={
            "RAY_USAGE_STATS_ENABLED": "0",
            # its documented switch for throughput: no thread and no loop of its own for our code
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        },
    ),
    Peer(
        name="fastapi",
        requirements=("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop", "httptools"),
        words=("-m", f"{_MODULE}.fastapi_server"),
    ),
)
