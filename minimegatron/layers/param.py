"""What a parameter is in the whole model, and which part of it lives here.

The problem in a sentence: rank 1 of 4 holds a matrix of shape [48, 64]; to initialise it, save it, convert it, reduce
its gradient or count it in a norm, everybody needs to know what it is a part *of*.

Every parameter carries a `ParamLayout` as `param.param_layout`. It says the shape of the logical tensor, along which
`dim` it is cut over the tp axis, and which ranges of that dim each rank holds. Ranges, plural, because a part need not
be one piece: a gated MLP stores [gate; up] and each rank needs the *same* rows of both halves; cutting the stacked
matrix into equal blocks would give one rank only gates.

The experts of a layer are stacked, one slice of dim 0 for each. A rank of ep holds a range of them (`experts`), each
of which may be cut further, over etp in place of tp. That is all that tells them from other parameters; who asks which
ranks hold copies, or parts, looks at `experts`.

From this one description follow

* initialisation that is equal in every layout: the logical tensor is drawn from generators seeded by (seed, name) and
  each rank keeps its part (`initialize`), so tp, pp, dp and the order of construction cannot matter; large matrices are
  drawn in tiles (`layers/noise.py`) and experts one by one, from their number in the whole model, so that a rank draws
  little but what it holds;
* loading and gathering logical tensors (`load_logical`, `gather_logical`), which converters and tests use;
* the reduction that a replicated parameter's gradient still needs (`partial`, see `parallel/finalize.py`);
* which ranks hold copies that must stay equal (`copy_axes`, see `comm/replicas.py`);
* who counts it in the global gradient norm (`sharded`, see `optim/clip.py`).

| `partial`    | a parameter that is replicated over tp, but whose gradient on each rank is only...            |
|--------------|------------------------------------------------------------------------------------------------|
| ""           | complete: every tp rank computed the same number                                               |
| "sequence"   | ...the sum over its own tokens when sequence parallelism is on: norms, row biases, positions    |
| "heads"      | ...the sum over its own heads, whenever tp > 1: the norms of queries and keys                   |

Megatron-LM keeps this in attributes of the parameter (`tensor_model_parallel`, `partition_dim`, `sequence_parallel`,
`shared`) and finds the norms of queries and keys by a substring of their name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from minimegatron.comm.collectives import all_gather
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.noise import Ranges, is_tiled, one_stream, tiles

_WRAPPERS = re.compile(r"^(module\.)?(chunks\.\d+\.)?")


@dataclasses.dataclass(frozen=True)
class Init:
    """How a parameter starts: normal with mean 0 and this `std`, or the constant `value` where std is 0."""

    std: float = 0.0
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """A parameter's place in the logical model.

    Attributes:
        shape: of the logical tensor, padding included.
        dim: dim that is cut over tp (experts: over etp); None when every rank of it holds the whole tensor.
        parts: for each tp rank the ranges of `dim` it holds, in the order in which it stores them.
        rank: this rank's position in `parts`.
        init: initial values.
        partial: which sum its gradient still needs (see the module docstring).
        rows: rows of dim 0 that mean something; the rest is padding (a vocabulary), kept at 0.
        shared: a second copy of a tied weight; not counted in norms, not saved.
        copies: axis over which ranks hold copies of a tied weight whose gradients add up; "" where there are none.
        tied_to: logical name of the weight that this is a copy of; "" for an original.
        experts: the experts [first, stop) that are here, of those that dim 0 stacks; None where dim 0 is no stack.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[Ranges, ...] = ()
    rank: int = 0
    init: Init = Init()
    partial: str = ""
    rows: int | None = None
    shared: bool = False
    copies: str = ""
    tied_to: str = ""
    experts: tuple[int, int] | None = None

    @property
    def sharded(self) -> bool:
        """Whether tp ranks (experts: etp ranks) hold different parts."""
        return self.dim is not None and len(self.parts) > 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.experts is not None:
            shape[0] = self.experts[1] - self.experts[0]
        if self.dim is not None:
            shape[self.dim] = sum(stop - start for start, stop in self.parts[self.rank])
        return tuple(shape)

    @property
    def one_expert(self) -> ParamLayout:
        """The layout of a slice of dim 0, of a parameter that stacks experts."""
        dim = None if self.dim is None else self.dim - 1
        return dataclasses.replace(self, shape=self.shape[1:], dim=dim, experts=None)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logical tensor (a copy)."""
        if self.experts is not None:
            full = full[slice(*self.experts)]
        if self.dim is None:
            return full.clone()
        return torch.cat([full.narrow(self.dim, a, b - a) for a, b in self.parts[self.rank]], self.dim)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The logical tensor from every tp rank's part; of experts, those that the parts hold."""
        if self.dim is None:
            return parts[0].clone()
        shape = list(parts[0].shape)
        shape[self.dim] = self.shape[self.dim]
        full = parts[0].new_empty(shape)
        for ranges, part in zip(self.parts, parts, strict=True):
            pieces = part.split([b - a for a, b in ranges], self.dim)
            for (a, b), piece in zip(ranges, pieces, strict=True):
                full.narrow(self.dim, a, b - a).copy_(piece)
        return full


