"""Replays a target of the Dockerfile without Docker, measures it, and asks it to rank.

    python docker/replay.py --base host           nothing but /usr, /etc and this Python, read-only
    python docker/replay.py --base /var/tmp/slim  a Debian root, made there by debootstrap if absent

Each stage is an overlay above its base; the finished one runs read-only, as the image's user.
Needs root, or a kernel that lets users make namespaces. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from dockerfile import DockerfileFault, Stage, Step, expand, read_stages

REPOSITORY = Path(__file__).resolve().parent.parent
DEBIAN = "bookworm"
DEBIAN_PACKAGES = "ca-certificates,python-is-python3,python3-venv"
HOST_FOLDERS = ("/usr", "/etc", sys.base_prefix)
SLIM_LACKS = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man")
READY_WITHIN_S = 60
CACHE = Path("/var/tmp/ranker-replay-cache")  # noqa: S108  what BuildKit keeps between builds
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
MB = 1_000_000
_IGNORED: Callable[[str, list[str]], set[str]] | None = shutil.ignore_patterns("__pycache__")


def sh(*command: str | Path, **options: object) -> None:
    """Run one command; its failure ends the replay."""
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def debian(folder: Path) -> None:
    """Make a Debian root with its own Python, without what slim images leave out."""
    if (folder / "usr/bin/python3").exists():
        return
    print(f"debootstrap {DEBIAN} into {folder}, some minutes", flush=True)
    with (folder.parent / "debootstrap.log").open("w") as log:
        include = f"--include={DEBIAN_PACKAGES}"
        sh("debootstrap", "--variant=minbase", include, DEBIAN, folder, stdout=log)
    for path in (*SLIM_LACKS, "usr/share/locale"):
        shutil.rmtree(folder / path, ignore_errors=True)


def skeleton(folder: Path) -> None:
    """Make an empty root whose system folders are the host's, to be bound read-only."""
    for name in ("proc", "dev", "tmp", *(path.lstrip("/") for path in HOST_FOLDERS)):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(Path("/", name).readlink())


def disk_bytes(folder: Path) -> int:
    """Bytes on disk, each hard-linked file once."""
    found = {(s := path.lstat()).st_ino: s.st_blocks * 512 for path in folder.rglob("*")}
    return sum(found.values())


