"""Loads rewards from their tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from plaudit.config.formats import FormatTable
from plaudit.config.reward import (
    KINDS,
    EmbeddingTable,
    JudgeTable,
    LogprobsTable,
    OutcomeTable,
    ProcessTable,
    ReadByEngine,
    RewardTable,
    RuleTable,
    parse_reward,
    reward_by_kind,
)
from plaudit.core import Engine
from plaudit.core.device.lockstep import RankGroups
from plaudit.core.model.packing import trunk
from plaudit.core.model.split import check_split, join, keep_part
from plaudit.core.model.stages import RankPosition, connect
from plaudit.core.proof.support import accepted
from plaudit.errors import ConfigError, ModelError, nearest
from plaudit.models import Loaded, ValueModel, choose_device, load_any, load_policy
from plaudit.models.catalog import CONFIG
from plaudit.models.part import fill, outline
from plaudit.models.positions import way_to_more
from plaudit.models.text import tokenizer_parts
from plaudit.models.text_classifier import TextClassifier, looks_ahead
from plaudit.models.weights import Cut
from plaudit.reward.blend import BlendReward
from plaudit.reward.directory import complete
from plaudit.reward.encoder_reading import outcome_reading
from plaudit.reward.judges.backends import EngineAsk, HttpAsk
from plaudit.reward.judges.judge import Judge, JudgeReward
from plaudit.reward.model import EncoderReward, ModelReward
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import OutcomeReading
from plaudit.reward.reward import Reward
from plaudit.reward.rules.rule import RuleReward
from plaudit.reward.version import model_digest
from plaudit.reward.work import ModelInfo


def load_reward(
    source: str | Path | Mapping[str, Any] | RewardTable, members: Mapping[str, RewardTable] | None = None
) -> Reward:
    """Loads the reward of a table, of the keys of one as in [reward] of a recipe, of a model directory, or of an
    embedded model's name. A blend takes its `members`."""
    table = _table(source)
    if isinstance(table, OutcomeTable | ProcessTable):
        model, facts, tokenizer, version = load_model(table)
        reading = new_reading(table, tokenizer, facts)
        if isinstance(model, TextClassifier):
            return EncoderReward(model, reading, f"0-{version}")
        return ModelReward(model, reading, f"0-{version}")
    if isinstance(table, RuleTable):
        return RuleReward(table)
    if isinstance(table, JudgeTable):
        return JudgeReward(Judge(table), new_ask(table))
    if isinstance(table, LogprobsTable | EmbeddingTable):
        raise ConfigError(f'{table.path} has kind = "{table.kind}", which has no score; serve it with `plaudit serve`')
    available = members or {}
    for name in table.members:
        if name not in available:
            raise ConfigError(f"the blend's member {name!r} does not exist; {nearest(name, available)}")
    return BlendReward(table, {name: load_reward(available[name], _without(available, name)) for name in table.members})


def _table(source: str | Path | Mapping[str, Any] | RewardTable) -> RewardTable:
    if isinstance(source, str | Path):
        return complete({"path": str(source)}, str(source))
    if not isinstance(source, Mapping):
        return source
    kind = reward_by_kind(source)
    if kind in ("outcome", "process"):
        if "path" not in source:
            raise ConfigError(f"load_reward has neither path, rule nor template; kinds are {', '.join(KINDS)}")
        return complete(source, "load_reward")
    return parse_reward({"kind": kind, **source}, "load_reward")


def _without(tables: Mapping[str, RewardTable], name: str) -> dict[str, RewardTable]:
    """The tables without `name`, so that a blend cannot contain itself, at any depth."""
    return {other: table for other, table in tables.items() if other != name}


def new_ask(table: JudgeTable) -> HttpAsk | EngineAsk:
    if table.path is None:
        return HttpAsk(table)
    loaded = load_policy(table.path, dtype=table.dtype, device=choose_device(table.device))
    return EngineAsk(Engine(loaded.module, loaded.tokenizer), loaded.tokenizer, table)


def new_reading(
    table: OutcomeTable | ProcessTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo
) -> OutcomeReading | ProcessReading:
    if isinstance(table, OutcomeTable):
        return outcome_reading(table, tokenizer, facts)
    return ProcessReading(table, tokenizer, facts)


class ModelRanks(Protocol):
    """The ranks that share a model, as used by its loader."""

    @property
    def place(self) -> RankPosition: ...

    @property
    def device(self) -> str: ...

    def meet(self, hashes: Mapping[str, str]) -> RankGroups:
        """Called after loading; checks that all ranks have the same hashes for files they share."""


def load_worker(
    table: RewardTable, ranks: ModelRanks | None = None
) -> tuple[Engine, ModelInfo, PreTrainedTokenizerFast, str]:  # fmt: skip
    """`load_model` for models that run on the engine; raises ModelError for an encoder."""
    model, *others = load_model(table, ranks)
    if isinstance(model, TextClassifier):
        raise ModelError(f"{model.name} is an encoder, but this needs a decoder, which the engine can run")
    return model, *others


