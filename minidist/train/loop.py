"""The training loop: steps, evaluations, figures, and the final weights. The same function on one rank and on many."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minidist.core import device as devices
from minidist.core import hardware
from minidist.core.mesh import Mesh
from minidist.data.loader import validation_batches
from minidist.model import flops
from minidist.parallel.pipeline.setting import schedule_of
from minidist.parallel.pipeline.simulate import simulate
from minidist.parallel.pipeline.stages import cut_of
from minidist.train import config as configs
from minidist.train import metrics
from minidist.train.build import Job, build, claim_folder
from minidist.train.config import Config
from minidist.train.evaluate import Evaluation, evaluate
from minidist.train.generate import generate, last_logits
from minidist.train.plot import plot_losses
from minidist.train.progress import Progress
from minidist.train.resume import Start, begin
from minidist.train.saves import Saves
from minidist.train.step import StepResult
from minidist.train.tracing import Tracing


def train(mesh: Mesh, config: Config) -> dict[str, Any]:
    """Train as `config` says and return the summary of the run, the same on every rank.

    Writes the run's folder: config.toml, metrics.jsonl, loss.png, checkpoints/, trace/. Every rank of the mesh calls it.
    """
    job = build(mesh, claim_folder(mesh, config))
    config = job.config
    start = begin(mesh, job.step)
    report, tracing = Report(job, start), Tracing(mesh, config)
    began, held_out = time.perf_counter(), None
    with job.loader(start.samples) as loader, Saves(job, report.totals, report.progress.note) as saves:
        for number in range(start.step + 1, config.train.steps + 1):
            stepped = time.perf_counter()
            with tracing.step(number):
                result = job.step.run(next(loader))
            seconds = time.perf_counter() - stepped
            held_out = _evaluate_if_due(job, number)
            report.step(number, result, seconds, held_out)
            saves.after(number, loader.position)
    if held_out is None:  # the run had all its steps behind it already
        held_out = _evaluate_if_due(job, config.train.steps)
    seconds = time.perf_counter() - began
    together = config.layout.zero == 3 or config.layout.ep > 1  # a forward takes the ranks of all dp places
    sample = _sample(job) if together or mesh.coordinates["dp"] == 0 else None
    return report.end(held_out, seconds, saves.last or start.folder, sample)


@dataclass
class Report:
    """What rank 0 writes and shows; on the other ranks it does nothing."""

    job: Job
    start: Start

    def __post_init__(self):
        config, mesh = self.job.config, self.job.mesh
        self.on = mesh.rank == 0
        self.flops = flops.train_flops(config.model, config.train.seq_len).total
        self.peak = _peak(config, mesh)
        behind = self.start.step
        self.progress = Progress(config.train.steps, begin=behind, every=config.metrics.print_every, on=self.on)
        self.tokens, self.loss = self.start.tokens, self.start.loss
        if self.on:
            folder, anew = config.run.folder, configs.replaced(config, "checkpoint", resume=False)
            (folder / "config.toml").write_text(configs.dumps(anew), encoding="utf-8")
            self.writer = metrics.Writer(folder / "metrics.jsonl", after=behind)
            for line in (*_head(self.job, self.peak), *self.start.notes):
                self.progress.note(line)

    def totals(self) -> dict[str, float]:
        """What a checkpoint keeps of the report, for the run that goes on from it."""
        return {"tokens": self.tokens, "loss": self.loss}

    def step(self, number: int, result: StepResult, seconds: float, held_out: Evaluation | None) -> None:
        """One row of metrics.jsonl and the progress line."""
        self.tokens += result.tokens
        self.loss = result.loss
        speed = metrics.tokens_per_s(result.tokens, seconds)
        row = {
            "step": number,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_s": speed,
            "step_s": seconds,
            "mfu": metrics.mfu(result.tokens, self.flops, seconds, self.job.mesh.world_size, self.peak),
            "skipped": result.skipped,
            "loss_scale": result.loss_scale,
        }
        if result.routing:
            row |= vars(result.routing)
        if held_out is not None:
            row["val_loss"] = held_out.loss
        if self.on:
            self.writer.write(row)
        self.progress.step(row)
        if result.skipped:
            self.progress.note(f"step {number}: a gradient was not finite on some rank; every rank skipped the update")
        if held_out is not None:
            self.progress.note(f"step {number}: held out: {held_out}")

    def end(self, held_out: Evaluation, seconds: float, folder: Path | None, sample: str | None) -> dict[str, Any]:
        """The summary; on rank 0 also the figure, the sample and where everything lies."""
        config, mesh = self.job.config, self.job.mesh
        summary = {
            "run": str(config.run.folder),
            "checkpoint": str(folder),
            "ranks": mesh.world_size,
            "steps": config.train.steps,
            "loss": self.loss,
            "val_loss": held_out.loss,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_s": metrics.tokens_per_s(self.tokens - self.start.tokens, seconds),
            "sample": sample,
        }
        if self.on:
            self.writer.close()
            if config.metrics.plot:
                label = f"{mesh.world_size} rank{'s' if mesh.world_size > 1 else ''}"
                plot_losses({label: config.run.folder / "metrics.jsonl"}, config.run.folder / "loss.png", config.run.name)
            if sample is not None:
                self.progress.note(f"sample, after {config.train.sample_prompt!r}:\n{sample}")
            if config.metrics.trace:
                self.progress.note(
                    f"steps {config.metrics.trace} are traced: `minidist trace {config.run.folder}` sums them up"
                )
            self.progress.note(
                f"{config.train.steps - self.start.step} steps in {seconds:.0f} s; everything is in {config.run.folder}"
            )
        self.progress.close()
        return summary


def _evaluate_if_due(job: Job, number: int) -> Evaluation | None:
    """The evaluation that follows step `number`: all held-out windows after the last step, some of them in between."""
    train = job.config.train
    final = number == train.steps
    if not final and (not train.eval_every or number % train.eval_every):
        return None
    group = job.mesh.group("dp")
    limit = None if final or not train.eval_samples else train.eval_samples
    batches = validation_batches(job.corpus.validation, train.seq_len, train.micro_batch, group.rank, group.size, limit)
    return evaluate(job.zero.model, batches, job.mesh, job.step.pipeline)


def _sample(job: Job) -> str | None:
    train, tokenizer = job.config.train, job.corpus.tokenizer
    if not train.sample_tokens:
        return None
    prompt = tokenizer.encode(train.sample_prompt).tolist() or [tokenizer.separator]
    ids = generate(
        job.zero.model,
        prompt,
        train.sample_tokens,
        context=train.seq_len,
        seed=job.config.run.seed,
        vocab=tokenizer.vocab,
        forward=partial(last_logits, job.step.pipeline),
    )
    return train.sample_prompt + tokenizer.decode(ids)


def _peak(config: Config, mesh: Mesh) -> float | None:
    """Peak FLOP/s of one device: stated, or looked up; None where neither is known."""
    stated = config.metrics.peak_tflops * 1e12
    return stated or hardware.peak_flops(devices.name_of(mesh.device), config.precision.dtype)


def _state(job: Job) -> str:
    """Who keeps what: the ZeRO stage, over which ranks, and the formats of the state."""
    zero, optim = job.zero, job.config.optim
    shared = f"one copy of the state over {zero.group.size} rank(s)" if zero.stage else "the whole state on every rank"
    formats = {"weights": zero.formats.weights, "gradients": zero.formats.grads, "masters": zero.formats.master}
    names = ", ".join(f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in formats.items())
    kept = "" if job.config.layout.reshard else ", weights kept between forward and backward"
    return f"ZeRO stage {zero.stage}: {shared}{kept}; {names}{' and moments on the host' if optim.offload else ''}"


def _pipeline(config: Config) -> list[str]:
    """The schedule, what it leaves idle and keeps alive, and what ZeRO costs with it."""
    layout = config.layout
    if layout.pp == 1:
        return []
    micro = configs.micro_batches(config)
    plan = schedule_of(layout, micro)
    cut = cut_of(layout, config.model, plan.stages, config.train.seq_len)
    found = simulate(plan)
    sizes, peaks = (", ".join(map(str, numbers)) for numbers in (map(len, cut.layers), found.in_flight_peak))
    lines = [
        f"pipeline: {plan.name} on {layout.pp} ranks, stages of {sizes} layers, micro-batches a step: {micro}. "
        f"With equal stages {found.bubble_of_ideal:.1%} of ideal time idle ({found.bubble_of_total:.1%} of the total); "
        f"activations in flight, by rank: {peaks}"
    ]
    if layout.zero >= 2:
        weights = ", and weights are gathered for every forward and backward of one" if layout.zero == 3 else ""
        lines.append(
            f"ZeRO stage {layout.zero} with a pipeline reduces gradients after every micro-batch: {micro} times the gradient "
            f"bytes of stage 1{weights}"
        )
    return lines


def _head(job: Job, peak: float | None) -> list[str]:
    """What stands above the first step: what is trained, on what, and how MFU is counted."""
    config, mesh = job.config, job.mesh
    name = devices.name_of(mesh.device)
    parameters = flops.parameters(config.model)
    text = job.corpus.train
    lines = [
        f"{config.run.name}: {parameters:,} parameters, {config.precision.dtype}, {mesh.world_size} rank(s) on {name}",
        f"text: {len(text):,} training tokens, sha256 {text.header['sha256'][:12]}; {config.train.steps} steps of "
        f"{config.train.global_batch} x {config.train.seq_len} tokens",
        _state(job),
        *_pipeline(config),
        f"recompute: {config.recompute}",
    ]
    if peak is None:
        lines.append(f"no MFU: unknown device peak ({name}, {config.precision.dtype}); state it as metrics.peak_tflops")
    else:
        lines.append(f"{flops.CONVENTION}; peak {peak / 1e12:g} TFLOP/s")
    return lines
