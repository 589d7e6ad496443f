"""Every key of a model that sees changes it as it changes transformers', or is refused; of its parts as well."""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.errors import ConfigError
from minimegatron.models.families import FAMILIES
from minimegatron.models.families.keys import HARMLESS
from tests.models import test_llava, test_vision
from tests.models.test_huggingface_config import NAMES, keys_of, other_values

# Pictures that patches and blocks twice as large divide, too.
SHAPES = (((16, 32), (16, 16)), ((32, 16),))
OTHERS: dict[str, list[Any]] = {
    "layer_types": [["sliding_attention"] * 2], "fullatt_block_indexes": [[0, 2], []], "vision_feature_layer": [1, -1],
    "pad_token_id": [test_vision.TOKEN],  # no word: transformers gives the embedding of padding no gradient
    "image_token_id": [97], "image_token_index": [97],
    "rope_parameters": [{"rope_type": "linear", "rope_theta": 70.0, "factor": 2.0},
                        {"rope_type": "default", "rope_theta": 70.0, "mrope_section": [2, 2, 4]}],
}  # fmt: skip


def qwen(text: dict[str, Any], vision: dict[str, Any], **keys: Any) -> test_vision.Theirs:
    return test_vision.qwen(text, vision, keys=keys, shapes=SHAPES)


MODELS = {"qwen2_5_vl": ("Qwen2_5_VLConfig", test_vision.FIELDS, qwen),
          "llava": ("LlavaConfig", test_llava.FIELDS, test_llava.said)}  # fmt: skip


def test_they_are_all_that_see():
    assert MODELS.keys() == {name for name, family in FAMILIES.items() if family.has("vision")}


@pytest.mark.thorough
@pytest.mark.parametrize("part", [None, "text_config", "vision_config"])
@pytest.mark.parametrize("family", MODELS)
def test_a_changed_key_changes_what_is_seen_as_it_does_theirs_or_is_refused(family, part):
    """Logits and gradients; keys as well that are said to be without effect."""
    import transformers

    cls, fields, said = MODELS[family]
    config = getattr(transformers, cls)(**fields)
    whole, read, fails = config.to_dict(), [], []
    for key, value in keys_of(config if part is None else getattr(config, part)).items():
        for other in [] if key in NAMES else OTHERS.get(key) or other_values(key, value):
            file = {**whole, key: other} if part is None else {**whole, part: {**whole[part], key: other}}
            try:
                config_from_huggingface(file)
            except ConfigError as error:
                assert error.fix
                continue
            keys = {key: other} if part is None else {}
            try:
                theirs = said(file["text_config"], file["vision_config"], **keys)
            except Exception as error:  # transformers cannot make a model of it either
                fails.append((key, other, error))
                continue
            test_vision.assert_same(theirs)
            read.append(key)
    assert len({*read} & HARMLESS) >= 2 and len(read) > len(fails), (read, fails)
    assert part is None or len({*read} - HARMLESS) >= 5, (read, fails)
