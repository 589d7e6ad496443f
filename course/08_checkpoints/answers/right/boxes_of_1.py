# element by element: numbers of one row become a box, full rows grow
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
