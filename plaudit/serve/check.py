"""`plaudit serve --check`: checks whether a server with this configuration would start here. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from plaudit.config.reward import (
    BlendTable,
    EmbeddingTable,
    JudgeTable,
    LogprobsTable,
    OutcomeTable,
    RewardTable,
    RuleTable,
)
from plaudit.config.serve import ServeTable
from plaudit.errors import ConfigError, ModelError, PlauditError, one_line
from plaudit.models import choose_device, resolve
from plaudit.models.encoder import encoder_directory
from plaudit.models.load import Examined, examine
from plaudit.models.positions import longest_sequence
from plaudit.reward.encoder_reading import outcome_reading
from plaudit.reward.process import ProcessReading
from plaudit.reward.rules.rule import RuleReward
from plaudit.reward.work import ModelInfo
from plaudit.serve.http.address import Tls, bind, leave, listen
from plaudit.serve.http.key_file import KeySource
from plaudit.serve.protocols.table import check_names
from plaudit.serve.server import check_open
from plaudit.serve.state import restored

Check = Callable[[], str]


def findings(table: ServeTable) -> Iterator[tuple[bool, str]]:
    """Yields one (ok, line) pair per check; the line says what was checked and what is wrong."""
    checks: dict[str, Check] = {f"model {name}": partial(_model, entry) for name, entry in table.models.items()}
    checks |= {
        "protocols": partial(_protocols, table), "keys": partial(_keys, table), "tls": partial(_tls, table),
        "address": partial(_address, table), "model_root": partial(_root, table),
        "state_file": partial(_state, table),
    }  # fmt: skip
    for what, check in checks.items():
        try:
            yield True, f"{what}: {check()}"
        except PlauditError as error:
            yield False, f"{what}: {one_line(error)}"


def _model(table: RewardTable) -> str:
    if isinstance(table, BlendTable):
        return f"a blend of {', '.join(table.members)}"
    if isinstance(table, RuleTable):
        rule = RuleReward(table, exposed=True)
        rule.close()
        return f"rule {table.rule}, sandbox {rule.mechanism or 'none'}"
    if isinstance(table, EmbeddingTable):
        return f"embedding, {encoder_directory(table.path)}"
    if isinstance(table, JudgeTable) and table.path is None:
        return f"judge at {table.url}, not contacted"
    assert table.path is not None
    directory = resolve(table.path)
    seen = examine(directory, table.dtype, choose_device(table.device))
    if isinstance(table, JudgeTable | LogprobsTable):
        if seen.kind != "policy":
            raise ModelError(f"{directory} has a {seen.kind} model; kind = {table.kind!r} needs a causal LM")
    elif isinstance(table, OutcomeTable):
        outcome_reading(table, seen.tokenizer, _facts(table.path, seen), each_label=True)
    else:
        ProcessReading(table, seen.tokenizer, _facts(table.path, seen))
    return f"{table.kind}, {directory}, {len(seen.stored)} tensors"


def _facts(name: str, seen: Examined) -> ModelInfo:
    text = seen.config.get_text_config()
    labels = {"policy": (), "value": ("value",)}.get(seen.kind)
    if labels is None:
        labels = tuple(str(seen.config.id2label[i]) for i in range(seen.config.num_labels))
    encoder = seen.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return ModelInfo(name, text.vocab_size, longest_sequence(text), labels, seen.kind == "policy", encoder)


def _protocols(table: ServeTable) -> str:
    check_names(table.allow_open, "allow_open")
    check_names(table.protocols or (), "protocols")
    return "all" if table.protocols is None else ", ".join(table.protocols) or "native alone"


def _keys(table: ServeTable) -> str:
    check_open(table)
    tables = KeySource(table).tables
    expired = [name for name, key in tables.items() if key.expired]
    return f"{len(tables)} keys" + (f", expired: {', '.join(expired)}" if expired else "")


def _tls(table: ServeTable) -> str:
    tls = Tls.of(table)
    return (
        "none"
        if tls is None
        else f"{tls.files[0]}" + ("" if tls.ca is None else f", only clients with a certificate of {tls.ca}")
    )


def _address(table: ServeTable) -> str:
    listen(table).close()
    leave(table)
    if table.health_port is not None:
        bind(table.host, table.health_port, "health_port").close()
    return table.address(table.port)


def _root(table: ServeTable) -> str:
    if table.model_root is None:
        return "not set: models cannot be swapped"
    if not Path(table.model_root).is_dir():
        raise ConfigError(f"{table.model_root} is not a directory; create it, or remove model_root")
    return table.model_root


def _state(table: ServeTable) -> str:
    if table.state_file is None:
        return "not set: swaps are lost when the server stops"
    models, vain = restored(table)
    serves = [f"{name} serves {each.state.path}" for name, each in models.items()]
    ignored = [f"{name} is ignored, because the configuration has changed" for name in vain]
    return "; ".join([table.state_file, *serves, *ignored])
