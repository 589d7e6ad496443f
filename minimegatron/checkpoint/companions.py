"""The files beside a model's weights (tokenizer, chat template, ids that end a text), from a run's start to its export.

The problem in a sentence: a model that is published without its stop ids loads and runs, and its answers never end.

    a published folder, or the run's tokenizer --> ROOT/huggingface/ --> a published folder

| file                      | a run from a published folder                    | a run from scratch                    |
|---------------------------|--------------------------------------------------|---------------------------------------|
| `config.json`             | as it was                                        | none: an export makes it of the model |
| `generation_config.json`  | as it was                                        | the ids of the run's tokenizer        |
| tokenizer, chat templates | of the run's tokenizer; as they were if its data | of the run's tokenizer                |
|                           | are numbers (`NullTokenizer`)                    |                                       |

The folder lies beside the checkpoints of a run, and the manifest of each has its hash: a folder that was lost or
changed is refused.

Which ids end a text: `eos_token_id` of `generation_config.json`, else of `config.json`, else the tokenizer's end of
document. A model for conversations ends an answer with another token than a document (Llama 3: three of them).
transformers has the same order without the last step: where neither file has an id, its `generate` never stops.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimegatron.checkpoint.disk import disk, staged, write_bytes
from minimegatron.checkpoint.hf_config import TOKENS, read_json
from minimegatron.data.publish import sync
from minimegatron.errors import CheckpointError

FOLDER = "huggingface"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt "
    "tokenizer.model tekken.json chat_template.jinja chat_template.json"
).split()
TEMPLATES = "additional_chat_templates"
Files = dict[str, bytes]


def tokenizer_files_in(folder: Path) -> Files:
    """The files of a tokenizer and its chat templates, by name.

    Raises:
        CheckpointError: one cannot be read.
    """
    paths = [path for name in TOKENIZER if (path := folder / name).is_file()]
    with disk(folder, "cannot be read"):
        paths += sorted(folder.glob(f"{TEMPLATES}/*.jinja"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def files_in(folder: Path) -> Files:
    """The files that a folder has beside its weights."""
    more = [name for name in (CONFIG, GENERATION) if (folder / name).is_file()]
    with disk(folder, "cannot be read"):
        return tokenizer_files_in(folder) | {name: (folder / name).read_bytes() for name in more}


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files beside the weights into another folder, but for `config.json`."""
    _write({name: content for name, content in files_in(source).items() if name != CONFIG}, target)


def token_ids(folder: Path) -> dict[str, Any]:
    """The ids that begin, end and pad a document: as in `config.json`, else `generation_config.json`."""
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            values = read_json(folder / name, "a folder with config.json")
            return {key: values[key] for key in TOKENS if values.get(key) is not None}
    return {}


def of_run(published: Files, tokenizer: Files, ids: Mapping[str, int]) -> Files:
    """The files beside the weights of a run's model.

    Args:
        published: files of the folder that the run begins with; {} from scratch.
        tokenizer: files of the run's tokenizer; {} if it has none.
        ids: the run's tokenizer's ids of `TOKENS`.
    """
    if not published:
        return {**tokenizer, GENERATION: to_json(dict(ids))}
    published_tokenizer = {name: content for name, content in published.items() if name not in (CONFIG, GENERATION)}
    if not tokenizer or tokenizer == published_tokenizer:
        return published
    kept = {name: published[name] for name in (CONFIG, GENERATION) if name in published}
    ids_of_folder = _table(published.get(GENERATION)) or {
        k: v for k, v in _table(published.get(CONFIG)).items() if k in TOKENS
    }
    eos = ids_of_folder.get("eos_token_id")
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if (eod := ids["eos_token_id"]) not in known:  # of another tokenizer: texts end with it, so answers may, too
        kept[GENERATION] = to_json({**ids_of_folder, "eos_token_id": [*known, eod] if known else eod})
    return {**tokenizer, **kept}


def keep(root: Path, files: Files) -> str:
    """Write the files into the folder beside the checkpoints, unless it has them already; returns their hash.

    Raises:
        CheckpointError: the disk is full, gone, or not writable.
    """
    folder = root / FOLDER
    with disk(folder):
        if not folder.is_dir() or files_in(folder) != files:
            for old in (*root.glob(f".{FOLDER}.*"), *root.glob(FOLDER)):  # of a run that was killed, or another one
                shutil.rmtree(old)
            with staged(folder) as hidden:
                _write(files, hidden)
    return digest(files)


def digest(files: Files) -> str:
    """A hash of names and contents."""
    return hashlib.sha256(to_json({name: hashlib.sha256(files[name]).hexdigest() for name in files})).hexdigest()


def verified(folder: Path, saved_hash: str | None) -> Path | None:
    """The folder beside the checkpoints of a run; None if there is none.

    Args:
        folder: `huggingface`.
        saved_hash: the hash in a manifest.

    Raises:
        CheckpointError: it has changed.
    """
    files = files_in(folder) if folder.is_dir() else {}
    if files and saved_hash and digest(files) != saved_hash:
        raise CheckpointError(
            "the tokenizer and the other files beside the weights have changed since the checkpoint was saved",
            where=str(folder),
            fix="copy the folder from where the run saved it; or move it away, and name another: --hf-model FOLDER",
        )
    return folder if files else None


def _write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, content)
    sync(folder)


def to_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _table(text: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(text or b"{}")
    except ValueError as error:
        raise CheckpointError(f"a JSON file beside the weights is broken: {error}", fix="download it again") from None
    return value if isinstance(value, dict) else {}


def stop_ids(folder: Path, end_of_document: int, vocab_size: int) -> tuple[list[int], str]:
    """(ids that end a text, the file that has them).

    Args:
        folder: of the published model, of the one that a run began with, or of the tokenizer.
        end_of_document: the tokenizer's id.
        vocab_size: of the model.

    Raises:
        CheckpointError: a file has an id outside of the vocabulary.
    """
    for name in (GENERATION, CONFIG):
        path = folder / name
        value: Any = read_json(path, "a folder with config.json").get("eos_token_id") if path.is_file() else None
        ids = value if isinstance(value, list) else [value]
        if value is None or not ids:
            continue
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise CheckpointError(
                    f"eos_token_id is {value}, and {token} is not in a vocabulary of {vocab_size}",
                    where=str(path),
                    fix="--stop-token-ids N ... says which tokens end a text",
                )
        return ids, name
    return [end_of_document], "the tokenizer"
