# told: they are one box
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
