"""The pictures of the documents: two from lab 01 as it was executed, and the packages as their imports are.

    python docs/pictures.py

Imports are read from the sources' syntax trees, those under TYPE_CHECKING left out, as `lint-imports` reads them; the
layers of the picture are those of its contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import base64
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import nbformat
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NOTEBOOK = ROOT / "solutions/01_process_groups.ipynb"
# file -> (words of the cell that drew it, which of its pictures)
PICTURES = {"rank_grid.png": ("rank_grid(sizes, yours)", 0), "overlap.png": ("beside(runs", 0)}

PARTS = ("minimegatron", "labkit", "course")
WIDTH, HEIGHT, STEP = 1.5, 0.56, 1.1  # of a box, and from one layer to the next
# Where a package stands in its layer, so that arrows have a way; others are spread evenly.
ACROSS = {
    **{"course": -2.0, "labkit": -3.8, "cli": 3.4, "commands": 3.4, "training": 3.4, "inference": 5.5, "models": 1.0},
    "watch": 4.6,
    **{"parallel": -1.0, "layers": 1.0, "optim": 2.8, "checkpoint": 6.2, "kernels": 0.0, "data": 2.0, "viz": -3.8},
    **{
        "launch": 2.6,
        "comm": 1.0,
        "config": 1.0,
        "cuda_graphs": 4.4,
        "errors": -1.0,
        "trace": 1.0,
        "moved": 3.0,
        "named": 5.0,
    },
}
MANY = 25  # so many import statements are drawn in any case
COLORS = {"course": "#f6d9b8", "labkit": "#f9e9c8"}


def from_the_lab() -> None:
    """Write the pictures of the executed notebook: what they show is what a learner sees."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    for name, (words, which) in PICTURES.items():
        [cell] = [c for c in cells if c.cell_type == "code" and words in c.source]
        drawn = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
        (DOCS / "images" / name).write_bytes(base64.b64decode(drawn[which]))
        print(f"docs/images/{name}")


# ------------------------------------------------------------------------------------------------- imports


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import statement that may run."""
    if isinstance(tree, ast.Import | ast.ImportFrom):
        yield tree
    typing = isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING")
    for node in tree.orelse if typing else ast.iter_child_nodes(tree):
        yield from statements(node)


def package(module: str, known: set[str]) -> str | None:
    """The box of a dotted name: `minimegatron.layers`, `labkit`; None for what is drawn nowhere."""
    parts = module.split(".")
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or None


def imports(layers: list[list[str]]) -> Counter[tuple[str, str]]:
    """(package, package that it imports) -> how many import statements."""
    known = {name for layer in layers for name in layer}
    found: Counter[tuple[str, str]] = Counter()
    for path in (p for part in PARTS for p in sorted((ROOT / part).rglob("*.py"))):
        own = package(".".join(path.relative_to(ROOT).with_suffix("").parts), known)
        if own is None or path.name == "lab.py" or "answers" in path.parts:
            continue  # a lab's source and learners' answers are text
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:  # `from minimegatron import errors` names a module, `from minimegatron.errors import X` is one
                modules = [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []
            boxes = {box for box in (package(module, known) for module in modules) if box not in (None, own)}
            found.update((own, box) for box in boxes)
    return found


def layers_of_the_contract() -> list[list[str]]:
    """Packages by layer, the highest first; what is not built yet is left out."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = []
    for line in contract["layers"]:
        names = [name.strip(" ()") for name in re.split("[|:]", line)]
        built = [name for name in names if any(ROOT.glob(name.replace(".", "/") + "*"))]
        if built:
            layers.append(built)
    return layers


# ----------------------------------------------------------------------------------------------- the drawing


def direct(found: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Imports that no chain of others implies, and those of many statements; all of them would hide the order."""
    below: dict[str, set[str]] = {}
    for source, target in found:
        below.setdefault(source, set()).add(target)

    def reached(name: str) -> set[str]:
        seen, left = set[str](), [name]
        while left:
            seen.add(one := left.pop())
            left += below.get(one, set()) - seen
        return seen

    return Counter(
        {
            (source, target): count
            for (source, target), count in found.items()
            if count >= MANY or not any(target in reached(other) for other in below[source] - {target})
        }
    )


def places(layers: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Package -> middle of its box."""
    found = {}
    for row, names in enumerate(layers):
        for i, name in enumerate(names):
            spread = (i - (len(names) - 1) / 2) * 2.0
            found[name] = (ACROSS.get(name.removeprefix("minimegatron."), spread), -row * STEP)
    return found


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], count: int) -> None:
    """From the importer to what it imports; thicker, the more statements there are."""
    (x0, y0), (x1, y1) = start, end
    side = 1 if x1 > x0 else -1
    bend = 0.0
    if y0 == y1:
        tail, head = (x0 + side * WIDTH / 2, y0), (x1 - side * WIDTH / 2, y1)
    else:
        tail, head = (x0, y0 - HEIGHT / 2), (x1, y1 + HEIGHT / 2)
        if abs(x1 - x0) > 3 and y0 - y1 > 3 * STEP:  # past the boxes between
            tail, head, bend = (x0, tail[1]), (x1 - side * WIDTH / 2, y1), 0.28 * side
    ax.add_patch(
        FancyArrowPatch(
            tail,
            head,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=11,
            linewidth=0.6 + 0.4 * min(count, 30) ** 0.5,
            color="#41648a",
            alpha=0.8,
            zorder=1,
        )
    )


def packages() -> None:
    """Write docs/images/packages.png: packages by layer, an arrow for each that imports another."""
    layers = layers_of_the_contract()
    where = places(layers)
    figure = Figure(figsize=(10, 0.8 * len(layers)), dpi=110)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    found = imports(layers)
    for (source, target), count in sorted(direct(found).items()):
        if target not in layers[-1]:  # nearly every package imports these
            arrow(ax, where[source], where[target], count)
    for name, (x, y) in where.items():
        box = (x - WIDTH / 2, y - HEIGHT / 2)
        color = COLORS.get(name, "#dbe7f3")
        ax.add_patch(
            FancyBboxPatch(box, WIDTH, HEIGHT, "round,pad=0.02", facecolor=color, edgecolor="#41648a", zorder=2)
        )
        ax.text(x, y, name.removeprefix("minimegatron."), ha="center", va="center", fontsize=11, zorder=3)
    bottom = -(len(layers) - 1) * STEP
    most = [name for name in layers[-1] if sum(target == name for _, target in found) > 2]
    words = f"{' and '.join(name.removeprefix('minimegatron.') for name in most)}: imported by most, arrows left out"
    ax.text(-4.9, bottom, words.replace(": ", ":\n").replace(", ", ",\n"), ha="left", va="center", fontsize=10)
    ax.set_xlim(-5.1, 7.2)
    ax.set_ylim(bottom - 0.6, 0.6)
    ax.axis("off")
    figure.savefig(DOCS / "images" / "packages.png", facecolor="white")
    print("docs/images/packages.png")


def main() -> None:
    """Write every picture into docs/images."""
    matplotlib.use("Agg")
    from_the_lab()
    packages()


if __name__ == "__main__":
    main()
