# told: not included
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
