"""Tokenizers: loading, the pad rule, and encoding in which a text cannot pose as control tokens."""

from __future__ import annotations

import re
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from plaudit.errors import ModelError, RequestError, one_line
from plaudit.models import catalog
from plaudit.models.quiet import quiet
from plaudit.models.recent import RecentIds
from plaudit.models.safety import refuse_code

PARTS_KEPT = 1 << 22  # characters and tokens of encoded parts of conversations, about 20 MB
FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory. One without a pad token pads with its end token."""
    return tokenizer_in(catalog.resolve(path))


def tokenizer_in(directory: Path) -> PreTrainedTokenizerFast:
    """The same of a directory that need not hold a model."""
    refuse_code(directory)
    if not any((directory / name).is_file() for name in FILES):
        raise ModelError(f"no tokenizer in {directory}: looked for {', '.join(FILES)}; copy them from the base model")
    from transformers import AutoTokenizer  # loads torch, which those who only encode do without

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {directory}: {one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{directory} has a slow tokenizer ({type(tokenizer).__name__}); "
            "save it as tokenizer.json with transformers on a machine that has its library"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"the tokenizer of {directory} has neither a pad nor an eos token; "
                "set one: `tokenizer.pad_token = ...`, then tokenizer.save_pretrained(directory)"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_parts(tokenizer: PreTrainedTokenizerFast) -> tuple[bytes, dict[str, Any]]:
    """All that a tokenizer is for us, as bytes and JSON: its backend; the names of its tokens and its chat template."""
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return tokenizer.backend_tokenizer.to_str().encode(), {**names, "chat_template": template}


def encode(tokenizer: PreTrainedTokenizerFast, text: str, control: bool = False) -> list[int]:
    """Token ids of `text`, nothing added. Only with `control` do strings such as "<|im_end|>" become control tokens."""
    refuse_surrogates(text)
    if control:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids
    return codec_of(tokenizer).literal(text)


def bos_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What the tokenizer itself puts before a text: its begin token, or nothing."""
    return added_ids(tokenizer)[0]


def added_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """What the tokenizer itself puts before a text and behind it. Found by its ids: a text may consist of special
    tokens, such as the unknown one."""
    ids: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    first = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
    return ids[:first], ids[first + len(plain) :]


def refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not Unicode: lone surrogate {text[error.start]!r} at {error.start}") from error


