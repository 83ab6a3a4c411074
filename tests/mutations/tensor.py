"""Faults of tensor and sequence parallelism and of what counts once beside them; test_mutations.py says how they are run."""

T = "parallel/test_tensor.py::"
PAIR = T + "test_a_pair_of_layers_with_biases"
HOLDS = T + "test_who_holds_what"
ENTROPY = T + "test_cross_entropy_without_all_logits"
PADDING = T + "test_padding_takes_no_probability"
BYTES = T + "test_bytes_of_a_step"
P = "parity/test_tensor.py::"
SAME, FEW, ZERO = P + "test_like_one_process", P + "test_uneven_vocabulary_and_few_kv_heads", P + "test_with_zero"
LATE = P + "test_what_is_not_waited_for_is_not_there"
CLIP = "parity/test_pairs.py::test_clipping"

MUTATIONS = [
    # What is cut
    ("parallel/tensor.py", "size = -(-old.shape[dim] // group.size)", "size = old.shape[dim] // group.size", HOLDS),
    ("parallel/tensor.py", "start = min(group.rank * size, old.shape[dim])", "start = 0", PAIR),
    ("parallel/tensor.py", "+ size - (stop - start), PAD)", "+ size - (stop - start), OWN)", HOLDS),
    ("parallel/tensor.py", "kind = OWN if group.rank % each == 0 else COPY", "kind = OWN", HOLDS),
    ("parallel/tensor.py", "head, rows = group.rank // each", "head, rows = group.rank % heads", HOLDS),
    ("parallel/tensor.py", "linear._parameters[key].partial = Partial(head, heads)", "pass", FEW),
    ("parallel/tensor.py", "            if summed:\n", "            if False:\n", PAIR),
    ("parallel/tensor.py", "            if summed:\n", "            if True:\n", PAIR),
    ("parallel/tensor.py", 'replicated=("tp",))', "replicated=())", CLIP),
    ("parallel/tensor.py", "    model.tie()\n", "", FEW),
    # What travels
    ("parallel/tensor.py", "else comm_grad.fan_in(part, group)", "else part", PAIR),
    ("parallel/tensor.py", "comm_grad.reduce_scatter(part, group, dim=1) if sp", "part.chunk(group.size, 1)[group.rank] if sp", PAIR),
    ("parallel/tensor.py", "whole if layer.bias is None else whole + layer.bias", "whole", PAIR),
    ("parallel/tensor.py", "return whole if layer.bias is None else whole + layer.bias", "return whole if layer.bias is None else whole + group.size * layer.bias", PAIR),
    ("parallel/tensor.py", "comm.all_gather(x.detach(), group, dim=1).contiguous() if sp else x", "x.repeat(1, group.size, 1) if sp else x", PAIR),
    ("parallel/tensor.py", "            part += grad @ weight", "            pass", PAIR),
    ("parallel/tensor.py", "gathering.wait() if gathering else x", "x.repeat(1, ctx.group.size, 1) if gathering else x", PAIR),
    ("parallel/tensor.py", "group, sp, sp and regather, later", "group, sp, False, later", BYTES),
    ("parallel/tensor.py", "summing = comm.all_reduce(part, ctx.group, async_op=True)", 'summing = type("Here", (), {"wait": lambda self: part})()', PAIR),
    ("parallel/tensor.py", "return summing.wait(), None", "return part, None", PAIR),
    ("parallel/tensor.py", "        of_weights = ", "        summing.wait()\n        of_weights = ", T + "test_the_input_gradient_travels_while_the_weight_gradient_is_computed"),
    ("parallel/tensor.py", "            summing = comm.all_reduce(part, ctx.group, async_op=True)", "            summing = type('Dropped', (), {'wait': lambda self, work=comm.all_reduce(part, ctx.group, async_op=True): part})()", LATE),
    # The vocabulary
    ("parallel/vocabulary.py", "found.masked_fill(elsewhere[..., None], 0.0)", "found", SAME),
    ("parallel/vocabulary.py", "local = tokens - group.rank * layer.weight.shape[0]", "local = tokens", SAME),
    ("parallel/vocabulary.py", "        wide[:, max(vocab - start, 0) :] = -torch.inf\n", "", PADDING),
    ("parallel/vocabulary.py", 'comm.all_reduce(wide.amax(1), group, "max")', "wide.amax(1)", ENTROPY),
    ("parallel/vocabulary.py", "comm.all_reduce(torch.stack([wide.sum(1), hit]), group)", "torch.stack([wide.sum(1), hit])", ENTROPY),
    ("parallel/vocabulary.py", ".masked_fill(~own, 0.0)  # the", "  # the", ENTROPY),
    ("parallel/vocabulary.py", ".masked_fill(~valid, 0.0).sum()", ".sum()", ENTROPY),
    ("parallel/vocabulary.py", "probabilities * valid[:, None]", "probabilities.clone()", ENTROPY),
    ("parallel/vocabulary.py", "torch.promote_types(logits.dtype, torch.float32), copy=True)", "logits.dtype, copy=True)", ENTROPY),
    ("parallel/vocabulary.py", "(of_logits * grad)", "of_logits", ENTROPY),
    ("parallel/vocabulary.py", "dim=logits.dim() - 1)[..., :vocab]", "dim=logits.dim() - 1)", "train/test_generate.py train/test_evaluate.py"),
    # What counts once
    ("parallel/replicas.py", "            place[partial.which] = local", "            place[0] = local", FEW),
    ("parallel/replicas.py", "            local.copy_(summed.view(partial.count, -1)[partial.which])", "            pass", P + "test_like_one_process"),
    ("train/step.py", "        self.replicas.sum()\n", "", SAME),
    ("train/step.py", '        if self.mesh.coordinates["tp"]:\n', "        if False:\n", SAME),
    ("train/step.py", 'index = index.chunk(self.mesh.group("tp").size)[self.mesh.group("tp").rank]', "pass", SAME),
    ("train/step.py", "call.routing.factor = self.scale.value / max(counted, 1)", "pass", "parity/test_expert.py::test_like_one_process"),
    ("parallel/parallelize.py", "owner_among=lambda record, rank: first_of(layout, record, rank),", "", CLIP),
    ("parallel/parallelize.py", "dict.fromkeys(record.replicated, 0)", "{}", CLIP),
    ("parallel/parallelize.py", "sp=layout.sp, regather=layout.sp_regather, later=later", "later=later", "parity/test_expert.py::test_with_other_parallelisms " + BYTES),
    ("parallel/units.py", '        if hasattr(parameter, "over"):', "        if False:", "parity/test_expert.py::test_like_one_process"),
    ("parallel/zero.py", "self.elsewhere[over] if over else self.sharing", "self.sharing", "parity/test_expert.py::test_like_one_process"),
]  # fmt: skip
