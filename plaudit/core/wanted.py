"""Hidden rows of a few tokens only."""

from __future__ import annotations

from torch import Tensor

from plaudit.core.attention import Layout
from plaudit.core.decoder import Decoder


class WantedRows:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor) -> Tensor:
        """(W, hidden): the rows `wanted` of the packed row."""
        return self.decoder.hidden(input_ids, position_ids, layout)[wanted]
