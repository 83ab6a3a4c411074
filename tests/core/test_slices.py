"""Slice records: boxes, flat ranges, padding and copies, checked against plain indexing."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.core import slices
from minidist.core.slices import COPY, PAD, Box, Slice, assemble, by_name, extract, shared

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def sliced(draw):
    """A whole tensor and a record of up to three boxes of it, with a flat range."""
    shape = draw(shapes)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b for _, b in ends), draw(st.sampled_from(["own", "copy"]))))
    total = sum(box.numel for box in boxes)
    a, b = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
    return Slice("w", shape, tuple(boxes), draw(st.sampled_from([None, (a, b)])))


def by_indexing(record: Slice, whole: torch.Tensor) -> torch.Tensor:
    """What the record means, by torch's own indexing: the boxes one after another, then the range."""
    pieces = [whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1) for box in record.boxes]
    a, b = record.range
    return torch.cat(pieces)[a:b]


@settings(deadline=None)
@given(sliced())
def test_runs_are_what_indexing_takes(record):
    whole = torch.arange(math.prod(record.shape)).reshape(record.shape)
    assert torch.equal(extract(record, whole), by_indexing(record, whole))
    assert record.numel == len(by_indexing(record, whole))


@settings(deadline=None)
@given(sliced(), st.data())
def test_what_two_slices_share_is_what_one_owns_of_the_other(record, data):
    """Of an owner in two boxes, the later part of the whole first, and a flat range of them."""
    whole = torch.arange(1, math.prod(record.shape) + 1).reshape(record.shape)
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in record.shape]
    low, high = (tuple(end[i] for end in ends) for i in (0, 1))
    boxes = [Box(low, high)]
    if low:
        middle = data.draw(st.integers(low[0], high[0]))
        boxes = [Box((middle, *low[1:]), high), Box(low, (middle, *high[1:]))]
    piece = Slice("w", record.shape, tuple(boxes))
    piece = piece.cut(*sorted((data.draw(st.integers(0, piece.numel)), data.draw(st.integers(0, piece.numel)))))
    held, found = extract(piece, whole), torch.zeros(record.numel, dtype=torch.int64)
    for to, at, length in shared(record, piece).tolist():
        assert length > 0 and not found[to : to + length].any()
        found[to : to + length] = held[at : at + length]
    owned = torch.zeros_like(whole).flatten()
    owned[held - 1] = held
    assert torch.equal(found, extract(record, owned.view(record.shape)))


def test_shared_runs_of_boxes_out_of_order():
    """Rows 1 to 4 of a 6x4 matrix, held from element 2 on, and an owner of rows 4 to 5, then 2 to 3, less its last element."""
    record = Slice("w", (6, 4), (Box((1, 0), (5, 4)),), flat=(2, 16))  # elements 6 to 19 of the whole
    piece = Slice("w", (6, 4), (Box((4, 0), (6, 4)), Box((2, 0), (4, 4))), flat=(0, 15))  # elements 16 to 23, then 8 to 14
    assert shared(record, piece).tolist() == [[2, 8, 7], [10, 0, 4]]
    columns = Slice("w", (6, 4), (Box((0, 2), (6, 4)),))
    assert shared(columns, piece).tolist() == [[4, 10, 2], [6, 14, 1], [8, 2, 2], [10, 6, 2]]
    assert shared(columns, Slice("w", (6, 4), (Box((0, 0), (6, 2)),))).tolist() == []  # they only touch


@settings(deadline=None)
@given(sliced())
def test_records_survive_json(record):
    assert Slice.from_json(json.loads(json.dumps(record.to_json()))) == record


@settings(deadline=None)
@given(shapes.filter(lambda s: math.prod(s) > 0), st.integers(1, 5))
def test_shards_of_a_whole_assemble_to_it(shape, n):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    record, size = Slice.whole("w", shape), math.ceil(whole.numel() / n)
    shards = [record.cut(min(i * size, whole.numel()), min((i + 1) * size, whole.numel())) for i in range(n)]
    assert torch.equal(assemble((shard, extract(shard, whole)) for shard in shards), whole)


