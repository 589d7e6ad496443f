"""Mistakes in Python: at one place of a text, what somebody might have written instead.

Each rule looks at one node of the syntax tree and gives replacements. The text around it stays unchanged, so line n of
a variant is line n of the text. They try the checks of labs (`tests/course/mutants`), and the tests that are
handed in with a capstone.

| rule        | replaces                          | by                                                           |
|-------------|-----------------------------------|--------------------------------------------------------------|
| statements  | a call, `x += y`, `a[i] = y`      | nothing                                                      |
| calls       | `f(x, group=g)`, `sorted(x)`      | `f(x)`, `list(x)`; min for max; op MAX; a wait at once       |
| methods     | `x.clone()`, `x.mean()`           | `x`, `x.sum()`                                               |
| numbers     | `dim=0`, `3`                      | `dim=1`, `dim=-1`; 4 and 2                                   |
| arithmetic  | `a * b`, `a // b`, `(r + 1) % n`  | `a`, `b`; rounded up; `1 - r`; another sign, another operation|
| choices     | `a < b`, `a and b`, `a if c else b` | `a <= b`, `a or b`, `a`, `b`                               |
| ranges      | `range(n)`, `x[a:b]`              | one less, one more, a bound left out                         |
| worlds      | `get_world_size()`, `tp.size`     | 2                                                            |
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Set
from typing import Any

Variant = tuple[str, str]  # what was done, the text that stands there now
_REDUCED = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "softmax", "log_softmax", "logsumexp", "cat", "stack",
    "chunk", "split", "tensor_split", "unsqueeze", "squeeze", "cumsum", "gather", "scatter", "scatter_add", "index_add",
    "index_select", "topk", "sort", "argsort", "narrow", "size", "flatten", "repeat_interleave", "unbind", "any", "all",
}  # fmt: skip
_NO_COPY = {
    "clone", "contiguous", "detach", "float", "double", "long", "int", "to", "abs", "bfloat16", "half", "type_as",
    "sqrt", "square", "flip", "clamp", "masked_fill", "requires_grad_", "floor", "ceil", "round", "bool", "nan_to_num",
}  # fmt: skip
_SWAPPED = {
    "min": "max", "max": "min", "amax": "amin", "amin": "amax", "minimum": "maximum", "maximum": "minimum",
    "mean": "sum", "sum": "mean", "floor": "ceil", "ceil": "floor", "any": "all", "all": "any", "add_": "copy_",
    "tensor_split": "chunk", "repeat_interleave": "repeat", "argmax": "argmin", "zeros_like": "ones_like",
}  # fmt: skip
_STARTS = {"isend", "irecv"}
_SIGNS: dict[type[ast.operator], str] = {
    ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Add: "+", ast.Sub: "-"
}  # fmt: skip
_COMPARED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}


def edits(text: str, lines: Set[int]) -> Iterator[tuple[int, str, str]]:
    """(line, what was done, the whole text) for each edit at a place in `lines`."""
    tree = ast.parse(text)
    raw = text.encode()
    starts = [0]
    for row in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    kept = _kept(tree)
    for node in ast.walk(tree):
        if id(node) in kept or getattr(node, "lineno", 0) not in lines:
            continue
        located: Any = node
        begin = starts[located.lineno - 1] + located.col_offset
        end = starts[located.end_lineno - 1] + located.end_col_offset
        for rule in _RULES:
            for what, new in rule(node):
                yield located.lineno, what, (raw[:begin] + new.encode() + raw[end:]).decode()


def _kept(tree: ast.AST) -> set[int]:
    """Nodes that are never edited: annotations, docstrings, messages, f-strings, decorators."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[Any] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += getattr(node, "decorator_list", [])
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            parts.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(node)
        if isinstance(node, ast.Call) and _called(node) == "Kernel":
            parts.append(node)
        found.update(id(inner) for part in parts if part is not None for inner in ast.walk(part))
    return found


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _inner(node: ast.expr) -> str:
    """The text of an expression, in parentheses if need be."""
    simple = isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript | ast.List | ast.Tuple)
    return _text(node) if simple and not isinstance(node, ast.Tuple) else f"({_text(node)})"


def _called(node: ast.Call) -> str:
    """The last name of the called function."""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _changed(node: ast.AST, **fields: Any) -> str:
    """The text of a node with other fields."""
    mine = {name: getattr(node, name) for name in node._fields}
    return _text(type(node)(**{**mine, **fields}))


