from pathlib import Path

import pytest

from loadtests.driving.samples import RunFault
from loadtests.verdicts.regression import CpuCost, judge, read_cost
from loadtests.verdicts.slo import Verdict

BASELINE = CpuCost(service_us=600, engine_us=300)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (CpuCost(service_us=600, engine_us=300), Verdict.PASS),
        (CpuCost(service_us=719, engine_us=300), Verdict.PASS),
        (CpuCost(service_us=721, engine_us=300), Verdict.FAIL),
        # a machine of half the speed
        (CpuCost(service_us=1_200, engine_us=600), Verdict.PASS),
        # a faster engine under the same service: the service's part has grown
        (CpuCost(service_us=600, engine_us=240), Verdict.FAIL),
    ],
)
def test_only_what_a_slower_machine_does_not_explain_fails(now: CpuCost, verdict: Verdict) -> None:
    found, sentence = judge(now, BASELINE, at_most=1.2)
    assert found == verdict
    assert sentence.startswith(verdict.name)


def test_a_baseline_is_read_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    BASELINE.save(path)
    assert read_cost(path) == BASELINE


@pytest.mark.parametrize("text", ["", "{}", '{"service_us": 1, "engine_us": 0}', '{"speed": 1}'])
def test_a_bad_baseline_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(RunFault, match="baseline"):
        read_cost(path)
