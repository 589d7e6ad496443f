"""The serial twin: the same model, weights and batch in one process, against which every layout is held.

The twin takes the plainest way there is: no wrapper, no bucket, no collective, one loss `sum / count` over the whole
batch and one `backward()`. The batch is made to expose mistakes: microbatches and ranks count different numbers of
tokens, norm weights are not 1, biases are not 0, and every rank sees other tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.data.pictures import Seen, patches_of, picture_inputs
from minimegatron.layers.attention.mask import padded
from minimegatron.layers.logical import draw, gather_logical, load_logical
from minimegatron.layers.moe.router import set_loss_scale
from minimegatron.layers.param import Init, layout_of, logical_parameters
from minimegatron.models.block import TransformerLayer
from minimegatron.models.chunks import ModelChunks, build_chunks, build_stage
from minimegatron.models.families import family_config
from minimegatron.models.spec import ModuleSpec, spec_from_name
from minimegatron.optim.groups import freeze
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.parallel.data.plain import PlainDataParallel
from minimegatron.training.pipelined import forward_backward
from minimegatron.training.step import forward_step


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train, and how it is cut.

    Attributes:
        layout: fields of `ParallelConfig`, those of a pipeline included.
        model: fields of `TransformerConfig`, `family` among them.
        accumulation: microbatches of a step on each rank.
        overlap, bucket_size, sharding, gathers_late: of the wrapper; `sharding` is a strategy, `fsdp2` or `plain`.
        double: compute in fp64, where only a real mistake is visible.
        seed: of weights and data.
        empty_rank: dp rank whose tokens all count for nothing, or None.
        documents: samples are made of documents that do not see each other. Those of a BERT are padded, anyway.
        freeze: patterns of parameters that have no gradient.
        unused: every layer has a parameter on which no loss depends.
        spec: of the layers, as `--spec` names one.
    """

    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulation: int = 1
    overlap: bool = False
    bucket_size: int | None = None
    sharding: str = "no_shard"
    gathers_late: bool = False
    double: bool = False
    seed: int = 0
    empty_rank: int | None = None
    documents: bool = False
    freeze: tuple[str, ...] = ()
    unused: bool = False
    spec: tuple[str, str] | None = None
    seq_length: int = 16
    micro_batch_size: int = 2

    @property
    def parallel(self) -> ParallelConfig:
        how = {"fsdp2": {"use_torch_fsdp2": True}, "plain": {}}
        return ParallelConfig.from_dict(
            {**self.layout, **how.get(self.sharding, {"data_parallel_sharding_strategy": self.sharding})}
        )

    @functools.cached_property
    def config(self) -> TransformerConfig:
        sizes: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 48,
            "vocab_size": 57,
            "make_vocab_size_divisible_by": 4,
            "max_position_embeddings": 64,
        }
        fields = {**sizes, **self.model}
        return family_config(fields.pop("family", "llama"), **fields)

    @property
    def layers(self) -> ModuleSpec | None:
        return spec_from_name(self.spec, self.config)


# What the serial twin of a case depends on.
TWIN_FIELDS = (
    *("model", "accumulation", "double", "seed", "empty_rank", "documents", "freeze", "unused", "seq_length"),
    "micro_batch_size",
    "spec",
)


def weights(config: TransformerConfig, seed: int, spec: ModuleSpec | None = None) -> dict[str, torch.Tensor]:
    """Logical tensors with norms that are not 1 and biases that are not 0."""
    tensors = {}
    for name, param in logical_parameters(build_stage(config, Mesh.serial(), spec)):
        layout = layout_of(param)
        noise = draw(
            name,
            dataclasses.replace(layout, shape=(layout.rows or param.shape[0], *param.shape[1:]), init=Init(std=0.15)),
            seed,
        )
        tensors[name] = noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return tensors


