"""What the backend bench measures: a bundle's graphs, or a preset with random weights."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from service.bundle import BatchSpec, Bundle, InputSpec
from service.encoding.batch import Batch
from service.encoding.history import CONTEXT_WIDTH, HISTORY_WIDTH, MASKED
from service.encoding.items import CANDIDATE_WIDTH
from service.inference.backends.onnx import OnnxCpu
from service.inference.parity import Golden, read_golden

MAX_USERS = 32
_CANDIDATES = 100
_SEED = 7


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model to measure."""

    name: str
    spec: InputSpec
    limits: BatchSpec
    graphs: dict[str, bytes]
    """By precision; a name with `+fused` is for ONNX Runtime on a CUDA device alone."""
    golden: Golden
    flop_a_user: float = 0.0
    """With one slate of 100; 0 if unknown."""


def from_bundle(bundle: Bundle) -> Subject:
    """A bundle as it would be served."""
    manifest = bundle.manifest
    return Subject(
        name=f"{manifest.name} {manifest.version}",
        spec=manifest.input,
        limits=manifest.batch,
        graphs={precision: bundle.read(file) for precision, file in manifest.graphs.items()},
        golden=read_golden(bundle),
    )


def from_preset(name: str, *, threads: int) -> Subject:
    """A network of a preset's size with random weights, in fp32 and fp16; needs torch and onnx."""
    import torch  # noqa: PLC0415  the train extra

    from models.export import to_onnx  # noqa: PLC0415
    from models.export_cuda import to_fp16, to_fused_onnx  # noqa: PLC0415
    from models.network import Network  # noqa: PLC0415
    from models.presets import PRESETS  # noqa: PLC0415

    preset = PRESETS[name]
    torch.manual_seed(_SEED)
    network = Network(preset).eval()
    fp32 = to_onnx(network)
    graphs = {"fp32": fp32, "fp16": to_fp16(fp32)}
    if not preset.folded:
        graphs["fp16+fused"] = to_fp16(to_fused_onnx(network))
    spec = preset.input_spec()
    tiles = -(-_CANDIDATES // preset.tile_width)
    limits = BatchSpec(
        max_users=MAX_USERS, tile_buckets=tuple(tiles << power for power in range(6))
    )
    batch = random_batch(spec, users=3)
    reference = OnnxCpu(fp32, precision="fp32", threads=threads)
    logits = reference.score(batch)
    reference.close()
    return Subject(
        name=f"{name}, random weights",
        spec=spec,
        limits=limits,
        graphs=graphs,
        golden=Golden(batch, logits, 1e-3),
        flop_a_user=0.0 if preset.folded else flop_a_user(preset, tiles * preset.tile_width),
    )


def random_batch(spec: InputSpec, *, users: int) -> Batch:
    """Users with histories of many lengths, and one slate of 100 each."""
    rng = np.random.default_rng(_SEED)
    tiles = -(-_CANDIDATES // spec.tile_width)
    length = spec.history_len
    rows = min(spec.item1_rows, spec.item2_rows, spec.feature_rows)
    events = rng.integers(0, length + 1, users)
    events[:2] = (0, length)[:users]
    mask = np.where(np.arange(length) < events[:, None], 0.0, MASKED)

    def ids(*shape: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(2, rows, shape, dtype=np.int32)

    return Batch(
        ids(users, length, HISTORY_WIDTH),
        rng.integers(0, 32, (users, length), dtype=np.int32),
        mask.astype(np.float32),
        ids(users, CONTEXT_WIDTH),
        ids(users * tiles, spec.tile_width, CANDIDATE_WIDTH),
        np.arange(users, dtype=np.int32).repeat(tiles),
    )


def flop_a_user(preset: Any, candidates: int) -> float:
    """Multiplications and additions of the matrix products alone, for one user's slate."""
    width, ffn, length = preset.width, preset.ffn, preset.history_len
    feed = 4 * width * ffn
    encoder = length * (8 * width**2 + feed) + 4 * length**2 * width
    keys = (length + 1) * 4 * width**2
    cross = candidates * (4 * width**2 + feed + 4 * (length + 1) * width)
    total = preset.encoder_layers * encoder + preset.cross_layers * (keys + cross)
    return float(total)
