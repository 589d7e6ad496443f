from labkit.answers import Edit

_ORDER = '    run.data.order = state["order"]\n'
_POSITION = '    run.data.position = state["position"]\n'
_GENERATOR = '    run.data.generator.set_state(state["generator"])\n'
_DROPOUT = '    torch.set_rng_state(state["dropout"])\n'
_RATE = '    run.scheduler.load_state_dict(state["scheduler"])\n'
_MOMENTS = '    run.optimizer.load_state_dict(state["optimizer"])\n'
_DATA = (_ORDER, ""), (_POSITION, ""), (_GENERATOR, "")

WRONG = [
    Edit("copy.deepcopy({", "({", mistake="What is saved changes while the run trains on: a state dict holds the tensors themselves, not copies."),
    Edit('    run.model.load_state_dict(state["model"])\n', "", mistake="The weights are not those that were saved."),
    Edit(_MOMENTS, "", mistake="The optimizer begins anew: its averages and its count of steps are state too."),
    Edit(
        _MOMENTS,
        "    for number, p in enumerate(run.model.parameters()):\n        for key in ('exp_avg', 'exp_avg_sq'):\n"
        "            run.optimizer.state[p][key] = state['optimizer']['state'][number][key]\n",
        mistake="The averages are right; the optimizer's count of steps is not.",
    ),
    Edit(_RATE, "", (_DROPOUT, ""), *_DATA, mistake="Weights and averages are right; what else changes in a step?"),
    Edit(_DROPOUT, "", *_DATA, mistake="Weights, averages and rate are right; random numbers and samples are not."),
    Edit(_RATE, "", mistake="The schedule begins anew, and the rate with it."),
    Edit(_DROPOUT, "", mistake="Dropout draws other numbers: the place in torch's own stream of random numbers is state too."),
    Edit(
        "torch.get_rng_state()", "torch.initial_seed()", ("torch.set_rng_state", "torch.manual_seed"),
        mistake="The stream of dropout begins at its seed again, not at its place.",
    ),
    Edit(*_DATA[0], *_DATA[1:], mistake="The run goes on with other samples."),
    Edit(_ORDER, "", mistake="The rows of the epoch that has begun are not those drawn for it."),
    Edit(_POSITION, "", mistake="The order of this epoch is right; how far the run had come in it is not."),
    Edit(_GENERATOR, "", mistake="This epoch is right, and the next one is drawn from another stream."),
    Edit(
        "run.data.generator.get_state()", "run.data.generator.initial_seed()", ("generator.set_state(", "generator.manual_seed("),
        mistake="The stream of the data begins at its seed again, not at its place.",
    ),
    Edit('"position": run.data.position,', '"position": 0,'),
    # saving changes the run itself
    Edit("    return copy.deepcopy({", "    torch.manual_seed(0)\n    return copy.deepcopy({"),
    # loaded as for a test
    Edit(_MOMENTS, f"    run.model.eval()\n{_MOMENTS}"),
    # the order is drawn again from the generator
    Edit(_ORDER, "", (_GENERATOR, f"{_GENERATOR}    run.data.order = torch.randperm(len(run.data.order), generator=run.data.generator)\n")),
    # numbers in half as many bits
    Edit('dict(state["model"])', 'dict({n: w.bfloat16().float() for n, w in state["model"].items()})'),
    # a key into a table that only this process has
    Edit(
        "    return copy.deepcopy({", "    kept[1] = copy.deepcopy({", ("    })\n", '    })\n    return {"key": 1}\n'),
        ("import torch\n", "import torch\n\nkept = {}\n"), ("    run.model.load", '    state = kept[state["key"]]\n    run.model.load'),
        told="KeyError",
    ),
]

RIGHT = [
    Edit(
        '"order": run.data.order', '"order": run.data.order.tolist()',
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


# %% right: torch.save into bytes
import io

import torch


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
