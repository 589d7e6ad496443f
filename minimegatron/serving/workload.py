"""What a load generator sends, and when: prompts, and the moments of their arrival.

    `read`(file), `random_prompts`(lengths) -> Prompt, ...       `arrivals`(rate, burstiness) -> seconds, ...

| prompts                  | line                                                                                    |
|--------------------------|-----------------------------------------------------------------------------------------|
| text file                | a prompt                                                                                |
| JSONL, or a JSON array   | `{"prompt": text or ids}`, `{"messages": [{"role", "content"}, ...]}`, or ShareGPT's    |
|                          | `{"conversations": [{"from": "human", "value"}, ...]}` up to the first answer; each may |
|                          | have `"max_tokens"`                                                                     |
| random                   | none: ids (words for a chat) of given lengths, a share of them the same in all          |

**Arrivals** of many users who do not know of each other are a Poisson process: gaps are exponential with mean 1/rate.
A burstiness g other than 1 draws them from a gamma distribution of shape g and the same mean: below 1 they come in
bursts, above 1 more evenly (vLLM's `burstiness`).
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
# Of a random chat, whose prompts must be text: frequent enough to be about a token each.
WORDS = (
    "time year day thing man world life hand part place work week case point home water room area money story".split()
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request's own part.

    Attributes:
        content: text, ids, or messages of a chat.
        max_tokens: of the answer; None where whoever sends it decides.
    """

    content: str | list[int] | list[Message]
    max_tokens: int | None = None

    def completion(self) -> dict[str, Any]:
        """As a field of `/v1/completions`."""
        if isinstance(self.content, list) and self.content and isinstance(self.content[0], dict):
            return {"prompt": "\n".join(str(message["content"]) for message in self.content)}  # type: ignore[index]
        return {"prompt": self.content}

    def chat(self) -> dict[str, Any]:
        """As a field of `/v1/chat/completions`.

        Raises:
            ConfigError: ids, which a chat cannot have.
        """
        if isinstance(self.content, str):
            return {"messages": [{"role": "user", "content": self.content}]}
        if self.content and isinstance(self.content[0], int):
            raise ConfigError("a chat cannot be given as ids", fix="prompts of text, or the route /v1/completions")
        return {"messages": self.content}


def read(path: Path) -> list[Prompt]:
    """The prompts of a file.

    Raises:
        DataError: it cannot be read, holds none, or a line is not one.
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
        count: how many.
        input_len, output_len: tokens of a prompt and of its answer, on average.
        rng: draws everything.
        prefix_share: of `input_len`, which is the same in all prompts.
        range_ratio: lengths are uniform between (1 - r) and (1 + r) of that; the shared part keeps its own.
        vocab: first id, and the one behind the last.
        text: words instead of ids, for a chat.

    Raises:
        ConfigError: a length, a share or a vocabulary that cannot be.
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
    """`count` of the prompts in an order of chance; each once before any is there again."""
    order = np.concatenate([rng.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))])
    return [prompts[i] for i in order[:count]]


def arrivals(count: int, rate: float, rng: np.random.Generator, burstiness: float = 1.0) -> list[float]:
    """Seconds from the beginning at which requests arrive, the first at 0.

    Args:
        rate: requests a second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process.

    Raises:
        ConfigError: a rate or burstiness that is not above 0.
    """
    require(rate > 0, f"{rate} requests a second", "more than 0, or inf")
    require(burstiness > 0 and np.isfinite(burstiness), f"a burstiness of {burstiness}", "more than 0; 1 is Poisson")
    if np.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    return (np.cumsum(gaps) - gaps[0]).tolist() if count else []
