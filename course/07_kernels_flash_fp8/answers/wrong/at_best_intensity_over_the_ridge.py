# told: the ridge is no part of it
def at_best(flops, nbytes, peak, bandwidth):
    return {'intensity': (flops / nbytes) / (peak / bandwidth), 'seconds': max(flops / peak, nbytes / bandwidth), 'bound': 'memory' if flops / nbytes < peak / bandwidth else 'arithmetic'}
