"""The text form and torch's CSV: round trips, torch as the reader and the writer, and errors with line and word."""

import pytest
from parallel.pipeline import theirs
from torch.distributed.pipelining import schedules as torchs

from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.schedules import NAMES, make
from minidist.parallel.pipeline.text import dumps, from_csv, loads, read, to_csv
from minidist.parallel.pipeline.verify import verify

CHUNKS = {"interleaved": 3, "bfs": 2, "zb-v": 2, "dualpipe-v": 2}
SHAPES = pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 2), (4, 9)])
EACH = pytest.mark.parametrize("name", NAMES)
WRITTEN = """
# two ranks, three micro-batches
F0 F1 B0  F2 B1 B2   # the first one

F0 B0 F1 B1 F2 B2
"""


def made(name, p, m):
    return make(name, p, m, CHUNKS.get(name, 1))


@SHAPES
@EACH
def test_round_trips(name, p, m):
    schedule = made(name, p, m)
    assert loads(dumps(schedule), name) == schedule
    assert from_csv(to_csv(schedule), name) == schedule
    assert from_csv(to_csv(loads(dumps(schedule))), name) == schedule


def test_what_a_person_writes():
    schedule = loads(WRITTEN)
    assert schedule.lists == make("1f1b", 2, 3).lists
    assert schedule.stages == ((0,), (1,))
    verify(schedule)


def test_stages_are_dealt_out_by_the_highest_chunk_or_as_written():
    assert loads("F0 B0\nF0.1 B0").stages == ((0, 2), (1, 3))
    text = "stages: 0 3 | 1 2\n" + dumps(Schedule("v", make("zb-v", 2, 4, 2).lists, ((0, 2), (1, 3))))
    assert loads(text, "zb-v") == make("zb-v", 2, 4, 2)
    assert "stages: 0 3 | 1 2\n" in dumps(make("zb-v", 2, 4, 2))
    assert "stages" not in dumps(make("interleaved", 2, 4, 2))


@SHAPES
@EACH
def test_torch_reads_ours(name, p, m, tmp_path):
    """It accepts the lists, adds its own transfers, and its own simulation of them comes to an end."""
    path, v = tmp_path / "ours.csv", CHUNKS.get(name, 1)
    path.write_text(to_csv(made(name, p, m)))
    engine = theirs.engine("_PipelineScheduleRuntime", p, m, v)
    engine._load_csv(path)
    assert theirs.csv_of(engine.pipeline_order) == path.read_text()
    places = made(name, p, m).places
    assert engine.stage_index_to_group_rank == {stage: rank for stage, (rank, _) in enumerate(places)}
    order = {
        rank: [a for a in row if "SHARD" not in str(a) and "GRAD" not in str(a)]
        for rank, row in engine.pipeline_order_with_comms.items()
    }
    torchs._simulate_comms_compute(order, engine.stage_index_to_group_rank.__getitem__, p * v)


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_we_read_torchs(name, form, tmp_path):
    """With idle cells, and with transfers, weight gathering and reductions, which we leave out. Overlapped pairs open up."""
    path, v = tmp_path / "theirs.csv", CHUNKS.get(name, 1)
    engine = theirs.engine(name, 4, 8, v)
    engine._dump_csv(path, form)
    text = path.read_text()
    assert form == "compute_only" or all(word in text for word in ("SEND_F", "RECV_B", "REDUCE_GRAD"))
    assert ("OVERLAP_F_B" in text) == (name == "dualpipe-v")
    schedule = read(path)
    assert schedule.name == "theirs"
    verify(schedule, stages=4 * v)
    assert schedule.lists == theirs.schedule(name, 4, 8, v).lists


def test_cells_that_are_no_work_of_ours():
    text = ',,0F0,0SEND_F0,0UNSHARD,"(0F1;0B0)OVERLAP_F_B",0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n\n'
    assert dumps(from_csv(text)).splitlines()[1] == "F0 F1 B0 B1"


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0 B0\nF0 X0", "line 2, word 2: 'X0' is no action: write F3"),
        ("# one\nF0 B", "line 2, word 2: 'B' is no action"),
        ("stages: 0 a | 1\nF0 B0", "line 1, word 3: 'a' is no stage"),
        ("stages: 0 | 1\nstages: 0 | 1\nF0", "line 2, word 1: the stages have been given before"),
        ("stages: 0 | 1\nF0 B0", "stages for 2 ranks, but actions for 1"),
        ("# nothing\n", "no rank's actions in this text"),
    ],
)
def test_a_text_that_is_not_understood(text, words):
    with pytest.raises(ValueError) as error:
        loads(text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0,0B0\n1F0,,1X0", "line 2, cell 3: '1X0' is no action: write the stage"),
        ("0F", "line 1, cell 1: '0F' is no action"),
        ("0F0,(0F1;zz)OVERLAP_F_B", "line 1, cell 2: 'zz' is no action"),
        ("0F0,0SEND_X0", "line 1, cell 2: '0SEND_X0'"),
        (",,\n", "no action in this CSV"),
    ],
)
def test_a_csv_that_is_not_understood(text, words):
    with pytest.raises(ValueError) as error:
        from_csv(text)
    assert words in str(error.value)


def test_files(tmp_path):
    schedule = make("zb-h1", 3, 4)
    for name, write in (("mine.csv", to_csv), ("mine.txt", dumps), ("mine", dumps)):
        (tmp_path / name).write_text(write(schedule))
        assert read(tmp_path / name).lists == schedule.lists
        assert read(str(tmp_path / name)).name == "mine"
    (tmp_path / "bad.txt").write_text("F0 Q")
    with pytest.raises(ValueError, match=r"bad.txt: line 1, word 2: 'Q'"):
        read(tmp_path / "bad.txt")
    with pytest.raises(ValueError, match=r"none.csv: No such file"):
        read(tmp_path / "none.csv")
