# told: nothing divides it
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum()
