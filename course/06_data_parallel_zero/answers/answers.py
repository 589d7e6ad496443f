from labkit.answers import Edit, Same

_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"
_SMALL = "a fraction of a byte, of billions"

WRONG = [
    Edit(
        "for stage in range(4) if held[stage] <= room), -1)",
        "for stage in range(4) if held[stage] <= room), -2) + 1",
        mistake="`stage` is a number from 0, of the paper's counting.",
    ),
    Edit("held[stage] <= room", "held[stage] < room", mistake="What just fits, fits: a rank that holds exactly `gigabytes` · 10⁹ bytes is full, and works."),
    Edit("gigabytes * 1e9", "gigabytes * 2**30", mistake="A gigabyte is 10⁹ bytes, not 2³⁰."),
    Edit("3 * microbatches / 2", "float(microbatches)", mistake="In stage 3 each microbatch gathers every weight twice, for forward and for backward; you count " "one gather."),
    Edit("3 * microbatches / 2", "(microbatches + 2) / 2", mistake="In stage 3 each microbatch gathers the weights twice; that is not twice a step."),
    Edit(
        "2 * parameters / (ranks // machines)",
        "2 * parameters / machines",
        ("2 * (machines - 1) / machines", "2 * (ranks // machines - 1) / (ranks // machines)"),
        mistake="Two sizes have changed places: the gradient is cut over the ranks of one machine, and the ring " "goes over the machines.",
    ),
    Edit("math.ceil(12", "math.floor(12", mistake="A rank too few is too few: round up."),
    Edit("12 * parameters / left", "16 * parameters / room", mistake="Stage 1 shares out 12 of the 16 bytes. The other 4 are on every rank."),
    Edit("(microbatches + 1) / 2", "float(microbatches)", mistake="Stage 2 reduces gradients m times, and gathers weights once: of the two halves only one grows."),
    Edit("(microbatches + 1) / 2", "1.0", ("3 * microbatches / 2", "1.5"), mistake="That is one microbatch. With m of them stages 2 and 3 talk in each."),
    Edit("shard = 2 * parameters / (ranks // machines)", "shard = 2 * parameters", mistake="A rank sums its own shard with the same shard of other machines, not the whole gradient."),
    Edit("shard = 2 *", "shard =", mistake="An all-reduce sends two times (R-1)/R of 2 bytes a gradient."),
    Edit("(ranks // machines)", "ranks", mistake="An all-reduce sends two times (R-1)/R of 2 bytes a gradient."),
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


# %% wrong: cut over all ranks
# mistake: The gradient is cut over the ranks of one machine, not over all ranks.
import math


def answers(
    parameters: float, ranks: int, microbatches: int, gigabytes: float, machines: int, names: list[str]
) -> dict[str, object]:
    """{"stage": ..., "ranks_for_stage_1": ..., "stage_2_over_stage_1": ..., ...}; `ranks` in all `machines` together."""
    room = gigabytes * 1e9
    held = [16 * parameters, 4 * parameters + 12 * parameters / ranks, 2 * parameters + 14 * parameters / ranks, 16 * parameters / ranks]
    left = room - 4 * parameters
    stage_of = {
        "torch DistributedDataParallel": 0, "FSDP1 NO_SHARD": 0,
        "Megatron --use-distributed-optimizer": 1, "Megatron optim": 1, "torch ZeroRedundancyOptimizer": 1,
        "Megatron optim_grads": 2, "FSDP1 SHARD_GRAD_OP": 2,
        "Megatron optim_grads_params": 3, "FSDP1 FULL_SHARD": 3, "FSDP2 fully_shard": 3,
    }
    return {
        "stage": next((s for s, h in enumerate(held) if h <= room), -1),
        "ranks_for_stage_1": math.ceil(12 * parameters / left) if left > 0 else 0,
        "stage_2_over_stage_1": (microbatches + 1) / 2,
        "stage_3_over_stage_1": 3 * microbatches / 2,
        "between_machines": 2 * (machines - 1) / machines * 2 * parameters / ranks,
        "stages": [stage_of[name] for name in names],
    }


# %% wrong: stage 3 where nothing fits
# mistake: Where no stage fits `stage` is -1.
import math


def answers(
    parameters: float, ranks: int, microbatches: int, gigabytes: float, machines: int, names: list[str]
) -> dict[str, object]:
    """{"stage": ..., "ranks_for_stage_1": ..., "stage_2_over_stage_1": ..., ...}; `ranks` in all `machines` together."""
    room = gigabytes * 1e9
    held = [16 * parameters, 4 * parameters + 12 * parameters / ranks, 2 * parameters + 14 * parameters / ranks, 16 * parameters / ranks]
    left = room - 4 * parameters
    stage_of = {
        "torch DistributedDataParallel": 0, "FSDP1 NO_SHARD": 0,
        "Megatron --use-distributed-optimizer": 1, "Megatron optim": 1, "torch ZeroRedundancyOptimizer": 1,
        "Megatron optim_grads": 2, "FSDP1 SHARD_GRAD_OP": 2,
        "Megatron optim_grads_params": 3, "FSDP1 FULL_SHARD": 3, "FSDP2 fully_shard": 3,
    }
    return {
        "stage": next((s for s, h in enumerate(held) if h <= room), 3),
        "ranks_for_stage_1": math.ceil(12 * parameters / left) if left > 0 else 0,
        "stage_2_over_stage_1": (microbatches + 1) / 2,
        "stage_3_over_stage_1": 3 * microbatches / 2,
        "between_machines": 2 * (machines - 1) / machines * 2 * parameters / (ranks / machines),
        "stages": [stage_of[name] for name in names],
    }


# %% wrong: stages by name
# mistake: `stages` is a list, in the order of `names`.
import math


def answers(
    parameters: float, ranks: int, microbatches: int, gigabytes: float, machines: int, names: list[str]
) -> dict[str, object]:
    """{"stage": ..., "ranks_for_stage_1": ..., "stage_2_over_stage_1": ..., ...}; `ranks` in all `machines` together."""
    room = gigabytes * 1e9
    held = [16 * parameters, 4 * parameters + 12 * parameters / ranks, 2 * parameters + 14 * parameters / ranks, 16 * parameters / ranks]
    left = room - 4 * parameters
    stage_of = {
        "torch DistributedDataParallel": 0, "FSDP1 NO_SHARD": 0,
        "Megatron --use-distributed-optimizer": 1, "Megatron optim": 1, "torch ZeroRedundancyOptimizer": 1,
        "Megatron optim_grads": 2, "FSDP1 SHARD_GRAD_OP": 2,
        "Megatron optim_grads_params": 3, "FSDP1 FULL_SHARD": 3, "FSDP2 fully_shard": 3,
    }
    return {
        "stage": next((s for s, h in enumerate(held) if h <= room), -1),
        "ranks_for_stage_1": math.ceil(12 * parameters / left) if left > 0 else 0,
        "stage_2_over_stage_1": (microbatches + 1) / 2,
        "stage_3_over_stage_1": 3 * microbatches / 2,
        "between_machines": 2 * (machines - 1) / machines * 2 * parameters / (ranks / machines),
        "stages": {name: stage_of[name] for name in names},
    }
