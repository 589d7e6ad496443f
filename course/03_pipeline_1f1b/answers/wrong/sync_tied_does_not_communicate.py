# told: own use only
def sync_tied(grad):
    return grad
