"""FP8 in parallel layers: bit for bit what a model of the formats says, the same in every layout, once a step."""

from __future__ import annotations

import pytest
import torch

from minimegatron import trace
from minimegatron.comm.axis import ALONE
from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.attention.mla import ReplicatedLinear
from minimegatron.layers.fp8 import enable
from minimegatron.layers.fp8 import matmul as fp8
from minimegatron.layers.fp8.linear import ParallelFp8
from minimegatron.layers.fp8.matmul import Fp8Recipe
from minimegatron.layers.fp8.scaling import DelayedScale, together
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.logical import load_logical
from minimegatron.layers.moe.layer import Experts
from minimegatron.layers.param import Init
from minimegatron.layers.wgrad import WeightGradStore, compute_wgrads
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.training.step import forward_step
from tests.kernels.test_fp8_cast import by_search, numbers_of
from tests.layers.fp8.test_matmul import normal
from tests.thorough import mostly_slow, mostly_thorough

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 448.0, E5M2: 57344.0}
TOKENS, WIDTH = 32, 128


# ------------------------------------------------------------------------------------------------ another opinion


def rounded(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x times scale, in fp32, to the nearest number of the list; back to what the number stands for, in fp64."""
    values, codes = numbers_of(dtype)
    code = by_search((x.float() * scale).contiguous(), dtype).long()
    sign = torch.where(code >= 128, -1.0, 1.0).double()
    return sign * values[torch.searchsorted(codes, code % 128)]


def tiled(x: torch.Tensor, bm: int, bn: int, top_power: int) -> torch.Tensor:
    """E4M3 with a power of two for every bm x bn tile; x [m, n], the result in fp64."""
    tiles = x.unflatten(1, (-1, min(bn, x.shape[1]))).unflatten(0, (-1, min(bm, x.shape[0])))  # [m/bm, bm, n/bn, bn]
    mantissa, exponent = torch.frexp(tiles.abs().amax((1, 3), keepdim=True))
    power = exponent - 1 - 8 + top_power * (mantissa > 0.875)
    return (rounded(tiles, 2.0**-power, E4M3) * (2.0**power).double()).flatten(2).flatten(0, 1)


class Opinion:
    """y, dx, dW of a matrix in FP8, over steps, from the whole tensors in one process."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config, self.history, self.scales = config, {}, {}

    def quantised(self, x: torch.Tensor, which: str, sums_over_rows: bool) -> torch.Tensor:
        c = self.config
        dtype = E5M2 if which == "gradient" and c.fp8_format == "hybrid" else E4M3
        if c.fp8_recipe in ("blockwise", "mxfp8"):
            n = 32 if c.fp8_recipe == "mxfp8" else 128
            square = which == "weight" and c.fp8_recipe == "blockwise"
            tile = (n, n) if square else (n, 1) if sums_over_rows else (1, n)
            return tiled(x, *tile, c.fp8_recipe == "blockwise")
        amax = x.abs().max()
        scale = self.scales.get(which, torch.tensor(1.0)) if c.fp8_recipe == "delayed" else TOP[dtype] / amax
        self.history.setdefault(which, []).append(amax.item())
        return rounded(x, scale, dtype) * (1 / scale).double()

    def products(self, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        y = self.quantised(x, "input", False) @ self.quantised(w, "weight", False).t()
        dx = self.quantised(dy, "gradient", False) @ self.quantised(w, "weight", True)
        if not self.config.fp8_wgrad:
            return [y, dx, dy.double().t() @ x.double()]
        return [y, dx, self.quantised(dy, "gradient", True).t() @ self.quantised(x, "input", True)]

    def end_of_step(self) -> None:
        """Every `which` is seen twice a step; what counts are the last so many steps."""
        for which, seen in self.history.items():
            steps = [max(seen[i : i + 2]) for i in range(0, len(seen), 2)]
            window = steps[-self.config.fp8_amax_history_len :]
            amax = max(window) if self.config.fp8_amax_compute_algo == "max" else steps[-1]
            dtype = E5M2 if which == "gradient" and self.config.fp8_format == "hybrid" else E4M3
            self.scales[which] = torch.tensor(TOP[dtype] / 2**self.config.fp8_margin) / torch.tensor(amax)


def settings(recipe: str, **more) -> TransformerConfig:
    form = "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3"
    return TransformerConfig(**{"fp8_format": form, "fp8_recipe": recipe, **more})


def data(step: int) -> list[torch.Tensor]:
    """x, W, dy of one step; the largest element of each is on one rank alone, and moves."""
    tensors = [normal(TOKENS, 2 * WIDTH, seed=step), normal(2 * WIDTH, 2 * WIDTH, seed=50 + step)]
    tensors += [normal(TOKENS, 2 * WIDTH, seed=90 + step, scale=1e-3)]
    for i, t in enumerate(tensors):
        t[-1 - step, 3 + i] = t.abs().max() * (2 + step)
    return tensors


def layer_of(rank: int, world: int, kind: str, config: TransformerConfig, sp: bool, put_off: bool):
    """Three steps of one layer; y, dx, dW of the last, whole, and this rank's state."""
    parallel = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sp)
    mesh = Mesh.build(parallel)
    cls = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = cls(2 * WIDTH, 2 * WIDTH, mesh.tp, init=Init(), bias=False, sequence_parallel=sp)
    enable.enable_fp8(layer, config, mesh)
    mine = slice(mesh.tp.rank * 2 * WIDTH // world, (mesh.tp.rank + 1) * 2 * WIDTH // world)
    own = slice(mesh.tp.rank * TOKENS // world, (mesh.tp.rank + 1) * TOKENS // world) if sp else slice(None)
    for step in range(3):
        x, w, dy = data(step)
        load_logical(layer, {"weight": w})
        x, dy = (x[own], dy[:, mine]) if kind == "column" else (x[:, mine], dy[own])
        x = x.unsqueeze(1).clone().requires_grad_()
        layer.weight.grad, layer.wgrad_store = None, WeightGradStore() if put_off else None
        with trace.record() as log:
            y = layer(x)
            y.backward(dy.unsqueeze(1))
            if put_off:
                assert layer.weight.grad is None
                compute_wgrads(layer.wgrad_store.take())
        enable.move_scales(layer, mesh)
    whole_y = all_gather(y.detach()[:, 0], mesh.tp, 1 if kind == "column" else 0) if kind == "column" or sp else y[:, 0]
    dx = x.grad[:, 0]
    dx = dx if kind == "column" and not sp else all_gather(dx, mesh.tp, 0 if kind == "column" else 1)
    dw = all_gather(layer.weight.grad, mesh.tp, 0 if kind == "column" else 1)
    return [whole_y.detach(), dx, dw], {k: v.clone() for k, v in layer.fp8.state_dict().items()}, log.summary()


CASES = [
    ("delayed", 1, False, {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max", "fp8_margin": 1}),
    ("delayed", 2, True, {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}),
    ("delayed", 2, False, {"fp8_wgrad": False}),
    ("tensorwise", 1, False, {"fp8_format": "e4m3"}),
    ("tensorwise", 2, True, {}),
    ("tensorwise", 2, False, {}),
    ("blockwise", 2, True, {}),
    ("mxfp8", 2, True, {}),
]


KINDS = [(kind, *case) for kind in ("column", "row") for case in CASES]


@pytest.mark.parametrize("kind, recipe, tp, sp, more", mostly_thorough(KINDS, lambda case: case[2] == 2))
def test_every_product_is_what_the_bits_say(ranks, kind, recipe, tp, sp, more):
    config = settings(recipe, **more)
    opinion, want = Opinion(config), []
    for step in range(0 if recipe == "delayed" else 2, 3):
        want = opinion.products(*data(step))
        opinion.end_of_step()
    put_off = kind == "column" and recipe in ("delayed", "mxfp8")
    results = ranks(tp).run(layer_of, kind, config, sp, put_off)
    for got, state, log in results:
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).abs().max() <= 3e-6 * b.abs().max()
        assert state.keys() == results[0][1].keys() and all(torch.equal(state[k], v) for k, v in results[0][1].items())
        if recipe == "delayed":
            for which, scale in opinion.scales.items():
                assert state[f"{which}.scale"] == scale
        if sp and kind == "column" and config.fp8_wgrad and recipe in ("delayed", "tensorwise"):
            assert log["all_gather/tp"] == {"count": 2, "nbytes": 2 * TOKENS * 2 * WIDTH}, "x travels as bytes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_fp8_product_is_ours(dtype):
    """What a GPU is asked for, on the CPU: y, dx and dW, of 32 tokens and of the 5 of an expert."""
    (x, w, dy), formats = data(0), (E4M3, E4M3, E5M2)
    x, w, dy = (fp8.cast_at_once(t, d, 0, ALONE, "torch") for t, d in zip((x, w, dy), formats, strict=True))
    few, dfew = fp8.Quantised(x.q[:5], x.inverse), fp8.Quantised(dy.q[:5], dy.inverse)
    for a, b in ((x, w), (dy, w.t()), (dy.t(), x.t()), (few, w), (dfew, w.t()), (dfew.t(), few.t())):
        try:
            theirs = fp8.scaled_mm(a, b, dtype)
        except RuntimeError as error:
            if "primitive" not in str(error):
                raise
            pytest.skip(f"torch has no FP8 product on this CPU: {error}")
        torch.testing.assert_close(theirs, fp8.product(a, b, dtype), rtol=1e-2, atol=1e-5)


# ------------------------------------------------------------------------------------------------ in a model

TINY = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
    "vocab_size": 64, "fp8_format": "hybrid",
}  # fmt: skip


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(2, 16)}


def gradients(config: TransformerConfig, casts: list | None = None) -> dict[str, torch.Tensor]:
    """Two microbatches of a second step, with the scales of the first: gradients, and the state afterwards."""
    mesh = Mesh.serial()
    model = build_model(config, mesh, seed=0)
    for step in range(2):
        model.zero_grad()
        with enable.keeping_weights(model):
            for micro in range(2):
                output, summed = forward_step(iter([batch(2 * step + micro)]), model)
                summed(output)[0].backward()
        enable.move_scales(model, mesh)
        if casts is not None and step == 0:
            casts.clear()
    return {n: p.grad for n, p in model.named_parameters()} | {n: b for n, b in model.named_buffers() if "fp8" in n}


@pytest.mark.parametrize("recipe", mostly_slow(["delayed", "tensorwise"], [0]))
def test_recompute_changes_nothing_and_sees_nothing_twice(recipe):
    want = gradients(family_config("llama", **TINY, fp8_recipe=recipe))
    assert any("fp8" in name for name in want) is (recipe == "delayed")
    ways = ({"recompute_granularity": "full"}, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)})
    for way in ways:
        got = gradients(family_config("llama", **TINY, fp8_recipe=recipe, **way))
        assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def test_only_the_layers_in_the_middle():
    config = family_config("llama", **TINY, fp8_recipe="tensorwise", first_last_layers_bf16=True)
    model = build_model(config, Mesh.serial(), seed=0)
    inside = {n.split(".")[2] for n, m in model.named_modules() if isinstance(m, ParallelFp8)}
    assert inside == {"1", "2"}


