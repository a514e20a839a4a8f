"""Compares models of which every rank reads only its part with the same models sharded after a full load, and reloads
what the ranks saved. A test runs this on each rank:
python -m tests.train.rank_load DATA TENSOR PIPELINE DIRECTORY..."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plaudit.config.placement import ResourcesTable
from plaudit.config.supervised import LoraTable, PolicyModelTable
from plaudit.core.model.packing import pack
from plaudit.models import load_policy, load_value
from plaudit.models.heads.value_head import ValueModel
from plaudit.train.optim.pipeline import stage_of
from plaudit.train.optim.shard_files import save_shards
from plaudit.train.optim.sharding import Shards, packed_rows
from plaudit.train.policy import lora
from plaudit.train.policy.rl_models import split_model, split_trained
from plaudit.train.run.ranks import Ranks, join


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters, tied ones under each of their names, and all buffers."""
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in named.items()}


def check(directory: str, dtype: str, ranks: Ranks) -> None:
    table = PolicyModelTable(path=directory, dtype=dtype, device="cpu")
    for kind in ("policy", "value"):
        shards = split_model(directory, kind, table, ranks, lambda module: None)
        sharded = shards.module
        if kind == "policy":
            loaded = load_policy(directory, dtype)
        else:
            loaded = load_value(directory, dtype, fresh_head=True)
            for module in (loaded.module, sharded):  # as a new critic's head is
                assert isinstance(module, ValueModel)
                if stage_of(module).last:
                    nn.init.zeros_(module.score.weight)
        stored = {name: each.detach().clone() for name, each in loaded.module.state_dict().items()}
        loaded_names = {name: id(each) for name, each in loaded.module.named_parameters(remove_duplicate=False)}
        expected = Shards(loaded.module, ranks).module
        actual, reference = tensors(sharded), tensors(expected)
        assert actual.keys() == reference.keys()
        for name, tensor in reference.items():
            assert actual[name].dtype == tensor.dtype, name
            assert torch.equal(actual[name], tensor), (directory, kind, name)
        parameters = dict(sharded.named_parameters(remove_duplicate=False))
        assert len(parameters) < len(loaded_names) or ranks.stages.size == 1
        names = {name: each for name, each in loaded_names.items() if name in parameters}
        for name, parameter_id in names.items():
            assert [n for n in names if names[n] == parameter_id] == [
                n for n in names if parameters[n] is parameters[name]
            ]
        assert sharded.config.to_dict() == expected.config.to_dict()
        packed = pack([[1, 2, 3], [4, 5]], "cpu")
        rows = [packed_rows(sharded, packed)]
        stage_of(sharded).pass_on(rows[0])
        rows.append(packed_rows(expected, packed))
        stage_of(expected).pass_on(rows[1])
        assert torch.equal(*rows)
        saved = Path(f"{directory}-{kind}-{ranks.data.size}-{ranks.everyone.size}-{ranks.stages.size}")
        save_shards(shards, loaded.tokenizer, saved)
        if ranks.main:
            reloaded = (load_policy if kind == "policy" else load_value)(saved, dtype).module.state_dict()
            assert reloaded.keys() == stored.keys()
            for name, tensor in stored.items():
                assert torch.equal(reloaded[name], tensor), (directory, kind, name)


def check_gathered(directory: str, dtype: str, ranks: Ranks) -> None:
    """The whole module on the main rank has the values of the files, buffers among them, with an adapter too, whose
    merged weights are those of the files at the start."""
    stored = load_policy(directory, dtype).module.state_dict()
    for table in (None, LoraTable(rank=2)):
        model = PolicyModelTable(path=directory, dtype=dtype, device="cpu", lora=table)
        whole = split_trained(model, 1, None, ranks).gathered()
        if whole is None:
            continue
        if table is not None:
            whole = lora.merged(whole)
        values = whole.state_dict()
        assert values.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(values[name], tensor), (directory, table, name)


def main() -> None:
    data, tensor, stages = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    mixtures = [each for each in sys.argv[4:] if Path(each).name in ("experts", "correction")]
    expert = tensor if mixtures == sys.argv[4:] else 1  # else they are not split by tensor ranks
    table = ResourcesTable(
        data_parallel=data, tensor_parallel=tensor, pipeline_parallel=stages, expert_parallel=expert, timeout=60.0
    )
    with join(table, "cpu") as ranks:
        for directory in sys.argv[4:]:
            if tensor > 1 and expert == 1 and directory in mixtures:
                continue
            dtype = "bfloat16" if Path(directory).name == "bf16" else "float32"
            check(directory, dtype, ranks)
            check_gathered(directory, dtype, ranks)


if __name__ == "__main__":
    main()
