"""SGLang as a rollout engine, through its HTTP API (0.5.10) only; tested against recorded replies, not a server.

Properties of its API, and their consequences:

- Log-probs are those after the temperature and before top-k, top-p and min-p: with one of these set, the probability
  of a sampled token is unknown, and the request is refused. SGLANG_RETURN_ORIGINAL_LOGPROB must not be set.
- Seeds only work in a server that was started with `--enable-deterministic-inference`. Every sample is a separate
  request, with its own seed.
- Weights are sent through the disk. The server stores their version as text, which we write and a restart loses.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import ChannelError, RequestError, WeightsRefused
from plaudit.place.channels.disk import take_from_disk
from plaudit.place.channels.messages import DiskTake, WeightMessage, WeightReply, plain, typed
from plaudit.place.channels.weights import Layout
from plaudit.place.engines.engine_server import EngineServer
from plaudit.place.engines.http_engine import Drawn, HttpEngine, State
from plaudit.place.engines.http_wire import HttpWire

UNKNOWN = float("nan")
LOAD = 3600.0  # seconds; a channel has its own deadline


class SglangEngine(HttpEngine):
    def __init__(
        self, url: str, *, stop_ids: Sequence[int], timeout: float = 600.0, server: EngineServer | None = None
    ) -> None:
        super().__init__(url, name="SGLang", stop_ids=stop_ids, timeout=timeout, server=server)
        self.run = secrets.token_hex(4)  # so that a version is not mistaken for another run's
        self.wire = HttpWire(self.name, self._receive)
        self.state()

    def request(self, prompt: Sequence[int], params: SamplingParams) -> tuple[str, dict[str, Any]]:
        filters = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        active = [f"{name} = {getattr(params, name)}" for name, off in filters.items() if getattr(params, name) != off]
        if active:
            raise RequestError(
                f"SGLang returns log-probs from before {', '.join(active)} are applied, which are not those of the "
                "sampling distribution: remove them, or use the core or vLLM"
            )
        if params.logit_bias or params.salt:
            raise RequestError("logit_bias and salt are not supported by SGLang: use the core or vLLM")
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.stop_ids)}
        options: dict[str, Any] = {
            "temperature": params.temperature, "stop": list(params.stop), "stop_token_ids": sorted(stops),
            "ignore_eos": params.ignore_eos, "min_new_tokens": params.min_tokens,
            "max_new_tokens": 2**31 - 1 if params.max_tokens is None else params.max_tokens,
        }  # fmt: skip
        each = [dict(options) for _ in range(params.n)]
        if params.seed is not None:
            for index, one in enumerate(each):
                one["sampling_seed"] = (params.seed + index) % 2**31
        ids = [list(prompt)] * params.n
        return "/generate", {"input_ids": ids, "sampling_params": each, "return_logprob": True, "stream": False}

    def drawn(self, reply: Any) -> list[Drawn]:
        samples = []
        for each in reply if isinstance(reply, list) else [reply]:
            meta = each["meta_info"]
            entries = meta["output_token_logprobs"]
            ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
            samples.append(Drawn(ids, logprobs, each["text"], meta["finish_reason"]["type"]))
        return samples

    def logprobs_of(
        self, prompt: Sequence[int], params: SamplingParams, drawn: Drawn
    ) -> tuple[Sequence[float], Sequence[float]]:
        logprobs = drawn.logprobs
        if params.temperature == 0:
            return [0.0] * len(logprobs), logprobs
        return logprobs, logprobs if params.temperature == 1 else [UNKNOWN] * len(logprobs)

    def top_logprobs(self, context: Sequence[int], count: int) -> dict[int, float]:
        body = {
            "input_ids": list(context), "return_logprob": True, "top_logprobs_num": count, "stream": False,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
        }  # fmt: skip
        reply = self.control("POST", "/generate", body)
        entries = reply["meta_info"]["output_top_logprobs"][0]
        return {entry[1]: entry[0] for entry in entries}

    def beat(self, seconds: float) -> None:
        self.control("GET", "/health_generate", seconds=seconds)

    # Weights and memory

    def state(self) -> State:
        weight_version = str(self.control("GET", "/get_model_info")["weight_version"])
        run, _, version = weight_version.rpartition("-")
        return State(int(version) if run == self.run and version.isdigit() else None, None)

    def pause(self) -> None:
        """Running requests return to the queue with their tokens, so that the cache can be flushed."""
        self.control("POST", "/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self.control("POST", "/continue_generation", {})

    def forget(self) -> None:
        self.control("POST", "/flush_cache")

    def _receive(self, data: dict[str, Any]) -> dict[str, Any]:
        """A disk channel's message. The file is read here too, for its checksum: the server computes none."""
        message = typed(data, WeightMessage)
        if not isinstance(message.body, DiskTake):
            reply = WeightReply(message.exchange, 'takes weights by disk alone: set placement.channel = "disk"')
            return plain(reply)
        try:
            received = take_from_disk(message.body, message.layout, _Discard())
            self._load(message.body.path, message.version)
        except ChannelError as error:
            return plain(WeightReply(message.exchange, str(error)))
        return plain(WeightReply(message.exchange, None, message.version, received.checksum))

    def _load(self, path: str, version: int) -> None:
        body = {
            "model_path": path, "weight_version": f"{self.run}-{version}", "abort_all_requests": False,
            "flush_cache": True,
        }  # fmt: skip
        reply = self.control("POST", "/update_weights_from_disk", body, seconds=LOAD)
        if not reply["success"]:
            raise WeightsRefused(str(reply["message"]))

    def sleep(self) -> None:
        self.control("POST", "/release_memory_occupation", {})

    def wake(self) -> None:
        self.control("POST", "/resume_memory_occupation", {})


class _Discard:
    """Discards weights: they are only read."""

    def check(self, layout: Layout) -> None: ...

    def home(self, name: str) -> Tensor | None:
        return None

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            pass
