"""Expressions and types of a kernel, read by the rules of C++ and written again for the emulator.

The problem in a sentence: `(const float4*)&row[4 * i]`, `*p++` and `a < b` are right CUDA, and each must reach the
counts with its line, while nothing that is not understood may reach a compiler.

It goes down by precedence, one method for each level: `expression` (commas), `assignment`, `conditional`, `binary` (ten
levels), `unary` (casts, `*`, `&`), `postfix` (`[i]`, `.x`, `->x`), `primary`. Each returns C++ for the emulator.
`labkit/cuda_parse.py` reads statements and says what is made of what.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from labkit.cuda_lex import CompileError, Word

OWN = "me_"  # before each name of the learner's
_PLAIN = {"void", "bool", "char", "short", "int", "long", "float", "double", "unsigned", "signed", "auto"}
_VECTORS = {"float2", "float3", "float4", "int2", "int4"}
_NAMED = {
    *_VECTORS, "size_t", "ptrdiff_t", "dim3", "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t",
    "uint32_t", "uint64_t",
}  # fmt: skip
_ALIASES = {"uint": "unsigned", "uint2": "int2"}
_POINTED = {"float", "int", "unsigned", "double", "float2", "float4", "int2", "int4", "int32_t", "uint32_t"}
_MATH = set(
    "sqrtf rsqrtf expf exp2f logf log2f log10f log1pf expm1f powf sinf cosf tanf tanhf fabsf fmaxf fminf fmaf floorf "
    "ceilf roundf rintf truncf fmodf copysignf erff cbrtf hypotf ldexpf sqrt rsqrt exp exp2 log log2 log10 pow sin "
    "cos tan tanh fabs fmax fmin fma floor ceil round rint trunc fmod copysign erf cbrt hypot abs min max "
    "isnan isinf isfinite "
    "__fsqrt_rn __frsqrt_rn __fdividef __fmaf_rn __fadd_rn __fsub_rn __fmul_rn __fdiv_rn __frcp_rn __expf "
    "__logf __powf __float_as_int __int_as_float __float2int_rn __int2float_rn __saturatef __popc __ffs __clz "
    "make_float2 make_float3 make_float4 make_int2 make_int4".split()
)
_PLACED = set(  # they want to know where they stand
    "__syncthreads __syncwarp __shfl_sync __shfl_xor_sync __shfl_down_sync __shfl_up_sync __ballot_sync __any_sync "
    "__all_sync __ldg atomicAdd atomicMax atomicMin __syncthreads_or __syncthreads_and __syncthreads_count".split()
)
_NOTHING = {"__threadfence", "__threadfence_block", "__nop"}
_VALUES = {"threadIdx", "blockIdx", "blockDim", "gridDim", "warpSize", "INFINITY", "NAN", "FLT_MAX", "FLT_MIN",
           "FLT_EPSILON", "INT_MAX", "INT_MIN"}  # fmt: skip
_REFUSED = {
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
_KEYWORDS = {
    "if", "else", "for", "while", "do", "switch", "case", "default", "return", "break", "continue", "const",
    "constexpr", "static", "inline", "struct", "using", "typedef", "sizeof", "true", "false", "reinterpret_cast",
    "static_cast",
    "__shared__", "__restrict__", "__restrict", "__global__", "__device__", "__host__", "__forceinline__",
    "__noinline__", "__launch_bounds__",
}  # fmt: skip
_LEVELS = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
           ("*", "/", "%")]  # fmt: skip
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}


class Expr(NamedTuple):
    """An expression as C++; `kind` says what `&` of it would be: index (of `base`), star (`base`), or other."""

    text: str
    kind: str = "other"
    base: str = ""
    place: str = ""


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


class _Reader:
    """The words, and a place among them."""

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
        if word.kind == "name" and word.text in _REFUSED:
            raise CompileError(f"{_REFUSED[word.text]}: `{word.text}`", word.line)
        if word.kind == "end":
            raise CompileError(f"{why}, and here the text ends", word.line)
        raise CompileError(f"{why} before `{word.text}`" if why.startswith("expected") else f"{why}: `{word.text}`",
                           word.line)  # fmt: skip

    def place(self) -> str:
        """The line, and a number for this place alone."""
        self.sites += 1
        return f"lab::Place{{{self.word.line}, {self.sites}}}"

    def name(self) -> Word:
        """A name that the learner gives to something."""
        word = self.word
        if word.kind != "name":
            self.refuse("expected a name")
        if word.text in _REFUSED or word.text in _KEYWORDS or word.text in _PLAIN:
            self.refuse("this word has a meaning in C++")
        if word.text in self.types:
            self.refuse("this is the name of a type already")
        return self.take()


class _Types(_Reader):
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
        return word.text in _PLAIN | _NAMED | _ALIASES.keys() | {
            "const", "constexpr", "static", "__shared__"} | self.types  # fmt: skip

    def at_type(self) -> bool:
        std = self.sees("std") and self.peek().text == "::" and self.peek(2).text in _NAMED
        return std or self.is_type(self.word) or self.sees("volatile", "decltype")

    def type(self) -> Type:
        parts: list[str] = []
        seen: set[str] = set()
        first = self.word
        while True:
            if self.took("const", "constexpr", "static", "__shared__"):
                seen.add(self.words[self.at - 1].text)
            elif self.sees("std") and self.peek().text == "::" and self.peek(2).text in _NAMED and not parts:
                self.take(), self.take()
            elif self.word.kind == "name" and self.word.text in _PLAIN:
                parts.append(self.take().text)
            elif not parts and self.word.kind == "name" and self.is_type(self.word):
                text = self.take().text
                parts.append(_ALIASES.get(text, text) if text in _NAMED | _ALIASES.keys() else OWN + text)
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
        """Whether a `*` follows, which is then read, with its const and __restrict__."""
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


class Expressions(_Types):
    """Expressions, by precedence."""

    def expression(self) -> Expr:
        left = self.assignment()
        while self.took(","):
            left = Expr(f"{left.text}, {self.assignment().text}")
        return left

    def assignment(self) -> Expr:
        left = self.conditional()
        if self.word.kind == "mark" and self.word.text in _ASSIGN:
            mark = self.take().text
            right = self.braces() if mark == "=" and self.sees("{") else self.assignment().text
            return Expr(f"{left.text} {mark} {right}")
        return left

    def conditional(self) -> Expr:
        test = self.binary(0)
        if not self.took("?"):
            return test
        yes = self.assignment().text  # both become one type: a value, where one is a word of memory
        self.need(":")
        return Expr(f"({test.text} ? lab::value({yes}) : lab::value({self.assignment().text}))")

    def binary(self, level: int) -> Expr:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.word.kind == "mark" and self.word.text in _LEVELS[level] and not self.closes():
            mark = self.take().text
            left = Expr(f"{left.text} {mark} {self.binary(level + 1).text}")
        return left

    in_angles = 0

    def closes(self) -> bool:
        """Whether a `>` here ends the arguments of a template."""
        return self.in_angles > 0 and self.word.text in (">", ">>", ">=")

    def unary(self) -> Expr:
        word = self.word
        if self.sees("("):
            if self.is_type(self.peek()) or (self.peek().text == "std" and self.peek(3).text in _NAMED):
                return self.cast()
        elif self.took("*"):
            place, inner = self.place(), self.unary()
            return Expr(f"{at_line(word.line)}lab::star({inner.text}, {place})", "star", inner.text)
        elif self.took("&"):
            return self.address(word)
        elif self.word.kind == "mark" and self.word.text in ("+", "-", "!", "~", "++", "--"):
            mark = self.take().text
            inner = self.unary()
            return Expr(f"{at_line(word.line)}{mark} {inner.text}")
        elif self.took("sizeof"):
            self.need("(")
            if not self.at_type():
                self.refuse("sizeof takes a type here")
            text, pointer, _ = self.abstract()
            self.need(")")
            return Expr("sizeof(void*)" if pointer else f"sizeof({text})")
        return self.postfix(self.primary())

    def address(self, sign: Word) -> Expr:
        inner = self.unary()
        if inner.kind == "index":
            return Expr(f"lab::plus({inner.base}, {inner.place})")
        if inner.kind == "star":
            return Expr(inner.base)
        self.refuse("an address is taken of an element, as in &x[i]; pass a variable by reference: `float& v`", sign)

    def cast(self) -> Expr:
        start = self.need("(")
        text, pointer, kind = self.abstract()
        self.need(")")
        inner = self.unary().text
        return Expr(self.cast_to(text, pointer, kind, inner, start))

    def cast_to(self, text: str, pointer: bool, kind: Type, inner: str, start: Word) -> str:
        if pointer:
            return f"{at_line(start.line)}lab::cast<{'const ' if kind.const else ''}{kind.text}>({inner})"
        return f"(({text})lab::value({inner}))"

    def braces(self) -> str:
        self.need("{")
        parts = []
        while not self.sees("}"):
            parts.append(self.braces() if self.sees("{") else f"lab::value({self.assignment().text})")
            if not self.took(","):
                break
        self.need("}")
        return f"{{{', '.join(parts)}}}"

    def arguments(self, own: bool) -> str:
        """From the parenthesis to its end."""
        self.need("(")
        inside, self.in_angles = self.in_angles, 0
        parts = []
        while not self.sees(")"):
            one = self.braces() if self.sees("{") else self.assignment().text
            parts.append(f"lab::argument({one})" if own and not one.startswith("{") else one)
            if not self.took(","):
                break
        self.need(")")
        self.in_angles = inside
        return ", ".join(parts)

    def primary(self) -> Expr:
        word = self.word
        mark = at_line(word.line)
        if word.kind == "number":
            return Expr(mark + self.take().text)
        if self.took("("):
            inside, self.in_angles = self.in_angles, 0
            inner = self.expression()
            self.in_angles = inside
            self.need(")")
            return Expr(f"({inner.text})", inner.kind, inner.base, inner.place)
        if word.kind != "name":
            if word.kind == "string":
                self.refuse("a string stands in printf only")
            self.refuse("no lambdas here" if word.text == "[" else "expected an expression")
        if self.took("true", "false"):
            return Expr(mark + word.text)
        if self.took("reinterpret_cast", "static_cast"):
            self.need("<")
            text, pointer, kind = self.abstract()
            self.need(">")
            self.need("(")
            inside, self.in_angles = self.in_angles, 0
            value = self.expression().text
            self.in_angles = inside
            self.need(")")
            if word.text == "reinterpret_cast" and not pointer:
                self.refuse("reinterpret_cast is for pointers here", word)
            return Expr(self.cast_to(text, pointer, kind, value, word))
        if self.at_type():
            text, pointer, kind = self.abstract()
            if pointer:
                self.refuse("expected an expression", word)
            return Expr(f"{text}{self.braces()}" if self.sees("{") else f"(({text})lab::value({self.arguments(False)}))"
                        if self.sees("(") else self.refuse("expected `(`"))  # fmt: skip
        return self.named(word, mark)

    def named(self, word: Word, mark: str) -> Expr:
        if self.sees("std") and self.peek().text == "::":
            self.take(), self.take()
            word = self.word
            if word.text not in _MATH:
                self.refuse("of std:: a kernel has min, max and the functions of mathematics")
        if word.text in _REFUSED or word.text in _KEYWORDS:
            self.refuse("expected an expression")
        text, own = word.text, word.text in self.functions
        place = self.place()
        self.take()
        if self.sees("(") or (text in self.templates and self.sees("<")):
            if own:
                angles = self.angles() if self.sees("<") else ""
                return Expr(f"{mark}{OWN}{text}{angles}({self.arguments(True)})")
            if text == "printf":
                return Expr(mark + self.printf())
            if text in _PLACED:
                inner = self.arguments(False)
                return Expr(f"{mark}lab::{text.removeprefix('__')}({place}{', ' if inner else ''}{inner})")
            if text in _NOTHING:
                self.arguments(False)
                return Expr(f"{mark}((void)0)")
            if text in _MATH:
                return Expr(f"{mark}lab::math::{text.removeprefix('__')}({self.arguments(False)})")
            self.refuse("there is no such function here", word)
        if text in _VALUES and text not in self.variables:
            return Expr(mark + text)
        if own and text not in self.variables:
            self.refuse("a function is called, it has no other use here", word)
        if text in self.single:
            index = f"lab::index(0, {place})"
            return Expr(f"{mark}{OWN}{text}[{index}]", "index", f"{OWN}{text}", index)
        return Expr(f"{mark}{OWN}{text}")

    def angles(self) -> str:
        self.need("<")
        self.in_angles += 1
        parts = []
        while not self.sees(">"):
            parts.append(self.abstract()[0] if self.at_type() else self.binary(0).text)
            if not self.took(","):
                break
        self.in_angles -= 1
        self.need(">")
        return f"<{', '.join(parts)}>"

    def printf(self) -> str:
        start = self.need("(")
        if self.word.kind != "string":
            self.refuse("printf begins with a string")
        format = self.take().text
        while self.word.kind == "string":
            format += self.take().text
        parts = [f"lab::value({self.assignment().text})" for _ in iter(lambda: self.took(","), False)]
        self.need(")")
        if not parts and not format:
            self.refuse("", start)
        return f"lab::print({', '.join((format, *parts))})"

    def postfix(self, left: Expr) -> Expr:
        while True:
            word = self.word
            mark = at_line(word.line)
            if self.took("["):
                place = self.place()
                inside, self.in_angles = self.in_angles, 0
                index = f"lab::index({self.expression().text}, {place})"
                self.in_angles = inside
                self.need("]")
                left = Expr(f"{left.text}{mark}[{index}]", "index", left.text, index)
            elif self.took("."):
                left = Expr(f"{left.text}.{self.member()}")
            elif self.took("->"):
                place = self.place()
                left = Expr(f"lab::star({left.text}, {place}).{self.member()}")
            elif self.took("++", "--"):
                left = Expr(f"{left.text}{word.text}")
            else:
                return left

    def member(self) -> str:
        word = self.name()
        return word.text if word.text in ("x", "y", "z", "w") else OWN + word.text
