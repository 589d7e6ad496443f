"""Fields that say in which precision products are computed: FP8 and its scales.

`TransformerConfig` (config/model.py) inherits them. They have the names of Megatron-LM's flags:

| field                       | says                                                                            |
|-----------------------------|---------------------------------------------------------------------------------|
| `fp8_format`                | FP8 in the linear layers: `hybrid` is E4M3 forward and E5M2 for gradients        |
| `fp8_recipe`                | what a scale belongs to, and from when it is (table: `layers/fp8/matmul.py`)     |
| `fp8_amax_...`, `fp8_margin`| delayed scaling: how a scale follows from what was seen                          |
| `fp8_wgrad`                 | whether dW is an FP8 product as well                                            |
| `first_last_layers_bf16`    | the layers at both ends stay in `params_dtype`                                  |

An FP8 product on tensor cores wants both dims of both factors to be multiples of 16, and a recipe with tiles whole
tiles. What does not fit is refused, on a CPU as well, so that a run that is tried here runs there.

Megatron-LM: the FP8 fields of `TransformerConfig` in `megatron/core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config.fields import TRAINED, Config, opt
from minimegatron.errors import require

# What the dims of a factor must be multiples of.
MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


@dataclasses.dataclass(frozen=True)
class Fp8Fields(Config):
    """FP8 in the products of linear layers."""

    fp8_format: str | None = opt(
        TRAINED,
        None,
        "FP8 products in the linear layers: e4m3 everywhere, or hybrid, whose gradients are e5m2",
        (None, "e4m3", "hybrid"),
    )
    fp8_recipe: str = opt(
        TRAINED,
        "delayed",
        "what a scale is of: a tensor and what was seen before, a tensor as it is, 128 numbers, 32 numbers",
        ("delayed", "tensorwise", "blockwise", "mxfp8"),
    )
    fp8_margin: int = opt(TRAINED, 0, "delayed: leave so many powers of two below the largest number", least=0)
    fp8_amax_history_len: int = opt(TRAINED, 1, "delayed: steps that are remembered", least=1)
    fp8_amax_compute_algo: str = opt(TRAINED, "most_recent", "delayed: which of them counts", ("most_recent", "max"))
    fp8_wgrad: bool = opt(TRAINED, True, "FP8 for the gradients of weights too")
    tp_only_amax_red: bool = opt(TRAINED, False, "delayed: agree on scales over tp and cp, not over dp")
    first_last_layers_bf16: bool = opt(TRAINED, False, "no FP8 in the first and the last layers")
    num_layers_at_start_in_bf16: int = opt(TRAINED, 1, "with first_last_layers_bf16: how many at the start", least=0)
    num_layers_at_end_in_bf16: int = opt(TRAINED, 1, "with first_last_layers_bf16: how many at the end", least=0)

    def fp8_layer(self, layer_number: int) -> bool:
        """Whether layer `layer_number` (from 0) computes its products in FP8."""
        if self.fp8_format is None:
            return False
        layers: int = self.num_layers  # type: ignore[attr-defined]
        first, last = self.num_layers_at_start_in_bf16, layers - self.num_layers_at_end_in_bf16
        return not self.first_last_layers_bf16 or first <= layer_number < last

    def _check_fp8(self, num_experts: int | None, grouped_gemm: bool) -> None:
        names = {f.name: f.default for f in dataclasses.fields(Fp8Fields)}
        changed = [name for name, default in names.items() if getattr(self, name) != default]
        if self.fp8_format is None:
            require(not changed, f"{', '.join(changed)} without fp8_format", "--fp8-format hybrid, or drop them")
            return
        recipe = self.fp8_recipe
        require(
            recipe in ("delayed", "tensorwise") or self.fp8_format == "e4m3",
            f"fp8_recipe {recipe} with fp8_format {self.fp8_format}: a tile has its own scale and does not need "
            "the range of e5m2; only its missing digit would remain",
            "--fp8-format e4m3",
        )
        of_delayed = {"fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "tp_only_amax_red"} & {*changed}
        require(
            recipe == "delayed" or not of_delayed,
            f"{', '.join(sorted(of_delayed))} with fp8_recipe {recipe}, which remembers nothing",
            "drop them, or --fp8-recipe delayed",
        )
        require(
            num_experts is None or not grouped_gemm,
            f"fp8_format {self.fp8_format} with moe_grouped_gemm: torch's grouped product has one dtype, and an expert "
            "has scales of its own",
            "drop --moe-grouped-gemm",
        )
        require(
            num_experts is None or self.transformer_impl == "local",  # type: ignore[attr-defined]
            f"transformer_impl transformer_engine and FP8 with num_experts={num_experts}: experts are our own, and "
            "would stay in the model's precision",
            "--transformer-impl local",
        )
        self._check_ends()

    def _check_ends(self) -> None:
        ends = (self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16)
        if not self.first_last_layers_bf16:
            require(
                ends == (1, 1),
                f"num_layers_at_start_in_bf16={ends[0]}, num_layers_at_end_in_bf16={ends[1]} keep no layer in bf16",
                "--first-last-layers-bf16, or drop them",
            )
            return
        require(
            self.fp8_recipe != "delayed",
            "first_last_layers_bf16 with fp8_recipe delayed (Megatron's rule)",
            "--fp8-recipe tensorwise, blockwise or mxfp8",
        )
        layers: int = self.num_layers  # type: ignore[attr-defined]
        require(
            sum(ends) < layers,
            f"{ends[0]} layers at the start and {ends[1]} at the end of {layers} stay in bf16: none is in FP8",
            f"choose numbers whose sum is below {layers}, or drop --fp8-format",
        )


def check_fp8_dims(recipe: str, what: str, **dims: int) -> None:
    """Refuse a factor of an FP8 product whose dims are not whole tiles, or nothing that tensor cores take.

    Args:
        recipe: `fp8_recipe`.
        what: the layer or the tensor, for the message.
        dims: name -> size on one rank.

    Raises:
        ConfigError: with the size and the multiple.
    """
    multiple = MULTIPLE[recipe]
    wrong = {name: size for name, size in dims.items() if size % multiple}
    require(
        not wrong,
        f"{what}: {', '.join(f'{name} {size}' for name, size in wrong.items())} on a rank, and fp8_recipe {recipe} "
        f"takes multiples of {multiple}",
        f"choose sizes that are multiples of {multiple} after division by tp and cp, or another fp8_recipe",
    )
