"""A learner's kernel, read as a compiler reads it and written again for the emulator of threads.

The problem in a sentence: a kernel that runs beside the judge's counts must not be able to reach them, and no list of
forbidden words is ever complete; so what is *allowed* is a grammar, and a text outside of it is refused with its line.

    words of the text (cuda_lex) -> declarations, statements, expressions -> C++ made of what was understood, no more

| in the kernel                   | for the emulator (`csrc/lab.h`)                                                |
|---------------------------------|--------------------------------------------------------------------------------|
| a name of the learner's: `sum`  | `me_sum`: it can name nothing of the lab, of C++ or of the compiler            |
| `const float* x`                | `lab::Counted<const float> me_x`: an array, a place in it, never an address    |
| `x[i]`, `*p`                    | with the line; counted, held against the array's bounds                        |
| `&x[i]`                         | x + i; of a variable there is no address                                       |
| `float kept[4]`                 | `lab::Local<float, 4>`: bounds                                                 |
| `__shared__ float parts[256]`   | `lab::Shared<float, 256>`: bounds, and who used which word since which barrier |
| `sqrtf`, `__shfl_xor_sync`, ... | those of `lab.h`; any other function is one of the text                        |
| a loop, a function              | counts its turns: a loop without an end is found, and named by its line        |

What is left out has no use in the labs: classes, lambdas, function pointers, `goto`, `union`, `new`, casts between
pointers and integers, pointers to pointers, global variables that are not constants.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from labkit.cuda_lex import CompileError, Word, words
from labkit.cuda_statements import Statements
from labkit.cuda_types import OWN, Type, at_line

ARRAYS = 8  # as in lab.h
_ROLES = {"__global__", "__device__", "__host__", "__forceinline__", "__noinline__", "inline", "__inline__"}
_PASSED = {"float*", "const float*", "int*", "const int*", "int", "float"}


class Parameter(NamedTuple):
    """A parameter of the kernel: `kind` is float*, const float*, int*, const int*, int or float."""

    kind: str
    name: str


class Parsed(NamedTuple):
    """A whole text: its kernel, and C++ for the emulator."""

    name: str
    parameters: list[Parameter]
    code: str


@functools.lru_cache(maxsize=64)
def parsed(source: str, line: int) -> Parsed:
    """Parse a text that begins on this line of the cell.

    Raises:
        CompileError: it is outside of the grammar for kernels of a lab, or is not valid C++.
    """
    reader = _Text(words(source, line))
    try:
        code = reader.text()
    except RecursionError:
        raise CompileError("too many parentheses or braces inside of each other", reader.word.line) from None
    if len(reader.kernels) != 1:
        raise CompileError(f"one `__global__ void` is wanted, there are {len(reader.kernels)}", line)
    [(name, parameters)] = reader.kernels
    return Parsed(name, parameters, _laid_out(code, line))


def _laid_out(code: str, first: int) -> str:
    """Each piece on its original line."""
    out, line = [], first
    for part in re.split("(\x01[0-9]+\x02)", code):
        if part.startswith("\x01"):
            want = int(part[1:-1])
            out.append("\n" * max(0, want - line))
            line = max(line, want)
        else:
            out.append(part)
    return "".join(out)


class _Text(Statements):
    """Functions, templates, constants."""

    def __init__(self, found: list[Word]) -> None:
        super().__init__(found)
        self.kernels: list[tuple[str, list[Parameter]]] = []

    def text(self) -> str:
        parts = []
        while self.word.kind != "end":
            if not self.took(";"):
                parts.append(self.outermost())
        return "".join(parts)

    def outermost(self) -> str:
        head, of_template = "", set[str]()
        start = self.word
        if self.took("template"):
            head, of_template = self.template()
        if self.took("struct"):
            return head + self.structure(of_template)
        if self.took("using"):
            name = self.name()
            self.need("=")
            text = self.abstract()[0]
            self.types.add(name.text)
            return f"{at_line(name.line)}using {OWN}{name.text} = {text}{self.end()}"
        if self.took("typedef"):
            text, name = self.abstract()[0], self.name()
            self.types.add(name.text)
            return f"{at_line(name.line)}using {OWN}{name.text} = {text}{self.end()}"
        roles = self.roles()
        if not self.at_type():
            self.refuse("expected a function, or a constant")
        kind = self.type()
        roles |= self.roles()
        pointer = self.pointed(kind)
        if self.sees("&", "&&"):
            self.refuse("a function returns a value here")
        roles |= self.roles()
        word = self.name()
        if self.sees("("):
            text = self.function(kind, pointer, word, roles, bool(head), start)
        else:
            text = self.constant(kind, pointer, word)
        self.types -= of_template
        return head + text

    def roles(self) -> set[str]:
        found = set()
        while self.word.text in _ROLES | {"__launch_bounds__"}:
            word = self.take()
            found.add(word.text)
            if word.text == "__launch_bounds__":
                self.arguments(False)
        return found

    def template(self) -> tuple[str, set[str]]:
        """`template <...>` as C++, and the types that it names."""
        self.need("<")
        parts, names = [], set()
        self.in_angles += 1
        while not self.sees(">"):
            if self.took("typename", "class"):
                word = self.name()
                self.types.add(word.text)
                names.add(word.text)
                begin = f" = {self.abstract()[0]}" if self.took("=") else ""
                parts.append(f"class {OWN}{word.text}{begin}")
            else:
                kind = self.abstract()[0]
                word = self.name()
                begin = f" = {self.binary(0).text}" if self.took("=") else ""
                parts.append(f"{kind} {OWN}{word.text}{begin}")
            if not self.took(","):
                break
        self.in_angles -= 1
        self.need(">")
        return f"template <{', '.join(parts)}> ", names

    def structure(self, of_template: set[str]) -> str:
        name = self.name()
        if of_template:
            self.refuse("no template of a struct here", name)
        self.need("{")
        parts = []
        while not self.sees("}"):
            kind = self.type()
            if kind.static or kind.shared or kind.constexpr or kind.const:
                self.refuse("a struct has plain members here", name)
            while True:
                pointer, word = self.pointed(kind), self.name()
                if self.sees("(", "=", ":", "{"):
                    self.refuse("a struct has plain members here")
                shown = word.text if word.text in ("x", "y", "z", "w") else OWN + word.text
                sizes = self.sizes()
                text = self.full(kind, pointer)
                for size in reversed(sizes):
                    text = f"lab::Local<{text}, {size}>"
                parts.append(f"{text} {shown}; ")
                if not self.took(","):
                    break
            self.need(";")
        self.need("}")
        self.types.add(name.text)
        return f"struct {OWN}{name.text} {{ {''.join(parts)}}}{self.end()}"

    def constant(self, kind: Type, pointer: bool, word: Word) -> str:
        if pointer or kind.shared or not kind.const:
            self.refuse("outside of functions there are constants only: `constexpr int n = 4;`", word)
        parts = []
        while True:
            self.variables.add(word.text)
            sizes = self.sizes()
            if not self.sees("=", "{"):
                self.refuse("a constant has a value", word)
            self.took("=")
            begin = self.braces() if self.sees("{") else f"lab::value({self.assignment().text})"
            mark = at_line(word.line)
            if sizes:
                size = sizes[0] or str(begin.count("lab::value("))
                if len(sizes) > 1:
                    self.refuse("a table has one size", word)
                parts.append(f"constexpr lab::Table<{kind.text}, {size}> {mark}{OWN}{word.text}{{{begin}}}; ")
            else:
                parts.append(f"constexpr {kind.text} {mark}{OWN}{word.text} = {begin}; ")
            if not self.took(","):
                return "".join(parts) + self.end()
            word = self.name()

    def function(self, kind: Type, pointer: bool, word: Word, roles: set[str], templated: bool, start: Word) -> str:
        is_kernel = "__global__" in roles
        if is_kernel and (templated or pointer or not kind.text.endswith("\x02void")):
            self.refuse("a kernel is `__global__ void name(...)`, and no template", word)
        if kind.shared or (kind.static and kind.const):
            self.refuse("expected a function", word)
        self.functions.add(word.text)
        self.variables.discard(word.text)
        if templated:
            self.templates.add(word.text)
        known, single = set(self.variables), set(self.single)
        parameters, declared = self.parameters(is_kernel)
        returned = self.full(kind._replace(const=kind.const and pointer), pointer)
        inline = "constexpr " if kind.constexpr and not is_kernel else "static " if not templated else ""
        head = f"{at_line(start.line)}{inline}{returned} {at_line(word.line)}{OWN}{word.text}({', '.join(declared)})"
        if self.sees(";"):
            return head + self.end()
        if is_kernel:
            self.kernels.append((word.text, parameters))
        if kind.constexpr:
            body = self.block()
        else:
            body = f"{{ lab::tick({word.line}); {self.block()}}} "
        self.variables, self.single = known, single
        return f"{head} {body}"

    def parameters(self, is_kernel: bool) -> tuple[list[Parameter], list[str]]:
        self.need("(")
        found: list[Parameter] = []
        declared: list[str] = []
        if self.sees("void") and self.peek().text == ")":
            self.take()
        while not self.sees(")"):
            kind = self.type()
            if kind.static or kind.shared or kind.constexpr:
                self.refuse("expected a type")
            pointer = self.pointed(kind)
            reference = self.took("&")
            if self.sees("(", "&&", "..."):
                self.refuse("expected a name")
            word = Word("name", f"unnamed{len(declared)}", self.word.line) if self.sees(",", ")") else self.name()
            if self.sees("["):
                if pointer or len(self.sizes()) != 1:
                    self.refuse("an array that is passed has one size", word)
                pointer = True
            if reference and (pointer or is_kernel):
                self.refuse("a reference here is to a value, `float& v`, and not of a kernel", word)
            begin = f" = lab::value({self.assignment().text})" if self.took("=") else ""
            self.variables.add(word.text)
            shown = f"{'const ' if kind.const else ''}{kind.text}&" if reference else self.full(kind, pointer)
            declared.append(f"{shown} {OWN}{word.text}{begin}")
            base = kind.text.rpartition("\x02")[2]
            passed = f"{'const ' if kind.const and pointer else ''}{base}{'*' if pointer else ''}"
            if is_kernel and passed not in _PASSED:
                self.refuse("a parameter of a type that the lab does not pass", word)
            found.append(Parameter(passed, word.text))
            if not self.took(","):
                break
        self.need(")")
        if is_kernel and sum("*" in kind for kind, _ in found) > ARRAYS:
            self.refuse(f"more than {ARRAYS} arrays")
        return found, declared
