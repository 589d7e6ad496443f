# told: a list of words is wanted
def gpipe(rank, p, m):
    return [('F', 0)]
