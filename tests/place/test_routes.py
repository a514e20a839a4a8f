"""Routes between training ranks and engine ranks, computed by hand."""

from plaudit.models.weights import Cut
from plaudit.place.channels.reshard.routes import (
    PACKED_BYTES,
    PIECE_BYTES,
    Box,
    Split,
    TensorPart,
    TrainingSide,
    buckets,
    cut_box,
    fingerprint,
    meeting,
    needed,
    routes,
    whole_box,
)
from plaudit.place.channels.weights import Entry, Layout

ROWS, COLUMNS = 0, 1
DATA, TENSOR = (2, 2), (1, 2)  # strides and sizes of the dimensions of a mesh of 2 x 2


def test_dimensions_are_split_as_torch_splits_them() -> None:
    """10 over 4: 3, 3, 3, 1; and 4 over 3: 2, 2, 0."""
    assert [cut_box(whole_box((10, 2)), ROWS, i, 4).shape[0] for i in range(4)] == [3, 3, 3, 1]
    assert [cut_box(whole_box((4,)), ROWS, i, 3).shape for i in range(3)] == [(2,), (2,), (0,)]
    assert cut_box(whole_box((10, 2)), ROWS, 3, 4) == Box((9, 0), (10, 2))


def test_intersections_of_boxes() -> None:
    assert meeting(Box((0, 0), (4, 4)), Box((2, 1), (6, 3))) == Box((2, 1), (4, 3))
    assert meeting(Box((0,), (2,)), Box((2,), (4,))) is None
    assert meeting(Box((), ()), Box((), ())) == Box((), ()), "a number has no dimensions"
    assert Box((2, 1), (4, 3)).within(Box((2, 0), (6, 4))) == (slice(0, 2), slice(1, 3))


def test_routes_from_2x2_training_ranks_to_two_engine_ranks_by_hand() -> None:
    """Rows of q (8 x 4) are split over tensor ranks first, then over data ranks: rank (d, t) has rows 4t + 2d and
    4t + 2d + 1. The engine's ranks have rows 0 to 3 and 4 to 7. Of o (4 x 8) rank (d, t) has rows 2d, 2d + 1 of columns
    4t to 4t + 3, and the engine's ranks have columns 0 to 3 and 4 to 7. The norm (4) is split over data ranks only."""
    q, o, norm = Entry("q", "float32", (8, 4)), Entry("o", "float32", (4, 8)), Entry("norm", "float32", (4,))
    layout = Layout((q, o, norm), {})
    splits = {
        "q": (Split(*TENSOR, ROWS), Split(*DATA, ROWS)), "o": (Split(*TENSOR, COLUMNS), Split(*DATA, ROWS)),
        "norm": (Split(*DATA, ROWS),),
    }  # fmt: skip
    side = TrainingSide(4, splits)
    assert [side.box(q, rank) for rank in range(4)] == [
        Box((0, 0), (2, 4)), Box((4, 0), (6, 4)), Box((2, 0), (4, 4)), Box((6, 0), (8, 4)),
    ]  # fmt: skip
    needs = {
        0: needed(layout, ["q", "o", "norm"], {"q": Cut(0, 0, 4), "o": Cut(1, 0, 4)}),
        1: needed(layout, ["q", "o", "norm"], {"q": Cut(0, 4, 8), "o": Cut(1, 4, 8)}),
    }
    first, last = Box((0,), (2,)), Box((2,), (4,))
    assert routes(layout, side, needs) == {
        # Tensor ranks 0 and 1 have the same halves of the norm: tensor rank 0 sends its half to the first engine rank,
        # tensor rank 1 to the second.
        (0, 0): [TensorPart(q, Box((0, 0), (2, 4))), TensorPart(o, Box((0, 0), (2, 4))), TensorPart(norm, first)],
        (2, 0): [TensorPart(q, Box((2, 0), (4, 4))), TensorPart(o, Box((2, 0), (4, 4))), TensorPart(norm, last)],
        (1, 1): [TensorPart(q, Box((4, 0), (6, 4))), TensorPart(o, Box((0, 4), (2, 8))), TensorPart(norm, first)],
        (3, 1): [TensorPart(q, Box((6, 0), (8, 4))), TensorPart(o, Box((2, 4), (4, 8))), TensorPart(norm, last)],
    }
    for number, boxes in needs.items():  # the plan of a single engine rank equals its part of the full plan
        mine = {pair: pieces for pair, pieces in routes(layout, side, needs).items() if pair[1] == number}
        assert routes(layout, side, {number: boxes}) == mine


def test_routes_from_three_ranks_to_two_with_an_indivisible_size() -> None:
    """7 rows over three ranks: 3, 3, 1. The engine's ranks have 0 to 3 and 4 to 6."""
    entry = Entry("w", "bfloat16", (7, 5))
    layout = Layout((entry,), {})
    side = TrainingSide(3, {"w": (Split(1, 3, ROWS),)})
    needs = {i: needed(layout, ["w"], {"w": Cut(0, *rows)}) for i, rows in enumerate([(0, 4), (4, 7)])}
    assert routes(layout, side, needs) == {
        (0, 0): [TensorPart(entry, Box((0, 0), (3, 5)))], (1, 0): [TensorPart(entry, Box((3, 0), (4, 5)))],
        (1, 1): [TensorPart(entry, Box((4, 0), (6, 5)))], (2, 1): [TensorPart(entry, Box((6, 0), (7, 5)))],
    }  # fmt: skip
    assert sum(piece.nbytes for pieces in routes(layout, side, needs).values() for piece in pieces) == 7 * 5 * 2


def test_an_engine_rank_needs_its_tensors_under_any_tied_name() -> None:
    embed = Entry("embed", "float32", (6, 2))
    layout = Layout((embed,), {"head": "embed"})
    assert needed(layout, ["head"], {}) == {"embed": whole_box((6, 2))}, "tied in the trainer"
    assert needed(layout, ["other"], {}) == {}, "a later stage has neither"
    assert needed(layout, ["embed", "head"], {"head": Cut(0, 0, 3)}) == {"embed": whole_box((6, 2))}
    assert fingerprint(needed(layout, ["head"], {})) == fingerprint(needed(layout, ["embed", "head"], {}))
    assert fingerprint(needed(layout, ["head"], {})) != fingerprint(needed(layout, ["head"], {"head": Cut(0, 0, 3)}))


def test_small_pieces_are_packed_and_large_ones_are_split() -> None:
    small = TensorPart(Entry("s", "bfloat16", (3,)), whole_box((3,)))  # 6 bytes, padded to 16 if others follow
    large = TensorPart(Entry("l", "uint8", (2 * PIECE_BYTES + 5,)), whole_box((2 * PIECE_BYTES + 5,)))
    packed = list(buckets([small, small, large, small]))
    assert [(len(p.pieces), p.start, p.nbytes, p.last) for p in packed] == [
        (2, 0, 32, True), (1, 0, PIECE_BYTES, False), (1, PIECE_BYTES, PIECE_BYTES, False),
        (1, 2 * PIECE_BYTES, 5, True), (1, 0, 6, True),
    ]  # fmt: skip
    assert [place for _, place in packed[0].places()] == [0, 16]
    medium = TensorPart(Entry("m", "uint8", (PACKED_BYTES - 16,)), whole_box((PACKED_BYTES - 16,)))
    assert [len(p.pieces) for p in buckets([medium, small, small])] == [2, 1]