def microbatch(case: Case, dp_rank: int, index: int) -> dict[str, torch.Tensor]:
    """Tokens, labels and a mask whose count differs from every other microbatch's."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 100 * dp_rank + index)
    ids = torch.randint(0, case.config.vocab_size, (case.micro_batch_size, case.seq_length + 1), generator=generator)
    keep = 0.25 + 0.6 * torch.rand((), generator=generator)
    mask = (torch.rand(ids[:, 1:].shape, generator=generator) < keep).float()
    batch = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": mask * (0.0 if dp_rank == case.empty_rank else 1.0),
    }
    if case.documents:
        begins = torch.rand(mask.shape, generator=generator) < 0.2
        batch["document_ids"] = begins.cumsum(1)
    if case.config.bert_head is not None:
        lengths = torch.randint(case.seq_length // 2, case.seq_length + 1, mask.shape[:1], generator=generator)
        batch["document_ids"] = padded(lengths, case.seq_length)
        batch["tokentype_ids"] = padded(lengths // 3, case.seq_length)
        batch["labels"] = torch.cat([batch["labels"][:, :1] % 2, batch["labels"][:, 1:]], 1)  # the class of the pair
    return with_pictures(batch, case.config, dp_rank + 2 * index) if case.config.sees else batch


# In tokens: windows of 2 x 2 divide few of them; some microbatches have no picture, some an odd number of tokens.
PICTURES: tuple[list[tuple[int, int]], ...] = ([(3, 2)], [], [(1, 3), (2, 2)])


def with_pictures(batch: dict[str, torch.Tensor], config: TransformerConfig, number: int) -> dict[str, torch.Tensor]:
    """A batch whose rows have pictures in place of some tokens."""
    side, rows = config.vision_patch_size * config.vision_spatial_merge_size, []
    every = (config.vision_image_size or 0) // side
    tokens = batch["tokens"].masked_fill(batch["tokens"] == config.image_token_id, 0)
    for i, ids in enumerate(tokens):
        pictures, at = [], 2 + i
        for j, (height, width) in enumerate(PICTURES[number % 3] if i == 0 else PICTURES[(number + i) // 2 % 3]):
            height, width = (every, every) if every else (height, width)
            shape, draw_of = (height * side, width * side, 3), np.random.default_rng([number, i, j])
            pictures.append(patches_of(draw_of.integers(0, 256, shape, dtype=np.uint8), config))
            ids[at : at + height * width] = config.image_token_id
            at += height * width + 1
        rows.append([Seen(ids, pictures)])
    return {**batch, "tokens": tokens, **picture_inputs(rows, config)}


def losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of every token that counts, [b, s]; 0 for the others."""
    return forward_step(iter([batch]), model)[0] * batch["loss_mask"]


def serial_gradients(case: Case, dp: int) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean loss per token, logical gradients) of the whole batch in one process."""
    model = serial_model(case)
    loss = serial_backward(model, case, dp)
    return loss, {
        n: gather_logical(grad_of(p), layout_of(p), Mesh.serial())
        for n, p in logical_parameters(model)
        if p.requires_grad
    }


def serial_model(case: Case) -> Any:
    """The case's model with its weights, in one process."""
    model = build_stage(case.config, Mesh.serial(), case.layers)
    load_logical(model, weights(case.config, case.seed, case.layers))
    return prepared(model, case, Mesh.serial())


def prepared(model: Any, case: Case, mesh: Mesh) -> Any:
    """With a parameter in each layer that nothing reads, and without gradients of some others, as the case says."""
    for layer in model.modules():
        if case.unused and isinstance(layer, TransformerLayer):
            layer.register_parameter("unused", torch.nn.Parameter(torch.ones(7, 3, dtype=case.config.dtype)))
    freeze(model, OptimizerConfig(freeze=case.freeze), mesh)
    return model.double() if case.double else model


