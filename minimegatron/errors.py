"""Every error a user can meet: what happened, where, and the fix.

A message has three parts, always in this order::

    num_attention_heads (6) cannot be split over tensor_model_parallel_size (4)
      where: SelfAttention of layer 3, rank 1
      fix: choose a tensor_model_parallel_size that divides 6: 1, 2, 3, 6

The class decides the exit status of every command (`minimegatron ...`, `python -m minimegatron.commands.pretrain_gpt`):

| class             | exit | meaning                                                        |
|-------------------|------|----------------------------------------------------------------|
| `ConfigError`     | 2    | a flag, a config field, or a combination of them               |
| `CheckpointError` | 3    | a checkpoint is missing, torn, corrupt, or of another model    |
| `DataError`       | 4    | a data file or a token in it                                   |
| `RankError`       | 5    | a rank failed, died, or disagreed with the others              |
| `NumericsError`   | 6    | a number that is not finite reached a place where it may not   |
| `DeadlineError`   | 7    | a wait took longer than allowed; the message says for which rank |

0 is success, 130 is Ctrl-C and 141 an output that nobody reads any more, as everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


class MinimegatronError(Exception):
    """Base of all errors raised for a user's mistake or a machine's failure.

    Args:
        what: what happened, with the values.
        where: rank, coordinates, file and offset, or tensor; whatever locates it.
        fix: one line that says what to do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple:
        # Keyword-only arguments need help to travel from a rank back to the process that started it.
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type[MinimegatronError], what: str, where: str, fix: str) -> MinimegatronError:
    return cls(what, where=where, fix=fix)


class ConfigError(MinimegatronError):
    """A flag, a config field, or a combination that cannot work."""

    exit_code = 2


class CheckpointError(MinimegatronError):
    """A checkpoint that is missing, torn, corrupt, or belongs to another model."""

    exit_code = 3


class DataError(MinimegatronError):
    """A data file, a document or a token that cannot be used; `where` is its position."""

    exit_code = 4


class RankError(MinimegatronError):
    """A rank raised, died or disagreed with its peers.

    Attributes:
        of_another: another rank has failed and told this one; the error of that rank has the cause.
    """

    exit_code = 5
    of_another = False


class NumericsError(MinimegatronError):
    """NaN or infinity where it may not be."""

    exit_code = 6


class BadStep(NumericsError):
    """The loss or gradient of a training step must not be used: raised on all ranks together, before anything was
    updated."""


class DeadlineError(MinimegatronError):
    """A wait that exceeded its deadline; the message names who is missing."""

    exit_code = 7


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """The nearest of `candidates` as a sentence ("did you mean `lr`?"), or "" if none is near."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.65)
    return f"did you mean `{near[0]}`?" if near else ""


def require(condition: bool, what: str, fix: str) -> None:
    """Raise `ConfigError(what, fix)` unless the condition holds."""
    if not condition:
        raise ConfigError(what, fix=fix)


def ranges(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def ranks_by_value(values: Iterable[T], ranks: Iterable[int]) -> dict[T, list[int]]:
    """{value: the ranks that have it}, from the value of each rank."""
    ranks_of: dict[T, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def named(ranks: Iterable[int]) -> str:
    """`[3]` -> `"rank 3"`, `[0, 1, 2, 5]` -> `"ranks 0-2, 5"`."""
    ranks = list(ranks)
    return f"rank{'s' * (len(ranks) != 1)} {ranges(ranks)}"
