"""A model that sees: a vision transformer, a projector, and a decoder in which pictures stand in place of words.

    pixels [n, 3 T p p] -> patches x A^T [n, h_v] -> vision layers -> merger [n / m^2, h] -> in place of picture tokens

The vision layers are the decoder's (`models/block`), with sizes of their own (`config/vision`). What differs is the
attention: it is not causal, and sees a picture, or in most of Qwen's layers a window of it. Both are documents in one
row of patches (`data/pictures`), so pictures of all sizes share a microbatch without padding. A patch's place is
Qwen's RoPE, which turns one half of a head's pairs by its row and the other half by its column; or a learned position,
CLIP's, and before the patches of a picture stands a class token. LLaVA reads CLIP before its last layer, so `clip` has
a layer less here than its file, and no norm behind the last.

Qwen's projector (a merger) norms patches and lays the m x m of a block end to end; both kinds have two matrices with
GELU between them.

How it is cut:

| axis | vision layers and projector                      | between the projector and the words                      |
|------|--------------------------------------------------|----------------------------------------------------------|
| tp   | heads and MLPs, as in the decoder                | every rank has all rows and places all of them           |
| sp   | patches, in whole blocks, padded to a multiple   | rows are gathered, each rank places those of its tokens: |
|      | of t blocks                                      | the gather's gradient is a sum (reduce-scatter)          |
| cp   | not at all: every rank of cp sees all pictures   | each rank places the rows of its tokens: its gradients   |
|      |                                                  | are parts of a sum, which `dp_cp` adds like all others   |
| pp   | on the first stage                               |                                                          |

A microbatch without a picture runs blocks of padding, of which no token takes a row, so that all ranks send the same
messages. *Difference from Megatron-LM*, whose `LLaVAModel` gathers the sequence of words and scatters it again.

Bai et al. 2025 (arXiv 2502.13923), section 2.1; Liu et al. 2023 (arXiv 2310.03744);
Radford et al. 2021 (arXiv 2103.00020); Dosovitskiy et al. 2020 (arXiv 2010.11929). Megatron-LM:
`megatron/core/models/multimodal/llava_model.py`, `megatron/core/models/vision/clip_vit_model.py`,
`multimodal_projector.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.random import RngStreams
from minimegatron.config.vision import CHANNELS
from minimegatron.data.pictures import blank_inputs
from minimegatron.kernels import ops
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear, linear
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init, ParamLayout, new_parameter
from minimegatron.layers.recompute import recompute
from minimegatron.layers.rope import inverse_frequencies
from minimegatron.models.block import TransformerBlock
from minimegatron.models.decoder import GPTModel
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec, named_class
from minimegatron.parallel.pipeline.execution import Tensors

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, hence one product: a patch's numbers to the width of the encoder.

    Every tp rank has the whole matrix. With sequence parallelism it embeds its own patches, so the gradient is partial.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        p = config.vision_patch_size
        frames = (config.vision_temporal_patch_size,) if config.tower.frames else ()
        shape = (config.vision_hidden_size, CHANNELS, *frames, p, p)
        layout = ParamLayout(shape, init=Init(std=config.init_method_std), partial="sequence")
        self.weight = new_parameter(layout, config.dtype)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3 T p p] -> [n, 1, h_v]."""
        return linear(pixels.to(self.weight.dtype), self.weight.flatten(1))[:, None]


