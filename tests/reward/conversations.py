"""Published chat templates with tiny tokenizers, and the same conversation in every form of an item.

The templates are the texts that the models' tokenizers come with: Qwen2.5, Qwen3, Llama 3, Gemma and Mistral Nemo.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from plaudit.records import Item
from tests.models.builders import byte_tokenizer

from . import tiny

TEMPLATES = {file.stem: file.read_text() for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
# begin and end tokens, and the other control tokens
CONTROLS = {
    "gemma": ("<bos>", "<end_of_turn>", "<start_of_turn>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
}
ASK = {"role": "user", "content": "\nhello? <b> "}
TURNS = (ASK, {"role": "assistant", "content": "hell "}, {"role": "user", "content": "again\n"})
ANSWERS = ("hell no", "hell no \n", "<think>\nhello\n</think>\n\nno", "<", "")


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name.startswith("qwen"):
        tokenizer = byte_tokenizer(chat_template=TEMPLATES[name])
        thinking = [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
        tokenizer.add_tokens(thinking if name == "qwen3" else [])
        return tokenizer
    bos, eos, *_ = CONTROLS[name]
    backend = byte_tokenizer().backend_tokenizer
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS[name]])
    tokenizer = tiny.with_bos(backend, bos, eos_token=eos, chat_template=TEMPLATES[name])
    tokenizer.pad_token = "<|endoftext|>"  # transformers reads a classifier at the last token that is not padding
    return tokenizer


def answered(prompt: tuple[dict[str, str], ...], answer: str) -> list[dict[str, str]]:
    return [*prompt, {"role": "assistant", "content": answer}]


def forms(prompt: tuple[dict[str, str], ...], answer: str) -> dict[str, Item]:
    plain = tuple(answered(prompt, answer))
    empty = {"tool_calls": None, "function_call": None, "refusal": None}
    return {
        "messages": Item(messages=plain),
        "prompt and response": Item(prompt=prompt, response=answer),
        "prompt and steps": Item(prompt=prompt, response=(answer[:3], answer[3:])),
        "empty fields": Item(messages=tuple({**message, **empty} for message in plain)),
        "no tool calls": Item(messages=(*plain[:-1], {**plain[-1], "tool_calls": []})),
    }
