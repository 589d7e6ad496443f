from labkit.answers import Edit
_SMALL = "To the standard deviation itself 0.0001 is added."

WRONG = [
    Edit("group.mean()", "rewards.mean()", mistake="An answer is compared with the others to its own prompt, not with the whole batch."),
    Edit("group.std()", "rewards.std()", mistake="The deviation is that of the group, not that of the whole batch."),
    Edit("group.std()", "group.std(unbiased=False)", mistake="The deviation divides by n - 1, not by n."),
    Edit("group.std()", "group.var()", mistake="This is the variance; its square root is the standard deviation."),
    Edit("(group.std() + 1e-4)", "group.std()", told="nan | prompts | expected"),
    Edit("centred * n / (n - 1)", "centred", mistake="The others do not include the answer itself: their mean is not the group's."),
    Edit("centred * n / (n - 1)", "centred * (n - 1) / n", mistake="The factor is the wrong way round: without itself an answer is farther from the mean, not nearer."),
    Edit("centred * n / (n - 1)", "group - group.sum() / (n - 1)", mistake="The mean of the others has the answer itself still in its sum."),
    Edit("        if n < 2:\n            continue\n", "", mistake="With one answer there is no deviation, and there are no others: its advantage is 0."),
    Edit("            continue", "            break", mistake="A lonely answer has advantage 0; the groups behind it have theirs all the same."),
    Edit("prompts.unique()", "prompts.unique()[1:]"),
    Edit("(group.std() + 1e-4)", "(group.var() + 1e-4).sqrt()", mistake=_SMALL),
    Edit("1e-4", "1e-8", mistake=_SMALL),
    Edit("            continue\n", "            found[here] = group\n            continue\n", mistake="An answer that is compared with nobody has the advantage 0, not its reward."),
    Edit("centred * n / (n - 1)", "centred * n / (n - 1) / (group.std() + 1e-4)", mistake="By `others` nothing is divided by the deviation."),
    Edit("return found", "return torch.cat([found[prompts == prompt] for prompt in prompts.unique()])", mistake="The advantages stand in the order of the rewards, not group by group."),
    Edit("return found", "return -found", mistake="The sign is wrong: an answer better than the others has an advantage above 0."),
]


# %% right: a matrix of who is with whom
import torch


def advantages(rewards, prompts, way):
    same = (prompts[:, None] == prompts).to(rewards.dtype)
    n = same.sum(1)
    mean = same @ rewards / n
    centred = rewards - mean
    if way == "others":
        centred = rewards - (same @ rewards - rewards) / (n - 1).clamp(min=1)
    if way == "group":
        squares = (same * (rewards[None] - mean[:, None]) ** 2).sum(1)
        centred = centred / ((squares / (n - 1).clamp(min=1)).sqrt() + 1e-4)
    return torch.where(n > 1, centred, 0.0)


# %% right: lists and the statistics module
import statistics
import torch


def advantages(rewards, prompts, way):
    groups = {}
    for place, prompt in enumerate(prompts.tolist()):
        groups.setdefault(prompt, []).append(place)
    found = [0.0] * len(rewards)
    for places in groups.values():
        values = [float(rewards[place]) for place in places]
        if len(values) == 1:
            continue
        for place, value in zip(places, values):
            if way == "others":
                found[place] = value - (sum(values) - value) / (len(values) - 1)
            else:
                found[place] = (value - sum(values) / len(values)) / (statistics.stdev(values) + 1e-4 if way == "group" else 1)
    return torch.tensor(found, dtype=rewards.dtype)


# %% right: sums by scatter
import torch


def advantages(rewards, prompts, way):
    _, index = prompts.unique(return_inverse=True)
    def summed(values):
        return torch.zeros(int(index.max()) + 1, dtype=rewards.dtype).scatter_add(0, index, values)[index]
    n = summed(torch.ones_like(rewards))
    centred = rewards - summed(rewards) / n
    if way == "group":
        centred = centred / ((summed(centred**2) / (n - 1).clamp(min=1)) ** 0.5 + 1e-4)
    elif way == "others":
        centred = centred * n / (n - 1).clamp(min=1)
    return centred * (n > 1)
