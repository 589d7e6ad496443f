# told: count of steps is not
# the averages are copied, the count of steps is not
import copy

import torch


def save_state(run) -> dict:
    return copy.deepcopy({
        "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict(),
        "order": run.data.order, "position": run.data.position, "generator": run.data.generator.get_state(),
        "rng": torch.get_rng_state(),
    })


def load_state(run, state: dict) -> None:
    run.model.load_state_dict(state["model"])
    for number, p in enumerate(run.model.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            run.optimizer.state[p][key] = state["optimizer"]["state"][number][key]
    run.scheduler.load_state_dict(state["scheduler"])
    run.data.order, run.data.position = state["order"], state["position"]
    run.data.generator.set_state(state["generator"])
    torch.set_rng_state(state["rng"])
