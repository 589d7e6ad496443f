"""The requests of a load generator: prompts, and their arrival times.

    `read`(file), `random_prompts`(lengths) -> Prompt, ...       `arrivals`(rate, burstiness) -> seconds, ...

| prompts                  | format                                                                                  |
|--------------------------|-----------------------------------------------------------------------------------------|
| text file                | a prompt in each line                                                                   |
| JSONL, or a JSON array   | `{"prompt": text or ids}`, `{"messages": [{"role", "content"}, ...]}`, or ShareGPT's    |
|                          | `{"conversations": [{"from": "human", "value"}, ...]}` up to the first answer; each may |
|                          | have `"max_tokens"`                                                                     |
| random                   | ids (words for a chat) of given lengths, with a given share of them common to all       |

**Arrivals** of many independent users are a Poisson process: gaps are exponential with mean 1/rate. With a burstiness g
other than 1 they are drawn from a gamma distribution of shape g and the same mean: g < 1 gives bursts, g > 1 more even
gaps (vLLM's `burstiness`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minimegatron.errors import ConfigError, DataError, require

Message = dict[str, Any]
# Words of a random chat, whose prompts must be text: frequent ones, of about a token each.
WORDS = (
    "time year day thing man world life hand part place work week case point home water room area money story".split()
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What differs between requests.

    Attributes:
        content: text, ids, or messages of a chat.
        max_tokens: of the answer; None: the sender's default.
    """

    content: str | list[int] | list[Message]
    max_tokens: int | None = None

    def completion(self) -> dict[str, Any]:
        """The field of a body for `/v1/completions`."""
        if isinstance(self.content, list) and self.content and isinstance(self.content[0], dict):
            return {"prompt": "\n".join(str(message["content"]) for message in self.content)}  # type: ignore[index]
        return {"prompt": self.content}

    def chat(self) -> dict[str, Any]:
        """The field of a body for `/v1/chat/completions`.

        Raises:
            ConfigError: the prompt is ids.
        """
        if isinstance(self.content, str):
            return {"messages": [{"role": "user", "content": self.content}]}
        if self.content and isinstance(self.content[0], int):
            raise ConfigError("a chat cannot be given as ids", fix="prompts of text, or the route /v1/completions")
        return {"messages": self.content}


def read(path: Path) -> list[Prompt]:
    """The prompts of a file.

    Raises:
        DataError: it cannot be read, has no prompt, or a line is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the prompts cannot be read: {error}", where=str(path), fix="a file of UTF-8 text") from error
    if path.suffix not in (".json", ".jsonl"):
        prompts = [Prompt(line) for line in text.splitlines() if line.strip()]
    elif text.lstrip().startswith("["):
        prompts = [_prompt(entry, f"{path}, entry {i}") for i, entry in enumerate(_json(text, str(path)))]
    else:
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        prompts = [_prompt(_json(line, f"{path}:{i}"), f"{path}:{i}") for i, line in lines]
    if not prompts:
        raise DataError("there is no prompt in it", where=str(path), fix="a prompt a line")
    return prompts


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"no JSON: {error}", where=where, fix="a JSON object a line, or a text file (.txt)") from error


def _prompt(entry: Any, where: str) -> Prompt:
    entry = entry if isinstance(entry, dict) else {}
    content, most = entry.get("prompt", entry.get("messages")), entry.get("max_tokens")
    if isinstance(turns := entry.get("conversations"), list):
        content = []
        for turn in turns:
            role = SPEAKERS.get(turn.get("from", "")) if isinstance(turn, dict) else None
            if role is None or not isinstance(turn.get("value"), str):
                raise DataError(
                    f"a turn that is {json.dumps(turn)[:80]}", where=where, fix='{"from": "human", "value": "..."}'
                )
            if role == "assistant":
                break
            content.append({"role": role, "content": turn["value"]})
    ids = isinstance(content, list) and all(type(token) is int for token in content)
    messages = isinstance(content, list) and all(isinstance(m, dict) and "content" in m for m in content)
    if not content or not (isinstance(content, str) or ids or messages):
        raise DataError(
            "a line without a prompt", where=where, fix='it has "prompt", "messages" or "conversations" with a question'
        )
    if most is not None and (type(most) is not int or most < 1):
        raise DataError(f"max_tokens is {most!r}", where=where, fix="an integer of at least 1")
    return Prompt(content, most)


def random_prompts(
    count: int,
    input_len: int,
    output_len: int,
    rng: np.random.Generator,
    *,
    prefix_share: float = 0.0,
    range_ratio: float = 0.0,
    vocab: tuple[int, int] = (100, 1000),
    text: bool = False,
) -> list[Prompt]:
    """Prompts of random ids.

    Args:
        count: number of prompts.
        input_len, output_len: mean number of tokens of a prompt and of its answer.
        rng: random number generator.
        prefix_share: share of `input_len` that is a prefix common to all prompts.
        range_ratio: r; lengths are uniform between (1 - r) and (1 + r) times their mean; the prefix's is fixed.
        vocab: (first id, last id + 1).
        text: words instead of ids, for a chat.

    Raises:
        ConfigError: a length, share, ratio or vocabulary out of range.
    """
    require(input_len >= 1 and output_len >= 1, f"lengths of {input_len} and {output_len}", "1 token or more")
    require(0 <= prefix_share <= 1, f"a shared prefix of {prefix_share} of the prompt", "between 0 and 1")
    require(0 <= range_ratio < 1, f"lengths that vary by {range_ratio}", "at least 0, less than 1")
    require(0 <= vocab[0] < vocab[1], f"ids from {vocab[0]} to {vocab[1]}", "the first below the last")
    low, high = (0, len(WORDS)) if text else vocab

    def length(mean: int) -> int:
        return max(1, int(rng.integers(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio)) + 1)))

    shared = rng.integers(low, high, round(input_len * prefix_share)).tolist()
    prompts = []
    for _ in range(count):
        own = max(length(input_len) - len(shared), 0)
        ids = shared + rng.integers(low, high, own).tolist()
        prompts.append(Prompt(" ".join(WORDS[i] for i in ids) if text else ids, length(output_len)))
    return prompts


def drawn(prompts: Sequence[Prompt], count: int, rng: np.random.Generator) -> list[Prompt]:
    """`count` of the prompts in random order; each is used once before any is repeated."""
    order = np.concatenate([rng.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))])
    return [prompts[i] for i in order[:count]]


def arrivals(count: int, rate: float, rng: np.random.Generator, burstiness: float = 1.0) -> list[float]:
    """Arrival times of requests in seconds, the first at 0.

    Args:
        count: number of requests.
        rate: requests a second; infinite: all at once.
        rng: random number generator.
        burstiness: shape of the gamma distribution of the gaps; 1: a Poisson process.

    Raises:
        ConfigError: a rate or burstiness that is not above 0.
    """
    require(rate > 0, f"{rate} requests a second", "more than 0, or inf")
    require(burstiness > 0 and np.isfinite(burstiness), f"a burstiness of {burstiness}", "more than 0; 1 is Poisson")
    if np.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    return (np.cumsum(gaps) - gaps[0]).tolist() if count else []
