"""The tokens of a kernel one by one, and its types and declarators, parsed by the rules of C++.

`Reader` has the tokens and a position among them, and reports errors in the words of a compiler, with the line. `Types`
knows which names are types, and writes a type as the emulator has it: `const float*` becomes a counted array, a type of
the learner's gets a prefix that distinguishes it from the lab's own. `labkit/cuda_expressions.py` builds on it.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from labkit.cuda_lex import CompileError, Word

OWN = "me_"  # before each name of the learner's
_PLAIN = {"void", "bool", "char", "short", "int", "long", "float", "double", "unsigned", "signed", "auto"}
_VECTORS = {"float2", "float3", "float4", "int2", "int4"}
NAMED = {
    *_VECTORS, "size_t", "ptrdiff_t", "dim3", "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t",
    "uint32_t", "uint64_t",
}  # fmt: skip
_ALIASES = {"uint": "unsigned", "uint2": "int2"}
_POINTED = {"float", "int", "unsigned", "double", "float2", "float4", "int2", "int4", "int32_t", "uint32_t"}
REFUSED = {
    **dict.fromkeys(("asm", "__asm__", "__asm"), "no assembly here"),
    "extern": "no extern here; shared memory of a fixed size: __shared__ float name[n];",
    "volatile": "volatile does not order threads: __syncthreads() or __syncwarp() does",
    "goto": "no goto here", "operator": "no operators of your own here", "union": "no union here",
    "class": "no class here", "namespace": "no namespace here", "new": "no new here: memory comes from Python",
    "delete": "no delete here", "this": "no this here", "decltype": "no decltype here: write the type",
    "thread_local": "no thread_local here", "register": "no register here", "alignas": "no alignas here",
    "__constant__": "no __constant__ here; for constants write constexpr", "nullptr": "no null pointers here",
    "const_cast": "no const_cast here: what is const is not written", "dynamic_cast": "no dynamic_cast here",
    "try": "no exceptions here", "throw": "no exceptions here", "catch": "no exceptions here",
    "typeid": "no typeid here", "__attribute__": "no attributes here",
    "enum": "no enum here; for constants write constexpr",
    "friend": "no class here", "virtual": "no class here", "mutable": "no class here", "typename": "no typename here",
    "template": "a template stands at the beginning of a line, outside of functions", "alignof": "no alignof here",
    "static_assert": "no static_assert here", "import": "no import here", "include": "no include here",
}  # fmt: skip
KEYWORDS = {
    "if", "else", "for", "while", "do", "switch", "case", "default", "return", "break", "continue", "const",
    "constexpr", "static", "inline", "struct", "using", "typedef", "sizeof", "true", "false", "reinterpret_cast",
    "static_cast",
    "__shared__", "__restrict__", "__restrict", "__global__", "__device__", "__host__", "__forceinline__",
    "__noinline__", "__launch_bounds__",
}  # fmt: skip


class Type(NamedTuple):
    """A type without its pointer; `own` are its words as C++."""

    text: str
    const: bool
    static: bool = False
    shared: bool = False
    constexpr: bool = False


def at_line(line: int) -> str:
    """A mark in emitted C++: what follows stands on this line."""
    return f"\x01{line}\x02"


class Reader:
    """The tokens, and a position among them."""

    def __init__(self, found: list[Word]) -> None:
        self.words, self.at, self.sites = found, 0, 0
        self.types: set[str] = set()  # of the text

    @property
    def word(self) -> Word:
        return self.words[self.at]

    def peek(self, by: int = 1) -> Word:
        return self.words[min(self.at + by, len(self.words) - 1)]

    def take(self) -> Word:
        word = self.word
        self.at = min(self.at + 1, len(self.words) - 1)
        return word

    def sees(self, *texts: str) -> bool:
        return self.word.kind in ("mark", "name") and self.word.text in texts

    def took(self, *texts: str) -> bool:
        if self.sees(*texts):
            self.take()
            return True
        return False

    def need(self, text: str) -> Word:
        if not self.sees(text):
            self.refuse(f"expected `{text}`")
        return self.take()

    def refuse(self, why: str, word: Word | None = None) -> NoReturn:
        word = word or self.word
        if word.text == "::":
            raise CompileError("a name with :: belongs to the lab or to a library, not to a kernel", word.line)
        if word.kind == "name" and word.text in REFUSED:
            raise CompileError(f"{REFUSED[word.text]}: `{word.text}`", word.line)
        if word.kind == "end":
            raise CompileError(f"{why}, and here the text ends", word.line)
        raise CompileError(f"{why} before `{word.text}`" if why.startswith("expected") else f"{why}: `{word.text}`",
                           word.line)  # fmt: skip

    def place(self) -> str:
        """The line, and a number that is unique for this place."""
        self.sites += 1
        return f"lab::Place{{{self.word.line}, {self.sites}}}"

    def name(self) -> Word:
        """A name that the learner gives to something."""
        word = self.word
        if word.kind != "name":
            self.refuse("expected a name")
        if word.text in REFUSED or word.text in KEYWORDS or word.text in _PLAIN:
            self.refuse("this word has a meaning in C++")
        if word.text in self.types:
            self.refuse("this is the name of a type already")
        return self.take()


class Types(Reader):
    """Types, names, declarators."""

    def __init__(self, found: list[Word]) -> None:
        super().__init__(found)
        self.functions: set[str] = set()
        self.templates: set[str] = set()
        self.variables: set[str] = set()
        self.single: set[str] = set()  # shared variables that are no arrays

    def is_type(self, word: Word) -> bool:
        if word.kind != "name":
            return False
        return word.text in _PLAIN | NAMED | _ALIASES.keys() | {
            "const", "constexpr", "static", "__shared__"} | self.types  # fmt: skip

    def at_type(self) -> bool:
        std = self.sees("std") and self.peek().text == "::" and self.peek(2).text in NAMED
        return std or self.is_type(self.word) or self.sees("volatile", "decltype")

    def type(self) -> Type:
        parts: list[str] = []
        seen: set[str] = set()
        first = self.word
        while True:
            if self.took("const", "constexpr", "static", "__shared__"):
                seen.add(self.words[self.at - 1].text)
            elif self.sees("std") and self.peek().text == "::" and self.peek(2).text in NAMED and not parts:
                self.take(), self.take()
            elif self.word.kind == "name" and self.word.text in _PLAIN:
                parts.append(self.take().text)
            elif not parts and self.word.kind == "name" and self.is_type(self.word):
                text = self.take().text
                parts.append(_ALIASES.get(text, text) if text in NAMED | _ALIASES.keys() else OWN + text)
            else:
                break
        if not parts:
            self.refuse("expected a type")
        parts = {("int", "unsigned"): ["unsigned"], ("int", "signed"): ["int"], ("signed",): ["int"]}.get(
            tuple(sorted(parts)), parts)  # fmt: skip
        constant = bool({"const", "constexpr"} & seen)
        text = at_line(first.line) + " ".join(parts)
        return Type(text, constant, "static" in seen, "__shared__" in seen, "constexpr" in seen)

    def pointed(self, kind: Type) -> bool:
        """Whether a `*` follows, which is then consumed with its const and __restrict__."""
        found = False
        while self.sees("*"):
            star = self.take()
            if found:
                self.refuse("a pointer to a pointer", star)
            found = True
            base = kind.text.rpartition("\x02")[2]
            if base not in _POINTED | {OWN + one for one in self.types} | {"auto"}:
                self.refuse(f"a pointer to {base.removeprefix(OWN)}; a kernel here points to float, float4 or int",
                            star)  # fmt: skip
            while self.took("const", "__restrict__", "__restrict"):
                pass
            if self.sees("volatile"):
                self.refuse("")
        return found

    def full(self, kind: Type, pointer: bool) -> str:
        """The type of a value."""
        if pointer:
            if kind.text.endswith("\x02auto"):
                return kind.text
            return f"lab::Counted<{'const ' if kind.const else ''}{kind.text}>"
        return f"{'const ' if kind.const else ''}{kind.text}"

    def abstract(self) -> tuple[str, bool, Type]:
        """A type without a name, as in a cast: (C++, whether a pointer, its base)."""
        kind = self.type()
        pointer = self.pointed(kind)
        if self.sees("&", "&&"):
            self.refuse("no references here")
        if kind.static or kind.shared or kind.constexpr or (kind.text.endswith("\x02auto")):
            self.refuse("expected a plain type")
        return self.full(kind, pointer), pointer, kind
