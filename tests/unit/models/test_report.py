"""The page on a checkpoint: its figures are those of the gate, and it names nobody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models import speed
from models.build import Checkpoint, EvaluatedSlates
from models.evaluate import Figure
from models.export import to_onnx
from models.log import Log
from models.report import NO_DEVICE, _meaning, write_report
from models.variants import KINDS, Made


@pytest.fixture(scope="module")
def page(log: Log, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    command = (
        "python -m models report --checkpoint /secret/place/own.pt --data=../secret/data --out x"
        " --mlflow https://bob:secret@mlflow.example"
    )
    return write_report(log, checkpoint, folder, command=command)


def test_every_picture_is_there_and_small(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"!\[[^\]]+\]\((\w+\.png)\)", text)
    assert sorted(named) == sorted(path.name for path in page.parent.glob("*.png"))
    assert {"variants.png", "latency.png", "ranges.png", "training.png"} <= set(named)
    for name in named:
        picture = (page.parent / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 60_000


def test_figures_are_those_of_the_gate_and_of_what_ran_here(page: Path, made: Made) -> None:
    text = page.read_text()
    for entry in made.variants:
        (line,) = re.findall(rf"^\| {entry.name} \|.*$", text, re.MULTILINE)
        assert str(entry.verdict.ndcg_loss) in line
        assert (NO_DEVICE in line) is not KINDS[entry.name].on_cpu
    assert "On clicks it has NDCG@10 0." in text.split("## Ranking")[0]


def test_it_names_no_user_no_item_and_no_folder(page: Path, log: Log) -> None:
    text = page.read_text()
    assert "secret" not in text
    assert "--checkpoint own.pt --data=data --out x --mlflow URI" in text
    told = {*log.items["id"], *log.items["title"], *log.impressions["user"].unique()}
    assert not [word for word in told if re.search(rf"\b{re.escape(word)}\b", text)]


def test_graphs_are_timed_on_batches_of_whole_slates(
    checkpoint: Checkpoint, slates: EvaluatedSlates
) -> None:
    graph = to_onnx(checkpoint.network)
    tiles = -(-speed.CANDIDATES // checkpoint.network.preset.tile_width)
    batch = speed.batch_of(slates.encoded, 8)
    assert batch["hist_ids"].shape[0] == 8
    assert batch["cand_ids"].shape[0] == 8 * tiles
    assert batch["tile_user"].tolist() == [user for user in range(8) for _ in range(tiles)]
    found = speed.compare({"one": graph, "two": graph}, slates.encoded, rounds=20)
    assert {name: list(times) for name, times in found.items()} == {"one": [1, 8], "two": [1, 8]}
    assert all(took > 0 for times in found.values() for took in times.values())


@pytest.mark.parametrize(
    ("low", "high", "meaning"),
    [(0.1, 0.3, "above 0"), (-0.1, 0.3, "these slates show no lead for sure"),
     (-0.3, -0.1, "it is behind")],
)  # fmt: skip
def test_a_lead_is_told_by_its_whole_interval(low: float, high: float, meaning: str) -> None:
    assert _meaning(Figure((low + high) / 2, low, high)) == meaning
