# the larger of two (seconds, place, name), at the ridge the later one
def at_best(flops, nbytes, peak, bandwidth):
    s, _, b = max((flops / peak, 1, 'arithmetic'), (nbytes / bandwidth, 0, 'memory'))
    return dict(seconds=s, bound=b, intensity=flops / nbytes)
