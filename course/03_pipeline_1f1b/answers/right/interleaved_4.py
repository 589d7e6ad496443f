# counting what is under way
def interleaved(rank, p, m, v):
    table = [(i + j, c) for i in range(0, m, p) for c in range(v) for j in range(p)]
    room, f, b, words = 2 * (p - rank - 1) + (v - 1) * p + 1, 0, 0, ""
    while b < len(table):
        if f < len(table) and f - b < room:
            words += "F{}.{} ".format(*table[f])
            f += 1
        else:
            i, c = table[b]
            words += f"B{i}.{v - 1 - c} "
            b += 1
    return words.split()