# ------------------------------------------------------------------------------------------------------------- rules


def _statements(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"{_short(node)} dropped", "pass"
    elif isinstance(node, ast.AugAssign):
        yield f"{_short(node)} dropped", "pass"
        if isinstance(node.op, ast.Add | ast.Mult):
            yield (
                f"`=` for `{'+=' if isinstance(node.op, ast.Add) else '*='}`",
                (f"{_text(node.target)} = {_text(node.value)}"),
            )
    elif isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
        yield f"{_short(node)} dropped", "pass"
    elif isinstance(node, ast.If) and not node.orelse:
        yield f"`if {_short(node.test)[1:]} dropped", "pass"


def _calls(node: ast.AST) -> Iterator[Variant]:
    if not isinstance(node, ast.Call):
        return
    name = _called(node)
    last = {"dim"} if name in ("topk", "sort", "argsort") else set()  # the default
    for keyword in node.keywords:
        if keyword.arg in last and _text(keyword.value) == "-1":
            continue
        if keyword.arg and keyword.arg != "strict":  # which only finds faults of another line
            rest = [other for other in node.keywords if other is not keyword]
            yield f"`{keyword.arg}` dropped", _changed(node, keywords=rest)
    own = isinstance(node.func, ast.Name) and name not in dir(builtins) or name == "apply"
    if own and node.args and not isinstance(node.args[0], ast.Starred):
        yield f"`{name}` dropped", _inner(node.args[0])
    if len(node.args) > 2 and not isinstance(node.args[-1], ast.Starred):
        yield f"argument {_short(node.args[-1])} dropped", _changed(node, args=node.args[:-1])
    if name == "get_rank" and node.args:
        yield "group dropped", _changed(node, args=[])
    if name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter") and not any(
        k.arg == "op" for k in node.keywords
    ):
        op = ast.parse("__import__('torch').distributed.ReduceOp.MAX", mode="eval").body
        yield "op MAX for SUM", _changed(node, keywords=[*node.keywords, ast.keyword("op", op)])
    if name in _SWAPPED:
        other = _SWAPPED[name]
        func: ast.expr = (
            ast.Attribute(node.func.value, other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
        )
        yield f"`{other}` for `{name}`", _changed(node, func=func)
    if name in ("sorted", "reversed") and isinstance(node.func, ast.Name):
        yield f"`{name}` dropped", f"list({_text(node.args[0])})"
    starts = name in _STARTS or any(k.arg == "async_op" for k in node.keywords)
    if starts:
        yield "waits at once", f"(lambda work: (work.wait(), work)[1])({_text(node)})"
    if name in ("max", "min") and len(node.args) == 2:
        for kept in node.args:
            yield f"`{name}` dropped, {_short(kept)} kept", _inner(kept)


def _methods(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _NO_COPY:
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "dist", "math")):
            yield f"`.{node.func.attr}()` dropped", _inner(node.func.value)
        elif node.args and node.func.value.id != "dist":
            yield f"`{node.func.attr}` dropped", _inner(node.args[0])
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        yield f"`.{node.attr}` dropped", _inner(node.value)


def _numbers(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Call):
        yield from _dims(node)
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool | str | bytes | None | type(...)):
        return
    if isinstance(node.value, int):
        for other in (node.value + 1, node.value - 1):
            yield f"{other} for {node.value}", str(other)
    elif isinstance(node.value, float) and node.value != 0:
        yield f"{2 * node.value} for {node.value}", str(2 * node.value)


def _dims(node: ast.Call) -> Iterator[Variant]:
    """Another dim. Not -1 for 1: of a matrix they are the same; in the tree -1 is a negation of 1."""
    places = [(keyword, "value") for keyword in node.keywords if keyword.arg in ("dim", "axis")]
    values = [getattr(place, field) for place, field in places]
    if _called(node) in _REDUCED:
        values += node.args
    for value in values:
        old = _text(value)
        for new in {"0": ("1",), "1": ("0",), "-1": ("0",), "-2": ("-1",), "2": ("1",)}.get(old, ()):
            swapped = [ast.parse(new, mode="eval").body if arg is value else arg for arg in node.args]
            keywords = [
                ast.keyword(k.arg, ast.parse(new, mode="eval").body if k.value is value else k.value)
                for k in node.keywords
            ]
            yield f"dim {new} for {old}", _changed(node, args=swapped, keywords=keywords)


