# told: numbers that this rank does not have
def boxes_of(rows, columns, dim, parts, part, start, stop):
    height, width = (rows // parts, columns) if dim == 0 else (rows, columns // parts)
    if start >= stop:
        return []
    first, last = start // width, (stop - 1) // width
    left, right = (start % width, (stop - 1) % width + 1) if first == last else (0, width)
    box = [[first, last + 1], [left, right]]
    box[dim] = [n + part * (height if dim == 0 else width) for n in box[dim]]
    return [box]