def test_scales_are_saved_with_the_model_and_go_on():
    config = family_config("llama", **TINY, fp8_amax_history_len=3, fp8_amax_compute_algo="max")
    mesh = Mesh.serial()
    first, second = (build_model(config, mesh, seed=s) for s in (0, 1))
    for step in range(2):
        first(batch(step)["tokens"]).sum().backward()
        enable.move_scales(first, mesh)
    state = {k: v.clone() for k, v in first.state_dict().items()}
    assert sum(k.endswith("amax_history") for k in state) == 3 * 16
    second.load_state_dict(state)
    tokens = batch(9)["tokens"]
    assert torch.equal(first(tokens), second(tokens))
    second.eval()
    second(tokens)
    second.train()
    for model in (first, second):
        enable.move_scales(model, mesh)
    pairs = zip(first.named_buffers(), second.buffers(), strict=True)
    differ = [n for (n, a), b in pairs if not torch.equal(a, b)]
    assert not differ, "an evaluation has moved scales"


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"fp8_format": "e5m2"}, "'e4m3', 'hybrid'"),
        ({"fp8_format": "hybrid", "fp8_recipe": "blockwise"}, "--fp8-format e4m3"),
        ({"fp8_margin": 2}, "without fp8_format"),
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_margin": 2}, "remembers nothing"),
        ({"fp8_format": "hybrid", "first_last_layers_bf16": True}, "--fp8-recipe tensorwise"),
        ({"fp8_format": "hybrid", "num_layers_at_end_in_bf16": 2}, "keep no layer"),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True}, "none is in FP8"),
        ({"fp8_format": "hybrid", "fp8_amax_history_len": 0}, "at least 1"),
        (
            {"fp8_format": "hybrid", "num_experts": 2, "add_bias_linear": False, "moe_grouped_gemm": True},
            "--moe-grouped-gemm",
        ),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(ConfigError, match="(?s)fix:") as caught:
        TransformerConfig(**fields)
    assert words in str(caught.value)


