"""A learner's kernel as a text: where it stands in a cell, and the file that a compiler is given for it.

The problem in a sentence: the text stands in a cell as it would in a `.cu` file, and each of its loads and stores is to
be counted, without a word of it changed by the learner.

| step         | what it does                                                                                |
|--------------|---------------------------------------------------------------------------------------------|
| `texts`      | finds the `Kernel("...")` of a cell, without running the cell                               |
| `parsed`     | refuses what a kernel of a lab has no use for; the kernel's name, parameters, and C++ for   |
|              | the emulator (`labkit/cuda_parse.py`)                                                       |
| `translated` | the whole file: for the emulator that C++, for nvcc the text as it is; and a launcher       |
| `explained`  | the compiler's first error, in the words and lines of the cell                              |

Lines are kept, so a compiler names those of the cell. Everything here is a function of texts; `labkit/cuda.py` compiles
and `labkit/emulator.py` runs.
"""

from __future__ import annotations

import ast
import hashlib
import re

from labkit.cuda_lex import CompileError
from labkit.cuda_parse import ARRAYS, Parameter, Parsed, parsed
from labkit.cuda_types import OWN

_SAID = (  # what a compiler says of `lab.h`, and what it means
    (re.compile(r"use of deleted function.*\bindex\("), "an index is an integer"),
    (re.compile(r"use of deleted function.*\bcast\("), "such a cast is from a pointer, and keeps its const"),
    (re.compile(r"lvalue required as left operand"), "the left side cannot be written: is it const?"),
)
_C_TYPES = {"int": "int", "float": "double"}  # of arguments that are no pointers


def todo(source: str) -> bool:
    """Whether the stub is still in a kernel."""
    return "not_implemented(" in source


def texts(cell: str) -> list[tuple[str, int]]:
    """(text, line) of every `Kernel("...")` of a cell, found without running it.

    Raises:
        CompileError: the cell is not Python.
    """
    try:
        calls = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Call) and node.args]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise CompileError(f"SyntaxError: {said}", getattr(error, "lineno", 0) or 0) from None
    found = []
    for call in calls:
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        first = call.args[0]
        if called == "Kernel" and isinstance(first, ast.Constant) and isinstance(first.value, str):
            found.append((first.value, first.lineno))
    return found


def translated(source: str, line: int, on_gpu: bool) -> str:
    """The whole file for a compiler: the kernel under the line numbers of the cell, then its launcher."""
    name, parameters, code = parsed(source, line)
    pointers = [(kind, what) for kind, what in parameters if "*" in kind]
    arrays = [what for _, what in pointers]
    declared = [
        *(f"{_C_TYPES.get(kind, 'void*')} a_{what}" for kind, what in parameters),
        *(f"int64_t n_{what}" for what in arrays), "int grid", "int block", "void* stream",
    ]  # fmt: skip
    if on_gpu:
        passed = ", ".join(f"({kind})a_{what}" for kind, what in parameters)
        launch = f"MM_LAUNCH({name}, (unsigned)grid, (unsigned)block, 0, stream, {passed})"
        body = f"  return {launch};\n"
    else:
        known = "".join(
            f'  lab::array({i}, "{what}", a_{what}, n_{what}, {str(kind.startswith("const")).lower()});\n'
            for i, (kind, what) in enumerate(pointers)
        )
        passed = "".join(
            f", lab::Counted<{kind.removesuffix('*')}>({arrays.index(what)})" if "*" in kind else f", ({kind})a_{what}"
            for kind, what in parameters
        )
        launch = f"MM_LAUNCH(me::{OWN}{name}, (unsigned)grid, (unsigned)block, 0, stream{passed})"
        body = f"  lab::begin();\n{known}  return lab::end({launch});\n"
    return (
        f'#include "{"device.h" if on_gpu else "lab.h"}"\n'
        + ("" if on_gpu else "namespace me {\n")
        + f'#line {line} "kernel"\n{source if on_gpu else code}\n#line 1 "launcher"\n'
        + ("" if on_gpu else "}\n")
        + f"MM_EXPORT lab_launch({', '.join(declared)}) {{\n{body}}}\n"
    )


def digest(source: str) -> str:
    """The name of the library of a text."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def explained(said: str) -> CompileError:
    """The compiler's first error, in the learner's words and lines."""
    lines = said.splitlines()[1:] or [said]
    found = next((m for one in lines if (m := re.search(r"kernel[:(](\d+)\D.*?error:? *(.*)", one))), None)
    text = found[2] if found else lines[0]
    text = next((meant for pattern, meant in _SAID if pattern.search(text)), text)
    text = text.replace("‘", "`").replace("’", "`").replace("static assertion failed: ", "")
    text = re.sub(r"(?:class )?(?:lab::)?Counted<(const )?([\w:]+)>", r"\1\2*", text)
    text = re.sub(r"(?:class )?(?:lab::)?Ref<([\w:]+)>", r"\1&", text)
    text = re.sub(rf"\bme::|\blab::(?:math::)?|\b{OWN}", "", text)
    return CompileError(f"the compiler says: {text.strip()}"[:240], int(found[1]) if found else 0)


__all__ = [
    "ARRAYS", "CompileError", "Parameter", "Parsed", "digest", "explained", "parsed", "texts", "todo", "translated",
]  # fmt: skip
