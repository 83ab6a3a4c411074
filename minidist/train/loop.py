"""The training loop: steps, evaluations, figures, and the final weights. The same function on one rank and on many."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from minidist import checkpoint
from minidist.core import device as devices
from minidist.core import hardware
from minidist.core.mesh import Mesh
from minidist.data.loader import validation_batches
from minidist.model import flops
from minidist.model.moe import biases
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
from minidist.train.step import StepResult
from minidist.train.tracing import Tracing


def train(mesh: Mesh, config: Config) -> dict[str, Any]:
    """Train as `config` says and return the summary of the run, the same on every rank.

    Writes the run's folder: config.toml, metrics.jsonl, loss.png, checkpoints/, trace/. Every rank of the mesh calls it.
    """
    job = build(mesh, claim_folder(mesh, config))
    report, tracing = Report(job), Tracing(mesh, job.config)
    began = time.perf_counter()
    last = held_out = None
    with job.loader() as loader:
        for number in range(1, job.config.train.steps + 1):
            start = time.perf_counter()
            with tracing.step(number):
                last = job.step.run(next(loader))
            seconds = time.perf_counter() - start
            held_out = _evaluate_if_due(job, number)
            report.step(number, last, seconds, held_out)
        folder = _save(job, loader.position)
    seconds = time.perf_counter() - began
    together = config.layout.zero == 3 or config.layout.ep > 1  # a forward takes the ranks of all dp places
    sample = _sample(job) if together or mesh.coordinates["dp"] == 0 else None
    return report.end(last, held_out, seconds, str(folder), sample)


@dataclass
class Report:
    """What rank 0 writes and shows; on the other ranks it does nothing."""

    job: Job

    def __post_init__(self):
        config, mesh = self.job.config, self.job.mesh
        self.on = mesh.rank == 0
        self.flops = flops.train_flops(config.model, config.train.seq_len).total
        self.peak = _peak(config, mesh)
        self.progress = Progress(config.train.steps, every=config.metrics.print_every, on=self.on)
        self.tokens = 0
        if self.on:
            folder = config.run.folder
            (folder / "config.toml").write_text(configs.dumps(config), encoding="utf-8")
            self.writer = metrics.Writer(folder / "metrics.jsonl")
            for line in _head(self.job, self.peak):
                self.progress.note(line)

    def step(self, number: int, result: StepResult, seconds: float, held_out: Evaluation | None) -> None:
        """One row of metrics.jsonl and the progress line."""
        self.tokens += result.tokens
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

    def end(self, last: StepResult, held_out: Evaluation, seconds: float, folder: str, sample: str | None) -> dict[str, Any]:
        """The summary; on rank 0 also the figure, the sample and where everything lies."""
        config, mesh = self.job.config, self.job.mesh
        summary = {
            "run": str(config.run.folder),
            "checkpoint": folder,
            "ranks": mesh.world_size,
            "steps": config.train.steps,
            "loss": last.loss,
            "val_loss": held_out.loss,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_s": metrics.tokens_per_s(self.tokens, seconds),
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
            self.progress.note(f"{config.train.steps} steps in {seconds:.0f} s; everything is in {config.run.folder}")
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


def _save(job: Job, samples: int):
    return checkpoint.save(
        job.config.run.folder / "checkpoints",
        job.config.train.steps,
        [*job.zero.weights(), *biases(job.zero.model, owner=job.config.layout.rank(pp=job.mesh.coordinates["pp"]))],
        job.mesh,
        config=configs.to_dict(job.config),
        data=job.corpus.train.header,
        samples=samples,
    )


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
