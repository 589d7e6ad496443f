from labkit.answers import Edit

WRONG = [
    Edit("mask.sum().clamp(min=1)", "len(mask)", mistake="This divides by all tokens; only those that count, count."),
    Edit("(losses * mask).sum()", "losses.sum()", mistake="Losses of tokens that do not count are in the sum."),
    Edit(".clamp(min=1)", "", mistake="Where no token counts this divides 0 by 0; the mean is then 0."),
    Edit("(losses * mask).sum() / mask.sum().clamp(min=1)", "losses.sum().item() / int(mask.sum())",
         mistake="Losses of tokens that do not count are in the sum, and where none counts this divides by 0."),
]  # fmt: skip
RIGHT = [
    Edit("(losses * mask).sum()", "losses.dot(mask)"),
    Edit("mask.sum().clamp(min=1)", "max(1, mask.count_nonzero())"),
]


# %% right: only those that count
def token_mean(losses, mask):
    counted = losses[mask > 0]
    return counted.mean().item() if len(counted) else 0.0
