"""A learner's kernel as a text: where it stands in a cell, what it is called, and what surrounds it for a compiler.

The problem in a sentence: the text stands in a cell as it would in a `.cu` file, a compiler of C++ takes it as it is,
and each load and store of a thread must be known by its line.

| step                  | what it does                                                                          |
|-----------------------|---------------------------------------------------------------------------------------|
| `texts`               | finds the `Kernel("...")` of a cell, without running the cell                         |
| `kernel_of`           | the kernel that is launched: its name, and its parameters' names                      |
| `translated`          | the file: the text under the line numbers of the cell, then a launcher                |
| `indexed_at_run_time` | an array of a thread that no GPU can keep in registers                                |
| `annotated`           | the compiler's assembly, with a table: which call of the runtime stands in which line |
| `explained`           | the compiler's first error, with the line of the cell                                 |

Everything here is a function of texts; `cuda.py` compiles and `emulator.py` runs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from minimegatron.errors import MinimegatronError


class CompileError(MinimegatronError):
    """A kernel's text is refused. `line` is of the cell, 0 if it is not known."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what, where=f"line {line} of the cell" if line else "", fix="mend the text")
        self.line = line


class Named(NamedTuple):
    """A kernel of a text: its name, with the arguments of a template, and its parameters' names."""

    name: str
    parameters: list[str]


def todo(source: str) -> bool:
    """Whether the stub is still in a kernel."""
    return "not_implemented(" in source


def digest(source: str) -> str:
    """The name of the library of a text."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def texts(cell: str) -> list[tuple[str, int, str]]:
    """(text, line, name) of every `Kernel("...", name="...")` of a cell, found without running it.

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
        names = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "name"), ast.Constant("")]
        text, name = call.args[0], names[0]
        if called == "Kernel" and isinstance(text, ast.Constant) and isinstance(name, ast.Constant):
            if isinstance(text.value, str) and isinstance(name.value, str):
                found.append((text.value, text.lineno, name.value))
    return found


# --------------------------------------------------------------------------------------------------------- the text

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_KERNEL = re.compile(
    r"(?P<template>template\s*<[^;{}]*>\s*)?(?:(?:static|inline|extern)\s+)*__global__\b"
    r"(?:\s|__launch_bounds__\s*\([^)]*\)|\w+(?=\s))*?\b(?P<name>(?!__launch_bounds__)\w+)\s*\("
)
_DYNAMIC = re.compile(
    r"extern(?P<gap>\s+)__shared__\s+(?P<aligned>(?:__align__|alignas)\s*\([^)]*\)\s*)?(?P<type>[^;\[\]]+?)\s*"
    r"\b(?P<name>\w+)\s*\[\s*\](?P<after>\s*(?:__align__\s*\([^)]*\))?\s*);"
)
_REFUSED = (  # what no compiler of C++ can take, and what to write instead
    (re.compile(r"\basm\b|\b__asm(?:__)?\b"), "no PTX here, the emulator runs C++: write it in CUDA C++"),
    (re.compile(r"<<<"), "a text has device code, Python launches it: kernel(x, y, n, grid=.., block=..)"),
    (re.compile(r"\b(?:cudaMalloc|cudaMemcpy|cudaDeviceSynchronize|int\s+main)\w*\s*\("),
     "a text has device code, memory is torch's: pass tensors, kernel(x, y, n, grid=.., block=..)"),
    (re.compile(r"\b(?:cooperative_groups|cuda)\s*::|[</]cooperative_groups|\bnvcuda\s*::"),
     "no cooperative groups, libcu++ or wmma here: write __syncthreads(), __syncwarp() and __shfl_*_sync"),
    (re.compile(r"\b(?:new|malloc|free)\b\s*[\w(]"),
     "a kernel here has no heap: take a local array, or __shared__ memory"),
)  # fmt: skip


