"""A layer of experts from nothing: router, dropless dispatch, experts, balancing loss. One process, no library's MoE.

    python moe.py

A router scores E experts for each token; the k best of them compute, and their outputs are added, weighted by their
scores. Which tokens an expert gets is data: they are sorted by expert, and each expert multiplies one block of rows.

    balancing loss = E sum_e f_e P_e        f_e: share of the choices that fell on e        P_e: mean probability of e

is 1 when all is even, and more otherwise. f counts, and has no gradient; P has (Switch Transformer, 2021).
"""

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, FFN, EXPERTS, TOP_K = 32, 48, 8, 2


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 3)
        self.up = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN) / FFN**0.5)

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.up[e].T) @ self.down[e].T

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, h] -> weights [T, k] that sum to 1, experts [T, k], balancing loss."""
        probs = (x @ self.router.T).softmax(-1)
        weights, experts = probs.topk(TOP_K, dim=-1)
        share = torch.bincount(experts.flatten(), minlength=EXPERTS) / experts.numel()
        return weights / weights.sum(-1, keepdim=True), experts, EXPERTS * (share * probs.mean(0)).sum()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, h] -> [T, h] and the balancing loss."""
        weights, experts, balance = self.route(x)
        order = experts.flatten().argsort(stable=True)  # choices in the order of their experts
        tokens, counts = order // TOP_K, torch.bincount(experts.flatten(), minlength=EXPERTS).tolist()
        blocks = x[tokens].split(counts)
        made = torch.cat([self.expert(e, block) for e, block in enumerate(blocks)])
        made = made * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, made), balance

    def slowly(self, x: torch.Tensor) -> torch.Tensor:
        """The same, by the definition: every expert computes every token."""
        weights, experts, _ = self.route(x)
        of_expert = torch.zeros(len(x), EXPERTS).scatter(1, experts, weights)
        return sum(of_expert[:, e, None] * self.expert(e, x) for e in range(EXPERTS))


def main() -> float:
    net, x = MoE(), torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grads = []
    for out in (net(x)[0], net.slowly(x)):
        grads.append((out, *torch.autograd.grad((out**2).sum(), [x, *net.parameters()])))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*grads, strict=True))


if __name__ == "__main__":
    print(f"sorted by expert against the definition, gradients too: the largest difference is {main():.0e}")
    net, tokens = MoE(), torch.randn(512, HIDDEN) + torch.randn(HIDDEN)  # tokens that have much in common
    step = torch.optim.SGD([net.router], lr=0.3)
    for i in range(201):
        weights, experts, balance = net.route(tokens)
        if i % 100 == 0:
            busiest = torch.bincount(experts.flatten(), minlength=EXPERTS).max() * EXPERTS / experts.numel()
            print(
                f"step {i}: balancing loss {balance.item():.2f}, the busiest expert has {busiest:.1f} times its share"
            )
        step.zero_grad(), balance.backward(), step.step()
