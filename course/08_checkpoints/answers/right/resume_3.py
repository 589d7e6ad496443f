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
