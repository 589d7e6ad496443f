# weights and averages as lists of tensors, put into place in memory
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
