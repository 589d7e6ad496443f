"""Fields of a hybrid model: which part each layer is, and the sizes of Mamba-2 and of Gated DeltaNet.

A layer of a transformer has two parts, attention and an MLP or experts. A layer of a hybrid has one; a pattern says
which, a symbol a layer:

| symbol | part of the layer | in the code      |
|--------|-------------------|------------------|
| `M`    | Mamba-2           | `mamba`          |
| `*`    | attention         | `self_attention` |
| `-`    | MLP               | `mlp`            |
| `E`    | experts           | `moe`            |

In a hybrid of Qwen3-Next's kind a layer has both parts, and `linear_attention_freq` says in which layers Gated DeltaNet
(`gated_delta_net`) stands in place of attention.

`TransformerConfig` (config/model.py) inherits the fields. Megatron-LM:
`megatron/core/ssm/mamba_hybrid_layer_allocation.py`.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config.experts import layer_pattern
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
    linear_attention_freq: str | None = opt(
        MODEL, None, "n: every n-th layer has attention, the others Gated DeltaNet; or all layers: ([1]*3+[0]*1)"
    )
    linear_num_key_heads: int = opt(MODEL, 16, "heads of queries and keys of Gated DeltaNet; tp divides it", least=1)
    linear_num_value_heads: int = opt(MODEL, 32, "heads of values; the key heads divide it", least=1)
    linear_key_head_dim: int = opt(MODEL, 128, "channels of a query or key there", least=1)
    linear_value_head_dim: int = opt(MODEL, 128, "channels of a value", least=1)
    linear_conv_kernel_dim: int = opt(MODEL, 4, "taps of its convolution", least=2)
    linear_chunk_size: int = opt(HOW, 64, "tokens whose corrections are solved at once", least=1)

    def parts_of(self, layer_number: int) -> tuple[str, ...]:
        """The parts of layer `layer_number` (from 0), a mixer and an MLP or one of these: `self_attention`,
        `gated_delta_net` or `mamba`; `mlp` or `moe`.
        """
        pattern, linear = self.hybrid_override_pattern, self.linear_layers
        if pattern is None:
            mixer = "gated_delta_net" if linear[min(layer_number, len(linear) - 1)] else "self_attention"
            return mixer, "moe" if self.has_experts(layer_number) else "mlp"  # type: ignore[attr-defined]
        return (PARTS[pattern[layer_number]],)

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """For every layer of the model whether it has Gated DeltaNet in place of attention."""
        layers: int = self.num_layers  # type: ignore[attr-defined]
        if self.linear_attention_freq is None:
            return (False,) * layers
        return skipping_pattern(self.linear_attention_freq, layers, "linear_attention_freq")

    def has(self, part: str) -> bool:
        """Whether a layer has this part."""
        return any(part in self.parts_of(n) for n in range(self.num_layers))  # type: ignore[attr-defined]

    def _check_hybrid(self, num_layers: int, hidden_size: int, refused: dict[str, object]) -> None:
        """Check the pattern.

        Args:
            refused: fields with other values than a hybrid may have.
        """
        pattern = self.hybrid_override_pattern
        if self.linear_attention_freq is not None:
            self._check_linear(num_layers)
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

    def _check_linear(self, num_layers: int) -> None:
        """Check the layers with Gated DeltaNet, and its sizes."""
        require(
            any(self.linear_layers),
            f"linear_attention_freq={self.linear_attention_freq!r} gives none of {num_layers} layers Gated DeltaNet",
            "drop linear_attention_freq",
        )
        for name, value in {"hybrid_override_pattern": None, "transformer_impl": "local"}.items():
            given = getattr(self, name)
            require(given == value, f"linear_attention_freq with {name}={given!r}", f"drop {name}")
        divides(
            self.linear_num_key_heads, self.linear_num_value_heads, "linear_num_key_heads", "linear_num_value_heads"
        )


def skipping_pattern(frequency: str, layers: int, field: str) -> tuple[bool, ...]:
    """A flag for each layer: "4" is all layers but every fourth one, "([1]*3+[0]*1)" lists them.

    Raises:
        ConfigError: the text is neither, or has another number of layers.
    """
    if frequency.isdigit() and int(frequency) >= 1:
        return tuple((i + 1) % int(frequency) != 0 for i in range(layers))
    return layer_pattern(frequency, layers, field)
