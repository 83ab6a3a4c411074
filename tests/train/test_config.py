"""Configuration: TOML and overrides in, nothing ignored, faults in one line with key, value and remedy; round trip."""

import dataclasses
import tomllib

import pytest

from minidist.train import config as configs
from minidist.train import settings

SMALL = """
[model]
layers = 2
width = 24
heads = 2
kv_heads = 1
ffn = 48
vocab = 256
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def said(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_overrides_are_typed_and_both_spellings_work(small):
    words = ["--train.steps", "7", "--optim.lr=1", "--optim.betas", "0.5,0.75", "--metrics.plot=false"]
    config = configs.load(small, [*words, "--run.name", "7", "--train.accumulation", "3", "--train.sample_prompt=--x=1"])
    assert (config.train.steps, config.optim.lr, config.optim.betas) == (7, 1.0, (0.5, 0.75))
    assert isinstance(config.optim.lr, float)
    assert (config.metrics.plot, config.run.name, config.train.accumulation) == (False, "7", 3)
    assert config.train.sample_prompt == "--x=1"
    assert configs.load(small, ["--train.accumulation=3", "--train.accumulation=none"]).train.accumulation is None


def test_the_file_names_the_run_unless_it_is_named(small):
    assert configs.load(small).run.name == "small"
    assert configs.load(small, ["--run.name=other"]).run.name == "other"


def test_resolved_toml_loads_back_equal(small):
    words = ["--train.accumulation=3", "--optim.lr=1e-20", '--train.sample_prompt=a "b"\n\t\\é', "--data.source=/x y"]
    for overrides in ([], words):
        config = configs.load(small, overrides)
        assert configs.loads(configs.dumps(config)) == config
        assert configs.from_dict(configs.to_dict(config)) == config
        # every section and every set field is there: nothing stays implicit
        tree = tomllib.loads(configs.dumps(config))
        for section in dataclasses.fields(config):
            values = dataclasses.asdict(getattr(config, section.name))
            assert set(tree[section.name]) == {key for key, value in values.items() if value is not None}


OVERRIDE_FAULTS = {  # C60, and "Bad input" of the issue: key, value, what is expected or the nearest right name
    "--train.step=5": ("--train.step:", "did you mean --train.steps?"),
    "--trian.steps=5": ("'trian'", "did you mean train?"),
    "--train.zzz=5": ("--train.zzz:", "use one of --train.steps"),
    "--train.steps=many": ("--train.steps", '"many"', "expected a whole number"),
    "--train.steps=1.5": ("--train.steps", "1.5", "expected a whole number"),
    "--train.steps=true": ("--train.steps", "true", "expected a whole number"),
    "--train.steps": ("--train.steps", "a value is missing", "expected a whole number"),
    "--optim.lr=fast": ("--optim.lr", '"fast"', "expected a number"),
    "--metrics.plot=yes": ("--metrics.plot", '"yes"', "expected true or false"),
    "--optim.name=adam": ("--optim.name", '"adam"', "did you mean adamw?"),
    "--optim.betas=0.9": ("--optim.betas", "0.9", "2 numbers"),
    "--optim.betas=0.9,x": ("--optim.betas", "0.9,x", "2 numbers"),
    "--precision.dtype=fp32": ("--precision.dtype", '"fp32"', "float32"),
    "--layout.dp=0": ("layout.dp = 0", "at least 1"),
    "--model.heads=7": ("model.width", "heads=7"),
    "steps=5": ("steps=5", "--train.steps 50"),
}


@pytest.mark.parametrize("word", OVERRIDE_FAULTS)
def test_a_wrong_override_is_refused_with_the_remedy(small, word):
    text = said(configs.load, small, [word])
    for part in OVERRIDE_FAULTS[word]:
        assert part in text


FILE_FAULTS = {
    "[train]\nstep = 5": ("train.step = 5", "did you mean train.steps?"),
    "[trian]\nsteps = 5": ("[trian]", "did you mean train?"),
    "[train]\nsteps = '5'": ('train.steps = "5"', "expected a whole number"),
    "[optim]\nbetas = [0.9, 'x']": ('optim.betas = "x"', "expected a number"),
    "train = 5": ("train = 5", "[train]"),
    "[train\n": ("not valid TOML",),
    "[model]\nlayers = 2": ("model.width is not set",),
}


@pytest.mark.parametrize("toml", FILE_FAULTS)
def test_a_wrong_file_is_refused_by_name(tmp_path, toml):
    path = tmp_path / "mine.toml"
    path.write_text(toml if "[model]" in toml else f"{toml}\n{SMALL}")
    text = said(configs.load, path)
    for part in (str(path), *FILE_FAULTS[toml]):
        assert part in text


def test_a_wrong_recipe_gets_the_nearest_and_a_missing_file_its_name(tmp_path):
    assert "did you mean tiny?" in said(configs.load, "tinny")
    assert "no such file" in said(configs.load, tmp_path / "x.toml")
    assert "tiny" in said(configs.load, "completely-else")


def test_ranks_fill_dp_only_where_it_is_not_stated(small, tmp_path):
    assert configs.load(small, ranks=4).layout.dp == 4
    assert configs.load(small, ["--layout.dp=2"], ranks=4).layout.dp == 2
    assert configs.load(small, ["--layout.tp=2"], ranks=4).layout.dp == 2
    path = tmp_path / "stated.toml"
    path.write_text(f"{SMALL}\n[layout]\ndp = 3\n")
    assert configs.load(path, ranks=4).layout.dp == 3


CHECK_FAULTS = {  # overrides, ranks -> what is said
    ("--layout.dp=3", 2): ("3 ranks, but 2 were started", "layout.dp = 2"),
    ("--layout.tp=2 --model.ffn=33", 2): ("layout.tp = 2 does not divide model.ffn = 33", "use tp = 1"),
    ("--layout.sp=true", 2): ("layout.sp acts with layout.tp > 1 only", "leave it out"),
    ("--layout.tp=2 --layout.sp_regather=false", 2): ("layout.sp_regather = false acts with layout.sp", "leave it out"),
    ("--layout.tp=2 --layout.sp=true --train.seq_len=15", 2): ("train.seq_len = 15", "use a multiple of 2"),
    ("--layout.cp_attention=gather", 2): ("layout.cp_attention acts with layout.cp > 1 only", "leave it out"),
    ("--layout.schedule=gpipe", 2): ("layout.schedule acts with layout.pp > 1 only", "leave it out"),
    ("--layout.pp=2 --layout.chunks=9 --layout.schedule=interleaved", 2): (
        "layout.pp = 2 with 9 chunks",
        "a stage needs a layer",
    ),
    ("--layout.pp=2 --layout.split=3,2", 2): ("layout.split = '3,2'", "2 whole numbers of layers that add up to"),
    ("--layout.pp=2 --layout.split=cheap", 2): ("layout.split = 'cheap'", '"even", "cost"'),
    ("--layout.pp=2 --layout.schedule=nothing.csv", 2): ("layout.schedule = 'nothing.csv'", "neither a file nor one of"),
    ("--layout.cp=2 --train.seq_len=18", 2): ("train.seq_len = 18", "use a multiple of 4"),
    ("--layout.cp=2 --model.experts=2 --model.capacity=1.0", 2): ("layout.cp = 2", "model.capacity = 0"),
    ("--layout.cp=2 --layout.cp_attention=ulysses --model.heads=3 --model.kv_heads=3 --model.width=48", 2): (
        "unevenly",
        "use a multiple of 2 heads",
    ),
    ("--layout.ep=2", 2): ("layout.ep = 2", "use layout.ep = 1"),
    ("--layout.shard=2", 2): ("layout.shard = 2 with layout.zero = 0", "set layout.zero to 1, 2 or 3"),
    ("--layout.reshard=false", 1): ("layout.reshard = false with layout.zero = 0", "leave it out"),
    ("--precision.loss_scale=0", 1): ("precision.loss_scale = 0.0", "above 0"),
    ("--train.global_batch=3", 4): ("train.global_batch = 3", "layout.dp = 4", "at least 4"),
    ("--train.global_batch=0", 1): ("train.global_batch = 0", "at least 1"),
    ("--train.micro_batch=0", 1): ("train.micro_batch = 0", "at least 1"),
    ("--train.steps=0", 1): ("train.steps = 0", "at least 1"),
    ("--train.seq_len=0", 1): ("train.seq_len = 0", "at least 1"),
    ("--optim.lr=-1", 1): ("optim.lr = -1.0", "at least 0"),
    ("--optim.lr=nan", 1): ("optim.lr = nan", "at least 0"),
    ("--optim.betas=0.9,1", 1): ("optim.betas = [0.9, 1.0]", "below 1"),
    ("--run.name=a/b", 1): ('run.name = "a/b"', "run.dir"),
    ("--run.name=", 1): ('run.name = ""', "a plain name"),
    ("--run.name=..", 1): ('run.name = ".."', "a plain name"),
    ("--optim.momentum=0.9", 1): ("optim.momentum", "sgd only"),
    ("--optim.name=sgd --optim.eps=1", 1): ("optim.eps", "adamw only"),
}


@pytest.mark.parametrize("case", CHECK_FAULTS, ids=str)
def test_what_cannot_work_is_refused_before_any_rank_starts(small, case):
    overrides, ranks = case
    config = configs.load(small, overrides.split(), ranks=ranks)
    text = said(configs.check, config, ranks)
    for part in CHECK_FAULTS[case]:
        assert part in text


def test_a_stated_accumulation_shows_its_product(small):  # C60: 128 / (32 x 8) must not become 0, nor the batch 256
    words = ["--train.global_batch=128", "--train.micro_batch=32"]
    text = said(configs.check, configs.load(small, [*words, "--train.accumulation=1"], ranks=8), 8)
    assert "layout.dp 8 x train.micro_batch 32 x train.accumulation 1 = 256, but train.global_batch = 128" in text
    configs.check(configs.load(small, [*words, "--train.accumulation=2"], ranks=2), 2)
    configs.check(configs.load(small, words, ranks=8), 8)  # left out, it follows


def test_every_recipe_passes_its_own_checks_at_every_dp_up_to_4():
    assert "tiny" in configs.recipes()
    for name in configs.recipes():
        for ranks in (1, 2, 3, 4):
            config = configs.load(name, ranks=ranks)
            configs.check(config, ranks)
            assert config.run.name == name
            assert not (config.model.width % 24 or config.model.heads % 12 or config.train.global_batch % 24)


def test_help_documents_every_field_from_the_place_where_it_is_defined():
    text = configs.help_text()
    for section in dataclasses.fields(configs.Config):
        for key in dataclasses.fields(settings.get_type_hints(configs.Config)[section.name]):
            assert f"\n  --{section.name}.{key.name}  " in text
    assert "--optim.warmup  a whole number; default 20\n      optimizer steps over which the learning rate rises" in text
    assert "--model.layers  a whole number; required" in text


def test_a_field_without_documentation_is_our_fault():
    @dataclasses.dataclass
    class Section:
        documented: int = 1
        """yes"""
        bare: int = 2

    with pytest.raises(AssertionError, match="bare"):
        settings._docs(Section)
