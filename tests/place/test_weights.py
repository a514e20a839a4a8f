"""Weight layouts: tied names are sent once, buckets keep the order and contain every tensor."""

import msgspec
import pytest
import torch
from torch import nn

from plaudit.errors import ReceiverLost, WeightsRefused
from plaudit.place.channels.channel import Publisher
from plaudit.place.channels.messages import DiskTake, WeightMessage
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.weights import Layout, Weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))


def test_tied_names_are_aliases_and_are_sent_once() -> None:
    weights = Weights.of(Tied())
    assert [name for name, _ in weights] == ["scale", "embed.weight", "layer.weight", "layer.bias"]
    assert weights.layout.aliases == {"head.weight": "embed.weight"}
    assert weights.nbytes == 4 * (40 + 16 + 4 + 3)


def test_a_partial_publication_has_the_trained_weights_and_needs_a_full_one_first() -> None:
    module = Tied()
    module.embed.requires_grad_(False)
    part = Weights.trained(module)
    assert [name for name, _ in part] == ["layer.weight", "layer.bias"]
    assert part.layout.part
    receiver = WeightReceiver(module)
    with pytest.raises(WeightsRefused, match="to an engine that has none: publish all weights"):
        receiver.receive(WeightMessage("a-1", "a", 1, part.layout, DiskTake("nowhere")))
    unknown = Weights({"layer.other": torch.ones(1)}, part=True).layout
    with pytest.raises(WeightsRefused, match=r"the weights have 'layer\.other', which the engine lacks"):
        receiver.receive(WeightMessage("a-1", "a", 1, unknown, DiskTake("nowhere")))


def test_names_tied_by_storage_alone_are_aliases_too() -> None:
    module = Tied()
    module.head.weight = nn.Parameter(module.embed.weight.data)
    assert Weights.of(module).layout.aliases == {"head.weight": "embed.weight"}


def test_a_view_of_another_shape_is_a_separate_tensor() -> None:
    tensor = torch.arange(6.0)
    assert not Weights({"whole": tensor, "part": tensor[:3]}).layout.aliases


def test_a_layout_survives_serialization() -> None:
    layout = Weights.of(Tied()).layout
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    assert decoded == layout
    assert decoded.digest == layout.digest


def test_buckets_keep_the_order_and_large_tensors_get_their_own() -> None:
    sizes = [1, 2, 3, 50, 1, 9, 1]
    weights = Weights({f"t{i}": torch.full((n,), float(i)) for i, n in enumerate(sizes)})
    buckets = [[name for name, _ in bucket] for bucket in weights.buckets(size=10 * 4)]
    assert buckets == [["t0", "t1", "t2"], ["t3"], ["t4", "t5"], ["t6"]]


def test_segments_are_aligned() -> None:
    places, size = Weights({"a": torch.zeros(3, dtype=torch.int8), "b": torch.zeros(17)}).layout.offsets()
    assert (places, size) == ([0, 512], 1024)


def test_versions_never_decrease() -> None:
    publisher = Publisher()
    publisher.begin(3)
    publisher.begin(3)
    with pytest.raises(WeightsRefused, match="cannot publish version 2 after version 3"):
        publisher.begin(2)


def test_several_lost_receivers_give_one_error_naming_all() -> None:
    error = ReceiverLost.several([ReceiverLost("rollout 0", "is gone"), ReceiverLost("rollout 1", "is late")])
    assert error.names == ("rollout 0", "rollout 1")
    assert str(error) == "rollout 0 is gone; rollout 1 is late"