def code_of(source: str) -> str:
    """The text with blanks in place of comments and strings."""
    return _COMMENT_OR_STRING.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def kernel_of(source: str, line: int, name: str = "") -> Named:
    """The kernel to launch.

    Args:
        name: which of several, or the template's arguments: `norm<256>`.

    Raises:
        CompileError: there is none, it is not said which, or a C++ compiler cannot take the text.
    """
    code = code_of(source)
    for pattern, instead in _REFUSED:
        if found := pattern.search(code):
            raise CompileError(instead, line + code.count("\n", 0, found.start()))
    kernels = {found["name"]: found for found in _KERNEL.finditer(code)}
    if not kernels:
        raise CompileError("there is no kernel: `__global__ void name(...)` is wanted", line)
    wanted = name.partition("<")[0].rpartition("::")[2].strip() or next(iter(kernels))
    if not name and len(kernels) > 1:
        raise CompileError(f'which of {", ".join(kernels)}? Write Kernel(r"""...""", name="{wanted}")', line)
    if wanted not in kernels:
        raise CompileError(f"there is no kernel `{wanted}`: there is {', '.join(kernels)}", line)
    found = kernels[wanted]
    if found["template"] and "<" not in name:
        here = line + code.count("\n", 0, found.start("name"))
        raise CompileError(f'{wanted} is a template: say of which, Kernel(r"""...""", name="{wanted}<...>")', here)
    return Named(name or wanted, [*_parameters(code, found.end())])


def _parameters(code: str, at: int) -> Iterator[str]:
    """The name of each parameter, from behind the bracket that opens them; `argument 3` for one without a name."""
    depth, part, number = 0, "", 0
    for end, letter in enumerate(code[at:], at):
        depth += (letter in "(<[{") - (letter in ")>]}" and code[end - 1] != "-")
        if depth < 0 or (letter == "," and depth == 0):
            number += 1
            words = re.findall(r"\w+", re.sub(r"\[[^\]]*\]|=.*", "", part, flags=re.DOTALL))
            if words and words != ["void"]:
                yield words[-1] if len(words) > 1 else f"argument {number}"
            part = ""
        else:
            part += letter
        if depth < 0:
            return


def translated(source: str, line: int, name: str, on_gpu: bool) -> str:
    """The whole file for a compiler: the text under the line numbers of the cell, and a launcher.

    For the emulator a text says `extern __shared__ float s[];` in other words: `float* const s = ...`.
    """
    text = source if on_gpu else re.sub(r"\bstatic(\s+)__shared__\b", r"\1__shared__", _DYNAMIC.sub(_pointer, source))
    begin = '#include "lab.h"\n' if on_gpu else ""
    return f'{begin}#line {line} "kernel"\n{text}\n#line 1 "launcher"\nLAB_KERNEL({name})\n'


def _pointer(found: re.Match[str]) -> str:
    kind = found["type"]
    return f"static{found['gap']}{kind}* const {found['name']} = reinterpret_cast<{kind}*>(lab::dynamic_shared);"


# ------------------------------------------------------------------------------------------------------ local arrays

_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?!\w|\s*\()")
_DECLARED = re.compile(r"(?:^|[;{}(\n])\s*(?:const\s+)?(?!return|else|case|using|__shared__|extern)\w+\s+(\w[^;(){}]*)")
_CONSTANT = re.compile(r"#define\s+(\w+)|\bconstexpr\s+\w+\s+(\w+)|\btemplate\s*<([^>]*)>")


@functools.cache
def indexed_at_run_time(source: str) -> tuple[str, str]:
    """A thread's own array and an index of it that is known only when the kernel runs; ("", "") if there is none.

    A compiler keeps an array in registers if it can unroll every loop that indexes it: then the loop's variable has a
    bound that is known. What a text does not say, such as the value of a function's parameter, passes for known.
    """
    code = code_of(source)
    constants = {
        word for found in _CONSTANT.finditer(code) for part in found.groups("") for word in _WORD.findall(part)
    }
    late = {name for kernel in _KERNEL.finditer(code) for name in _parameters(code, kernel.end())}
    late |= {"threadIdx", "blockIdx", "blockDim", "gridDim"}

    def known(expression: str, at: int, depth: int = 0) -> bool:
        return all(word in constants or depth < 4 and fixed(word, at, depth) for word in _WORD.findall(expression))

    def fixed(word: str, at: int, depth: int) -> bool:
        if word in late:
            return False
        compared = rf"{word}\s*(?:--|\+\+)?\s*(?:[<>]=?|!=)\s*([^;&|?{{}}]*?)\s*(?:[;&|]|\)\s*[{{\n])"
        bound = rf"\b(?:for|while)\s*\((?:[^{{}}]*?[;(\s&])?{compared}"
        given = rf"\b(?:int|unsigned|auto|size_t|long|short)\s[^;(){{}}]*?\b{word}\s*=\s*([^;,]*)"
        for pattern in (bound, given):
            if places := list(re.finditer(pattern, code[:at])):
                changes = rf"(?:\+\+|--)\s*{word}\b|\b{word}\s*(?:\+\+|--|[-+*/]=)"
                return known(places[-1][1], places[-1].start(), depth + 1) and (
                    pattern is bound or not re.search(changes, code))  # fmt: skip
        return True

    arrays: dict[str, int] = {}
    for declared in _DECLARED.finditer(code):
        for array in re.findall(r"(?:^|,)\s*(\w+)\s*\[", declared[1]):
            arrays.setdefault(array, declared.end())
    for array, end in arrays.items():
        for use in re.finditer(rf"(?<![\w.>]){array}\s*\[([^\[\]]*)\]", code[end:]):
            if not known(use[1], end + use.start()):
                return array, use[1].strip()
    return "", ""


