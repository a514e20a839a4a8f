"""A decoder trunk with a scalar head: the value of every token, for a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plaudit.errors import ModelError
from plaudit.models.weights import read_header

HEAD = "value_head.safetensors"


class ValueModel(nn.Module):
    """On disk: the trunk as a plain transformers directory, and the head beside it in value_head.safetensors."""

    base_model_prefix = "trunk"

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        like = next(trunk.parameters())
        self.score = nn.Linear(self.config.hidden_size, 1, bias=False, device=like.device, dtype=like.dtype)

    @property
    def config(self) -> Any:
        return self.trunk.config

    def set_attn_implementation(self, name: str) -> None:
        self.trunk.set_attn_implementation(name)  # type: ignore[operator]

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.get_input_embeddings()  # type: ignore[no-any-return, operator]

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """input_ids (B, T) -> values (B, T)."""
        hidden: Tensor = self.trunk(input_ids=input_ids, **options).last_hidden_state
        values: Tensor = self.score(hidden).squeeze(-1)
        return values

    def save_pretrained(self, directory: str | Path) -> None:
        from safetensors.torch import save_file

        self.trunk.save_pretrained(directory)  # type: ignore[operator]
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in self.score.state_dict().items()}
        save_file(head, Path(directory) / HEAD)

    def load_head(self, directory: Path) -> None:
        from safetensors.torch import load_file

        check_head(directory, self.config.hidden_size)
        self.score.load_state_dict(load_file(directory / HEAD))


def check_head(directory: Path, hidden_size: int) -> None:
    file = directory / HEAD
    shapes = {name: tensor.shape for name, tensor in read_header(file).items()}
    expected = {"weight": (1, hidden_size)}
    if shapes != expected:
        stored = {name: list(shape) for name, shape in shapes.items()}
        raise ModelError(f"{file} has {stored}, expected a tensor 'weight' of shape [1, {hidden_size}]; save it again")
