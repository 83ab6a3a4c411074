"""What a graded rank reports, and what it is told: raw calls, bytes held, allowed modules, limits, its own inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minidist.course import grading, tasks
from minidist.course.grading import Case, Fault
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

TASK = dataclasses.replace(tasks.find("00.1"), function="f", refused={}, parts={"all": 1}, explain=lambda case, problem: None)


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as place:
        yield place


def ran(nursery, source, inputs, **changes):
    """(result, outcomes) of one case on as many ranks as there are inputs."""
    seen = []
    case = Case(len(inputs), inputs, limit_s=changes.pop("case_s", None))
    task = dataclasses.replace(TASK, cases=lambda seed: [case], judge=lambda case, outcome: seen.append(outcome), **changes)
    return grading.grade(task, [Cell("a", source)], nursery=nursery), seen


def test_raw_calls_land_on_the_tape_with_their_bytes(nursery):
    source = """
import torch, torch.distributed as dist
def f(mesh):
    x = torch.ones(6)
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.all_gather_into_tensor(torch.empty(12), x)
    dist.reduce_scatter_tensor(torch.empty(3), x)
    dist.all_to_all_single(torch.empty(6), x)
    dist.reduce(x, 0)
    dist.scatter(torch.empty(6), [x, x] if mesh.rank == 0 else None, 0)
    dist.gather(x, [torch.empty(6), torch.empty(6)] if mesh.rank == 0 else None, 0)
    dist.all_gather_object([None, None], 1)
    (dist.send if mesh.rank == 0 else dist.recv)(x, 1 - mesh.rank)
    dist.barrier()
"""
    result, [outcome] = ran(nursery, source, [[], []])
    assert result.status == "passed", result.lines()
    lines = {}
    for line in outcome.tapes[0]:
        lines.setdefault(line["op"], (line["payload"], line["sent"], line["peer"]))
        assert line["where"].startswith("<cell a>:") and line["tag"] == "act"
    assert lines == {
        "all_reduce": (24, 24, None),
        "broadcast": (24, 12, 1),
        "all_gather": (48, 24, None),
        "reduce_scatter": (24, 12, None),
        "all_to_all": (24, 12, None),
        "reduce": (24, 12, 0),
        "scatter": (48, 24, 0),
        "gather": (48, 0, 0),
        "send": (24, 24, 1),
        "barrier": (0, 0, None),
    }


def test_bytes_held_count_results_and_caches_once(nursery):
    source = """
import torch
kept = []
def f(mesh, x):
    kept.append(torch.zeros(100))
    y = torch.zeros(50)
    return [y, y[3:], x]
"""
    _, [outcome] = ran(nursery, source, [[torch.ones(7)]])
    assert outcome.held == [600]  # the input was there before


def test_a_rank_is_told_its_own_inputs_and_tensors_arrive_as_such(nursery):
    source = "def f(mesh, a, b):\n    a.mul_(2)\n    return [mesh.rank, a, b['t'][0]]"
    x = torch.rand(2, 3, dtype=torch.float64)
    _, [outcome] = ran(nursery, source, [[x, {"t": [x + 1]}], [x + 2, {"t": [x + 3]}]])
    assert outcome.values[1][0] == 1 and outcome.values[1][2]["tensor"] == (x + 3).tolist()
    assert outcome.inputs[0][0]["tensor"] == (x * 2).tolist()  # as the submission left it; the case keeps its own


def test_only_allowed_modules_can_be_imported(nursery):
    for line in ("from minidist.core import hardware", "import importlib; importlib.import_module('minidist.data.batch')"):
        result, _ = ran(nursery, f"{line}\ndef f(mesh):\n    return 1", [[]], allowed=("minidist.core.comm",))
        assert result.message_id == "refused" and "the task allows minidist.core.comm" in result.message, result.lines()
    result, _ = ran(
        nursery, "from minidist.core import comm\ndef f(mesh):\n    return 1", [[]], allowed=("minidist.core.comm",)
    )
    assert result.status == "passed", result.lines()


def test_a_refused_function_is_refused_to_answers_and_not_to_the_engine(nursery):
    refused = {"minidist.core.comm.all_reduce": "this is the thing to build"}
    use = "import torch\nfrom minidist.core import comm, comm_grad\ndef f(mesh):\n    x = torch.ones(2)\n    "
    result, _ = ran(nursery, use + "getattr(comm, 'all_' + 'reduce')(x, mesh.world)", [[], []], refused=refused)
    assert (result.message_id, result.points) == ("refused", 0) and "this is the thing to build" in result.message
    result, _ = ran(nursery, use + "return comm_grad.all_reduce(x, mesh.world)", [[], []], refused=refused)
    assert result.status == "passed", result.lines()


def test_a_case_has_its_own_limit_and_a_time_out_is_the_hang_report(nursery):
    source = """
from minidist.core import comm
def f(mesh):
    while mesh.rank == 0:
        pass
    comm.barrier(mesh.world)
"""
    result, _ = ran(nursery, source, [[], []], case_s=1.0)
    assert result.message_id == "hang" and "barrier" in result.message and result.seconds < 10


def test_the_limit_follows_the_reference_and_the_machine(monkeypatch):
    monkeypatch.setattr(grading, "slowness", lambda: 3.0)
    case = [Case(1, [[]])]

    def limit(**changes):
        return grading._job(dataclasses.replace(TASK, **changes), [], case, None, 0)["cases"][0]["limit_s"]

    assert (limit(), limit(reference_s=0.1), limit(reference_s=2.0)) == (10.0, 10.0, 60.0)


def test_a_cell_that_starts_ranks_does_not_lose_the_answer_below_it(nursery):
    source = "from minidist import ranks\nranks.run(print, 2)\ndef f(mesh):\n    return 7"
    _, [outcome] = ran(nursery, source, [[]])
    assert outcome.values == [7]


def test_a_fault_in_the_tape_counts_before_the_judge_is_asked(nursery):
    task = dataclasses.replace(TASK, cases=lambda seed: [Case(2, [[], []])], judge=lambda *_: Fault("all", "asked", "m"))
    source = "import torch\nfrom minidist.core import comm\ndef f(mesh):\n    comm.barrier(mesh.world)\n    mesh.tape.clear()"
    assert grading.grade(task, [Cell("a", source)], nursery=nursery).message_id == "tape-altered"