class Replay:
    """Stages replayed so far, below one work folder."""

    def __init__(self, stages: dict[str, Stage], *, base: Path, on_host: bool, work: Path) -> None:
        self._stages = stages
        self._base = base
        self._on_host = on_host
        self._work = work

    def root(self, name: str) -> Path:
        """Where a stage's root is mounted."""
        return self._work / name / "root"

    def layers_bytes(self, name: str) -> int:
        """Disk that a stage takes above its base."""
        return disk_bytes(self._work / name / "upper")

    def build(self, name: str) -> dict[str, str]:
        """Run the steps of a stage, after those of the stages that it copies from.

        Returns its environment; raises DockerfileFault.
        """
        stage = self._stages[name]
        for source in stage.sources():
            self.build(source)
        print(f"stage {name}, on {self._base} for {stage.base}", flush=True)
        self._mount(name)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": f"{sys.base_prefix}/bin:{path}" if self._on_host else path}
        arguments: dict[str, str] = {}
        folder = "/"
        for step in stage.steps:
            started_s = time.monotonic()
            if step.word == "WORKDIR":
                folder = step.text
                self._inside(name, folder).mkdir(parents=True, exist_ok=True)
            elif step.word == "ARG":
                arguments |= step.variables()
            elif step.word == "ENV":
                known = environment | arguments
                environment |= {k: expand(v, known) for k, v in step.variables().items()}
            elif step.word == "COPY":
                self._copy(name, step, folder)
            elif step.word == "RUN":
                self._run(name, step.text, folder, environment | arguments)
            print(
                f"  {time.monotonic() - started_s:5.1f} s  {step.word} {step.text[:80]}", flush=True
            )
        return environment

    def _mount(self, name: str) -> None:
        folders = {part: self._work / name / part for part in ("upper", "work", "root")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        root = folders["root"]
        layers = f"lowerdir={self._base},upperdir={folders['upper']},workdir={folders['work']}"
        sh("mount", "-t", "overlay", "overlay", "-o", layers, root)
        for path in ("/proc", "/dev"):
            sh("mount", "--rbind", path, root / path[1:])
        for path in HOST_FOLDERS if self._on_host else (str(CA_BUNDLE), "/etc/resolv.conf"):
            sh("mount", "--rbind", "-o", "ro", path, root / path[1:])

    def _inside(self, name: str, path: str, folder: str = "/") -> Path:
        return self.root(name) / os.path.join(folder, path).lstrip("/")  # noqa: PTH118  as in the image

    def _copy(self, name: str, step: Step, folder: str) -> None:
        words = step.text.split()
        source_root, ignored = REPOSITORY, _IGNORED
        if words[0].startswith("--from="):
            source_root = self.root(words.pop(0).removeprefix("--from="))
            ignored = None
        *sources, target = words
        into = self._inside(name, target, folder)
        for word in sources:
            source = source_root / word.lstrip("/")
            if source.is_dir():
                shutil.copytree(source, into, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(source, into)

    def _run(self, name: str, command: str, folder: str, environment: dict[str, str]) -> None:
        pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        cache = re.match(r"--mount=type=cache,target=(\S+)\s+", command)
        if cache:
            command = command[cache.end() :]
            target = self._inside(name, cache[1])
            target.mkdir(parents=True, exist_ok=True)
            CACHE.mkdir(parents=True, exist_ok=True)
            sh("mount", "--bind", CACHE, target)
        sh(
            *("chroot", self.root(name), "/bin/sh", "-c", f"cd {folder} && {command}"),
            env=pip | environment | {"HOME": "/root"},
            stdout=subprocess.DEVNULL,
        )
        if cache:
            sh("umount", target)

    def seal(self, name: str) -> None:
        """Make a stage's root read-only, but for /tmp."""
        sh("mount", "-o", "remount,ro", self.root(name))
        sh("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", self.root(name) / "tmp")

    def serve(self, name: str, environment: dict[str, str]) -> float:
        """Start a sealed stage, rank once, stop it; seconds from its start to ready."""
        root = self.root(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        overrides = {"RANKER_HOST": "127.0.0.1", "RANKER_PORT": str(port)}
        stage = self._stages[name]
        as_user = [] if _in_user_namespace() else ["--userspec", stage.user]
        started_s = time.monotonic()
        process = subprocess.Popen(  # the image's own entry point
            ["chroot", *as_user, root, "/usr/bin/env", "-C", "/app", *stage.entrypoint],
            env=environment | overrides,
            stdout=subprocess.DEVNULL,
        )
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}/readyz", process)
            ready_s = time.monotonic() - started_s
            print(f"ready after {ready_s:.2f} s, {_cpu_s(process.pid):.2f} s of CPU", flush=True)
            _rank(f"http://127.0.0.1:{port}/rank", root / "app/models/store")
        finally:
            process.terminate()
            status = process.wait(30)
        if status:
            raise DockerfileFault(f"SIGTERM ended the service with status {status}, not 0")
        return ready_s


def _in_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + READY_WITHIN_S
    while process.poll() is None and time.monotonic() < until_s:
        try:
            with urlopen(url, timeout=1):  # noqa: S310  our own http URL
                return
        except (URLError, OSError):
            time.sleep(0.01)
    raise DockerfileFault(f"the service was not ready within {READY_WITHIN_S} s, or ended")


def _rank(url: str, store: Path) -> None:
    manifest = json.loads(next(store.glob("*/*/manifest.json")).read_bytes())
    slate = manifest["sample_items"]
    body = json.dumps({"user_id": "u1", "items": slate}).encode()
    request = Request(url, body, {"content-type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=5) as answer:  # noqa: S310
        ranking = json.load(answer)
    if sorted(item["id"] for item in ranking["items"]) != sorted(slate):
        raise DockerfileFault(f"/rank did not order the slate: {ranking}")
    print(
        f"/rank ordered {len(slate)} items with {ranking['model']}, degraded {ranking['degraded']}"
    )


def _check_contents(replay: Replay, name: str) -> None:
    """What an image must not hold."""
    layers = replay.root(name).parent / "upper"
    unwanted = {"torch", "gcc", "cc", "cc1", "g++", "clang", "ld"}
    found = [path for path in layers.rglob("*") if path.name in unwanted]
    if found:
        raise DockerfileFault(f"the image holds {', '.join(map(str, found))}")
    sbom = json.loads((replay.root(name) / "opt/ranker/sbom.cdx.json").read_bytes())
    print(f"no compiler, no torch; the SBOM lists {len(sbom['components'])} components")


def main() -> int:
    """Replay one target; exit status 1 if a limit does not hold, 2 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--base", default="host", help="host, or the folder of a Debian root")
    parser.add_argument("--max-mb", type=float, default=400, help="most disk, the base included")
    parser.add_argument("--max-ready-s", type=float, default=READY_WITHIN_S)
    arguments = parser.parse_args()
    if "RANKER_REPLAY_ISOLATED" not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        os.environ["RANKER_REPLAY_ISOLATED"] = "1"
        os.execvp("unshare", ["unshare", "--mount", *user, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="replay-", dir="/var/tmp") as work:
        return _replay(arguments, Path(work))


def _replay(arguments: argparse.Namespace, work: Path) -> int:
    on_host = arguments.base == "host"
    base = work / "base" if on_host else Path(arguments.base).resolve()
    skeleton(base) if on_host else debian(base)
    stages = read_stages((REPOSITORY / "docker/Dockerfile").read_text())
    replay = Replay(stages, base=base, on_host=on_host, work=work)
    try:
        environment = replay.build(arguments.target)
        _check_contents(replay, arguments.target)
        replay.seal(arguments.target)
        # the second start is that of a node which has the image's pages in memory
        ready_s = min(replay.serve(arguments.target, environment) for _ in range(2))
        own_mb = replay.layers_bytes(arguments.target) / MB
        base_mb = 0 if on_host else disk_bytes(base) / MB
    except (DockerfileFault, subprocess.CalledProcessError) as fault:
        print(f"replay: {fault}", file=sys.stderr)
        return 2
    finally:
        for name in stages:
            if replay.root(name).is_dir():
                subprocess.run(["umount", "--recursive", replay.root(name)], check=False)
    print(f"on disk: {own_mb:.0f} MB above a base of {base_mb:.0f} MB")
    return int(own_mb + base_mb > arguments.max_mb or ready_s > arguments.max_ready_s)


if __name__ == "__main__":
    sys.exit(main())
