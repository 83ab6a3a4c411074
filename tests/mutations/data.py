"""Faults of data parallelism, ZeRO, precision, the step and what they stand on; test_mutations.py says how they are run."""

NOTHING = 'type("Nothing", (), {"wait": lambda self: None})()'  # a Work that has sent nothing

# Where the tests of an entry are: short names for what many share.
SUMS = "parallel/test_zero.py::test_unequal_pieces_weigh_by_their_tokens"
MICRO = "parallel/test_zero.py::test_every_micro_batch_is_in_the_sum_in_every_step"
BRANCHES = "parallel/test_zero.py::test_branches_taken_by_some_ranks"
AWKWARD = "parallel/test_zero.py::test_tied_frozen_scalar_empty_and_unused_parameters"
LATE = "parity/test_zero.py::test_what_is_not_waited_for_is_not_there"
COPIES = "parallel/test_zero.py::test_copies_of_the_state_stay_equal"
BYTES = "parallel/test_traffic.py::test_bytes_of_a_step"
GATHERS = "parallel/test_traffic.py::test_gathers_run_one_unit_ahead_and_two_are_live"
OVERLAP = "parallel/test_traffic.py::test_reductions_start_while_backward_runs"
PASS = "parallel/test_gather.py::test_a_pass_without_backward_frees_everything"
KEPT = "parallel/test_gather.py::test_kept_weights_are_freed_as_backward_passes_them"
RENEWED = "parallel/test_gather.py::test_new_weights_are_gathered_after_a_forward_that_no_backward_followed"
FAILED = "parallel/test_gather.py::test_a_forward_that_fails_leaves_nothing_behind"
TWIN = "parallel/test_gather.py::test_no_gather_queues_behind_a_reduction"
PATHS = "parallel/test_gather.py::test_paths_that_differ_by_rank"
FAR = "parallel/test_gather.py::test_paths_that_have_little_in_common"
LEFT_OUT = "parallel/test_gather.py::test_after_backward_may_be_left_out"
ALL = "parallel/test_zero.py::test_all_is_in_the_sum_however_backwards_are_announced"
UNWRITTEN = "parallel/test_zero.py::test_nothing_is_summed_that_was_not_written"
HYBRID = "parity/test_zero.py::test_hybrid_sharding"
PARITY = "parity/test_zero.py::test_like_one_process"
SKIP = "train/test_step.py::test_one_non_finite_gradient_on_one_rank_stops_the_update_on_all"
CLIP = "train/test_step.py::test_clipping_by_the_norm_of_the_whole_gradient"
ADAMW = "train/test_step.py::test_twenty_adamw_steps_in_fp32_are_torchs"
SCALED = "train/test_precision.py::test_the_limit_is_compared_with_the_unscaled_norm"
SCALE = "train/test_precision.py::test_the_scale_moves_in_float16_only_and_has_no_upper_end"
WIDE = "train/test_precision.py::test_gradients_are_summed_in_fp32_unless_asked_otherwise"
MASTERS = "train/test_precision.py::test_bf16_weights_move_because_their_master_does"
MOMENTS = "train/test_precision.py::test_moments_are_kept_as_the_setting_says"
ROUNDINGS = "train/test_precision.py::test_like_one_process_with_the_same_roundings"
UNIT = "train/test_optim.py::test_a_unit_is_updated_like_its_parameters_one_by_one"

