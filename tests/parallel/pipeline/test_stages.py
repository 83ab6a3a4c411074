"""Which layers each stage has, and what a rank keeps of the model."""

from dataclasses import replace

import pytest
import torch
from parity.harness import MODEL

from minidist.core.layout import Layout
from minidist.model import flops
from minidist.model.transformer import Transformer
from minidist.parallel.pipeline.actions import loop, vee
from minidist.parallel.pipeline.stages import Cut, cut_of, keep, mark_tied, share, stages_of


def sizes(split, layers, stages, **changes):
    return [len(row) for row in share(split, replace(MODEL, layers=layers, **changes), stages, seq_len=16)]


def test_even_shares_differ_by_one_the_larger_ones_first():
    assert sizes("even", 8, 4) == [2, 2, 2, 2] and sizes("even", 10, 4) == [3, 3, 2, 2]
    assert [list(row) for row in share("even", replace(MODEL, layers=5), 2)] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("vocab", [1, 48, 2000, 20000])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_cost_makes_the_most_loaded_stage_as_light_as_can_be(stages, vocab):
    """Held against every way to cut 9 layers."""
    cfg = replace(MODEL, layers=9, vocab=vocab)
    head = 2 * cfg.width * vocab
    layer = (flops.forward_flops(cfg, 16).total - head) / cfg.layers

    def heaviest(cut):
        return max(size * layer + head * (i == len(cut) - 1) for i, size in enumerate(cut))

    def cuts(layers, stages):
        if stages == 1:
            return [[layers]]
        return [[n, *rest] for n in range(1, layers - stages + 2) for rest in cuts(layers - n, stages - 1)]

    found = sizes("cost", 9, stages, vocab=vocab)
    assert sum(found) == 9 and min(found) >= 1
    assert heaviest(found) == pytest.approx(min(map(heaviest, cuts(9, stages))))


def test_a_large_head_leaves_its_stage_fewer_layers():
    assert sizes("cost", 8, 2, vocab=4) == [4, 4] and sizes("cost", 8, 2, vocab=2000)[1] < 4


@pytest.mark.parametrize("split", ["3,3", "3,3,1", "4,4,0", "a,b,c", "", "8", "2,2,4,0"])
def test_a_split_that_is_none_is_refused_with_one_that_is(split):
    with pytest.raises(ValueError, match=r"3 whole numbers of layers that add up to model.layers = 8, such as \"6,1,1\""):
        share(split, MODEL, 3)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"5 chunks a rank makes 10 stages of model\.layers = 8: a stage needs a layer"):
        cut_of(Layout(pp=2), MODEL, loop(2, 5))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [loop(2), loop(2, 2), vee(2), loop(4)], ids=str)
def test_every_parameter_is_held_once_under_its_name_a_tied_one_by_both_ends(stages, tied):
    cfg = replace(MODEL, tied=tied)
    with torch.device("meta"):
        whole = dict(Transformer(cfg).named_parameters())
    held = {}
    for rank in range(len(stages)):
        with torch.device("meta"):
            model = Transformer(cfg)
        cut = Cut(stages, share("even", cfg, sum(map(len, stages))))
        keep(model, cut, rank)
        mark_tied(model, cut, rank)
        used = {id(p) for stage in stages_of(model, cut, rank) for p in stage.parameters()}
        for name, parameter in model.named_parameters():
            assert parameter.shape == whole[name].shape and id(parameter) in used
            held.setdefault(name, []).append(rank)
        if tied and 0 < rank < len(stages) - 1:
            assert not hasattr(model.embedding, "weight")
    ends = sorted({*cut.ends})
    assert held.keys() == whole.keys()
    assert all(ranks == (ends if tied and name == "embedding.weight" else ranks[:1]) for name, ranks in held.items())
