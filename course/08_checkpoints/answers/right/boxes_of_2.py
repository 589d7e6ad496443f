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