def test_all_three_levels_at_once():
    """A fused 6x4 matrix cut over two ranks (rows 0-1 and 4-5 here), one copied row, one row of padding, then a range."""
    boxes = (Box((0, 0), (2, 4)), Box((4, 0), (6, 4)), Box((3, 0), (4, 4), COPY), Box((0, 0), (1, 4), PAD))
    record = Slice("qkv", (6, 4), boxes, flat=(6, 22), replicated=("dp",), owner=2)
    whole = torch.arange(1, 25).reshape(6, 4)
    rows = torch.cat([whole[0:2].flatten(), whole[4:6].flatten(), whole[3], torch.zeros(4, dtype=torch.int64)])
    assert torch.equal(extract(record, whole), rows[6:22])
    assert record.counted() == 10  # elements 6..15 of the two owned boxes; neither the copy nor the padding
    assert record.numel == 16


def test_full_rows_are_one_run_and_columns_one_run_a_row():
    assert Slice("w", (4, 6), (Box((1, 0), (3, 6)),)).runs() == [(0, 6, 12)]
    assert Slice("w", (2, 3, 4), (Box((0, 1, 0), (2, 2, 4)),)).runs() == [(0, 4, 4), (4, 16, 4)]
    assert Slice("w", (4, 6), (Box((0, 2), (4, 4)),)).runs() == [(0, 2, 2), (2, 8, 2), (4, 14, 2), (6, 20, 2)]
    assert Slice.whole("scalar", ()).runs() == [(0, 0, 1)]
    assert Slice.whole("nothing", (0, 3)).runs() == []


def test_assemble_refuses_holes_and_double_owners():
    whole, record = torch.arange(6.0), Slice.whole("bias", (6,))
    with pytest.raises(ValueError, match=r"bias \[6\]: 2 elements are missing and 0 are owned twice"):
        assemble([(record.cut(0, 4), whole[:4])])
    with pytest.raises(ValueError, match="0 elements are missing and 1 are owned twice"):
        assemble([(record.cut(0, 4), whole[:4]), (record.cut(3, 6), whole[3:])])
    with pytest.raises(ValueError, match="pieces of two tensors"):
        assemble([(record, whole), (Slice.whole("other", (6,)), whole)])


def test_by_name_keeps_the_order_of_appearance():
    a, b = Slice.whole("a", (1,)), Slice.whole("b", (1,))
    one = torch.ones(1)
    assert [name for name, _ in by_name([(b, one), (a, one), (b, one)])] == ["b", "a"]


def test_a_box_outside_the_whole_is_our_own_fault():
    with pytest.raises(AssertionError, match="leaves the whole"):
        Slice("w", (4,), (Box((0,), (5,)),))


def test_runs_are_moved_like_one_at_a_time():
    """Column slices, ends of flat ranges and single runs: what is moved together lands where each would."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(draw.integers(1, 7, size=draw.integers(1, 4)).tolist())
        start = [int(draw.integers(0, n)) for n in shape]
        box = Box(tuple(start), tuple(int(draw.integers(a + 1, n + 1)) for a, n in zip(start, shape, strict=True)))
        record = Slice("w", shape, (box, Box((0,) * len(shape), shape, "copy")))
        a, b = sorted(draw.integers(0, record.numel + 1, size=2).tolist())
        whole = torch.arange(1.0, math.prod(shape) + 1)
        runs = slices.shared(record.cut(a, b), Slice.whole("w", shape))
        found, seen = torch.zeros(b - a), torch.zeros(b - a, dtype=torch.uint8)
        slices.move(runs, whole, found)
        slices.count(runs, seen)
        assert torch.equal(found, extract(record.cut(a, b), whole.view(shape)))
        assert (seen == 1).all()
