"""The board: what a rank writes is what its parent and peers read, also when it is long, old or torn."""

import time

from minidist.core.board import ENTRIES, ENTRY_BYTES, Board


def entry(seq, group="world", **more):
    return {"op": "all_reduce", "group": group, "ranks": [0, 1], "seq": seq, "shape": [4], "dtype": "float32", "peer": None,
            "detail": "sum", "where": "cell:1", "time": 0.0} | more  # fmt: skip


def boards(tmp_path, ranks=2):
    """The same board seen by its creator and by a rank."""
    path = str(tmp_path / "board")
    return Board.create(path, ranks), Board.open(path)


def test_states(tmp_path):
    parent, rank = boards(tmp_path)
    assert parent.ranks == rank.ranks == 2
    assert parent.state(1).status == "idle" and parent.state(1).history == []
    before = time.monotonic()
    rank.enter(1, entry(1))
    rank.wait(1, 1)
    state = parent.state(1)
    assert state.status == "waiting" and state.entry == entry(1) and state.since >= before
    rank.leave(1)
    assert parent.state(1).status == "running" and parent.state(1).entry is None and parent.state(1).history == [entry(1)]
    assert parent.state(0).history == []
    rank.reset(1, "idle")
    assert parent.state(1).status == "idle" and parent.state(1).history == []


def test_waiting_for_an_older_one_of_several_in_flight(tmp_path):
    parent, rank = boards(tmp_path)
    for seq in (1, 2, 3):
        rank.enter(0, entry(seq))
    rank.wait(0, 2)
    assert parent.state(0).entry["seq"] == 2


def test_find_by_group_and_number(tmp_path):
    parent, rank = boards(tmp_path)
    rank.enter(0, entry(1))
    rank.enter(0, entry(1, "tp"))
    rank.enter(0, entry(2, "tp"))
    assert parent.find(0, ("tp", 2))["seq"] == 2 and parent.find(0, ("world", 1))["group"] == "world"
    assert parent.find(0, ("world", 2)) is None and parent.find(0, ("dp", 1)) is None and parent.find(1, ("world", 1)) is None


def test_old_entries_leave_the_ring(tmp_path):
    parent, rank = boards(tmp_path)
    for seq in range(1, ENTRIES + 11):
        rank.enter(0, entry(seq))
    history = parent.state(0).history
    assert [history[0]["seq"], history[-1]["seq"], len(history)] == [11, ENTRIES + 10, ENTRIES]
    assert parent.find(0, ("world", 5)) is None


def test_long_entries_keep_what_identifies_the_collective(tmp_path):
    parent, rank = boards(tmp_path)
    rank.enter(0, entry(1, ranks=list(range(400)), where="x" * 900 + "cell:7", detail={"send": [1000] * 400}))
    found = parent.state(0).history[0]
    assert found["op"] == "all_reduce" and found["seq"] == 1 and found["where"].endswith("cell:7")


def test_a_torn_entry_is_left_out(tmp_path):
    parent, rank = boards(tmp_path)
    rank.enter(0, entry(1))
    rank.enter(0, entry(2))
    parent._memory[64 + ENTRY_BYTES + 10 : 64 + ENTRY_BYTES + 30] = b"\xff" * 20
    assert [e["seq"] for e in parent.state(0).history] == [1]
