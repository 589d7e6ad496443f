# a Decimal would be rounded: a torch number, counted on the package's own simulator
import torch
def bubble(p, m, v):
    from minimegatron.parallel.pipeline.actions import schedule_from_text
    from minimegatron.parallel.pipeline.schedule_sim import simulate
    rows = [" ".join(f"F{i}" for i in range(m)) + " " + " ".join(f"B{i}" for i in range(m))] * p
    takes = simulate(schedule_from_text("x", rows)).makespan
    return torch.tensor((float(takes) - 3 * m) / (3 * m) / v, dtype=torch.float64)
