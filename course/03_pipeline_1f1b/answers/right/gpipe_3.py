# a tuple, and every word names chunk 0
def gpipe(rank, p, m):
    todo = ()
    for i in range(2 * m):
        todo += ('FB'[i // m] + str(i % m) + '.0',)
    return todo
