"""The configuration of a run: what can be set, what each setting means, and every check that needs no rank.

A run is a TOML file (or the name of a recipe shipped with the package) with typed overrides on top:
`minidist train tiny --train.steps 50 --layout.dp=2`. `load` reads it, `check` refuses in plain words what cannot
work, `dumps` writes the resolved whole. The text under a field is what `minidist train --help` prints.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from minidist.core.layout import AXES, Layout
from minidist.model.config import ModelConfig
from minidist.parallel.config import Recompute
from minidist.train import settings
from minidist.train.sections import Checkpoint, Data, Metrics, Optim, Precision, Run, Train


@dataclass(frozen=True)
class Config:
    """All settings of a run, by section."""

    run: Run
    model: ModelConfig
    data: Data
    layout: Layout
    train: Train
    optim: Optim
    precision: Precision
    recompute: Recompute
    checkpoint: Checkpoint
    metrics: Metrics


def recipes() -> dict[str, Path]:
    """The run configurations shipped with the package, by name."""
    folder = Path(str(resources.files("minidist"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str | Path, overrides: list[str] | None = None, *, ranks: int | None = None, trace: bool = False) -> Config:
    """The configuration in a TOML file, or of a recipe by name, with `--section.key value` overrides on top.

    The run is called like its file unless `run.name` says otherwise. With `ranks`, and layout.dp stated nowhere,
    layout.dp becomes what the other axes leave of them; with `trace`, and no metrics.trace, steps 2 to 4 are traced, as far
    as the run goes. Raises ValueError with key, value and remedy.
    """
    path = _find(str(name))
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML, {error}") from None
    settings.build(Config, tree, where=f"{path}: ")  # so that a fault of the file is reported with its name
    tree = settings.override(Config, tree, overrides or [])
    tree.setdefault("run", {}).setdefault("name", path.stem)
    if Path(name).is_dir():  # a run's own folder, wherever it lies now
        tree["run"] |= {"name": Path(name).resolve().name, "dir": str(Path(name).parent)}
    if ranks:
        _spread(tree.setdefault("layout", {}), ranks)
    config = settings.build(Config, tree)
    return _with_trace(config) if trace else config


def laid_out(config: Config, overrides: list[str], ranks: int) -> Config:
    """The configuration of a trained run on `ranks` ranks: the layout that `--layout.key value` overrides state, not its own.

    Default: one rank; layout.dp as in `load`. Raises ValueError with key, value and remedy.
    """
    tree = settings.override(Config, {}, overrides)
    others = [f"--{section}.{key}" for section in tree if section != "layout" for key in tree[section]]
    if others:
        raise ValueError(
            f"{others[0]}: a trained model keeps the settings of its run, only its layout can be chosen: leave it out"
        )
    layout = tree.get("layout", {})
    _spread(layout, ranks)
    return settings.build(Config, to_dict(config) | {"layout": layout})


def _spread(stated: dict[str, Any], ranks: int) -> None:
    """Where a layout does not state dp, give it the ranks that its other axes leave."""
    if "dp" not in stated:
        others = math.prod(stated.get(axis, 1) for axis in AXES if axis != "dp")
        stated["dp"] = max(1, ranks // max(1, others))


def loads(text: str) -> Config:
    """The configuration in a TOML text, such as the config.toml of a run."""
    return settings.build(Config, tomllib.loads(text))


def dumps(config: Config) -> str:
    """The whole resolved configuration as TOML; `loads` gives an equal one back."""
    return settings.dumps(config)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The whole resolved configuration as plain dictionaries, for a manifest."""
    return settings.to_tree(config)


def from_dict(tree: dict[str, dict[str, Any]]) -> Config:
    """The configuration that `to_dict` gave, as found in a manifest."""
    return settings.build(Config, tree, where="manifest: ")


def help_text(section: str | None = None) -> str:
    """All fields with type, default and documentation, or those of one section."""
    return settings.help_text(Config, section)


def traced_steps(config: Config) -> range:
    """The steps that `metrics.trace` names. ValueError where it names none of the run."""
    text, last = config.metrics.trace, config.train.steps
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    steps = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not steps or not 1 <= steps[0] <= steps[-1] <= last:
        raise ValueError(
            f"metrics.trace = {settings.show(text)}: give a step from 1 to train.steps = {last}, or two such as 2-4"
        )
    return steps


def _with_trace(config: Config) -> Config:
    """The configuration with steps to trace, unless it names some: not the first, which warms up."""
    first, last = min(2, config.train.steps), min(4, config.train.steps)
    steps = str(first) if first == last else f"{first}-{last}"
    return config if config.metrics.trace else replaced(config, "metrics", trace=steps)


def replaced(config: Config, section: str, **changes: Any) -> Config:
    """The configuration with some keys of one section changed."""
    return replace(config, **{section: replace(getattr(config, section), **changes)})


def _find(name: str) -> Path:
    shipped = recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.is_file():
        return path
    if (path / "config.toml").is_file():
        return path / "config.toml"
    if path.suffix == ".toml" or os.sep in name:
        raise ValueError(f"{name}: no such file, give a TOML file or one of the recipes {', '.join(shipped)}")
    raise ValueError(f"there is no recipe {name!r}: {settings.nearest(name, shipped)} A path to a TOML file works too")


