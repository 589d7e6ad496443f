from labkit.answers import Edit

WRONG = [
    Edit("offset[dim] = part * size[dim]", "pass", mistake="These are places in the part. A checkpoint knows places in the whole tensor only."),
    Edit("many = (stop - start) // width if column == 0 else 0", "many = 0", mistake="All rows are right. Whole rows that follow each other are one box."),
    Edit("[row, row + many], [0, width]", "[row, many], [0, width]"),
    Edit("size[dim] //= parts", "pass", ("part * size[dim]", "0"), mistake="The numbers are counted in the part, row by row, not in the whole tensor."),
    Edit(
        "found.append([[a + o, b + o]",
        "found.append([[a + o, b - a]",
        mistake="The second number of a range is where it stops, not how long it is.",
    ),
    Edit("part * size[dim]", "(parts - 1 - part) * size[dim]", mistake="That is another part: part 0 is the first."),
    Edit("found.append(", "found.insert(0, ", mistake="The boxes stand in the order of the numbers."),
    Edit("min(width, column + stop - start)", "width"),
    Edit("if column == 0 else 0", "if True else 0"),
    Edit("while start < stop:", "while start <= stop:"),
    Edit("while start < stop:", "while stop - start >= size[1]:", mistake="The ends are missing: a piece may begin and end in the middle of a row."),
    Edit("size = [rows, columns]", "dim = 1 - dim\n    size = [rows, columns]"),
    Edit("many = (stop - start) // width if", "many = min(1, (stop - start) // width) if", mistake="All rows are right. Whole rows that follow each other are one box."),
]

RIGHT = [
    Edit("divmod(start, width)", "start // width, start % width"),
    Edit("[a + o, b + o]", "(a + o, b + o)"),
    Edit("    if many:", "    if many != 0:"),
    Edit("min(width, column + stop - start)", "column + min(width - column, stop - start)"),
]


# %% right: element by element: numbers of one row become a box, full rows grow
def boxes_of(rows, columns, dim, parts, part, start, stop):
    height, width = (rows // parts, columns) if dim == 0 else (rows, columns // parts)
    down, right = (part * height, 0) if dim == 0 else (0, part * width)
    found = []
    for number in range(start, stop):
        row, column = number // width, number % width
        if found and found[-1][0] == [row, row + 1] and found[-1][1][1] == column:
            found[-1][1][1] += 1
        else:
            found.append([[row, row + 1], [column, column + 1]])
    joined = []
    for box in found:
        full = box[1] == [0, width]
        if full and joined and joined[-1][1] == [0, width]:
            joined[-1][0][1] += 1
        else:
            joined.append(box)
    return [[[a + down, b + down], [c + right, d + right]] for (a, b), (c, d) in joined]


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


# %% wrong: down the columns
# mistake: A part of columns is counted row by row, too.
# a part of columns is counted down its columns
def boxes_of(
    rows: int, columns: int, dim: int, parts: int, part: int, start: int, stop: int
) -> list[list[list[int]]]:
    # a part by columns is counted column by column
    import itertools
    r0, c0, h, w = (0, columns // parts * part, rows, columns // parts) if dim else (rows // parts * part, 0, rows // parts, columns)
    out = []
    if dim == 0:
        while start < stop:
            row, column = divmod(start, w)
            if column == 0 and stop - start >= w:
                n = (stop - start) // w
                out.append([[r0 + row, r0 + row + n], [c0, c0 + w]]); start += n * w
            else:
                end = min(stop, (row + 1) * w)
                out.append([[r0 + row, r0 + row + 1], [c0 + column, c0 + column + end - start]]); start = end
        return out
    while start < stop:
        column, row = divmod(start, h)
        if row == 0 and stop - start >= h:
            n = (stop - start) // h
            out.append([[0, h], [c0 + column, c0 + column + n]]); start += n * h
        else:
            end = min(stop, (column + 1) * h)
            out.append([[row, row + end - start], [c0 + column, c0 + column + 1]]); start = end
    return out


# %% wrong: ends included
# mistake: The last row and the last column of a range are not included, as in Python.
# the last row and column are included
def boxes_of(
    rows: int, columns: int, dim: int, parts: int, part: int, start: int, stop: int
) -> list[list[list[int]]]:
    r0, c0, w = (0, columns // parts * part, columns // parts) if dim else (rows // parts * part, 0, columns)
    found = []
    while start < stop:
        row, column = divmod(start, w)
        if column == 0 and stop - start >= w:
            n = (stop - start) // w
            found.append([[r0 + row, r0 + row + n - 1], [c0, c0 + w - 1]])
            start += n * w
        else:
            end = min(stop, (row + 1) * w)
            found.append([[r0 + row, r0 + row], [c0 + column, c0 + column + end - start - 1]])
            start = end
    return found


# %% wrong: first row alone
# mistake: The first row is held whole, and whole rows follow it: they are one box.
# three boxes, even where the first row is whole
def boxes_of(
    rows: int, columns: int, dim: int, parts: int, part: int, start: int, stop: int
) -> list[list[list[int]]]:
    r0, c0, w = (0, columns // parts * part, columns // parts) if dim else (rows // parts * part, 0, columns)
    if start == stop:
        return []
    (a, ac), (b, bc) = divmod(start, w), divmod(stop, w)
    if a == b:
        return [[[r0 + a, r0 + a + 1], [c0 + ac, c0 + bc]]]
    found = [[[r0 + a, r0 + a + 1], [c0 + ac, c0 + w]]]
    if b > a + 1:
        found.append([[r0 + a + 1, r0 + b], [c0, c0 + w]])
    if bc:
        found.append([[r0 + b, r0 + b + 1], [c0, c0 + bc]])
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
