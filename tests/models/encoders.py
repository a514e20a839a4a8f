"""Tiny random encoders with a class head, saved with plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

NARROW: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
ROBERTA = {**NARROW, "max_position_embeddings": 66, "type_vocab_size": 1}  # its positions start after the pad token
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {**NARROW, "embedding_size": 16},
    "bert": NARROW,
    "camembert": ROBERTA,
    "deberta-v2": {
        **NARROW, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
        "type_vocab_size": 0, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 64},
    "electra": {**NARROW, "embedding_size": 16},
    "modernbert": {**NARROW, "local_attention": 8, "global_attn_every_n_layers": 2},
    "mpnet": ROBERTA,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}  # fmt: skip
TYPED = ("albert", "bert", "electra", "deberta-v2")  # their tokenizers return token type ids
DOUBLED = ("camembert", "mpnet", "roberta", "xlm-roberta")  # two separators between the texts of a pair


def pair_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the family's special tokens around texts and pairs."""
    begin, end = ("<s>", "</s>") if family in DOUBLED else ("[CLS]", "[SEP]")
    names = [begin, "<pad>" if family in DOUBLED else "[PAD]", end, "<unk>"]
    vocabulary = {name: i for i, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    between = f"{end} {end} $B {end}" if family in DOUBLED else f"{end} $B:1 {end}:1"
    backend.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {between}", special_tokens=[(begin, 0), (end, 2)]
    )
    inputs = ["input_ids", *(["token_type_ids"] if family in TYPED else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token=begin, pad_token=names[1], sep_token=end, unk_token="<unk>",
        model_input_names=inputs,
    )  # fmt: skip


def encoder(directory: Path, family: str, labels: int = 1, **extra: Any) -> Path:
    tokenizer = pair_tokenizer(family)
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), num_labels=labels, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        cls_token_id=0, sep_token_id=2, initializer_range=0.3, **FAMILIES[family], **extra,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@torch.inference_mode()
def plain(directory: Path, texts: list[tuple[str, str | None]], **options: Any) -> torch.Tensor:
    """(texts, labels): logits of plain transformers for each text or pair, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    module = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    return torch.cat([module(**tokenizer(*pair, return_tensors="pt", **options)).logits for pair in texts])