def load_model(
    table: RewardTable, ranks: ModelRanks | None = None
) -> tuple[Engine | TextClassifier, ModelInfo, PreTrainedTokenizerFast, str]:  # fmt: skip
    """Loads the engine (or a classifier, for an encoder), the model's information, its tokenizer, and the hash of its
    version (`reward.version`). With `ranks` this is rank 0, which has the engine."""
    if isinstance(table, JudgeTable) and table.path is not None:
        loaded = load_policy(table.path, dtype=table.dtype, device=choose_device(table.device))
        engine = Engine(loaded.module, loaded.tokenizer)
        digest = model_digest(table, file_hashes(model_files(loaded.path)), tokenizer_parts(loaded.tokenizer))
        return engine, _facts(loaded, engine), loaded.tokenizer, digest
    if not isinstance(table, ReadByEngine):
        raise ConfigError(f"a reward of kind {table.kind!r} has no model to load; expected outcome or process")
    if table.threads is not None:
        torch.set_num_threads(table.threads)
    channel = None
    if ranks is None:
        loaded = load_any(table.path, dtype=table.dtype, device=choose_device(table.device))
        hashes = file_hashes(model_files(loaded.path))
        if isinstance(table, OutcomeTable) and loaded.kind == "reward" and looks_ahead(loaded.module):
            classifier = TextClassifier(loaded, table.budget)
            digest = model_digest(table, hashes, tokenizer_parts(loaded.tokenizer), str(classifier.limit))
            return classifier, _encoder_facts(classifier, table), loaded.tokenizer, digest
    else:
        part = load_part(table, ranks)
        loaded, hashes, channel = part.loaded, part.hashes, part.channel
    if isinstance(table, ProcessTable) and table.format.tiled:
        _check_tiled(loaded.module, table.format)
    engine = Engine(loaded.module, loaded.tokenizer, kv_bytes=table.kv_bytes, budget=table.budget, channel=channel)
    digest = model_digest(table, hashes, tokenizer_parts(loaded.tokenizer))
    return engine, _facts(loaded, engine), loaded.tokenizer, digest


@dataclass(frozen=True)
class LoadedPart:
    """One rank's shard of a model; nothing else is in memory.

    whole    the whole model, without weights
    cuts     the offsets of its sharded tensors in those of the whole model
    hashes   of the files it has read
    channel  to the other ranks
    """

    loaded: Loaded
    whole: nn.Module
    cuts: Mapping[str, Cut]
    hashes: dict[str, str]
    channel: RankGroups


def load_part(
    table: ReadByEngine, ranks: ModelRanks, *, replaced: bool = False,
    prepare: Callable[[nn.Module], object] = lambda _: None,
) -> LoadedPart:  # fmt: skip
    """Loads a rank's shard. `replaced`: the weights are replaced before anything is computed, so the files' content
    does not matter. `prepare` is called with the whole model, which has no weights."""
    place, whole = ranks.place, outline(table.path, table.dtype, ranks.device)
    prepare(whole.module)
    module = deepcopy(whole.module)
    cuts = keep_part(module, place)
    fill(module, whole.read, cuts, ranks.device)
    # Rank 0 checks every file, the others only those with their shard.
    if replaced:
        files = [whole.path / CONFIG]
    else:
        files = model_files(whole.path) if place.rank == 0 else [*whole.files(module), whole.path / CONFIG]
    hashes = file_hashes(files)
    accepted(module)
    channel = ranks.meet(hashes)
    check_split(whole.module, place, whole.read, channel.tensors, ranks.device)
    join(module, channel.tensors)
    if channel.stages is not None:
        connect(trunk(module), place, channel.stages)
    loaded = Loaded(module, whole.tokenizer, whole.path, whole.kind)
    return LoadedPart(loaded, whole.module, cuts, hashes, channel)


def model_files(directory: Path) -> list[Path]:
    """The weight files and the config."""
    return [*sorted(directory.glob("*.safetensors")), directory / CONFIG]


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name."""
    hashes: dict[str, str] = {}
    for file in files:
        with file.open("rb") as stream:
            hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def _facts(loaded: Loaded, engine: Engine) -> ModelInfo:
    decoder = engine.decoder
    config: Any = loaded.module.config
    labels: tuple[str, ...] = ()
    if isinstance(loaded.module, ValueModel):
        labels = ("value",)
    elif decoder.kind != "causal":
        labels = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    return ModelInfo(
        decoder.name, decoder.vocab_size, decoder.max_positions, labels, decoder.kind == "causal",
        way_to_more=way_to_more(config),
    )  # fmt: skip


def _encoder_facts(classifier: TextClassifier, table: OutcomeTable) -> ModelInfo:
    if table.kv_bytes is not None:
        raise ConfigError(f"kv_bytes is set, but {classifier.name} is an encoder, which has no KV cache; remove it")
    return ModelInfo(
        classifier.name, classifier.config.vocab_size, classifier.limit, classifier.labels, causal=False, encoder=True,
        typed=classifier.typed, multi_label=classifier.config.problem_type == "multi_label_classification",
    )  # fmt: skip


def _check_tiled(module: nn.Module, form: FormatTable) -> None:
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    rows = head.weight[list(form.columns)]
    count, period = head.weight.shape[0], len(form.columns)
    if count % period or not torch.equal(head.weight, rows.repeat(count // period, 1)):
        raise ModelError(
            f"the format reads columns {list(form.columns)} for the whole vocabulary, but the head's rows do not "
            "repeat them; give an inline format with the columns this model was trained on"
        )
