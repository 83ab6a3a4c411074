"""Checkpoints: whole tensors come back from pieces cut in odd ways, a torn write is never read, nothing runs code."""

import itertools
import json
import os
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from minidist import checkpoint, ranks
from minidist.checkpoint import tensorfile, write
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.slices import Box, Slice, extract

WHOLE = {  # every element differs from every other
    "embedding.weight": torch.arange(35.0).reshape(7, 5) / 3,
    "blocks.0.q.weight": torch.arange(100, 124, dtype=torch.float64).reshape(6, 4) / 7,
    "norm.weight": torch.arange(5).bfloat16() + 0.5,
    "scalar": torch.tensor(3.5),
}


def rows(name, whole, a, b, owner):
    tail = tuple(whole.shape[1:])
    return Slice(name, tuple(whole.shape), (Box((a,) + (0,) * len(tail), (b, *tail)),), owner=owner)


def odd_cuts():
    """(rank, slice) of three ranks: a row cut with padding, a fused pair of boxes under two flat ranges, copies, a scalar."""
    e, q = WHOLE["embedding.weight"], WHOLE["blocks.0.q.weight"]
    fused = Slice("blocks.0.q.weight", tuple(q.shape), (Box((4, 0), (6, 4)), Box((0, 0), (3, 2))))
    rest = Slice(
        "blocks.0.q.weight",
        tuple(q.shape),
        (Box((0, 2), (3, 4)), Box((3, 0), (4, 4)), Box((0, 0), (1, 2), "copy")),
        owner=2,
    )
    padded = rows("embedding.weight", e, 4, 7, 1)
    padded = replace(padded, boxes=(*padded.boxes, Box((7, 0), (8, 5), "pad")))
    yield 0, rows("embedding.weight", e, 0, 4, 0)
    yield 1, padded
    yield 0, replace(fused, flat=(0, 5), owner=0)
    yield 1, replace(fused, flat=(5, 14), owner=1)
    yield 2, rest
    yield 1, Slice.whole("norm.weight", (5,), ("dp",), owner=1)
    yield 2, Slice.whole("norm.weight", (5,), ("dp",), owner=1)  # a replica: held, not stored
    yield 2, Slice.whole("scalar", (), owner=2)


def save(folder, step=500, cuts=None, mesh=None, whole=WHOLE):
    cuts = [Slice.whole(name, tensor.shape) for name, tensor in whole.items()] if cuts is None else cuts
    tensors = [(cut, extract(cut, whole[cut.name])) for cut in cuts]
    kwargs = {"config": {"run": {"seed": 1}}, "data": {"hash": "abc", "tokenizer": "bytes"}, "samples": 12000}
    return checkpoint.save(folder, step, tensors, mesh or Mesh(Layout()), **kwargs)


def same(loaded, whole=WHOLE):
    assert loaded.keys() == whole.keys()
    for name, tensor in whole.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor), name


def edit(folder, change):
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_one_process_round_trip_and_what_a_person_reads(tmp_path):
    folder = save(tmp_path)
    assert folder == tmp_path / "step-000500"
    manifest, loaded = checkpoint.load(folder)
    same(loaded)
    assert manifest.step == 500 and manifest.raw["samples"] == 12000 and manifest.raw["data"]["hash"] == "abc"
    assert manifest.raw["layout"]["dp"] == 1 and manifest.raw["torch"] == torch.__version__
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["manifest.json", "rank-00000.safetensors", "step-000500"]
    line = next(line for line in (folder / "manifest.json").read_text().splitlines() if '"norm.weight"' in line)
    assert '"shape": [5]' in line and '"dtype": "bfloat16"' in line and '"sha256"' in line


def save_as_rank(mesh, folder):
    save(folder, cuts=[cut for rank, cut in odd_cuts() if rank == mesh.rank], mesh=mesh)


