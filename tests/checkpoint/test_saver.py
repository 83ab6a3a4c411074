"""Saving in the background, what is kept, and what a rank that dies or cannot write leaves behind."""

import json
import os
import threading
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from minidist import checkpoint, ranks
from minidist.checkpoint import manifest, tensorfile, write
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice
from minidist.faults.inject import full_disk

HEAD = {"config": {}, "data": {}, "samples": 0}


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    yield
    ranks.stop()


def pieces(tensors):
    return [(Slice.whole(name, tensor.shape), tensor) for name, tensor in tensors.items()]


def values(folder):
    return {name: tensor.unique().tolist() for name, tensor in checkpoint.load(folder)[1].items()}


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def held_back(monkeypatch):
    """Writing waits until the event that this returns is set."""
    real, go = tensorfile.write, threading.Event()

    def late(*args):
        assert go.wait(20)
        return real(*args)

    monkeypatch.setattr(tensorfile, "write", late)
    return go


def test_what_is_written_in_the_background_is_what_there_was(tmp_path, monkeypatch):  # C26
    go, state = held_back(monkeypatch), {"taken": 1}
    live = {"w": torch.ones(1000), "moments/exp_avg/w": torch.ones(1000), "bias": torch.ones(3).long()}
    with checkpoint.Saver(tmp_path, Mesh(Layout()), background=True) as saver:
        for number in (1, 2):
            folder = saver.save(number, pieces(live), state=state, **HEAD)
            for tensor in live.values():
                tensor.fill_(number + 1)
            state["taken"] = number + 1
            if number == 1:
                assert not folder.exists()
                with pytest.raises(ValueError, match="not a finished checkpoint"):
                    checkpoint.load(folder)  # a load while it is pending is refused
            go.set()
    for number in (1, 2):
        with checkpoint.Reader(tmp_path / f"step-{number:06d}") as reader:
            for name, tensor in live.items():
                assert reader.read(Slice.whole(name, tensor.shape)).unique().tolist() == [number]
            assert reader.manifest.state == {"taken": number}


def test_a_step_waits_for_the_copy_alone(tmp_path, monkeypatch):
    go = held_back(monkeypatch)
    saver = checkpoint.Saver(tmp_path, Mesh(Layout()), background=True)
    saver.save(1, pieces({"w": torch.ones(10)}), **HEAD)  # returns although nothing can be written
    saver.poll()
    assert steps(tmp_path) == []
    go.set()
    saver.wait()
    assert steps(tmp_path) == [1]
    saver.close()


@pytest.mark.parametrize("asked", ["poll", "wait", "save", "close"])
def test_what_went_wrong_in_the_background_is_heard_at_the_next_occasion(tmp_path, monkeypatch, asked):  # C26
    def full(*args):
        raise OSError(28, "No space left on device")

    saver = checkpoint.Saver(tmp_path, Mesh(Layout()), background=True)
    with monkeypatch.context() as patch:
        patch.setattr(tensorfile, "write", full)
        saver.save(1, pieces({"w": torch.ones(10)}), **HEAD)
        while not saver._writing.done():
            time.sleep(0.001)
    again = {"save": lambda: saver.save(2, pieces({"w": torch.ones(10)}), **HEAD)}.get(asked, getattr(saver, asked))
    with pytest.raises(OSError, match=r"step-000001: .*not written, rank 0 failed: .*No space left"):
        again()
    if asked != "close":
        saver.save(3, pieces({"w": torch.ones(10)}), **HEAD)  # and the next one works
        saver.close()
        assert steps(tmp_path) == [3]
    assert not any(path.name.endswith(".safetensors") for path in tmp_path.glob(".*/*")), "debris is removed"


def test_what_is_kept(tmp_path):  # C27: the last saved ones, and never fewer than `keep` good ones
    def save(number, value):
        with checkpoint.Saver(tmp_path, Mesh(Layout()), keep=2) as saver:
            saver.save(number, pieces({"w": torch.full((3,), value)}), **HEAD)

    expected = {1: [1], 2: [1, 2], 3: [2, 3]}
    for number, kept in expected.items():
        save(number, 1.0)
        assert steps(tmp_path) == kept
    for number, kept in {4: [2, 3, 4], 5: [2, 3, 4, 5], 6: [2, 3, 5, 6]}.items():
        save(number, float("nan"))
        assert steps(tmp_path) == kept
    assert checkpoint.latest(tmp_path).name == "step-000006"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoint.latest(tmp_path, finite=True).name == "step-000003"
    passed = [str(warning.message).split(":")[1].split("/")[-1] for warning in caught]
    assert passed == ["step-000006", "step-000005"] and all(
        "not all of its numbers are finite" in str(w.message) for w in caught
    )
    save(4, 2.0)  # rolled back and trained again: an earlier step, saved later
    assert steps(tmp_path) == [3, 4, 6]
    assert checkpoint.latest(tmp_path).name == "step-000004"
    save(5, 2.0)
    assert steps(tmp_path) == [4, 5]


