from labkit.answers import Edit

_MANY = "many = (stop - start) // width if column == 0 else 0"
_FIRST = "The first row is held whole, and whole rows follow it: they are one box."

WRONG = [
    Edit("offset[dim] = part * size[dim]", "pass", mistake="These are places in the part. A checkpoint knows places in the whole tensor only."),
    Edit("    size = [rows", "    dim = 1 - dim\n    size = [rows", mistake="The tensor is cut along the other dim: 0 are rows, 1 are columns."),
    Edit("size[dim] //= parts", "pass", ("part * size[dim]", "0"), mistake="The numbers are counted in the part, row by row, not in the whole tensor."),
    Edit("part * size[dim]", "(parts - 1 - part) * size[dim]", mistake="That is another part: part 0 is the first."),
    Edit("b + o]", "b - a]", mistake="The second number of a range is where it stops, not how long it is."),
    Edit("b + o]", "b + o - 1]", mistake="The second number of a range is not included, as in Python."),
    Edit(
        "size = [rows, columns]\n    size[dim]", "size = [columns, rows] if dim else [rows, columns]\n    size[0]",
        ("offset[dim] = part * size[dim]", "offset[0] = part * size[0]"), ("zip(box, offset)]", "zip(box, offset)][:: 1 - 2 * dim]"),
        mistake="A part of columns is counted row by row, too.",
    ),
    Edit("while start < stop:", "while stop - start >= size[1]:", mistake="The ends are missing: a piece may begin and end in the middle of a row."),
    Edit(_MANY, "many = 0", mistake="All rows are right. Whole rows that follow each other are one box."),
    Edit(_MANY, f"{_MANY[:-7]} and found else 0", mistake=_FIRST),
    Edit("[row, row + many], [0, width]", "[row, many], [0, width]"),
    Edit("min(width, column + stop - start)", "width"),
    Edit("if column == 0 else 0", "if True else 0"),
    Edit("found.append(", "found.insert(0, "),
]

RIGHT = [
    Edit("divmod(start, width)", "start // width, start % width"),
    Edit("[a + o, b + o]", "(a + o, b + o)"),
    Edit("min(width, column + stop - start)", "column + min(width - column, stop - start)"),
]


# %% right: head, whole rows and tail
def boxes_of(
    rows: int, columns: int, dim: int, parts: int, part: int, start: int, stop: int
) -> list[list[list[int]]]:
    height, width = (rows, columns // parts) if dim == 1 else (rows // parts, columns)
    above, before = (0, width * part) if dim == 1 else (height * part, 0)
    head = min(stop, -(-start // width) * width)       # the end of a row
    tail = max(head, stop // width * width)
    found = []
    for a, b in ((start, head), (head, tail), (tail, stop)):
        if b > a:
            found.append(((above + a // width, above + (b - 1) // width + 1), (before + a % width, before + (b - 1) % width + 1)))
    return found


# %% wrong: one box around
# mistake: One box around the piece holds numbers that this rank does not have.
def boxes_of(rows, columns, dim, parts, part, start, stop):
    height, width = (rows // parts, columns) if dim == 0 else (rows, columns // parts)
    if start >= stop:
        return []
    first, last = start // width, (stop - 1) // width
    left, right = (start % width, (stop - 1) % width + 1) if first == last else (0, width)
    box = [[first, last + 1], [left, right]]
    box[dim] = [n + part * (height if dim == 0 else width) for n in box[dim]]
    return [box]
