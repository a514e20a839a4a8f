"""A rollout process: `python -m plaudit.place.workers.worker FD`, one core engine behind a socket.

Its loop reads new messages, runs one engine step and sends finished samples. New weights are applied between two
steps, so that no step sees a mix. It ends when the trainer closes the socket or dies.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Literal, NoReturn

import torch

from plaudit.config import RlRecipe, parse_recipe
from plaudit.core import Engine, SamplingParams
from plaudit.core.device.lockstep import Leader
from plaudit.core.sequence import Update
from plaudit.errors import ConfigError, PlauditError, RankLost, RequestError, one_line
from plaudit.place.channels.channel import Receiver, answered
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.workers import frames, kv_transfer
from plaudit.place.workers.kv_transfer import KV, Parcel
from plaudit.place.workers.rank import lead_engine
from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.records import Sample
from plaudit.train.policy.rl_models import load_trained


class Worker(SocketWorker[frames.Frame]):
    def __init__(
        self, sock: socket.socket, reader: FrameReader[frames.Frame], engine: Engine, receiver: Receiver,
        keep: Literal["recompute", "continue"],
    ) -> None:  # fmt: skip
        super().__init__(sock, reader)
        self.engine = engine
        self.receiver = receiver
        self.keep = keep
        self._calls: dict[int, int] = {}  # the engine's prompt number -> the id of its call
        self._open: dict[int, int] = {}  # the same -> samples that are still to come
        self._published: tuple[str, int] | None = None  # publisher and version of its current weights
        self._parcels: dict[int, dict[int, Parcel]] = {}  # of calls with hand_over, by prompt

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def run(self) -> None:
        super().run()
        if isinstance(self.engine.backend, Leader):
            with suppress(RankLost):
                self.engine.backend.end()

    def lose(self, why: str) -> NoReturn:
        """Called by the heartbeat, while nothing is computed: a rank of the engine has died."""
        with suppress(OSError):
            self.send(frames.Failed(why))
        os._exit(RankLost.exit_code)

    def step(self) -> None:
        updates = self.engine.step()
        error = self.engine.failure
        if isinstance(error, RankLost):
            raise error  # the engine's fault and not a sample's: the next engine generates them
        self._report(updates)
        if error is not None:
            raise PlauditError(f"its step failed: {type(error).__name__}: {one_line(error)}")

    def take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.GenerateCall():
                self._begin(frame)
            case frames.Cancel():
                for number in [number for number, id in self._calls.items() if id == frame.id]:
                    self.engine.abort(number)
            case frames.Release():
                for parcel in self._parcels.pop(frame.id, {}).values():
                    parcel.close()
            case frames.WeightCall():
                self._receive_weights(frame.message)
            case frames.ControlCall():
                self.send(frames.ControlReply(frame.id, self._control(frame.what)))
            case _:
                raise ValueError(f"a rollout worker does not accept {type(frame).__name__}")

    def _begin(self, call: frames.GenerateCall) -> None:
        try:
            if self.receiver.version is None:
                raise RequestError("it has not received weights yet: publish weights before generating")
            for begun in call.begun or ():
                kv_transfer.take(self.engine, begun[0].extra[KV])
            numbers = self.engine.submit_all(list(frames.cut(call.tokens, call.lengths)), call.params, call.begun)
        except RequestError as error:
            self.send(frames.Refused(call.id, str(error)))
            return
        if call.hand_over:
            self._parcels[call.id] = {}
        wanted = [params.n for params in call.params] if call.begun is None else [len(begun) for begun in call.begun]
        for number, count in zip(numbers, wanted, strict=True):
            self._calls[number], self._open[number] = call.id, count

    def _report(self, updates: list[Update]) -> None:
        finished: dict[int, list[Sample]] = {}
        for update in updates:
            if update.sample is not None:
                id = self._calls[update.request]
                finished.setdefault(id, []).append(self._with_kv(id, update.sample))
                self._open[update.request] -= 1
                if not self._open[update.request]:
                    del self._calls[update.request], self._open[update.request]
        for id, samples in finished.items():
            self.send(frames.Samples(id, samples))

    def _with_kv(self, id: int, sample: Sample) -> Sample:
        """With a parcel of its prompt's KV, if the call requests it and the sample can still grow."""
        parcels = self._parcels.get(id)
        if parcels is None or len(sample.prompt_ids) + 1 >= self.engine.decoder.max_positions:
            return sample
        if sample.group not in parcels:
            parcels[sample.group] = Parcel(self.engine.export_kv(sample.prompt_ids))
        return replace(sample, extra={**sample.extra, KV: parcels[sample.group].message})

    def _receive_weights(self, message: dict[str, Any]) -> None:
        reply = answered(self.receiver, message)
        version, publisher = self.receiver.version, str(message["publisher"])
        if version is not None and (publisher, version) != self._published:
            # Weights sent again, because another worker was restarted, are those of this one: its KV stays valid.
            self._published = publisher, version
            self.engine.new_version(version, self.keep)
        self.send(frames.WeightCallReply(reply))

    def _control(self, what: frames.ControlAction) -> dict[str, Any]:
        match what:
            case "health":
                (sample,) = self.engine.generate([[0]], SamplingParams(max_tokens=1, seed=0))
                return {"tokens": len(sample.token_ids), "version": self.receiver.version}
            case "sleep":
                self.engine.sleep()
            case "wake":
                self.engine.wake()
            case "stats":
                return asdict(self.engine.stats())
        return {}


def main(fd: int) -> None:
    run_worker(fd, frames.DECODER, frames.Start, _load)


def _load(start: frames.Start, sock: socket.socket, reader: FrameReader[frames.Frame]) -> Worker:
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    torch.set_num_threads(start.threads)
    device = start.devices[0]
    if device.startswith("cuda:"):
        if len(start.devices) > (there := torch.cuda.device_count()):
            raise ConfigError(f"an engine of {len(start.devices)} rank(s) needs a GPU each, this machine has {there}")
        torch.cuda.set_device(device)  # kernels start on the current device
    recipe = parse_recipe(start.recipe, "the trainer's recipe")
    assert isinstance(recipe, RlRecipe)
    if len(start.devices) > 1:
        engine, receiver = lead_engine(recipe, start)
    else:
        engine, receiver = _load_engine(recipe, device)
    worker = Worker(sock, reader, engine, receiver, start.keep)
    if isinstance(engine.backend, Leader):
        engine.backend.channel.on_loss = worker.lose
    worker.send(frames.Hello(os.getpid()))
    return worker


def _load_engine(recipe: RlRecipe, device: str) -> tuple[Engine, Receiver]:
    # Recomputation is for a backward pass, which never runs here.
    model = recipe.model.model_copy(update={"recompute": False, "device": device})
    loaded = load_trained(model, recipe.seed, None)
    loaded.module.requires_grad_(False)
    table = recipe.engine
    engine = Engine(
        loaded.module, loaded.tokenizer, kv_bytes=table.kv_bytes, seed=recipe.seed, state_every=table.state_every,
        record_experts=recipe.train.routing_replay,
    )  # fmt: skip
    return engine, WeightReceiver(loaded.module)


if __name__ == "__main__":
    main(int(sys.argv[1]))
