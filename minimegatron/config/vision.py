"""Fields of a model that sees: a vision transformer whose output stands in place of some words.

    pictures -> patches -> vision transformer -> projector -> rows of width h, one for each picture token of the text

The encoder is a transformer with sizes of its own, so it is a `TransformerConfig` of its own: `config.vision` makes it
of these fields, and layers, kernels and rules are those of every model (`models/vision`). What kinds of encoders differ
in is data, a `Tower`; a family with another one registers it (`register_tower`). There are two here:

| `vision_model_type` | `qwen_vit` (of Qwen2.5-VL)              | `clip` (of LLaVA)                                |
|---------------------|-----------------------------------------|--------------------------------------------------|
| pictures            | of any size                             | all of `vision_image_size`                       |
| layers              | RMSNorm, SwiGLU, RoPE by row and column | LayerNorm, x sigmoid(1.702 x), learned positions |
| attention           | windows, in some layers the picture     | the picture and a class token                    |
| a token of the text | a block of m x m patches                | a patch                                          |
| projector           | norm, matrix to m^2 h_v, GELU, matrix   | matrix to h, GELU, matrix                        |

| field                         | name in `vision_config`: Qwen2.5-VL's, CLIP's                                   |
|-------------------------------|---------------------------------------------------------------------------------|
| `vision_num_layers`           | `depth`; `num_hidden_layers`, of which the last may be unread                   |
| `vision_hidden_size`          | `hidden_size`                                                                   |
| `vision_num_attention_heads`  | `num_heads`; `num_attention_heads`                                              |
| `vision_ffn_hidden_size`      | `intermediate_size`                                                             |
| `vision_patch_size`           | `patch_size`, pixels along a side of a patch                                    |
| `vision_image_size`           | CLIP's `image_size`, pixels along a side of a picture                           |
| `vision_temporal_patch_size`  | Qwen's `temporal_patch_size`, frames of a patch; a picture is repeated          |
| `vision_spatial_merge_size`   | Qwen's `spatial_merge_size`, patches along a side of a picture token            |
| `vision_window_size`          | Qwen's `window_size`, pixels along a side of an attention window                |
| `vision_fullatt_block_indexes`| Qwen's `fullatt_block_indexes`, layers that see a whole picture                 |

`TransformerConfig` (config/model.py) inherits them. Megatron-LM: `patch_dim` and `img_h` in
`megatron/training/arguments.py`; `--vision-model-type` in `examples/multimodal/multimodal_args.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

from minimegatron.config.fields import MODEL, Config, divides, free, opt
from minimegatron.errors import did_you_mean, require

CHANNELS = 3  # red, green, blue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A kind of vision encoder, with its projector.

    Attributes:
        fields: fields of the encoder as a model of its own, beside its sizes.
        check: refuses fields of the whole model that this kind cannot have.
        class_token: a row that no token takes stands before the patches of a picture.
        learned_positions: a vector for each patch, and for the class token, is added before the layers.
        norm_before: a norm stands before the first layer.
        frames: the matrix of the patches has a dim of frames.
        projector_norm: the projector norms patches, and its inner width is that of a block.
        mean, std: of the three channels, in [0, 1], that pictures are normalised with.
        embedding, projector: MODULE:CLASS in place of `PatchEmbedding` and `VisionProjector` (`models/vision`), called
            as these are.
    """

    fields: Mapping[str, Any]
    check: Callable[[Any], None] = lambda config: None
    class_token: bool = False
    learned_positions: bool = False
    norm_before: bool = False
    frames: bool = False
    projector_norm: bool = False
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, and most encoders' after it
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    embedding: str = "minimegatron.models.vision:PatchEmbedding"
    projector: str = "minimegatron.models.vision:VisionProjector"


TOWERS: dict[str, Tower] = {}


def register_tower(name: str, tower: Tower) -> None:
    """Register a kind of vision encoder as a value of `vision_model_type`.

    Raises:
        ConfigError: the name is taken.
    """
    require(name not in TOWERS, f"there is a vision_model_type {name!r} already", "another name")
    TOWERS[name] = tower


