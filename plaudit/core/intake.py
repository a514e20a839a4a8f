"""Creates requests: tokenizes texts, and rejects invalid input before anything reaches the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from operator import index
from typing import Any

from plaudit.core.model.decoder import Decoder
from plaudit.core.model.readouts import Read
from plaudit.core.sampling.constraint import Constraints
from plaudit.core.sampling.noise import mix64
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.core.sequence import Request
from plaudit.core.sequence import Sequence as Seq
from plaudit.core.text import TextStream
from plaudit.errors import RequestError
from plaudit.models.positions import way_to_more
from plaudit.records import NEXT, Sample


class Intake:
    def __init__(self, decoder: Decoder, tokenizer: Any, blocks: int, block_size: int, seed: int) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.pool_tokens = blocks * block_size
        self.block_size = block_size
        self.seed = seed
        self._numbers = count()
        self.end_tokens = _end_tokens(decoder.module, tokenizer)
        self.constraints = Constraints(tokenizer, decoder.vocab_size, self.end_tokens)

    def generations(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None, begun: Sequence[Sequence[Sample]] | None,
        seeds: Sequence[int] | None = None,
    ) -> list[Request]:  # fmt: skip
        """The requests of Engine.generate; same arguments."""
        prompt_list = as_list(prompts)
        options = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompt_list)
        if len(options) != len(prompt_list):
            raise RequestError(
                f"{len(prompt_list)} prompts and {len(options)} SamplingParams: give one for all, or one per prompt"
            )
        going_on: Sequence[Sequence[Sample] | None] = [None] * len(prompt_list) if begun is None else begun
        own: Sequence[int | None] = [None] * len(prompt_list) if seeds is None else seeds
        if seeds is not None and (len(seeds) != len(prompt_list) or any(not 0 <= seed < 2**63 for seed in seeds)):
            raise RequestError(
                f"{len(prompt_list)} prompts and {len(seeds)} seeds: give one seed per prompt, from 0 to 2**63 - 1"
            )
        rows = enumerate(zip(prompt_list, options, going_on, own, strict=True))
        return [
            self.generation(prompt, option, group=group, begun=samples, seed=seed)
            for group, (prompt, option, samples, seed) in rows
            if samples is None or samples
        ]

    def generation(
        self, prompt: str | Sequence[int], params: SamplingParams, *, group: int = 0, stream: bool = False,
        begun: Sequence[Sample] | None = None, seed: int | None = None,
    ) -> Request:  # fmt: skip
        """begun: unfinished samples to continue, instead of n new ones. seed: instead of the params'."""
        ids = self.tokens(prompt)
        stop_ids = self.check_params(params)
        seed = params.seed if seed is None else seed
        most = self.most(len(ids), params)
        number = next(self._numbers)
        request = Request(
            number, tuple(ids), params, seed=mix64(self.seed) ^ number if seed is None else seed,
            stop_ids=stop_ids, max_tokens=most, group=group, deadline=_deadline(params),
        )  # fmt: skip
        self._read_prompt(request, begun)
        if begun is None:
            request.sequences = [Seq(request, index, list(ids)) for index in range(params.n)]
        else:
            if seed is None:
                raise RequestError("a sample can be continued only with the seed it was started with: give its seed")
            request.sequences = [self._begun(request, sample) for sample in begun]
        if (constraint := self.constraints.of(params)) is not None:
            for sequence in request.sequences:
                sequence.constraint = constraint.copy()
        request.open = {sequence.index for sequence in request.sequences}
        for sequence in request.sequences:
            if self.tokenizer is not None and (stream or params.stop):
                sequence.stream = TextStream(self.tokenizer, params.stop, params.min_tokens, params.include_stop)
                for token in sequence.tokens[len(ids) :]:
                    sequence.stream.push(token)
        return request

    def _begun(self, request: Request, sample: Sample) -> Seq:
        if tuple(sample.prompt_ids) != request.prompt_ids or not 0 < len(sample.token_ids) < request.max_tokens:
            raise RequestError(
                f"a sample of {len(sample.token_ids)} tokens cannot be continued: it must belong to this prompt and "
                f"have at least 1 and fewer than max_tokens = {request.max_tokens} tokens"
            )
        return Seq(
            request, sample.index, [*request.prompt_ids, *sample.token_ids], logprobs=list(sample.logprobs),
            raw_logprobs=list(sample.raw_logprobs), tempered=list(sample.tempered_logprobs or ()),
            tops=list(sample.top_logprobs or ()), versions=list(sample.versions), reported=len(sample.token_ids),
        )  # fmt: skip

    @staticmethod
    def _read_prompt(request: Request, begun: Sequence[Sample] | None) -> None:
        if (count := request.params.prompt_logprobs) is None:
            return
        if begun:
            request.prompt_logprobs, request.prompt_tops = begun[0].prompt_logprobs, begun[0].prompt_top_logprobs
            request.prompt_ranks = begun[0].prompt_ranks
        elif len(request.prompt_ids) == 1:
            request.prompt_logprobs, request.prompt_tops, request.prompt_ranks = (), () if count else None, ()
        else:
            before = tuple(range(len(request.prompt_ids) - 1))
            request.prompt_read = Read("logprobs", before, (NEXT,), likeliest=count, ranks=True)

    def scoring(self, ids: list[int], read: Read, params: SamplingParams) -> Request:
        self.check_pool(len(ids), f"a sequence of {len(ids)} tokens")
        request = Request(next(self._numbers), tuple(ids), params, read=read, deadline=_deadline(params))
        request.sequences.append(Seq(request, 0, list(ids)))
        return request

    def tokens(self, prompt: str | Sequence[int], checked: int = 0) -> list[int]:
        """The token ids of a prompt, checked. The first `checked` of them have been checked before."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the engine has no tokenizer: give token ids instead of text")
            ids: list[int] = self.tokenizer.encode(prompt)
        elif checked:
            ids = [*prompt[:checked], *_whole_numbers(prompt[checked:])]
        else:
            ids = _whole_numbers(prompt)
        if not ids:
            raise RequestError("the prompt is empty: give it at least one token")
        new = ids[checked:] or ids[-1:]
        low, high = min(new), max(new)
        if low < 0 or high >= self.decoder.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(
                f"token id {wrong} at {ids.index(wrong)} is outside the vocabulary 0..{self.decoder.vocab_size - 1} "
                f"of {self.decoder.name}"
            )
        if len(ids) > self.decoder.max_positions:
            raise RequestError(
                f"{len(ids)} tokens are more than the {self.decoder.max_positions} positions of {self.decoder.name}: "
                f"shorten the text{way_to_more(self.decoder.config)}"
            )
        return ids

    def reads(
        self, ids: Sequence[list[int]], positions: Sequence[Sequence[int]] | None, columns: Sequence[int] | None,
        logprobs: bool = False,
    ) -> list[Read]:  # fmt: skip
        name = self.decoder.name
        if columns is None and self.decoder.kind == "causal":
            raise RequestError(f"{name} has a vocabulary head and no class head: set columns to the token ids to read")
        if columns is not None and self.decoder.kind != "causal":
            raise RequestError(f"{name} has a class head and no vocabulary head: leave out columns")
        for token in columns or ():
            if not 0 <= token < self.decoder.vocab_size and not (logprobs and token == NEXT):
                raise RequestError(f"column {token} is outside the vocabulary 0..{self.decoder.vocab_size - 1}")
        if positions is None:
            positions = [[self.decoder.last_position(s)] for s in ids]
        if len(positions) != len(ids):
            raise RequestError(f"{len(ids)} sequences and {len(positions)} lists of positions: give one per sequence")
        for s, at in zip(ids, positions, strict=True):
            if list(at) != sorted(set(at)) or (at and not 0 <= at[0] <= at[-1] < len(s)):
                raise RequestError(
                    f"positions {list(at)} must be ascending and within 0..{len(s) - 1}, the sequence's tokens"
                )
            if logprobs and at and at[-1] == len(s) - 1 and NEXT in (columns or ()):
                raise RequestError(f"position {at[-1]} is the last: no token follows it whose log-prob could be read")
        if columns is None:
            return [Read("head", tuple(at)) for at in positions]
        return [Read("logprobs" if logprobs else "columns", tuple(at), tuple(columns)) for at in positions]

    def most(self, prompt: int, params: SamplingParams) -> int:
        """How many tokens may be generated after a prompt of this many tokens."""
        left = self.decoder.max_positions - prompt
        if left < 1:
            raise RequestError(
                f"the prompt has {prompt} tokens and {self.decoder.name} {self.decoder.max_positions} positions: "
                f"no position is left to generate; shorten the prompt{way_to_more(self.decoder.config)}"
            )
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        # The last token drawn is never stored.
        self.check_pool(prompt + most - 1, f"a prompt of {prompt} tokens and {most} more")
        return most

    def check_params(self, params: SamplingParams) -> frozenset[int]:
        """Check the params for this model; returns the tokens that end a sample."""
        if self.decoder.kind != "causal":
            raise RequestError(f"{self.decoder.name} has no vocabulary head: it can score but not generate")
        vocab = self.decoder.vocab_size
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < vocab:
                    raise RequestError(f"{name} has token id {token}, outside the vocabulary 0..{vocab - 1}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the engine has none: use stop_token_ids")
        for name in ("top_logprobs", "prompt_logprobs"):
            if (count := getattr(params, name) or 0) > vocab:
                raise RequestError(f"{name} {count} is more than the vocabulary of {vocab} tokens")
        if params.allowed_token_ids is not None:
            barred = {*params.bad_words_ids, *(self._stop_ids(params) if params.min_tokens else ())}
            if not {*params.allowed_token_ids} - barred:
                raise RequestError(
                    f"allowed_token_ids leaves no token: bad_words_ids or min_tokens forbid all of the "
                    f"{len(params.allowed_token_ids)} allowed ones; allow another"
                )
        return self._stop_ids(params)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_tokens)

    def check_pool(self, tokens: int, what: str) -> None:
        if tokens > self.pool_tokens:
            needed = -(-tokens // self.block_size) * self.block_size * self.decoder.token_bytes()
            raise RequestError(
                f"{what} need KV for {tokens} tokens and the pool holds {self.pool_tokens}: "
                f"request fewer tokens, or raise kv_bytes to {needed} or more"
            )


def as_list(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[str | Sequence[int]]:
    """A list of prompts; a single text, or a single list, array or tensor of token ids, becomes a list of one."""
    first = prompts[0] if len(prompts) else None
    if isinstance(prompts, str) or isinstance(first, int) or getattr(first, "ndim", None) == 0:
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _whole_numbers(prompt: Any) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array or a tensor
    try:
        return list(map(index, values))
    except TypeError as error:
        raise RequestError(f"a prompt is a text or a list of token ids, which are whole numbers: {error}") from error


def _deadline(params: SamplingParams) -> float | None:
    return None if params.deadline is None else time.monotonic() + params.deadline


def _end_tokens(module: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence ids of the tokenizer, the generation config and the config; there may be several."""
    token_ids: set[int] = set()
    sources = (tokenizer, getattr(module, "generation_config", None), getattr(module, "config", None))
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            token_ids.add(ids)
        elif ids:
            token_ids.update(ids)
    return frozenset(token_ids)