def serial_backward(model: torch.nn.Module, case: Case, dp: int) -> float:
    """Leave the gradients of the mean loss over the whole batch in `grad`; returns that loss."""
    batches = [microbatch(case, d, i) for d in range(dp) for i in range(case.accumulation)]
    count = max(sum(float(b["loss_mask"].sum()) for b in batches), 1.0)
    set_loss_scale(model, 1.0 / count)  # what the loss below is multiplied by
    loss = torch.stack([losses(model, b).sum() for b in batches]).sum() / count
    loss.backward()
    return loss.item()


def grad_of(p: torch.Tensor) -> torch.Tensor:
    """The gradient; zeros where the loss does not depend on the parameter."""
    return p.grad if p.grad is not None else torch.zeros_like(p)


def parallel_model(case: Case, mesh: Mesh) -> DataParallel:
    """The case's model with its weights, wrapped; in a pipeline this rank's stages of it."""
    model = build_chunks(case.config, mesh, case.layers)
    load_logical(model, weights(case.config, case.seed, case.layers), stage=mesh.pp.size > 1)
    model = prepared(model, case, mesh)
    if case.sharding == "fsdp2":
        from minimegatron.parallel.data.torch_fsdp import TorchFSDP2  # its import takes half a second

        return TorchFSDP2(model, mesh)
    dtype = torch.float64 if case.double else torch.float32
    if case.sharding == "plain":
        return PlainDataParallel(model, mesh, case.bucket_size or 40_000_000, dtype)
    return DistributedDataParallel(model, mesh, case.bucket_size, case.overlap, dtype, case.sharding, case.gathers_late)


def accumulate(ddp: DataParallel, case: Case, mesh: Mesh) -> float:
    """Forward and backward over this rank's microbatches, then the last sums; returns the mean loss per token."""
    ddp.zero_grad_buffer()
    if isinstance(ddp.module, ModelChunks):
        return _accumulate_pipelined(ddp, case, mesh)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i in range(case.accumulation):
        batch = cut_batch(microbatch(case, mesh.dp.rank, i), mesh)
        with ddp.no_sync() if i < case.accumulation - 1 else contextlib.nullcontext():
            loss = losses(ddp, batch).sum()
            with ddp.backward_pass():
                loss.backward()
        total += loss.detach()
        count += batch["loss_mask"].sum()
    tokens = finalize_model_grads(ddp, mesh, count)
    return (c.all_reduce(total, mesh.dp_cp) / tokens).item()


def _accumulate_pipelined(ddp: DataParallel, case: Case, mesh: Mesh) -> float:
    batches = (cut_batch(microbatch(case, mesh.dp.rank, i), mesh) for i in range(case.accumulation))
    count, reports = forward_backward(forward_step, batches, ddp, case.accumulation, lambda loss: loss)
    assert bool(reports) == any(chunk.post_process for _, chunk in ddp.module.stages()), "the last stage reports"
    tokens = finalize_model_grads(ddp, mesh, count)
    total = reports["lm loss"][0].clone() if reports else torch.zeros((), dtype=torch.float64)
    return (c.all_reduce(c.all_reduce(total, mesh.dp_cp), mesh.pp) / tokens).item()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest element of `b`."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-8)).item()


def twin_key(case: Case, dp: int) -> str:
    """What the serial twin of a case depends on."""
    return f"{dp} {Case(**{field: getattr(case, field) for field in TWIN_FIELDS})}"


