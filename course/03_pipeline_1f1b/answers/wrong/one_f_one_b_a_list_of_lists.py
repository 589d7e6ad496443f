# told: a list of words is wanted
def one_f_one_b(rank, p, m):
    return [["F0", "B0"]] * m
