"""vLLM as a rollout engine (written against 0.32): token ids in, token ids and log-probs out.

The server must run with VLLM_SERVER_DEV_MODE=1, `--logprobs-mode processed_logprobs` and our worker extension, which
`VllmServer` sets; an external server is checked. Of the two log-probs of a Sample this mode returns the one under the
distribution that was sampled. The model's own is the same where no processor changes it and where the most likely
token is chosen; elsewhere it costs one more pass over each sample (`raw`), and is NaN without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import ConfigError, EngineError, EngineLost
from plaudit.place.channels.messages import WeightReply, plain
from plaudit.place.engines.engine_server import EngineServer
from plaudit.place.engines.http_engine import Drawn, HttpEngine, State
from plaudit.place.engines.http_wire import HttpWire
from plaudit.place.engines.vllm_extension import decode, encode
from plaudit.place.engines.vllm_server import MODEL, REQUIRED

UNKNOWN = float("nan")
LOAD = 3600.0  # timeout of a worker that loads weights; a channel has its own deadline


class VllmEngine(HttpEngine):
    def __init__(
        self, url: str, *, stop_ids: Sequence[int], timeout: float = 600.0, server: EngineServer | None = None,
        raw: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(url, name="vLLM", stop_ids=stop_ids, timeout=timeout, server=server)
        self.raw = raw
        self.model = self._fits()
        self.wire = HttpWire(self.name, self._receive)

    def _fits(self) -> str:
        """The name of the served model, if the server was started as required."""
        how = f"start it with VLLM_SERVER_DEV_MODE=1 and {' '.join(REQUIRED)}"
        try:
            info = self.control("GET", "/server_info", config_format="json")
            models = self.control("GET", "/v1/models")
            state = self.state()
            self.workers = len(self.call("plaudit_state"))
        except EngineLost:
            raise
        except EngineError as error:
            raise ConfigError(f"{error}; {how}") from error
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ConfigError(f"{self.name} has --logprobs-mode {mode}, expected processed_logprobs: {how}")
        self._life = state.life
        names = [model["id"] for model in models["data"]]
        return MODEL if MODEL in names else names[0]

    def request(self, prompt: Sequence[int], params: SamplingParams) -> tuple[str, dict[str, Any]]:
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.stop_ids)}
        body: dict[str, Any] = {
            "model": self.model, "prompt": list(prompt), "n": params.n, "temperature": params.temperature,
            "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p, "stop": list(params.stop),
            "stop_token_ids": sorted(stops), "ignore_eos": params.ignore_eos, "min_tokens": params.min_tokens,
            "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        # Without max_tokens vLLM stops after 16: a number that no model reaches means no limit.
        body["max_tokens"] = 2**31 - 1 if params.max_tokens is None else params.max_tokens
        if params.seed is not None:
            body["seed"] = params.seed
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.salt:
            body["cache_salt"] = params.salt
        return "/v1/completions", body

    def drawn(self, reply: Any) -> list[Drawn]:
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        return [Drawn(c["token_ids"], c["logprobs"]["token_logprobs"], c["text"], c["finish_reason"]) for c in choices]

    def logprobs_of(
        self, prompt: Sequence[int], params: SamplingParams, drawn: Drawn
    ) -> tuple[Sequence[float], Sequence[float]]:
        logprobs = drawn.logprobs
        if params.temperature == 0:
            return [0.0] * len(logprobs), logprobs  # greedy: the most likely token has probability 1
        if _plain(params):
            return logprobs, logprobs
        return logprobs, self._raw(prompt, drawn.token_ids) if self.raw else [UNKNOWN] * len(logprobs)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of each token after the first, at temperature 1. The prefix cache is not used."""
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        reply = self.control("POST", "/v1/completions", body)
        entries = reply["choices"][0]["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries, strict=True)]

    def top_logprobs(self, context: Sequence[int], count: int) -> dict[int, float]:
        body = {
            "model": self.model, "prompt": list(context), "max_tokens": 1, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0, "seed": 0, "logprobs": count, "return_tokens_as_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        reply = self.control("POST", "/v1/completions", body)
        top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.removeprefix("token_id:")): value for name, value in top.items()}

    def _raw(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        return self.logprobs([*prompt, *tokens])[len(prompt) - 1 :] if tokens else []

    # Weights and memory

    def beat(self, seconds: float) -> None:
        self.call("plaudit_state", seconds=seconds)  # every process of it must answer

    def state(self) -> State:
        states = [State(s["version"], s["life"]) for s in self.call("plaudit_state")]
        lives = " ".join(state.life or "" for state in states)
        versions = {state.version for state in states}
        return State(versions.pop() if len(versions) == 1 else None, lives)

    def call(self, method: str, *arguments: str, seconds: float = 120.0) -> list[Any]:
        """Call a method of our extension in every worker."""
        body = {"method": method, "args": list(arguments), "timeout": seconds}
        results: list[Any] = self.control("POST", "/collective_rpc", body, seconds=seconds)["results"]
        return results

    def _receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a weight channel's message to every worker. All receive all weights, and keep their shard of them."""
        body = message["body"]
        if body["type"] == "prepare" and body["join"] is not None and self.workers > 1:
            error = (
                f"has {self.workers} workers, and the group one place for it: set placement.channel to disk or shared"
            )
            return plain(WeightReply(message["exchange"], error))
        self.loading = True
        try:
            answers = [decode(text) for text in self.call("plaudit_receive", encode(message), seconds=LOAD)]
        finally:
            self.loading = False
        return next((answer for answer in answers if answer["error"]), answers[0])

    def pause(self) -> None:
        self.control("POST", "/pause", mode="keep")

    def resume(self) -> None:
        self.control("POST", "/resume")

    def forget(self) -> None:
        """Requests in flight are prefilled again."""
        if not self.control("POST", "/reset_prefix_cache", reset_running_requests=True)["success"]:
            raise EngineError(f"{self.name} could not reset its prefix cache: it may use KV of older weights")

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and, on a GPU, the weights too: level 1 keeps them in host memory, 2 discards them, so that
        they must be published again."""
        self.control("POST", "/sleep", level=level)
        if level == 2:
            self.version = None

    def wake(self) -> None:
        self.control("POST", "/wake_up")


def _plain(params: SamplingParams) -> bool:
    """Whether sampling uses the model's own distribution."""
    return params.temperature == 1 and not params.reshapes
