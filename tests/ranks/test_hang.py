"""The hang report from plain data: who waits where, for whom, and where the tapes part."""

from minidist.core.board import RankState
from minidist.core.hang import deadlocked, first_divergence, hang_report, own_line, suspects


def call(
    seq, op="all_reduce", group="world", ranks=(0, 1, 2), peer=None, shape=(4,), dtype="float32", where="a.py:1", time=0.0
):
    return {
        **{"op": op, "group": group, "ranks": list(ranks), "seq": seq, "shape": list(shape), "dtype": dtype},
        **{"peer": peer, "detail": None, "where": where, "time": time + seq},
    }


def waits(*history, since=10.0):
    return RankState("waiting", history[-1], since, list(history))


def runs(*history):
    return RankState("running", None, 10.0, list(history))


def finished(*history):
    return RankState("idle", None, 10.0, list(history))


def test_the_rank_that_did_not_come_is_suspected():
    states = [waits(call(1), call(2)), runs(call(1)), waits(call(1), call(2))]
    assert suspects(states) == [1]
    frames = ('File "/x/site-packages/torch/a.py", line 5 in f', 'File "/me/b.py", line 7 in g')
    report = hang_report(states, {1: "\n  ".join(frames)}, 14.0)
    assert report.splitlines() == [
        "ranks 0 and 2 wait for rank 1.",
        "",
        "  rank 0: waits 4.0 s in all_reduce #2 of world [0, 1, 2], float32 [4], at a.py:1",
        "  rank 1: in no collective for 4.0 s, at me/b.py:7",
        "  rank 2: waits 4.0 s in all_reduce #2 of world [0, 1, 2], float32 [4], at a.py:1",
        "",
        "First divergence of the tapes: call #2 of world",
        "  ranks 0 and 2 called all_reduce float32 [4] at a.py:1",
        "  rank 1 called nothing",
    ]
    assert not deadlocked(states, 14.0, 1.0)  # rank 1 may come yet
    assert deadlocked([states[0], finished(call(1)), states[2]], 14.0, 1.0)
    assert not deadlocked([states[0], finished(call(1)), states[2]], 10.5, 1.0)  # too early to say


def test_the_first_of_several_divergences_counts():
    """Rank 2 called a broadcast second; all that comes later is a consequence."""
    states = [
        waits(call(1), call(2), call(3)),
        waits(call(1), call(2), call(3)),
        waits(call(1), call(2, op="broadcast"), call(3)),
    ]
    assert first_divergence(states).seq == 2
    assert [entry["op"] for entry in first_divergence(states).calls.values()] == ["all_reduce", "all_reduce", "broadcast"]
    assert first_divergence([waits(call(1)), waits(call(1, shape=(5,))), waits(call(1))]).seq == 1
    assert first_divergence([waits(call(1)), waits(call(1, dtype="int64")), waits(call(1))]).seq == 1
    assert first_divergence([waits(call(1)), waits(call(1)), waits(call(1))]) is None


def test_uneven_tensors_and_both_ends_of_a_transfer_are_no_divergence():
    uneven = [waits(call(1, op="all_to_all", ranks=(0, 1), shape=(n, 2))) for n in (1, 3)]
    assert first_divergence(uneven) is None
    pair = [
        runs(call(1, op="send", group="pp 0->1", ranks=(0, 1), peer=1)),
        waits(call(1, op="recv", group="pp 0->1", ranks=(0, 1), peer=0)),
    ]
    assert first_divergence(pair) is None and suspects(pair) == []
    assert suspects([runs(), pair[1]]) == [0]


def test_groups_are_compared_each_by_its_own_numbers():
    tp = [call(1, group="tp", ranks=(0, 1)), call(1, group="tp", ranks=(2, 3))]
    dp = [call(1, group="dp", ranks=(0, 2)), call(1, group="dp", ranks=(1, 3))]
    states = [waits(tp[0], dp[0]), waits(dp[1]), waits(tp[1], dp[0]), waits(tp[1], dp[1])]
    assert first_divergence(states).channel == "tp" and list(first_divergence(states).calls) == [0, 1]


def test_what_the_ring_has_forgotten_is_no_divergence():
    late = [call(seq) for seq in range(5, 9)]
    early = [call(seq) for seq in range(1, 6)]
    states = [waits(*late), waits(*early), waits(*late)]
    assert first_divergence(states).seq == 6 and suspects(states) == [1]


def test_a_circle_is_a_deadlock_of_all():
    states = [
        waits(call(1, op="recv", group=f"world {src}->{rank}", ranks=(0, 1, 2), peer=src))
        for rank, src in ((0, 1), (1, 2), (2, 0))
    ]
    assert suspects(states) == [0, 1, 2] and deadlocked(states, 14.0, 1.0)
    assert hang_report(states, {}, 14.0).startswith("ranks 0, 1 and 2 wait for each other.")


def test_a_collective_that_all_have_entered_is_slow_and_no_deadlock():
    states = [waits(call(1)), waits(call(1)), waits(call(1))]
    assert suspects(states) == [] and not deadlocked(states, 99.0, 1.0)
    assert "all its ranks have entered: it is slow" in hang_report(states, {}, 99.0)


def test_the_line_shown_is_the_users_own():
    queue = 'File "/usr/lib/python3.11/queue.py", line 9 in get'
    ours = 'File "/r/minidist/core/work.py", line 3 in wait'
    assert own_line("\n".join([ours, queue, 'File "<cell 3>", line 2 in f'])) == ("<cell 3>", 2)
    assert own_line(queue) == ("/usr/lib/python3.11/queue.py", 9)
    assert own_line("") is None


def test_of_two_partings_at_once_the_first_by_name_is_told_whoever_came_first():  # case C55
    for early, late in ((0.0, 0.01), (0.01, 0.0)):
        pairs = (("world 0->1", early), ("world 1->0", late))
        stuck = [call(1, "recv", channel, (0, 1), peer, time=when) for peer, (channel, when) in enumerate(pairs)]
        assert first_divergence([waits(stuck[1]), waits(stuck[0])]).channel == "world 0->1"
    apart = [call(1, "recv", "world 0->1", (0, 1), 0, time=5.0), call(1, "recv", "world 1->0", (0, 1), 1)]
    assert first_divergence([waits(apart[1]), waits(apart[0])]).channel == "world 1->0"
