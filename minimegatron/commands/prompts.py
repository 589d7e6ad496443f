"""The prompts of `minimegatron generate`: from its command line or a file, to ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimegatron.data.tokenizer import HuggingFaceTokenizer


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file.

    Raises:
        DataError: the file does not exist, has no prompt, or has a line without one.
    """
    from minimegatron.errors import DataError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"no prompts can be read: {error}", where=str(path), fix="a file of UTF-8 text") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        prompt: Any = line
        if path.suffix == ".jsonl":
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                prompt = None
        if not isinstance(prompt, str) or not prompt:
            fix = 'a line {"prompt": "text"} each' if path.suffix == ".jsonl" else "a prompt in every line"
            raise DataError("a line without a prompt", where=f"{path}, line {number}", fix=fix)
        prompts.append(prompt)
    if not prompts:
        raise DataError("no prompt in it", where=str(path), fix="a prompt a line")
    return prompts


def read_prompt(
    prompt: str, tokenizer: HuggingFaceTokenizer, *, chat: bool = False, add_special_tokens: bool | None = None
) -> tuple[list[int], list[str]]:
    """The ids of a prompt, and lines about its special tokens.

    Args:
        chat: the prompt is what a user says, in the model's chat template.
        add_special_tokens: begin as the tokenizer does; None: unless the prompt does.
    """
    notes, split = [], tokenizer.split_special_tokens
    if spelled := tokenizer.spelled(prompt):
        counts = ", ".join(f"{text} {count}" for text, count in spelled.items())
        other = "" if chat else f"; --{'no-' * split}split-special-tokens reads {'tokens' if split else 'letters'}"
        notes.append(f"the prompt spells special tokens ({counts}), read as {'letters' if split else 'tokens'}{other}")
    if chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return tokenizer.tokenize(text, add_special_tokens=False), notes
    begins, add = tokenizer.named.get("bos_token"), add_special_tokens
    if add is None and begins and not split and prompt.startswith(begins):
        add = False
        notes.append(f"the prompt begins with {begins}, so no other is put before it (--add-special-tokens does)")
    return tokenizer.tokenize(prompt, add_special_tokens=add), notes
