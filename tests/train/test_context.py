"""What a model says outside of training whose sequences or layers are cut: evaluation and text as from one process."""

from functools import partial

import numpy as np
import pytest
from parity.harness import MODEL, config

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.data import TokenFile, validation_batches
from minidist.parallel.pipeline.runtime import Pipeline
from minidist.train.build import runtime
from minidist.train.evaluate import evaluate
from minidist.train.generate import generate, last_logits

LAYOUTS = [Layout(cp=2), Layout(cp=3, cp_attention="gather"), Layout(cp=2, cp_attention="ulysses"), Layout(cp=2, tp=2, sp=True)]
LAYOUTS += [Layout(pp=2), Layout(pp=2, cp=2, tp=2, sp=True), Layout(pp=2, dp=2, schedule="zb-v", zero=3)]


def says(mesh, cfg, path):
    """Loss and tokens of the held-out file, and twelve tokens of text."""
    zero, group = runtime(mesh, cfg), mesh.group("dp")
    model, pipeline = zero.model, Pipeline(zero, mesh)
    batches = validation_batches(TokenFile(path), cfg.train.seq_len, 5, group.rank, group.size)
    held_out = evaluate(model, batches, mesh, pipeline)
    text = generate(model, [1, 2, 3], 12, context=cfg.train.seq_len, forward=partial(last_logits, pipeline), temperature=0)
    return held_out.loss_sum, held_out.tokens, text


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evaluation_and_text_are_those_of_one_process(layout, tmp_path):
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, MODEL.vocab, size) for size in (30, 7, 100, 40)]
    path = TokenFile.build(tmp_path / "held", documents, MODEL.vocab, 0).path
    loss, tokens, text = says(Mesh(Layout()), config(seq_len=24), path)
    assert tokens == 181  # the last window is short
    for found in ranks.run(says, layout.world_size, config(layout=layout, seq_len=24), path, layout=layout):
        assert found[0] == pytest.approx(loss, rel=1e-12) and found[1:] == (tokens, text)
