"""My architecture: what it computes, in formulas, and where they come from.

The model asks for it through `--spec architecture layers`. What it may ask of your classes, and what you may use:

    a mixer      takes the place of `SelfAttention`; called as Mixer(config, mesh, layer_number, rng)
    a layer      takes the place of `TransformerLayer`; called as Layer(config, mesh, layer_number, rng, submodules=...)

| it has to give                            | how                                                                    |
|-------------------------------------------|------------------------------------------------------------------------|
| `forward(x, context)`                     | x [s, b, h] -> [s, b, h]; with sequence parallelism x is [s/t, b, h]   |
| the past alone                            | token i sees tokens up to i, of its own document: `context.mask`       |
| its part of the heads                     | `ColumnParallelLinear(..., mesh.tp, ...)` in, `RowParallelLinear` out  |
| a place for each parameter of its own     | `new_parameter(ParamLayout(...), config.dtype)` (`layers/param`)       |
| a sum that a gradient still needs         | `ParamLayout(partial=...)`, or a collective with its conjugate         |
| `inference_state()`                       | what it keeps of earlier tokens, for each token or each sequence       |
| generation                                | where `context.state_of(layer_number)` is not None: read, go on, write |
| a refusal of what it cannot do            | `ConfigError(what, fix=...)`, as soon as it is known                   |

`docs/architectures.md` has two small ones from beginning to end.
"""

from __future__ import annotations

from minimegatron.config import TransformerConfig
from minimegatron.models.spec import ModuleSpec


def layers(config: TransformerConfig) -> ModuleSpec:
    """The spec of a layer."""
    raise NotImplementedError("say which class computes what")