# ----------------------------------------------------------------------------------------------------- the assembly

_LOC = re.compile(r"\s+\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\s+\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_SECTION = re.compile(r"\s+(?:\.section\s+)?(\.(?:text|data|bss|rodata)\S*)")
_CALL = re.compile(r"\s+(?:call|bl)\s+(?:__tsan_|__sanitizer_cov|__ubsan_|lab_mem)\w+")
_COPIES = re.compile(r"(\s+(?:call|bl)\s+)(mem(?:cpy|move|set))\b")
_COMMON = re.compile(r"(\s+\.comm\s+)(\w+),(\d+)(,\d+)")
_SIZE = re.compile(r"\s+\.size\s+(\w+), (\d+)$")
_LOCAL = re.compile(r"_ZZ.*E(\d+)(\w+)$")
_STATIC = re.compile(r"_ZL(\d+)(\w+)$")
_UNSET = (  # the pattern for a variable that was given no value becomes one that is NaN in every type of floats
    (re.compile(r"-16843010\b"), str(0x7FFFFFFF)), (re.compile(r"-72340172838076674\b"), str(0x7FFFFFFF7FFFFFFF)),
    (re.compile(r"(movw\s+\$)-258\b"), r"\g<1>32767"),
)  # fmt: skip
_SIZES = {
    "double": 8, "int64_t": 8, "float2": 8, "float4": 16, "int4": 16, "half": 2, "__half": 2, "__nv_bfloat16": 2,
    "nv_bfloat16": 2, "bool": 1, "char": 1, "short": 2, "uint8_t": 1, "int8_t": 1,
}  # fmt: skip
GAP = 128  # bytes behind a shared array that belong to nobody


def annotated(assembly: str, source: str, line: int) -> str:
    """The assembly with tables for `runtime.cc`: `lab_lines`, a row for each call of it; `lab_shared`, the arrays."""
    text, code = source.split("\n"), code_of(source)
    out, rows = list[str](), list[tuple[int, int]]()
    names: dict[str, str] = {}
    shared: dict[str, int] = {}
    section, where = "", ("", 0, 0)
    for one in assembly.replace("\t.byte\t-2\n" * 4, f"\t.long\t{0x7FFFFFFF}\n").split("\n"):
        for pattern, instead in (*_UNSET, (_COPIES, r"\1lab_\2")):
            one = pattern.sub(instead, one)
        if found := _SECTION.match(one):
            section = found[1]
        elif found := _LOC.match(one):
            where = (names.get(found[1], ""), int(found[2]), int(found[3]))
        elif found := _FILE.match(one):
            names[found[1]] = found[2]
        elif (found := _COMMON.match(one)) and _shared_name(found[2], code):
            shared[found[2]] = int(found[3])
            one = f"{found[1]}{found[2]},{int(found[3]) + GAP}{found[4]}"
        elif "bss" in section and one.startswith("\t.zero\t") and (found := _SIZE.match(out[-2])):
            if _shared_name(found[1], code):
                shared[found[1]] = int(found[2])
                one += f"\n\t.zero\t{GAP}"
        out.append(one)
        if _CALL.match(one):
            here = where[1] if where[0] == "kernel" else 0
            out.append(f".Llab{len(rows)}:")
            rows.append((here, int(bool(here) and _is_part(text, here - line, where[2]))))
    lines = [f"\t.quad\t.Llab{n}, {at}, {part}" for n, (at, part) in enumerate(rows)]
    strings, table = [], []
    for n, (symbol, size) in enumerate(shared.items()):
        name = _shared_name(symbol, code)
        table.append(f"\t.quad\t{symbol}, {size}, {_size_of(name, code)}, .Lname{n}")
        strings.append(f'.Lname{n}:\t.string "{name}"')
    if found := _DYNAMIC.search(source):
        size = _SIZES.get(found["type"].split()[-1], 1 if "char" in found["type"] else 4)
        table.append(f"\t.quad\t_ZN3lab14dynamic_sharedE, 0, {size}, .Lname")
        strings.append(f'.Lname:\t.string "{found["name"]}"')
    elif "lab14dynamic_shared" in assembly:  # of a header
        table.append("\t.quad\t_ZN3lab14dynamic_sharedE, 0, 4, .Lname")
        strings.append('.Lname:\t.string "dynamic shared memory"')
    return "\n".join([
        *out, '\t.section\tlab_tables,"aw"', "\t.balign\t8", "\t.globl\tlab_lines, lab_shared", "lab_lines:", *lines,
        "\t.quad\t0, 0, 0", "lab_shared:", *table, "\t.quad\t0, 0, 0, 0", *strings, "",
    ])  # fmt: skip


def _shared_name(symbol: str, code: str) -> str:
    """The name of a shared array in the text, "" for another variable."""
    if found := _LOCAL.match(symbol):
        return found[2][: int(found[1])]
    if (found := _STATIC.match(symbol)) and re.search(rf"__shared__[^;]*\b{found[2]}\b", code):
        return found[2]
    return ""


def _size_of(name: str, code: str) -> int:
    """Bytes of an element of a shared array, as far as the text says."""
    found = re.search(rf"__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?((?:\w|:)+)[^;]*\b{name}\b", code)
    return _SIZES.get(found[1], 4) if found else 4


def _is_part(text: list[str], row: int, column: int) -> bool:
    """Whether the place is the x in `v.x` or `v->x`: a load of a part of a vector."""
    if not 0 <= row < len(text):
        return False
    before, here = text[row][: column - 1].rstrip(), text[row][column - 1 :]
    return bool(re.match(r"[xyzw]\b", here) and re.search(r"(?<!Idx)(?<!Dim)(?:\.|->)$", before))


def named(text: str, line: int, row: int, column: int) -> str:
    """The array that is indexed at a place of the text: the name before the bracket that is closed there."""
    rows = text.split("\n")
    if not 0 <= row - line < len(rows):
        return "an array"
    found = re.search(r"(\w+)\s*(?:\[[^\[\]]*\]\s*)*\[(?:[^\[\]]|\[[^\[\]]*\])*$", rows[row - line][: column - 1])
    return found[1] if found else "an array"


# --------------------------------------------------------------------------------------------------------- an error

_SAID = (  # what a compiler says, and what it means here
    (re.compile(r"(assignment of read-only .*)"), r"\1: is it const?"),
    (re.compile(r"(invalid types .* for array subscript)"), r"\1: an index is an integer"),
    (re.compile(r"variable length array (\S+) is used.*"), r"the size of \1 is not known when it is compiled"),
    (re.compile(r"([\w/.]+): No such file or directory"), r"there is no `\1` here: what CUDA C++ itself has is there "
     "without #include"),
    (re.compile(r"(.*was not declared.*)"), r"\1: there is no such name here"),
)  # fmt: skip


def explained(said: str) -> CompileError:
    """The compiler's first error, with the line of the cell."""
    lines = said.splitlines() or ["nothing"]
    found = next((m for one in lines if (m := re.search(r"^kernel:(\d+)\D.*?error:? *(.*)", one))), None)
    other = next((m for one in lines if (m := re.search(r"(?:error|Error|undefined).*", one))), None)
    text = found[2] if found else other[0] if other else lines[0]
    if found is None:  # in a header, or in the launcher: the line that led there
        found = next((m for one in lines if (m := re.search(r"^kernel:(\d+)\D(.*)", one))), None)
    for pattern, meant in _SAID:
        text = pattern.sub(meant, text)
    text = text.replace("‘", "`").replace("’", "`").replace("static assertion failed: ", "")
    return CompileError(f"the compiler says: {text.strip()}"[:240], int(found[1]) if found else 0)