def _arithmetic(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if not isinstance(node.operand, ast.Constant):
            yield "sign dropped", _inner(node.operand)
        return
    if not isinstance(node, ast.BinOp):
        return
    left, right, of = _inner(node.left), _inner(node.right), type(node.op)
    ones = [isinstance(side, ast.Constant) and side.value in (1, 2) for side in (node.left, node.right)]

    def other(sign: str) -> tuple[str, str]:
        return f"`{sign}` for `{_SIGNS[of]}`", f"({left} {sign} {right})"

    if of in (ast.Mult, ast.Div) and not ones[1]:  # `x * 1` is made by `_numbers`
        yield f"factor {_short(node.right)} dropped", left
    if of is ast.Mult and not ones[0]:
        yield f"factor {_short(node.left)} dropped", right
    if of is ast.Div:
        yield other("//")
        yield other("*")
    if of is ast.FloorDiv:
        yield "rounded up for down", f"(-(-{left} // {right}))"
        yield other("/")
    if of is ast.Mod:
        yield other("//")
        yield f"`% {_text(node.right)}` dropped", left
        if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add | ast.Sub):
            yield "a world of two: 1 - rank", f"(1 - {_inner(node.left.left)})"
    if of in (ast.Add, ast.Sub):
        yield other("-" if of is ast.Add else "+")
        if not ones[1]:
            yield f"{_short(node.right)} dropped", left
    if of is ast.MatMult:
        yield f"{_short(node.right)} transposed", f"({left} @ {right}.mT)"
    if of is ast.Pow:
        yield "power dropped", left


def _choices(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _inner(node.left), _inner(node.comparators[0])
        if type(node.ops[0]) in _COMPARED:
            old, new = _COMPARED[type(node.ops[0])]
            yield f"`{new}` for `{old}`", f"({left} {new} {right})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        names = ("or", "and") if isinstance(node.op, ast.And) else ("and", "or")
        yield f"`{names[0]}` for `{names[1]}`", f"({_changed(node, op=other)})"
        for value in node.values:
            yield f"only {_short(value)}", _inner(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "`not` dropped", _inner(node.operand)
    elif isinstance(node, ast.IfExp):
        yield f"always {_short(node.body)}", _inner(node.body)
        yield f"always {_short(node.orelse)}", _inner(node.orelse)
    elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp) and any(g.ifs for g in node.generators):
        bare = [ast.comprehension(g.target, g.iter, [], g.is_async) for g in node.generators]
        yield "condition dropped", _changed(node, generators=bare)


def _ranges(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Call) and _called(node) == "range":
        for i, arg in enumerate(node.args[:2]):
            if isinstance(arg, ast.Constant) or isinstance(getattr(arg, "right", None), ast.Constant):
                continue
            for sign in "+-":
                moved = ast.parse(f"{_inner(arg)} {sign} 1", mode="eval").body
                yield (
                    f"range's {_short(arg)} {sign} 1",
                    _changed(node, args=[*node.args[:i], moved, *node.args[i + 1 :]]),
                )
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        part = node.slice
        for field in ("lower", "upper", "step"):
            if getattr(part, field) is not None:
                bare = ast.Slice(**{name: getattr(part, name) for name in part._fields if name != field})
                yield f"slice's {field} bound dropped", _changed(node, slice=bare)
        for field in ("lower", "upper"):
            bound = getattr(part, field)
            if bound is not None and not isinstance(bound, ast.Constant):
                fields = {name: getattr(part, name) for name in part._fields}
                moved = ast.parse(f"{_inner(bound)} + 1", mode="eval").body
                yield f"slice's {field} bound + 1", _changed(node, slice=ast.Slice(**{**fields, field: moved}))


def _worlds(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Call) and _called(node) == "get_world_size":
        yield "a world of two", "2"
        if node.args:
            yield "group dropped", _changed(node, args=[])
    if isinstance(node, ast.Attribute) and node.attr == "size" and isinstance(node.ctx, ast.Load):
        if isinstance(node.value, ast.Name) and len(node.value.id) <= 4:  # tp.size; x.size(0) is a call of another kind
            yield "a world of two", "2"


_RULES: tuple[Callable[[ast.AST], Iterator[Variant]], ...] = (
    _statements, _calls, _methods, _numbers, _arithmetic, _choices, _ranges, _worlds,
)  # fmt: skip
