"""From a configuration to everything a run needs: text, model, runtime. Used by training, evaluation and tests alike."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minidist.core.allocator import keep_freed
from minidist.core.mesh import Mesh
from minidist.data import corpus
from minidist.data.corpus import Corpus
from minidist.data.loader import Loader
from minidist.data.windows import Windows
from minidist.parallel.parallelize import parallelize
from minidist.parallel.zero import Zero
from minidist.train import precision
from minidist.train.config import Config
from minidist.train.step import Step

JOB = "job"  # the file in a run's folder that names the scheduler's job whose run it is


@dataclass
class Job:
    """One rank's part of a run."""

    config: Config
    mesh: Mesh
    corpus: Corpus
    zero: Zero
    step: Step

    def loader(self, position: int = 0) -> Loader:
        """This rank's micro-batches from sample `position` of the stream on."""
        train, data = self.config.train, self.config.data
        windows = Windows(self.corpus.train, train.seq_len, self.config.run.seed)
        group = self.mesh.group("dp")
        return Loader(windows, group.rank, group.size, train.global_batch, train.micro_batch, position, data.prefetch)


def open_text(config: Config) -> Corpus:
    """The corpus of a run, built on first use. ValueError, before any rank starts, where it cannot serve this run."""
    stated = config.data.tokenizer
    found = corpus.load(config.data.source, stated or "byte")
    if stated and found.tokenizer.name != stated:
        raise ValueError(
            f"data.tokenizer = {stated}: {found.path} was built with {found.tokenizer.name}; leave data.tokenizer out, or "
            f"build the text again with --tokenizer {stated}"
        )
    if found.tokenizer.vocab > config.model.vocab:
        raise ValueError(
            f"model.vocab = {config.model.vocab} is less than the {found.tokenizer.vocab} tokens of the text's tokenizer "
            f"{found.tokenizer.name}: use model.vocab = {found.tokenizer.vocab}"
        )
    Windows(found.train, config.train.seq_len, config.run.seed)  # refuses a text shorter than one sequence
    return found


def build(mesh: Mesh, config: Config) -> Job:
    """This rank's part of the run that `config` describes. Every rank of the mesh calls it."""
    text = open_text(config)
    zero = runtime(mesh, config)
    return Job(config, mesh, text, zero, Step(zero, mesh, config))


def runtime(mesh: Mesh, config: Config) -> Zero:
    """This rank's part of the model that `config` describes, ready to be trained by a `Step`.

    ValueError where the mesh was made for another layout: the run would silently be another one.
    """
    if mesh.layout != config.layout:
        raise ValueError(f"the mesh is of {mesh.layout}, the configuration says {config.layout}: pass layout=config.layout")
    if mesh.device.type == "cpu":
        keep_freed()
    formats = precision.formats(config.precision)
    return parallelize(
        config.model,
        mesh,
        seed=config.run.seed,
        formats=formats,
        offload=config.optim.offload,
        recompute=config.recompute,
        seq_len=config.train.seq_len,
    )


def claim_folder(mesh: Mesh, config: Config) -> Config:
    """Give the run a folder of its own: DIR/NAME, or NAME-2, NAME-3, ... where that exists, so that no run replaces another.

    A run that is resumed keeps its folder, and so does one that torchrun or Slurm have started again: it is then resumed too.
    Rank 0 finds or makes the folder and tells the others. Returns the configuration with the name that was found.
    """
    from minidist.core import comm

    found = torch.zeros(2, dtype=torch.int64, device=mesh.device)
    if mesh.rank == 0:
        found[0], found[1] = _claimed(config)
    number, again = map(int, comm.broadcast(found, mesh.world, src=0, tag="control"))
    config = _numbered(config, config.run.name, number)
    return replace(config, checkpoint=replace(config.checkpoint, resume=True)) if again else config


def _claimed(config: Config) -> tuple[int, bool]:
    """The number of the run's folder, which is there now, and whether a run is to be gone on with in it."""
    if config.checkpoint.resume:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        return 1, True
    for number in range(1, 10**6):
        folder = _numbered(config, config.run.name, number).run.folder
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if same_job(folder):
                return number, True
            continue
        if job := job_name():
            (folder / JOB).write_text(job, encoding="utf-8")
        return number, False
    raise ValueError(f"run.name = {config.run.name!r}: there are a million runs of this name in {config.run.dir}, use another")


def _numbered(config: Config, name: str, number: int) -> Config:
    return replace(config, run=replace(config.run, name=name if number == 1 else f"{name}-{number}"))


def same_job(folder: Path) -> bool:
    """Whether the run in `folder` is that of the scheduler's job which this process belongs to: it has been started again."""
    job, path = job_name(), folder / JOB
    return bool(job) and path.is_file() and path.read_text(encoding="utf-8") == job


def job_name() -> str | None:
    """What torchrun or Slurm call this job, the same after a restart or a requeue; None without such a name."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run and run != "none":
        return f"torchrun {run}"
    slurm = os.environ.get("SLURM_JOB_ID")
    return f"slurm {slurm}" if slurm else None
