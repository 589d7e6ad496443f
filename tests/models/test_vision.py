"""Qwen2.5-VL: patches, windows, positions, logits and every gradient are those of transformers."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from minimegatron.checkpoint.compressed_tensors import linear_weights
from minimegatron.checkpoint.conversion import logical_tensors, open_model
from minimegatron.checkpoint.hf_config import config_from_huggingface, config_to_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface, state_to_huggingface
from minimegatron.checkpoint.megatron import args_of
from minimegatron.checkpoint.tensorrt_llm import keys_of
from minimegatron.comm.mesh import Mesh
from minimegatron.config.same_model import differing
from minimegatron.data.pictures import Grid, Seen, arranged, fitting_size, patches_of, picture_inputs, pictures_in
from minimegatron.errors import ConfigError, DataError
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import build_stage
from minimegatron.posttraining.prune import sizes_after
from minimegatron.training.step import forward_step
from tests.models.in_fp64 import in_fp64

WORD, TOKEN = 97, 98  # words are below; the picture token
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [3, 2, 3]},
}  # fmt: skip
# Windows of 2 x 2 tokens, heads of 12 channels, two layers that see windows and one that sees pictures.
VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 40, "patch_size": 4, "window_size": 16,
    "fullatt_block_indexes": [1], "out_hidden_size": 64,
}  # fmt: skip

FIELDS = {"text_config": TEXT, "vision_config": VISION, "image_token_id": TOKEN}


def a_picture(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


SHAPES = (((24, 40), (8, 16)), ((40, 8),))  # of two rows; no window divides two of them


def texts(config: Any, shapes: Any = SHAPES, length: int = 40, gap: int = 2) -> list[list[Seen]]:
    """Rows of so many tokens, each with pictures of these sizes, and a gap after each picture."""
    generator, rows = torch.Generator().manual_seed(0), []
    for i, of_row in enumerate(shapes):
        ids, pictures = torch.randint(0, WORD, (length,), generator=generator), []
        at = 3
        for j, (height, width) in enumerate(of_row):
            pictures.append(patches_of(a_picture(height, width, 10 * i + j), config))
            n = pictures[-1][1].tokens(config)
            ids[at : at + n] = TOKEN
            at += n + gap
        assert at - gap <= length
        rows.append([Seen(ids, pictures)])
    return rows


class Theirs(NamedTuple):
    """A model of transformers in fp64 with its logits and the gradients of a masked loss."""

    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    logits: torch.Tensor
    grads: dict[str, torch.Tensor]

    @classmethod
    @functools.cache
    def of(cls, **changes: Any) -> Theirs:
        return qwen({**TEXT, **changes}, VISION)

    @classmethod
    def said(cls, model: Any, rows: list[list[Seen]], config: Any, **pictures: torch.Tensor) -> Theirs:
        """What a model says of rows, which it is given the pictures of in its own form."""
        tokens = torch.stack([row[0].ids for row in rows])
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(0, WORD, tokens.shape, generator=generator)
        mask = (torch.rand(tokens.shape, generator=generator) < torch.tensor([[0.3], [0.8]])).double()
        logits = model(tokens, **pictures).logits
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        (losses * mask).sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, **picture_inputs(rows, config)}
        return cls(model.config.to_dict(), model.state_dict(), batch, logits.detach(), grads)


def moved(model: Any, rotary: dict[str, Any]) -> Any:
    """In fp64, with norms that are not 1 and biases that are not 0, and frequencies that were rounded to fp32.

    Args:
        rotary: name of a module of it -> the same of a model in fp32.
    """
    model = model.double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    for name, rounded in rotary.items():
        model.get_submodule(name).inv_freq = rounded.inv_freq.double()
    return model


def qwen(
    text: dict[str, Any], vision: dict[str, Any], seed: int = 0, keys: dict[str, Any] | None = None, **how: Any
) -> Theirs:
    """A Qwen2.5-VL with further keys of its configuration, and what it says of `texts(..., **how)`."""
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as their

    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **{"image_token_id": TOKEN, **(keys or {})})
    config._attn_implementation = "eager"
    model = moved(
        in_fp64("qwen2_5_vl").Qwen2_5_VLForConditionalGeneration(config),
        {"model.language_model.rotary_emb": their.Qwen2_5_VLRotaryEmbedding(config.text_config),
         "model.visual.rotary_pos_emb": their.Qwen2_5_VLVisionRotaryEmbedding(config.vision_config)},
    )  # fmt: skip
    ours = config_from_huggingface(config.to_dict())[1]
    rows = texts(ours, **how)
    pictures = [picture for row in rows for picture in row[0].pictures]
    return Theirs.said(
        model, rows, ours,
        pixel_values=torch.cat([patches for patches, _ in pictures]).double(),
        image_grid_thw=torch.tensor([[1, *grid] for _, grid in pictures]),
        mm_token_type_ids=torch.stack([row[0].ids == TOKEN for row in rows]).int(),
    )  # fmt: skip


def ours_from(theirs: Theirs) -> tuple[Any, Any]:
    """(config, our model in fp64 with their weights)."""
    family, config = config_from_huggingface(theirs.config)
    ours = build_stage(config, Mesh.serial()).double()
    load_logical(ours, in_ours(theirs.state, config, family))
    return config, ours


def in_ours(state: dict[str, torch.Tensor], config: Any, family: str) -> dict[str, torch.Tensor]:
    """Tensors of fp64 under our names: a file has none of these, so the high and the low half are converted."""
    high = {name: tensor.float() for name, tensor in state.items()}
    low = {name: (tensor - high[name].double()).float() for name, tensor in state.items()}
    halves = [state_from_huggingface(half, config, family) for half in (high, low)]
    return {name: tensor.double() + halves[1][name].double() for name, tensor in halves[0].items()}


def test_logits_and_every_gradient_are_theirs():
    assert assert_same(Theirs.of()) == []


def assert_same(theirs: Theirs) -> list[str]:
    """Logits and gradients of all weights; returns those whose gradient is 0."""
    config, ours = ours_from(theirs)
    batch = {**theirs.batch, "pixels": theirs.batch["pixels"].double()}
    with torch.no_grad():
        more = {name: batch[name] for name in ("pixels", "patches", "picture_rows")}
        logits = ours(batch["tokens"], batch["position_ids"], **more)[..., : config.vocab_size].transpose(0, 1)
    assert (logits - theirs.logits).abs().max() <= 1e-9 * max(1.0, theirs.logits.abs().max())
    losses, _ = forward_step(iter([batch]), ours)
    (losses * batch["loss_mask"]).sum().backward()
    wanted, still = in_ours(theirs.grads, config, config_from_huggingface(theirs.config)[0]), []
    for name, param in logical_parameters(ours):
        want = wanted.pop(name)
        assert param.grad is not None, name
        assert (param.grad[: len(want)] - want).abs().max() <= 1e-9 * want.abs().max(), name
        still += [name] * (not want.abs().max() > 1e-6)
    assert not wanted
    return still


def test_a_text_without_a_picture_is_that_of_the_language_model():
    theirs = Theirs.of()
    config, ours = ours_from(theirs)
    tokens = theirs.batch["tokens"].masked_fill(theirs.batch["tokens"] == TOKEN, 3)
    none = picture_inputs([[Seen(ids)] for ids in tokens], config)
    with torch.no_grad():
        assert torch.equal(ours(tokens), ours(tokens, **none))


def test_windows_are_theirs():
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    _, config = config_from_huggingface(Theirs.of().config)
    grids = [Grid(6, 10), Grid(2, 4), Grid(10, 2), Grid(8, 8)]
    numbered = torch.arange(sum(rows * columns for rows, columns in grids)).float()[:, None]
    each = numbered.expand(-1, config.patch_channels).split([rows * columns for rows, columns in grids])
    found = arranged(list(zip(each, grids, strict=True)), config)
    sizes = torch.tensor([[1, *grid] for grid in grids])
    index, borders = get_vision_window_index(sizes, 2, config.vision_window_size, config.vision_patch_size)
    blocks = numbered.unflatten(0, (-1, 4))[index].flatten()
    assert torch.equal(found.pixels[:, 0], blocks)
    assert torch.equal(found.patches[:, :2], get_vision_position_ids(sizes, 2)[blocks.long()])
    begins = found.patches[:, 3].diff().nonzero().flatten() + 1
    assert [0, *begins.tolist(), len(numbered)] == borders.tolist()
    assert found.patches[:, 2].tolist() == [i for i, (r, c) in enumerate(grids) for _ in range(r * c)]
    assert torch.equal(torch.cat(found.rows), index.argsort())


def test_positions_are_theirs():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    theirs = Theirs.of()
    _, config = config_from_huggingface(theirs.config)
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig.from_dict(theirs.config))
    tokens, rows = theirs.batch["tokens"], texts(config)
    grids = torch.tensor([[1, *grid] for row in rows for _, grid in row[0].pictures])
    wanted, _ = model.get_rope_index(tokens, (tokens == TOKEN).int(), grids)
    assert torch.equal(theirs.batch["position_ids"], wanted)


def test_patches_are_those_of_their_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    _, config = config_from_huggingface(Theirs.of().config)
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64})
    picture = a_picture(24, 40, 0)
    theirs = processor(picture, input_data_format="channels_last", return_tensors="pt")
    patches, grid = patches_of(picture, config)
    assert theirs["image_grid_thw"].tolist() == [[1, *grid]]
    torch.testing.assert_close(patches, theirs["pixel_values"], rtol=0, atol=1e-5)


def test_sizes_are_those_of_their_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    config = config_from_huggingface(Theirs.of().config)[1].replace(vision_patch_size=14, vision_window_size=112)
    for height, width in ((30, 200), (1, 9), (480, 640), (4000, 3000), (28, 28), (2500, 20)):
        assert fitting_size(height, width, config) == smart_resize(height, width), (height, width)
    with pytest.raises(DataError, match="200 times"):
        fitting_size(10, 2001, config)


def test_a_text_that_was_cut_inside_of_a_picture_is_refused():
    _, config = config_from_huggingface(Theirs.of().config)
    ids, grids = torch.tensor([1, *[TOKEN] * 4, 2]), [Grid(4, 4)]
    assert list(pictures_in(ids, grids, config)) == [(1, Grid(4, 4))]
    for wrong in (ids[:4], torch.tensor([TOKEN, TOKEN, 1, TOKEN, TOKEN])):
        with pytest.raises(DataError, match="needs 4 picture tokens in a row"):
            list(pictures_in(wrong, grids, config))
    with pytest.raises(DataError, match="4 picture tokens, and pictures for 0"):
        picture_inputs([[Seen(ids)]], config)


def test_a_picture_of_another_shape_is_refused():
    _, config = config_from_huggingface(Theirs.of().config)
    for shape in ((24, 41, 3), (24, 40, 4), (24, 40)):
        with pytest.raises(DataError, match="multiples of 8 pixels"):
            patches_of(np.zeros(shape, dtype=np.uint8), config)


def test_weights_and_config_go_both_ways(tmp_path):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    theirs = Theirs.of()
    family, config = config_from_huggingface(theirs.config)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(theirs.config))
    model.save_pretrained(tmp_path / "theirs")
    saved = open_model(tmp_path / "theirs")
    assert saved.family == family and saved.config.vision_fullatt_block_indexes == (1,)
    ours = {name: saved.weights.read(name) for name in saved.weights.tensors}
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: one.shape for name, one in logical_tensors(config).items()
    }
    back = state_to_huggingface(ours, config, family)
    published = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in model.state_dict().items()
    }
    assert back.keys() == published.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in published.items())
    _, keys = config_to_huggingface(config)
    (tmp_path / "ours").mkdir()
    save_file(back, tmp_path / "ours" / "model.safetensors")
    (tmp_path / "ours" / "config.json").write_text(json.dumps(keys))
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "ours").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert "text_config" not in keys and differing(config, config_from_huggingface(keys)[1]) == []
    again = Qwen2_5_VLConfig.from_dict(keys)
    assert again.text_config.num_hidden_layers == 2 and again.text_config.rope_parameters["mrope_section"] == [3, 2, 3]
    assert config_from_huggingface(again.to_dict())[1] == config


def read(file: dict[str, Any]) -> Any:
    """The model of a file, or the place of the error."""
    try:
        return config_from_huggingface(file)[1]
    except ConfigError as error:
        assert error.fix
        return None


def assert_every_key_means_the_same(whole: dict[str, Any], others: dict[str, Any], theirs: Any) -> None:
    """One key at a time is missing, or has another value, at the top, in the language model and in the encoder.

    Args:
        whole: a `config.json` that is read.
        others: key -> the other value; default twice a number, and not a truth.
        theirs: the class of transformers that reads it.
    """
    models = 0
    for part in (None, "text_config", "vision_config"):
        table = whole if part is None else whole[part]
        for key, value in table.items():
            if key in ("model_type", "text_config", "vision_config"):
                continue
            without = {k: v for k, v in table.items() if k != key}
            number = isinstance(value, int | float)
            changed = others.get(key, not value if isinstance(value, bool) else 2 * value if number else value)
            for one in (without, {**without, key: changed}):
                file = one if part is None else {**whole, part: one}
                try:
                    meant = theirs.from_dict(file).to_dict()
                except Exception:  # transformers cannot make a model of it either
                    continue
                ours = read(file)
                assert ours == read(meant), f"{key} of {part}: {one.get(key, 'missing')}"
                models += ours is not None
    assert models > 60


def test_every_key_means_what_it_means_to_transformers():
    from transformers import Qwen2_5_VLConfig

    whole = Theirs.of().config
    others = {"hidden_act": "gelu", "layer_types": ["sliding_attention"] * 2, "fullatt_block_indexes": [0, 2]}
    others |= {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0, "mrope_section": [2, 2, 4]}}
    assert_every_key_means_the_same(whole, others, Qwen2_5_VLConfig)
    assert read({"model_type": "qwen2_5_vl"}) == read(Qwen2_5_VLConfig().to_dict())
    with pytest.raises(ConfigError, match="something_new"):
        config_from_huggingface({**whole, "something_new": 3})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_config": {**VISION, "hidden_act": "gelu"}}, "hidden_act='gelu'"),
        ({"vision_config": {**VISION, "out_hidden_size": 32}}, "not the width of the language model"),
        ({"vision_config": {**VISION, "deepstack_visual_indexes": [1]}}, "deepstack_visual_indexes"),
        ({"vision_config": {**VISION, "patch_size": [4, 8]}}, "square patches|a number for each side"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"head_dim": 32}, "head_dim=32"),
        ({"image_token_id": 4000}, "image_token_id=4000"),
    ],
)
def test_what_a_config_says_otherwise_is_refused(change, message):
    keys = {"model_type": "qwen2_5_vl", **TEXT, "image_token_id": TOKEN, "vision_config": VISION}
    assert config_from_huggingface(keys)[1].sees
    with pytest.raises(ConfigError, match=message):
        config_from_huggingface({**keys, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_num_attention_heads": 5}, "does not divide vision_hidden_size"),
        ({"vision_num_attention_heads": 8}, "multiple of 4"),
        ({"vision_window_size": 7}, "less than one token"),
        ({"vision_fullatt_block_indexes": (3,)}, "the vision encoder has 3 layers"),
        ({"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}, "fp8_format='e4m3': the vision encoder has no such part"),
        ({"vision_num_layers": None}, "image_token_id without a vision encoder"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message):
    _, config = config_from_huggingface(Theirs.of().config)
    with pytest.raises(ConfigError, match=message):
        config.replace(**change)


def test_what_has_no_place_for_pictures_says_so():
    family, config = config_from_huggingface(Theirs.of().config)
    refused = [
        ("the vision encoder of qwen2_5_vl is not quantised", lambda: linear_weights(config, family)),
        ("a text does not say which parts", lambda: sizes_after(config, {"num_layers": 1})),
        ("a VisionLanguageModel is not written for Megatron", lambda: args_of(config)),
        ("not written for TensorRT-LLM", lambda: keys_of(config, family, 1)),
    ]
    for message, function in refused:
        with pytest.raises(ConfigError, match=message):
            function()