def test_three_ranks_with_odd_cuts_store_each_element_once(tmp_path):
    ranks.run(save_as_rank, 3, tmp_path)
    folder = tmp_path / "step-000500"
    manifest, loaded = checkpoint.load(folder)
    same(loaded)
    assert sorted(manifest.files) == [f"rank-0000{rank}.safetensors" for rank in range(3)]
    assert [piece.file for piece in manifest.tensors["norm.weight"].pieces] == ["rank-00001.safetensors"]
    stored = sum(p.slice.counted() for entry in manifest.tensors.values() for p in entry.pieces)
    assert stored == sum(tensor.numel() for tensor in WHOLE.values())


@pytest.mark.parametrize("seed", range(5))
def test_random_flat_cuts_come_back_bit_for_bit(tmp_path, seed):
    draw = torch.Generator().manual_seed(seed)
    cuts = []
    for name, tensor in WHOLE.items():
        whole = Slice.whole(name, tensor.shape)
        ends = sorted({0, tensor.numel(), *torch.randint(tensor.numel() + 1, (4,), generator=draw).tolist()})
        cuts += [whole.cut(a, b) for a, b in itertools.pairwise(ends)] or [whole]
    order = torch.randperm(len(cuts), generator=draw).tolist()
    folder = save(tmp_path, cuts=[cuts[i] for i in order])
    same(checkpoint.load(folder)[1])


@pytest.mark.parametrize("seed", range(5))
def test_any_slice_is_read_from_any_pieces(tmp_path, seed):
    ranks.run(save_as_rank, 3, tmp_path)
    draw = torch.Generator().manual_seed(seed)
    with checkpoint.Reader(tmp_path / "step-000500") as reader:
        for name, tensor in WHOLE.items():
            starts = [int(torch.randint(n + 1, (), generator=draw)) for n in tensor.shape]
            boxes = [Box(tuple(starts), tuple(tensor.shape)), Box((0,) * tensor.dim(), tuple(starts), "copy")]
            boxes.insert(seed % 3, Box((0,) * tensor.dim(), (2,) * tensor.dim(), "pad"))
            record = Slice(name, tuple(tensor.shape), tuple(boxes))
            a, b = sorted(torch.randint(record.numel + 1, (2,), generator=draw).tolist())
            for wanted in (record, record.cut(a, b)):
                found = reader.read(wanted)
                assert found.dtype == tensor.dtype and torch.equal(found, extract(wanted, tensor))


def test_a_slice_is_read_from_the_pieces_it_overlaps_alone(tmp_path):
    ranks.run(save_as_rank, 3, tmp_path)
    folder, e = tmp_path / "step-000500", WHOLE["embedding.weight"]
    harmed = folder / "rank-00000.safetensors"
    harmed.write_bytes(bytes(harmed.stat().st_size))
    with checkpoint.Reader(folder) as reader:  # rows 0 to 3 lie there, 4 to 6 do not
        assert torch.equal(reader.read(rows("embedding.weight", e, 4, 7, 0)), e[4:].flatten())
        with pytest.raises(ValueError, match=r"rank-00000.safetensors: damaged"):
            reader.read(rows("embedding.weight", e, 3, 5, 0))
        with pytest.raises(ValueError, match=r"embedding.weight is \[7, 5\], not \[5, 7\]"):
            reader.read(Slice.whole("embedding.weight", (5, 7)))
        with pytest.raises(ValueError, match=r"head\.weight is missing"):
            reader.read(Slice.whole("head.weight", (5, 7)))


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0, 20, "14 elements are missing and 0"), (0, 33, "1 elements are missing and 0")]
)
def test_a_slice_with_a_hole_is_refused(tmp_path, low, high, words):
    folder = save(tmp_path, cuts=[Slice.whole("embedding.weight", (7, 5)).cut(a, b) for a, b in ((0, high), (high, 35))])
    edit(folder, lambda raw: raw["tensors"]["embedding.weight"]["pieces"].pop(1))
    with checkpoint.Reader(folder) as reader, pytest.raises(ValueError, match=words):
        reader.read(Slice.whole("embedding.weight", (7, 5)).cut(low, 34))


