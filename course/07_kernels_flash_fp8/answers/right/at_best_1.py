# by the rate that the roofline allows
def at_best(flops, nbytes, peak, bandwidth):
    i = flops / nbytes
    rate = min(peak, i * bandwidth)
    return {'intensity': i, 'seconds': flops / rate, 'bound': 'memory' if i < peak / bandwidth else 'arithmetic'}
