"""Fewer ranks: every planned layout is legal, fits, keeps what it can, and no better one exists (brute force)."""

from itertools import product

import pytest

from minidist.core.layout import Layout
from minidist.faults.replan import replan


def expect(layout, layers=8, heads=12, kv_heads=4, ffn=96, experts=0, batch=24):
    """The checks of a model of 8 layers and 12 heads, and a batch of 24 sequences of 48 tokens."""
    layout.expect_model(layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn, experts=experts)
    layout.expect_batch(global_batch=batch, seq_len=48)
    if layout.pp not in (1, 2, 4, 8):
        raise ValueError("this schedule wants stages of equal length")


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        (Layout(dp=4), 4, Layout(dp=4)),
        (Layout(dp=4), 3, Layout(dp=3)),
        (Layout(dp=4, zero=3), 1, Layout(dp=1, zero=3)),
        (Layout(dp=2, tp=2), 3, Layout(dp=1, tp=2)),  # one rank idles rather than that another holds twice the model
        (Layout(dp=2, tp=2, sp=True), 1, Layout()),  # and sp goes where tp goes
        (Layout(dp=2, pp=2, tp=2, schedule="gpipe"), 7, Layout(dp=1, pp=2, tp=2, schedule="gpipe")),
        (Layout(pp=4, split="3,2,2,1", schedule="zb-h1"), 3, Layout(pp=2, schedule="zb-h1")),
        (Layout(pp=4, schedule="zb-h1"), 1, Layout()),
        (Layout(tp=4, dp=1), 3, Layout(tp=2, dp=1)),  # 3 divides 12 heads but not 4 kv_heads
        (Layout(cp=2, tp=2, cp_attention="ulysses"), 3, Layout(tp=2)),  # context before tensor
        (Layout(pp=2, cp=2), 3, Layout(pp=2)),  # context before pipeline
        (Layout(dp=4, zero=1, shard=2), 3, Layout(dp=3, zero=1, shard=1)),
        (Layout(dp=8, zero=1, shard=4), 6, Layout(dp=6, zero=1, shard=3)),
        (Layout(dp=8), 30, Layout(dp=24)),  # more ranks than the batch has sequences
    ],
)
def test_what_is_given_up(before, ranks, after):
    assert replan(before, ranks, expect) == after


def test_experts_spread_as_far_as_the_ranks_go():
    def four(layout):
        expect(layout, experts=4)

    assert replan(Layout(dp=4, ep=4), 3, four) == Layout(
        dp=2, ep=2
    )  # 3 ranks with all experts each would hold four times as much
    assert replan(Layout(dp=4, ep=2), 3, four) == Layout(dp=2, ep=2)
    assert replan(Layout(dp=8, ep=2), 7, four) == Layout(dp=6, ep=2)


LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero)
    for dp, tp, pp, cp, ep, zero in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2), (0, 3))
    if dp * cp % ep == 0 and 1 < dp * tp * pp * cp <= 16
]


@pytest.mark.parametrize("before", LAYOUTS, ids=repr)
def test_none_better_is_legal(before):
    def legal(layout):
        expect(layout, experts=4)

    def keeps(layout):
        return (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp)

    for ranks in range(1, before.world_size):
        found = replan(before, ranks, legal)
        assert found.world_size <= ranks and found.zero == before.zero
        for sizes in product(*(range(1, getattr(before, axis) + 1) for axis in ("tp", "pp", "cp", "ep")), range(1, ranks + 1)):
            try:
                tp, pp, cp, ep, dp = sizes
                other = Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)
                legal(other)
            except ValueError:
                continue
            assert other.world_size > ranks or keeps(other) <= keeps(found)


def test_where_nothing_is_legal_the_reason_is_given():
    def never(layout):
        raise ValueError("the model needs 8 GPUs")

    with pytest.raises(ValueError, match="no layout of at most 3 ranks can go on with this run: the model needs 8 GPUs"):
        replan(Layout(dp=4), 3, never)
    with pytest.raises(ValueError, match="no layout of at most 0 ranks"):
        replan(Layout(dp=4), 0, never)