def test_sizes_that_a_recipe_does_not_take():
    for config, words in [
        (TransformerConfig(hidden_size=64, fp8_format="e4m3", fp8_recipe="blockwise"), "hidden_size 64"),
        (TransformerConfig(hidden_size=32, ffn_hidden_size=40, fp8_format="hybrid"), "ffn_hidden_size / tp 40"),
    ]:
        with pytest.raises(ConfigError, match="multiples of") as caught:
            build_model(config, Mesh.serial(), seed=0)
        assert words in str(caught.value)
    layer = ColumnParallelLinear(48, 64, Mesh.serial().tp, init=Init())
    with pytest.raises(ConfigError, match="inputs 48 on a rank, and fp8_recipe mxfp8 takes multiples of 32"):
        enable.enable_fp8(layer, settings("mxfp8"), Mesh.serial())


# ---------------------------------------------------------------------------------------------------------------- ranks

ROWS, INPUTS, OUTPUTS = 32, 32, 64


def peaked(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Its largest number is in the last row and column: with the last rank of any cut."""
    x = normal(rows, columns, seed=seed)
    x[-1, -1] = 7.0 * x.abs().max()
    return x


def part(size: int, rank: int, world: int) -> slice:
    return slice(rank * size // world, (rank + 1) * size // world)


def of_latents(rank: int, world: int) -> list[torch.Tensor]:
    """y, dx, dW, whole, of a matrix that every rank has, with the tokens that it holds."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=world > 1))
    layer = ReplicatedLinear(INPUTS, OUTPUTS, Init(), torch.float32)
    enable.enable_fp8(layer, scaled("tensorwise"), mesh)
    mine = part(ROWS, rank, world)
    x = peaked(ROWS, INPUTS, 0)[mine].clone().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(peaked(OUTPUTS, INPUTS, 1))
    y = layer(x)
    y.backward(peaked(ROWS, OUTPUTS, 2)[mine])
    return [all_gather(y.detach(), mesh.tp), all_gather(x.grad, mesh.tp), all_reduce(layer.weight.grad, mesh.tp)]


def of_an_expert(rank: int, world: int) -> list[torch.Tensor]:
    """Products of fc1 (its outputs cut) and fc2 (its inputs cut): y, dx, dW, whole."""
    parallel = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=world > 1)
    config = scaled("tensorwise", num_experts=2, moe_ffn_hidden_size=OUTPUTS, add_bias_linear=False)
    mesh = Mesh.build(parallel)
    assert mesh.etp.size == world
    experts = Experts(config, mesh)
    enable.enable_fp8(experts, config, mesh)
    fc1, fc2 = experts._products(0, ROWS)
    mine, found = part(OUTPUTS, rank, world), []
    x, w1, dy = peaked(ROWS, INPUTS, 0), peaked(OUTPUTS, INPUTS, 1)[mine], peaked(ROWS, OUTPUTS, 2)[:, mine]
    x, w1 = x.clone().requires_grad_(), w1.clone().requires_grad_()
    y = fc1(x, w1)
    y.backward(dy)
    found += [all_gather(y.detach(), mesh.etp, 1), all_reduce(x.grad, mesh.etp), all_gather(w1.grad, mesh.etp)]
    x, w2, dy = peaked(ROWS, OUTPUTS, 3)[:, mine], peaked(INPUTS, OUTPUTS, 4)[:, mine], peaked(ROWS, INPUTS, 5)
    x, w2 = x.clone().requires_grad_(), w2.clone().requires_grad_()
    y = fc2(x, w2)
    y.backward(dy)
    found += [all_reduce(y.detach(), mesh.etp), all_gather(x.grad, mesh.etp, 1), all_gather(w2.grad, mesh.etp, 1)]
    return found