def test_the_last_good_one_stays_when_the_next_cannot_be_written(tmp_path, monkeypatch):  # C27
    """The disk is full part way through the file, on either of two ranks."""
    assert ranks.run(full_on, 2, tmp_path, 1, fresh=True) == ranks.run(full_on, 2, tmp_path, 0, fresh=True)
    assert steps(tmp_path) == [1] and values(tmp_path / "step-000001") == {"a": [1.0], "b": [1.0]}


def full_on(mesh, folder, rank):
    """Two saves, the second of which finds room for 300 more bytes on the disk of `rank`."""
    own = [(replace(Slice.whole(name, (1000,)), owner=owner), torch.ones(1000)) for owner, name in enumerate("ab")]
    with checkpoint.Saver(folder, mesh, keep=1) as saver, ExitStack() as faults:
        saver.save(1, own, **HEAD)
        if mesh.rank == rank:
            faults.enter_context(full_disk(300))
        try:
            saver.save(2, own, **HEAD)
        except OSError as error:
            assert f"rank {rank} failed" in str(error) and "No space left" in str(error)
            return True


def die_in_a_save(mesh, folder):
    if mesh.rank == 1:
        tensorfile.write = lambda *args: os._exit(9)
    checkpoint.save(folder, 2, [(replace(Slice.whole("w", (5,)), owner=1), torch.ones(5))], mesh, **HEAD)


def agree_on_the_latest(mesh, folder):
    return str(checkpoint.latest(folder))


@pytest.mark.filterwarnings("ignore:passed over")
def test_a_rank_that_dies_in_a_save_leaves_no_checkpoint(tmp_path):  # C25
    own = [(replace(Slice.whole("w", (5,)), owner=1), torch.ones(5))]
    ranks.run(lambda mesh: checkpoint.save(tmp_path, 1, own, mesh, **HEAD) and None, 2)
    with pytest.raises(ranks.RanksError, match=r"rank 1"):
        ranks.run(die_in_a_save, 2, tmp_path, timeout_s=20)
    assert set(ranks.run(agree_on_the_latest, 2, tmp_path)) == {str(tmp_path / "step-000001")}
    ranks.run(lambda mesh: checkpoint.save(tmp_path, 2, own, mesh, **HEAD) and None, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"], "the repeated save cleans up"


def test_a_rank_that_never_writes_is_named(tmp_path):
    attempt = write.Attempt(tmp_path / "step-000001", tmp_path / ".p", 0, 2, {}, 0, 0.2, threading.Event())
    with pytest.raises(OSError, match=r"rank 1 failed: no note of it in 0.2 s"):
        attempt.run(pieces({"w": torch.ones(1)}))


def test_only_the_blocks_that_are_asked_for_are_read_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "BLOCK", 64)
    whole = torch.arange(100.0)
    folder = checkpoint.save(tmp_path, 1, pieces({"w": whole}), Mesh(Layout()), **HEAD)
    (piece,) = manifest.read_manifest(folder).tensors["w"].pieces
    assert len(piece.sha256) == 7
    path = folder / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-400 + 4 * 40] ^= 1  # element 40, in block 2
    path.write_bytes(raw)
    record = Slice.whole("w", (100,))
    with checkpoint.Reader(folder) as reader:
        for a, b in ((0, 32), (48, 100), (32, 32)):
            assert torch.equal(reader.read(record.cut(a, b)), whole[a:b])
        for a, b in ((0, 33), (40, 41), (47, 48), (0, 100)):
            with pytest.raises(ValueError, match="w is not what was written"):
                reader.read(record.cut(a, b))
        assert [words is None for _, words in reader.verify()] == [False]


def test_a_shard_of_another_step_is_refused_and_an_older_good_one_offered(tmp_path):
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, number, pieces({"w": torch.full((50,), float(number))}), Mesh(Layout()), **HEAD)
    os.replace(tmp_path / "step-000002/rank-00000.safetensors", tmp_path / "step-000003/rank-00000.safetensors")
    with pytest.raises(ValueError, match=r"step-000003/rank-00000.safetensors: damaged, w .*step-000001 is whole"):
        checkpoint.load(tmp_path / "step-000003")


def test_files_are_what_the_library_reads(tmp_path):
    from safetensors.torch import load_file

    kinds = (torch.float64, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8, torch.float16)
    tensors = {str(kind): torch.arange(7).to(kind) for kind in kinds} | {"": torch.zeros(0), "é": torch.ones(2, 3)}
    hashes = tensorfile.write(tmp_path / "x.safetensors", tensors, 16)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys() == hashes.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        assert len(hashes[name]) == max(1, -(-tensor.numel() * tensor.element_size() // 16))
    assert json.loads((tmp_path / "x.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
