"""The base class of all configurations: a frozen dataclass whose fields have help texts and are checked.

For every config class of the package:

* a key that is no field is refused, with the nearest field that exists;
* a value of another type, or outside a field's choices or bounds, is refused, never converted;
* whatever `_check` finds wrong is refused at construction, with the values and the fix.

A field is declared by `opt(kind, default, help)`. The help text becomes the flag's help on the command line. The `Kind`
says whether a run that goes on from a checkpoint must have the checkpoint's value:

| kind             | the field decides                   | must equal the checkpoint's value          | published |
|------------------|-------------------------------------|--------------------------------------------|-----------|
| `MODEL`          | what the weights mean               | always                                     | yes       |
| `TRAINED`        | how the model is rounded, balanced  | always                                     | no        |
| `RUN`            | what the next step computes         | if the run goes on                         | no        |
| `elsewhere(why)` | one of these, indirectly            | no: its effect is compared elsewhere       | no        |
| `free(why)`      | how and where it is computed, ...   | no, for that reason                        | no        |

*Published* are the fields that a `config.json` contains and a conversion carries over (`checkpoint/hf_config`);
`training/same_run` compares the others. All ranks must have equal values, except where a field gives a reason
(`rank_local`).
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, Self

from minimegatron.errors import ConfigError, did_you_mean, require


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a field matters to a run that goes on from a checkpoint; see the table of this module.

    Attributes:
        name: `model`, `trained`, `run`, `elsewhere` or `free`.
        why: for `elsewhere` what is compared instead, for `free` why another value does not change the run.
    """

    name: str
    why: str = ""


MODEL, TRAINED, RUN = Kind("model"), Kind("trained"), Kind("run")


def elsewhere(why: str) -> Kind:
    """The kind of a field whose effect is compared in its place."""
    return Kind("elsewhere", why)


def free(why: str) -> Kind:
    """The kind of a field that may change in a run that goes on."""
    return Kind("free", why)


HOW = free("how the same numbers are computed")
BEGUN = free("the beginning is over")
BAD_STEP = free("what to do at a bad step is decided when it comes, often by going on with another answer")
OBSERVED = free("what is observed and where it is written")


def opt(kind: Kind, default: Any, help: str, choices: tuple | None = None, *, rank_local: str = "", **more: Any) -> Any:
    """A field of a section of a run.

    Args:
        kind: `MODEL`, `TRAINED`, `RUN`, `elsewhere(...)` or `free(...)`.
        default, help, choices, more: as of `described`.
        rank_local: why ranks may have different values; empty for a field that must be equal on all ranks.

    Raises:
        TypeError: there is no kind; a reason is missing.
    """
    if not isinstance(kind, Kind):
        raise TypeError(f"the field {help!r} has no kind: begin with MODEL, TRAINED, RUN, elsewhere(...) or free(...)")
    if (kind.name in ("elsewhere", "free")) != bool(kind.why):
        raise TypeError(f"the field {help!r} is {kind.name}({kind.why!r}): these two have a reason, the others none")
    return described(default, help, choices, **more, kind=kind, rank_local=rank_local)


def described(
    default: Any,
    help: str,
    choices: tuple | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    repeats: bool = False,
    **more: Any,
) -> Any:
    """A dataclass field with its help text and, if there are few, its legal values; or the bounds of a number.

    `least` is allowed itself, `above` and `below` are not. With `repeats`, a flag given twice adds its words to the
    first.
    """
    metadata = {"help": help, "choices": choices, "repeats": repeats, "least": least, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=metadata | more)


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    """The type hints of a class, cached: reading them costs more than checking a configuration."""
    return typing.get_type_hints(cls)


class Config:
    """Refuses unknown keys with the nearest match, enforces choices and bounds, converts to and from dicts."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a plain dict.

        Raises:
            ConfigError: an unknown key (with the nearest field), a missing one, or an illegal value.
        """
        fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in values:
            if key not in fields:
                raise ConfigError(
                    f"{cls.__name__} has no field `{key}`",
                    fix=did_you_mean(key, fields) or f"fields: {', '.join(sorted(fields))}",
                )
        # JSON has no tuples.
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}", fix="give the missing field") from None

    @classmethod
    def names_of(cls, *kinds: Kind) -> frozenset[str]:
        """The fields of these kinds, whatever their reasons."""
        names = {kind.name for kind in kinds}
        return frozenset(f.name for f in dataclasses.fields(cls) if f.metadata["kind"].name in names)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; all rules are checked again."""
        now = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return type(self).from_dict({**now, **changes})

    def __post_init__(self) -> None:
        hints = _type_hints(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, choices = getattr(self, field.name), field.metadata.get("choices")
            for one in value if isinstance(value, tuple) else (value,):
                if choices and one not in choices and not (one is None and field.default is None):
                    named = ", ".join(repr(c) for c in choices)
                    fix = did_you_mean(str(one), [str(c) for c in choices]) or f"one of {named}"
                    raise ConfigError(f"{field.name}={value!r} is not one of {named}", fix=fix)
            if value is not None or field.default is not None:  # None asks for a value derived below
                _check_type(field.name, value, hints[field.name])
            if isinstance(value, (int, float)):
                _check_bounds(field.name, value, field.metadata)
        self._check()

    def _check(self) -> None:
        """Derive the fields that were left out, then apply the rules."""

    def _derive(self, **values: Any) -> None:
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


def divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    """Refuse unless `part` divides `whole`; the fix lists the divisors."""
    if part < 1 or whole % part:
        options = [n for n in range(1, whole + 1) if whole % n == 0]
        shown = options if len(options) <= 12 else [*options[:6], "...", *options[-5:]]
        raise ConfigError(
            f"{part_name} ({part}) does not divide {whole_name} ({whole})",
            fix=f"choose {part_name} among {', '.join(map(str, shown))}, or change {whole_name}",
        )


def _check_bounds(name: str, value: float, bounds: Mapping[str, Any]) -> None:
    least, above, below = bounds.get("least"), bounds.get("above"), bounds.get("below")
    require(least is None or value >= least, f"{name} is {value}", f"must be at least {least}")
    require(above is None or value > above, f"{name} is {value}", f"must be above {above}")
    require(below is None or value < below, f"{name} is {value}", f"must be below {below}")


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse what a dataclass would accept silently: a string for a number, a bool for an int, NaN."""
    allowed = typing.get_args(hint) if typing.get_origin(hint) is not tuple and typing.get_args(hint) else (hint,)
    for kind in allowed:
        origin = typing.get_origin(kind) or kind
        if origin is float and isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
            return
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return
        if origin not in (int, float) and isinstance(value, origin):
            return
    types = " or ".join(
        "None" if k is type(None) else getattr(typing.get_origin(k) or k, "__name__", str(k)) for k in allowed
    )
    raise ConfigError(f"{name}={value!r} is a {type(value).__name__}", fix=f"give a {types}")
