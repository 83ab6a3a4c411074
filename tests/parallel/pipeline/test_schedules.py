"""The generators: torch's own schedules beside ours, every p, m and v verified, and what is refused."""

import pytest
from parallel.pipeline import theirs

from minidist.parallel.pipeline.actions import loop, vee
from minidist.parallel.pipeline.schedules import NAMES, make, stages_of
from minidist.parallel.pipeline.simulate import Times, simulate
from minidist.parallel.pipeline.verify import verify

CHUNKS = {"interleaved": (1, 2, 3, 4), "bfs": (1, 2, 3, 4), "zb-v": (2,), "dualpipe-v": (2,)}
TIMES = [Times(), Times(4, 4, 1), Times(3, 5, 2), Times(2, 7, 3)]
GRID = [(name, p, m, v) for name in NAMES for p in range(1, 9) for m in range(1, 21) for v in CHUNKS.get(name, (1,))]
PEERS = [
    *(("gpipe", p, m, 1) for p, m in ((1, 2), (2, 2), (4, 1), (4, 3), (4, 8), (8, 12))),
    *(("1f1b", p, m, 1) for p, m in ((1, 2), (2, 2), (3, 5), (4, 4), (4, 9), (8, 16))),
    *(("interleaved", *shape) for shape in ((2, 4, 2), (4, 8, 2), (4, 12, 3), (4, 3, 2), (4, 10, 2), (3, 9, 4), (8, 16, 2))),
    *(("bfs", *shape) for shape in ((2, 4, 2), (4, 8, 2), (4, 3, 2), (3, 7, 4), (8, 10, 2))),
    *(("zb-h1", p, m, 1) for p, m in ((2, 2), (2, 4), (4, 8), (8, 16))),
    *(("zb-v", p, m, 2) for p, m in ((1, 3), (2, 4), (4, 2), (4, 5), (4, 6), (4, 7), (8, 20))),
    *(("dualpipe-v", p, m, 2) for p, m in ((1, 3), (2, 4), (4, 8), (4, 12), (8, 20))),
]


@pytest.mark.parametrize("name, p, m, v", PEERS)
def test_like_torch(name, p, m, v):
    """Bubble and in-flight peak, under equal and unequal times, with links that cost nothing and that cost something."""
    ours, torchs = make(name, p, m, v), theirs.schedule(name, p, m, v)
    assert ours.stages == torchs.stages
    verify(torchs)
    for times in TIMES:
        for link in (0, 0.25):
            one, other = simulate(ours, times, link), simulate(torchs, times, link)
            assert one.makespan == other.makespan
            assert one.bubble_of_ideal == other.bubble_of_ideal
            assert one.in_flight_peak == other.in_flight_peak


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_same_actions_as_torch(name):
    """Even the same lists. (Not bfs: torch does its backwards from the last micro-batch to the first.)"""
    v = CHUNKS.get(name, (1,))[-1]
    assert make(name, 4, 8, v).lists == theirs.schedule(name, 4, 8, v).lists


@pytest.mark.parametrize("name, p, m, v", GRID[::9])
def test_a_slice_of_all_is_right(name, p, m, v):
    """Every ninth of the grid: 9 is prime to the lengths of its rows, so every p, m and v comes."""
    verify(make(name, p, m, v), stages=p * v)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_all_are_right(name):
    for other, p, m, v in GRID:
        if other == name:
            verify(make(name, p, m, v), stages=p * v)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_fewer_micro_batches_than_stages(name, m):
    """C34: four ranks with 1, 2 or 3 micro-batches. Right, and never worse than doing one after the other."""
    v = CHUNKS.get(name, (1,))[-1]
    report = verify(make(name, 4, m, v), stages=4 * v)
    assert report.micro_batches == m
    assert max(report.peaks) <= m * v
    timeline = simulate(make(name, 4, m, v))
    assert timeline.makespan <= m * 3 * v * 4
    assert timeline.ideal == m * 3 * v


@pytest.mark.parametrize("m, first", [(8, 4), (9, 5), (10, 5), (11, 6), (12, 4), (13, 5), (3, 3)])
def test_peak_of_interleaved_where_ranks_do_not_divide_micro_batches(m, first):
    """What a first round of so many holds, and no more."""
    peaks = verify(make("interleaved", 4, m, 3)).peaks
    assert peaks == tuple(min(2 * first + 2 * (3 - rank) + 1, 3 * m) for rank in range(4))


def test_interleaved_with_one_chunk_is_1f1b():
    assert make("interleaved", 4, 8).lists == make("1f1b", 4, 8).lists


def test_placement():
    assert stages_of("1f1b", 3) == ((0,), (1,), (2,)) == loop(3)
    assert stages_of("interleaved", 2, 3) == ((0, 2, 4), (1, 3, 5))
    assert stages_of("zb-v", 3, 2) == ((0, 5), (1, 4), (2, 3)) == vee(3)
    for name in NAMES:
        v = CHUNKS.get(name, (1,))[-1]
        assert make(name, 4, 3, v).stages == stages_of(name, 4, v)
        assert make(name, 4, 3, v).name == name


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("1f1c", 2, 2), r"schedule '1f1c': use one of gpipe, 1f1b, interleaved, bfs, zb-h1, zb-v, dualpipe-v"),
        (("1f1b", 2, 2, 2), r"'1f1b' has one chunk on every rank: set chunks = 1, or use one of interleaved, bfs for 2"),
        (("zb-v", 2, 2), r"'zb-v' has two chunks on every rank: set chunks = 2, not 1"),
        (("gpipe", 2, 0), r"micro_batches = 0: give at least 1"),
        (("gpipe", 0, 2), r"0 ranks with 1 chunks"),
        (("bfs", 2, 2, 0), r"2 ranks with 0 chunks"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(*arguments)
