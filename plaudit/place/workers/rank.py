"""An engine of several ranks: rank 0 is the rollout worker, every other one `python -m plaudit.place.workers.rank FD`.

Messages of a weight channel arrive at rank 0, which forwards them: each rank receives its own slices of the same
tensors, verifies all of them, and replies; rank 0's answer stands for all. A rank that dies or is stopped ends its
engine with all its ranks; the process that started the engine starts another.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from plaudit.config import RlRecipe
from plaudit.config.reward import LogprobsTable
from plaudit.config.supervised import LoraTable, names_experts
from plaudit.core import Engine
from plaudit.core.device.choose import backend_of
from plaudit.core.device.lockstep import REPLY_BYTES, Leader, follow
from plaudit.core.model.split import OwnExperts, keep_part
from plaudit.core.model.stages import RankPosition
from plaudit.core.proof.support import inspect
from plaudit.errors import ConfigError, ModelError
from plaudit.models.part import outline
from plaudit.place.channels.channel import Receiver, answered
from plaudit.place.channels.messages import CollectivePrepare, ReshardTake, WeightMessage, WeightReply, plain, typed
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.reshard.receiving import joined
from plaudit.place.channels.target import PartTarget
from plaudit.place.workers import frames
from plaudit.process.guard import Guard
from plaudit.reward.load import LoadedPart, load_part
from plaudit.serve.workers.ranks import RankGroup, lead_here, run_rank
from plaudit.train.policy.lora import attach_blank

ERROR_CHARACTERS = REPLY_BYTES // 4


def check_engine_ranks(recipe: RlRecipe) -> None:
    """Raise if the policy cannot be split over the ranks of an engine, before any of its weights are read."""
    table = recipe.resources.rollout
    if table.ranks > 1:
        assert recipe.model.path is not None
        place = RankPosition(0, table.tensor_parallel, table.pipeline_parallel)
        module, adapter = outline(recipe.model.path, recipe.model.dtype).module, recipe.model.lora
        try:
            keep_part(module, place)
        except ModelError as error:
            raise ConfigError(f"resources.rollout: {error}") from error
        dealt = any(isinstance(part, OwnExperts) for part in module.modules())
        if dealt and adapter is not None and names_experts(adapter.targets):
            raise ConfigError(
                "model.lora.targets names layers of experts, which resources.rollout.tensor_parallel = "
                f"{table.tensor_parallel} splits by whole experts: target attention layers, or set tensor_parallel = 1"
            )


def lead_engine(recipe: RlRecipe, start: frames.Start) -> tuple[Engine, Receiver]:
    """Rank 0's engine, with all of its ranks."""
    rollout, devices = recipe.resources.rollout, start.devices
    kind: Literal["cpu", "cuda"] = "cuda" if devices[0].startswith("cuda") else "cpu"
    table = LogprobsTable(
        path=str(recipe.model.path), tensor_parallel=rollout.tensor_parallel,
        pipeline_parallel=rollout.pipeline_parallel, dtype=recipe.model.dtype, device=kind, threads=start.threads,
        rank_seconds=recipe.placement.deadline, join_seconds=recipe.placement.deadline,
    )  # fmt: skip
    tree = table.model_dump(exclude_none=True)
    lora = recipe.model.lora
    record = recipe.train.routing_replay
    same = {"table": tree, "cores": start.cores, "lora": lora and lora.model_dump(), "record": record}
    specs = [{**same, "local": int(device.partition(":")[2] or 0)} for device in devices]
    group = lead_here(table, specs, "plaudit.place.workers.rank")
    part = group.led(lambda: load_part(table, group, replaced=True, prepare=partial(attach_blank, lora)))
    module = part.loaded.module
    engine = Engine(
        module, part.loaded.tokenizer, kv_bytes=recipe.engine.kv_bytes, seed=recipe.seed, channel=part.channel,
        record_experts=record,
    )  # fmt: skip
    threading.Thread(target=_watch, args=(group,), daemon=True, name="guard").start()
    assert isinstance(engine.backend, Leader)
    return engine, RanksReceiver(engine.backend, _receiver(part))


class RanksReceiver:
    """A channel's receiver for all ranks of an engine."""

    def __init__(self, leader: Leader, own: WeightReceiver) -> None:
        self.leader = leader
        self.own = own
        self.version: int | None = None

    def receive(self, message: WeightMessage) -> WeightReply:
        data = msgspec.msgpack.encode(plain(message))
        encoded = self.leader.take_weights(data, lambda: _taken(self.own, 0, data))
        replies = [msgspec.msgpack.decode(each, type=WeightReply) for each in encoded]
        errors = [f"rank {rank}: {reply.error}" for rank, reply in enumerate(replies) if reply.error is not None]
        checksums = [str(reply.checksum) for reply in replies]
        checksum = replies[0].checksum
        if isinstance(message.body, ReshardTake):  # each rank gets its own
            checksum = joined(checksums)
        elif len(set(checksums)) > 1 and not errors:
            errors = [f"its ranks received different bytes (checksums {sorted(set(checksums))}): publish again"]
        self.version = None if errors else self.own.version
        if errors:
            return WeightReply(message.exchange, error="; ".join(errors))
        return msgspec.structs.replace(
            replies[0], checksum=checksum, extra_bytes=sum(reply.extra_bytes for reply in replies),
            in_group=all(reply.in_group for reply in replies),
        )  # fmt: skip

    def close(self) -> None:
        self.own.close()


def _receiver(part: LoadedPart) -> WeightReceiver:
    return WeightReceiver(PartTarget(part.loaded.module, part.whole, part.cuts))


def _taken(receiver: WeightReceiver, rank: int, data: bytes) -> bytes:
    """The answer of one rank. Its index in a channel's group is rank 0's plus its rank in the engine."""
    message = typed(msgspec.msgpack.decode(data), WeightMessage)
    if isinstance(message.body, CollectivePrepare) and (join := message.body.join) is not None:
        join = msgspec.structs.replace(join, rank=join.rank + rank)
        message = msgspec.structs.replace(message, body=CollectivePrepare(join=join))
    reply = typed(answered(receiver, plain(message)), WeightReply)
    if reply.error is not None:
        reply = msgspec.structs.replace(reply, error=reply.error[:ERROR_CHARACTERS])
    return msgspec.msgpack.encode(reply)


def _watch(group: RankGroup) -> None:
    """A stopped rank would block the others until the deadline: it is killed earlier."""
    guard = Guard()
    while True:
        guard.end_stopped([child.pid for child in group.children])
        time.sleep(1.0)


def _load(group: RankGroup, spec: dict[str, Any]) -> Callable[[], None]:
    if spec["cores"]:
        os.sched_setaffinity(0, spec["cores"])
    lora = spec["lora"] and LoraTable.model_validate(spec["lora"])
    part = load_part(group.table, group, replaced=True, prepare=partial(attach_blank, lora))
    receiver = _receiver(part)
    backend = backend_of(inspect(part.loaded.module, part.loaded.tokenizer))
    if spec["record"]:
        backend.record_experts()
    return lambda: follow(backend, part.channel, lambda data: _taken(receiver, group.rank, data))


def main(fd: int) -> None:
    run_rank(fd, _load)


if __name__ == "__main__":
    main(int(sys.argv[1]))
