"""The two functions of a run that are its own: which of them a file changes, and whether they are still the same.

They are called on a rank, which has a deadline: what a learner wrote may never return.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch

from labkit.acceptance import Missed, require
from minimegatron.errors import ConfigError

OWN = ("batch", "token_losses")
VALUE = 1e-5  # between losses, and their gradients, over the largest
CALLS = 8


def functions_of(path: Path) -> ModuleType:
    """The run's own functions.

    Raises:
        ConfigError: the file cannot be imported, or has no `batch`.
    """
    spec = importlib.util.spec_from_file_location("own", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a learner's file may raise
        what = f"{path.name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(what, fix="try it with python") from error
    if not callable(getattr(module, "batch", None)):
        raise ConfigError(f"{path.name} has no function `batch`", fix="keep its name, and what it returns")
    return module


def changed_functions(one: Path, other: Path) -> set[str]:
    """Names of functions, and `the rest`, whose text differs in two files, comments and docstrings apart.

    Raises:
        Missed: a file that is no Python.
    """
    a, b = _parts(one), _parts(other)
    changed = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    return changed & set(OWN) or changed  # what else changes belongs to them


def _parts(path: Path) -> dict[str, str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise Missed(f"{path.name} is no Python: {error}") from None
    parts, rest = dict[str, str](), list[str]()
    for node in tree.body[ast.get_docstring(tree) is not None :]:
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[ast.get_docstring(node) is not None :]
        if isinstance(node, ast.FunctionDef) and node.name in OWN:
            parts[node.name] = ast.dump(node)
        else:
            rest.append(ast.dump(node))
    return {**parts, "the rest": "\n".join(rest)}


def compare(rank: int, world: int, start: Path, mine: Path, seed: int) -> tuple[str, bool]:
    """Call the functions of two files with inputs that are drawn; what was seen, and whether they agree."""
    random = Random(seed)
    try:
        right, own = functions_of(start), functions_of(mine)
        for _ in range(CALLS):
            same_batch(right.batch, own.batch, random)
            if hasattr(own, "token_losses"):
                same_losses(right.token_losses, own.token_losses, random)
    except (Missed, ConfigError) as error:
        return str(error), False
    both = hasattr(own, "token_losses")
    return f"{2 * CALLS} calls agree" if both else f"{CALLS} calls agree; the model computes its own losses", True


def same_batch(right: Callable[..., Any], own: Callable[..., Any], random: Random) -> None:
    """Raise `Missed` unless both cut the same samples out of a stream."""
    samples, length = random.randint(1, 5), random.randint(1, 9)
    stream = torch.tensor([random.choice([0, 1, 2, 3]) for _ in range(40)])
    starts = [random.randrange(40 - length) for _ in range(samples - 1)] + [39 - length]
    before, given = stream.clone(), list(starts)
    wanted, seen = right(stream, list(starts), length), _called(own, "batch", stream, starts, length)
    require(isinstance(seen, dict) and seen.keys() >= wanted.keys(), f"batch gives {_keys(seen)}, not {_keys(wanted)}")
    for name, tensor in wanted.items():
        told = f"batch of {samples} samples of {length} tokens: {name}"
        require(
            isinstance(seen[name], torch.Tensor) and seen[name].dtype == tensor.dtype,
            f"{told} is not of {tensor.dtype}",
        )
        require(torch.equal(seen[name], tensor), f"{told} differs")
    require(torch.equal(stream, before) and starts == given, "batch has changed its inputs")


def same_losses(right: Callable[..., Any], own: Callable[..., Any], random: Random) -> None:
    """Raise `Missed` unless losses and their gradients agree."""
    b, s, v = (random.randint(1, most) for most in (3, 6, 30))
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    logits = 8 * torch.randn(b, s, v, generator=generator)
    labels, weight = torch.randint(0, v, (b, s), generator=generator), torch.randn(b, s, generator=generator)
    results = []
    for function in (right, lambda *given: _called(own, "token_losses", *given)):
        x, y = logits.clone().requires_grad_(), labels.clone()
        losses = function(x, y)
        told = f"token_losses of [{b}, {s}, {v}] gives {_described(losses)}"
        require(isinstance(losses, torch.Tensor) and losses.shape == (b, s) and losses.dtype == torch.float32, told)
        require(losses.requires_grad, "the losses of token_losses have no gradient")
        (gradient,) = torch.autograd.grad((losses * weight).sum(), x)
        require(torch.equal(x.detach(), logits) and torch.equal(y, labels), "token_losses has changed its inputs")
        results.append((losses.detach(), gradient))
    for what, one, other in zip(("losses", "gradient"), *results, strict=True):
        gap = float((one - other).abs().max())
        require(gap <= VALUE * max(1.0, float(one.abs().max())), f"{what} of token_losses differ by {gap:.2g}")


def _called(function: Callable[..., Any], name: str, *given: Any) -> Any:
    try:
        return function(*given)
    except Exception as error:  # whatever a learner's function may raise
        raise Missed(f"{name} raised {type(error).__name__}: {error}") from error


def _keys(value: Any) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
