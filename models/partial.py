"""The state of a training run after its last whole epoch, so that an interrupted one goes on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

Weights = dict[str, Any]


class Partial:
    """One file beside the checkpoint; it goes when training ends."""

    def __init__(self, path: Path, identity: str) -> None:
        """`identity` tells what is trained on what; another run's state is not taken up."""
        self._path = path
        self._identity = identity

    def save(self, **parts: Any) -> None:
        """Keep an epoch's state, and the random numbers' too; the file is replaced whole."""
        rng: np.random.Generator = parts.pop("rng")
        state = {
            "identity": self._identity,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": rng.bit_generator.state,
            **parts,
        }
        staged = self._path.with_suffix(f"{self._path.suffix}.new")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, staged)
        staged.replace(self._path)

    def load(self, rng: np.random.Generator) -> dict[str, Any] | None:
        """What was saved, with the random numbers where they were; None if there is nothing."""
        try:
            state: dict[str, Any] = torch.load(self._path, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError):
            return None
        if state.get("identity") != self._identity:
            return None
        torch.set_rng_state(state["torch"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
        rng.bit_generator.state = state["numpy"]
        return state

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)
