"""Fields of a hybrid model: which part each layer is, and the sizes of Mamba-2.

A layer of a transformer has two parts, attention and an MLP or experts. A layer of a hybrid has one; a pattern says
which, a symbol a layer:

| symbol | part of the layer | in the code      |
|--------|-------------------|------------------|
| `M`    | Mamba-2           | `mamba`          |
| `*`    | attention         | `self_attention` |
| `-`    | MLP               | `mlp`            |
| `E`    | experts           | `moe`            |

`TransformerConfig` (config/model.py) inherits the fields. Megatron-LM:
`megatron/core/ssm/mamba_hybrid_layer_allocation.py`.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config.fields import HOW, MODEL, Config, divides, opt
from minimegatron.errors import require

PARTS = {"M": "mamba", "*": "self_attention", "-": "mlp", "E": "moe"}


@dataclasses.dataclass(frozen=True)
class HybridFields(Config):
    """Layers of one part each, and Mamba-2 (`layers/ssm/mixer`)."""

    hybrid_override_pattern: str | None = opt(
        MODEL, None, "a symbol a layer: M Mamba-2, * attention, - MLP, E experts; e.g. MEM*- (quote it)"
    )
    mamba_num_heads: int = opt(MODEL, None, "heads of Mamba-2; default 2 h / mamba_head_dim", least=1)
    mamba_head_dim: int = opt(MODEL, 64, "p, channels of one of these heads", least=1)
    mamba_state_dim: int = opt(MODEL, 128, "n, what a head keeps of each channel", least=1)
    mamba_num_groups: int = opt(MODEL, 8, "groups of heads that share B and C; tp divides it", least=1)
    mamba_conv_kernel: int = opt(MODEL, 4, "taps of its convolution", least=2)
    mamba_dt_limit_min: float = opt(MODEL, 0.0, "least time step of Mamba-2, after softplus", least=0.0)
    mamba_dt_limit_max: float | None = opt(MODEL, None, "largest time step; default none", above=0.0)
    mamba_chunk_size: int = opt(HOW, 128, "tokens that are multiplied with each other at once", least=1)

    def parts_of(self, layer_number: int) -> tuple[str, ...]:
        """The parts of layer `layer_number` (from 0): `self_attention` or `mamba`, `mlp` or `moe`, or one of these."""
        pattern = self.hybrid_override_pattern
        if pattern is None:
            return "self_attention", "moe" if self.has_experts(layer_number) else "mlp"  # type: ignore[attr-defined]
        return (PARTS[pattern[layer_number]],)

    def has(self, part: str) -> bool:
        """Whether a layer has this part."""
        return any(part in self.parts_of(n) for n in range(self.num_layers))  # type: ignore[attr-defined]

    def _check_hybrid(self, num_layers: int, hidden_size: int, refused: dict[str, object]) -> None:
        """Check the pattern.

        Args:
            refused: fields with other values than a hybrid may have.
        """
        pattern = self.hybrid_override_pattern
        if pattern is None:
            return
        unknown = sorted(set(pattern) - PARTS.keys())
        require(not unknown, f"hybrid_override_pattern={pattern!r} has {unknown}", f"of {' '.join(PARTS)} alone")
        require(
            len(pattern) == num_layers,
            f"hybrid_override_pattern={pattern!r} says {len(pattern)} layers, num_layers is {num_layers}",
            "a symbol for every layer",
        )
        experts: int | None = self.num_experts  # type: ignore[attr-defined]
        require(
            ("E" in pattern) == (experts is not None),
            f"hybrid_override_pattern={pattern!r} with num_experts={experts}",
            "an E and num_experts, or neither",
        )
        named = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        require(not refused, f"hybrid_override_pattern={pattern!r} with {named}", f"drop {', '.join(refused)}")
        if "M" not in pattern:
            return
        if self.mamba_num_heads is None:
            divides(self.mamba_head_dim, 2 * hidden_size, "mamba_head_dim", "2 hidden_size")
        self._derive(mamba_num_heads=2 * hidden_size // self.mamba_head_dim)
        divides(self.mamba_num_groups, self.mamba_num_heads, "mamba_num_groups", "mamba_num_heads")
        low, high = self.mamba_dt_limit_min, self.mamba_dt_limit_max
        require(high is None or low < high, f"mamba_dt_limit_min={low}, mamba_dt_limit_max={high}", "min < max")
