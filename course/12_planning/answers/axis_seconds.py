from labkit.answers import Edit

_RATE, _TOGETHER = "min(inside, together * between)", "min(nodes.count(one) for one in nodes)"

WRONG = [
    Edit("stride = prod(list(sizes.values())[:place])", "stride = prod(list(sizes.values())[place + 1:])", mistake="The first axis of `sizes` is the innermost: its neighbours are neighbouring ranks."),
    Edit("stride = prod(list(sizes.values())[:place])", "stride = 1", mistake="Only the innermost axis has neighbouring ranks: the ranks of others lie further apart."),
    Edit(_RATE, "between", mistake="Each rank of the group on a node has a network card: rings side by side use all of them."),
    Edit(_RATE, "node * between", mistake="The cards of ranks in other groups carry the messages of those groups: count the group's own ranks on a node."),
    Edit(_RATE, "min(inside, node * between)", mistake="The cards of ranks in other groups carry the messages of those groups: count the group's own ranks on a node."),
    Edit(_RATE, "together * between", mistake="Within its node a ring is not faster than the link there, however many cards leave it."),
    Edit(_TOGETHER, "nodes.count(0)", mistake="That counts the cards of the first node. Another one may hold fewer of the group's ranks, and a ring passes through every node."),
    Edit(_TOGETHER, "min(n, max(1, node // stride))", mistake="So many ranks are on a node that the group fills. Another one may hold fewer of them, and a ring passes through every node."),
    Edit(_TOGETHER, "n / len(set(nodes))", mistake="That is the average of the nodes. One of them may hold fewer of the group's ranks, and a ring passes through every node."),
    Edit(_TOGETHER, "nodes.count(nodes[-1])"),
    Edit(_TOGETHER, "max(nodes.count(one) for one in nodes)"),
    Edit(_RATE, "inside", mistake="A ring is as slow as its slowest link: between nodes it is the network."),
    Edit("payload / n / rate", "payload / rate", mistake="In each of its n - 1 steps a rank sends one n-th of the payload."),
    Edit("(n - 1) * (payload / n / rate + latency)", "(n - 1) * payload / n / rate + latency", mistake="Each of the n - 1 steps waits for the one before it: each has the latency."),
    Edit("(n - 1) * (payload", "n * (payload"),
    Edit("(n - 1) * (payload", "2 * (n - 1) * (payload"),
    Edit("else far", "else near"),
    Edit("together == n", "n <= node"),
]

RIGHT = [
    Edit("(n - 1) * (payload / n / rate + latency)", "payload * (n - 1) / n / rate + latency * (n - 1)"),
    Edit(_TOGETHER, "min(sum(other // node == one for other in ranks) for one in set(nodes))"),
]


# %% right: a mesh of ranks
import torch


def axis_seconds(sizes, axis, payload, node, inside, between, near, far):
    names = list(sizes)[::-1]
    mesh = torch.arange(torch.tensor(list(sizes.values())).prod().item()).view([sizes[name] for name in names])
    ranks = mesh[tuple(slice(None) if name == axis else 0 for name in names)].tolist()
    g, n = min(torch.tensor([r // node for r in ranks]).unique(return_counts=True)[1].tolist()), len(ranks)
    if g == n:
        return {"ranks": ranks, "seconds": (n - 1) * (payload / (n * inside) + near)}
    return {"ranks": ranks, "seconds": (n - 1) * (payload / n / min(g * between, inside) + far)}
