"""The verifier: every fault of a schedule by its name, programs under the strictest sending, and peaks."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.parallel.pipeline.actions import Action, Schedule, ScheduleError, Transfer, loop, vee
from minidist.parallel.pipeline.program import early, forward_only, lower
from minidist.parallel.pipeline.schedules import NAMES, make
from minidist.parallel.pipeline.simulate import Times, simulate
from minidist.parallel.pipeline.text import loads
from minidist.parallel.pipeline.verify import run_rendezvous, verify

CHUNKS = {"interleaved": 3, "bfs": 2, "zb-v": 2, "dualpipe-v": 2}
SHAPES = [(1, 3), (2, 5), (3, 3), (4, 1), (4, 2), (4, 3), (4, 9), (5, 12)]


def made(name, p, m):
    return make(name, p, m, CHUNKS.get(name, 1))


@pytest.mark.parametrize("p, m", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_report(name, p, m):
    schedule = made(name, p, m)
    report = verify(schedule, stages=p * CHUNKS.get(name, 1))
    assert (report.ranks, report.stages, report.micro_batches) == (p, p * CHUNKS.get(name, 1), m)
    assert report.split == (name in ("zb-h1", "zb-v", "dualpipe-v"))
    assert report.peaks == simulate(schedule, Times(3, 1, 2), 0.5).in_flight_peak
    assert report.programs == lower(schedule)


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0 F1 B0 B1\nF0 B0 F1", "F1 (number 3 of rank 1's list): its backward is missing; add B1, or I1 and W1"),
        ("F0 F2 B0 B2\nF0 B0 F2 B2", "F1 is missing in rank 0's list: a step of 3 micro-batches has it"),
        ("F0 B0 F0\nF0 B0", "F0 (number 3 of rank 0's list): it has been done, as number 1"),
        ("F0 B0\nB0 F0", "B0 (number 1 of rank 1's list): it works on what F0 leaves, which comes later, as number 2"),
        ("F0 I0 W0\nF0 W0 I0", "W0 (number 2 of rank 1's list): it works on what I0 leaves, which comes later, as number 3"),
        ("F0 I0\nF0 I0 W0", "I0 (number 2 of rank 0's list): half a backward, W0 is missing"),
        ("F0 W0\nF0 I0 W0", "W0 (number 2 of rank 0's list): half a backward, I0 is missing"),
        ("F0 B0 W0\nF0 B0", "W0 (number 3 of rank 0's list): B0 is the whole backward of this micro-batch already"),
        ("F0 I0 B0 W0\nF0 B0", "W0 (number 4 of rank 0's list): B0 is the whole backward"),
        ("F0 B0\n F0 B0 F0.1", "F0.1 is missing in rank 0's list"),
        ("F0 B0 F1 B1\nF0 F1 B0 B1", "B0 (number 2 of rank 0's list) waits for B0 or I0 of rank 1"),
        ("stages: 0 | 2\nF0 B0\nF0 B0", "stage 1 is held by no rank: each of the stages 0 to 1 has to be held once"),
        ("stages: 0 | 0 1\nF0 B0\nF0 B0", "stage 0 is held by ranks 0, 1"),
        ("stages: 0 | 1\nF0 B0\nF0 B0 F0.1 B0.1", "F0.1 (number 3 of rank 1's list): rank 1 has no chunk 1"),
        ("stages: 0 1 | 2\nF0 B0\nF0 B0", "F0.1 is missing in rank 0's list"),
    ],
)
def test_a_fault_is_named_with_its_place(text, words):
    with pytest.raises(ScheduleError) as error:
        verify(loads(text))
    assert words in str(error.value)


def test_other_faults():
    with pytest.raises(ScheduleError, match="no action in any list"):
        verify(Schedule("empty", ((), ()), loop(2)))
    with pytest.raises(ScheduleError, match=r"Q0 \(number 1 .*no action is called 'Q'"):
        verify(Schedule("kind", ((Action("Q", 0),),), loop(1)))
    with pytest.raises(ScheduleError, match="the schedule is one of 2 stages, the model is cut into 4"):
        verify(make("1f1b", 2, 2), stages=4)
    with pytest.raises(ScheduleError, match="F0 is missing"):  # at once, however far the typing error goes
        verify(loads("F10000000000000 B10000000000000"))


def wire(programs, stages):
    """By (from, to): what is sent and what is received, in order, as (kind, stage that made it, micro-batch)."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, program in enumerate(programs):
        for op in program:
            if isinstance(op, Transfer):
                stage = stages[rank][op.chunk]
                if op.op == "send":
                    sent[rank, op.peer].append((op.kind, stage, op.micro))
                else:
                    received[op.peer, rank].append((op.kind, stage + (-1 if op.kind == "F" else 1), op.micro))
    return sent, received


