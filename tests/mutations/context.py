"""Faults of context parallelism and its attention; test_mutations.py says how they are run."""

T = "parallel/test_context.py::"
SAME, CUT, WALK = (
    T + "test_output_and_gradients_are_those_of_one_process",
    T + "test_a_shard_is_cut_alike_and_knows_where_it_is",
    T + "test_a_token_changes_later_rows_of_its_own_document_only",
)
BACK = "model/test_attention.py::test_backward_of_a_causal_block_after_a_full_one"
TWO = "model/test_attention.py::test_backward_of_two_shards_adds_up_to_the_whole"
FLIGHT = T + "test_the_next_block_is_on_its_way_before_work_on_this_one_begins"

MUTATIONS = [
    ("parallel/ring.py", "arriving = pass_on(travelling, group) if step > 1 else None", "arriving = None", SAME),
    ("parallel/ring.py", "travelling = part.add_(arriving()) if arriving else part", "travelling = part", SAME),
    ("parallel/ring.py", "own += pass_on(travelling, group)()", "pass", SAME),
    ("parallel/ring.py", "own += pass_on(travelling, group)()", "own += travelling", SAME),
    ("parallel/ring.py", "            arriving = pass_on(travelling, group) if step > 1 else None\n            part = backward(grad, block, dq, saved, group)\n", "            part = backward(grad, block, dq, saved, group)\n            arriving = pass_on(travelling, group) if step > 1 else None\n", FLIGHT),
    ("parallel/ring.py", "        arriving = pass_on(kv, group)\n        yield place, kv\n        kv = arriving()\n", "        yield place, kv\n        kv = pass_on(kv, group)()\n", FLIGHT),
    ("parallel/ring.py", 'works = comm.exchange([("send", x, after), ("recv", torch.empty_like(x), before)], group, async_op=True)\n    return lambda: [work.wait() for work in works][1]', 'got = torch.empty_like(x)\n    works = comm.exchange([("send", x, after), ("recv", got, before)], group, async_op=True)\n    return lambda: (works, got)[1]', T + "test_what_is_not_waited_for_is_not_there"),
    ("parallel/ring.py", "after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size", "after, before = (group.rank - 1) % group.size, (group.rank + 1) % group.size", SAME),
    ("parallel/ring.py", "[(group.rank - step) % group.size for step", "[(group.rank + step) % group.size for step", SAME),
    ("parallel/ring.py", "for place in (group.rank, other))", "for place in (other, group.rank))", SAME),
    ("parallel/ring.py", "    if documents is None:\n", "    if True:\n", SAME),
    ("parallel/ring.py", "dq[:, :, queries] += more", "dq[:, :, queries] = more", SAME),
    ("parallel/ring.py", "part[0, :, :, keys], part[1, :, :, keys] = dk, dv", "part[1, :, :, keys], part[0, :, :, keys] = dk, dv", SAME),
    ("parallel/ring.py", "torch.promote_types(x.dtype, torch.float32)", "x.dtype", T + "test_bytes_are_those_of_the_closed_forms"),
    ("parallel/ring.py", "own = comm.reduce_scatter(parts, group)[0]", "own = parts[group.rank]", SAME),
    ("parallel/zigzag.py", "return slice(None), slice(half), False", "return slice(None), slice(None), False", SAME),
    ("parallel/zigzag.py", "return slice(half, None), slice(None), False", "return slice(None), slice(None), False", SAME),
    ("parallel/zigzag.py", "return slice(None), slice(None), True", "return slice(None), slice(None), False", SAME),
    ("parallel/zigzag.py", "if other < mine:", "if other > mine:", T + "test_blocks_hold_every_pair_once_and_no_other"),
    ("parallel/zigzag.py", "torch.cat((parts[rank], parts[-1 - rank]), -1)", "torch.cat((parts[-1 - rank], parts[rank]), -1)", T + "test_targets_are_shifted_before_the_cut"),
    ("parallel/zigzag.py", "chunks = 2 * n if zigzag else n", "chunks = 2 * n", T + "test_targets_are_shifted_before_the_cut"),
    ("parallel/ulysses.py", "math.lcm(k.shape[1], group.size)", "k.shape[1]", SAME),
    ("parallel/ulysses.py", "x.repeat_interleave(kv_heads // x.shape[1], 1)", "x.repeat(1, kv_heads // x.shape[1], 1, 1)", SAME),
    ("parallel/ulysses.py", "for x in (q, k, v)], 1), documents)", "for x in (q, k, v)], 1))", SAME),
    ("parallel/ulysses.py", "back = comm_grad.all_to_all(out.unflatten(2, (n, -1)).movedim(2, 0), group, tag=\"act\")", "back = out.unflatten(2, (n, -1)).movedim(2, 0)", SAME),
    ("parallel/ulysses.py", "got.permute(1, 2, 0, 3, 4).flatten(2, 3)", "got.permute(1, 2, 3, 0, 4).flatten(2, 3)", SAME),
    ("parallel/context.py", '("tokens", "targets", "positions", "index")', '("tokens", "targets", "positions")', CUT),
    ("parallel/context.py", '("tokens", "targets", "positions", "index")', '("tokens", "targets", "index")', CUT),
    ("parallel/context.py", '("tokens", "targets", "positions", "index")', '("tokens", "positions", "index")', CUT),
    ("parallel/context.py", 'group.rank, how != "ulysses")', "group.rank, True)", WALK),
    ("parallel/context.py", "for block in model.blocks:", "for block in model.blocks[:1]:", WALK),
    ("parallel/context.py", "heads % (cp * tp)", "heads % cp", T + "test_heads_that_cannot_be_shared_are_refused_with_the_numbers"),
    ("model/attention.py", ".sum(2) for x in (dk, dv))", ".mean(2) for x in (dk, dv))", TWO),
    ("model/attention.py", "    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row that saw nothing", "    # a row that saw nothing", TWO),
    ("model/attention.py", " - (grad * out).sum(-1, keepdim=True)", "", BACK),
    ("model/attention.py", "dscores = weights * towards * scale", "dscores = weights * towards", BACK),
    ("model/attention.py", "grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=bias", "grad, q, k, v, out, lse, 0.0, False, attn_mask=bias", BACK),
    ("model/attention.py", "grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=bias", "grad, q, k, v, out, lse, 0.0, causal and mask is None", TWO),
    ("train/step.py", 'shard(batch, self.mesh.group("cp"), self.layout.cp_attention)', "batch", "parity/test_context.py::test_like_one_process"),
    ("parallel/parallelize.py", 'context.apply(model, mesh.group("cp"), layout.cp_attention)', "pass", "parity/test_context.py::test_like_one_process"),
    ("parallel/parallelize.py", 'context.apply(model, mesh.group("cp"), layout.cp_attention)', 'context.apply(model, mesh.group("cp"))', "parity/test_context.py::test_like_one_process"),
    ("train/evaluate.py", 'shard(batch, mesh.group("cp"), mesh.layout.cp_attention)', "batch", "train/test_context.py"),
    ("train/generate.py", 'shard(batch, mesh.group("cp"), layout.cp_attention)', "batch", "train/test_context.py"),
    ("train/generate.py", 'for name in ("cp", "pp"):', 'for name in ("pp",):', "train/test_context.py"),
]  # fmt: skip
