"""Scores that a device is still computing while the host prepares the next step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plaudit.core.model.readouts import PendingReadout
from plaudit.core.sequence import Sequence, Update
from plaudit.records import ItemError


@dataclass
class LateScores:
    """The scores of the sequences that finish with one step."""

    sequences: dict[Sequence, None]
    readout: PendingReadout
    tokens: int  # of the step

    def updates(self, model: str) -> list[Update]:
        """Waits for the device. A sequence that was aborted meanwhile gets no update."""
        values = zip(self.sequences, self.readout.arrays(), strict=True)
        return [scored(sequence, value, model) for sequence, value in values if sequence.finish is None]

    def failed(self, error: Exception) -> list[Update]:
        fault = ItemError(type(error).__name__, f"the step failed: {error}")
        return [_failed(sequence, fault) for sequence in self.sequences if sequence.finish is None]


def scored(sequence: Sequence, values: np.ndarray, model: str) -> Update:
    if np.isfinite(values).all():
        return Update(sequence.request.number, 0, (), "", values=values)
    return _failed(sequence, ItemError("NotANumber", f"{model} gave scores that are not finite numbers"))


def _failed(sequence: Sequence, error: ItemError) -> Update:
    sequence.finish, sequence.error = "error", error
    return Update(sequence.request.number, 0, (), "", sequence.sample(""))
