"""Reference pages from the sources: a page for each module, with its lecture, its public names and their signatures.

Nothing is imported: `ast` reads the files, so a machine without torch builds the same pages. Docstrings are Markdown,
as they are written; Google's sections (`Args:`, `Raises:`, ...) become lists. Public is what has no underscore in
front.

| in a source                                  | on its page                                                       |
|----------------------------------------------|-------------------------------------------------------------------|
| the module's docstring                       | the lecture, below the title                                      |
| a function, a class, a method, a property    | a signature that the search finds, with a link to the source      |
| a field of a class, its default, its comment | an attribute; of a field of `config`, the help of its flag        |
| a constant that a comment explains           | its value, if it is short, and the comment                        |
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("minimegatron", "labkit")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_CODE = re.compile(r"(`+[^`]*`+)")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ENTRY = re.compile(r"    ([*\w][^:]*): (.*)")
HEAD = "---\nmyst:\n  enable_extensions: []\n---\n\n"  # a `$` in a docstring is no formula


@dataclass(frozen=True)
class Module:
    """A module, read.

    Attributes:
        path: below the repository's root.
        text: of the whole file.
    """

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def name(self) -> str:
        """As it is imported: `minimegatron.comm.mesh`."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def shown(self) -> str:
        """As documents name it: `comm/mesh`, `labkit/magics`."""
        return self.name.replace(".", "/").removeprefix("minimegatron/")

    @property
    def page(self) -> str:
        """The page, below the source folder of the site."""
        return f"api/{self.name.replace('.', '/')}{'/index' if self.is_package else ''}.md"

    @cached_property
    def lecture(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def sentence(self) -> str:
        """The first line of the docstring: what the module is for."""
        return " ".join(self.lecture.split("\n\n")[0].split())

    @cached_property
    def public(self) -> list[Function | ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, Function | ast.ClassDef) and _is_public(node)]


def modules(root: Path) -> list[Module]:
    """Every module of the packages, in the order of their names."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return [Module(path.relative_to(root), path.read_text()) for path in paths if path.name != "__main__.py"]


def pages(found: list[Module]) -> dict[str, str]:
    """Page -> text, of every module."""
    return {module.page: _page(module, _children(module, found)) for module in found}


def _children(package: Module, found: list[Module]) -> list[Module]:
    """The modules and packages right inside a package; none of a module."""
    return [m for m in found if package.is_package and m.name.rpartition(".")[0] == package.name]


def _page(module: Module, children: list[Module]) -> str:
    """The page of a module: title, lecture, names; of a package also the table and the tree of what is inside."""
    file = f"`{module.path}`"
    if module.public:  # Sphinx shows the source of names
        up = "../" * module.page.count("/")
        file = f'<a href="{up}_modules/{module.name.replace(".", "/")}.html"><code>{module.path}</code></a>'
    parts = [f"# {module.shown}", f"```{{py:module}} {module.name}\n```", file, markdown(module.lecture)]
    if children:
        parts.append("## What is inside")
        here = module.page.rpartition("/")[0]
        links = [(child, child.page.removeprefix(f"{here}/")) for child in children]
        parts.append("\n".join(f"- [{m.shown}]({link}): {escaped(m.sentence)}" for m, link in links))
        tree = "\n".join(link.removesuffix(".md") for _, link in links)
        parts.append(f"```{{toctree}}\n:hidden:\n\n{tree}\n```")
    names = [_class(n, module) if isinstance(n, ast.ClassDef) else _function(n) for n in module.public]
    if names := [*names, *_constants(module)]:
        parts += ["## Names", *names]
    return HEAD + "\n\n".join(filter(None, parts)) + "\n"


# ---------------------------------------------------------------------------------------------- names


def _is_public(node: Function | ast.ClassDef) -> bool:
    """Not private, and not one of several forms of the same name."""
    again = {"overload", "setter", "deleter", "register"} & {_last(d) for d in node.decorator_list}
    return not (node.name.startswith("_") or again)


def _last(node: ast.expr) -> str:
    """`setter` of `@size.setter`, `dataclass` of `@dataclasses.dataclass(frozen=True)`."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _directive(kind: str, signature: str, body: Iterable[str], options: Iterable[str] = (), ticks: int = 3) -> str:
    fence = "`" * ticks
    head = "\n".join([f"{fence}{{py:{kind}}} {signature}", *options])
    return f"{head}\n\n" + "\n\n".join(filter(None, body)) + f"\n{fence}"


