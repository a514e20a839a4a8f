"""Tiny random models and tokenizers in the shapes of published reward models, saved by transformers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    PreTrainedTokenizerFast,
)

from plaudit.models import ValueModel

from ..models.builders import CHATML, byte_tokenizer

QUESTION = "What is (1+2)*3?"
STEPS = ("Step 1: 1+2 = 3", "Step 2: 3*3 = 9", "Step 3: so 9")
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CLASSES: dict[str, Any] = {
    "causal": LlamaForCausalLM,
    "outcome": LlamaForSequenceClassification,
    "steps": LlamaForTokenClassification,
}


def sentence_piece() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Mistral: a space before the text, spaces as ▁, bytes for text outside the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)] + ["к", "и", "▁к", "▁ки", "▁+", "▁-", "St", "ep", "Step", "▁Step"]
    merges = [("▁", "к"), ("▁к", "и"), ("▁", "+"), ("▁", "-"), ("S", "t"), ("e", "p"), ("St", "ep"), ("▁", "Step")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    return with_bos(backend, "<s>", eos_token="</s>", unk_token="<unk>")


def llama3() -> PreTrainedTokenizerFast:
    backend = byte_tokenizer().backend_tokenizer
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])
    return with_bos(backend, "<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=LLAMA3)


def qwen(special: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=special, normalized=False)], special_tokens=special)
    return tokenizer


def with_bos(backend: Tokenizer, bos: str, **names: str) -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, pad_token=names["eos_token"], **names)


def chatml() -> PreTrainedTokenizerFast:
    return byte_tokenizer(chat_template=CHATML)


def shape(tokenizer: PreTrainedTokenizerFast, positions: int = 512, **extra: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer) + len(tokenizer) % 2, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=positions, initializer_range=0.25,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        **extra,
    )  # fmt: skip


def model(kind: str, tokenizer: PreTrainedTokenizerFast, labels: Sequence[str] = (), positions: int = 512) -> Any:
    torch.manual_seed(7)
    extra = {"id2label": dict(enumerate(labels))} if labels else {}
    config = shape(tokenizer, positions, tie_word_embeddings=False, **extra)
    if kind == "value":
        value = ValueModel(LlamaModel(config))
        torch.nn.init.normal_(value.score.weight, std=0.25)
        return value.eval()
    return CLASSES[kind](config).eval()


def write(directory: Path, module: Any, tokenizer: PreTrainedTokenizerFast) -> str:
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def rotate(directory: Path, theta: float) -> None:
    """Change the rotary frequencies (rope_theta) and keep the weights."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    file.write_text(json.dumps(config))


@torch.inference_mode()
def plain(module: Any, ids: Sequence[int]) -> np.ndarray:
    """The logits of every token, computed by transformers alone."""
    out = module(input_ids=torch.tensor([list(ids)]))
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return logits[0].double().numpy()


@torch.inference_mode()
def plain_class(module: Any, ids: Sequence[int]) -> np.ndarray:
    """A sequence classifier's head at every token, computed by transformers alone."""
    hidden = module.model(input_ids=torch.tensor([list(ids)])).last_hidden_state
    return module.score(hidden)[0].double().numpy()


def softmax(rows: np.ndarray) -> np.ndarray:
    exponentials = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
