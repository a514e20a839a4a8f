"""The worker's tokenizer, carried to the HTTP process without torch and without the model's files."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def tokenizer_of(data: bytes, options: dict[str, Any]) -> PreTrainedTokenizerFast:
    options = {name: value for name, value in options.items() if value is not None}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(data.decode()), **options)
