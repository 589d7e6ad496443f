from labkit.answers import Edit, Same

WRONG = [
    Edit("max(computing, moving, launch)", "computing + moving + launch", mistake="At best all three go on at the same time: the longest counts, not the sum."),
    Edit("max(computing, moving, launch)", "max(computing, moving) + launch", mistake="The launch of this kernel goes on while the one before runs: the longest counts, not the sum."),
    Edit("max(computing, moving, launch)", "max(computing, moving)", mistake="However little it does, a kernel in a series takes as long as its launch."),
    Edit("flops / nbytes", "nbytes / flops", mistake="Arithmetic intensity is FLOP per byte."),
    Edit('"launch" if launch > max(computing, moving) else ', "", told="launch"),
    Edit("moving > computing", "moving < computing", mistake="The bound is what takes longest."),
    Edit("moving > computing", "moving >= computing", mistake="At the ridge itself arithmetic is the bound: memory is it below only."),
    Edit("launch > max(computing, moving)", "launch > moving", told="bound is wrong"),
    Edit("launch > max(computing, moving)", "launch > computing", told="bound is wrong"),
    Edit("launch > max(computing, moving)", "launch > computing + moving", told="bound is wrong"),
    Edit("max(computing, moving, launch)", "min(computing, moving)"),
]

RIGHT = [
    Edit("max(computing, moving, launch)", "max(launch, moving if moving > computing else computing)"),
]

EQUIVALENT = [Same("line 4: `>=` for `>`", "where both take as long, either is the bound")]


# %% right: by the rate that the roofline allows
def at_best(flops, nbytes, peak, bandwidth, launch):
    i = flops / nbytes
    seconds = flops / min(peak, i * bandwidth)
    bound = 'memory' if i < peak / bandwidth else 'arithmetic'
    return {'intensity': i, 'seconds': max(seconds, launch), 'bound': 'launch' if launch > seconds else bound}


# %% right: the largest of three (seconds, place, name), at the ridge arithmetic
def at_best(flops, nbytes, peak, bandwidth, launch):
    s, _, b = max((flops / peak, 2, 'arithmetic'), (nbytes / bandwidth, 1, 'memory'), (launch, 0, 'launch'))
    return dict(seconds=s, bound=b, intensity=flops / nbytes)


# %% right: one after the other
def at_best(flops, nbytes, peak, bandwidth, launch):
    out = {"intensity": flops / nbytes, "seconds": flops / peak, "bound": "arithmetic"}
    if nbytes / bandwidth > out["seconds"]:
        out |= {"seconds": nbytes / bandwidth, "bound": "memory"}
    if launch > out["seconds"]:
        out |= {"seconds": launch, "bound": "launch"}
    return out


# %% wrong: intensity over the ridge
# mistake: The intensity is the program's own, FLOP per byte; the ridge is no part of it.
def at_best(flops, nbytes, peak, bandwidth, launch):
    s, _, b = max((flops / peak, 2, 'arithmetic'), (nbytes / bandwidth, 1, 'memory'), (launch, 0, 'launch'))
    return {'intensity': (flops / nbytes) / (peak / bandwidth), 'seconds': s, 'bound': b}


# %% wrong: microseconds
# mistake: Flop over FLOP/s and bytes over bytes/s are seconds already.
def at_best(flops, nbytes, peak, bandwidth, launch):
    s, _, b = max((flops / peak, 2, 'arithmetic'), (nbytes / bandwidth, 1, 'memory'), (launch, 0, 'launch'))
    return {'intensity': flops / nbytes, 'seconds': 1e6 * s, 'bound': b}
