"""Traces: the Chrome trace event format as Perfetto reads it, tapes back from it unchanged, and what cannot be read."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from minidist.core import spans, trace
from minidist.core.tape import Line, Span, Tape


def line(op, launch, finish, seq=1, peer=None, group="pp", tag="act", sent=8):
    return Line(op, group, (0, 1), 8, sent, "float32", (2, 1), tag, seq, launch, finish, "a.py:3", peer, 0.25)


@pytest.fixture
def tapes():
    """Two ranks: two micro-batches forward, their transfers, overlapping reductions, one that never finished."""
    first, second = Tape(0), Tape(1)
    first.spans = [Span("F0", 10.0, 11.0), Span("F1.1", 11.0, 12.0), spans.frame(3, 9.5, 13.0)]
    first.lines = [
        line("send", 11.0, 11.1, 1, 1),
        line("all_reduce", 11.5, 12.5, 1, group="dp", tag="grad", sent=4.5),
        line("all_reduce", 11.6, 12.4, 2, group="dp", tag="grad"),
        line("send", 12.0, 12.1, 2, 1),
        line("all_reduce", 12.45, None, 3, group="dp", tag="grad"),
    ]
    second.spans = [Span("F0", 11.1, 12.1), Span("W0", 12.1, 13.0)]
    second.lines = [
        line("recv", 10.2, 11.1, 1, 0),
        line("recv", 12.05, 12.1, 2, 0),
        line("recv", 12.2, 12.3, 9, 0),  # its send is not on the tape
        line("barrier", 12.9, 13.5, tag="check"),
    ]
    return [first, second]


def events(made, phase):
    return [event for event in made["traceEvents"] if event["ph"] == phase]


def test_the_format_is_chromes_and_no_two_events_of_a_thread_overlap(tapes):
    made = json.loads(json.dumps(trace.to_chrome(tapes), allow_nan=False))
    assert set(made) == {"traceEvents", "displayTimeUnit", "otherData"}
    threads = defaultdict(list)
    for event in events(made, "X"):
        assert event["name"] and event["dur"] >= 0 and event["ts"] >= 0 and event["args"]
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, threads.values())) == 14
    for bars in threads.values():
        bars.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(bars))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(made, "M") if e["name"] == "thread_name"}
    assert set(threads) <= set(named)
    assert {"steps", "work", "in pp", "in dp", "in dp (2)"} == {name for (rank, _), name in named.items() if rank == 0}
    assert [e["args"]["name"] for e in events(made, "M") if e["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_times_are_microseconds_since_the_first_moment(tapes):
    work = {(e["pid"], e["name"]): e for e in events(trace.to_chrome(tapes), "X")}
    assert (work[0, "F0"]["ts"], work[0, "F0"]["dur"]) == (0.5e6, 1e6) and work[0, "step 3"]["ts"] == 0
    assert (work[0, "F1.1"]["args"]["micro"], work[0, "F1.1"]["args"]["chunk"]) == (1, 1)
    absolute = {(e["pid"], e["name"]): e for e in events(trace.to_chrome(tapes, origin=0.0), "X")}
    assert absolute[1, "W0"]["ts"] == 12.1e6


def test_an_operation_tells_what_its_line_says_and_one_that_never_finished_says_so(tapes):
    made = events(trace.to_chrome(tapes), "X")
    (one,) = [e for e in made if e["cat"] == "operation" and e["args"]["sent"] == 4.5]
    expected = {"op": "all_reduce", "payload": 8, "tag": "grad", "shape": (2, 1), "dtype": "float32", "where": "a.py:3"}
    assert {key: one["args"][key] for key in expected} == expected and one["args"]["seq"] == 1
    (hanging,) = [e for e in made if "never finished" in e["name"]]
    assert hanging["args"]["finish"] is None and hanging["ts"] + hanging["dur"] == pytest.approx((13.5 - 9.5) * 1e6)


def test_arrows_join_each_send_with_its_recv(tapes):
    made = trace.to_chrome(tapes)
    starts, finishes = ({event["id"]: event for event in events(made, phase)} for phase in "sf")
    assert len(starts) == 2 and set(starts) == set(finishes)  # the recv without a send has none
    bars = {(e["pid"], e["tid"], e["args"]["seq"]): e for e in events(made, "X") if e["args"].get("peer") is not None}
    for number, seq in enumerate([1, 2], 1):
        sent, got = starts[number], finishes[number]
        assert (sent["pid"], got["pid"], got["bp"]) == (0, 1, "e")
        for end in (sent, got):
            bar = bars[end["pid"], end["tid"], seq]
            assert bar["ts"] <= end["ts"] <= bar["ts"] + bar["dur"] + 1e-6
        assert sent["ts"] <= got["ts"]


def test_messages_of_other_pairs_directions_and_groups_are_not_confused():
    one, two = Tape(0), Tape(1)
    one.lines = [line("send", 1, 2, 1, 1), line("recv", 1, 2, 1, 1), line("send", 1, 2, 1, 1, group="cp")]
    two.lines = [line("recv", 1, 2, 1, 0, group="cp"), line("recv", 1, 2, 1, 0), line("send", 1, 2, 1, 0)]
    made = trace.to_chrome([one, two])
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"].split()[1] for e in events(made, "M") if "in " in str(e["args"].get("name"))
    }
    ends = defaultdict(list)
    for event in [*events(made, "s"), *events(made, "f")]:
        ends[event["id"]].append((event["pid"], threads[event["pid"], event["tid"]]))
    assert sorted(ends.values()) == [[(0, "cp"), (1, "cp")], [(0, "pp"), (1, "pp")], [(1, "pp"), (0, "pp")]]


def test_tapes_come_back_as_they_were(tapes, tmp_path):
    trace.write(tmp_path / "deep" / "t.json", tapes)
    found = trace.load(tmp_path / "deep" / "t.json")
    assert not found.notes and [path.name for path in (tmp_path / "deep").iterdir()] == ["t.json"]
    for before, after in zip(tapes, found.tapes, strict=True):
        assert (after.rank, after.lines, after.spans) == (before.rank, before.lines, before.spans)
    (empty,) = trace.from_chrome(trace.to_chrome([Tape(5)]))
    assert empty.rank == 5 and not empty.lines


def test_ranks_write_apart_and_are_joined(tapes, tmp_path):
    for tape in tapes:
        trace.write_rank(tmp_path, tape, 2)
    found = trace.load(tmp_path)
    assert [tape.rank for tape in found.tapes] == [0, 1] and not found.notes
    assert [tape.lines for tape in trace.load(tmp_path / "trace").tapes] == [tape.lines for tape in tapes]
    trace.join(found, tmp_path / "all.json")
    made = json.loads((tmp_path / "all.json").read_text())
    assert min(event["ts"] for event in events(made, "X")) == 0 and len(events(made, "s")) == 2
    assert [tape.spans for tape in trace.load(tmp_path / "all.json").tapes] == [tape.spans for tape in tapes]


def test_missing_ranks_and_other_hosts_are_told(tapes, tmp_path):
    trace.write_rank(tmp_path, tapes[0], 4)
    trace.write(trace.rank_file(tmp_path, 1), tapes[1:], origin=0.0, host="elsewhere")
    missing, hosts = trace.load(tmp_path).notes
    assert "no trace of rank 2, 3" in missing and "2 hosts" in hosts
    trace.join(trace.load(tmp_path), tmp_path / "all.json")
    assert trace.load(tmp_path / "all.json").notes == [missing, hosts]


def test_the_summary_adds_up_by_hand(tapes):
    first, second = trace.summary(tapes)
    assert (first["rank"], first["steps"], first["seconds"], first["unfinished"]) == (0, [3], 3.5, 1)
    assert first["busy_s"] == 2.0 and first["communicating_s"] == pytest.approx(0.1 + 1.0)
    assert first["hidden_s"] == pytest.approx(0.1 + 0.5)  # what lies before 12.0
    reduced, sent = first["operations"]
    assert (reduced["op"], reduced["tag"], reduced["calls"], reduced["sent"]) == ("all_reduce", "grad", 3, 20.5)
    assert reduced["seconds"] == pytest.approx(1.8) and (sent["op"], sent["calls"]) == ("send", 2)
    assert [one["op"] for one in second["operations"]] == ["recv"]  # teaching checks are in no total
    plain = trace.summary([tape_without_work(tapes[0])])[0]
    assert plain["busy_s"] is plain["idle_s"] is plain["hidden_s"] is None
    assert "1 never finished" in trace.table([first], tapes[:1])


def tape_without_work(tape):
    made = Tape(tape.rank)
    made.lines = tape.lines
    return made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "no trace of minidist's"),
        ('{"traceEvents": []}', "no trace of minidist's"),
        ('{"otherData": {"format": "minidist trace 1"}}', "damaged"),
        ('{"otherData": {"format": "minidist trace 1"}, "traceEvents": [{"ph": "X"}]}', "damaged"),
        ('{"otherData": {"format": "minidist trace 1"}, "traceEvents": [3]}', "damaged"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "rank-0000.json").write_text(text)
    with pytest.raises(ValueError, match=rf"rank-0000\.json: .*{said}"):
        trace.load(tmp_path)


def test_folders_without_a_trace_and_ranks_found_twice_are_refused(tmp_path, tapes):
    with pytest.raises(ValueError, match="no such run folder"):
        trace.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="train with --trace"):
        trace.load(tmp_path)
    trace.write_rank(tmp_path, tapes[0], 2)
    trace.write(tmp_path / "trace" / "rank-0007.json", tapes[:1])
    with pytest.raises(ValueError, match="rank 0 is in another file"):
        trace.load(tmp_path)