LEAST = {  # key -> the smallest legal value
    "data.prefetch": 0,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.micro_batch": 1,
    "train.accumulation": 1,
    "train.seq_len": 1,
    "train.eval_every": 0,
    "train.eval_samples": 0,
    "train.sample_tokens": 0,
    "optim.lr": 0.0,
    "optim.warmup": 0,
    "optim.min_lr_ratio": 0.0,
    "optim.eps": 0.0,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.clip": 0.0,
    "precision.scale_window": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "metrics.print_every": 1,
    "metrics.peak_tflops": 0.0,
}


NEEDS_AXIS = {"sp": "tp", "cp_attention": "cp", "schedule": "pp", "chunks": "pp", "split": "pp"}
"""settings of the layout -> the axis without which they mean nothing"""
ACTS_WITH = {"betas": "adamw", "eps": "adamw", "momentum": "sgd"}


def check(config: Config, ranks: int = 1) -> None:
    """Refuse, before any rank starts, what cannot work on `ranks` ranks. ValueError with key, value and remedy.

    What needs the text itself (a missing or empty corpus, one shorter than a sequence) `build.open_text` refuses.
    """
    for key, least in LEAST.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not value >= least:
            raise ValueError(f"{key} = {value}: give at least {least}")
    if not re.fullmatch(r"\w[\w.+ -]*", config.run.name):
        raise ValueError(f"run.name = {settings.show(config.run.name)}: give a plain name, and the place as run.dir")
    _check_layout(config, ranks)
    scale = config.precision.loss_scale
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"precision.loss_scale = {scale}: give a number above 0, or leave it out")
    _check_batch(config)
    traced_steps(config)
    optim = config.optim
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas = {list(optim.betas)}: give numbers from 0 to below 1, such as 0.9,0.95")
    for key, name in ACTS_WITH.items():
        if optim.name != name and getattr(optim, key) != getattr(Optim(), key):
            raise ValueError(f"optim.{key} acts with optim.name = {name} only, not with {optim.name}: leave it out")


def _check_layout(config: Config, ranks: int) -> None:
    from minidist.parallel import context, expert  # needs torch, which --help does not wait for

    layout, model = config.layout, config.model
    if layout.ep > 1 and not model.experts:
        raise ValueError(f"layout.ep = {layout.ep} without experts: set model.experts, or use layout.ep = 1")
    if model.shared_ffn % layout.tp:
        raise ValueError(f"layout.tp = {layout.tp} does not divide model.shared_ffn = {model.shared_ffn}: use a multiple of it")
    expert.expect_rows(model, layout.cp)
    context.expect_heads(layout.cp_attention, cp=layout.cp, heads=model.heads, tp=layout.tp)
    for name, axis in NEEDS_AXIS.items():
        if getattr(layout, axis) == 1 and getattr(layout, name) != getattr(Layout, name):
            raise ValueError(f"layout.{name} acts with layout.{axis} > 1 only: leave it out")
    if not layout.sp and not layout.sp_regather:
        raise ValueError("layout.sp_regather = false acts with layout.sp = true only: leave it out")
    if layout.shard and not layout.zero:
        raise ValueError(
            f"layout.shard = {layout.shard} with layout.zero = 0: stage 0 keeps the whole state on every rank, so there is "
            f"nothing to share; set layout.zero to 1, 2 or 3, or leave layout.shard out"
        )
    if not layout.reshard and layout.zero != 3:
        raise ValueError(f"layout.reshard = false with layout.zero = {layout.zero}: only stage 3 frees weights, leave it out")
    if layout.zero and layout.bucket != Layout.bucket:
        raise ValueError(
            f"layout.bucket = {layout.bucket} with layout.zero = {layout.zero}: only stage 0 has buckets, leave it out"
        )
    layout.expect_ranks(ranks)
    layout.expect_model(layers=model.layers, heads=model.heads, kv_heads=model.kv_heads, ffn=model.ffn, experts=model.experts)
    layout.expect_batch(global_batch=config.train.global_batch, seq_len=config.train.seq_len)
    if layout.pp > 1:
        _check_pipeline(config)


def _check_pipeline(config: Config) -> None:
    from minidist.parallel.pipeline import setting, stages

    layout = config.layout
    cut = stages.cut_of(layout, config.model, setting.stages_by_rank(layout), config.train.seq_len)
    if config.model.tied and set(cut.ends) != {0, layout.pp - 1} and len(set(cut.ends)) > 1:
        raise ValueError(
            f"layout.schedule = {layout.schedule} has the first and the last stage on ranks {cut.ends[0]} and {cut.ends[1]} of "
            f"the pipeline; with model.tied = true they lie on one rank, or on the first and the last one"
        )
    setting.schedule_of(layout, micro_batches(config))


def micro_batches(config: Config) -> int:
    """Micro-batches of one step on every rank."""
    largest = math.ceil(config.train.global_batch / config.layout.dp)
    return math.ceil(largest / config.train.micro_batch)


def _check_batch(config: Config) -> None:
    train, dp = config.train, config.layout.dp
    if train.accumulation is None:
        return
    product = dp * train.micro_batch * train.accumulation
    if product != train.global_batch:
        raise ValueError(
            f"train.accumulation = {train.accumulation}: layout.dp {dp} x train.micro_batch {train.micro_batch} x "
            f"train.accumulation {train.accumulation} = {product}, but train.global_batch = {train.global_batch}: "
            f"change one of them, or leave train.accumulation out"
        )
