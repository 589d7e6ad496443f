from labkit.answers import Edit

WRONG = [
    Edit("copy.deepcopy({", "({", mistake="What is saved changes while the run trains on: a state dict holds the tensors themselves, not " "copies."),
    Edit('    run.optimizer.load_state_dict(state["optimizer"])\n', "", mistake="The optimizer begins anew: its averages and its count of steps are state too."),
    Edit('    run.scheduler.load_state_dict(state["scheduler"])\n', "", mistake="The schedule begins anew, and the rate with it."),
    Edit('    torch.set_rng_state(state["dropout"])', "    pass", mistake="Dropout draws other numbers: the place in torch's own stream of random numbers is state too."),
    Edit('    run.data.order = state["order"]\n', "", mistake="The rows of the epoch that has begun are not those drawn for it."),
    Edit('    run.data.position = state["position"]\n', "", mistake="The order of this epoch is right; how far the run had come in it is not."),
    Edit('    run.data.generator.set_state(state["generator"])\n', "", mistake="This epoch is right, and the next one is drawn from another stream."),
    Edit('    run.model.load_state_dict(state["model"])\n', "", mistake="The weights are not those that were saved."),
    Edit('"position": run.data.position,', '"position": 0,'),
    Edit("    return copy.deepcopy({", "    torch.manual_seed(0)\n    return copy.deepcopy({"),
    Edit(
        "    return copy.deepcopy({",
        "    state = torch.get_rng_state()\n    torch.manual_seed(0)\n    return copy.deepcopy({",
        ('"dropout": torch.get_rng_state()', '"dropout": state'),
        mistake="Saving has changed the run itself: rank 0, which only saves and trains on, no longer makes its " "own steps.",
    ),
    # the order is drawn again from the generator
    Edit(
        'run.data.order = state["order"]',
        "pass",
        (
            'run.data.generator.set_state(state["generator"])',
            'run.data.generator.set_state(state["generator"])\n    '
            "run.data.order = torch.randperm(len(run.data.order), generator=run.data.generator)",
        ),
    ),
    # numbers in half as many bits
    Edit(
        'run.model.load_state_dict(state["model"])',
        'run.model.load_state_dict({n: w.bfloat16().float() for n, w in state["model"].items()})',
    ),
    Edit(
        '"dropout": torch.get_rng_state(),',
        '"dropout": torch.initial_seed(),',
        ('torch.set_rng_state(state["dropout"])', 'torch.manual_seed(state["dropout"])'),
    ),
    # the learning rate is loaded, the count of steps is not
    Edit(
        'run.scheduler.load_state_dict(state["scheduler"])',
        'run.scheduler.base_lrs = state["scheduler"]["base_lrs"]',
    ),
    # the averages are loaded, the count of steps of the optimizer is not
    Edit(
        'run.optimizer.load_state_dict(state["optimizer"])',
        'run.optimizer.load_state_dict(state["optimizer"])\n    for one in run.optimizer.state.values():\n        '
        'one["step"].fill_(0)',
    ),
]

RIGHT = [
    Edit("copy.deepcopy({", 'copy.deepcopy({"unused": 1, '),
    Edit(
        '"order": run.data.order',
        '"order": run.data.order.tolist()',
        ('run.data.order = state["order"]', 'run.data.order = torch.tensor(state["order"])'),
    ),
    Edit('run.data.order = state["order"]', 'run.data.order.copy_(state["order"])'),
]


# %% right: weights and averages as lists of tensors, put into place in memory
import torch


def save_state(run):
    state = {"w": [p.detach().clone() for p in run.model.parameters()], "m": [], "v": [], "t": []}
    for p in run.model.parameters():
        one = run.optimizer.state[p]
        for key, name in (("m", "exp_avg"), ("v", "exp_avg_sq"), ("t", "step")):
            state[key].append(one[name].clone())
    state["lr"] = [group["lr"] for group in run.optimizer.param_groups]
    state["scheduler"] = run.scheduler.last_epoch, list(run.scheduler._last_lr), run.scheduler._step_count
    state["data"] = run.data.order.clone(), run.data.position, run.data.generator.get_state().clone()
    state["torch"] = torch.get_rng_state()
    return state


def load_state(run, state):
    with torch.no_grad():
        for i, p in enumerate(run.model.parameters()):
            p.copy_(state["w"][i])
            run.optimizer.state[p] = {
                "step": state["t"][i].clone(), "exp_avg": state["m"][i].clone(), "exp_avg_sq": state["v"][i].clone()
            }
    for group, lr in zip(run.optimizer.param_groups, state["lr"]):
        group["lr"] = lr
    run.scheduler.last_epoch, run.scheduler._last_lr, run.scheduler._step_count = state["scheduler"]
    run.data.order, run.data.position, generator = state["data"]
    run.data.generator.set_state(generator)
    torch.set_rng_state(state["torch"])


# %% right: lists of numbers
import copy

import torch


def save_state(run):
    return {"weights": [p.detach().tolist() for p in run.model.parameters()],
            "m": [[run.optimizer.state[p][k].tolist() for k in ("exp_avg", "exp_avg_sq")] + [int(run.optimizer.state[p]["step"])] for p in run.model.parameters()],
            "rate": run.optimizer.param_groups[0]["lr"], "scheduler": dict(run.scheduler.state_dict()),
            "order": run.data.order.tolist(), "at": int(run.data.position),
            "streams": [run.data.generator.get_state(), torch.get_rng_state()]}


def load_state(run, state):
    with torch.no_grad():
        for p, w, (m, v, n) in zip(run.model.parameters(), state["weights"], state["m"]):
            p.copy_(torch.tensor(w))
            run.optimizer.state[p] = {"step": torch.tensor(float(n)), "exp_avg": torch.tensor(m), "exp_avg_sq": torch.tensor(v)}
    for group in run.optimizer.param_groups:
        group["lr"] = state["rate"]
    run.scheduler.load_state_dict(state["scheduler"])
    run.data.order = torch.tensor(state["order"])
    run.data.position = state["at"]
    run.data.generator.set_state(state["streams"][0])
    torch.set_rng_state(state["streams"][1])


# %% right: torch.save into bytes
import copy

import torch


import io


def save_state(run):
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict(), run.data.order, run.data.position, run.data.generator.get_state(), torch.get_rng_state()], file)
    return {"bytes": torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}


def load_state(run, state):
    model, optimizer, scheduler, run.data.order, run.data.position, generator, stream = torch.load(io.BytesIO(state["bytes"].numpy().tobytes()))
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.scheduler.load_state_dict(scheduler)
    run.data.generator.set_state(generator)
    torch.set_rng_state(stream)


# %% wrong: averages without their count
# mistake: The averages are right; the optimizer's count of steps is not.
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


# %% wrong: data from its seed
# mistake: The stream of the data begins at its seed again, not at its place.
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


# %% wrong: in evaluation mode
# mistake: The model is in evaluation mode: nothing is dropped any more.
# loaded as for a test
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
    run.model.eval()
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.data.order, run.data.position = state["order"], state["position"]
    run.data.generator.set_state(state["generator"])
    torch.set_rng_state(state["rng"])


# %% wrong: kept in this process
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