@pytest.mark.parametrize("fault", ["an element left out", "an element stored twice"])
def test_pieces_that_do_not_make_the_whole_are_never_published(tmp_path, fault):
    whole = Slice.whole("embedding.weight", (7, 5))
    ends = {
        "an element left out": (whole.cut(0, 20), whole.cut(21, 35)),
        "an element stored twice": (whole, whole.cut(3, 4)),
    }
    with pytest.raises(OSError, match="elements were stored"):
        save(tmp_path, cuts=ends[fault])
    assert checkpoint.latest(tmp_path) is None


def die_at(monkeypatch, where):
    """End the save inside the write as a kill would: what is on the disk by then stays."""

    module, name = {"tensors": (tensorfile, "write"), "manifest": (write, "readable"), "rename": (os, "rename")}[where]
    real = getattr(module, name)

    def stop(*args, **kwargs):
        if where == "rename" and args[1].name != "step-000500":
            return real(*args)
        raise KeyboardInterrupt  # passes through the handling of ordinary errors, as a kill does

    monkeypatch.setattr(module, name, stop)


@pytest.mark.parametrize("where", ["tensors", "manifest", "rename"])
def test_a_save_that_died_is_never_read_and_the_next_one_works(tmp_path, monkeypatch, where):
    older = save(tmp_path, step=400)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(patch, where)
        save(tmp_path, step=500)
    assert not (tmp_path / "step-000500").exists()
    assert checkpoint.latest(tmp_path) == older
    folder = save(tmp_path, step=500)
    assert checkpoint.latest(tmp_path) == folder
    same(checkpoint.load(folder)[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000400", "step-000500"]


def test_the_same_step_again_replaces_it_whole(tmp_path):
    save(tmp_path)
    other = {name: tensor + 1 for name, tensor in WHOLE.items()}
    same(checkpoint.load(save(tmp_path, whole=other))[1], other)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000500"]


def test_latest_goes_by_number_and_names_what_it_passes_over(tmp_path):
    good = save(tmp_path, step=999_999)
    torn = save(tmp_path, step=1_000_000)
    path = torn / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "step-1000001").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoint.latest(tmp_path) == good
    assert "step-1000001" in str(caught[0].message) and "no manifest.json" in str(caught[0].message)
    assert "step-1000000" in str(caught[1].message) and "rank-00000.safetensors" in str(caught[1].message)


def flip_a_byte(folder):
    path = folder / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
    "manifest cut short": (
        lambda f: (f / "manifest.json").write_text('{"format_version": 1,'),
        "manifest.json: damaged",
    ),
    "manifest of another kind": (lambda f: (f / "manifest.json").write_text("[1]"), "manifest.json: damaged"),
    "a missing key": (lambda f: edit(f, lambda raw: raw.pop("step")), "manifest.json: damaged.*step"),
    "file missing": (lambda f: (f / "rank-00000.safetensors").unlink(), "rank-00000.safetensors missing"),
    "file cut short": (
        lambda f: os.truncate(f / "rank-00000.safetensors", 100),
        "rank-00000.safetensors missing or cut",
    ),
    "one bit flipped": (flip_a_byte, "rank-00000.safetensors: damaged"),
    "file outside": (
        lambda f: edit(f, lambda raw: raw["files"].update({"../x.safetensors": {"bytes": 1}})),
        "damaged.*file name",
    ),
    "a piece left out": (
        lambda f: edit(f, lambda raw: raw["tensors"]["norm.weight"]["pieces"].clear()),
        "norm.weight has no stored piece",
    ),
    "a newer format": (lambda f: edit(f, lambda raw: raw.update(format_version=3)), "format version 3.*reads up to 2"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_name(tmp_path, kind):
    harm, words = DAMAGE[kind]
    folder = save(tmp_path)
    harm(folder)
    with pytest.raises(ValueError, match=words) as caught:
        checkpoint.load(folder)
    assert "step-000500" in str(caught.value) and "\n" not in str(caught.value)


def test_keys_of_a_later_version_are_ignored_and_a_newer_format_is_not_passed_over(tmp_path):
    save(tmp_path, step=400)
    folder = save(tmp_path)
    edit(folder, lambda raw: (raw.update(optimizer={}), raw["tensors"]["scalar"].update(note="x")))
    same(checkpoint.load(folder)[1])
    edit(folder, lambda raw: raw.update(format_version=3))
    with pytest.raises(ValueError, match="install a newer minidist"):
        checkpoint.latest(tmp_path)  # going on from step 400 would silently lose work


def test_a_run_folder_a_checkpoints_folder_and_a_step_folder_all_name_the_checkpoint(tmp_path):
    folder = save(tmp_path / "run" / "checkpoints")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", folder):
        assert checkpoint.resolve(path) == folder
    for path, words in ((tmp_path / "nothing", "no such"), (tmp_path, "no finished checkpoint")):
        with pytest.raises(ValueError, match=words):
            checkpoint.resolve(path)


class Marker:
    """Unpickling it would create the file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("writer", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_no_file_of_a_checkpoint_can_run_code(tmp_path, writer, name):  # C53
    folder = save(tmp_path)
    marker = tmp_path / "marker"
    with open(folder / name, "wb") as file:
        writer(Marker(marker), file)
    if name != "manifest.json":  # as a careful attacker would
        edit(folder, lambda raw: raw["files"].update({name: {"bytes": (folder / name).stat().st_size}}))
    with pytest.raises(ValueError, match=rf"{name}: damaged"):
        checkpoint.load(folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))  # the trap itself works
    assert marker.exists()


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2, bias=False)
        self.norm = nn.Linear(3, 1)


def test_misfits_are_listed_together_and_change_nothing():  # C24
    model, tensors = Tiny(), {name: p.detach() + 1 for name, p in Tiny().named_parameters()}
    tensors["prefix.head.weight"] = tensors.pop("head.weight")
    tensors["norm.bias"] = torch.zeros(4)
    del tensors["norm.weight"]
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError) as caught:
        checkpoint.fill(model, tensors)
    text = str(caught.value)
    assert "2 missing: head.weight, norm.weight" in text and "1 unexpected: prefix.head.weight" in text
    assert "1 of another shape: norm.bias is [4], not [1]" in text
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_partial_loading_only_when_asked_and_counted(capsys):  # C24
    model, tensors = Tiny(), {"head.weight": torch.ones(2, 3), "other": torch.ones(1)}
    with pytest.raises(ValueError):
        checkpoint.fill(model, tensors)
    assert checkpoint.fill(model, tensors, partial=True) == 1
    assert torch.equal(model.head.weight, torch.ones(2, 3))
    assert "1 tensors loaded, 2 of the model left as they were, 1 of the checkpoint unused" in capsys.readouterr().out
    with pytest.raises(ValueError, match="of another shape"):
        checkpoint.fill(model, {"head.weight": torch.ones(2, 2)}, partial=True)
    assert checkpoint.fill(model, {name: torch.full_like(p, 2) for name, p in model.named_parameters()}) == 3
    assert all((p == 2).all() for p in model.parameters())


def save_with_a_full_disk_on_rank_1(mesh, folder):
    def full(*args):
        raise OSError(28, "No space left on device")

    if mesh.rank == 1:
        tensorfile.write = full
    try:
        save_as_rank(mesh, folder)
    except OSError as error:
        return str(error)


def test_one_rank_that_cannot_write_fails_the_save_on_every_rank(tmp_path):
    said = ranks.run(save_with_a_full_disk_on_rank_1, 3, tmp_path, fresh=True)
    assert len(set(said)) == 1
    assert "rank 1 failed" in said[0] and "No space left" in said[0] and "step-000500" in said[0]
    assert checkpoint.latest(tmp_path) is None