def scaled(recipe: str, **more) -> TransformerConfig:
    return TransformerConfig(**{"hidden_size": INPUTS, "fp8_format": "hybrid", "fp8_recipe": recipe, **more})


@pytest.mark.parametrize("products", [of_latents, of_an_expert])
def test_parts_of_a_tensor_have_the_scale_of_the_whole(ranks, products):
    """With a scale of its own a rank would round its part otherwise: products would be off by percents."""
    want = products(0, 1)
    for got in ranks(2).run(products):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-6 * b.abs().max().item())


def scales_after_a_step(rank: int, world: int, only: bool, layout: dict[str, int]) -> dict[str, float]:
    mesh = Mesh.build(ParallelConfig(**layout))
    layer = ColumnParallelLinear(INPUTS, OUTPUTS, mesh.tp, init=Init(), bias=False)
    enable.enable_fp8(layer, scaled("delayed", tp_only_amax_red=only), mesh)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.full((16, INPUTS), 2.0 + rank)
    layer(x).backward(torch.full((16, OUTPUTS // mesh.tp.size), 0.5 + rank))
    enable.move_scales(layer, mesh)
    return {n.split(".")[1]: 1 / b.item() for n, b in layer.named_buffers() if n.endswith("scale")}


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}])
def test_who_agrees_on_a_delayed_scale(ranks, layout, only):
    """`tp_only_amax_red`: replicas of dp keep scales of their own; the ranks that share a model's tensors never do."""
    first, second = ranks(2).run(scales_after_a_step, only, layout)
    assert first["weight"] == second["weight"] == pytest.approx(1 / 448)
    assert second["input"] == pytest.approx(3 / 448) and second["gradient"] == pytest.approx(1.5 / 57344)
    if only and not layout:
        assert first["input"] == pytest.approx(2 / 448) and first["gradient"] == pytest.approx(0.5 / 57344)
    else:
        assert first == second


def ranks_with_other_numbers(rank: int, world: int) -> list[float]:
    """NaN on one rank, numbers on the other: a maximum must not lose it. Only the second tensor's scale moves."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    states = [DelayedScale(Fp8Recipe(history=2), E4M3) for _ in range(2)]
    states[0](torch.tensor([[torch.nan if rank == 1 else 3.0]]))
    states[1](torch.tensor([[4.0 + rank]]))
    together(states).move(mesh.tp)
    return [s.scale.item() for s in states] + [h for s in states for h in s.amax_history.tolist()]


def test_an_overflow_on_one_rank_is_everybodys(ranks):
    for got in ranks(2).run(ranks_with_other_numbers):
        assert got == [1.0, pytest.approx(448 / 5), 0.0, 0.0, 0.0, 5.0]
