# told: KeyError
# a key into a table that only this process has
import copy

import torch

KEPT = {}


def save_state(run):
    KEPT[len(KEPT)] = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict(),
                                     run.data.order, run.data.position, run.data.generator.get_state(),
                                     torch.get_rng_state()))
    return {"key": len(KEPT) - 1}


def load_state(run, state):
    weights, moments, rate, run.data.order, run.data.position, generator, stream = KEPT[state["key"]]
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(moments)
    run.scheduler.load_state_dict(rate)
    run.data.generator.set_state(generator)
    torch.set_rng_state(stream)
