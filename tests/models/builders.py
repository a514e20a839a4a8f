"""Tiny real models and tokenizers for the tests in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 300


def byte_tokenizer(
    pad: str | None = "<|endoftext|>", eos: str | None = "<|im_end|>", **extra: Any
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges and ChatML control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "he", "ll", "hell", "hello", "Ċh", "ĊĊ"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ċ", "h"), ("Ċ", "Ċ")]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        chat_template=extra.pop("chat_template", CHATML),
        **extra,
    )


def config(family: str, tied: bool = False, **extra: Any) -> Any:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    classes: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "neox": GPTNeoXConfig}
    grouped = {} if family == "neox" else {"num_key_value_heads": 1}
    return classes[family](**{**common, **grouped, **extra})


def causal(family: str = "llama", tied: bool = False, **extra: Any) -> Any:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config(family, tied, **extra)).eval()


def classifier(labels: int = 1) -> Any:
    torch.manual_seed(8)
    return AutoModelForSequenceClassification.from_config(config("llama", num_labels=labels, pad_token_id=256)).eval()


def write_plain(module: Any, directory: Path, tokenizer: Any = None, **options: Any) -> Path:
    """Saves a model and tokenizer with plain transformers, as third parties do."""
    module.save_pretrained(directory, **options)
    (tokenizer or byte_tokenizer()).save_pretrained(directory)
    return directory


def same(left: Any, right: Any) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


IDS = torch.tensor([[5, 9, 77, 260, 3]])
