from labkit.answers import Edit

_LOGITS = "x.float() @ weight.float().T"
_WEIGHTS = "best.values.softmax(-1)"
_TABLE = f"torch.zeros_like(logits).scatter(1, best.indices, {_WEIGHTS})"

WRONG = [
    Edit("logits.topk(k, dim=-1)", "logits.topk(logits.shape[1], dim=-1)",
         mistake="Every expert gets every token. Keep the k largest."),
    Edit(f"logits = {_LOGITS}", f"logits = ({_LOGITS}).softmax(-1)",
         mistake="That is a softmax of a softmax: the weights come out nearly equal. The softmax over the chosen ones "
         "is taken of "
         "their *logits*."),
    Edit(_WEIGHTS, "logits.softmax(-1).gather(1, best.indices)",
         mistake="That is the softmax over all experts. Here it is over the k chosen ones: the weights of a token sum "
         "to 1."),
    Edit(_TABLE, "torch.zeros_like(logits).scatter(1, best.indices, best.values).softmax(-1)",
         mistake="The softmax runs over all places, with 0 in the place of the logits that are not chosen. But exp(0) "
         "is 1: they "
         "take a part of the sum."),
    Edit(_WEIGHTS, "best.values.softmax(0)",
         mistake="This softmax runs over the tokens. The weights of one *token* sum to 1."),
    Edit("    best =", "    map = logits >= logits.topk(k, dim=-1).values[:, -1:]\n"
         "    return logits.masked_fill(~map, -torch.inf).softmax(-1), map\n    best =",
         mistake="Where experts are equally good, a token goes to exactly k of them all the same. Here it goes to all "
         "that are "
         "as good as the k-th."),
    Edit(_WEIGHTS, f"{_WEIGHTS}.detach()",
         mistake="The weights have no gradient, and so the router learns nothing: they must stay differentiable."),
    Edit(_LOGITS, "x.detach().float() @ weight.float().T",
         mistake="x gets no gradient: through the weights the router teaches the layers before it, too."),
    Edit(_LOGITS, "(x @ weight.T).float()",
         mistake="The logits were rounded to bf16, and some tokens go elsewhere. Cast x and "
         "weight to fp32 *before* the product."),
    Edit("return probs,", "return probs.to(x.dtype),", mistake="The weights must be fp32, whatever the tokens are."),
    Edit(_WEIGHTS, "best.values.exp() / best.values.exp().sum(-1, keepdim=True)",
         mistake="exp of a large logit overflows."),
    Edit("torch.zeros_like(logits, dtype=torch.bool).scatter(1, best.indices, True)", "probs > 0",
         mistake="A chosen expert may weigh 0, and the token goes there all the same: `map` says who is chosen, not "
         "who weighs "
         "something."),
    Edit("return probs,", f"return {_WEIGHTS},", told="a column for each expert"),
    # several weights are 0, and one is as good as another
    Edit("logits.topk(k, dim=-1)", "logits.softmax(-1).topk(k, dim=-1)",
         (_WEIGHTS, "best.values / best.values.sum(-1, keepdim=True)"), told="hidden"),
    Edit(_WEIGHTS, "torch.full_like(best.values, 1 / k) + 0 * best.values"),
    Edit(_TABLE, f"torch.nn.functional.pad({_WEIGHTS}, (0, logits.shape[1] - k))"),
    Edit("logits.topk(k, dim=-1)", "logits.topk(min(k, 3), dim=-1)"),
    Edit(_LOGITS, "(x.half() @ weight.half().T).float()"),
    Edit(_LOGITS, "(x.to(weight.dtype) @ weight.T).float()"),
    Edit(_LOGITS, "(x @ weight.to(x.dtype).T).float()"),
    Edit(_WEIGHTS, "best.values.to(x.dtype).softmax(-1).float()"),
    Edit(_WEIGHTS, "(best.values - logits.max()).exp() / (best.values - logits.max()).exp().sum(-1, keepdim=True)"),
    Edit("logits = x.float()", "logits = x.float().abs()"),
    Edit("dtype=torch.bool).scatter(1, best.indices, True)", "dtype=torch.int64).scatter(1, best.indices, 1)"),
]


# %% right: a softmax of masked logits
import torch
import torch.nn.functional as F

def route(x, weight, k):
    logits = F.linear(x.float(), weight.float())
    map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return logits.masked_fill(~map, -torch.inf).softmax(-1), map


# %% right: in double, token by token
import torch

def route(x, weight, k):
    probs, map = [], []
    for row in x:
        logits = weight.double() @ row.double()
        m = torch.zeros(len(logits), dtype=torch.bool)
        m[logits.argsort(descending=True)[:k]] = True
        e = (logits - logits.max()).exp() * m
        probs.append((e / e.sum()).float())
        map.append(m)
    return torch.stack(probs), torch.stack(map)


# %% right: a one-hot sum of the k choices
import torch.nn.functional as F

def route(x, weight, k):
    logits = x.float().matmul(weight.float().t())
    values, places = logits.sort(dim=1, descending=True)
    values, hot = values[:, :k].softmax(1), F.one_hot(places[:, :k], logits.shape[1])
    return (values.unsqueeze(-1) * hot).sum(1), hot.sum(1).bool()
