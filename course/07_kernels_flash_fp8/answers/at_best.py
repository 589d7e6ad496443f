from labkit.answers import Edit, Same

WRONG = [
    Edit("max(computing, moving)", "computing + moving", told="not the sum"),
    Edit("flops / nbytes", "nbytes / flops", told="FLOP per byte"),
    Edit("moving > computing", "moving < computing", told="what takes longer"),
    Edit("moving > computing", "moving >= computing", told="At the ridge itself"),
    Edit("max(computing, moving)", "min(computing, moving)", told="Both must be done"),
]

RIGHT = [
    Edit("max(computing, moving)", "moving if moving > computing else computing"),
]

EQUIVALENT = [
    Same("line 4: `>=` for `>`", "on the ridge both take equally long, and either is the bound"),
]


# %% right: by the rate that the roofline allows
def at_best(flops, nbytes, peak, bandwidth):
    i = flops / nbytes
    rate = min(peak, i * bandwidth)
    return {'intensity': i, 'seconds': flops / rate, 'bound': 'memory' if i < peak / bandwidth else 'arithmetic'}


# %% right: the larger of two (seconds, place, name), at the ridge the later one
def at_best(flops, nbytes, peak, bandwidth):
    s, _, b = max((flops / peak, 1, 'arithmetic'), (nbytes / bandwidth, 0, 'memory'))
    return dict(seconds=s, bound=b, intensity=flops / nbytes)


# %% wrong: intensity over the ridge
# told: the ridge is no part of it
def at_best(flops, nbytes, peak, bandwidth):
    return {'intensity': (flops / nbytes) / (peak / bandwidth), 'seconds': max(flops / peak, nbytes / bandwidth), 'bound': 'memory' if flops / nbytes < peak / bandwidth else 'arithmetic'}


# %% wrong: larger name at the ridge
# told: At the ridge itself
def at_best(flops, nbytes, peak, bandwidth):
    s, b = max((flops / peak, 'arithmetic'), (nbytes / bandwidth, 'memory'))
    return dict(seconds=s, bound=b, intensity=flops / nbytes)


# %% wrong: microseconds
# told: are seconds already
def at_best(flops, nbytes, peak, bandwidth):
    return {'intensity': flops / nbytes, 'seconds': 1e6 * max(flops / peak, nbytes / bandwidth), 'bound': 'memory' if flops / nbytes < peak / bandwidth else 'arithmetic'}