def compare_all(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """`compare_with_serial` for cases on equally many ranks.

    Cases that differ in their layout alone have the same twin. Each rank computes its share of the twins for all.
    """
    keys = [twin_key(case, case.parallel.data_parallel_size(world)) for case in cases]
    wanted = list(dict(zip(keys, cases, strict=True)).items())[rank::world]
    mine = {key: serial_gradients(case, case.parallel.data_parallel_size(world)) for key, case in wanted}
    twins = {
        key: twin for part in gather_objects(mine, Mesh.build(ParallelConfig()).world) for key, twin in part.items()
    }
    return [_compare(case, Mesh.build(case.parallel), *twins[key]) for case, key in zip(cases, keys, strict=True)]


def compare_with_serial(
    rank: int, world: int, case: Case, twin: tuple[float, dict[str, torch.Tensor]] | None = None
) -> dict[str, Any]:
    """Runs on every rank: deviations from the twin, and what must be equal or different between ranks.

    Args:
        twin: `serial_gradients` of the case; each rank computes them where they are not given.
    """
    mesh = Mesh.build(case.parallel)
    return _compare(case, mesh, *(twin or serial_gradients(case, mesh.dp.size)))


def _compare(case: Case, mesh: Mesh, want_loss: float, want: dict[str, torch.Tensor]) -> dict[str, Any]:
    ddp = parallel_model(case, mesh)
    loss = accumulate(ddp, case, mesh)
    whole = ddp.whole_gradients()
    with ddp.whole_weights():
        held_weights = {n: p.detach().clone() for n, p in ddp.params.items()}
    got = {n: gather_logical(whole[n], layout_of(p), mesh) for n, p in ddp.params.items()}
    counted = [g for n, g in got.items() if not layout_of(ddp.params[n]).shared]
    squares = sum((g.double().square().sum() for g in counted), torch.zeros((), dtype=torch.float64))
    norm = c.all_reduce(squares, mesh.pp).sqrt().item()
    want_norm = torch.stack([g.double().norm() for g in want.values()]).norm().item()
    held = {name for names in gather_objects(list(got), mesh.pp) for name in names}
    differ, equal = [], []
    for experts, (copies, tp) in ((False, (mesh.dp_cp, mesh.tp)), (True, (mesh.edp, mesh.etp))):
        layouts = {n: layout_of(p) for n, p in ddp.params.items() if (layout_of(p).experts is not None) == experts}
        tensors = {n: held_weights[n] for n in layouts} | {f"{n}.grad": whole[n] for n in layouts}
        sharded = {what for what in tensors if layouts[what.removesuffix(".grad")].sharded}
        over_tp = differing(tensors, tp)
        differ += [f"{what} over {copies.name}" for what in differing(tensors, copies)]
        differ += [f"{what} over {tp.name}" for what in over_tp if what not in sharded]
        equal += [what for what in sharded if what not in over_tp and tp.size > 1 and tensors[what].any()]
    return {
        "loss": abs(loss - want_loss) / abs(want_loss) if want_loss else abs(loss),
        "grad_norm": abs(norm - want_norm) / max(want_norm, 1e-12),
        "grads": {n: distance(got[n], want[n]) for n in got},
        "on_no_stage": sorted(want.keys() - held),
        "replicas_that_differ": differ,
        "shards_that_are_equal": equal,
    }


def differing(tensors: dict[str, torch.Tensor], axis: Axis) -> list[str]:
    """Names of the tensors that are not bit for bit the same on all ranks of the axis, by one all-gather of all."""
    if not tensors or axis.size == 1:
        return []
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])  # exact for smaller dtypes
    first, *others = c.all_gather(flat[None], axis)
    same = torch.stack([first == other for other in others]).all(0).split([t.numel() for t in tensors.values()])
    return [name for name, equal in zip(tensors, same, strict=True) if not equal.all()]


def problems(report: dict[str, Any], tolerance: float) -> list[str]:
    """What is wrong, in words; empty when the layout is the same as serial."""
    found = [f"{key} is off by {report[key]:.2e}" for key in ("loss", "grad_norm") if not report[key] <= tolerance]
    found += [f"gradient of {name} is off by {d:.2e}" for name, d in report["grads"].items() if not d <= tolerance]
    found += [f"no rank has {name}" for name in report["on_no_stage"]]
    found += [f"replicas differ: {what}" for what in report["replicas_that_differ"]]
    found += [f"tp shards are equal: {what}" for what in report["shards_that_are_equal"]]
    return found
