from labkit.answers import Edit, Same

_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"
_SMALL = "a fraction of a byte, of billions"
_FITS = "held[stage] <= room), -1)"

WRONG = [
    Edit(_FITS, "held[stage] < room), -1)", mistake="What just fits, fits: a rank that holds exactly `gigabytes` · 10⁹ bytes is full, and works."),
    Edit(_FITS, "held[stage] <= room), -2) + 1", mistake="`stage` is a number from 0, of the paper's counting."),
    Edit(_FITS, "held[stage] <= room), 3)", mistake="Where no stage fits `stage` is -1."),
    Edit("gigabytes * 1e9", "gigabytes * 2**30", mistake="A gigabyte is 10⁹ bytes, not 2³⁰."),
    Edit("12 * parameters / left", "16 * parameters / room", mistake="Stage 1 shares out 12 of the 16 bytes. The other 4 are on every rank."),
    Edit("math.ceil(12", "math.floor(12", mistake="A rank too few is too few: round up."),
    Edit("(microbatches + 1) / 2", "1.0", ("3 * microbatches / 2", "1.5"), mistake="That is one microbatch. With m of them stages 2 and 3 talk in each."),
    Edit("(microbatches + 1) / 2", "float(microbatches)", mistake="Stage 2 reduces gradients m times, and gathers weights once: of the two halves only one grows."),
    Edit("3 * microbatches / 2", "float(microbatches)", mistake="In stage 3 each microbatch gathers every weight twice, for forward and for backward; you count one gather."),
    Edit("3 * microbatches / 2", "(microbatches + 2) / 2", mistake="In stage 3 each microbatch gathers the weights twice; that is not twice a step."),
    Edit(" / (ranks // machines)", "", mistake="A rank sums its own shard with the same shard of other machines, not the whole gradient."),
    Edit("(ranks // machines)", "ranks", mistake="The gradient is cut over the ranks of one machine, not over all ranks."),
    Edit(
        "(ranks // machines)", "machines", ("(machines - 1) / machines", "(ranks // machines - 1) / (ranks // machines)"),
        mistake="Two sizes have changed places: the gradient is cut over the ranks of one machine, and the ring goes over the machines.",
    ),
    Edit("shard = 2 *", "shard =", mistake="An all-reduce sends two times (R-1)/R of 2 bytes a gradient."),
    Edit("if left > 0 else 0", "if left > 0 else -1"),
    Edit("3 * microbatches / 2", "1.5 * (microbatches + 1)"),
    Edit('("optim_grads", "SHARD_GRAD_OP")', '("optim_grads",)', ('"FULL_SHARD",', '"FULL_SHARD", "SHARD_GRAD_OP",')),
]

RIGHT = [
    Edit("(microbatches + 1) / 2", "0.5 + microbatches / 2"),
    Edit("math.ceil(12 * parameters / left)", "-int(-12 * parameters // left)"),
    Edit("2 * (machines - 1) / machines * shard", "2 * (shard - shard / machines)"),
]

EQUIVALENT = [
    Same("line 11: `//` for `/`", _SMALL),
    Same("line 11: `/` for `//`", _WHOLE),
    Same("line 11: rounded up for down", _WHOLE),
    Same("line 21: 1 for 0 (2)", _SMALL),
]
