"""The mistakes: a line of the source, what it becomes, and the tests that must fail then.

Changes that are no mistakes, so that no test can notice them, are not planted:

- the maximum that softmax and cross entropy shift by as a minimum or any other number: the shift cancels, until exp()
  overflows, and large logits have tests of their own;
- `.contiguous()` before a product or in a tensor that has no holes: the values are the same, only a copy is spared;
- how far ahead a receive is posted on gloo: the messages are the same (`tests/parallel/pipeline/test_nccl_order.py`
  holds how far it may be on NCCL);
- weights in FP8 that are kept from one `keeping_weights` to the next inside it (`layer.kept or {}`): it ends with
  None;
- `ep` and `etp` left out of what a checkpoint says of its layout would change no number today: nothing draws from the
  stream of experts. They are planted, because the facts promise equal streams on every rank, which is tested;
- old checkpoints removed once more before a save: those that stay are the same, the newest among them;
- the dtype of kept memory of a background save not compared: a tensor of a run has one for ever;
- the pair of locks before a message's mark (`shared_memory.Message.close`): only a processor that reorders a write
  before reads, which none of those with x86 does, shows it.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        name: what is wrong.
        file: the source, from the project's root.
        before, after: text that occurs once, and what replaces it.
        tests: words for pytest; as few as notice it.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


_MASKS = "tests/models/test_dropout_masks.py"
_TWIN = "tests/parallel/test_serial_twin.py"
_EXPERTS = "tests/parallel/test_expert_twin.py"
_STEP = "tests/training/test_step.py"
_LET_GO = "tests/comm/test_shared_memory.py -k let_go"
_RANKS = "tests/training/test_checkpoint_ranks.py"
_POWER = "tests/checkpoint/test_power.py"
_STALE = "tests/parallel/data/test_stale.py"
_CONTEXT = "tests/layers/attention/test_context_parallel.py"
_DISPATCH = "tests/layers/moe/test_dispatch.py"
_ROUTER = "tests/layers/moe/test_router.py"
_MOE = "tests/layers/moe/test_layer.py"
_PIPELINE = "tests/parallel/pipeline/test_pipeline.py"
_PAGES, _SCHEDULER = "minimegatron/inference/block_manager.py", "minimegatron/inference/scheduler.py"
_CANARIES = "tests/inference/test_scheduler.py -k shared"
_PROPOSALS = "tests/inference/test_speculative.py -k pass_over_all"
_GRAMMAR = "tests/inference/test_grammar.py -k brute_force"
_SCAN, _MIXER, _PIECES, _CONV, _DELTA, _DELTA_NET = (
    f"minimegatron/layers/ssm/{name}.py"
    for name in ("scan", "mixer", "pieces", "convolution", "delta_rule", "gated_delta_net")
)
_OF_MIXER, _CHUNKS = "tests/layers/ssm/test_mixer.py", "tests/layers/ssm/test_scan.py -k recurrence"
_PACKED = f"{_OF_MIXER} -k packed"
_OF_HF = "tests/models/test_huggingface.py::test_logits[nemotron_h-1]"
_HYBRID_TP, _HYBRID_CP, _HYBRID_A2A = (f"tests/parallel/test_hybrid_twin.py::test_two_ranks[{i}]" for i in (1, 4, 5))
_STATES = "tests/inference/test_pages.py -k nemotron_h"
_OF_RULE, _OF_NET = "tests/layers/ssm/test_delta_rule.py", "tests/layers/ssm/test_gated_delta_net.py"
_CORRECTIONS, _OF_NEXT = f"{_OF_RULE} -k recurrence", "tests/models/test_huggingface.py::test_logits[qwen3_next-1]"
_DELTA_TP = "tests/parallel/test_hybrid_twin.py::test_two_ranks[9]"
_SINKS, _GPT_OSS_TWIN = "tests/layers/attention/test_sinks.py", "tests/parallel/test_expert_twin.py -k gpt_oss_on_two"
_RELATIVE, _HALVES, _SPANS = (
    f"minimegatron/{name}.py"
    for name in ("layers/attention/relative", "models/encoder_decoder", "data/span_corruption")
)
_OF_RELATIVE, _OF_SPANS = "tests/layers/attention/test_relative.py", "tests/data/test_span_corruption.py"
_T5, _ANSWERS = (f"tests/models/test_t5.py -k {words}" for words in ("every_gradient", "encodes_once"))
_T5_SP, _T5_CUT, _T5_AGAIN = (f"tests/parallel/test_encoder_decoder_twin.py::test_two_ranks[{i}]" for i in (1, 2, 3))
_GPT_OSS, _GEMMA3 = (f"tests/models/test_huggingface.py -k logits[{name}-1]" for name in ("gpt_oss", "gemma3"))
_BERT, _BERT_HEADS = "minimegatron/models/bert.py", "minimegatron/layers/bert_heads.py"
_BERT_DATA, _BERT_ROWS = "minimegatron/data/bert_dataset.py", "tests/data/test_bert_dataset.py"
_BERT_SP = "tests/parallel/test_bert_twin.py::test_two_ranks[0]"
_OF_BERT = "tests/models/test_bert.py -k gradients"
_SEES, _SEEN_ANSWERS = "tests/models/test_vision.py -k every_gradient", "tests/inference/test_pictures.py -k whole"
_SEES_SP, _SEES_CP, _CLIP_SP = (f"tests/parallel/test_vision_twin.py::test_two_ranks[{i}]" for i in (1, 2, 12))
_CLIP = "tests/models/test_llava.py -k every_gradient"
_LONE = "tests/models/test_huggingface.py -k lone_expert"
_GROUP, _COUNTED = "labkit/process_group.py", "tests/labkit/test_process_group.py -k not(gloo)"

MUTANTS = (
    # ------------------------------------------------------------------------------------------- random streams
    Mutant(
        "attention weights drop alike on all tp ranks", "minimegatron/layers/attention/core_attention.py",
        "rng, different_over_tp=True", "rng, different_over_tp=False", _MASKS,
    ),
    Mutant(
        "torch's attention draws from the replicas' stream", "minimegatron/layers/attention/core_attention.py",
        "with self.dropout.stream():\n            return F.scaled", "if True:\n            return F.scaled", _MASKS,
    ),
    Mutant(
        "the embedding drops alike under sequence parallelism", "minimegatron/models/decoder.py",
        "rng, different_over_tp=mesh.sequence_parallel", "rng, different_over_tp=False", _MASKS,
    ),
    Mutant(
        "the embedding drops differently on replicas", "minimegatron/models/decoder.py",
        "rng, different_over_tp=mesh.sequence_parallel", "rng, different_over_tp=True", _MASKS,
    ),
    Mutant(
        "a block drops alike under sequence parallelism", "minimegatron/models/block.py",
        "rng, different_over_tp=mesh.sequence_parallel", "rng, different_over_tp=False", _MASKS,
    ),
    Mutant(
        "a block drops differently on replicas", "minimegatron/models/block.py",
        "rng, different_over_tp=mesh.sequence_parallel", "rng, different_over_tp=True", _MASKS,
    ),
    Mutant(
        "tp left out of a seed", "minimegatron/comm/random.py", "of_data + 2718 + tp_rank", "of_data + 2718", _MASKS,
    ),
    Mutant(
        "a rank's place on tp left out", "minimegatron/comm/random.py", "tp_rank=mesh.tp.rank", "tp_rank=0", _MASKS,
    ),
    Mutant(
        "a rank's tokens left out of its seeds", "minimegatron/comm/random.py", "data_rank=mesh.dp_cp.rank",
        "data_rank=0", _MASKS,
    ),
    Mutant(
        "a router's jitter draws from the replicas' stream", "minimegatron/layers/moe/router.py",
        "with contextlib.nullcontext() if self.rng is None else self.rng.fork():", "with contextlib.nullcontext():",
        _MASKS,
    ),
    Mutant(
        "recomputation draws new numbers", "minimegatron/layers/recompute.py",
        "contextlib.nullcontext if rng is None else partial(rng.replay, rng.snapshot())", "contextlib.nullcontext",
        f"{_MASKS} tests/models/test_recompute.py",
    ),
    # ------------------------------------------------------------------------------------------- collectives, groups
    Mutant(
        "every reduction is a sum", "minimegatron/comm/transport.py",
        "dist.all_reduce(output, op=_OPS[op], group=axis.group, async_op=True)",
        'dist.all_reduce(output, op=_OPS["sum"], group=axis.group, async_op=True)', "tests/comm/test_collectives.py",
    ),
    Mutant(
        "that a rank waits is not known", "minimegatron/comm/async_ops.py", "    wait, waited = issue, issued\n", "",
        "tests/comm/test_async_ops.py",
    ),
    Mutant(
        "broadcast from rank 0 of the axis, whatever was asked", "minimegatron/comm/transport.py",
        "src=axis.ranks[src]", "src=axis.ranks[0]", "tests/comm/test_collectives.py",
    ),
    Mutant(
        "a gather whose gradient is not summed", "minimegatron/comm/collectives.py",
        "back = reduce_scatter if reduce_gradient else local_part", "back = local_part",
        "tests/comm/test_collectives.py",
    ),
    Mutant(
        "a gather whose gradient is always summed", "minimegatron/comm/collectives.py",
        "back = reduce_scatter if reduce_gradient else local_part", "back = reduce_scatter",
        "tests/comm/test_collectives.py",
    ),
    Mutant(
        "g writes into its input", "minimegatron/comm/collectives.py",
        "return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)",
        "return all_reduce(x.contiguous(), axis)", "tests/comm/test_collectives.py",
    ),
    Mutant(
        "f's backward sums nothing", "minimegatron/comm/collectives.py", "lambda grad: _sum_of_copies(grad, axis))",
        "lambda grad: grad.clone())", "tests/comm/test_collectives.py",
    ),
    Mutant(
        "tp_dp_cp is dp_cp", "minimegatron/comm/mesh.py", '"tp_dp_cp": ("dense", "tp-dp-cp")',
        '"tp_dp_cp": ("dense", "dp-cp")', "tests/comm/test_mesh.py",
    ),
    Mutant(
        "the embedding is shared with the wrong stage", "minimegatron/comm/mesh.py",
        "ends = [sorted({p[0], p[-1]}) for p in pipelines]",
        "ends = [sorted({p[0], p[1 % len(p)]}) for p in pipelines]", "tests/comm/test_mesh.py",
    ),
    Mutant(
        "a group without its deadline", "minimegatron/comm/mesh.py",
        "dist.new_group(list(ranks), timeout=timeout, group_desc=name)", "dist.new_group(list(ranks), group_desc=name)",
        "tests/comm/test_mesh.py",
    ),
    Mutant(
        "messages of both directions in one group", "minimegatron/comm/p2p.py",
        "return self._up if destination > source else self._down", "return self._up",
        "tests/comm/test_p2p.py tests/parallel/pipeline/test_nccl_order.py",
    ),
    Mutant(
        "a message with holes", "minimegatron/comm/p2p.py",
        "axis, x = self.edge(self.pp.rank, to), x.detach().contiguous()",
        "axis, x = self.edge(self.pp.rank, to), x.detach()", "tests/comm/test_p2p.py",
    ),
    Mutant(
        "messages are received in the order in which they are needed", "minimegatron/parallel/pipeline/plain.py",
        "message = incoming[source].popleft()", "message = needed", "tests/parallel/pipeline/test_stages.py",
    ),
    # ------------------------------------------------------------------------------------------- gradients
    Mutant(
        "partial gradients under sequence parallelism are not summed", "minimegatron/parallel/data/finalize.py",
        '"sequence": mesh.tp if mesh.sequence_parallel else None', '"sequence": None', f"{_TWIN} -k layouts",
    ),
    Mutant(
        "partial gradients of heads are not summed", "minimegatron/parallel/data/finalize.py", '"heads": mesh.tp,',
        '"heads": None,', f"{_TWIN} -k families",
    ),
    Mutant(
        "the norm of queries is taken for complete", "minimegatron/layers/attention/self_attention.py",
        'self.q_layernorm = Norm(config, self.d, partial="heads")',
        'self.q_layernorm = Norm(config, self.d, partial="")', f"{_TWIN} -k families",
    ),
    Mutant(
        "copies of a tied embedding are not summed", "minimegatron/parallel/data/finalize.py",
        "    sum_tied_gradients(model, mesh)\n    total", "    total", "tests/parallel/pipeline/test_pipeline.py",
    ),
    Mutant(
        "experts lie in the dense buffer", "minimegatron/parallel/data/ddp.py",
        "experts = [(n, p) for n, p in trainable if layout_of(p).experts is not None]",
        "experts, dense = [], trainable", "tests/layers/moe/test_layer.py",
    ),
    Mutant(
        "experts are summed over dp and cp", "minimegatron/parallel/data/ddp.py",
        "self.strategy.add_params(experts, mesh.edp_shard, mesh.edp_instances)",
        "self.strategy.add_params(experts, mesh.dp_shard, mesh.dp_instances)", _EXPERTS,
    ),
    Mutant(
        "weights still travel when the optimizer writes", "minimegatron/parallel/data/zero.py",
        "            weights.finish()  # those", "            pass  # those",
        "tests/parallel/data/test_gathers.py -k out_of_order",
    ),
    Mutant(
        "a factor reaches the dense gradients alone", "minimegatron/parallel/data/ddp.py", "buffer.multiply(factor)",
        "self.grad_buffers[0].multiply(factor)", f"{_STEP} -k divisor",
    ),
    Mutant(
        "a deferred gradient overwrites the one before", "minimegatron/layers/wgrad.py",
        "weight.grad = grad if weight.grad is None else weight.grad + grad", "weight.grad = grad",
        "tests/parallel/pipeline/test_stages.py",
    ),
    Mutant(
        "nothing is put off in a split backward pass", "minimegatron/layers/wgrad.py", "layer.wgrad_store = store",
        "pass", f"{_STALE} -k put_off",
    ),
    Mutant(
        "an expert that is cut is counted once for all its parts", "minimegatron/optim/clip.py",
        "and (layout.sharded or mesh.etp.is_first)", "and mesh.etp.is_first", f"tests/optim/test_clip.py {_STEP}",
    ),
    Mutant(
        "copies of experts are not compared", "minimegatron/layers/param.py", "(mesh.edp,)", "()",
        "tests/training/test_planted.py",
    ),
    # ------------------------------------------------------------------------------------------- the step
    Mutant(
        "penalties are not told the loss scale", "minimegatron/layers/moe/balance.py",
        "        set_loss_scale(self.model, scale)\n", "        pass\n", f"{_STEP} tests/training/test_experts.py",
    ),
    Mutant(
        "FP8 scales never move", "minimegatron/layers/fp8/enable.py", "        move_scales(self.model, self.mesh)\n",
        "        pass\n", "tests/layers/fp8/test_scaling.py",
    ),
    Mutant(
        "an evaluation leaves the step its FP8 weights", "minimegatron/layers/fp8/linear.py",
        "if self.kept is not None and self.training:", "if self.kept is not None:",
        "tests/training/test_evaluation.py -k experts",
    ),
    Mutant(
        "biases of experts never move", "minimegatron/layers/moe/balance.py",
        "            move_biases(self.model, self.load)\n", "            pass\n", f"{_STEP} -k bias",
    ),
    Mutant(
        "the loss is not divided by its divisor", "minimegatron/training/step.py",
        "optimizer.scale_loss(loss / divisor)", "optimizer.scale_loss(loss)", f"{_STEP} -k divisor",
    ),
    Mutant(
        "gradients are not multiplied by the divisor", "minimegatron/training/step.py",
        "        model.scale_gradients(divisor)\n", "        pass\n", f"{_STEP} -k divisor",
    ),
    Mutant(
        "tokens are counted in fp32", "minimegatron/training/step.py", "loss_mask.sum(dtype=torch.float64)",
        "loss_mask.sum()", f"{_STEP} -k fp32",
    ),
    # ------------------------------------------------------------------------------------------- FP8
    Mutant(
        "a latent's scale is of a rank's own tokens", "minimegatron/layers/attention/mla.py",
        "tokens = mesh.tp if mesh.sequence_parallel else ALONE", "tokens = ALONE", "tests/layers/fp8/test_linear.py",
    ),
    Mutant(
        "an expert's scale is of a rank's part of it", "minimegatron/layers/moe/layer.py",
        '{"input": ALONE, "weight": self.etp, "gradient": self.etp}',
        '{"input": ALONE, "weight": ALONE, "gradient": self.etp}', "tests/layers/fp8/test_linear.py",
    ),
    Mutant(
        "tp_only_amax_red is read the other way round", "minimegatron/layers/fp8/enable.py",
        '"tp_cp" if config.tp_only_amax_red else "tp_dp_cp"', '"tp_dp_cp" if config.tp_only_amax_red else "tp_cp"',
        "tests/layers/fp8/test_linear.py",
    ),
    Mutant(
        "weights in FP8 are kept beyond their step", "minimegatron/layers/fp8/enable.py",
        "            layer.kept = None\n", "            pass\n", "tests/layers/fp8/test_scaling.py",
    ),
    Mutant(
        "a NaN of one rank is lost among maxima", "minimegatron/layers/fp8/scaling.py",
        "now.nan_to_num_(nan=torch.inf, posinf=torch.inf)", "now.nan_to_num_(nan=0.0, posinf=torch.inf)",
        "tests/layers/fp8/test_linear.py tests/layers/fp8/test_scaling.py",
    ),
    # ------------------------------------------------------------------------------------------- models
    Mutant(
        "logits of a rank's own tokens only", "minimegatron/models/decoder.py",
        "return gather_tokens(logits[..., : self.config.vocab_size].transpose(0, 1), self.mesh, 1)",
        "return logits[..., : self.config.vocab_size].transpose(0, 1)", "tests/models/test_huggingface.py -k logits",
    ),
    Mutant(
        "Sinkhorn balances a rank's own tokens", "minimegatron/layers/moe/router.py",
        "(all_reduce(new_rows @ c, axis) + TINY)", "((new_rows @ c) + TINY)", "tests/layers/moe/test_router.py",
    ),
    Mutant(
        "loads of experts are summed over dp alone", "minimegatron/layers/moe/balance.py",
        "all_reduce(table, mesh.world)", "all_reduce(table, mesh.dp)", "tests/layers/moe/test_layer.py",
    ),
    Mutant(
        "all parameters start alike", "minimegatron/layers/logical.py",
        "_made(one_stream(name, seed, shape) * layout.init.std, layout)",
        '_made(one_stream("", seed, shape) * layout.init.std, layout)',
        "tests/layers/test_param.py",
    ),
    Mutant(
        "the sum of squares over all heads has a gradient of each rank alone", "minimegatron/layers/norm.py",
        "squares = c.copy_to_region(squares, self.tp)", "squares = squares",
        "tests/parallel/test_serial_twin.py -k caps_and_norms",
    ),
    Mutant(
        "a cap on scores has no slope", "minimegatron/kernels/blockwise.py",
        "            if softcap is not None:  # d tanh", "            if False:  # d tanh",
        "tests/kernels/test_blockwise.py -k capped",
    ),
    Mutant(
        "learned positions do not move with the tokens of a depth", "minimegatron/models/decoder.py",
        "self.mtp.rolled(position_ids, k) if learned else position_ids", "position_ids",
        "tests/golden/test_megatron_mtp.py",
    ),
    Mutant(
        "a head beside a tied embedding is dropped", "minimegatron/checkpoint/huggingface.py",
        "        _check_tied(theirs, name, tied[name])\n", "        pass\n",
        "tests/models/test_huggingface_config.py -k tied",
    ),
    Mutant(
        "unknown keys of a configuration are ignored", "minimegatron/models/families/family.py",
        "        keys.finish()\n", "", "tests/models/test_huggingface_config.py -k unknown",
    ),
    # -------------------------------------------------------------------------------------- conversion
    Mutant(
        "a config.json is written and not read back", "minimegatron/checkpoint/hf_config.py",
        "            differences_of[name] = differing(config, config_from_huggingface(keys_of_family)[1])\n",
        "            differences_of[name] = []\n", "tests/checkpoint/test_convert.py -k family",
    ),
    Mutant(
        "a key that a family does not have is read", "minimegatron/models/families/keys.py",
        "{k: v for k, v in self._given.items() if k in has}", "self._given",
        "tests/models/test_huggingface_config.py -k other_families",
    ),
    Mutant(
        "a share of rotated heads is read in a family that turns them whole",
        "minimegatron/models/families/llama_like.py", '"partial_rotary_factor", 1.0, f"is not',
        '"partial_rotary_factor", 0.5, f"is not', "tests/models/test_huggingface_config.py -k other_families",
    ),
    Mutant(
        "generate reads the corner of a larger tensor", "minimegatron/checkpoint/conversion.py",
        "    _, weights = checked(model, params_dtype)\n", "    weights = model.weights\n",
        "tests/checkpoint/test_continued.py -k larger",
    ),
    Mutant(
        "of two sets of weights the shards are read", "minimegatron/checkpoint/hf_folder.py",
        "    if single.exists() and second_set is not None and", "    if not second_set and",
        "tests/models/test_folder.py -k two_sets",
    ),
    Mutant(
        "the tokenizer of a run is not kept beside its checkpoints", "minimegatron/training/loading.py",
        "    return companions.keep(root, companions.of_run(given, files, token_ids))\n", '    return ""\n',
        "tests/checkpoint/test_export.py -k scratch",
    ),
    Mutant(
        "keys of all groups before their queries", "minimegatron/checkpoint/huggingface.py",
        "yield from ((0, group * queries, queries), (1, at_k + group * d, d), (2, at_v + group * d, d))",
        "yield from ((1, at_k + group * d, d), (0, group * queries, queries), (2, at_v + group * d, d))",
        "tests/inference/test_generate.py -k greedy",
    ),
    Mutant(
        "any name may be in Megatron's metadata", "minimegatron/checkpoint/torch_dist.py",
        "lambda name: name in _KNOWN or name in _DTYPES", "lambda name: True",
        "tests/checkpoint/test_megatron.py -k planted",
    ),
    Mutant(
        "what is put together is copied whole", "minimegatron/checkpoint/sources.py",
        "for block in blocks(common, dtype.itemsize):", "for block in [common]:",
        "tests/checkpoint/test_convert.py -k memory",
    ),
    # -------------------------------------------------------------------------------------- messages in memory
    Mutant(
        "terms of a reduce-scatter are let go of before they are added", "minimegatron/comm/gloo.py",
        "            _add_up([own.view(-1), *(message.view(own) for message in messages)], output.view(-1))\n"
        "            _close(messages)\n",
        "            views = [message.view(own) for message in messages]\n            _close(messages)\n"
        "            _add_up([own.view(-1), *views], output.view(-1))\n",
        _LET_GO,
    ),
    Mutant(
        "a shard changes while others read it", "minimegatron/comm/shared_memory.py",
        "    while not slot.free():\n", "    while False:\n",
        "tests/comm/test_shared_memory.py::test_a_tensor_that_is_sent_again_and_again_is_not_copied_and_changes_when_all"
        "_have_read_it",
    ),
    Mutant(
        "terms of an all-reduce are let go of before they are added", "minimegatron/comm/gloo.py",
        "            _add_up(terms, output.view(-1))\n            _close(messages.values())\n",
        "            _close(messages.values())\n            _add_up(terms, output.view(-1))\n",
        _LET_GO,
    ),
    Mutant(
        "a message is let go of before it is copied", "minimegatron/comm/shared_memory.py",
        "        ctypes.memmove(x.data_ptr(), _address(self._checked(x)) + HEAD, x.nbytes)\n        self.close()\n",
        "        memory = self._checked(x)\n        self.close()\n"
        "        ctypes.memmove(x.data_ptr(), _address(memory) + HEAD, x.nbytes)\n",
        _LET_GO,
    ),
    Mutant(
        "the first of several readers frees a slot", "minimegatron/comm/shared_memory.py",
        "return all(self.marks[reader]", "return not self.readers or any(self.marks[reader]",
        "tests/comm/test_shared_memory.py -k last_reader",
    ),
    Mutant(
        "a slot under way is taken again", "minimegatron/comm/shared_memory.py",
        "if slot.size >= HEAD + x.nbytes and slot.free()]", "if slot.size >= HEAD + x.nbytes]",
        "tests/comm/test_shared_memory.py -k late_reader",
    ),
    Mutant(
        "messages of all tags are one order", "minimegatron/comm/pipes.py",
        "self._letters[tag, self._come[tag]] =", "self._letters[tag, sum(self._come.values())] =",
        "tests/comm/test_pipes.py -k ticket",
    ),
    Mutant(
        "a receiver keeps the senders' ends open", "minimegatron/comm/pipes.py",
        "                inbox.close_end()\n\n    def expect", "                pass\n\n    def expect",
        "tests/comm/test_pipes.py -k end_of",
    ),
    # -------------------------------------------------------------------------------------- checkpoints
    Mutant(
        "few ranks hash as many files as they are", "minimegatron/training/loading.py",
        "[mesh.rank :: mesh.world.size]", "[mesh.rank : mesh.rank + 1]", f"{_RANKS} -k hashed",
    ),
    Mutant(
        "all ranks hash the same files", "minimegatron/training/loading.py",
        "[mesh.rank :: mesh.world.size]", "[:: mesh.world.size]", f"{_RANKS} -k hashed",
    ),
    Mutant(
        "a file in which a rank wants nothing is not hashed", "minimegatron/checkpoint/load.py",
        "dict.fromkeys([*hashed, *wanted])", "dict.fromkeys(wanted)", f"{_RANKS} -k hashed",
    ),
    Mutant(
        "each rank settles a save for itself", "minimegatron/training/checkpointing.py",
        "elif not _on_all(flight.ended, self.mesh):", "elif not flight.ended():", f"{_RANKS} -k every_rank",
    ),
    Mutant(
        "a save is over when it is over on one rank", "minimegatron/training/checkpointing.py",
        'not all_reduce(flag, mesh.world, "max").item()', 'not all_reduce(flag, mesh.world, "min").item()',
        f"{_RANKS} -k every_rank",
    ),
    Mutant(
        "each rank learns of its own part of a save", "minimegatron/training/checkpointing.py",
        "        on_all_ranks(flight.result, self.mesh.world)\n", "        flight.result()\n",
        f"{_RANKS} -k every_rank",
    ),
    Mutant(
        "the order of axes is no fact of a layout", "minimegatron/training/run_state.py",
        'return {**sizes, "order": mesh.parallel.order}', 'return {**sizes, "order": ParallelConfig().order}',
        f"{_RANKS} -k elsewhere",
    ),
    Mutant(
        "ep is no fact of a layout", "minimegatron/training/run_state.py",
        '("tp", "cp", "pp", "dp", "ep", "etp", "world")', '("tp", "cp", "pp", "dp", "etp", "world")',
        f"{_RANKS} -k facts",
    ),
    Mutant(
        "etp is no fact of a layout", "minimegatron/training/run_state.py",
        '("tp", "cp", "pp", "dp", "ep", "etp", "world")', '("tp", "cp", "pp", "dp", "ep", "world")',
        f"{_RANKS} -k facts",
    ),
    Mutant(
        "the names in a new checkpoint are not confirmed", "minimegatron/checkpoint/commit.py",
        "        sync(staged)\n", "        pass\n", _POWER,
    ),
    Mutant(
        "the name of a new checkpoint is not confirmed", "minimegatron/checkpoint/commit.py",
        "  # onto a folder that is not empty it fails\n        sync(root)\n",
        "  # onto a folder that is not empty it fails\n", _POWER,
    ),
    Mutant(
        "a name that was taken away is not confirmed", "minimegatron/checkpoint/commit.py",
        "            sync(root)  # nor", "            pass  # nor", _POWER,
    ),
    Mutant(
        "the bytes of a file are not confirmed", "minimegatron/checkpoint/disk.py", "        os.fsync(file.fileno())\n",
        "        pass\n", _POWER,
    ),
    Mutant(
        "a file is confirmed before all of it is written", "minimegatron/checkpoint/disk.py", "        file.flush()\n",
        "        pass\n", _POWER,
    ),
    Mutant(
        "the manifest is written after the rename", "minimegatron/checkpoint/commit.py",
        "    write_bytes(staged / NAME, text)\n"
        "    final = folder_of(root, manifest.step)\n    with disk(final):\n"
        "        sync(staged)\n        os.rename(staged, final)",
        "    final = folder_of(root, manifest.step)\n    with disk(final):\n"
        "        sync(staged)\n        os.rename(staged, final)\n"
        "        write_bytes(final / NAME, text)",
        _POWER,
    ),
    Mutant(
        "a converted folder is not confirmed", "minimegatron/checkpoint/disk.py", "            sync_all(hidden)\n",
        "            pass\n", _POWER,
    ),
    # -------------------------------------------------------------------------------------- what was a moment ago
    Mutant(
        "a shard without a gradient keeps its sum", "minimegatron/parallel/data/grad_buffer.py",
        "                bucket.owned.zero_()\n", "                pass\n", f"{_STALE} -k part_without",
    ),
    Mutant(
        "a shard adds to the sum of the step before", "minimegatron/parallel/data/grad_buffer.py",
        "            bucket.empty = True\n", "            pass\n", f"{_STALE} -k part_without",
    ),
    Mutant(
        "the number of tokens is rounded to bf16", "minimegatron/parallel/data/finalize.py",
        "torch.where(total > 0, total, torch.ones_like(total))",
        "torch.where(total > 0, total, torch.ones_like(total)).bfloat16()", f"{_STALE} -k 16_bits",
    ),
    Mutant(
        "the number of tokens is rounded to the gradients' dtype", "minimegatron/parallel/data/grad_buffer.py",
        "exact = torch.promote_types(part.dtype, torch.float32)", "exact = part.dtype",
        "tests/optim/test_states_ranks.py -k number_of_tokens",
    ),
    Mutant(
        "FSDP2's gradients are divided by a rounded number", "minimegatron/parallel/data/torch_fsdp.py",
        "grad.div_(divisor.to(grad.dtype))", "grad.div_(divisor.to(torch.bfloat16))", f"{_STALE} -k 16_bits",
    ),
    Mutant(
        "tokens of all ranks are added up in fp32", "minimegatron/parallel/data/finalize.py",
        "num_tokens.detach().to(torch.float64).clone()", "num_tokens.detach().to(torch.float32).clone()",
        f"{_STALE} -k fp32_counts",
    ),
    Mutant(
        "tokens are added up over dp alone", "minimegatron/parallel/data/finalize.py", "clone(), mesh.dp_cp)",
        "clone(), mesh.dp)", f"{_STALE} -k fp32_counts",
    ),
    Mutant(
        "whole weights are not waited for", "minimegatron/parallel/data/zero.py",
        "            weights.finish()\n        yield", "            pass\n        yield", f"{_STALE} -k nobody",
    ),
    Mutant(
        "weights stay gathered over an update", "minimegatron/parallel/data/zero.py",
        "        self.release_weights()  # what is gathered is old\n", "        pass\n", f"{_STALE} -k nobody",
    ),
    Mutant(
        "FSDP2's weights stay gathered over an update", "minimegatron/parallel/data/torch_fsdp.py",
        "        for part in self._parts:\n            part.reshard()\n\n    def shards",
        "        pass\n\n    def shards", f"{_STALE} -k nobody",
    ),
    Mutant(
        "a product that was added is remembered", "minimegatron/parallel/data/ddp.py",
        "added, self._added = self._added, False", "added = self._added", f"{_STALE} -k put_off",
    ),
    Mutant(
        "experts cross between the instances of the others", "minimegatron/parallel/data/ddp.py",
        "mesh.edp_shard, mesh.edp_instances)", "mesh.edp_shard, mesh.dp_instances)", f"{_STALE} -k varies_fastest",
    ),
    Mutant(
        "norms of queries and keys are summed with sp alone", "minimegatron/parallel/data/finalize.py",
        '"heads": mesh.tp,', '"heads": mesh.tp if mesh.sequence_parallel else None,', f"{_STALE} -k every_layout",
    ),
    Mutant(
        "of a tied matrix the larger gradient counts", "minimegatron/parallel/data/finalize.py",
        "all_reduce(shard.grad, mesh.axis(copies))", 'all_reduce(shard.grad, mesh.axis(copies), "max")',
        f"{_STALE} -k every_layout",
    ),
    Mutant(
        "a gather under way is forgotten", "minimegatron/parallel/data/param_buffer.py",
        "        if self._pending is not None:\n            self.require()\n        if self._gathered",
        "        if self._gathered", f"{_STALE} -k gather_from",
    ),
    Mutant(
        "weights that were looked at whole stay", "minimegatron/parallel/data/param_buffer.py",
        "            self._all_stay = False\n            self.end_pass()\n", "            self._all_stay = False\n",
        f"{_STALE} -k gather_from",
    ),
    Mutant(
        "weights outside of layers stay without a backward pass", "minimegatron/parallel/data/param_buffer.py",
        "stays = self._keep and torch.is_grad_enabled() and not", "stays = self._keep and not",
        f"{_STALE} -k gather_from",
    ),
    Mutant(
        "weights of layers without all gradients stay", "minimegatron/parallel/data/zero.py",
        "        super().end_pass()\n        self.release_weights()\n", "        super().end_pass()\n",
        f"{_STALE} -k gather_from",
    ),
    Mutant(
        "buckets but the last stay in their instance", "minimegatron/parallel/data/grad_buffer.py",
        "            self._started[-2].cross()\n", "            pass\n", f"{_STALE} -k varies_fastest",
    ),
    Mutant(
        "the largest through memory is a sum", "minimegatron/comm/gloo.py", 'if op != "sum" or not is_gloo(axis)',
        "if not is_gloo(axis)", "tests/comm/test_shared_memory.py -k no_sum",
    ),
    Mutant(
        "what passes change is copied after them", "minimegatron/training/checkpointing.py",
        "of_passes = self.state.changed_by_passes(tensors)", "of_passes = set[str]()", f"{_RANKS} -k copied",
    ),
    Mutant(
        "a run that is closed does not wait", "minimegatron/training/checkpointing.py",
        "            self._flight.join(self._patience)\n        if self._lock",
        "            pass\n        if self._lock", f"{_RANKS} -k closed",
    ),
    Mutant(
        "weights alone are not gathered", "minimegatron/training/run_state.py",
        "            self.optimizer.reload_model_params()\n        self.model.start_param_gather()\n",
        "            self.optimizer.reload_model_params()\n", f"{_RANKS} -k whole",
    ),
    Mutant(
        "one number has the stride of its table", "minimegatron/checkpoint/shard_file.py",
        "plain.as_strided((plain.numel(),), (1,))", "plain.view(-1)", f"{_RANKS} -k copied",
    ),
    # ------------------------------------------------------------------- context parallelism, experts, pipelines
    Mutant(
        "a block's gradient is not added when it comes home", "minimegatron/layers/attention/context_parallel.py",
        "        home += behind.pop().wait()\n", "        behind.pop().wait()\n", _CONTEXT,
    ),
    Mutant(
        "a rank on the ring drops what came before its part", "minimegatron/layers/attention/context_parallel.py",
        "part += behind.pop().wait()", "behind.pop().wait()", _CONTEXT,
    ),
    Mutant(
        "a block's gradient is added up in bf16", "minimegatron/layers/attention/context_parallel.py",
        "home = torch.zeros(kv.shape, dtype=lse.dtype", "home = torch.zeros(kv.shape, dtype=kv.dtype", _CONTEXT,
    ),
    Mutant(
        "keys from elsewhere are taken for this rank's", "minimegatron/layers/attention/context_parallel.py",
        "attend(joined, q, own, kv[0], kv[1], spans[owner], mask, scale, backend, softcap)",
        "attend(joined, q, own, kv[0], kv[1], own, mask, scale, backend, softcap)", _CONTEXT,
    ),
    Mutant(
        "gathered blocks stay in the order of ranks", "minimegatron/layers/attention/context_parallel.py",
        "for start in sorted(pieces)], -2)", "for start in pieces], -2)", _CONTEXT,
    ),
    Mutant(
        "gathered gradients go to other owners", "minimegatron/layers/attention/context_parallel.py",
        "for block_spans in spans])\n        dk", "for block_spans in reversed(spans)])\n        dk", _CONTEXT,
    ),
    Mutant(
        "heads come back in another order", "minimegatron/layers/attention/context_parallel.py",
        "arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)", "arrived.permute(1, 2, 3, 0, 4).flatten(2, 3)", _CONTEXT,
    ),
    Mutant(
        "key heads are copied in blocks, not each", "minimegatron/layers/attention/context_parallel.py",
        "(t.repeat_interleave(copies, 2) for t in (k, v))", "(t.repeat(1, 1, copies, 1) for t in (k, v))", _CONTEXT,
    ),
    Mutant(
        "positions of a cut sequence count from 0", "minimegatron/comm/sequence.py",
        "for a, b in rank_spans(s, mesh)])\n\n\ndef local", "for a, b in [(0, s // mesh.cp.size)]])\n\n\ndef local",
        _CONTEXT,
    ),
    Mutant(
        "document ids are cut with the tokens", "minimegatron/comm/sequence.py",
        'NOT_CUT = ("document_ids", "pixels", "patches")', 'NOT_CUT = ("pixels", "patches")',
        "tests/parallel/test_context_twin.py",
    ),
    Mutant(
        "the zigzag is cut into consecutive parts", "minimegatron/comm/sequence.py",
        "pair = [(r * n, (r + 1) * n), ((chunks - 1 - r) * n, (chunks - r) * n)]",
        "pair = [(2 * r * n, (2 * r + 1) * n), ((2 * r + 1) * n, (2 * r + 2) * n)]", _CONTEXT,
    ),
    Mutant(
        "rows travel back with the splits of the way there", "minimegatron/layers/moe/dispatch.py",
        "c.all_to_all_region(y, self.ep, splits.inp, splits.out)",
        "c.all_to_all_region(y, self.ep, splits.out, splits.inp)", _DISPATCH,
    ),
    Mutant(
        "rows of etp ranks come before those of ep", "minimegatron/layers/moe/dispatch.py",
        "for e in range(local) for i in range(p) for j in range(q)]",
        "for e in range(local) for j in range(q) for i in range(p)]", _DISPATCH,
    ),
    Mutant(
        "parts of an expert's output are not summed", "minimegatron/layers/moe/dispatch.py",
        "unflatten(0, (axis.size, length)).sum(0)", "unflatten(0, (axis.size, length))[0]", _DISPATCH,
    ),
    Mutant(
        "the experts of rank 0 on every rank", "minimegatron/layers/moe/dispatch.py",
        "return ep.rank * local, (ep.rank + 1) * local", "return 0, local", _DISPATCH,
    ),
    Mutant(
        "weights of chosen experts are the biased scores", "minimegatron/layers/moe/router.py",
        "        chosen = best(scores if bias is None else scores + bias, config)\n"
        "        weights = scores.gather(1, chosen)",
        "        scores = scores if bias is None else scores + bias\n"
        "        chosen = best(scores, config)\n"
        "        weights = scores.gather(1, chosen)",
        _ROUTER,
    ),
    Mutant(
        "a group is worth its best expert", "minimegatron/layers/moe/router.py", "grouped.topk(k // kept, -1)",
        "grouped.topk(1, -1)", _ROUTER,
    ),
    Mutant(
        "a capacity is rounded down", "minimegatron/layers/moe/router.py", "return math.ceil(wanted) if",
        "return int(wanted) if", _ROUTER,
    ),
    Mutant(
        "the router's gradient is taken for complete", "minimegatron/layers/moe/router.py",
        "init=Init(std=config.init_method_std), partial=\"sequence\"\n        )\n        self.weight",
        "init=Init(std=config.init_method_std)\n        )\n        self.weight", _EXPERTS,
    ),
    Mutant(
        "shares of a rank's own tokens", "minimegatron/layers/moe/router.py",
        "\"global_aux_loss\" else self.mesh.tp_cp)", "\"global_aux_loss\" else self.mesh.tp)", _ROUTER,
    ),
    Mutant(
        "the batch's loss forgets the microbatches before", "minimegatron/layers/moe/router.py",
        "counts = counts + self.tally[: self.num_experts]", "counts = counts + 0", _ROUTER,
    ),
    Mutant(
        "penalties enter without the loss scale", "minimegatron/layers/moe/router.py",
        "torch.full_like(penalties, ctx.router.loss_scale)", "torch.full_like(penalties, 1.0)", _ROUTER,
    ),
    Mutant(
        "statistics are counted in evaluations", "minimegatron/layers/moe/router.py",
        "if not (self.training and torch.is_grad_enabled()):", "if not torch.is_grad_enabled():", _ROUTER,
    ),
    Mutant(
        "sequences of a batch share their counts", "minimegatron/layers/moe/router.py",
        "counts = chosen.unflatten(0, (-1, b)).sum(0)", "counts = chosen.unflatten(0, (b, -1)).sum(1)", _ROUTER,
    ),
    Mutant(
        "the gate of shared experts is complete", "minimegatron/layers/moe/layer.py",
        "init=Init(std=config.init_method_std), partial=\"sequence\")\n            self.gate_weight",
        "init=Init(std=config.init_method_std))\n            self.gate_weight", _EXPERTS,
    ),
    Mutant(
        "halves of a gated expert are cut as one", "minimegatron/layers/moe/layer.py",
        "cut_evenly(halves * f, etp, f\"fc1 of an expert of {f}\", halves)",
        "cut_evenly(halves * f, etp, f\"fc1 of an expert of {f}\")", _EXPERTS,
    ),
    Mutant(
        "a token's rows overwrite each other", "minimegatron/kernels/plain.py", ".index_add(0, self._source, rows)",
        ".index_copy(0, self._source, rows)", _MOE,
    ),
    Mutant(
        "a bucket travels at its first gradient", "minimegatron/parallel/pipeline/stage.py",
        "    for action in reversed(row):\n        ended", "    for action in row:\n        ended", _PIPELINE,
    ),
    Mutant(
        "weights gradients of an unsplit backward wait", "minimegatron/parallel/pipeline/stage.py",
        "                if not split:\n                    compute_wgrads(self._deferred.pop(microbatch))\n", "",
        _PIPELINE,
    ),
    Mutant(
        "the last stage's output layer is on every stage", "minimegatron/models/chunks.py",
        "post_process=stage == last", "post_process=stage == last or stage == 0", _PIPELINE,
    ),
    Mutant(
        "backward slots count chunks from the front", "minimegatron/parallel/pipeline/schedules.py",
        "backward = [(i, v - 1 - chunk) for i, chunk in forward]", "backward = [(i, chunk) for i, chunk in forward]",
        _PIPELINE,
    ),
    Mutant(
        "one warm-up forward too many", "minimegatron/parallel/pipeline/schedules.py", "warmup=p - rank - 1) for rank",
        "warmup=p - rank) for rank", _PIPELINE,
    ),
    Mutant(
        "an interleaved rank warms up by one group less", "minimegatron/parallel/pipeline/schedules.py",
        "2 * (p - rank - 1) + (v - 1) * group", "(p - rank - 1) + (v - 1) * group", _PIPELINE,
    ),
    Mutant(
        "tokens of a pipeline are those of its last microbatch", "minimegatron/training/reports.py",
        "        self.tokens += num_tokens.detach()", "        self.tokens = num_tokens.detach().double()", _PIPELINE,
    ),
    Mutant(
        "reports of a pipeline are those of its last microbatch", "minimegatron/training/reports.py",
        "self.reports.get(name, 0.0) + pair", "0.0 + pair", _PIPELINE,
    ),
    Mutant(
        "sequence parallelism left out of what a stage expects", "minimegatron/models/decoder.py",
        "rows = s // mesh.tp.size if mesh.sequence_parallel else s", "rows = s", _PIPELINE,
    ),
    Mutant(
        "a microbatch is let go of at its first use", "minimegatron/training/pipelined.py",
        "self._kept[self._read], self._left[self._read] = next(self._iterator), self._uses",
        "self._kept[self._read], self._left[self._read] = next(self._iterator), 1", _PIPELINE,
    ),
    # ------------------------------------------------------------------------------------- memory of generation
    Mutant(
        "a page is free as soon as one of its users goes", _PAGES,
        "        if self._users[page] == 0:\n            if page in", "        if True:\n            if page in",
        _CANARIES,
    ),
    Mutant(
        "a page that somebody else has computed, too, is freed", _PAGES,
        "            parent = self._serial[self._known[content]]\n",
        "            parent = self._serial[self._known[content]]\n"
        "            if self._known[content] != pages[i]:\n                self.release(pages[i])\n",
        _CANARIES,
    ),
    Mutant(
        "a prompt is found to its last token", _PAGES, "range(0, len(tokens) - size, size)",
        "range(0, len(tokens) - size + 1, size)", _CANARIES,
    ),
    Mutant(
        "a page is known without what is before it", _PAGES, "            parent = self._serial[page]\n", "", _CANARIES,
    ),
    Mutant(
        "a page is known by the hash of its tokens", _PAGES, "            if page is None:\n",
        "            key = hash((parent, tuple(tokens[start : start + size])))\n"
        "            page = next((p for content, p in self._known.items() if hash(content) == key), None)\n"
        "            if page is None:\n",
        _CANARIES,
    ),
    Mutant(
        "a page that was evicted can still be found", _PAGES,
        "            self._forget(page)\n            self.evicted", "            self.evicted", _CANARIES,
    ),
    Mutant(
        "the last page of a prompt is written by all its answers", _SCHEDULER,
        "shared = at < len(sequence.pages) and blocks.users(sequence.pages[at]) > 1", "shared = False", _CANARIES,
    ),
    Mutant(
        "pages that are found are counted as pages that can be had", _SCHEDULER,
        "blocks.available - sum(blocks.users(page) == 0 for page in found) < more", "blocks.available < more",
        _CANARIES,
    ),
    Mutant(
        "a preempted sequence keeps a stale count", _SCHEDULER,
        "        sequence.computed = sequence.cached = len(found) * blocks.page_size\n",
        "        sequence.cached = len(found) * blocks.page_size\n"
        "        sequence.computed = max(sequence.cached, sequence.preemptions and len(sequence.tokens) - 1)\n",
        _CANARIES,
    ),
    Mutant(
        "the version of the weights left out of the root", _SCHEDULER,
        "(self.version, sequence.request.adapter, sequence.request.root)",
        "(0, sequence.request.adapter, sequence.request.root)", _CANARIES,
    ),
    Mutant(
        "the adapter left out of the root", _SCHEDULER,
        "(self.version, sequence.request.adapter, sequence.request.root)",
        '(self.version, "", sequence.request.root)', "tests/inference/test_scheduler.py",
    ),
    Mutant(
        "the salt left out of the root", _SCHEDULER,
        "(self.version, sequence.request.adapter, sequence.request.root)",
        '(self.version, sequence.request.adapter, "")', _CANARIES,
    ),
    Mutant(
        "who runs goes on over pages of old weights", _SCHEDULER,
        "        for sequence in list(self.running):\n            self.preempt(sequence)\n", "", _CANARIES,
    ),
    Mutant(
        "who came first is preempted", _SCHEDULER, "victim = self.running[-1]", "victim = self.running[0]", _CANARIES,
    ),
    Mutant(
        "who came first is admitted last", _SCHEDULER, "self.waiting.insert(place, sequence)",
        "self.waiting.append(sequence)", _CANARIES,
    ),
    Mutant(
        "a fork stands behind those that came later", _SCHEDULER, "bisect.insort(self.running, fork, key=_arrival)",
        "self.running.append(fork)", _CANARIES,
    ),
    Mutant(
        "a fork begins with an empty slot", _SCHEDULER, "self._slot_copies[fork.slot] = sequence.slot", "pass",
        _CANARIES,
    ),
    Mutant(
        "a slot is never given back", _SCHEDULER, "            self._free_slots.append(sequence.slot)\n",
        "            pass\n", _CANARIES,
    ),
    Mutant(
        "answers that wait for their prompt have no seat", _SCHEDULER, "taken + seats > self.max_num_seqs",
        "len(self.running) >= self.max_num_seqs", _CANARIES,
    ),
    Mutant(
        "answers that wait for their prompt are not aborted", _SCHEDULER,
        "        found += self._forks.pop(request_id, [])\n", "", _CANARIES,
    ),
    Mutant(
        "a shared page is not copied on the device", "minimegatron/inference/plan.py", "        copies=step.copies,\n",
        "", "tests/inference/test_engine.py -k request_alone",
    ),
    Mutant(
        "a fork's slot is not copied on the device", "minimegatron/inference/plan.py",
        "        slot_copies=step.slot_copies,\n", "", "tests/inference/test_engine.py -k request_alone",
    ),
    Mutant(
        "a draw depends on the place in the row", "minimegatron/inference/plan.py",
        "uniform(request.seed, index, place, of)", "uniform(request.seed, at, place, of)",
        "tests/inference/test_engine.py -k request_alone",
    ),
    Mutant(
        "log-probabilities of a prompt are asked for again after preemption", "minimegatron/inference/plan.py",
        "    first = max(chunk.start, next_scored(sequence))\n", "    first = chunk.start\n",
        "tests/inference/test_engine.py -k request_alone",
    ),
    Mutant(
        "each stage makes as many pages as it has room for", "minimegatron/inference/engine.py",
        "1 + min(gather_objects(wanted, stage.mesh.pp))", "1 + wanted",
        "tests/inference/test_engine.py -k stages_that_keep",
    ),
    Mutant(
        "the draft model forgets what it has left out in a pause", "minimegatron/inference/engine.py",
        "chunk.sequence.lag + 1 if left_out else 0", "0", _PROPOSALS,
    ),
    Mutant(
        "a depth reads the state of its own token", "minimegatron/inference/runner.py", "[each - 1 for each in kept]",
        "kept", _PROPOSALS,
    ),
    Mutant(
        "a depth sees rows that it has not made", "minimegatron/models/decoder.py",
        "context.without_first(depth, ", "context.without_first(0, ", _PROPOSALS,
    ),
    Mutant(
        "depths propose in the step that computes the token before", _SCHEDULER, "(self.newest_alone and count > 1)",
        "False", _PROPOSALS,
    ),
    Mutant(
        "a grammar stays where proposals have led it", "minimegatron/inference/grammar.py",
        "            self._matcher.rollback(taken)\n", "", _GRAMMAR,
    ),
    Mutant(
        "an answer may stop wherever it is", "minimegatron/inference/grammar.py", "        elif accepts:\n",
        "        else:\n", _GRAMMAR,
    ),
    Mutant(
        "a grammar is asked once for all places of a draft", "minimegatron/inference/plan.py",
        "grammar.allowed(proposed,", "grammar.allowed((),", _GRAMMAR,
    ),
    # ------------------------------------------------------------------------------------- after pre-training
    Mutant(
        "what an environment says is learned", "minimegatron/posttraining/rollouts.py",
        "episode.drawn += [False] * len(said)", "episode.drawn += [True] * len(said)",
        "tests/posttraining/test_turns.py -k said_in_turns",
    ),
    Mutant(
        "a divergence's gradient sums a rank's own columns", "minimegatron/posttraining/distill.py",
        "w.addcmul_(log_q.exp(), summed[3, :, None], value=-1)", "w.sub_(log_q.exp() * w.sum(1, keepdim=True))",
        "tests/posttraining/test_distill.py -k torchs",
    ),
    Mutant(
        "the student answers by the weights of the step before", "minimegatron/posttraining/on_policy.py",
        "        self.sampler.take_weights()\n", "        if not done:\n            self.sampler.take_weights()\n",
        "tests/posttraining/test_distill.py -k handed_over",
    ),
    Mutant(
        "a norm over fewer channels keeps its gamma", "minimegatron/posttraining/prune.py",
        "share[hidden].mean().sqrt().item()", "1.0", "tests/posttraining/test_prune.py -k do_nothing",
    ),
    # ------------------------------------------------------------------------------------------- the check of an answer
    Mutant("a result is there before the wait", _GROUP, "into = _copied(outputs)", "into = outputs", _COUNTED),
    Mutant(
        "what is written after the start travels", _GROUP, "outputs is inputs else _copied(inputs)",
        "outputs is inputs else inputs", _COUNTED,
    ),
    Mutant("each wait is the first", _GROUP, "        if self._call.waited is None:\n", "        if True:\n", _COUNTED),
    Mutant("a future is no wait", _GROUP, "            self.work._note_wait()\n", "            pass\n", _COUNTED),
    Mutant(
        "a peer is its place in the group", _GROUP, "        return self._ranks[peer]", "        return peer", _COUNTED,
    ),
    Mutant(
        "who receives a broadcast sends it", _GROUP, 'name not in ("broadcast", "scatter") or root == self._rank',
        "True", _COUNTED,
    ),
    Mutant(
        "one rank that waits is a deadlock", "labkit/fresh.py", "return all(now - still", "return any(now - still",
        "tests/labkit/test_fresh.py::test_ranks_that_only_wait_are_not_waited_for",
    ),
    Mutant(
        "a mistake that explains one wrong trial is told", "labkit/suspects.py",
        "and all(one or not tried for one, tried in found)", "", "tests/labkit/test_suspects.py",
    ),
    Mutant(
        "a mistake that fails where the learner is right is told", "labkit/deciding.py",
        "            suspects.rule_out(way)", "            pass", "tests/course/test_example.py",
    ),
    Mutant(
        "a mistake that raises another error is told", "labkit/deciding.py", "said[number] == error for",
        "True for", "tests/course/test_example.py",
    ),
    Mutant(
        "who loses a rank that gloo has ended is named", "labkit/playing.py",
        "if errors and not (gone and min(errors)[0]):", "if errors:", "tests/labkit/test_judge.py -k gloo",
    ),
    Mutant(
        "nothing that an answer names is remarked", "labkit/submissions.py", "sorted(modules | used)", "[]",
        "tests/labkit/test_submissions.py",
    ),
    Mutant(
        "norms by layer count copies of a weight on every rank", "minimegatron/training/observers/norms.py",
        "if p.counts_here and p.main.numel()", "if p.main.numel()", "tests/training/test_norms.py -k one_process",
    ),
    Mutant(
        "norms by layer keep the loss scale", "minimegatron/training/observers/norms.py",
        "table[GRAD] /= self.optimizer.loss_scale**2", "pass", "tests/training/test_norms.py -k main_parameters",
    ),
    Mutant(
        "steps that a resumed run repeats stay in a watched log", "minimegatron/watch/log.py",
        "                column.cut(at)", "                pass", "tests/watch/test_log.py -k repeat",
    ),
    Mutant(
        "a smoothed curve begins anew in each bucket", "minimegatron/watch/columns.py",
        "np.minimum(begins, np.searchsorted(at, at[ends - 1] - smooth, \"right\"))", "begins",
        "tests/watch/test_columns.py -k extremes_and_the_mean",
    ),
    Mutant(
        "a page of the web reads the runs of this machine", "minimegatron/watch/server.py",
        "not in HOSTS and host not in HOSTS", "== host == HOSTS", "tests/watch/test_server.py -k reads_only",
    ),
    # ------------------------------------------------------------------------------------------- Mamba-2, hybrids
    Mutant(
        "a chunk that is not full is filled with copies of its last step", _SCAN,
        "t = F.pad(t, (0, 0) * (t.dim() - 1) + (0, -s % length))",
        "t = torch.cat([t, t[-1:].expand(-s % length, *t.shape[1:])])", _CHUNKS,
    ),
    Mutant(
        "a chunk reads the state after it", _SCAN,
        "found.append(h[:-1])", "found.append(h[1:])", _CHUNKS,
    ),
    Mutant(
        "a state passes the border of documents", _SCAN,
        "            keep = keep & (of[:, None] == of)[..., None]\n", "", _CHUNKS,
    ),
    Mutant(
        "a state of an earlier document is read", _SCAN, "self._reads = masked_exp(a, from_start)",
        "self._reads = masked_exp(a, None)", _CHUNKS,
    ),
    Mutant(
        "what an earlier document left in a chunk is kept", _SCAN, "masked_exp(a[..., -1:] - a, to_end)",
        "masked_exp(a[..., -1:] - a, None)", _CHUNKS,
    ),
    Mutant(
        "decays of later tokens are computed and then dropped", "minimegatron/kernels/reference.py",
        ".masked_fill(~pairs, -torch.inf).exp()", ".exp() * pairs", "tests/layers/ssm/test_scan.py -k overflow",
    ),
    Mutant(
        "a tap sees the document before", _CONV, "rows[i : i + n] * same.t()[..., None]", "rows[i : i + n]", _PACKED,
    ),
    Mutant(
        "a document id that comes again goes on", _CONV, "(document_ids.diff(dim=1) != 0).cumsum(1)",
        "(document_ids - document_ids[:, :1])[:, 1:]", _PACKED,
    ),
    Mutant(
        "time steps are added in the model's dtype", _MIXER, "F.softplus(dt.to(wide) + self.dt_bias.to(wide))",
        "F.softplus(dt + self.dt_bias)", f"{_OF_MIXER} -k fp32",
    ),
    Mutant(
        "A is computed in the model's dtype", _MIXER,
        "-self.A_log.to(torch.promote_types(self.A_log.dtype, torch.float32)).exp()", "-self.A_log.exp()",
        f"{_OF_MIXER} -k fp32",
    ),
    Mutant(
        "all heads skip by the first one's D", _MIXER, "self.D.to(y.dtype)[:, None]", "self.D.to(y.dtype)[:1, None]",
        _OF_HF,
    ),
    Mutant(
        "the gate is put on after the norm", _MIXER,
        "        u = (y * F.silu(z.to(y.dtype))).unflatten(-1, (groups, -1))\n",
        "        u, weight = y.unflatten(-1, (groups, -1)), weight * F.silu(z)\n", _OF_HF,
    ),
    Mutant(
        "the gradient of a gated norm leaves out that of its mean", _MIXER, "g - n * (g * n).mean(-1, keepdim=True)",
        "g", "tests/models/test_huggingface.py -k gradients",
    ),
    Mutant(
        "no time step is limited", _MIXER, "return dt if low == 0.0 and high is None else dt.clamp(low, high)",
        "return dt", _OF_HF,
    ),
    Mutant(
        "the gated norm takes a rank's groups for the model's", _MIXER,
        "config.layernorm_epsilon, config.mamba_num_groups // tp.size",
        "config.layernorm_epsilon, config.mamba_num_groups", _HYBRID_TP,
    ),
    Mutant(
        "the projection of Mamba is cut as one block", _MIXER, "tp, init=std, blocks=blocks, **how)",
        "tp, init=std, **how)", _HYBRID_TP,
    ),
    Mutant(
        "the channels of B and C are cut with those of x", _MIXER, "blocks[1:4], config",
        "(sum(blocks[1:4]),), config", _HYBRID_TP,
    ),
    Mutant(
        "a chunk of a prompt forgets the tokens before it", _CONV, "self(x, tail.transpose(0, 1))",
        "self(x, 0 * tail.transpose(0, 1))", _STATES,
    ),
    Mutant(
        "the convolution keeps what padding is there", _CONV, "[:, None] + new  #", "[:, None] + len(x)  #",
        _STATES,
    ),
    Mutant(
        "padding fades the state of a sequence", _MIXER, "self._dt(dt).masked_fill(padding[..., None], 0.0)",
        "self._dt(dt)", _STATES,
    ),
    Mutant(
        "a state begins with what lay in its slot", "minimegatron/layers/inference_context.py",
        "begins = self.context.kept == 0", "begins = self.context.kept < 0", _STATES,
    ),
    Mutant(
        "a prefix is reused without its state", "minimegatron/inference/engine.py",
        "config.enable_prefix_caching and not has_slots", "config.enable_prefix_caching",
        "tests/inference/test_engine.py -k retention",
    ),
    Mutant(
        "states come in the ranks' order", _PIECES, "[place for _, place in sorted(starts)]",
        "[place for _, place in starts]", _HYBRID_CP,
    ),
    Mutant(
        "the gradient of a state stays with who used it", _PIECES, "self.cp, 0, reduce_gradient=True)", "self.cp, 0)",
        _HYBRID_CP,
    ),
    Mutant(
        "a rank that begins the sequence leaves the backward pass", _PIECES,
        "every[0].masked_fill(torch.ones_like(every[0], dtype=torch.bool), 0.0)", "torch.zeros_like(every[0])",
        _HYBRID_A2A,
    ),
    Mutant(
        "layers of a hybrid are all of the first symbol", "minimegatron/config/hybrid.py",
        "PARTS[pattern[layer_number]]", "PARTS[pattern[0]]", _OF_HF,
    ),
    Mutant(
        "an operation holds its own result in a plan", "minimegatron/footprint/recorder.py",
        "tensor if tensor.is_leaf else tensor.detach()", "tensor", "tests/training/test_hybrid.py -k planned",
    ),
    Mutant(
        "a convolution is quantised as a matrix", "minimegatron/checkpoint/compressed_tensors.py",
        '("norm.", "conv1d.")', '("norm.",)', "tests/inference/test_quantize.py -k convolution",
    ),
    # ---------------------------------------------------------------------------- the gated delta rule, Qwen3-Next
    Mutant(
        "tokens of a chunk do not see each other's corrections", _DELTA, "system = (k @ k.mT) * decays",
        "system = 0 * (k @ k.mT) * decays", _CORRECTIONS,
    ),
    Mutant(
        "a correction is as large as the step of the token that it is due to", _DELTA,
        "(k @ k.mT) * decays * beta[..., None]  #", "(k @ k.mT) * decays * beta[..., None, :]  #", _CORRECTIONS,
    ),
    Mutant(
        "what a state says is taken off whole", _DELTA, "k * (beta[..., None] * since_start)", "k * since_start",
        _CORRECTIONS,
    ),
    Mutant("keys are not made of length 1", _DELTA, "chunks(unit(k))", "chunks(k)", _CORRECTIONS),
    Mutant(
        "a corrected state passes the border of documents", _DELTA, "(ends[1:] == ends[:-1])",
        "(ends[1:] == ends[1:])", _CORRECTIONS,
    ),
    Mutant(
        "corrections of an earlier document are kept", _DELTA, "masked_exp(a[..., -1:] - a, to_end)",
        "masked_exp(a[..., -1:] - a, None)", _CORRECTIONS,
    ),
    Mutant(
        "a token reads and corrects the state of an earlier document", _DELTA, "masked_exp(a, from_start)",
        "masked_exp(a, None)", _CORRECTIONS,
    ),
    Mutant(
        "a piece's matrix is turned", _DELTA, "return own, transition", "return own, transition.mT",
        f"{_OF_RULE} -k pieces",
    ),
    Mutant(
        "a state passes a piece as if the piece only faded it", _PIECES, "of.reshape(*nothing.shape[:2], -1)",
        "(of.diagonal(0, -2, -1).diag_embed() if of.shape[-1] == of.shape[-2] else of).reshape(*nothing.shape[:2], -1)",
        "tests/parallel/test_hybrid_twin.py::test_two_ranks[11]",
    ),
    Mutant(
        "a step looks a key up before the state fades", _DELTA, "(v - (k * state).sum(2))",
        "(v - (k * (state / g.exp()[..., None, None])).sum(2))", f"{_OF_RULE} -k step_is",
    ),
    Mutant(
        "a rank's gradient of the gated norm is taken for the whole", _DELTA_NET, 'partial="heads")', 'partial="")',
        _DELTA_TP,
    ),
    Mutant(
        "the projection of Gated DeltaNet is cut as one block", _DELTA_NET, "tp, init=std, blocks=blocks, **how)",
        "tp, init=std, **how)", _DELTA_TP,
    ),
    Mutant(
        "the channels of keys and values are cut with those of queries", _DELTA_NET, "CausalConv1d(blocks[:3],",
        "CausalConv1d((sum(blocks[:3]),),", _DELTA_TP,
    ),
    Mutant(
        "gates are added in the model's dtype", _DELTA_NET, "F.softplus(a.to(wide) + self.dt_bias.to(wide))",
        "F.softplus(a + self.dt_bias).to(wide)", f"{_OF_NET} -k fp32",
    ),
    Mutant(
        "a chunk of a prompt begins with an empty state", _DELTA_NET, "self.rule.chunk_size).outputs(h)",
        "self.rule.chunk_size).outputs()", "tests/inference/test_pages.py -k qwen3_next",
    ),
    Mutant(
        "a linear layer stands where attention should", "minimegatron/config/hybrid.py",
        "(i + 1) % int(frequency) != 0", "i % int(frequency) != 0", f"{_OF_NET} -k frequency",
    ),
    Mutant(
        "the gate of attention is half of its queries", "minimegatron/checkpoint/huggingface.py",
        "(2 * head + gate) * d, d) for gate in (0, 1) for head in heads)",
        "(2 * head + gate) * d, d) for head in heads for gate in (0, 1))", _OF_NEXT,
    ),
    Mutant(
        "a file's rows of q, k, v and z are read block by block", "minimegatron/checkpoint/huggingface.py",
        "(which, group * sum(sizes) + sum(sizes[:i]), rows)", "(which, sum(sizes[:i]) * groups + group * rows, rows)",
        _OF_NEXT,
    ),
    Mutant(
        "ranks of one query group all take its first gates", "minimegatron/layers/attention/self_attention.py",
        "self.tp.rank % ranks_per_group * heads, heads) for of in queries]",
        "self.tp.rank % ranks_per_group * heads * (of is queries[0]), heads) for of in queries]", _DELTA_TP,
    ),
    Mutant(
        "all of a head is rotated whatever the file says", "minimegatron/models/families/llama_like.py",
        'scaling.get("partial_rotary_factor", keys["partial_rotary_factor"])',
        '1.0 + 0 * scaling.get("partial_rotary_factor", keys["partial_rotary_factor"])', _OF_NEXT,
    ),
    # ------------------------------------------------------------------------------------------- gpt-oss, Gemma 3
    Mutant(
        "a ring joins the sink once for each block", "minimegatron/layers/attention/context_parallel.py",
        "            attend(joined, q, own, kv[0], kv[1], spans[owner], mask, scale, backend, softcap)\n",
        "            attend(joined, q, own, kv[0], kv[1], spans[owner], mask, scale, backend, softcap)\n"
        "            if sink is not None and owner != axis.rank:\n                joined.add_sink(sink)\n",
        f"{_SINKS} -k p2p",
    ),
    Mutant(
        "ranks that have exchanged heads use the first heads' sinks",
        "minimegatron/layers/attention/context_parallel.py", "sink.chunk(inner.size)[inner.rank]",
        "sink.chunk(inner.size)[0]", f"{_SINKS} -k a2a",
    ),
    Mutant(
        "the gradient of a sink is that of a key", "minimegatron/layers/attention/pieces.py",
        "return -(share * ", "return (share * ", f"{_SINKS} -k formula",
    ),
    Mutant(
        "a sink is the same on all tp ranks", "minimegatron/layers/attention/core_attention.py",
        "ParamLayout((heads,), 0, parts, mesh.tp.rank, Init", "ParamLayout((heads,), 0, parts, 0, Init", _GPT_OSS_TWIN,
    ),
    Mutant(
        "a step with pages forgets the sink", "minimegatron/layers/attention/core_attention.py",
        "            self.softmax_offset,\n            kernels", "            None,\n            kernels",
        "tests/inference/test_pages.py -k whole[gpt_oss]",
    ),
    Mutant(
        "gated values are clamped from above alone", "minimegatron/kernels/plain.py", "up.clamp(-limit, limit)",
        "up.clamp(max=limit)", _GPT_OSS,
    ),
    Mutant(
        "gates are clamped from below too", "minimegatron/kernels/plain.py", "gate.clamp(max=limit)",
        "gate.clamp(-limit, limit)", _GPT_OSS,
    ),
    Mutant("gated values have no offset", "minimegatron/kernels/plain.py", "* (up + offset)", "* up", _GPT_OSS),
    Mutant("a gate's sigmoid is not steeper", "minimegatron/kernels/plain.py", "1.702 * gate", "gate", _GPT_OSS),
    Mutant(
        "each etp rank adds the bias of fc2", "minimegatron/layers/moe/layer.py",
        "if self.bias2 is None or self.etp.rank > 0:", "if self.bias2 is None:", _GPT_OSS_TWIN,
    ),
    Mutant(
        "the bias of fc2 has no sum over etp", "minimegatron/layers/moe/layer.py",
        'experts=here, partial="experts")', "experts=here)", _GPT_OSS_TWIN,
    ),
    Mutant(
        "the bias of fc2 counts whole in each expert", "minimegatron/layers/moe/layer.py",
        "(rows(self.bias2) * sent.probs[:, None])", "rows(self.bias2)", _GPT_OSS,
    ),
    Mutant(
        "stacked biases decay", "minimegatron/optim/groups.py",
        "    dims = len(layout.shape) - (layout.experts is not None)  # of one expert\n    decays = dims > 1",
        "    dims = len(layout.shape) - (layout.experts is not None)\n    decays = len(layout.shape) > 1",
        "tests/optim/test_optimizer.py -k experts",
    ),
    Mutant(
        "gates and values lie side by side in a published stack", "minimegatron/checkpoint/stacks.py",
        "self._last[1][..., first::step]", "self._last[1].chunk(step, -1)[first]", _GPT_OSS,
    ),
    Mutant(
        "the high half of a byte comes first", "minimegatron/checkpoint/mxfp4.py",
        "(FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()])",
        "(FP4[(blocks >> 4).long()], FP4[(blocks & 15).long()])",
        "tests/checkpoint/test_mxfp4.py -k numbers",
    ),
    Mutant(
        "YaRN's blend begins at whole channels whatever the file says", "minimegatron/models/families/llama_like.py",
        'bool(scaling.get("truncate", True))', 'bool(scaling.get("truncate", True) or True)', _GPT_OSS,
    ),
    Mutant(
        "every other layer with a window begins with the second", "minimegatron/models/families/llama_like.py",
        "WINDOWED if (i + 1) % said else FULL", "FULL if (i + 1) % said else WINDOWED",
        "tests/models/test_huggingface_config.py -k class[gpt_oss",
    ),
    Mutant(
        "layers with a window turn as all others", "minimegatron/layers/attention/self_attention.py",
        "self.rotary[:2] if window is None else self.rotary[-2:]", "self.rotary[:2]", _GEMMA3,
    ),
    Mutant(
        "the scaling of RoPE is that of all layers", "minimegatron/layers/rope.py",
        'plain = {"rotary_base": config.rotary_base_local, "rope_scaling_type": "none"}',
        'plain = {"rotary_base": config.rotary_base_local}', _GEMMA3,
    ),
    Mutant(
        "scores are divided by sqrt(d) whatever the file says", "minimegatron/models/families/gemma.py",
        'None if scalar == keys["head_dim"] else', "None if scalar else", _GEMMA3,
    ),
    Mutant(
        "1 + gamma is rounded to 16 bits", "minimegatron/layers/norm.py", "if gamma.dtype != wide:", "if False:",
        "tests/layers/test_norm.py",
    ),
    Mutant(
        "sqrt(h) is not rounded as the weights are", "minimegatron/layers/embedding.py",
        "torch.tensor(config.hidden_size**0.5, dtype=config.dtype,", "torch.tensor(config.hidden_size**0.5,",
        "tests/layers/test_embedding.py -k scaled",
    ),
    # ------------------------------------------------------------------------------------------------------- BERT
    Mutant(
        "BERT pools the first token of each rank", _BERT_HEADS, "first if self.tp.rank == 0 else first * 0.0", "first",
        _BERT_SP,
    ),
    Mutant(
        "the gradient of BERT's pooler is summed over tp", _BERT_HEADS,
        "self.dense = WholeLinear(config, config.hidden_size, config.hidden_size)",
        'self.dense = WholeLinear(config, config.hidden_size, config.hidden_size, partial="sequence")', _BERT_SP,
    ),
    Mutant(
        "the gradient of BERT's head of words is a rank's own", _BERT_HEADS,
        'config.hidden_size, partial="sequence")', "config.hidden_size)", _BERT_SP,
    ),
    Mutant(
        "the gradient of segments is a rank's own", "minimegatron/layers/embedding.py",
        'config.hidden_size), init=init, partial="sequence")\n            self.tokentype',
        "config.hidden_size), init=init)\n            self.tokentype", _BERT_SP,
    ),
    Mutant(
        "words have no bias of their own", _BERT, "super().logits(head(hidden)) + head.bias",
        "super().logits(head(hidden))", _OF_BERT,
    ),
    Mutant(
        "the loss of a pair is rounded as the model is", _BERT,
        "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits = logits + 0",
        "tests/models/test_bert.py -k fp32",
    ),
    Mutant("a BERT sees padding", _BERT, "document_ids=document_ids)", "document_ids=None)", _OF_BERT),
    Mutant("a BERT sees the past alone", _BERT, "causal=False", "causal=True", _OF_BERT),
    Mutant(
        "each cp rank has a pair", _BERT, "first = pair if here else losses[:, 0] + 0.0 * pair", "first = pair",
        "tests/parallel/test_bert_twin.py::test_two_ranks[3]",
    ),
    Mutant(
        "the sum goes on without its norm", "minimegatron/models/block.py",
        "x, _ = add_norm(self.post_self_attn_layernorm", "_, x = add_norm(self.post_self_attn_layernorm", _OF_BERT,
    ),
    Mutant(
        "the embedding has no norm where sums have one", "minimegatron/layers/embedding.py",
        "if self.layernorm is not None:", "if False:", _OF_BERT,
    ),
    Mutant(
        "half a word is hidden", "minimegatron/data/whole_words.py", "self.opens[text[1:]] & self.closes[text[:-1]]",
        "self.opens[text[1:]] & False", f"{_BERT_ROWS} -k whole",
    ),
    Mutant(
        "nothing that is hidden stays", _BERT_DATA, "chance < 0.8", "chance < 0.9", f"{_BERT_ROWS} -k eighty",
    ),
    Mutant(
        "another text may be of the same document", _BERT_DATA, "number if number < begin else number + end - begin",
        "number", f"{_BERT_ROWS} -k two_documents",
    ),
    Mutant(
        "what is hidden depends on the place in the batch", _BERT_DATA,
        "np.random.default_rng((self.config.random_seed, 2, k))",
        "np.random.default_rng((self.config.random_seed, 2, row))",
        f"{_BERT_ROWS} -k function",
    ),
    Mutant(
        "a pair weighs as much as one word", _BERT_DATA, "int(other), len(hidden)", "int(other), 1",
        f"{_BERT_ROWS} -k marks",
    ),
    # ------------------------------------------------------------------------------------------- encoder-decoders
    Mutant(
        "T5's scores are divided by sqrt(d)", "minimegatron/models/families/t5.py", '"softmax_scale": 1.0',
        '"softmax_scale": None', _T5,
    ),
    Mutant(
        "the decoder's buckets look ahead as the encoder's do", _HALVES, "Buckets(tables[1], False, far)",
        "Buckets(tables[1], True, far)", _T5,
    ),
    Mutant(
        "both stacks use the encoder's table", _HALVES, "Buckets(tables[1], False, far)",
        "Buckets(tables[0], False, far)", _T5,
    ),
    Mutant(
        "a key's bias is that of the mirrored distance", _RELATIVE, "row.unfold(1, s, 1).flip(1)[None]",
        "row.unfold(1, s, 1).flip(1)[None].mT", _OF_RELATIVE,
    ),
    Mutant(
        "a tied head sees the hidden state as it is", _HALVES,
        "hidden * self.config.hidden_size**-0.5 if tied else hidden", "hidden", _T5,
    ),
    Mutant(
        "a head of its own is scaled, too", _HALVES, "hidden * self.config.hidden_size**-0.5 if tied else hidden",
        "hidden * self.config.hidden_size**-0.5", _T5,
    ),
    Mutant(
        "what transformers 5 writes of an untied head is read as a tied one", "minimegatron/models/families/t5.py",
        "not tied or scales is False", "not tied", _T5,
    ),
    Mutant(
        "the embedding is read from the head", "minimegatron/models/families/t5.py",
        'Row("embedding.word_embeddings.weight", ("shared.weight",))',
        'Row("embedding.word_embeddings.weight", ("lm_head.weight",))', _T5,
    ),
    Mutant(
        "the decoder sees the padding of a source", _HALVES, "CrossMask(False, None, ids[1], source_ids=ids[0])",
        "CrossMask()", _T5,
    ),
    Mutant(
        "the encoder sees the padding of a source", _HALVES, "BiasedMask(False, None, ids[0], buckets=of_encoder)",
        "BiasedMask(False, None, None, buckets=of_encoder)", _T5,
    ),
    Mutant(
        "a softmax over nothing", _RELATIVE, "scores.softmax(-1).masked_fill(blind, 0.0)", "scores.softmax(-1)",
        _OF_RELATIVE,
    ),
    Mutant(
        "every rank of tp has the biases of the first heads", _RELATIVE,
        "ParamLayout(shape, 1, parts, mesh.tp.rank,", "ParamLayout(shape, 1, parts, 0,", _T5_SP,
    ),
    Mutant(
        "later stages give the table no gradient", _HALVES,
        '"hidden": torch.cat([source, target]), "bias_e": tables[0], "bias_d": tables[1]',
        '"hidden": torch.cat([source, target]), "bias_e": tables[0], "bias_d": tables[1].detach().clone()', _T5_CUT,
    ),
    Mutant(
        "recomputed layers make the biases again", _HALVES,
        "BiasedMask(False, None, ids[0], buckets=of_encoder).made(n)",
        "BiasedMask(False, None, ids[0], buckets=of_encoder)", _T5_AGAIN,
    ),
    Mutant(
        "biases are lost where keys are kept", _RELATIVE, "self.buckets.at(distance).permute(0, 3, 1, 2).masked_fill(",
        "(0 * self.buckets.at(distance)).permute(0, 3, 1, 2).masked_fill(", _ANSWERS,
    ),
    Mutant(
        "a target sees the kept keys of its source as its own past", _RELATIVE,
        "(distance <= 0) & (keys >= self.sources[:, None, None])", "(distance <= 0).expand(len(self.sources), -1, -1)",
        _ANSWERS,
    ),
    Mutant(
        "cross attention sees the first target", _RELATIVE, "(keys < self.sources[:, None])[:, None, None]",
        "(keys <= self.sources[:, None])[:, None, None]", _ANSWERS,
    ),
    Mutant(
        "a later step does not know where the source ends", "minimegatron/models/encoder_decoder_generation.py",
        "lengths = torch.where(context.kept == 0, lengths, state.read_sequences(LENGTH)[0][:, 0])", "pass", _ANSWERS,
    ),
    Mutant(
        "words of a source are penalised", "minimegatron/inference/plan.py", "(sequence.continued, (*sequence",
        "(request.prompt, (*sequence", "tests/serving/test_encoder_decoder.py -k penalties",
    ),
    Mutant(
        "the text of an answer continues its source", "minimegatron/serving/engine_thread.py",
        "before = stream.answer.continued", "before = request.prompt",
        "tests/serving/test_encoder_decoder.py -k blank",
    ),
    Mutant(
        "a choice is predicted without the end of its question", "minimegatron/evaluation/likelihood.py",
        "before += [tokenizer.eod] * (before[-1:] != [tokenizer.eod])", "pass",
        "tests/evaluation/test_encoder_decoder.py -k ends_as_in_training",
    ),
    Mutant(
        "a run does not read the samples of its objective", "minimegatron/training/datasets.py",
        "objective = class_of_run(run).objective(run, tokenizer)", "objective = None",
        "tests/extension/test_families.py -k objective",
    ),
    Mutant(
        "a file names code, which is imported", "minimegatron/models/chunks.py",
        'config.model_class in {family.fields.get("model_class") for family in FAMILIES.values()}', "True",
        "tests/extension/test_families.py -k not_imported",
    ),
    Mutant(
        "a prompt is computed in pieces", "minimegatron/inference/scheduler.py",
        "if self.whole_prompts and count < sequence.waiting_tokens:", "if False:",
        "tests/models/test_t5.py -k preempted",
    ),
    Mutant(
        "the decoder reads what it shall predict", _SPANS, "[self.start, *target[:-1]]", "target", _OF_SPANS,
    ),
    Mutant(
        "every sample has the noise of the first", _SPANS, "np.random.default_rng((self.seed, k))",
        "np.random.default_rng((self.seed, 0))", _OF_SPANS,
    ),
    Mutant(
        "the decoder's layers count on in a file", "minimegatron/models/families/family.py",
        "n if in_encoder else n - encoder", "n", _T5,
    ),
    Mutant(
        "cross attention has biases of positions", _RELATIVE,
        "return self.document_ids[:, None, :, None] == self.source_ids[:, None, None]",
        "shown = self.document_ids[:, None, :, None] == self.source_ids[:, None, None]; "
        "return torch.where(shown, torch.arange(shown.shape[-1], dtype=torch.float64) / 9, -torch.inf)", _T5,
    ),
    # ------------------------------------------------------------------------------------------- pictures
    Mutant(
        "each tp rank keeps the gradient of its own picture rows", "minimegatron/models/vision.py",
        "c.gather_from_sequence_region(rows, self.tp)",
        "c.gather_from_sequence_region(rows, self.tp, reduce_gradient=False)", _SEES_SP,
    ),
    Mutant(
        "the patch embedding's gradient is that of a rank's patches", "minimegatron/models/vision.py",
        'init=Init(std=config.init_method_std), partial="sequence")', "init=Init(std=config.init_method_std))",
        _SEES_SP,
    ),
    Mutant(
        "cp cuts the patches' attention", "minimegatron/models/vision.py", "mesh.with_whole_sequences()", "mesh",
        _SEES_CP,
    ),
    Mutant(
        "padding belongs to the first picture", "minimegatron/models/vision.py",
        "F.pad(patches, (0, 0, 0, missing), value=-1)", "F.pad(patches, (0, 0, 0, missing), value=0)", _SEES_SP,
    ),
    Mutant(
        "windows and whole pictures change places", "minimegatron/models/vision.py",
        "if layer.layer_number in self.whole", "if layer.layer_number not in self.whole", _SEES,
    ),
    Mutant(
        "a patch sees those before it", "minimegatron/models/vision.py", "AttentionMask(causal=False,",
        "AttentionMask(causal=True,", _SEES,
    ),
    Mutant(
        "rows and columns change places in RoPE", "minimegatron/models/vision.py", "torch.stack([row, column], 1)",
        "torch.stack([column, row], 1)", _SEES,
    ),
    Mutant(
        "a picture token takes the row of its place among the windows", "minimegatron/data/pictures.py",
        "rows.append(place + tokens)", "rows.append(order + tokens)", "tests/models/test_vision.py -k windows",
    ),
    Mutant(
        "words go on behind a picture's rows", "minimegatron/data/pictures.py", "here + max(rows, columns)",
        "here + rows",
        "tests/models/test_vision.py -k positions",
    ),
    Mutant(
        "a picture that is cut is another one", "minimegatron/data/pictures.py",
        "if at + n > len(places) or places[at + n - 1] - places[at] != n - 1:", "if at + n > len(places):",
        "tests/models/test_vision.py -k cut_inside",
    ),
    Mutant(
        "queries, keys and values of a vision layer are taken head by head", "minimegatron/models/families/qwen_vl.py",
        '"pack_rows") for x', '"stack") for x', _SEES,
    ),
    Mutant(
        "pages know the picture tokens and not the pictures", "minimegatron/inference/sequence.py",
        "return self.salt if not self.pictures else repr((self.salt, self.pictures))", "return self.salt",
        _SEEN_ANSWERS,
    ),
    Mutant(
        "an answer is counted from the prompt's length", "minimegatron/data/pictures.py",
        " + int(self.positions.max()) + 1 - length", "", _SEEN_ANSWERS,
    ),
    Mutant(
        "a chunk begins with a picture's first row", "minimegatron/data/pictures.py",
        "of_picture[first : first + count]", "of_picture[:count]", _SEEN_ANSWERS,
    ),
    Mutant(
        "the class token has the first patch's position", "minimegatron/models/vision.py", "torch.where(row < 0, 0,",
        "torch.where(row < 0, 1,", _CLIP,
    ),
    Mutant(
        "a picture's tokens begin with the class token", "minimegatron/data/pictures.py", "            tokens += 1",
        "            tokens += 0", _CLIP,
    ),
    Mutant(
        "a token of a text takes CLIP's last layer", "minimegatron/models/families/llava.py", "layers + 1 + read",
        "layers + 2 + read", _CLIP,
    ),
    Mutant(
        "CLIP's GELU is the exact one", "minimegatron/config/vision.py", '"activation": "quick_gelu"',
        '"activation": "gelu"', _CLIP,
    ),
    Mutant(
        "the gradient of CLIP's positions is that of a rank's patches", "minimegatron/models/vision.py",
        ', "partial": "sequence"}', "}", _CLIP_SP,
    ),
    Mutant(
        "layers behind the one that is read hide tensors of the others", "minimegatron/models/families/llava.py",
        "range(config.vision_num_layers or 0, 100)", "range(100)",
        "tests/models/test_llava.py -k is_not_left_out",
    ),
    Mutant(
        "the question counts", "minimegatron/posttraining/vlm.py", "masks.append(torch.cat([counts[1:],",
        "masks.append(torch.cat([torch.ones_like(counts[1:]),", "tests/posttraining/test_vlm.py -k has_room",
    ),
    Mutant(
        "a picture that the assistant shows counts", "minimegatron/posttraining/vlm.py",
        'if message.get("role") == "assistant")', "if False)", "tests/posttraining/test_vlm.py -k assistant_shows",
    ),
    Mutant(
        "a conversation is cut at the end of its row", "minimegatron/posttraining/vlm.py",
        "if sum(times) > self.sequence_length + 1:", "if False:", "tests/posttraining/test_vlm.py -k cannot_be_read",
    ),
    # ------------------------------------------------------------------------------------------- other families
    Mutant(
        "a sink is counted on the first tp rank alone", "minimegatron/optim/clip.py",
        "return not layout.shared and first_replica and (layout.sharded or mesh.tp.is_first)",
        "return not layout.shared and first_replica and (layout.sharded and len(layout.shape) > 1 or mesh.tp.is_first)",
        "tests/optim/test_clip.py -k counts_once",
    ),
    Mutant(
        "sinks decay", "minimegatron/optim/groups.py", "decays = dims > 1 and",
        'decays = (dims > 1 or name.endswith("softmax_offset")) and', "tests/optim/test_optimizer.py -k decay",
    ),
    Mutant(
        "a gate of gpt-oss is a SiLU", "minimegatron/kernels/plain.py", "gate * torch.sigmoid(1.702 * gate) * (up +",
        "gate * torch.sigmoid(gate) * (up +", _GPT_OSS,
    ),
    Mutant(
        "values of gpt-oss are not raised by one", "minimegatron/models/families/gpt_oss.py",
        '"glu_linear_offset": 1.0', '"glu_linear_offset": 0.0', _GPT_OSS,
    ),
    Mutant(
        "a router has no bias", "minimegatron/layers/moe/router.py",
        "None if self.bias is None else self.bias.to(dtype)", "None", _GPT_OSS,
    ),
    Mutant(
        "the weight of a lone expert is divided by itself", "minimegatron/layers/moe/router.py",
        "(weights.sum(-1, keepdim=True) + 1e-20) if k > 1 else weights",
        "(weights.sum(-1, keepdim=True) + 1e-20)", _LONE,
    ),
    Mutant(
        "a file that divides the weight of a lone expert is read", "minimegatron/models/families/nemotron.py",
        'keys.only("norm_topk_prob", k > 1, f"with num_experts_per_tok={k} is not supported")', "pass", _LONE,
    ),
    Mutant(
        "the output of attention is not normed", "minimegatron/models/block.py",
        "self.dropout(self.post_self_attn_layernorm(self.self_attention(self.input_layernorm(x), context)))",
        "self.dropout(self.self_attention(self.input_layernorm(x), context))", _GEMMA3,
    ),
    Mutant(
        "the output of an MLP is not normed", "minimegatron/models/block.py",
        "self.dropout(self.post_mlp_layernorm(self.mlp(normed)))", "self.dropout(self.mlp(normed))", _GEMMA3,
    ),
    Mutant(
        "of several ids that end a text the first counts", "minimegatron/checkpoint/companions.py",
        "ids = value if isinstance(value, list) else [value]",
        "ids = value[:1] if isinstance(value, list) else [value]", "tests/inference/test_command.py -k files_say",
    ),
    Mutant(
        "Qwen3-Next's norms multiply by gamma, not by 1 + gamma", "minimegatron/models/families/qwen_next.py",
        '"layernorm_zero_centered_gamma": True', '"layernorm_zero_centered_gamma": False', _OF_NEXT,
    ),
    Mutant(
        "the norm of Gated DeltaNet multiplies by 1 + gamma", _DELTA_NET,
        "normed.to(self.weight.dtype) * self.weight", "normed.to(self.weight.dtype) * (1 + self.weight)", _OF_NEXT,
    ),
    Mutant(
        "fewer tokens than the convolution sees push out all that it kept", _CONV, "[:, None] + new  #",
        "[:, None] + new.clamp(min=tail.shape[1])  #", _STATES,
    ),
    Mutant(
        "an unknown kind of layer is taken for one that sees all", "minimegatron/models/families/qwen.py",
        "sorted({*(kinds or ())} - {_WINDOWED, _FULL})", "[]",
        "tests/models/test_huggingface_config.py::"
        "test_a_changed_key_changes_the_model_as_it_does_theirs_or_is_refused[qwen3]",
    ),
)  # fmt: skip
