# told: Somebody must divide
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum()
