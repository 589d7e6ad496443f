"""A learner's kernel as a text: what it may say, what it takes, and what a compiler is given in its place.

The problem in a sentence: the text stands in a cell as it would in a `.cu` file, and each of its loads and stores is to
be counted, without a word of it changed by the learner.

| step         | what it does                                                                                |
|--------------|---------------------------------------------------------------------------------------------|
| `texts`      | finds the `Kernel("...")` of a cell, without running the cell                               |
| `signature`  | the one `__global__ void`, and what its parameters are                                      |
| `translated` | refuses what a kernel of a lab has no use for; for the emulator reads `const float*` as     |
|              | `Counted<const float>` (`csrc/lab.h`) and shared memory as the emulator's; adds a launcher  |
| `explained`  | the compiler's first error, in the words and lines of the cell                              |

Lines are kept, so a compiler names those of the cell. Everything here is a function of texts; `labkit/cuda.py` compiles
and runs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re

from minimegatron.errors import MinimegatronError

ARRAYS = 8  # as in lab.h
_C_TYPES = {"int": "int", "float": "double"}  # of arguments that are no pointers
_POINTER = re.compile(r"\b(?:const\s+)?(float4|float|int)(?:\s+const)?\s*\*\s*(?:const\b\s*)?(?:__restrict__\b)?")
_SHARED = re.compile(r"\b__shared__\s+(\w+)\s+(\w+)\s*(?:\[([^\]\[]+)\])?\s*;")
_HEAD = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)")


class CompileError(MinimegatronError):
    """The compiler, or a rule of the lab, refused a kernel. `line` is that of the cell, 0 where unknown."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what, where=f"line {line} of the cell" if line else "", fix="mend the kernel")
        self.line = line


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
            found.append((first.value, call.lineno))
    return found


def _without_comments(source: str) -> str:
    """Comments and strings blanked, lines kept."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'"
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)


def _allowed(source: str, line: int) -> str:
    """The text without comments and strings.

    Raises:
        CompileError: it asks for what a kernel of a lab has no use for: other files, assembly, the lab's own names.
    """
    bare = _without_comments(source)
    rules = (
        (r"#(?!pragma unroll\b)|%:", "only `#pragma unroll` may begin with #; for constants write constexpr"),
        (r"\\", "no backslash outside of a string"),
        (r"\b(?:asm|__asm__|__asm)\b", "no assembly here"),
        (r"\b(?:emulator|lab|Counted|Ref|mm_\w+|MM_\w+|_Pragma|__has_include\w*|R)\b(?=\s*(?:::|\(|<|\"))",
         "this name belongs to the lab"),
        (r"\bextern\b", "no extern here; shared memory of a fixed size: __shared__ float name[n];"),
    )  # fmt: skip
    for pattern, why in rules:
        for text in (bare, source) if pattern == r"\\" and "\\\n" in source else (bare,):
            if found := re.search(pattern, text):
                raise CompileError(f"{why}: `{found[0].strip()}`", line + text.count("\n", 0, found.start()))
    return bare


@functools.cache
def signature(source: str, line: int) -> tuple[str, list[tuple[str, str]]]:
    """Name of the kernel and its parameters as (kind, name); kinds: float*, const float*, int*, const int*, int, float.

    Raises:
        CompileError: there is not exactly one kernel, or a parameter of another type.
    """
    heads = list(_HEAD.finditer(_without_comments(source)))
    if len(heads) != 1:
        raise CompileError(f"one `__global__ void` is wanted, there are {len(heads)}", line)
    found = []
    for one in heads[0][2].split(","):
        words = one.replace("__restrict__", " ").replace("*", " * ").split()
        kind = " ".join(sorted(words[:-1], key=("const", "float", "int", "*").index)) if words[:-1] and set(
            words[:-1]) <= {"const", "float", "int", "*"} else ""  # fmt: skip
        kind = kind.replace(" *", "*")
        if kind not in ("float*", "const float*", "int*", "const int*", "int", "float"):
            raise CompileError(f"a parameter of a type that the lab does not pass: `{one.strip()}`", line)
        found.append((kind, words[-1]))
    if sum("*" in kind for kind, _ in found) > ARRAYS:
        raise CompileError(f"more than {ARRAYS} arrays", line)
    return heads[0][1], found


def translated(source: str, line: int, on_gpu: bool) -> str:
    """The whole file for a compiler: the learner's text under the line numbers of the cell, then its launcher."""
    _allowed(source, line)
    name, parameters = signature(source, line)
    text = source
    if not on_gpu:
        text = _SHARED.sub(_shared, text)
        text = text.replace("reinterpret_cast<", "mm_cast<")
        text = _POINTER.sub(lambda m: f"Counted<{'const ' if 'const' in m[0].split('*')[0] else ''}{m[1]}> ", text)
    pointers = [(kind.removesuffix("*"), what) for kind, what in parameters if "*" in kind]
    declared = [
        *(f"{_C_TYPES.get(kind, 'void*')} a_{what}" for kind, what in parameters),
        *(f"int64_t n_{what}" for _, what in pointers), "int grid", "int block", "void* stream",
    ]  # fmt: skip
    begin = "" if on_gpu else "  lab::begin();\n" + "".join(
        f'  lab::L.arrays[{i}] = {{"{what}", (const char*)a_{what}, (size_t)n_{what} * 4, {{}}, {{}}, {{}}}};\n'
        for i, (_, what) in enumerate(pointers)
    )  # fmt: skip
    order = [what for _, what in pointers]
    passed = [
        (f"({kind})a_{what}" if on_gpu else f"Counted<{kind.removesuffix('*')}>(({kind})a_{what}, {order.index(what)})")
        if "*" in kind else f"({kind})a_{what}"
        for kind, what in parameters
    ]  # fmt: skip
    launched = f"MM_LAUNCH({name}, (unsigned)grid, (unsigned)block, 0, stream, {', '.join(passed)})"
    counts = "" if on_gpu else (
        "MM_EXPORT lab_counts(void* out, void* stream) {\n  long long* to = (long long*)out;\n"
        "  for (auto& a : lab::L.arrays)\n    for (int store = 0; store < 2; ++store)\n"
        "      *to++ = a.times[store], *to++ = a.bytes[store], *to++ = a.sectors[store];\n  return 0;\n}\n"
    )  # fmt: skip
    return (
        f'#include "{"device.h" if on_gpu else "lab.h"}"\n#line {line} "kernel"\n{text}\n#line 1 "launcher"\n'
        f"MM_EXPORT lab_launch({', '.join(declared)}) {{\n{begin}"
        f"  return {launched if on_gpu else f'lab::end({launched})'};\n}}\n{counts}"
    )


def _shared(match: re.Match[str]) -> str:
    kind, name, size = match.groups()
    if size is None:
        return f"MM_SHARED({kind}, {name}_, 1); {kind}& {name} = {name}_[0];"
    return f"MM_SHARED({kind}, {name}, ({size}));"


def digest(source: str) -> str:
    """Names the library of a text."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def explained(said: str) -> CompileError:
    """The compiler's first error, in the learner's words and lines."""
    lines = said.splitlines()[1:] or [said]
    found = next((m for one in lines if (m := re.search(r"kernel[:(](\d+)\D.*?error:? *(.*)", one))), None)
    text = found[2] if found else lines[0]
    text = re.sub(r"(?:class )?Counted<(const )?(\w+)>", r"\1\2*", text.replace("‘", "`").replace("’", "`"))
    return CompileError(f"the compiler says: {text.strip()}"[:240], int(found[1]) if found else 0)