def _function(node: Function, owner: ast.ClassDef | None = None) -> str:
    """A function; of a class a method, or a property."""
    decorators = {_last(d) for d in node.decorator_list}
    doc = markdown(ast.get_docstring(node) or "")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if owner and decorators & {"property", "cached_property"}:
        return _directive("property", node.name, [doc], [f":type: {returns[4:]}"] if returns else [])
    options = [f":{kind}:" for kind in ("classmethod", "staticmethod", "abstractmethod") if kind in decorators]
    if isinstance(node, ast.AsyncFunctionDef):
        options.append(":async:")
    bound = bool(owner) and "staticmethod" not in decorators
    signature = f"{node.name}({_arguments(node.args, bound)}){returns}"
    return _directive("method" if owner else "function", signature, [doc], options)


def _arguments(arguments: ast.arguments, bound: bool) -> str:
    """As written, without `self` or `cls`."""
    text = ast.unparse(arguments)
    return re.sub(r"^\w+(, /)?(, |$)", "", text) if bound else text


def _class(node: ast.ClassDef, module: Module) -> str:
    """A class: its constructor's arguments or its fields, its docstring, its public methods."""
    init = [n for n in node.body if isinstance(n, Function) and n.name == "__init__"]
    arguments = f"({_arguments(init[0].args, True)})" if init else ""
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
    doc = ast.get_docstring(node) or ""
    body = [f"Bases: {bases}" if bases else "", markdown(doc)]
    if init and (said := ast.get_docstring(init[0])):
        body.append(markdown(said))
    told = set(re.findall(r"^    (\w+): ", doc.partition("Attributes:\n")[2], re.M))
    body += _fields(node, module, told)
    body += [_function(n, node) for n in node.body if isinstance(n, Function) and _is_public(n)]
    return _directive("class", node.name + arguments, body, ticks=4)


def _fields(node: ast.ClassDef, module: Module, told: set[str]) -> Iterator[str]:
    """The annotated fields of a class that its docstring does not tell about."""
    lines = module.text.splitlines()
    for field in node.body:
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if field.target.id.startswith("_") or field.target.id in told:
            continue
        value, said = field.value, lines[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
        if isinstance(value, ast.Call) and _last(value) == "opt":  # config/fields: kind, default, help
            _, value, *more = value.args
            said = str(more[0].value).replace("*", "\\*") if more and isinstance(more[0], ast.Constant) else said
        options = [f":type: {ast.unparse(field.annotation)}"]
        options += [f":value: {ast.unparse(value)}"] if value is not None else []
        yield _directive("attribute", field.target.id, [escaped(said)], options)


def _constants(module: Module) -> Iterator[str]:
    """The constants of a module that a comment explains, above or behind."""
    lines = module.text.splitlines()
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z_0-9]+", target.id)):
            continue
        first = node.lineno - 1
        while first and lines[first - 1].startswith("# ") and "---" not in lines[first - 1]:
            first -= 1
        above = " ".join(line.removeprefix("# ") for line in lines[first : node.lineno - 1])
        said = above or lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
        if said and not said.startswith(("fmt:", "noqa", "type:")):
            value = ast.unparse(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else ""
            yield _directive("data", target.id, [escaped(said)], [f":value: {value}"] if 0 < len(value) <= 80 else [])


# ------------------------------------------------------------------------------------------- docstrings


def markdown(doc: str) -> str:
    """A docstring as Markdown: Google's sections as lists, stars between factors escaped, `::` as a colon."""
    lines, out = doc.splitlines(), list[str]()
    i = 0
    while i < len(lines):
        if not (section := _SECTION.fullmatch(lines[i])):
            out.append(lines[i] if lines[i].startswith("    ") else _prose(lines[i]))
            i += 1
            continue
        i += 1
        entries = list[str]()
        while i < len(lines) and (lines[i].startswith("    ") or not lines[i].strip()):
            if lines[i].strip():
                _add(entries, lines[i], section[1] not in ("Returns", "Yields"))
            i += 1
        out += ["", f"**{section[1]}**", "", *entries, ""]
    return "\n".join(out).strip("\n")


def _add(entries: list[str], line: str, named: bool) -> None:
    """A line of a section: a new entry, or more of the last one."""
    entry = _ENTRY.fullmatch(line) if named else None
    if entry:
        entries.append(f"- `{entry[1]}`: {escaped(entry[2])}")
    elif entries:
        entries[-1] += f" {escaped(line.strip())}"
    else:
        entries.append(escaped(line.strip()))


def _prose(line: str) -> str:
    line = line[:-1] if line.endswith("::") else line
    if line.startswith("|"):  # a bar in code does not end a cell
        line = _CODE.sub(lambda code: code[0].replace("|", "\\|"), line)
    return escaped(line)


def escaped(text: str) -> str:
    """Stars that multiply, and angle brackets, as themselves; code between backticks as it is."""
    parts = _CODE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<=[\w)\]])\*(?=[\w(\[])", r"\*", parts[i]).replace("<", "\\<")
    return "".join(parts)
