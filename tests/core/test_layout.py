"""Layout arithmetic: places and ranks, groups as slices of one mesh, refusals with a remedy."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.core.layout import AXES, GROUPS, Layout

sizes = st.integers(1, 4)


@settings(deadline=None)
@given(sizes, sizes, sizes, sizes)
def test_rank_and_coordinates_are_inverse(pp, dp, cp, tp):
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, sizes, st.data())
def test_each_kind_of_group_holds_every_rank_once(pp, dp, cp, tp, data):
    divisors = [d for d in range(1, dp * cp + 1) if dp * cp % d == 0]
    layout = Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, ep=data.draw(st.sampled_from(divisors)), shard=data.draw(st.sampled_from(divisors))
    )
    for name in GROUPS:
        members = list(itertools.chain.from_iterable(layout.groups(name)))
        assert sorted(members) == list(range(layout.world_size)), name
        for rank in members:
            assert rank in layout.group_of(name, rank)


@settings(deadline=None)
@given(sizes, sizes, sizes, sizes)
def test_an_axis_group_varies_one_coordinate_only(pp, dp, cp, tp):
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    for axis in AXES:
        for group in layout.groups(axis):
            places = [layout.coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(getattr(layout, axis)))
            others = {tuple(v for k, v in place.items() if k != axis) for place in places}
            assert len(others) == 1


def test_tp_is_innermost_and_dp_cp_has_cp_inside():
    layout = Layout(pp=2, dp=2, cp=2, tp=2)
    assert layout.group_of("tp", 0) == [0, 1]
    assert layout.group_of("cp", 0) == [0, 2]
    assert layout.group_of("dp", 0) == [0, 4]
    assert layout.group_of("pp", 0) == [0, 8]
    assert layout.group_of("dp_cp", 1) == [1, 3, 5, 7]


def test_borrowed_groups_of_16_ranks():
    """dp 2 x cp 2 x tp 2 a stage: ep and shard take consecutive places of dp x cp, their partners the same place of each."""
    layout = Layout(pp=2, dp=2, cp=2, tp=2, ep=2, shard=2)
    assert layout.group_of("ep", 0) == [0, 2] and layout.group_of("ep", 4) == [4, 6]
    assert layout.group_of("expert_dp", 0) == [0, 4] and layout.group_of("expert_dp", 2) == [2, 6]
    assert layout.group_of("shard", 6) == [4, 6] and layout.group_of("replicate", 6) == [2, 6]
    assert Layout(dp=4).group_of("shard", 1) == [0, 1, 2, 3] and Layout(dp=4).group_of("replicate", 1) == [1]


def test_tied_joins_first_and_last_stage_only():
    layout = Layout(pp=4, dp=2)
    assert layout.group_of("tied", 0) == [0, 6] and layout.group_of("tied", 7) == [1, 7]
    assert layout.group_of("tied", 2) == [2]
    assert Layout(pp=1, dp=2).group_of("tied", 1) == [1]


def test_every_rank_of_8_matches_an_index_by_hand():
    """Against an independent count: rank = ((pp * DP + dp) * CP + cp) * TP + tp."""
    layout = Layout(pp=1, dp=2, cp=2, tp=2)
    for dp, cp, tp in np.ndindex(2, 2, 2):
        assert layout.rank(dp=dp, cp=cp, tp=tp) == (dp * 2 + cp) * 2 + tp


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(tp=0), "layout.tp = 0: give a whole number of at least 1"),
        (lambda: Layout(dp=2.0), "layout.dp = 2.0"),
        (lambda: Layout(dp=True), "layout.dp = True"),
        (lambda: Layout(dp=4, ep=3), "layout.ep = 3 does not divide dp x cp = 4 x 1 = 4: use one of [1, 2, 4]"),
        (lambda: Layout(dp=4, shard=3), "layout.shard = 3 does not divide"),
        (lambda: Layout(zero=4), "layout.zero = 4: ZeRO has stages 0 to 3"),
        (lambda: Layout(dp=3).expect_ranks(4), "set layout.dp = 4, or start 3"),
        (lambda: Layout(dp=1, tp=3).expect_ranks(4), "change one of the axes, or start 3"),
        (
            lambda: Layout(tp=6).expect_model(layers=8, heads=12, kv_heads=4, ffn=66),
            "layout.tp = 6 does not divide model.kv_heads = 4: use tp = 2, or a model whose kv_heads is a multiple of 6",
        ),
        (lambda: Layout(pp=9).expect_model(layers=8, heads=1, kv_heads=1, ffn=1), "use pp <= 8"),
        (
            lambda: Layout(dp=4, ep=4).expect_model(layers=1, heads=1, kv_heads=1, ffn=1, experts=6),
            "layout.ep = 4 does not divide model.experts = 6: use ep = 2",
        ),
        (lambda: Layout(dp=4).expect_batch(global_batch=3, seq_len=8), "use a global batch of at least 4, or dp <= 3"),
        (lambda: Layout(cp=3).expect_batch(global_batch=3, seq_len=8), "use a multiple of 6"),
        (
            lambda: Layout(tp=4, sp=True).expect_batch(global_batch=3, seq_len=6),
            "does not divide into cp x tp = 1 x 4",
        ),
        (lambda: Layout(cp_attention="star"), "layout.cp_attention = 'star': use one of ring, gather, ulysses"),
        (lambda: Layout(dp=2).groups("rows"), "no group is called 'rows': use one of world, pp"),
        (lambda: Layout(dp=2).coordinates(2), "rank 2: this layout has ranks 0 to 1"),
    ],
)
def test_refusals_name_the_key_the_value_and_the_remedy(make, words):
    with pytest.raises(ValueError) as refusal:
        make()
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
