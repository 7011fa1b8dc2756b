from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtests.commands.rehearse import compressed, hour_of
from loadtests.driving import venvs
from loadtests.driving.peers import PEERS
from loadtests.driving.processes import StartFault
from loadtests.traces import shape, synth
from loadtests.traces.trace import TraceFault
from loadtests.verdicts.peers import OURS, RIVAL, Figures, Row, judge, rows_text
from loadtests.verdicts.slo import Verdict


def figures(cpu_us: float, **other: float) -> Figures:
    of = Figures(
        rate=1000,
        cpu_us=cpu_us,
        valkey_us=10,
        p50_ms=9,
        p99_ms=20,
        errors=0,
        open_rate=700,
        open_cpu_us=cpu_us,
        open_p50_ms=4,
        open_p99_ms=12,
        open_errors=0,
        lateness_p99_ms=0.5,
    )
    return msgspec.structs.replace(of, **other)


def rows(ours: Figures | None, rival: Figures | None) -> list[Row]:
    reason = "pip: no such version"
    return [
        Row(name=OURS, version="onnx-cpu", figures=ours, reason="" if ours else reason),
        Row(name=RIVAL, version="1.0", figures=rival, reason="" if rival else reason),
    ]


@pytest.mark.parametrize(
    ("ours", "rival", "verdict"),
    [
        (figures(390), figures(990), Verdict.PASS),
        (figures(400), figures(990), Verdict.FAIL),
        (figures(390, open_p99_ms=31), figures(990), Verdict.FAIL),
        (figures(390, errors=1), figures(990), Verdict.FAIL),
        (figures(390, lateness_p99_ms=3.1), figures(990), Verdict.INVALID),
        (figures(390), None, Verdict.UNDECIDED),
        (None, figures(990), Verdict.UNDECIDED),
    ],
)
def test_the_verdict_is_on_requests_a_cpu_second_p99_and_errors(
    ours: Figures | None, rival: Figures | None, verdict: Verdict
) -> None:
    assert judge(rows(ours, rival)).verdict is verdict


def test_the_ratio_counts_valkey_on_both_sides() -> None:
    checks = {check.what: check for check in judge(rows(figures(390), figures(990))).checks}

    assert checks[f"requests a CPU second over {RIVAL}'s"].measured == pytest.approx(1000 / 400)


def test_a_server_that_was_not_measured_is_told_with_the_reason() -> None:
    told = rows_text(rows(figures(390), None)).splitlines()

    assert told[1].startswith("ours onnx-cpu")
    assert told[-1] == f"{RIVAL} 1.0: pip: no such version"


def test_every_peer_is_pinned_to_a_version_and_has_a_file(tmp_path: Path) -> None:
    for peer in PEERS:
        assert "==" in peer.requirements[0]
        command = " ".join(peer.command(tmp_path / peer.script, 4711))
        (module,) = (word for word in command.split() if word.startswith("loadtests.peers."))
        assert Path(f"{module.partition(':')[0].replace('.', '/')}.py").is_file()
        env = peer.environment(bundle=tmp_path, redis_url="redis://here", port=4711)
        assert "4711" in command or env["PEER_PORT"] == "4711"


def test_an_environment_is_made_once_and_a_failure_tells_why(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / ".requirements").write_text("a==1\nb==2")
    assert venvs.make(folder, ["a==1", "b==2"]) == folder / "bin" / "python"

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StartFault, match=r"file"):
        venvs.make(tmp_path / "file", ["a==1"])


def test_an_hour_is_scaled_to_a_rate_and_keeps_its_shape(tmp_path: Path) -> None:
    counts = np.repeat([100, 300], 1800)
    path = tmp_path / "counts.txt"
    path.write_text(" ".join(map(str, [7] * 3600 + counts.tolist())))
    people = synth.Population(users=50, slates={20: 1.0})

    records = compressed(hour_of(path, 1), 60.0, people, speed=100, seed=1)
    times = shape.times_s(records)

    assert times[-1] == pytest.approx(36, abs=0.1)
    assert (times > 18).sum() / 18 == pytest.approx(60, rel=0.05)
    assert (times > 18).sum() / (times < 18).sum() == pytest.approx(3, rel=0.1)
    with pytest.raises(TraceFault, match="hour 2 of 2"):
        hour_of(path, 2)