@pytest.mark.parametrize("p, m", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_programs(name, p, m):
    """Actions as they were, every crossing of ranks once on both sides, in the same order, sent at once, there before use."""
    schedule = made(name, p, m)
    crossings = 2 * m * sum(a[0] != b[0] for a, b in zip(schedule.places, schedule.places[1:], strict=False))
    for programs in (lower(schedule), early(lower(schedule))):
        assert tuple(tuple(op for op in program if isinstance(op, Action)) for program in programs) == schedule.lists
        sent, received = wire(programs, schedule.stages)
        assert sent == received
        assert sum(map(len, sent.values())) == crossings
        for rank, program in enumerate(programs):
            expect_in_place(program, schedule, rank)
    run_rendezvous(lower(schedule), schedule.stages)


def expect_in_place(program, schedule, rank):
    """A send right after its action (but for other transfers), a recv before the action that uses it."""
    for number, op in enumerate(program):
        if isinstance(op, Transfer) and op.op == "send":
            last = next(a for a in reversed(program[:number]) if isinstance(a, Action))
            assert (op.kind, op.micro, op.chunk) == (last.kind.replace("I", "B"), last.micro, last.chunk)
        if isinstance(op, Transfer) and op.op == "recv":
            use = [a for a in program[number:] if isinstance(a, Action) and (a.micro, a.chunk) == (op.micro, op.chunk)]
            assert any(a.kind.replace("I", "B") == op.kind for a in use)


def test_program_by_hand():
    """Of 1F1B on two ranks; early, what arrives during an action is expected before it."""
    first, second = (" / ".join(map(str, program)) for program in lower(make("1f1b", 2, 2)))
    assert first == ("F0 / send F0 to rank 1 / F1 / send F1 to rank 1 / recv B0 from rank 1 / B0 / recv B1 from rank 1 / B1")
    assert second == ("recv F0 from rank 0 / F0 / recv F1 from rank 0 / B0 / send B0 to rank 0 / F1 / B1 / send B1 to rank 0")
    first, second = (" / ".join(map(str, program)) for program in early(lower(make("1f1b", 2, 2))))
    assert first == ("F0 / send F0 to rank 1 / recv B0 from rank 1 / F1 / send F1 to rank 1 / recv B1 from rank 1 / B0 / B1")
    assert second == ("recv F0 from rank 0 / recv F1 from rank 0 / F0 / B0 / send B0 to rank 0 / F1 / B1 / send B1 to rank 0")


def test_the_nearest_order_deadlocks_and_is_refused():
    """1F1B with each recv right before its use: one sends F1, the other B0, and where sends wait neither comes to its recv."""
    first = (
        Action("F", 0),
        Transfer("send", "F", 0, 0, 1),
        Action("F", 1),
        Transfer("send", "F", 1, 0, 1),
        Transfer("recv", "B", 0, 0, 1),
    )
    second = (
        Transfer("recv", "F", 0, 0, 0),
        Action("F", 0),
        Action("B", 0),
        Transfer("send", "B", 0, 0, 0),
        Transfer("recv", "F", 1, 0, 0),
    )
    with pytest.raises(ScheduleError) as error:
        run_rendezvous((first, second))
    assert "rank 0 stands at send F1 to rank 1 (number 4 of its program)" in str(error.value)
    assert "rank 1 stands at send B0 to rank 0 (number 4 of its program)" in str(error.value)
    swapped = (*second[:3], second[4], second[3])
    run_rendezvous((first, swapped))


def test_messages_that_do_not_match_are_refused():
    one, two = (Transfer("send", "F", 0, 0, 1),), (Transfer("recv", "F", 1, 0, 0),)
    with pytest.raises(ScheduleError, match="rank 0 is to send F0 to rank 1, but rank 1 is to recv F1 from rank 0"):
        run_rendezvous((one, two))
    with pytest.raises(ScheduleError, match=r"rank 0 stands at send F0 to rank 1 .*; rank 1 is at its end"):
        run_rendezvous((one, ()))
    with pytest.raises(ScheduleError, match="no such other rank among 2"):
        run_rendezvous(((Transfer("send", "F", 0, 0, 2),), ()))
    crossed = (Action("F", 0), Transfer("send", "F", 0, 0, 1)), (Transfer("recv", "F", 0, 1, 0),)
    run_rendezvous(crossed)
    with pytest.raises(ScheduleError, match="rank 0 is to send F0 to rank 1 before it has made it"):
        run_rendezvous((crossed[0][::-1], (Transfer("recv", "F", 0, 0, 0),)), loop(2))
    with pytest.raises(ScheduleError, match=r"recv F0.1 from rank 0"):  # for its second chunk, which is stage 3
        run_rendezvous(crossed, loop(2, 2))
    with pytest.raises(ScheduleError, match=r"F0 \(number 1 of rank 1's list\): it works on the output of stage 0"):
        run_rendezvous(((Action("F", 0),), (Action("F", 0),)), loop(2))


@pytest.mark.parametrize("stages", [loop(4), loop(3, 2), vee(3), ((0, 1), (2,)), ((3, 0), (1, 2)), ((0,),)])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_forwards_alone(stages, m):
    schedule = forward_only(stages, m)
    assert schedule == forward_only(Schedule("other", tuple(() for _ in stages), stages), m)
    report = verify(schedule, forward_only=True)
    assert set(report.peaks) == {1}  # nothing is kept for a backward
    assert not report.split
    with pytest.raises(ScheduleError, match=r"F0 \(number . of rank 0's list\): its backward is missing"):
        verify(schedule)
    with pytest.raises(ScheduleError, match="a schedule of forwards alone, which has no backward"):
        verify(make("gpipe", 2, 2), forward_only=True)


@pytest.mark.parametrize("p, m, v", [(4, 9, 1), (4, 1, 1), (4, 3, 2), (4, 8, 2), (3, 10, 2), (3, 11, 3), (2, 5, 4)])
def test_forwards_alone_fill_the_pipeline(p, m, v):
    """Ranks idle while the first micro-batch comes to them, and no longer where there are as many micro-batches as ranks."""
    assert simulate(forward_only(loop(p, v), m)).makespan == (m * v + p - 1 if m >= p else m + v * p - 1)


def test_no_forwards_are_refused():
    with pytest.raises(ValueError, match="micro_batches = 0: give at least 1"):
        forward_only(loop(2), 0)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_two_actions_swapped(data):
    """It is still right and runs, or it is refused with an action named; it neither hangs nor fails in another way."""
    name = data.draw(st.sampled_from(NAMES))
    schedule = made(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    places = [(rank, place) for rank, actions in enumerate(schedule.lists) for place in range(len(actions))]
    (a, i), (b, j) = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    if data.draw(st.booleans()):  # within one list, which keeps the schedule complete
        b, j = a, j % len(schedule.lists[a])
    lists = [list(actions) for actions in schedule.lists]
    lists[a][i], lists[b][j] = lists[b][j], lists[a][i]
    swapped = Schedule(name, tuple(map(tuple, lists)), schedule.stages)
    try:
        report = verify(swapped)
    except ScheduleError as error:
        assert any(str(action) in str(error).replace("(", " ").split() for actions in lists for action in actions)
    else:
        timeline = simulate(swapped, Times(2, 3, 1), 0.1)
        assert timeline.makespan >= timeline.ideal
        assert report.peaks == timeline.in_flight_peak
        run_rendezvous(report.programs, swapped.stages)


def test_verifying_runs_the_programs(monkeypatch):
    """A fault of the lowering itself comes out too: here, without the last transfer of the last rank."""
    programs = lower(make("1f1b", 2, 2))
    monkeypatch.setattr("minidist.parallel.pipeline.verify.lower", lambda schedule: (programs[0], programs[1][:-1]))
    with pytest.raises(ScheduleError, match=r"rank 0 stands at recv B1 from rank 1 .*; rank 1 is at its end"):
        verify(make("1f1b", 2, 2))
