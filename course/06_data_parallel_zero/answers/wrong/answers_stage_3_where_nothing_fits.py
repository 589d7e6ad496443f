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
