"""Golden requests: one batch of awkward inputs with the logits that PyTorch gives in fp32."""

from __future__ import annotations

import io

import numpy as np
import torch

from models.dataset import Examples
from models.network import Inputs, Network
from models.train import take
from service.encoding.batch import Batch
from service.encoding.history import MASKED
from service.encoding.items import ITEM1, ITEM2
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW

SLATES = 16


def golden_batch(examples: Examples, *, max_tiles: int) -> Batch:
    """Slates spread over the examples; the first has no history, the second a full one.

    The third holds unknown items only; tiles padded at the end occur wherever slates end.
    """
    events = (examples.hist_mask == 0).sum(axis=1)
    fullest = int(np.argmax(events))
    spread = np.linspace(0, len(events) - 1, SLATES - 1).astype(np.int64)
    chosen = np.unique(np.append(spread, fullest))
    order = np.append(chosen[chosen != fullest][:2], fullest)
    chosen = np.append(order, np.setdiff1d(chosen, order))
    chosen[[1, 2]] = chosen[[2, 1]]
    inputs, _ = take(examples, chosen)
    batch = Batch(*(array.numpy() for array in inputs))
    batch.hist_ids[0], batch.hist_age[0], batch.hist_mask[0] = PADDING_ROW, 0, MASKED
    unknown = batch.cand_ids[batch.tile_user == 2]
    unknown[..., [ITEM1, ITEM2]] = np.where(
        unknown[..., [ITEM1, ITEM2]] == PADDING_ROW, PADDING_ROW, UNKNOWN_ROW
    )
    batch.cand_ids[batch.tile_user == 2] = unknown
    return _first_tiles(batch, max_tiles)


def _first_tiles(batch: Batch, tiles: int) -> Batch:
    tile_user = batch.tile_user[:tiles]
    users = int(tile_user.max()) + 1
    return Batch(
        batch.hist_ids[:users],
        batch.hist_age[:users],
        batch.hist_mask[:users],
        batch.ctx_ids[:users],
        batch.cand_ids[:tiles],
        tile_user,
    )


def golden_bytes(network: Network, batch: Batch) -> bytes:
    """The npz file: the batch's arrays by the names of its fields, and `logits` [N, T, 2]."""
    arrays = {name: getattr(batch, name) for name in Batch.__struct_fields__}
    with torch.inference_mode():
        logits = network(Inputs(*map(torch.from_numpy, arrays.values()))).numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, logits=logits, **arrays)
    return buffer.getvalue()
