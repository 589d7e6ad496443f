# told: `backward` is no action
def gpipe(rank, p, m):
    return ['F0', 'backward']
