# words of one string
def gpipe(rank, p, m):
    return ' '.join(k + str(i) for k in 'FB' for i in range(m)).split()
