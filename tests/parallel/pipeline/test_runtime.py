"""The runtime: it idles as the simulator says, keeps what the verifier says, sends what it must, and cannot hang."""

import random
import time
import weakref
from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest
import torch
from parity.harness import MODEL, SEQ_LEN, config

from minidist import ranks
from minidist.core.layout import Layout
from minidist.data.batch import Batch
from minidist.parallel.pipeline import runtime as pipeline_runtime
from minidist.parallel.pipeline.actions import Action
from minidist.parallel.pipeline.setting import schedule_of
from minidist.parallel.pipeline.simulate import Times, simulate
from minidist.parallel.pipeline.verify import verify
from minidist.parallel.zero import Zero
from minidist.train.build import runtime
from minidist.train.step import Step

SMALL = replace(MODEL, width=24, heads=2, kv_heads=1, ffn=24, dropout=0.0)
SCHEDULES = ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v"]
FORWARD_S, INPUT_S, WEIGHT_S = 0.08, 0.08, 0.06


def steps(mesh, cfg, micro_batches, times=1):
    """Steps of a rank on rows without content; its Step."""
    step = Step(runtime(mesh, cfg), mesh, cfg)
    for _ in range(times):
        mesh.tape.clear()
        step.run([Batch.empty(1, SEQ_LEN)] * micro_batches)
    return step


# Time


class Nap(torch.autograd.Function):
    """Work that takes a stated time and no processor: four ranks are then as fast on two cores as on four."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


def naps(mesh, cfg, micro_batches, split, chunks):
    """The tape of a step in which stages sleep instead of working, but for what the small model does beside it."""
    step = steps(mesh, cfg, micro_batches)  # connections are made at the first message
    backward_s = INPUT_S if split else INPUT_S + WEIGHT_S
    for part in step.zero.parts:
        block = next(iter(part.blocks))
        block.register_forward_hook(lambda m, args, out: Nap.apply(out, FORWARD_S / chunks, backward_s / chunks))
    work = pipeline_runtime._Pass.weights
    pipeline_runtime._Pass.weights = lambda self, action: (time.sleep(WEIGHT_S / chunks), work(self, action))
    try:
        mesh.tape.clear()
        step.run([Batch.empty(1, SEQ_LEN)] * micro_batches)
        return mesh.tape
    finally:
        pipeline_runtime._Pass.weights = work


def calibrated(plan, tapes):
    """Median seconds by kind and stage of what ran, and of a message whose receiver was waiting for it."""
    took = defaultdict(list)
    for rank, tape in enumerate(tapes):
        for span in tape.spans:
            action = Action.parse(span.name)
            took[action.kind, plan.stages[rank][action.chunk]].append(span.finish - span.start)
    stages = len(plan.places)
    times = {kind: [median(took.get((kind, stage), [0.0])) for stage in range(stages)] for kind in "FBIW"}
    sends = {
        (line.ranks, tape.rank, line.peer, line.group, line.seq): line for tape in tapes for line in tape.select(op="send")
    }
    links = []
    for tape in tapes:
        for line in tape.select(op="recv"):
            send = sends[line.ranks, line.peer, tape.rank, line.group, line.seq]
            if line.launch < send.launch:
                links.append(line.finish - send.launch)
    return Times(**times), median(links)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_idles_as_the_simulator_says(schedule):
    """4 stages whose work is sleep: the bubble of real ranks within 10 % of what the simulator makes of the parts' times."""
    layout, micro = Layout(pp=4, schedule=schedule), 8
    plan = schedule_of(layout, micro)
    chunks, split = len(plan.stages[0]), any(action.kind == "I" for action in plan.lists[0])
    tapes = ranks.run(naps, 4, config(micro, 1, layout, SMALL), micro, split, chunks, layout=layout)
    rows = [tape.spans for tape in tapes]
    took = max(row[-1].finish for row in rows) - min(row[0].start for row in rows)
    work = sum(span.finish - span.start for row in rows for span in row) / 4
    expected = simulate(plan, *calibrated(plan, tapes))
    assert (took - work) / took == pytest.approx(expected.bubble_of_total, rel=0.1)


