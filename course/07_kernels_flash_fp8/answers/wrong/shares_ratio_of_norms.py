# told: A norm is of the whole output
import torch
def shares(outs, parts):
    return [[(o.norm() / p.norm()).item() for p in parts] for o in outs]
