# told: row by row, too
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
