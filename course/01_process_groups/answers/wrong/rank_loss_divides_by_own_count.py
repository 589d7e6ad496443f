# told: this rank's own count
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum() / mask.sum()
