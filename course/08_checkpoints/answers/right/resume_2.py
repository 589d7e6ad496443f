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
