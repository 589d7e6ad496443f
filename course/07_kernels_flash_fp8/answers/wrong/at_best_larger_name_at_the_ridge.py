# told: At the ridge itself
def at_best(flops, nbytes, peak, bandwidth):
    s, b = max((flops / peak, 'arithmetic'), (nbytes / bandwidth, 'memory'))
    return dict(seconds=s, bound=b, intensity=flops / nbytes)
