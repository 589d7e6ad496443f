"""All operators in one place: `import minimegatron.kernels.ops` registers `torch.ops.minimegatron.*`.

On CUDA tensors they run the compiled kernels, on CPU tensors the emulator. To let the configuration decide, and torch
compute where there are no kernels, ask `switch.kernels`.
"""

from minimegatron.kernels.activation import bias_gelu, swiglu
from minimegatron.kernels.cross_entropy import cross_entropy, gradient, statistics
from minimegatron.kernels.flash import flash_attention
from minimegatron.kernels.fp8 import cast, cast_by, cast_tiles, dequantise, magnitudes
from minimegatron.kernels.norm import add_norm, norm
from minimegatron.kernels.optimizer import AdamTable, NormTable, squared_norm
from minimegatron.kernels.permute import inverse, permute, unpermute
from minimegatron.kernels.rope import rope
from minimegatron.kernels.softmax import scaled_softmax

__all__ = [
    "AdamTable",
    "NormTable",
    "add_norm",
    "bias_gelu",
    "cast",
    "cast_by",
    "cast_tiles",
    "cross_entropy",
    "dequantise",
    "flash_attention",
    "gradient",
    "inverse",
    "magnitudes",
    "norm",
    "permute",
    "rope",
    "scaled_softmax",
    "squared_norm",
    "statistics",
    "swiglu",
    "unpermute",
]
