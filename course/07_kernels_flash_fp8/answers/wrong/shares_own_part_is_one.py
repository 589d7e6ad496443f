# told: own part has an unknown factor
import torch
def shares(outs, parts):
    return [[1.0 if i == j else (((o - parts[i]) * p).sum() / (p * p).sum()).item() for j, p in enumerate(parts)] for i, o in enumerate(outs)]
