# told: one unknown for each
import torch


def survivors(got, grads):
    cosine = torch.nn.functional.cosine_similarity
    return [i for i, g in enumerate(grads) if cosine(g.flatten(), got.flatten(), dim=0) > 0.4]
