"""Expressions of a kernel, read by the rules of C++ and written again for the emulator.

The problem in a sentence: `(const float4*)&row[4 * i]`, `*p++` and `a < b` are right CUDA, and each must reach the
counts with its line, while nothing that is not understood may reach a compiler.

It goes down by precedence, one method for each level: `expression` (commas), `assignment`, `conditional`, `binary` (ten
levels), `unary` (casts, `*`, `&`), `postfix` (`[i]`, `.x`, `->x`), `primary`. Each returns C++ for the emulator.
`labkit/cuda_types.py` reads the words and their types, `labkit/cuda_statements.py` statements.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.cuda_lex import Word
from labkit.cuda_types import KEYWORDS, NAMED, OWN, REFUSED, Type, Types, at_line

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
_LEVELS = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
           ("*", "/", "%")]  # fmt: skip
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}


class Expr(NamedTuple):
    """An expression as C++; `kind` says what `&` of it would be: index (of `base`), star (`base`), or other."""

    text: str
    kind: str = "other"
    base: str = ""
    place: str = ""


class Expressions(Types):
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
        """Whether a `>` at this place ends the arguments of a template."""
        return self.in_angles > 0 and self.word.text in (">", ">>", ">=")

    def unary(self) -> Expr:
        word = self.word
        if self.sees("("):
            if self.is_type(self.peek()) or (self.peek().text == "std" and self.peek(3).text in NAMED):
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
        """The arguments of a call, from the opening to the closing parenthesis."""
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
        if word.text in REFUSED or word.text in KEYWORDS:
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