@dataclasses.dataclass(frozen=True)
class VisionFields(Config):
    """A vision transformer and its projector (`models/vision`)."""

    vision_num_layers: int | None = opt(MODEL, None, "layers of the vision encoder; default none: no pictures", least=1)
    vision_model_type: str = opt(MODEL, "qwen_vit", "kind of the vision encoder: qwen_vit, clip, or a family's own")
    vision_hidden_size: int = opt(MODEL, 64, "its width", least=4)
    vision_num_attention_heads: int = opt(MODEL, 4, "its heads; tp divides them", least=1)
    vision_ffn_hidden_size: int = opt(MODEL, 128, "inner width of its MLP; tp divides it", least=1)
    vision_patch_size: int = opt(MODEL, 14, "pixels along a side of a patch", least=1)
    vision_image_size: int | None = opt(MODEL, None, "pixels along a side of every picture (clip)", least=1)
    vision_temporal_patch_size: int = opt(MODEL, 2, "frames of a patch; a picture is repeated", least=1)
    vision_spatial_merge_size: int = opt(MODEL, 2, "patches along a side of what becomes one token", least=1)
    vision_window_size: int = opt(MODEL, 112, "pixels along a side of a window of its attention", least=1)
    vision_fullatt_block_indexes: tuple[int, ...] = opt(
        MODEL, (), "its layers, from 0, that see a whole picture; the others see a window"
    )
    vision_patches_per_sample: int = opt(
        free("a plan alone reads it"),
        256,
        "patches of the pictures of a sample, of which a plan takes account",
        least=0,
    )
    image_token_id: int | None = opt(MODEL, None, "id of the token in whose place a part of a picture stands", least=0)

    @property
    def sees(self) -> bool:
        """Whether the model has a vision encoder."""
        return self.vision_num_layers is not None

    @property
    def vision(self) -> Self:
        """The vision transformer as a model of its own, whose words and positions nobody reads."""
        assert self.sees, "asked of a model that sees"
        return _encoder(self)  # type: ignore[no-any-return]

    @property
    def tower(self) -> Tower:
        """What is special about its kind of encoder."""
        return TOWERS[self.vision_model_type]

    @property
    def patch_channels(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.vision_temporal_patch_size * self.vision_patch_size**2

    def _check_vision(self, refused: dict[str, object]) -> None:
        """Check the encoder.

        Args:
            refused: fields with other values than a model that sees may have.
        """
        require(
            self.vision_model_type in TOWERS,
            f"vision_model_type is {self.vision_model_type!r}",
            did_you_mean(self.vision_model_type, TOWERS) or f"one of {', '.join(TOWERS)}",
        )
        if not self.sees:
            require(self.image_token_id is None, "image_token_id without a vision encoder", "give vision_num_layers")
            return
        backend: str = self.attention_backend  # type: ignore[attr-defined]
        refused |= {"attention_backend": backend} if backend == "te" else {}
        named = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        require(
            not refused,
            f"vision_num_layers={self.vision_num_layers} with {named}: the vision encoder has no such part",
            f"drop {', '.join(refused)}",
        )
        vocabulary: int = self.vocab_size  # type: ignore[attr-defined]
        require(
            self.image_token_id is not None and self.image_token_id < vocabulary,
            f"image_token_id={self.image_token_id} in a vocabulary of {vocabulary}: which token becomes a picture?",
            "an id of the vocabulary that no text has",
        )
        heads, h = self.vision_num_attention_heads, self.vision_hidden_size
        divides(heads, h, "vision_num_attention_heads", "vision_hidden_size")
        self.tower.check(self)


def _check_qwen(config: VisionFields) -> None:
    heads, h = config.vision_num_attention_heads, config.vision_hidden_size
    side = config.vision_patch_size * config.vision_spatial_merge_size
    require(
        config.vision_image_size is None,
        f"vision_image_size={config.vision_image_size}, and qwen_vit sees pictures of any size",
        "drop vision_image_size, or vision_model_type=clip",
    )
    require(
        h // heads % 4 == 0,
        f"heads of the vision encoder have {h // heads} channels; half of the pairs turn with the row of a patch, "
        "half with its column",
        "vision_hidden_size / vision_num_attention_heads a multiple of 4",
    )
    require(
        config.vision_window_size >= side,
        f"vision_window_size={config.vision_window_size} is less than one token, {side} pixels",
        f"vision_window_size={side} or more",
    )
    layers = config.vision_num_layers or 0
    outside = [n for n in config.vision_fullatt_block_indexes if not 0 <= n < layers]
    require(
        not outside,
        f"vision_fullatt_block_indexes has {outside}, the vision encoder has {layers} layers",
        "numbers of its layers, from 0",
    )


def _check_clip(config: VisionFields) -> None:
    merged = (config.vision_spatial_merge_size, config.vision_temporal_patch_size)
    require(
        merged == (1, 1),
        f"vision_model_type=clip with vision_spatial_merge_size={merged[0]} and vision_temporal_patch_size="
        f"{merged[1]}: a patch of one frame is a token",
        "vision_spatial_merge_size=1 vision_temporal_patch_size=1",
    )
    size, p = config.vision_image_size, config.vision_patch_size
    require(
        size is not None and size % p == 0,
        f"vision_model_type=clip with vision_image_size={size}: it has learned a position for each patch of {p} pixels",
        f"vision_image_size a multiple of {p}",
    )


SHARED = (
    "make_vocab_size_divisible_by attention_backend kernels init_method_std scale_output_init recompute_granularity "
    "recompute_method recompute_num_layers recompute_modules params_dtype"
)  # with the language model


register_tower(
    "qwen_vit",
    Tower(
        fields={
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "activation": "swiglu",
            "position_embedding_type": "rope",
        },
        check=_check_qwen,
        frames=True,
        projector_norm=True,
    ),
)
register_tower(
    "clip",
    Tower(
        fields={
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-5,
            "activation": "quick_gelu",
            "position_embedding_type": "none",  # in the layers: positions are added before them
        },
        check=_check_clip,
        class_token=True,
        learned_positions=True,
        norm_before=True,
    ),
)


@functools.lru_cache(maxsize=64)
def _encoder(config: Any) -> Any:
    return type(config)(
        **{name: getattr(config, name) for name in SHARED.split()},
        num_layers=config.vision_num_layers,
        hidden_size=config.vision_hidden_size,
        num_attention_heads=config.vision_num_attention_heads,
        ffn_hidden_size=config.vision_ffn_hidden_size,
        **config.tower.fields,
    )
