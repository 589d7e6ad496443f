"""Parses statements and declarations of a kernel's functions, and writes them again for the emulator.

A learner's array gets bounds (`lab::Local`, `lab::Shared`), a loop counts its turns, and each statement keeps its
line. `labkit/cuda_parse.py` has the table of translations, and parses the text outside of functions.
"""

from __future__ import annotations

from labkit.cuda_expressions import Expressions
from labkit.cuda_lex import Word
from labkit.cuda_types import OWN, Type, at_line


class Statements(Expressions):
    """Declarations and statements, inside of a function."""

    def block(self) -> str:
        self.need("{")
        parts = []
        while not self.sees("}"):
            parts.append(self.statement())
        end = self.need("}")
        return f"{{ {''.join(parts)}{at_line(end.line)}}} "

    def statement(self) -> str:
        word = self.word
        mark = at_line(word.line)
        if self.sees("{"):
            return self.block()
        if self.took(";"):
            return "; "
        if self.took("if"):
            constant = "constexpr " if self.took("constexpr") else ""
            text = f"{mark}if {constant}({self.condition()}) {{ {self.statement()}}} "
            return text + f"else {{ {self.statement()}}} " if self.took("else") else text
        if self.took("while"):
            return f"{mark}while ({self.condition()}) {self.turn(word)}"
        if self.took("do"):
            body = self.turn(word)
            self.need("while")
            return f"{mark}do {body}while ({self.condition()}){self.end()}"
        if self.took("for"):
            return mark + self.loop(word)
        if self.took("switch"):
            return f"{mark}switch ({self.condition()}) {self.block()}"
        if self.took("case"):
            value = self.conditional().text
            self.need(":")
            return f"{mark}case {value}: "
        if self.took("default"):
            self.need(":")
            return f"{mark}default: "
        if self.took("break", "continue"):
            return mark + word.text + self.end()
        if self.took("return"):
            value = (
                "" if self.sees(";") else self.braces() if self.sees("{") else f"lab::value({self.expression().text})"
            )
            return f"{mark}return {value}{self.end()}"
        if self.at_type() and self.peek().text != "(":
            return self.declaration() + self.end()
        return self.expression().text + self.end()

    def end(self) -> str:
        if not self.sees(";"):
            self.refuse("expected `;`")
        self.take()
        return "; "

    def condition(self) -> str:
        self.need("(")
        text = self.declaration() if self.at_type() and self.peek().text != "(" else self.expression().text
        self.need(")")
        return text

    def turn(self, word: Word) -> str:
        """The body of a loop."""
        return f"{{ lab::tick({word.line}); {self.statement()}}} "

    def loop(self, word: Word) -> str:
        self.need("(")
        first = "" if self.sees(";") else self.declaration(one=True) if self.at_type() else self.expression().text
        first += self.end()
        test = ("" if self.sees(";") else self.expression().text) + self.end()
        step = "" if self.sees(")") else self.expression().text
        self.need(")")
        return f"for ({first}{test}{step}) {self.turn(word)}"

    def declaration(self, one: bool = False) -> str:
        """Declarations of variables, one each; as one declaration where the grammar allows only one."""
        start, kind = self.word, self.type()
        if kind.static and not kind.const:
            self.refuse("no static variables here: threads would share them without order", start)
        parts: list[str] = []
        before = None
        while True:
            head, text = self.declared(kind)
            parts.append(text if one and head == before else head + text)
            if one and before not in (None, head):
                self.refuse("a loop declares variables of one type", start)
            before = head
            if not self.took(","):
                return (", " if one else "; ").join(parts)

    def declared(self, kind: Type) -> tuple[str, str]:
        """One variable: its type, then its name and initialiser."""
        pointer = self.pointed(kind)
        reference = self.took("&")
        if self.sees("(", "&&"):
            self.refuse("expected a name")
        word = self.name()
        name, mark = OWN + word.text, at_line(word.line)
        self.variables.add(word.text)
        self.single.discard(word.text)
        sizes = self.sizes()
        if kind.shared:
            return self.shared_array(kind, pointer or reference, sizes, word)
        if sizes:
            return self.local_array(kind, pointer or reference, sizes, word)
        begin = self.begin()
        if reference:
            if pointer or not begin:
                self.refuse("expected a reference to a value, `float& v = ...`", word)
            head = f"const {kind.text}& " if kind.const else "auto&& "
            return head, f"{mark}{name} = {begin}"
        prefix = "static constexpr " if kind.static else "constexpr " if kind.constexpr else ""
        if begin and not begin.startswith("{"):
            begin = f" = lab::value({begin})"
        elif not (begin or pointer or kind.const or kind.text.endswith("\x02auto")):
            begin = f" = lab::unset<{kind.text}>()"
        return f"{prefix}{self.full(kind, pointer)} ", f"{mark}{name}{begin}"

    def begin(self) -> str:
        """The initialiser of a variable: `= e`, `= {...}`, `{...}` or `(e)`."""
        if self.took("="):
            return self.braces() if self.sees("{") else self.assignment().text
        if self.sees("{"):
            return self.braces()
        return f"({self.arguments(False)})" if self.sees("(") else ""

    def sizes(self) -> list[str]:
        found = []
        while self.took("["):
            found.append("" if self.sees("]") else self.conditional().text)
            self.need("]")
        return found

    def shared_array(self, kind: Type, pointer: bool, sizes: list[str], word: Word) -> tuple[str, str]:
        if pointer or kind.const or len(sizes) > 2 or "" in sizes:
            self.refuse("shared memory is `__shared__ float name[n];`, with one size or two", word)
        if self.sees("=", "{"):
            self.refuse("shared memory begins with no value: a thread writes it, then __syncthreads()", word)
        if not sizes:
            self.single.add(word.text)
        size = ", ".join(sizes or ["1"])
        return "", f'{at_line(word.line)}static lab::Shared<{kind.text}, {size}> {OWN}{word.text}("{word.text}")'

    def local_array(self, kind: Type, pointer: bool, sizes: list[str], word: Word) -> tuple[str, str]:
        if pointer or len(sizes) > 2:
            self.refuse("an array of a thread is `float name[n];`, with one size or two", word)
        begin = ""
        if self.took("=") or self.sees("{"):
            begin = self.braces()
        if begin == "{}":
            begin = "{lab::Zero{}}"
        if sizes[0] == "":
            if len(sizes) > 1 or not begin:
                self.refuse("the array has no size", word)
            sizes = [str(begin.count("lab::value("))] if "{" not in begin[1:] else sizes
        inside = f"lab::Local<{kind.text}, {sizes[-1]}>"
        for size in reversed(sizes[:-1]):
            inside = f"lab::Local<{inside}, {size}>"
        const = "const " if kind.const else ""
        return f"{const}{inside} ", f"{at_line(word.line)}{OWN}{word.text}{begin}"
