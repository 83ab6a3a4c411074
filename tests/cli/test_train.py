"""The verbs on real runs: one rank, local ranks, torchrun; the same losses; Ctrl-C leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks.processes import hear_ctrl_c

from minidist import ranks
from minidist.train import config as configs

MARK = "MINIDIST_TEST_MARK"


def rows(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    yield
    ranks.stop()


def command(*words, mark="", cwd, **env):
    """`minidist ...` as a process of its own."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    env = {**clean, "OMP_NUM_THREADS": "1", "MINIDIST_RUNS": str(cwd / "runs"), MARK: mark, **env}
    line = [sys.executable, "-m", *map(str, words)]
    return subprocess.Popen(
        line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    )


def marked(mark):
    """Processes that carry the mark in their environment, zombies left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_one_rank_and_three_write_the_same_losses_and_weights(minidist, recipe, tmp_path):
    one = minidist("train", recipe, "--run.name=one")
    three = minidist("train", recipe, "--run.name=three", "--ranks=3", "--json")
    assert one.code == three.code == 0
    summary = json.loads(three.out.splitlines()[-1])
    assert summary["ranks"] == 3 and configs.loads((tmp_path / "runs/three/config.toml").read_text()).layout.dp == 3
    alone, together = rows("runs/one"), rows("runs/three")
    for key in ("step", "tokens", "lr"):  # C29: the rate of step k does not know how many ranks there are
        assert [row[key] for row in alone] == [row[key] for row in together]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in alone] == pytest.approx([row[key] for row in together], rel=1e-4)
    assert alone[-1]["val_loss"] == pytest.approx(together[-1]["val_loss"], rel=1e-4)
    assert alone[-1]["loss"] < alone[0]["loss"]


def test_neither_learning_rate_nor_held_out_loss_knows_accumulation(minidist, recipe):  # C29, C35
    minidist("train", recipe, "--run.name=once", "--train.micro_batch=5", "--train.accumulation=1")
    minidist("train", recipe, "--run.name=five", "--train.micro_batch=1", "--train.accumulation=5")
    once, five = rows("runs/once"), rows("runs/five")
    assert [row["lr"] for row in once] == [row["lr"] for row in five]
    assert once[-1]["val_loss"] == pytest.approx(five[-1]["val_loss"], rel=1e-5)


def test_what_was_trained_evaluates_and_speaks_the_same_from_its_files(minidist, recipe, tmp_path, built):
    minidist("train", recipe, "--json")
    last = rows("runs/small")[-1]
    said = json.loads(minidist("eval", "runs/small", "--json").out)
    assert said["loss"] == pytest.approx(last["val_loss"], rel=1e-6) and said["step"] == 4
    assert said["tokens"] == (built / "validation.bin").stat().st_size - 1  # a byte a token; all but the first are targets
    assert json.loads(minidist("eval", "runs/small", "--samples", "2", "--json").out)["tokens"] == 32
    assert "nats a token" in minidist("eval", "runs/small/checkpoints/step-000004", "--data", built).out

    def speak(*words):
        return json.loads(minidist("generate", "runs/small", "--tokens=20", "--json", *words).out)["text"]

    assert speak("--seed=1") == speak("--seed=1") != speak("--seed=2")
    assert speak("--temperature=0") == speak("--top-k=1", "--seed=7")
    assert minidist("generate", "runs/small", "--prompt", "zzz", "--tokens=3").out.startswith("zzz")
    said = minidist("plot", "runs/small", "again=runs/small", "--out", "p.png", "--json")
    assert "again: training loss" in json.loads(said.out)["text"] and (tmp_path / "p.png").stat().st_size > 1000


def test_what_was_trained_evaluates_and_speaks_the_same_on_many_ranks(minidist, recipe):
    minidist("train", recipe, "--ranks=2", "--layout.tp=2", "--layout.sp=true")
    alone = json.loads(minidist("eval", "runs/small", "--json").out)
    assert alone["ranks"] == 1 == alone["layout"]["tp"]  # not the layout that it was trained at
    assert alone["loss"] == pytest.approx(rows("runs/small")[-1]["val_loss"], rel=1e-6)
    layout = ("--ranks=4", "--layout.pp", "2", "--layout.tp=2")
    many = json.loads(minidist("eval", "runs/small", "--json", *layout).out)
    assert (many["ranks"], many["layout"]["pp"], many["layout"]["tp"], many["layout"]["dp"]) == (4, 2, 2, 1)
    assert many["loss"] == pytest.approx(alone["loss"], rel=1e-6) and many["tokens"] == alone["tokens"]
    assert json.loads(minidist("eval", "runs/small", "--json", "--ranks=3").out)["layout"]["dp"] == 3
    words = ("generate", "runs/small", "--tokens=12", "--temperature=0")
    spoken = minidist(*words, *layout)
    assert spoken.code == 0 and spoken.out == minidist(*words).out
    assert json.loads(minidist(*words, *layout, "--json").out)["ranks"] == 4


def test_a_text_that_changed_since_is_not_evaluated_silently(minidist, recipe, tmp_path, text):
    import shutil

    from minidist.data import corpus

    corpus.build(text, tmp_path / "mine")
    minidist("train", recipe, f"--data.source={tmp_path / 'mine'}")
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "new.txt").write_text("other words\n" * 50)
    corpus.build(tmp_path / "new.txt", tmp_path / "mine")
    said = minidist("eval", "runs/small")
    assert said.code == 2 and "not the text of the run any more" in said.err
    assert minidist("generate", "runs/small", "--tokens=3").code == 0  # bytes need no text
    assert minidist("eval", "runs/small", "--data", tmp_path / "mine").code == 0


def test_data_build_and_show(minidist, text):
    made = json.loads(minidist("data", "build", text, "--out", "c", "--json").out)
    assert made == json.loads(minidist("data", "show", "c", "--json").out)
    assert made["train_documents"] + made["validation_documents"] == 40 and made["vocab"] == 256
    assert "train tokens" in minidist("data", "show", "c").out
    with open("c/train.bin", "r+b") as file:
        file.write(b"?")
    said = minidist("data", "show", "c")
    assert said.code == 2 and "sha256" in said.err


def test_under_torchrun_it_finds_its_rank_itself(recipe, tmp_path):
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "minidist", "train", recipe, "--json")
    process = command(*words, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summaries = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [summary["ranks"] for summary in summaries] == [2]  # one of the two ranks speaks
    assert len(rows(tmp_path / "runs/small")) == 4


def test_ranks_beside_torchrun_must_agree(minidist, recipe, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    said = minidist("train", recipe, "--ranks", "3")
    assert said.code == 2 and "--ranks 3: torchrun has started 2 ranks" in said.err


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="counts processes through /proc")
@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_ends_with_one_line_and_no_process_left(recipe, tmp_path, count):
    mark = f"{os.getpid()}-{count}-{time.time_ns()}"
    words = ("minidist", "train", recipe, f"--ranks={count}", "--train.steps=1000000", "--train.eval_every=0")
    process = command(*words, mark=mark, cwd=tmp_path)
    for line in process.stdout:
        if "step " in line and "loss" in line:
            break
    assert len(marked(mark)) >= count
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "minidist: stopped"
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked(mark)


def test_help_is_quick_and_train_help_prints_the_documentation_of_every_field(minidist):
    program = (
        "import sys\nfrom minidist.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'jupyterlab'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for verb in ("lab", "doctor", "data", "train", "eval", "generate", "plot", "grade"):
        assert f"\n    {verb} " in done.stdout
    said = minidist("train", "--help")
    assert said.code == 0 and "--ranks" in said.out and configs.help_text() in said.out
    for verb in ("eval", "generate"):
        said = minidist(verb, "--help")
        assert said.code == 0 and "--ranks" in said.out and "--layout.pp" in said.out and "--optim.lr" not in said.out
    assert minidist().code == 2 and minidist("data").code == 2