# Memory


def alive(mesh, cfg, micro_batches):
    """The largest number of (micro-batch, chunk) of which this rank keeps activations at one time."""
    kept, doing, most, state = defaultdict(int), [None], [0], set()

    class Watched(pipeline_runtime._Pass):
        def forward(self, action):
            doing[0] = (action.micro, action.chunk)
            state.update(unit.weights.data_ptr() for unit in self.zero.units)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                super().forward(action)

    def note(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in state:
            kept[doing[0]] += 1
            weakref.finalize(tensor.untyped_storage(), gone, doing[0])
            most[0] = max(most[0], sum(count > 0 for count in kept.values()))
        return tensor

    def gone(key):
        kept[key] -= 1

    plain, pipeline_runtime._Pass = pipeline_runtime._Pass, Watched
    try:
        steps(mesh, cfg, micro_batches)
    finally:
        pipeline_runtime._Pass = plain
    return most[0], sum(kept.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_activations_are_those_of_the_verifier(schedule):
    layout, micro = Layout(pp=4, schedule=schedule), 8
    cfg = config(micro, 1, layout, SMALL)
    found = ranks.run(alive, 4, cfg, micro, layout=layout)
    assert tuple(most for most, _ in found) == verify(schedule_of(layout, micro)).peaks
    assert [left for _, left in found] == [0] * 4


def tasks(mesh, cfg, micro_batches):
    """Weight gradients that this rank computes outside of autograd in a step."""
    count, plain = [0], pipeline_runtime.weight_grad

    def counting(*task):
        count[0] += 1
        return plain(*task)

    pipeline_runtime.weight_grad = counting
    try:
        steps(mesh, cfg, micro_batches)
    finally:
        pipeline_runtime.weight_grad = plain
    return count[0]


@pytest.mark.parametrize("beside", [{}, {"tp": 2}, {"tp": 2, "sp": True}], ids=str)
def test_w_computes_the_gradients_of_all_linear_weights(beside):
    """ZB-H1 on 2 stages of 4 layers with 7 linear weights each, the head on the last one; 3 micro-batches, all split."""
    layout = Layout(pp=2, schedule="zb-h1", **beside)
    cfg = config(3, 1, layout, replace(SMALL, kv_heads=2))
    found = ranks.run(tasks, layout.world_size, cfg, 3, layout=layout)
    copies = layout.tp
    assert found == [3 * 4 * 7] * copies + [3 * (4 * 7 + 1)] * copies


def reductions(mesh, cfg, micro_batches):
    """When gradients were reduced, when the actions ended, and when weight gradients that were put off were handed over."""
    deposits, deposit = [], Zero.deposit

    def noted(*args):
        deposits.append(time.monotonic())
        deposit(*args)

    Zero.deposit = noted
    try:
        tape = steps(mesh, cfg, micro_batches).mesh.tape
    finally:
        Zero.deposit = deposit
    return [line.launch for line in tape.select(tag="grad")], [(span.name, span.finish) for span in tape.spans], deposits


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_reductions_start_while_the_last_weight_gradients_are_made(schedule):
    layout = Layout(pp=2, dp=2, zero=1, schedule=schedule)
    cfg = config(6, 1, layout, SMALL)
    for launches, spans, deposits in ranks.run(reductions, 4, cfg, 3, layout=layout):
        assert len(launches) >= 4 and sum(launch < spans[-1][1] for launch in launches) >= len(launches) - 1
        assert all(launch > spans[-2][1] for launch in launches), "once a step: in the last action alone"
        assert bool(deposits) is (schedule == "zb-h1")
        if deposits:  # a unit goes when it has its own gradients, not when all have theirs
            assert sum(launch < deposits[-1] for launch in launches) >= len(launches) - 2


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_a_chunk_is_reduced_when_its_own_last_backward_is_over(schedule):
    """Not when those of the rank's other chunk are over, too: its gradients travel while these run."""
    layout = Layout(pp=2, dp=2, zero=1, schedule=schedule, chunks=2)
    for launches, spans, _ in ranks.run(reductions, 4, config(8, 1, layout, SMALL), 4, layout=layout):
        early = [launch for launch in launches if launch < spans[-2][1]]
        assert len(early) >= 2, "two blocks of the other chunk"


def zero_traffic(mesh, cfg, micro_batches):
    """Bytes of weights, and of gradients, that a rank sends in a step."""
    tape = steps(mesh, cfg, micro_batches).mesh.tape
    return [sum(line.sent for line in tape.select(tag=tag)) for tag in ("weight", "grad")]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_backward_in_two_sends_what_a_whole_one_does(zero):
    """Its first half reduces nothing, since gradients follow; its second multiplies what was kept, and gathers nothing."""
    found = []
    for schedule in ("1f1b", "zb-h1"):
        layout = Layout(pp=2, dp=2, zero=zero, schedule=schedule)
        found.append(ranks.run(zero_traffic, 4, config(6, 1, layout, SMALL), 3, layout=layout))
    assert found[0] == found[1] and all(min(sent) > 0 for sent in found[0])


# Bytes


def sent(mesh, cfg, micro_batches):
    """Bytes that a rank hands to others of the pp axis in a step."""
    tape = steps(mesh, cfg, micro_batches).mesh.tape
    lines = [line for line in tape.select(op="send") if line.group.startswith("pp")]
    return sum(line.sent for line in lines), len(lines)


@pytest.mark.parametrize("beside", [{}, {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_bytes_of_a_step(schedule, beside):
    """Each boundary between stages on two ranks: m hidden states down and m gradients up, nothing else."""
    layout, micro = Layout(pp=4, schedule=schedule, **beside), 6
    cfg = config(micro, 1, layout, replace(SMALL, kv_heads=2))
    found = ranks.run(sent, layout.world_size, cfg, micro, layout=layout)
    places = {stage: rank for rank, held in enumerate(schedule_of(layout, micro).stages) for stage in held}
    boundaries = sum(places[stage] != places[stage + 1] for stage in range(len(places) - 1))
    shards = layout.cp * (layout.tp if layout.sp else 1)
    hidden = SEQ_LEN // shards * SMALL.width * 8
    copies = layout.world_size // layout.pp
    assert sum(bytes_ for bytes_, _ in found) == 2 * micro * boundaries * hidden * copies
    assert sum(calls for _, calls in found) == 2 * micro * boundaries * copies


# Hangs


def delayed(mesh, cfg, micro_batches, runs, seed):
    """Steps in which this rank sleeps at random before and after its actions."""
    draw = random.Random(seed * 100 + mesh.rank)

    class Late(pipeline_runtime._Pass):
        def await_input(self, action):
            time.sleep(draw.choice([0, 0, 0, 0.001, 0.004]))
            super().await_input(action)

        def transfer(self, op):
            time.sleep(draw.choice([0, 0, 0, 0.001]))
            super().transfer(op)

    plain, pipeline_runtime._Pass = pipeline_runtime._Pass, Late
    try:
        return steps(mesh, cfg, micro_batches, runs).taken
    finally:
        pipeline_runtime._Pass = plain


@pytest.mark.parametrize("micro", [2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_late_ranks_do_not_hang(schedule, micro):
    """6 schedules x 2 numbers of micro-batches x 17 steps: 204 runs, each rank late at other moments."""
    layout = Layout(pp=4, schedule=schedule)
    cfg = config(micro, 1, layout, SMALL)
    assert ranks.run(delayed, 4, cfg, micro, 17, micro, layout=layout, timeout_s=60) == [17] * 4
