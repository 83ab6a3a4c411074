"""Faults of the pipeline's runtime, its stages, split backward and ZeRO in parts; test_mutations.py says how they are run."""

RUN, CUT, SPLIT, ZERO = (
    "parallel/pipeline/runtime.py",
    "parallel/pipeline/stages.py",
    "parallel/split.py",
    "parallel/zero.py",
)
P, R = "parity/test_pipeline.py::", "parallel/pipeline/test_runtime.py::"
SAME, TIED, UNEVEN = (
    P + "test_schedules",
    P + "test_a_tied_embedding_on_two_stages",
    P + "test_fewer_micro_batches_than_stages_and_uneven_ones",
)
WORK, KEPT, SAYS = (
    R + "test_w_computes_the_gradients_of_all_linear_weights",
    R + "test_live_activations_are_those_of_the_verifier",
    "train/test_context.py",
)
BESIDE, EARLY, LATE, ONCE = (
    P + "test_with_tensor_and_context",
    R + "test_reductions_start_while_the_last_weight_gradients_are_made",
    P + "test_what_is_not_waited_for_is_not_there",
    R + "test_a_backward_in_two_sends_what_a_whole_one_does",
)

MUTATIONS = [
    # What runs, and on what
    (RUN, "self.inputs[key] = x.requires_grad_()", "self.inputs[key] = x", SAME),
    (RUN, 'self.hand("B", action, self.inputs.pop(key).grad)', 'self.hand("B", action, 2 * self.inputs.pop(key).grad)', SAME),
    (RUN, '(1 if kind == "F" else -1)', '(-1 if kind == "F" else 1)', SAME),
    (RUN, "last=action == self.final[action.chunk], part", "last=False, part", EARLY),
    (RUN, "last=action == self.final[action.chunk], part", "last=True, part", SAME),
    (RUN, "part=action.chunk, kind=action.kind", "part=0, kind=action.kind", P + "test_with_zero"),
    (RUN, 'kind="W", awaited=tasks)', 'kind="B", awaited=tasks)', ONCE),
    (RUN, 'kind="W", awaited=tasks)', 'kind="W")', EARLY),
    (RUN, "sum(weight_grad(*use) for use in uses)", "2 * weight_grad(*uses[0])", SAME),
    (RUN, "(layout.tp if layout.sp else 1)", "1", BESIDE),
    (RUN, "tokens.shape[0], length", "self.calls[0].batch.tokens.shape[0], length", UNEVEN),
    (RUN, "            self.coming[key] = work.wait()\n", "            self.coming[key] = work._result()\n", LATE),
    (RUN, "call.dropout, call.routing)", "None, call.routing)", SAME),
    # Stages
    (CUT, "(stage < cfg.layers % stages)", "0", P + "test_stages_of_any_size"),
    (CUT, "head * (stage == stages - 1)", "0", "parallel/pipeline/test_stages.py"),
    (CUT, "        model.norm = model.head = None\n", "        pass\n", SAME),
    (CUT, "        model.embedding = None\n", "        pass\n", SAME),
    (CUT, "replicated=(*record.replicated, \"pp\"))", "replicated=record.replicated)", TIED),
    (CUT, "        self.add_module(str(block.layer), block)", "        self.append(block)", SAME),
    ("parallel/replicas.py", "for local in self.tied]", "for local in self.tied[:0]]", TIED),
    # Backward in two
    (SPLIT, "self._off, self._tasks = False, []", "self._off = False", KEPT),
    (SPLIT, "            self._tasks += [task for task in tasks if task[0].requires_grad]\n", "", SAME),
    (SPLIT, "return grad.T @ rows", "return 2 * grad.T @ rows", "parallel/test_split.py"),
    (SPLIT, 'if type(module) is nn.Linear and "forward" not in vars(module):', "if False:", WORK),
    (SPLIT, ' and "forward" not in vars(module)', "", "parallel/test_split.py " + BESIDE),
    ("parallel/parallelize.py", ", later=later)\n    if cfg", ")\n    if cfg", WORK),
    ("parallel/pipeline/setting.py", 'any(action.kind == "I" for actions', 'any(False for actions', WORK),
    # ZeRO in parts
    (ZERO, "            self._unfinished.discard(part)\n", "            self._unfinished.clear()\n", P + "test_with_zero"),
    (ZERO, "return not any(unit in self._used[part] for part in self._unfinished)", "return not self._unfinished", R + "test_a_chunk_is_reduced_when_its_own_last_backward_is_over"),
    (ZERO, "[] if kind == \"I\" else [unit", "[unit", ONCE),
    (ZERO, 'if self.gathers and kind != "W" else None', "if self.gathers else None", ONCE),
    (ZERO, "            if grad is not None:  # put off\n", "            if True:\n", SAME),
    # What the whole job says
    ("train/step.py", "            tokens()  # its backward has no loss that would ask\n", "            pass\n", P + "test_with_experts"),
    ("train/evaluate.py", "    if mesh.layout.pp > 1:", "    if False:", SAYS),
    ("train/generate.py", 'for name in ("cp", "pp"):', 'for name in ("cp",):', SAYS),
    ("train/routing.py", "loads[[layer.layer for layer in layers_of(model)]]", "loads[: len(layers_of(model))]", P + "test_with_experts"),
    ("train/routing.py", ' if mesh.layout.pp > 1 else loads', " if False else loads", "cli/test_experts.py"),
    ("model/moe.py", '("dp", "cp", "tp"), owner)', '("dp", "cp", "tp"), 0)', "cli/test_experts.py"),
]  # fmt: skip
