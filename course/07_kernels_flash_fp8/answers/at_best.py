from labkit.answers import Edit, Same

WRONG = [
    Edit("max(computing, moving)", "computing + moving", mistake="At best both go on at the same time: the longer one counts, not the sum."),
    Edit("flops / nbytes", "nbytes / flops", mistake="Arithmetic intensity is FLOP per byte."),
    Edit("moving > computing", "moving < computing", mistake="The bound is what takes longer."),
    Edit("moving > computing", "moving >= computing", mistake="At the ridge itself arithmetic is the bound: memory is it below only."),
    Edit("max(computing, moving)", "min(computing, moving)", mistake="Both must be done: the longer one counts."),
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
# mistake: The intensity is the program's own, FLOP per byte; the ridge is no part of it.
def at_best(flops, nbytes, peak, bandwidth):
    return {'intensity': (flops / nbytes) / (peak / bandwidth), 'seconds': max(flops / peak, nbytes / bandwidth), 'bound': 'memory' if flops / nbytes < peak / bandwidth else 'arithmetic'}


# %% wrong: microseconds
# mistake: Flop over FLOP/s and bytes over bytes/s are seconds already.
def at_best(flops, nbytes, peak, bandwidth):
    return {'intensity': flops / nbytes, 'seconds': 1e6 * max(flops / peak, nbytes / bandwidth), 'bound': 'memory' if flops / nbytes < peak / bandwidth else 'arithmetic'}
