"""Tuning times every way to run a bundle, and puts the best one first."""

import pytest

from models import tune as tuning
from models.cli import _parser
from models.tune import cost, sizes_of, tune, ways
from service.bundle import Bundle, Timing
from service.errors import BackendRecoverable, ManifestFault
from service.inference.backends.base import Backend
from service.inference.backends.select import Source, open_backend
from service.inference.backends.ways import cpu_model
from tests.bundles import SHIPPED

SHOP = Bundle.open(SHIPPED)


def test_every_way_is_timed_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = tune(SHOP, each_s=1e-3)
    timed = {(entry.backend, entry.graph, entry.threads) for entry in found.timings}
    assert timed == set(ways(SHOP))
    assert {backend for backend, _, _ in timed} >= {"onnx-cpu"}
    assert found.sizes == ((1, 5), (4, 20), (16, 80)) == tuple(map(tuple, sizes_of(SHOP)))
    assert all(len(entry.p50_ms) == 3 and min(entry.p50_ms) > 0 for entry in found.timings)
    assert list(found.timings) == sorted(found.timings, key=cost)
    assert found.cpu == cpu_model()
    assert "onnxruntime" in found.libraries
    shown = capsys.readouterr().out
    assert all(
        entry.graph in shown and f"{entry.p50_ms[0]:.3f}" in shown for entry in found.timings
    )


def test_a_second_thread_must_pay() -> None:
    def timing(threads: int, p50_ms: float) -> Timing:
        return Timing(backend="onnx-cpu", graph="fp32", threads=threads, p50_ms=(p50_ms,) * 3)

    alone = timing(1, 10.0)
    assert cost(alone) == pytest.approx(10)
    assert cost(timing(2, 7.5)) > cost(alone) > cost(timing(2, 6.5))


def test_a_way_that_does_not_run_is_told_and_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(_: str, source: Source) -> Backend:
        if source.threads == 1:
            raise BackendRecoverable("out of memory\nand more")
        return open_backend("onnx-cpu", source)

    monkeypatch.setattr(tuning, "open_backend", opened)
    monkeypatch.setattr(tuning, "cores", lambda: 2)
    found = tune(SHOP, each_s=1e-3)
    assert {entry.threads for entry in found.timings} == {2}
    assert "onnx-cpu fp32 threads=1: left out: out of memory\n" in capsys.readouterr().out
    monkeypatch.setattr(tuning, "cores", lambda: 1)
    with pytest.raises(ManifestFault, match="no engine runs this bundle"):
        tune(SHOP, each_s=1e-3)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_seconds_of_tuning_are_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["pack", "--checkpoint", "c", "--out", "o", "--tune", seconds])
    assert "--tune" in capsys.readouterr().err
