"""Requests that vLLM and Plaudit must answer alike: status, JSON keys and types, scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXT, OTHER = "How are you?", "Fine, thank you."
LONG = "abcdefghij" * 20  # longer than the 64 tokens that these models accept
TOKENS = [265, 72, 101, 108, 108, 111]
CHAT = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": OTHER}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "are you?"}]}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]


@dataclass(frozen=True)
class Case:
    """model    whether the model's name is added to the body, unless it has one
    differs  why the two replies differ; if set, they must differ
    """

    name: str
    path: str
    body: Any
    model: bool = True
    differs: str = ""


def _inputs(path: str) -> list[Case]:
    """Requests that every route with `input` or `messages` accepts or rejects."""
    bodies: dict[str, Any] = {
        "text": {"input": TEXT},
        "texts": {"input": [TEXT, OTHER, "x"]},
        "tokens": {"input": TOKENS},
        "token lists": {"input": [TOKENS, TOKENS[:3]]},
        "same twice": {"input": [TEXT, TEXT]},
        "control strings": {"input": "a<|eot_id|>b"},
        "accents": {"input": "déjà vu ☃ 你好"},
        "raw": {"input": [TEXT, OTHER], "use_activation": False},
        "activated": {"input": [TEXT, OTHER], "use_activation": True},
        "activation null": {"input": TEXT, "use_activation": None},
        "no special tokens": {"input": TEXT, "add_special_tokens": False, "use_activation": False},
        "user and request_id": {"input": TEXT, "user": "me", "request_id": "abc"},
        "messages": {"messages": CHAT, "use_activation": False},
        "messages, user only": {"messages": CHAT[:1], "use_activation": False},
        "messages, generation prompt": {"messages": CHAT[:1], "add_generation_prompt": True, "use_activation": False},
        "messages, system": {"messages": [{"role": "system", "content": "Be kind."}, *CHAT], "use_activation": False},
        "messages, text parts": {"messages": PARTS, "use_activation": False},
        "template variables": {"messages": CHAT, "chat_template_kwargs": {"a": 1}, "use_activation": False},
        "continued": {"messages": CHAT, "continue_final_message": True, "use_activation": False},
        "cut": {"input": LONG, "truncate_prompt_tokens": 10, "use_activation": False},
        "cut to the model": {"input": LONG, "truncate_prompt_tokens": -1, "use_activation": False},
        "cut right": {
            "input": "abcdef", "truncate_prompt_tokens": 3, "truncation_side": "right", "use_activation": False,
        },
        "cut left": {
            "input": "abcdef", "truncate_prompt_tokens": 3, "truncation_side": "left", "use_activation": False,
        },
        "cut tokens": {"input": TOKENS, "truncate_prompt_tokens": 3, "use_activation": False},
        "cut tokens left": {
            "input": TOKENS, "truncate_prompt_tokens": 3, "truncation_side": "left", "use_activation": False,
        },
        "cut messages": {"messages": CHAT, "truncate_prompt_tokens": 5, "use_activation": False},
        "side without cut": {"input": TEXT, "truncation_side": "left"},
        "just fits": {"input": "a" * 63, "use_activation": False},
        "one too many": {"input": "a" * 64},
        "too long": {"input": LONG},
        "too many tokens": {"input": [72] * 65},
        "far too long": {"input": LONG * 1000},
        "messages too long": {"messages": [{"role": "user", "content": LONG}]},
        "one of two too long": {"input": [TEXT, LONG]},
        "empty text": {"input": "", "use_activation": False},
        "empty text, nothing added": {"input": "", "add_special_tokens": False},
        "empty list": {"input": []},
        "empty token list": {"input": [[]]},
        "empty text in list": {"input": [TEXT, ""], "use_activation": False},
        "no input": {},
        "input null": {"input": None},
        "input number": {"input": 5},
        "input object": {"input": {"text": TEXT}},
        "input mixed": {"input": [TEXT, 5]},
        "input nested texts": {"input": [[TEXT]]},
        "fraction": {"input": [1.5]},
        "token outside the vocabulary": {"input": [72, 100000]},
        "negative token": {"input": [72, -1]},
        "huge token": {"input": [2**70]},
        "cut too far": {"input": TEXT, "truncate_prompt_tokens": -2},
        "cut beyond the model": {"input": TEXT, "truncate_prompt_tokens": 100000},
        "cut to nothing": {"input": TEXT, "truncate_prompt_tokens": 0},
        "cut is text": {"input": TEXT, "truncate_prompt_tokens": "some"},
        "unknown side": {"input": TEXT, "truncate_prompt_tokens": 3, "truncation_side": "middle"},
        "activation is text": {"input": TEXT, "use_activation": "perhaps"},
        "normalize": {"input": TEXT, "normalize": True},
        "priority": {"input": TEXT, "priority": 3},
        "salt": {"input": TEXT, "cache_salt": "pepper", "use_activation": False},
        "empty salt": {"input": TEXT, "cache_salt": ""},
        "no messages": {"messages": []},
        "messages text": {"messages": "hello"},
        "message without role": {"messages": [{"content": "hello"}]},
        "image": {"messages": IMAGE},
        "template": {"messages": CHAT, "chat_template": "{{ messages }}"},
        "prompt and continuation": {
            "messages": CHAT, "add_generation_prompt": True, "continue_final_message": True,
        },
        "unknown model": {"model": "nobody", "input": TEXT},
        "model is a number": {"model": 5, "input": TEXT},
        "list as body": [TEXT],
        "text as body": "hello",
    }  # fmt: skip
    cases = [Case(f"{path} {name}", path, body) for name, body in bodies.items()]
    cases.append(Case(f"{path} no model", path, {"input": TEXT}, model=False))
    return cases


def _pairs() -> list[Case]:
    documents = [OTHER, "x", TEXT]
    bodies: dict[str, dict[str, Any]] = {
        "/score": {
            "1:1": {"queries": TEXT, "documents": OTHER},
            "1:N": {"queries": TEXT, "documents": documents},
            "1:N raw": {"queries": TEXT, "documents": documents, "use_activation": False},
            "N:N": {"queries": [TEXT, "a", "b"], "documents": documents},
            "text_1": {"text_1": TEXT, "text_2": documents},
            "data_1": {"data_1": [TEXT], "data_2": documents},
            "items": {"queries": TEXT, "items": documents},
            "N:M": {"queries": [TEXT, OTHER], "documents": documents},
            "no documents": {"queries": TEXT, "documents": []},
            "no queries": {"queries": [], "documents": documents},
            "documents missing": {"queries": TEXT},
            "document number": {"queries": TEXT, "documents": [5]},
            "empty texts": {"queries": "", "documents": "", "use_activation": False},
            "too long": {"queries": TEXT, "documents": [LONG]},
            "cut": {
                "queries": TEXT, "documents": [LONG], "truncate_prompt_tokens": 20, "use_activation": False,
            },
            "cut left": {
                "queries": TEXT, "documents": [LONG], "truncate_prompt_tokens": 20, "truncation_side": "left",
                "use_activation": False,
            },
            "cut each": {
                "queries": TEXT, "documents": [LONG], "max_tokens_per_query": 4, "max_tokens_per_doc": 6,
                "use_activation": False,
            },
            "unknown model": {"model": "nobody", "queries": TEXT, "documents": OTHER},
        },
        "/rerank": {
            "three": {"query": TEXT, "documents": documents},
            "raw": {"query": TEXT, "documents": documents, "use_activation": False},
            "first": {"query": TEXT, "documents": documents, "top_n": 1},
            "more than there are": {"query": TEXT, "documents": documents, "top_n": 10},
            "one text": {"query": TEXT, "documents": OTHER},
            "no documents": {"query": TEXT, "documents": []},
            "negative": {"query": TEXT, "documents": documents, "top_n": -1},
            "no query": {"documents": documents},
            "too long": {"query": TEXT, "documents": [LONG]},
            "unknown model": {"model": "nobody", "query": TEXT, "documents": documents},
        },
    }  # fmt: skip
    cases = [Case(f"{path} {name}", path, body) for path, table in bodies.items() for name, body in table.items()]
    cases += [Case(f"{path} alias", path, bodies["/score"]["1:N"]) for path in ("/v1/score",)]
    cases += [Case(f"{path} alias", path, bodies["/rerank"]["three"]) for path in ("/v1/rerank", "/v2/rerank")]
    return cases


def _pooling() -> list[Case]:
    bodies: dict[str, Any] = {
        "base64": {"input": [TEXT, OTHER], "encoding_format": "base64", "use_activation": False},
        "base64 half": {"input": TEXT, "encoding_format": "base64", "embed_dtype": "float16", "use_activation": False},
        "base64 big": {"input": TEXT, "encoding_format": "base64", "endianness": "big", "use_activation": False},
        "unknown encoding": {"input": TEXT, "encoding_format": "hex"},
        "dimensions": {"input": TEXT, "dimensions": 4},
        "embed": {"input": TEXT, "task": "embed"},
        "score task": {"input": TEXT, "task": "score"},
        "unknown task": {"input": TEXT, "task": "guess"},
        "plugin": {"data": {"image": "x"}},
    }
    return [Case(f"/pooling {name}", "/pooling", body) for name, body in bodies.items()]


def _tokenizer() -> list[Case]:
    tokenize: dict[str, Any] = {
        "text": {"prompt": TEXT},
        "strings": {"prompt": TEXT, "return_token_strs": True},
        "nothing added": {"prompt": TEXT, "add_special_tokens": False},
        "messages": {"messages": CHAT},
        "messages, no generation prompt": {"messages": CHAT, "add_generation_prompt": False},
        "long": {"prompt": LONG},
        "empty": {"prompt": ""},
        "no prompt": {},
        "number": {"prompt": 5},
    }
    detokenize: dict[str, Any] = {
        "tokens": {"tokens": TOKENS},
        "none": {"tokens": []},
        "outside": {"tokens": [100000]},
        "negative": {"tokens": [-1]},
        "text": {"tokens": "abc"},
        "missing": {},
    }
    cases = [Case(f"/tokenize {name}", "/tokenize", body) for name, body in tokenize.items()]
    return cases + [Case(f"/detokenize {name}", "/detokenize", body) for name, body in detokenize.items()]


def _differences(path: str) -> list[Case]:
    guarded = [{"role": "user", "content": "a<|eot_id|>b"}]
    bodies: list[tuple[str, Any, str]] = [
        ("control strings in a message", {"messages": guarded}, "content cannot pose as a control token here"),
        ("begin token written", {"input": "<|begin_of_text|>ab"}, "a begin token in the text is not doubled here"),
        ("misspelt", {"input": TEXT, "use_activaton": False}, "a field without an effect is refused by name"),
        ("tokens added to messages", {"messages": CHAT, "add_special_tokens": True}, "not supported, and said so"),
        ("unknown role", {"messages": [{"role": "narrator", "content": "x"}]}, "a role reaches the template unguarded"),
        ("activation as text", {"input": TEXT, "use_activation": "true"}, "JSON has booleans"),
        ("number as text", {"input": TEXT, "truncate_prompt_tokens": "3"}, "JSON has numbers"),
        ("whole fraction", {"input": [72.0]}, "a token id is an integer"),
        ("older name", {"input": OTHER, "activation": False}, "vLLM no longer knows it; verl 0.7 sends it"),
        ("padding", {"input": TEXT, "padding": "max_length"}, "a reward read behind padding is no reward"),
    ]
    return [Case(f"{path} {name}", path, body, differs=why) for name, body, why in bodies]


UNKNOWN_TOKENIZER = Case(
    "/tokenize unknown model", "/tokenize", {"model": "nobody", "prompt": TEXT},
    differs="vLLM's `param` is model here and null on its other routes",
)  # fmt: skip
BYTES = Case("/pooling bytes", "/pooling", {"input": TEXT, "encoding_format": "bytes"}, differs="float and base64 do")
TOKEN_ROWS = Case(
    "/pooling tokens of a sequence model", "/pooling", {"input": TEXT, "task": "token_classify"},
    differs="vLLM must be started anew for this",
)  # fmt: skip
INSTRUCTION = Case(
    "/score instruction", "/score", {"queries": TEXT, "documents": OTHER, "instruction": "be strict"},
    differs="vLLM drops it where it has no template; here that is said",
)  # fmt: skip

CLASSIFY = [*_inputs("/classify"), *_differences("/classify")]
POOLING = [*_inputs("/pooling"), *_pooling(), BYTES]
SEQUENCE = [*CLASSIFY, *POOLING, TOKEN_ROWS, *_tokenizer(), UNKNOWN_TOKENIZER, *_pairs(), INSTRUCTION]
STEPS = [
    *POOLING,
    *(
        Case(f"/pooling {name}", "/pooling", body)
        for name, body in {
            "two steps": {"input": "1+1?2+2?"},
            "two steps raw": {"input": "1+1?2+2?", "use_activation": False},
            "named task": {"input": ["a?", "b?c?", "none"], "task": "token_classify"},
            "whole": {"input": "a?", "task": "classify"},
            "steps in messages": {"messages": [*CHAT, {"role": "user", "content": "?"}], "use_activation": False},
            "steps in base64": {"input": "1+1?2+2?", "encoding_format": "base64"},
        }.items()
    ),
]
