"""Guesses never raise, claims do (in tests), the first guess counts, and the journal survives damage."""

import json
import multiprocessing

import pytest

from minidist.course import claims, progress, session
from minidist.course.claims import ClaimError, agrees, claim, predict


@pytest.fixture(autouse=True)
def learner(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_COURSE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_STRICT", raising=False)
    monkeypatch.delenv("MINIDIST_GRADING", raising=False)
    monkeypatch.setattr(session, "current", session.Session())
    return tmp_path


def journal(folder):
    return [json.loads(line) for line in (folder / progress.NAME).read_text().splitlines()]


@pytest.mark.parametrize(
    ("guess", "options", "said"),
    [
        (..., {"unit": "MB"}, "Replace the ... by a number of MB."),
        (..., {"choices": [1, 4]}, "by one of [1, 4]."),
        (..., {"choices": ["a choice of many words", "another such choice"]}, "by one of the things listed in the cell."),
        ("four", {}, "'four' is not a number"),
        (float("nan"), {}, "nan is not a number"),
        (True, {}, "True is not a number"),
        (2, {"choices": [1, 4]}, "2 is not among the choices: use one of [1, 4]"),
        ([0, 0], {"order": [0, 1]}, "[0, 0] is not an order of [0, 1]"),
        (3, {"order": [0, 1]}, "3 is not an order"),
    ],
)
def test_an_open_or_odd_guess_says_what_to_write_and_is_not_kept(capsys, learner, guess, options, said):
    predict("00.x", guess, **options)
    assert said in capsys.readouterr().out
    assert session.current.guesses == {} and not (learner / progress.NAME).exists()


def test_the_first_guess_before_the_claim_counts_and_later_ones_are_marked(capsys, learner):
    predict("00.x", 3, unit="B")
    predict("00.x", 4, unit="B")
    claim("00.x", 4, 4, unit="B")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "00.x: Noted: 3 B." and "later guess" in out[1]
    assert out[2] == "✓ 00.x: measured 4 B, as the text says. Your guess was 3 B: not this time."
    assert [(e["event"], e.get("counts"), e.get("holds")) for e in journal(learner)] == [
        ("predict", True, None),
        ("predict", False, None),
        ("claim", None, True),
    ]


def test_a_guess_after_the_reveal_is_told_so(capsys):
    predict("00.x")
    claim("00.x", 4, 4)
    assert "No guess yet." in capsys.readouterr().out
    predict("00.x", 4)
    assert "you have seen the answer" in capsys.readouterr().out
    assert "00.x" not in session.current.guesses


def test_a_claim_that_fails_is_told_to_a_learner_recorded_and_raised_in_tests(capsys, monkeypatch):
    claim("00.x", 5, 4)
    assert "✗ 00.x: measured 5, the text says 4" in capsys.readouterr().out
    assert session.current.errors == ["claim 00.x does not hold: measured 5, the text says 4"]
    monkeypatch.setenv("MINIDIST_STRICT", "1")
    with pytest.raises(ClaimError, match="measured 5, the text says 4"):
        claim("00.x", 5, 4)


@pytest.mark.parametrize(
    ("measured", "expected", "options", "same"),
    [
        (1, 1.0, {}, True),
        (1.05, 1.0, {"rel": 0.1}, True),
        (1.2, 1.0, {"rel": 0.1}, False),
        (0.001, 0, {"abs": 0.01}, True),
        (True, 1, {}, False),
        (float("nan"), float("nan"), {}, False),
        ([1, 2], (1, 2.0), {}, True),
        ([1, 2], [1, 2, 3], {}, False),
        ("4", 4, {}, False),
    ],
)
def test_what_agrees(measured, expected, options, same):
    assert agrees(measured, expected, **options) is same


def test_a_number_is_said_once_where_run_and_text_agree_and_reads_alike_as_int_and_float(capsys):
    claim("00.x", 225504, 225504.0, unit="bytes")
    claim("00.y", [1.5, 42.667], [1.5, 42.67], rel=0.01)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "✓ 00.x: measured 225,504 bytes, as the text says."
    assert said[1] == "✓ 00.y: measured [1.5, 42.667], the text says [1.5, 42.67]."


def test_a_malformed_key_is_refused_with_the_form():
    with pytest.raises(ValueError, match=r"'7\.bytes' is not a key: .*'07\.bytes'"):
        claim("7.bytes", 1, 1)
    assert claims.KEY.fullmatch("16a.x")


def test_damaged_journal_lines_are_skipped_counted_and_do_not_swallow_the_next(learner):
    progress.record("check", "00.1", points=10, max=10)
    with (learner / progress.NAME).open("a") as file:
        file.write('{"torn": \n[1]\n{"time": 1, "event": "check"')  # three damaged lines, the last without its end
    progress.record("check", "01.1", points=0, max=10)
    events, damaged = progress.history()
    assert [e["key"] for e in events] == ["00.1", "01.1"] and damaged == 3


def test_progress_folds_into_open_started_done_and_zero_of_zero_is_not_done(learner):
    progress.record("check", "00.1", points=10, max=10)
    progress.record("check", "01.1", points=0, max=0)
    progress.record("check", "02.1", points=9, max=10)
    tasks = {"00": ["00.1"], "01": ["01.1"], "02": ["02.1"], "03": [], "04": ["04.1"]}
    states = progress.fold(progress.history()[0], tasks)
    assert states == {"00": "done", "01": "started", "02": "started", "03": "open", "04": "open"}


def _write_many(folder):
    import os

    os.environ["MINIDIST_COURSE"] = folder
    for i in range(200):
        progress.record("check", "00.1", padding="x" * 500, i=i)


def test_two_notebooks_writing_at_once_lose_nothing(learner):
    pool = [multiprocessing.get_context("spawn").Process(target=_write_many, args=(str(learner),)) for _ in range(2)]
    for process in pool:
        process.start()
    for process in pool:
        process.join()
    events, damaged = progress.history()
    assert (len(events), damaged) == (400, 0)


def test_a_folder_that_cannot_be_written_is_said_and_not_raised(learner, monkeypatch, capsys):
    monkeypatch.setenv("MINIDIST_COURSE", str(learner / "file" / "below"))
    (learner / "file").write_text("")
    predict("00.x", 3)
    assert "progress is not being kept" in capsys.readouterr().out


def clock(*seconds):
    """A callable that has held the stopwatch itself, and reports one after another of these; the last for ever."""
    rest = list(seconds)
    return lambda *_: rest.pop(0) if len(rest) > 1 else rest[0]


def test_a_claim_about_time_compares_medians_after_measuring_the_noise(capsys, learner):
    fast = clock(9.0, 1.0, 1.1, 1.0, 1.1, 1.0, 1.0, 50.0)  # one to warm up, four for the noise; one outlier among the pairs
    ratio = claim.timed("00.x", clock(3.0, 3.0, 90.0), fast, at_least=2)
    out = capsys.readouterr().out
    assert ratio == 3.0 and "✓ 00.x: measured 3 times as long, the text says at least 2 times" in out
    assert "attempt 1: 3e+03 ms against 1e+03 ms, 3 times as long (noise 1e+02 ms)" in out and "attempt 2" not in out
    assert [(event["holds"], event["amber"]) for event in journal(learner)] == [(True, False)]


def test_a_miss_is_tried_three_times_then_amber_for_a_learner_and_raised_in_tests(capsys, learner, monkeypatch):
    predict("00.x", 4, unit="times")
    claim.timed("00.x", clock(1.5), clock(1.0), at_least=2)
    out = capsys.readouterr().out
    assert out.count("attempt") == 3 and "~ 00.x: measured 1.5 times as long" in out and "Your machine was busy" in out
    assert "Your guess was 4 times: not this time." in out
    assert session.current.errors == [] and journal(learner)[-1]["amber"]
    monkeypatch.setenv("MINIDIST_STRICT", "1")
    with pytest.raises(ClaimError, match="at least 2 times, in 3 attempts"):
        claim.timed("00.x", clock(1.5), clock(1.0), at_least=2)
    assert claim.timed("00.x", clock(*[1.5] * 4, 2.5), clock(1.0), at_least=2) == 2.5  # the second attempt holds


def test_an_injected_delay_is_at_least_ten_times_the_noise(capsys):
    seen = []

    def fast(delay_s):
        seen.append(delay_s)
        return 0.1 + 0.01 * (len(seen) % 2)

    assert claim.timed("00.x", lambda delay_s: 1.0, fast, at_least=2, delay_s=0.02) > 2
    assert seen[:5] == [0.02] * 5 and seen[5] == pytest.approx(0.1)  # noise 10 ms
    assert "delay 100 ms" in capsys.readouterr().out


def test_a_machine_too_noisy_for_any_delay_is_amber_and_nothing_is_timed(capsys):
    noisy = iter(range(10**6))
    claim.timed("00.x", None, lambda delay_s: float(next(noisy)), at_least=2, delay_s=0.02)
    out = capsys.readouterr().out
    assert "ten times that would take all day" in out and "~ 00.x" in out


def test_a_callable_without_a_stopwatch_is_timed_by_the_wall_clock():
    import time

    assert claim.timed("00.x", lambda: time.sleep(0.05), lambda: None, at_least=2) > 2
