"""`train --trace` and `trace`: which steps are kept, what is written, and what is refused."""

import json

import pytest

from minidist import ranks
from minidist.core import spans, trace
from minidist.train import config as configs
from minidist.train import loop


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    yield
    ranks.stop()


def test_two_ranks_are_traced_joined_summed_up_and_drawn(minidist, recipe, tmp_path):
    said = minidist("train", recipe, "--ranks=2", "--trace")
    assert said.code == 0 and "steps 2-4 are traced: `minidist trace" in said.out
    folder = tmp_path / "runs/small"
    assert sorted(path.name for path in (folder / "trace").iterdir()) == ["rank-0000.json", "rank-0001.json"]
    assert configs.loads((folder / "config.toml").read_text()).metrics.trace == "2-4"
    found = json.loads(minidist("trace", "runs/small", "--json", "--plot=t.png").out)
    assert [(row["rank"], row["steps"], row["unfinished"]) for row in found["ranks"]] == [(0, [2, 3, 4], 0), (1, [2, 3, 4], 0)]
    for row in found["ranks"]:
        grads = [one for one in row["operations"] if one["tag"] == "grad"]
        assert grads and sum(one["sent"] for one in grads) > 0 and 0 < row["communicating_s"] < row["seconds"]
        assert 0 < row["busy_s"] < row["seconds"]
    assert json.loads((folder / "trace.json").read_text())["traceEvents"] and (tmp_path / "t.png").stat().st_size > 1000
    one = json.loads(minidist("trace", "runs/small", "--json", "--step=3", "--out=three.json").out)
    assert one["ranks"][0]["steps"] == [3] and (tmp_path / "three.json").exists()
    thirds = [sum(op["calls"] for op in part["ranks"][0]["operations"]) for part in (one, found)]
    assert thirds[0] * 3 == thirds[1]
    words = minidist("trace", "three.json").out
    assert "rank 1: steps 2, 3, 4" in words and "bytes sent" in words and "ui.perfetto.dev" not in words


def test_a_setting_names_the_steps_and_no_other_step_stays_on_the_tape(minidist, recipe, monkeypatch, tmp_path):
    lines, run = [], loop.Report.step

    def note(self, number, *rest):
        lines.append(len(self.job.mesh.tape))
        run(self, number, *rest)

    monkeypatch.setattr(loop.Report, "step", note)
    assert minidist("train", recipe, "--metrics.trace=3", "--trace", "--train.eval_every=0").code == 0
    (tape,) = trace.load(tmp_path / "runs/small").tapes
    assert list(spans.steps(tape)) == [3] and len(tape) == lines[0] > 0
    assert lines[0] == lines[1] == lines[2], "the tape grows from step to step"  # an evaluation follows the last one


def test_without_the_flag_nothing_is_written(minidist, recipe, tmp_path):
    minidist("train", recipe)
    assert not (tmp_path / "runs/small/trace").exists()
    said = minidist("trace", "runs/small")
    assert said.code == 2 and "no trace in it, train with --trace" in said.err


@pytest.mark.parametrize(("steps", "traced"), [(1, "1"), (2, "2"), (3, "2-3"), (9, "2-4")])
def test_a_short_run_is_traced_as_far_as_it_goes(steps, traced):
    config = configs.load("tiny", [f"--train.steps={steps}"], trace=True)
    configs.check(config)
    assert config.metrics.trace == traced


@pytest.mark.parametrize("wrong", ["0", "5", "3-5", "3-2", "a", "1-", "-1", "1,2"])
def test_steps_that_are_none_are_refused(minidist, recipe, wrong):
    said = minidist("train", recipe, f"--metrics.trace={wrong}")
    assert said.code == 2 and f'metrics.trace = "{wrong}": give a step from 1 to train.steps = 4' in said.err


def test_a_step_that_fails_leaves_its_trace(minidist, recipe, monkeypatch, tmp_path):
    from minidist.train.step import Step

    run = Step.run

    def fail(self, *args, **kwargs):
        if self.taken == 2:
            raise RuntimeError("broken")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Step, "run", fail)
    assert minidist("train", recipe, "--trace", "--train.eval_every=0").code == 1
    (tape,) = trace.load(tmp_path / "runs/small").tapes
    assert list(spans.steps(tape)) == [2, 3]


def test_bad_input_is_refused_in_one_line(minidist, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/rank-0000.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    trace.write_rank(tmp_path / "good", trace.Tape(0), 1)
    for words, part in [
        (("nowhere",), "nowhere: no such run folder"),
        (("bad",), "not valid JSON"),
        (("other.json",), "no trace of minidist's"),
        (("good", "--step=3"), "step 3 is not on the tape of rank 0"),
        (("good", "--plot=x.doc"), "--plot x.doc: give a name that ends in .png"),
        (("good", "--plot=x.png"), "the tapes are empty"),
        (("good", "--step=x"), "--step"),
        ((), "RUN"),
    ]:
        said = minidist("trace", *words)
        assert said.code == 2 and part in said.err and said.err.count("\n") == 1 and said.out == "", said