class PatchPositions(nn.Module):
    """A learned position for each patch; with a class token, as CLIP has, that stands where the row is negative, and
    has a position, too."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.vision_image_size is not None, "a picture of any size has no learned positions"
        self.columns, h = config.vision_image_size // config.vision_patch_size, config.vision_hidden_size
        how: dict[str, Any] = {"init": Init(std=config.init_method_std), "partial": "sequence"}
        self.before = int(config.tower.class_token)
        self.class_token = new_parameter(ParamLayout((h,), **how), config.dtype) if self.before else None
        self.weight = new_parameter(ParamLayout((self.before + self.columns**2, h), **how), config.dtype)

    def forward(self, x: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """x [n, 1, h_v], patches [n, 4] -> [n, 1, h_v]."""
        row, column = patches[:, 0], patches[:, 1]
        number = torch.where(row < 0, 0, self.before + row * self.columns + column)
        if self.class_token is not None:
            x = torch.where((row < 0)[:, None, None], self.class_token, x)
        return x + F.embedding(number, self.weight)[:, None]


class VisionModel(nn.Module):
    """Patches through the layers of the vision transformer.

    Args:
        config: the whole model.
        mesh: its layout; pictures are not cut over cp.
        rng: streams of recompute.

    Raises:
        ConfigError: its heads or its MLP cannot be divided over tp.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: TransformerConfig, mesh: Mesh, rng: RngStreams | None = None) -> None:
        super().__init__()
        self.vision, self.mesh, self.rng = config.vision, mesh.with_whole_sequences(), rng
        self.conv1 = named_class(config.tower.embedding, "embedding of the vision encoder")(config)
        self.position_embeddings = PatchPositions(config) if config.tower.learned_positions else None
        self.ln_pre = Norm(self.vision) if config.tower.norm_before else None
        self.whole = frozenset(range(self.vision.num_layers))
        if self.vision.rotates:
            self.whole = frozenset(config.vision_fullatt_block_indexes)
            half = self.vision.replace(rotary_percent=0.5)  # the row turns half of a head's channels, the column half
            self.register_buffer("inv_freq", inverse_frequencies(half), persistent=False)
        spec = decoder_layer_spec(self.vision)
        self.decoder = TransformerBlock(self.vision, self.mesh, spec, range(self.vision.num_layers), False, rng)

    def forward(self, pixels: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """pixels [n, 3 T p p], patches [n, 4] (`data/pictures`) -> [n, 1, h_v].

        With sequence parallelism n is a multiple of t m^2, and the result [n/t, 1, h_v].
        """
        row, column, picture, window = patches.unbind(1)
        rotary = None
        if self.vision.rotates:
            angle = torch.stack([row, column], 1)[:, None, None, :, None].float() * self.inv_freq  # [n, 1, 1, 2, d / 4]
            rotary = angle.cos().flatten(3), angle.sin().flatten(3)
        whole, windowed = (
            AttentionContext(rotary, AttentionMask(causal=False, document_ids=ids[None])) for ids in (picture, window)
        )
        if self.mesh.sequence_parallel:
            pixels, patches = (c.local_part(each, self.mesh.tp, 0) for each in (pixels, patches))
        x = self.conv1(pixels)
        x = x if self.position_embeddings is None else self.position_embeddings(x, patches)
        x = x if self.ln_pre is None else self.ln_pre(x)
        for group, again in self.decoder.groups(list(self.decoder.layers.values())):
            run = partial(recompute, self._run, rng=self.rng) if again else self._run
            x = run(group, x, whole, windowed)
        return x

    def _run(
        self, layers: list[Any], x: torch.Tensor, whole: AttentionContext, windowed: AttentionContext
    ) -> torch.Tensor:
        for layer in layers:
            x = layer(x, whole if layer.layer_number in self.whole else windowed)
        return x


class VisionProjector(nn.Module):
    """Blocks of m x m patches to rows of the decoder's width: norm (Qwen's), matrix, GELU, matrix.

    Args:
        config: the whole model.
        mesh: its layout.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        self.tp, self.kernels, self.sequence_parallel = mesh.tp, config.kernels, mesh.sequence_parallel
        self.block = config.vision_spatial_merge_size**2
        width, norms = self.block * config.vision_hidden_size, config.tower.projector_norm
        inner = width if norms else config.hidden_size
        init = Init(std=config.init_method_std)
        how: dict[str, Any] = {"init": init, "sequence_parallel": mesh.sequence_parallel, "dtype": config.dtype}
        self.norm = Norm(config.vision) if norms else None
        self.linear_fc1 = ColumnParallelLinear(width, inner, mesh.tp, **how)
        self.linear_fc2 = RowParallelLinear(inner, config.hidden_size, mesh.tp, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 1, h_v] (or [n/t, 1, h_v]) -> [n / m^2, h] on every rank."""
        x = (x if self.norm is None else self.norm(x)).reshape(-1, 1, self.block * x.shape[-1])
        y = ops.activation("gelu", self.linear_fc1(x), kernels=self.kernels)
        rows: torch.Tensor = self.linear_fc2(y)
        if self.sequence_parallel:
            rows = c.gather_from_sequence_region(rows, self.tp)
        return rows[:, 0]


class VisionLanguageModel(GPTModel):
    """A decoder, or one pipeline stage of it, whose first stage also has a vision transformer and a projector."""

    megatron_lacks = "for which no vision encoder is converted"

    def blank_inputs(self, b: int, s: int) -> dict[str, torch.Tensor]:
        """`vision_patches_per_sample` patches a sample."""
        return blank_inputs(b, s, self.config)

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        spec: ModuleSpec | None = None,
        *,
        pre_process: bool = True,
        rng: RngStreams | None = None,
        **stage: Any,
    ) -> None:
        super().__init__(config, mesh, spec, pre_process=pre_process, rng=rng, **stage)
        self.vision_model = VisionModel(config, mesh, rng) if pre_process else None
        projector = named_class(config.tower.projector, "projector of the vision encoder")
        self.vision_projection = projector(config, mesh) if pre_process else None
        self._pictures: tuple[torch.Tensor, ...] | None = None

    def forward(
        self,
        *args: Any,
        pixels: torch.Tensor | None = None,
        patches: torch.Tensor | None = None,
        picture_rows: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """`GPTModel.forward` with pictures, all three or none of these:

        Args:
            pixels: [n, 3 T p p] patches of all pictures.
            patches: [n, 4] where each stands (`data/pictures`).
            picture_rows: [b, s] row of the projector's output that is in place of each token, -1 for a word; with
                context parallelism of this rank's tokens.
        """
        given = pixels, patches, picture_rows
        assert len({one is None for one in given}) == 1, "pixels, patches and picture_rows belong together"
        self._pictures = None if pixels is None else given  # type: ignore[assignment]
        try:
            return super().forward(*args, **options)
        finally:
            self._pictures = None

    def _first_hidden(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, inputs: Tensors | None, *more: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = super()._first_hidden(tokens, position_ids, inputs, *more)
        if self.pre_process and self._pictures is not None:
            pixels, patches, picture_rows = self._pictures
            hidden = self.placed(hidden, self.rows_of(pixels, patches), picture_rows)
        return hidden

    def rows_of(self, pixels: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Rows of the decoder's width, [n / m^2 and padding, h]; arguments as of `forward`."""
        assert self.vision_model is not None and self.vision_projection is not None, "the first stage sees"
        whole = self.config.vision_spatial_merge_size**2 * (self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        missing = -len(pixels) % whole if len(pixels) else whole
        pixels, patches = F.pad(pixels, (0, 0, 0, missing)), F.pad(patches, (0, 0, 0, missing), value=-1)
        return self.vision_projection(self.vision_model(pixels, patches))  # type: ignore[no-any-return]

    def placed(self, hidden: torch.Tensor, rows: torch.Tensor, picture_rows: torch.Tensor) -> torch.Tensor:
        """`hidden` [s', b, h] with rows of pictures in place of the tokens that are none."""
        where = picture_rows.t()
        if self.mesh.sequence_parallel:
            where = c.local_part(where, self.mesh.tp, 0)
        seen = F.embedding(where.clamp(min=0), rows.to(hidden.dtype))
        return torch.where((where >= 0)[..., None], seen, hidden)
