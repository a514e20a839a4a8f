"""Builds a recipe's external engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plaudit.core import Engine
from plaudit.core.kv.memory import DEFAULT_BYTES
from plaudit.errors import ConfigError
from plaudit.models import catalog
from plaudit.place.channels.channel import Channel
from plaudit.place.channels.weights import Weights
from plaudit.place.engines.engine_server import EngineServer
from plaudit.place.engines.http_engine import HttpEngine
from plaudit.place.engines.probe import Probe, probe_contexts
from plaudit.place.engines.server_fleet import EngineAddress, ServerFleet
from plaudit.place.engines.sglang_engine import SglangEngine
from plaudit.place.engines.vllm_engine import VllmEngine
from plaudit.place.engines.vllm_server import VllmServer
from plaudit.place.placement import PlacementContext
from plaudit.place.resources import Seat, rollout_seats
from plaudit.train.policy import lora

PROBE_PROMPTS = 32
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32; others crash it at the first request


def new_served(stage: PlacementContext, channel: Channel) -> ServerFleet:
    """The main rank's; the other ranks have none."""
    recipe, trainee = stage.recipe, stage.trainee
    reader = Engine(trainee.loaded.module, trainee.loaded.tokenizer) if stage.ranks.main else None
    places = [] if reader is None else _places(stage, sorted(reader.end_tokens))
    if recipe.engine.probe:
        prompts = [list(prompt.token_ids or ()) for prompt in stage.prompts.train(range(PROBE_PROMPTS))]
        for place in places:
            place.probe = Probe(probe_contexts(prompts, trainee.decoder.max_positions), recipe.engine.probe)

    def weights() -> Weights:
        module = trainee.loaded.module
        return Weights.of(module if recipe.model.lora is None else lora.merged(module))

    def trainer(context: Sequence[int]) -> np.ndarray:
        assert reader is not None  # there is no engine to compare with on other ranks
        vocabulary = range(trainee.decoder.vocab_size)
        return reader.score([list(context)], columns=vocabulary, logprobs=True)[0]

    return ServerFleet(
        places, channel, weights, trainer, stage.warn, update=recipe.engine.update, patience=recipe.engine.timeout
    )


def _places(stage: PlacementContext, stop_ids: Sequence[int]) -> list[EngineAddress]:
    table = stage.recipe.engine
    kind: Any = VllmEngine if table.name == "vllm" else SglangEngine

    def at(url: str) -> EngineAddress:
        return EngineAddress(lambda _: kind(url, stop_ids=stop_ids, timeout=table.timeout))

    def started(server: EngineServer | None) -> HttpEngine:
        assert server is not None
        server.wait_ready(table.start)
        engine: HttpEngine = kind(server.url, stop_ids=stop_ids, timeout=table.timeout, server=server)
        return engine

    if table.urls:
        return [at(url) for url in table.urls]
    _check_heads(stage)
    size = Weights.of(stage.trainee.loaded.module).nbytes
    seats = rollout_seats(stage.recipe, stage.trainee.decoder.device, size, stage.cores)
    return [EngineAddress(started, _starter(stage, index, seat)) for index, seat in enumerate(seats)]


def _starter(stage: PlacementContext, index: int, seat: Seat) -> Callable[[], EngineServer]:
    recipe, table = stage.recipe, stage.recipe.engine
    kind, _, number = seat.devices[0].partition(":")
    if kind == "cuda":
        environment = {"CUDA_VISIBLE_DEVICES": number or "0"}
    else:
        environment = {"OMP_NUM_THREADS": str(seat.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    kv = DEFAULT_BYTES if table.kv_bytes is None and kind == "cpu" else table.kv_bytes
    options: list[str] = []
    if kv is not None:
        name = "--kv-cache-memory-bytes" if isinstance(kv, int) else "--gpu-memory-utilization"
        options = [name, str(kv)]

    def start() -> EngineServer:
        assert table.python is not None
        assert recipe.model.path is not None
        return VllmServer(
            table.python, catalog.resolve(recipe.model.path), stage.directory / f"vllm-{index}.log",
            dtype=recipe.model.dtype, cores=seat.cores, options=[*options, *table.options],
            environment={**environment, **table.environment},
        )  # fmt: skip

    return start


def _check_heads(stage: PlacementContext) -> None:
    heads = {layer.key_dim for layer in stage.trainee.decoder.layers}
    on_cpu = stage.trainee.decoder.device.type == "cpu"
    if stage.recipe.engine.name == "vllm" and on_cpu and not heads <= set(CPU_HEADS):
        raise ConfigError(
            f"{stage.recipe.model.path} has attention heads of {sorted(heads)}, and vLLM on a CPU supports "
            f'{", ".join(map(str, CPU_HEADS))}: use another model, or engine.name = "core"'
        )
