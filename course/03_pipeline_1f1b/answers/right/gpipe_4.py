# a generator
def gpipe(rank, p, m):
    for kind in "FB":
        for i in range(m):
            yield f"{kind}{i}"
