"""The check at the end of every import: what was written reads a text as the source says, and finds it likely."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from plaudit.errors import ModelError
from plaudit.models.known_text import KNOWN_TEXT
from plaudit.models.load import kind_of, load_policy
from plaudit.models.memory import free_memory
from plaudit.models.positions import longest_sequence
from plaudit.models.text import added_ids, load_tokenizer

LIKELY = 100.0  # perplexity of KNOWN_TEXT; language models of 135M weights and more have 5 to 15
READ = 0.5  # of the free memory that the weights may take


def set_ends(tokenizer: PreTrainedTokenizerFast, bos: bool, eos: bool) -> None:
    """Make the tokenizer put its begin token before a text and its end token behind it, or not."""
    if added_ids(tokenizer) != ([tokenizer.bos_token_id] * bos, [tokenizer.eos_token_id] * eos):
        tokenizer.add_bos_token, tokenizer.add_eos_token = bos, eos


def check_imported(directory: Path, before: Sequence[int] | None = None, behind: Sequence[int] | None = None) -> None:
    """Raise ModelError unless its tokenizer adds these tokens to a text (None: whatever it adds); warn if the model
    finds an English text unlikely."""
    tokenizer = load_tokenizer(directory)
    for ours, theirs, where in zip(added_ids(tokenizer), (before, behind), ("before", "behind"), strict=True):
        if theirs is not None and ours != list(theirs):
            raise ModelError(
                f"the tokenizer written to {directory} puts the tokens {ours} {where} a text, and the file says "
                f"{list(theirs)}: the model would read other texts than it was trained on"
            )
    if kind_of(directory) == "policy" and (note := _unlikely(directory, tokenizer)):
        warnings.warn(note, stacklevel=3)


def _unlikely(directory: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    size, free = sum(file.stat().st_size for file in directory.glob("*.safetensors")), free_memory()
    if free is not None and size > READ * free:
        return (
            f"{directory} was not tried on a text: its weights take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            "memory are free"
        )
    value = perplexity(directory, tokenizer)
    if value < LIKELY:
        return None
    return (
        f"{directory} finds an English text unlikely: perplexity {value:.0f}, and language models have 5 to 15 (bound "
        f"{LIKELY:.0f}). If it is a model of English, its weights or its tokenizer were not converted correctly"
    )


@torch.inference_mode()
def perplexity(directory: Path, tokenizer: PreTrainedTokenizerFast) -> float:
    """Of KNOWN_TEXT, with the tokens that the tokenizer adds to it."""
    ids: list[int] = tokenizer(KNOWN_TEXT)["input_ids"]
    module = load_policy(directory, "bfloat16").module
    known: int = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = ids[: longest_sequence(module.config)]
    if len(ids) < 2 or max(ids) >= known:
        return math.inf
    logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
    return math.exp(min(-float(logprobs.mean()), 700.0))
