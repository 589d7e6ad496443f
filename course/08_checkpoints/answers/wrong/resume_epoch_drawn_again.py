# told: rows of the epoch
# only the generator and the position are kept; the order of the epoch cannot be drawn again from it
import copy

import torch


def save_state(run):
    return copy.deepcopy({"m": run.model.state_dict(), "o": run.optimizer.state_dict(), "s": run.scheduler.state_dict(),
                          "p": run.data.position, "g": run.data.generator.get_state(), "r": torch.get_rng_state()})


def load_state(run, state):
    run.model.load_state_dict(state["m"])
    run.optimizer.load_state_dict(state["o"])
    run.scheduler.load_state_dict(state["s"])
    run.data.position = state["p"]
    run.data.generator.set_state(state["g"])
    torch.set_rng_state(state["r"])
