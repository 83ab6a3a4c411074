"""What a person sees of a run: the progress on a terminal and in a log, and the picture with its words."""

import io
import json

import pytest

from minidist.train.plot import plot_losses
from minidist.train.progress import Progress

ROW = {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 12345.6, "mfu": None}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, **options):
    progress = Progress(25, every=10, stream=stream, **options)
    for step in range(1, 26):
        progress.step({"step": step, **ROW})
        if step == 12:
            progress.note("held out: better")
    progress.close()
    return stream.getvalue()


def test_a_log_gets_plain_lines_the_first_every_tenth_and_the_last():
    lines = run(io.StringIO()).splitlines()
    assert [line.split("  loss")[0] for line in lines] == [
        *("step  1/25", "step 10/25"),
        "held out: better",
        *("step 20/25", "step 25/25"),
    ]
    assert lines[0] == "step  1/25  loss 1.2500  grad norm 0.500  lr 1.00e-03  12,346 tokens/s"


def test_a_terminal_gets_one_moving_line_and_notes_that_stay():
    text = run(Terminal())
    assert "\r" in text and "25/25" in text and "loss 1.2500" in text
    assert "held out: better\n" in text


def test_other_ranks_say_nothing():
    assert run(io.StringIO(), on=False) == "" == run(Terminal(), on=False)


def test_mfu_stands_there_when_it_is_known():
    stream = io.StringIO()
    Progress(1, stream=stream).step({"step": 1, **ROW, "mfu": 0.375})
    assert "MFU 37.5%" in stream.getvalue()


def metrics_file(path, losses, held_out=()):
    rows = [{"step": k, "loss": loss} for k, loss in enumerate(losses, 1)]
    for step, loss in held_out:
        rows[step - 1]["val_loss"] = loss
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_picture_and_its_words(tmp_path):
    one = metrics_file(tmp_path / "one.jsonl", [3.0, 2.0, 1.5], [(3, 1.6)])
    four = metrics_file(tmp_path / "four.jsonl", [3.0, 2.25, 1.5])
    words = plot_losses({"1 rank": one, "4 ranks": four}, tmp_path / "new" / "loss.png")
    png = (tmp_path / "new" / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG") and words.encode() in png  # the words travel inside the file too
    assert words == (
        "1 rank: training loss from 3.000 at step 1 to 1.500 at step 3, held-out loss 1.600 at step 3; "
        "4 ranks: training loss from 3.000 at step 1 to 1.500 at step 3; the training curves lie at most 0.25 nats apart"
    )


def test_curves_differ_by_more_than_colour():
    from minidist.train.plot import STYLES

    for key in ("linestyle", "color"):
        assert len({style[key] for style in STYLES}) == len(STYLES)


def test_a_run_without_a_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_losses({"a": metrics_file(tmp_path / "a.jsonl", [])}, tmp_path / "a.png")
