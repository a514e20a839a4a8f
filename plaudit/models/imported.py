"""The check at the end of every import: what was written reads a text as the source says, and finds it likely."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from plaudit.errors import ModelError
from plaudit.models.formats.gguf_import import convert_gguf
from plaudit.models.known_text import KNOWN_TEXT
from plaudit.models.load import kind_of, load_policy
from plaudit.models.memory import free_memory
from plaudit.models.positions import longest_sequence
from plaudit.models.safety import read_json
from plaudit.models.text import added_ids, load_tokenizer

LIKELY = 100.0  # perplexity of KNOWN_TEXT; language models of 135M weights and more have 5 to 15
UNKNOWN = 0.1  # share of unknown tokens from which on it is no text of the model's language
READ = 0.5  # of the free memory that the weights may take


def import_gguf(gguf_path: str | Path, directory: str | Path, dtype: str = "float32") -> Path:
    """Write the model, its tokenizer and its chat template to `directory`, and check them."""
    path, before, behind = convert_gguf(gguf_path, directory, dtype)
    check_imported(path, before, behind)
    return path


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


def check_pulled(directory: Path) -> None:
    """The same of a directory of the hub. transformers follows tokenizer.json; where the tokenizer's config says
    otherwise, one of the two is wrong."""
    check_imported(directory)
    file = directory / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    for name, adds in zip(("add_bos_token", "add_eos_token"), added_ids(load_tokenizer(directory)), strict=True):
        if isinstance(config.get(name), bool) and config[name] != bool(adds):
            warnings.warn(
                f"{file} says {name} = {str(config[name]).lower()}, but the tokenizer itself adds {adds or 'nothing'} "
                "to a text, which is used: compare with the texts the model was trained on",
                stacklevel=2,
            )


def _unlikely(directory: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    size, free = sum(file.stat().st_size for file in directory.glob("*.safetensors")), free_memory()
    if free is not None and size > READ * free:
        return (
            f"{directory} was not tried on a text: its weights take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            "memory are free"
        )
    ids: list[int] = tokenizer(KNOWN_TEXT)["input_ids"]
    if (unknown := ids.count(tokenizer.unk_token_id)) > UNKNOWN * len(ids):
        return (
            f"{directory} was not tried on a text: its tokenizer reads {unknown} of {len(ids)} tokens of an English "
            "text as unknown"
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