MUTATIONS = [
    # file, what stands there, what is put there, tests of which one must fail
    # What is sent
    ("parallel/zero.py", 'comm.all_reduce(carrier, unit.sharing.group, tag="grad", async_op=True)', NOTHING, SUMS),
    ("parallel/zero.py", 'comm.reduce_scatter(carrier, unit.sharing.group, out=carrier[a:b], tag="grad", async_op=True)', NOTHING, SUMS),
    ("parallel/zero.py", 'comm.all_reduce(carrier, replicas, tag="grad", async_op=True)', NOTHING, HYBRID),
    ("parallel/zero.py", "        if replicas and last:", "        if replicas:", HYBRID),
    ("parallel/zero.py", "            carrier = unit.total.to(self.formats.reduce)\n", "            carrier = unit.total\n", COPIES),
    ("parallel/zero.py", 'comm.broadcast(flat, group, src=0, tag="weight")', "pass", AWKWARD),
    ("parallel/zero.py", "(unit.sharing.replicas, unit.sharing.group)", "(unit.sharing.group,)", COPIES),
    ("parallel/zero.py", "        if self.stage in (1, 2):", "        if self.stage == 1:", AWKWARD),
    ("parallel/zero.py", "        if self.stage in (1, 2):", "        if self.stage == 2:", AWKWARD),
    ("parallel/zero.py", "        if self.stage in (1, 2):", "        if self.stage >= 1:", BYTES),
    ("parallel/gather.py", 'comm.all_gather(unit.shard, group, out=unit.allocate(), tag="weight", async_op=True)', f"(unit.allocate(), {NOTHING})[1]", AWKWARD),
    ("parallel/gather.py", "unit.sharing.gathers or unit.sharing.group", "unit.sharing.group", TWIN),
    ("parallel/parallelize.py", 'replicas=mesh.group("replicate") if layout.zero else None', "replicas=None", HYBRID),
    ("parallel/parallelize.py", 'mesh.group("shard" if layout.zero else "dp_cp")', 'mesh.group("dp_cp")', HYBRID),
    ("train/step.py", 'comm.all_reduce(report, self.mesh.world, tag="control")', "report", "train/test_step.py"),
    ("train/step.py", 'group = self.mesh.group("dp_cp")', 'group = self.mesh.group("tp")', "parity/test_stage0.py"),
    # When: reductions
    ("parallel/zero.py", "if self.stage >= 2 or self._is_last(unit)]", "if self.stage >= 1 or self._is_last(unit)]", MICRO),
    ("parallel/zero.py", "if self.stage >= 2 or self._is_last(unit)]", "if self.stage >= 3 or self._is_last(unit)]", MICRO),
    ("parallel/zero.py", "if self.stage >= 2 or self._is_last(unit)]", "if True or self._is_last(unit)]", MICRO),
    ("parallel/zero.py", "            self._waiting[unit.name].discard(name)\n            self._launch_ready()", "            pass", OVERLAP),
    ("parallel/zero.py", "            if not self._complete(unit):", "            if False:", BRANCHES),
    ("parallel/zero.py", "        if self._walking and self._walking.in_order:", "        if False:", FAR),
    ("parallel/zero.py", "        if self._walking and self._walking.in_order:", "        if self._walking:", "parallel/test_gather.py"),
    ("parallel/zero.py", "            self._walking.end_backward()\n        self._reduce_rest()", "            self._walking.end_backward()", LEFT_OUT),
    ("parallel/zero.py", "if unit.name not in self._reduced], 0", "if False], 0", ALL),
    ("parallel/zero.py", "        self.after_backward()\n        self._open = part", "        self._open = part", LEFT_OUT),
    ("parallel/zero.py", "            self._land()  # one buffer", "            pass  # one buffer", "train/test_memory.py"),
    ("parallel/zero.py", "        if done:", "        if False:", "parallel/test_zero.py::test_a_gradient_that_comes_after_its_reduction_is_an_error_not_a_wrong_number"),
    # Waits
    ("parallel/zero.py", "        work.wait()\n        part", "        part", LATE),
    ("parallel/zero.py", "            work.wait()\n            _put", "            _put", LATE),
    ("parallel/zero.py", "        for work in self._publishing:\n            work.wait()", "        pass", LATE),
    ("parallel/gather.py", "                self._live[unit.name][1].wait()", "                pass", LATE),
    ("parallel/gather.py", "            work.wait()\n            unit.free()", "            unit.free()", FAILED),
    # Gradients: zero, sum, copy
    ("parallel/zero.py", "            unit.clear_gradients()", "            pass", MICRO),
    ("parallel/units.py", "        self._begun.clear()", "        pass", MICRO),
    ("parallel/units.py", "                    self.grads[a:b].zero_()", "                    pass", UNWRITTEN),
    ("parallel/units.py", "            self.grads.untyped_storage().resize_(0)", "            pass", MICRO),
    ("parallel/units.py", "            self.grads.add_(part)", "            self.grads.copy_(part)", MICRO),
    ("parallel/units.py", "            self.grads.copy_(part)", "            self.grads.add_(part)", UNWRITTEN),
    ("parallel/zero.py", "            unit.total.copy_(part)", "            pass", WIDE),
    ("parallel/units.py", "(place.add_ if name in self._begun else place.copy_)", "place.copy_", MICRO),
    ("parallel/units.py", "(place.add_ if name in self._begun else place.copy_)", "place.add_", MICRO),
    ("parallel/zero.py", "            grad, parameter.grad = parameter.grad, None", "            grad = parameter.grad", MICRO),
    ("parallel/units.py", "                carrier[a:b].zero_()", "                pass", UNWRITTEN),
    ("parallel/units.py", "        carrier[self.numel :].zero_()", "        pass", UNWRITTEN),
    ("parallel/units.py", "self.grads.to(self.formats.reduce)", "self.grads", WIDE),
    ("parallel/units.py", "self.padded, dtype=self.formats.reduce)", "self.padded, dtype=self.formats.weights)", WIDE),
    ("parallel/zero.py", "        into.copy_(value)", "        pass", COPIES),
    ("parallel/units.py", "grad = self.arrived.pop(name, None)", "grad = self.arrived.get(name)", MICRO),
    ("parallel/units.py", "carrier[a:b].view_as(grad).copy_(grad)", "carrier[a:b].zero_()", MICRO),
    # Weights: published, gathered, freed
    ("parallel/zero.py", "            unit.shard.copy_(unit.master)", "            pass", MASTERS),
    ("parallel/zero.py", "            gather.forget()", "            pass", RENEWED),
    ("parallel/gather.py", "            unit.free()", "            pass", GATHERS),
    ("parallel/units.py", "            return\n        self.weights.untyped_storage().resize_(0)", "            return", GATHERS),
    ("parallel/units.py", "            parameter.data = parameter.data.new_empty(0)", "            pass", PASS),
    ("parallel/units.py", "            parameter.data = self._views[name]", "            pass", AWKWARD),
    ("parallel/gather.py", "        self._release(self.throughout, here, ahead, self._to_come())", "        pass", GATHERS),
    ("parallel/gather.py", "            self._walk_out()\n            self._release()\n\n    def forget", "            self._walk_out()\n\n    def forget", GATHERS),
    ("parallel/gather.py", "            yield\n        finally:\n            self._release()", "            yield\n        finally:\n            pass", PASS),
    ("parallel/gather.py", "        if not self._keeping:\n            self._release", "        if False:\n            self._release", PASS),
    ("parallel/gather.py", "len(self.sites) - 1) if torch.is_grad_enabled() else [])", "len(self.sites) - 1))", PASS),
    ("parallel/gather.py", "len(self.sites) - 1) if torch.is_grad_enabled() else [])", "-1))", BYTES),
    ("parallel/gather.py", "            self._walk_out()\n            self._release()\n        self._walked", "            pass\n        self._walked", LEFT_OUT),
    # The walk
    ("parallel/gather.py", "        for unit in (*here, *ahead):", "        for unit in here:", GATHERS),
    ("parallel/gather.py", "self._used(self._at + self._direction)\n        self._release", "self._used(self._at + 2 * self._direction)\n        self._release", GATHERS),
    ("parallel/gather.py", "self._used(self._at + self._direction)\n        self._release", "self._used(self._at - self._direction)\n        self._release", GATHERS),
    ("parallel/gather.py", "        while (k - self._at) * self._direction > 0:", "        if (k - self._at) * self._direction > 0:\n            self._at = k - self._direction", PATHS),
    ("parallel/gather.py", "        if k != self._at:", "        if False:", "parallel/test_gather.py::test_a_module_called_again_after_the_walk_has_gone_on"),
    ("parallel/gather.py", "        self._announce(out, lambda: None)\n        self._walk_out()", "        self._announce(out, lambda: None)", "parallel/test_gather.py::test_any_path_on_any_rank_without_gradients"),
    ("parallel/gather.py", "weights of its own\n            self._walk_out()", "weights of its own", PATHS),
    ("parallel/gather.py", "        if not self._walked:\n            self._begin(BACKWARD)", "        pass", "parallel/test_gather.py::test_a_rank_without_a_backward"),
    ("parallel/gather.py", "            self._announce(out, lambda: self._enter(k))", "            pass", PARITY),
    ("parallel/gather.py", "self.keep and (direction == BACKWARD or torch.is_grad_enabled())", "False", BYTES),
    ("parallel/gather.py", "self.keep and (direction == BACKWARD or torch.is_grad_enabled())", "True", BYTES),
    ("parallel/gather.py", "self.keep and (direction == BACKWARD or torch.is_grad_enabled())", "self.keep", PASS),
    ("parallel/gather.py", "self.keep and (direction == BACKWARD or torch.is_grad_enabled())", "self.keep and torch.is_grad_enabled()", BYTES),
    ("parallel/gather.py", "return self.units if self._direction == FORWARD", "return self.units if True", KEPT),
    ("parallel/parallelize.py", "keep=not layout.reshard", "keep=False", BYTES),
    ("parallel/parallelize.py", 'gathers=mesh.twin("shard") if layout.zero == 3 else None', "gathers=None", TWIN),
    ("parallel/parallelize.py", "    apply(model, recompute or Recompute())", "    pass", "train/test_step.py::test_the_recompute_setting_reaches_the_blocks"),
    ("parallel/parallelize.py", "        offload=offload,", "        offload=False,", "train/test_memory.py"),
    ("parallel/parallelize.py", "        formats=formats or Formats(),", "        formats=Formats(),", "train/test_memory.py"),
    ("parallel/gather.py", 'mode="any"', 'mode="all"', "parallel/test_gather.py"),
    ("parallel/gather.py", "        elif not all(unit.live for unit in self.sites[k]):", "        elif False:", "parallel/test_zero.py::test_at_stage_3_a_part_of_the_model_cannot_run_alone"),
    # Units: what lies where, and whose it is
    ("parallel/units.py", "        if seen[id(parameter)] > 1 or tied(parameter):", "        if False:", "parallel/test_zero.py"),
    ("parallel/units.py", "        if size <= room and not alone:", "        if size <= room:", "parallel/test_zero.py"),
    ("parallel/units.py", "            room -= size", "            pass", "parallel/test_zero.py"),
    ("parallel/units.py", "            room = -1 if alone else limit - size", "            room = limit - size", "parallel/test_zero.py"),
    ("parallel/parallelize.py", "        bucket=layout.bucket * 2**20,", "        bucket=0,", "parallel/test_traffic.py::test_gradients_travel_in_buckets"),
    ("parallel/units.py", "        if not parameter.requires_grad:", "        if False:", AWKWARD),
    ("parallel/units.py", "math.ceil(self.numel / shards) * shards", "self.numel", AWKWARD),
    ("parallel/units.py", "values(parameter.slice.cut(low - a, high - a))", "values(parameter.slice.cut(0, high - low))", PARITY),
    ("parallel/units.py", "for held in (self.shard,) if self.frozen else (self.shard, self.master):", "for held in (self.shard,):", ROUNDINGS),
    ("parallel/units.py", "            return group.ranks[0]", "            return group.ranks[group.rank]", CLIP),
    ("parallel/units.py", "replicas.ranks[0] if replicas else group.ranks[group.rank]", "group.ranks[group.rank]", CLIP),
    ("parallel/units.py", "replicas.ranks[0] if replicas else group.ranks[group.rank]", "group.ranks[0]", AWKWARD),
    ("parallel/zero.py", "record.cut(a, b)", "record.cut(0, b - a)", AWKWARD),
    ("parallel/zero.py", '("replicate",) if unit.sharing.replicas else ()', "()", "parallel/test_zero.py::test_records_say_who_else_holds_the_same"),
    ("train/norm.py", "if record.owner != rank or", "if", CLIP),
    ("train/norm.py", ".square().sum()", ".sum()", CLIP),
    ("parallel/parallelize.py", "random.normal(seed, record.name", "random.normal(seed + 1, record.name", PARITY),
    ("train/build.py", "    if mesh.layout != config.layout:", "    if False:", "train/test_step.py::test_a_mesh_of_another_layout_is_refused"),
    # The step: the one divisor, the scale, the norm, the skip
    ("train/step.py", " / max(tokens(), 1)", " / max(int(count_valid(calls[micro].batch.targets)), 1)", "parity/test_stage0.py"),
    ("train/step.py", "return loss * self.scale.value", "return loss", SCALED),
    ("train/step.py", "norm = math.sqrt(square) / scale if", "norm = math.sqrt(square) if", SCALED),
    ("train/step.py", "factor=self._clip(norm) / scale", "factor=self._clip(norm)", SCALED),
    ("train/step.py", "factor=self._clip(norm) / scale", "factor=1.0 / scale", CLIP),
    ("train/step.py", "return limit / norm if", "return limit / norm / self.mesh.world_size if", CLIP),
    ("train/step.py", "if limit and norm > limit else", "if limit else", CLIP),
    ("train/step.py", "        if not skipped:", "        if True:", SKIP),
    ("train/step.py", "not math.isfinite(square)", "square != square", SKIP),
    ("train/step.py", "            self.taken += 1", "            pass", SKIP),
    ("train/step.py", "            self.taken += 1", "            pass\n        self.taken += 1", SKIP),
    ("train/step.py", "        self.scale.step(skipped)", "        pass", "train/test_precision.py::test_an_overflow_on_one_rank_makes_all_skip_and_halve"),
    ("train/precision.py", "self.value /= 2", "self.value /= 4", SCALE),
    ("train/precision.py", "self.value * 2, 0", "self.value, 0", SCALE),
    ("train/precision.py", "self.value * 2, 0", "self.value * 2, self.good", SCALE),
    ("train/precision.py", "self.good = 0 if overflow else self.good + 1", "self.good += 1", SCALE),
    ("train/precision.py", "        if not self.moves:", "        if False:", SCALE),
    ("train/step.py", "            self.zero.publish(optimizer.unit)", "            pass", PARITY),
    ("train/step.py", "        self.zero.settle()", "        pass", LATE),
    # The optimizer
    ("train/optim.py", "            grad.mul_(factor)", "            pass", CLIP),
    ("train/optim.py", "        set_lr(self.optimizer, lr)\n", "", UNIT),
    ("train/optim.py", "        self._cast_moments(master.dtype)", "        pass", MOMENTS),
    ("train/optim.py", "        self._cast_moments(self.moments)", "        pass", MOMENTS),
    ("train/optim.py", "grad[segment.start : segment.start + len(segment.master)]", "grad[: len(segment.master)]", UNIT),
    ("train/optim.py", "((0, unit.matrices, True), (unit.matrices, unit.numel, False))", "((0, unit.numel, True),)", UNIT),
    ("train/optim.py", "Segment(unit.master[low - first : high - first], decay, low - first)", "Segment(unit.master[low - first : high - first], decay, low)", UNIT),
    # Batches, dropout, collectives
    ("data/batch.py", "start = position + sum(sizes[:dp_rank])", "start = position", "parity/test_stage0.py"),
    ("core/random.py", 'digest("dropout", key.seed, key.step, layer, site)', 'digest("dropout", key.seed, key.step, site)', "core/test_random.py"),
    ("core/comm.py", "return (x.cpu() if _staged(x, group) else x).contiguous()", "return x", "core/test_comm.py"),
    ("core/comm.py", "    if wire.check:\n        compare(line, group)", "", "core/test_check.py"),
    ("core/work.py", "            if wire.check:\n                compare(self.line, self._group)", "", "core/test_check.py"),
    ("core/comm_grad.py", "lambda g: comm.all_reduce(g.clone(), group, tag=tag))", "_same)", "core/test_comm_grad.py"),
]  # fmt: skip