def cut_evenly(length: int, tp: Axis, what: str, blocks: int = 1) -> tuple[Ranges, ...]:
    """Ranges of `blocks` stacked blocks, each cut into equal parts: rank r holds part r of every block.

    Raises:
        ConfigError: a block cannot be cut into `tp.size` equal parts.
    """
    block = length // blocks
    if length % blocks or block % tp.size:
        raise ConfigError(
            f"{what} has {length} rows in {blocks} block(s); "
            f"a block of {block} cannot be cut into {tp.size} equal parts",
            fix=f"choose a tensor_model_parallel_size that divides {block}",
        )
    n = block // tp.size
    return tuple(tuple((k * block + r * n, k * block + (r + 1) * n) for k in range(blocks)) for r in range(tp.size))


def new_parameter(layout: ParamLayout, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter of the layout's local shape, on torch's current default device."""
    param = nn.Parameter(torch.empty(layout.local_shape, dtype=dtype))
    param.param_layout = layout  # type: ignore[attr-defined]
    return param


def layout_of(param: torch.Tensor) -> ParamLayout:
    """The parameter's layout; one that has none is replicated and complete."""
    return getattr(param, "param_layout", None) or ParamLayout(tuple(param.shape))


def logical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(logical name, parameter): names are the same in every layout because layers are named by their global number.

    Wrappers and the chunks of a pipeline add nothing to a name, and a tied copy has the name of its original.
    """
    for name, param in model.named_parameters():
        yield layout_of(param).tied_to or _WRAPPERS.sub("", name), param


def copy_axes(layout: ParamLayout, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes along which other ranks hold copies of the part that is here, and which must stay equal to it.

    Dense parameters have copies over cp and dp, experts over edp; what is not cut over tp (experts: etp) has copies
    there too, and a tied weight on the other end of the pipeline (`copies`).
    """
    cut, same = (mesh.tp, (mesh.cp, mesh.dp)) if layout.experts is None else (mesh.etp, (mesh.edp,))
    axes = same if layout.sharded else (cut, *same)
    return (*axes, mesh.axis(layout.copies)) if layout.copies else axes


# ---------------------------------------------------------------------------------------------- initial values


def draw(name: str, layout: ParamLayout, seed: int) -> torch.Tensor:
    """The logical tensor's initial values in fp32, a function of (seed, name, logical shape) alone."""
    experts = None if layout.experts is None else (0, layout.shape[0])
    return draw_part(name, dataclasses.replace(layout, dim=None, parts=(), experts=experts), seed)


def draw_part(name: str, layout: ParamLayout, seed: int) -> torch.Tensor:
    """This rank's part of `draw`: of a stack of experts no others are drawn, of a large matrix no other tiles."""
    if layout.experts is not None:
        return torch.stack([draw_part(f"{name}.{e}", layout.one_expert, seed) for e in range(*layout.experts)])
    shape = layout.shape if layout.rows is None else (layout.rows, *layout.shape[1:])
    if layout.init.std == 0.0:
        return layout.take(_padded(torch.full(shape, layout.init.value, device="cpu"), layout))
    if not is_tiled(shape):
        return layout.take(_padded(one_stream(name, seed, shape) * layout.init.std, layout))
    here: list[Ranges] = [((0, length),) for length in layout.shape]
    if layout.dim is not None:
        here[layout.dim] = layout.parts[layout.rank]
    rows = tuple((min(a, shape[0]), min(b, shape[0])) for a, b in here[0])
    assert all(b - a == d - c for (a, b), (c, d) in zip(here[0][:-1], rows[:-1], strict=True)), "padding is at the end"
    values = tiles(name, seed, (shape[0], shape[1]), rows, here[1]).mul_(layout.init.std)
    return _padded(values, layout, layout.local_shape[0])


def _padded(values: torch.Tensor, layout: ParamLayout, rows: int | None = None) -> torch.Tensor:
    """Zeros behind `values`, up to the rows of the layout or to `rows`."""
    missing = (layout.shape[0] if rows is None else rows) - len(values) if values.dim() else 0
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))]) if missing else values


