from labkit.answers import Edit, Same

_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"
_SMALL = "a fraction of a byte, of billions"

WRONG = [
    Edit(
        "for stage in range(4) if held[stage] <= room), -1)",
        "for stage in range(4) if held[stage] <= room), -2) + 1",
        told="from 0",
    ),
    Edit("held[stage] <= room", "held[stage] < room", told="What just fits, fits"),
    Edit("gigabytes * 1e9", "gigabytes * 2**30", told="not 2³⁰"),
    Edit("3 * microbatches / 2", "float(microbatches)", told="you count one gather"),
    Edit("3 * microbatches / 2", "(microbatches + 2) / 2", told="that is not twice a step"),
    Edit(
        "2 * parameters / (ranks // machines)",
        "2 * parameters / machines",
        ("2 * (machines - 1) / machines", "2 * (ranks // machines - 1) / (ranks // machines)"),
        told="have changed places",
    ),
    Edit("math.ceil(12", "math.floor(12", told="round up"),
    Edit("12 * parameters / left", "16 * parameters / room", told="12 of the 16"),
    Edit("(microbatches + 1) / 2", "float(microbatches)", told="only one grows"),
    Edit("(microbatches + 1) / 2", "1.0", ("3 * microbatches / 2", "1.5"), told="one microbatch"),
    Edit("shard = 2 * parameters / (ranks // machines)", "shard = 2 * parameters", told="not the whole gradient"),
    Edit("shard = 2 *", "shard =", told="2 of 2 bytes | of 2 bytes a gradient"),
    Edit("(ranks // machines)", "ranks", told="not over all ranks | of 2 bytes"),
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
# told: not over all ranks
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
# told: is -1
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
# told: in the order of `names`
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
