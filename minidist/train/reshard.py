"""A checkpoint written anew as another layout would have written it: nothing in it changes but which rank's file holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from minidist import checkpoint
from minidist.checkpoint.manifest import Manifest
from minidist.core.mesh import Mesh
from minidist.train import config as configs
from minidist.train import launch, state
from minidist.train.build import runtime
from minidist.train.config import Config
from minidist.train.step import Step


def reshard(path: Path, out: Path, overrides: Sequence[str] = (), ranks: int = 1) -> Path | None:
    """Write the checkpoint of a run into the folder `out`, at the layout that `overrides` state for `ranks` ranks.

    `out` becomes a run folder of its own: config.toml, and checkpoints/ with that one. Starts the ranks, each of which reads
    and writes its own part. ValueError before that for a layout that cannot be, or an `out` that has a checkpoint in it. None
    on a rank of torchrun's that has no say.
    """
    with checkpoint.Reader(checkpoint.resolve(path)) as reader:
        manifest = reader.manifest
    config = configs.laid_out(configs.from_dict(manifest.raw["config"]), list(overrides), ranks)
    config = configs.replaced(config, "train", accumulation=None)
    config = configs.replaced(config, "run", name=out.name, dir=str(out.parent))
    configs.check(config, ranks)
    state.expect_model(manifest, config)
    if (out / "checkpoints").exists():
        raise ValueError(f"--out {out}: there is a checkpoints folder in it, give another folder")
    return launch.run(rewrite, config, manifest.folder)


def rewrite(mesh: Mesh, config: Config, folder: Path) -> Path:
    """The program of a rank: read this rank's part of the state, and save it."""
    with checkpoint.Reader(folder) as reader:
        manifest: Manifest = reader.manifest
        step = Step(runtime(mesh, config), mesh, config)
        if "taken" in manifest.state:
            state.restore(step, reader)
        else:
            state.fill(step.zero, reader)
    raw = manifest.raw
    head = {"config": configs.to_dict(config), "data": raw["data"], "samples": raw["samples"], "state": manifest.state}
    final = checkpoint.save(config.run.folder / "checkpoints", manifest.step, state.pieces(step), mesh, **head)
    if mesh.rank == 0:
        (config.run.folder / "config.toml").write_text(configs.dumps(config), encoding="utf-8")
    assert asdict(mesh.layout) == checkpoint.read_manifest(final).raw["layout"]
    return final
