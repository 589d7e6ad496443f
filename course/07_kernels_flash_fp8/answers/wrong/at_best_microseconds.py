# told: are seconds already
def at_best(flops, nbytes, peak, bandwidth):
    return {'intensity': flops / nbytes, 'seconds': 1e6 * max(flops / peak, nbytes / bandwidth), 'bound': 'memory' if flops / nbytes < peak / bandwidth else 'arithmetic'}