@torch.no_grad()
def initialize(model: nn.Module, seed: int, device: torch.device | str | None = None) -> None:
    """Give every parameter its initial value; the logical model is the same in every layout and on every device.

    Args:
        model: whose parameters carry layouts.
        seed: of the whole model.
        device: where the model goes; parameters on the meta device get their memory there.
    """
    if device is not None:
        materialize(model, device)
        model.to(device)
    for name, param in logical_parameters(model):
        param.copy_(draw_part(name, layout_of(param), seed))


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give parameters on the meta device memory on `device`; others stay where they are.

    `nn.Module.to_empty` would make new parameters without their layouts, and untie tied ones.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            if param not in made:
                with torch.device(device):
                    made[param] = new_parameter(layout_of(param), param.dtype)
                made[param].requires_grad_(param.requires_grad)
            module._parameters[name] = made[param]


# ---------------------------------------------------------------------------------------------- logical tensors


@torch.no_grad()
def gather_logical(tensor: torch.Tensor, layout: ParamLayout, mesh: Mesh | Axis) -> torch.Tensor:
    """The logical tensor of a parameter (or of its gradient), on every rank; all of tp (etp and ep) must call.

    Args:
        tensor: this rank's part.
        layout: of the parameter.
        mesh: the mesh; where there are no experts its tp axis is enough.

    Returns:
        The tensor without padding rows.
    """
    cut_over = mesh if isinstance(mesh, Axis) else mesh.tp
    if layout.experts is not None:
        assert isinstance(mesh, Mesh), "experts are gathered over two axes: pass the mesh"
        cut_over = mesh.etp
    parts = [tensor.detach()] if not layout.sharded else list(all_gather(tensor.detach()[None], cut_over).unbind(0))
    full = layout.join(parts)
    if layout.experts is not None:
        assert isinstance(mesh, Mesh)
        full = all_gather(full, mesh.ep)
    return full if layout.rows is None else full[: layout.rows]


@torch.no_grad()
def load_logical(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, stage: bool = False) -> None:
    """Fill the model from logical tensors; every parameter must be there, with its exact shape, and nothing else.

    Args:
        model: a whole model, or with `stage` the stages of a pipeline that are on this rank: then tensors of other
            stages are passed over.
        tensors: logical name -> tensor, padding rows left out.

    Raises:
        CheckpointError: listing every missing, unexpected and misshapen tensor at once.
    """
    params = dict(logical_parameters(model))
    problems = [f"missing {n}" for n in params if n not in tensors]
    problems += [f"unexpected {n} {tuple(tensors[n].shape)}" for n in tensors if n not in params and not stage]
    for name in params.keys() & tensors.keys():
        layout = layout_of(params[name])
        want = layout.shape if layout.rows is None else (layout.rows, *layout.shape[1:])
        if tuple(tensors[name].shape) != tuple(want):
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}, the model wants {tuple(want)}")
    if problems:
        raise CheckpointError(
            "the tensors do not fit the model:\n  " + "\n  ".join(sorted(problems)), fix="load the model they belong to"
        )
    for name, param in params.items():
        layout, full = layout_of(param), tensors[name]
        if layout.rows is not None and layout.rows < layout.shape[0]:
            full = torch.cat([full, full.new_zeros((layout.shape[0] - layout.rows, *layout.shape[1:]))])
        param.copy_(layout.take(full))