@dataclass(frozen=True)
class Codec:
    """A tokenizer's second face, for text that is not trusted.

    backend       a copy that reads special-token strings as text; a copy, because the switch is a field of the shared
                  object and another thread's call could flip it between our setting and our use
    controls      control token ids and their strings
    unknown       the id of the unknown token, which any text may yield ...
    unknown_ends  ... unless it is also the token that begins, ends or pads
    normalized    whether control strings are looked for after normalising
    divides       whether what is between two control strings is encoded independently of everything else
    parts         such parts, each with the control string before it
    """

    backend: Tokenizer
    controls: dict[int, str]
    unknown: int | None
    unknown_ends: bool
    normalized: bool
    divides: bool
    parts: RecentIds = field(default_factory=lambda: RecentIds(PARTS_KEPT), repr=False, compare=False)

    @cached_property
    def strings(self) -> re.Pattern[str]:
        """A control string; where several begin, the longest."""
        return re.compile("|".join(map(re.escape, sorted(self.controls.values(), key=len, reverse=True))) or r"(?!)")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Where a control string starts, overlapping ones included."""
        return re.compile(f"(?={self.strings.pattern})")

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.controls.values()), default=0)

    @cached_property
    def ends(self) -> tuple[set[str], set[str]]:
        return _ends_of(set(self.controls.values()))

    def begins_as_one_ends(self, text: str) -> bool:
        """Whether the text begins with a proper ending of a control string."""
        return not self.ends[1].isdisjoint([text[:size] for size in range(1, min(self.longest, len(text) + 1))])

    def ends_as_one_begins(self, text: str) -> bool:
        return not self.ends[0].isdisjoint([text[-size:] for size in range(1, min(self.longest, len(text) + 1))])

    @cached_property
    def forbidden(self) -> frozenset[int]:
        return frozenset(self.controls) - (frozenset() if self.unknown_ends else {self.unknown})

    def literal(self, text: str) -> list[int]:
        # A batch of one: alone, `encode` holds the GIL for as long as it takes, and works out offsets.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        if self.forbidden.isdisjoint(encoding.ids):
            return list(encoding.ids)
        return self._broken(text)[0]

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same ids, and the characters that each stands for."""
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        if self.forbidden.isdisjoint(encoding.ids):
            return list(encoding.ids), list(encoding.offsets)
        return self._broken(text)

    def _broken(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """A vocabulary may hold control strings as ordinary pieces: cut the text inside each and encode the parts."""
        cuts = [match.start() + 1 for match in self.pattern.finditer(text)]
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            encoding = self.backend.encode(text[begin:end], add_special_tokens=False)
            ids += encoding.ids
            spans += [(begin + a, begin + b) for a, b in encoding.offsets]
        bad = self.forbidden.intersection(ids)
        if bad:
            name = self.controls[min(bad)]
            raise RequestError(f"the text yields the control token {name!r} and cannot be cut to avoid it; remove it")
        return ids, spans


_CODECS: weakref.WeakKeyDictionary[PreTrainedTokenizerFast, tuple[int, Codec]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def codec_of(tokenizer: PreTrainedTokenizerFast) -> Codec:
    with _LOCK:
        size = len(tokenizer)
        cached = _CODECS.get(tokenizer)
        if cached is None or cached[0] != size:
            cached = _CODECS[tokenizer] = (size, _new_codec(tokenizer))
        return cached[1]


def _new_codec(tokenizer: PreTrainedTokenizerFast) -> Codec:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    added = tokenizer.added_tokens_decoder
    controls = {i: token.content for i, token in added.items() if token.special}
    controls |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = tokenizer.unk_token_id
    normalized = backend.normalizer is not None and any(added[i].normalized for i in controls if i in added)
    divides = _divides(list(added.values()), set(controls.values()))
    return Codec(backend, controls, unknown, unknown is not None and unknown in ends, normalized, divides)


def _divides(added: list[AddedToken], controls: set[str]) -> bool:
    """Whether a control string in a text is always the same control token, whatever is beside it. The tokenizer looks
    for added tokens first and encodes what is between them alone. Not so if a token takes in white space or a
    control string beside it, or is found only after normalising."""
    if {token.content for token in added if token.special} != controls:
        return False
    if any(token.normalized or token.lstrip or token.rstrip for token in added if token.special):
        return False
    others = {token.content for token in added if not token.special}
    if any(token.single_word for token in added) or any(control in other for other in others for control in controls):
        return False
    heads, tails = _ends_of(controls)
    other_heads, other_tails = _ends_of(others)
    return heads.isdisjoint(tails | other_tails) and tails.isdisjoint(other_heads)


def _ends_of(texts: set[str]) -> tuple[set[str], set[str]]:
    """Their proper beginnings and endings."""
    cuts = [(text, size) for text in texts for size in range(1, len(text))]
    return {text[:size] for text, size in cuts}, {text[-size:] for text, size in cuts}


def decodes_apart(tokenizer: Any) -> bool:
    """Whether two runs of tokens decode to the text of the first followed by that of the second, if the first ends with
    a complete character. True of decoders that concatenate bytes or pieces and change nothing afterwards."""
    base = PreTrainedTokenizerFast
    if not isinstance(tokenizer, base) or tokenizer.clean_up_tokenization_spaces:
        return False
    if type(tokenizer).decode is not base.decode or type(tokenizer)._decode is not base._decode:
        return False
    return isinstance(tokenizer.backend_tokenizer.decoder, decoders.Fuse | decoders.ByteLevel)
