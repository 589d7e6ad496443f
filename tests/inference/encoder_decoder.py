"""A folder with a tiny T5 and a tokenizer in the form of T5's: ids 0 to 2 are padding, end and unknown, and each letter
is a word. A blank before the first word is no part of a text, as with SentencePiece.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from tests.inference.ranked import build
from tests.models.test_t5 import KINDS, their_model

SPECIAL = ["<pad>", "</s>", "<unk>"]
WORDS = ["\u2581", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!+=:;'-()"]
START, END = 0, 1
FIELDS = {kind: fields | {"num_layers": 3} for kind, fields in KINDS.items()}  # their cache wants as many as decode
FIELDS["added"] = FIELDS["1.1"] | {"decoder_start_token_id": 90}  # which the tokenizer does not have
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}answer:"


@functools.cache
def theirs(kind: str) -> Any:
    """The model of transformers in fp32."""
    import transformers

    wide = their_model(FIELDS[kind])[1]
    model = transformers.T5ForConditionalGeneration(wide.config).eval()
    if not wide.config.scale_decoder_outputs:  # until a file has two matrices, their class has one
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.load_state_dict(wide.state_dict())
    return model.float()


@functools.cache
def ours(kind: str) -> Any:
    """The same. Shared by tests: nobody changes it."""
    family, config = config_from_huggingface(theirs(kind).config.to_dict())
    return build(config, state_from_huggingface(theirs(kind).state_dict(), config, family))


def written(folder: Path, kind: str = "1.1") -> Path:
    """The folder, as transformers writes it."""
    theirs(kind).save_pretrained(folder)
    words = [*SPECIAL, *WORDS]
    fast = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Split("", "isolated")])
    fast.decoder = decoders.Metaspace()
    fast.add_special_tokens(SPECIAL)
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    fast.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
