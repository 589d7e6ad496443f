"""Which words end a text, as the files of a model say.

A model for conversations ends an answer with another token than a document (Llama 3: three of them), and its tokenizer
names one. The list is the generation configuration's; an older folder has it in `config.json`:

    eos_token_id of generation_config.json, else of config.json, else the tokenizer's end of document

So does transformers, but for the end: where the first of these files that is there says no id, its `generate` never
stops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimegatron.checkpoint.hf_config import read_json
from minimegatron.errors import CheckpointError

FILES = ("generation_config.json", "config.json")


def stop_ids(folder: Path, end_of_document: int, vocab_size: int) -> tuple[list[int], str]:
    """(ids after which a text is over, the file that says so).

    Args:
        folder: of the published model, of the one that a run began with, or of the tokenizer.
        end_of_document: the tokenizer's.
        vocab_size: of the model.

    Raises:
        CheckpointError: a file says something that is no id of this model.
    """
    for name in FILES:
        path = folder / name
        said: Any = read_json(path, "a folder with config.json").get("eos_token_id") if path.is_file() else None
        ids = said if isinstance(said, list) else [said]
        if said is None or not ids:
            continue
        for word in ids:
            if not isinstance(word, int) or isinstance(word, bool) or not 0 <= word < vocab_size:
                raise CheckpointError(
                    f"eos_token_id is {said}, and {word} is no word of a vocabulary of {vocab_size}",
                    where=str(path),
                    fix="--stop-token-ids N ... says which words end a text",
                )
        return ids, name
    return [end_of_document], "the tokenizer"
