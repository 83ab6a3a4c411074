"""Lesson 5's exercises: four collectives built from messages, and five programs to repair."""

from __future__ import annotations

from minidist.course.grading import Task
from minidist.course.tasks import judge_05_1, judge_05_2

NO_DIST = {"torch.distributed": "it leaves no line on the tape. minidist.core.comm has all you need."}

TASKS = [
    Task(
        key="05.1",
        version=1,
        title="Four collectives from messages",
        function="broadcast, reduce_scatter, all_gather and all_to_all",
        parts={"broadcast": 5, "reduce_scatter": 5, "all_gather": 5, "all_to_all": 5},
        independent=True,
        minutes=60,
        hints=(
            "Write down, for three ranks, who has to hear what from whom, and only that. Then look at the stage of the "
            "lesson: in round k rank r sends to rank r + k around the circle. From whom does it receive in that round?",
            "x.view(n, -1, *x.shape[1:]) cuts x into n parts. comm.exchange([('send', a, right), ('recv', b, left)], "
            "mesh.world) launches both before it waits for either. Receive into tensors of your own: torch.empty_like.",
            "1. start from this rank's own part, copied; 2. for k in 1 .. n-1: right = (me + k) % n, left = (me - k) % n, "
            "exchange the part that right needs for the one that left has for me; 3. put what came at place left, or add it.",
        ),
        cases=judge_05_1.cases,
        judge=judge_05_1.judge,
        explain=judge_05_1.explain,
        refused=NO_DIST,
    ),
    Task(
        key="05.2",
        version=1,
        title="Five programs to repair",
        function=", ".join(judge_05_2.PARTS),
        parts=dict.fromkeys(judge_05_2.PARTS, 4),
        independent=True,
        minutes=60,
        hints=(
            "For each program ask: does every rank make the same calls, in the same order, with the same shapes, whatever "
            "its data are? And is each result read only after somebody waited for it? Read the report of the failure for the "
            "rank that differs.",
            "Sum locally, then call once; walk through what all ranks share; tell sizes before contents; turn a decision "
            "into a number and reduce it (a sum with an inf in it is not finite); keep the handle that async_op=True returns.",
            "1. all_reduce of tensor([sum, count]); 2. for name, length in model: all_reduce of grads.get(name, zeros); 3. "
            "all_gather the lengths, pad to the longest, all_gather, cut; 4. all_reduce first, decide from the sum; 5. "
            "work.wait() before the use.",
        ),
        cases=judge_05_2.cases,
        judge=judge_05_2.judge,
        explain=judge_05_2.explain,
        refused=NO_DIST,
    ),
]
