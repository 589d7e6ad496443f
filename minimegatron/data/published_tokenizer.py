"""A tokenizer as the files that Hugging Face reads: a model is published with the one it was trained with.

| tokenizer              | files                                                    |
|------------------------|----------------------------------------------------------|
| `HuggingFaceTokenizer` | those of its folder, as they are: nothing is made here   |
| `GPT2BPETokenizer`     | `tokenizer.json`, made of vocabulary and merges          |
| `ByteLevelTokenizer`   | a byte-level BPE without a merge whose ids are the bytes |
| `NullTokenizer`        | none: its texts are numbers                              |
"""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from minimegatron.data.publish import to_json
from minimegatron.data.tokenizer import END_OF_TEXT, PAD, ByteTokenizer, GPT2BPETokenizer, Tokenizer

# Bytes that are no printable letter of Latin-1 get letters behind it, in GPT-2's order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


def made_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files of a tokenizer that has no folder; nothing for one that no file describes."""
    if isinstance(tokenizer, GPT2BPETokenizer):
        return _files(tokenizer._fast, {"eos_token": END_OF_TEXT})
    if isinstance(tokenizer, ByteTokenizer):
        fast = FastTokenizer(models.BPE({letter: byte for byte, letter in _LETTERS.items()}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False), AddedToken(PAD, normalized=False)])
        return _files(fast, {"eos_token": END_OF_TEXT, "pad_token": PAD})
    return {}


def _files(fast: FastTokenizer, special: dict[str, str]) -> dict[str, bytes]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    return {"tokenizer.json": fast.to_str(pretty=True).encode(), "tokenizer_config.json": to_json(config)}
