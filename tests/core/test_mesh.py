"""Meshes: the groups of a layout on real ranks, groups of one's own, refusals."""

import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import GROUPS, Layout
from minidist.core.mesh import Mesh


def sums(mesh):
    """The sum of ranks over each kind of group, and whether place and members are the layout's."""
    found = {}
    for name in GROUPS:
        group = mesh.group(name)
        assert list(group.ranks) == mesh.layout.group_of(name, mesh.rank) and group.ranks[group.rank] == mesh.rank
        found[name] = int(comm.all_reduce(torch.tensor([mesh.rank]), group))
    return found


@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2), Layout(pp=2, cp=2, ep=2), Layout(dp=4, ep=2, shard=2), Layout(tp=3)])
def test_every_kind_of_group_talks_to_its_members(layout):
    for rank, found in enumerate(ranks.run(sums, layout.world_size, layout=layout)):
        assert found == {name: sum(layout.group_of(name, rank)) for name in GROUPS}


def own(mesh):
    """A group of ranks 1 and 2, asked for twice as a cell that is run again would."""
    for _ in range(2):
        group = mesh.new_group([1, 2], "pair")
        assert (group is None) == (mesh.rank == 0)
        if group is not None:
            assert int(comm.all_reduce(torch.tensor([mesh.rank]), group)) == 3 and mesh.group("pair") is group
    with pytest.raises(ValueError, match="there is a group called 'pair' of other ranks already"):
        mesh.new_group([0, 1], "pair")
    with pytest.raises(ValueError, match="there is a group called 'tp' of other ranks already"):
        mesh.new_group([0], "tp")


def test_groups_of_ones_own():
    ranks.run(own, 3)


def test_groups_with_the_same_members_share_a_connection():
    def program(mesh):
        return mesh.group("dp").handle is mesh.world.handle and mesh.group("shard").handle is mesh.world.handle

    assert ranks.run(program, 3) == [True] * 3


def test_refusals():
    with pytest.raises(ValueError, match="a layout of 2 ranks in an unconnected process: start it by"):
        Mesh(Layout(dp=2))
    with pytest.raises(ValueError, match="no group is called 'data': use one of world, pp"):
        Mesh(Layout()).group("data")
    assert repr(Mesh(Layout())) == "Mesh(pp=1 dp=1 cp=1 tp=1, rank 0 of 1 on cpu)"
