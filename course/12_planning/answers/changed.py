from labkit.answers import Edit

_LONGER, _FEWEST, _HALF = '"longer": {**layout, "micro": 1}', '"fewest": 512', '"seconds": 8.43, "left": 11.4'

WRONG = [
    Edit("8.43", "8.57", told="twice that of 1,024"),
    Edit("8.43", "4.29", told="the plan says more"),
    Edit("8.43", "16.9", told="the plan says less"),
    Edit("11.4", "12.4", told="half as many ranks"),
    Edit("11.4", "6.2", told="the plan says more"),
    Edit(_FEWEST, '"fewest": 1024', told="on fewer GPUs than 1024 it runs, too"),
    Edit(_FEWEST, '"fewest": 256', told="on 256 GPUs fewer than 10 GiB stay free"),
    Edit(_FEWEST, '"fewest": 320', told="on 320 GPUs dp is 20; can a batch of 512 samples be cut"),
    Edit(_FEWEST, '"fewest": 310', told="no multiple of tp 4"),
    Edit(_FEWEST, '"fewest": 8', told="no multiple of tp 4"),
    Edit(_FEWEST, '"fewest": 16384', told="dp is 1024; can a batch"),
    Edit(_FEWEST, '"fewest": 512.5', told="a whole number of GPUs"),
    Edit("-2.8", "2.8", told="are there scores"),
    Edit("-2.8", "0.0", told="it takes more"),
    Edit("6.4", "2.4", told="by so much it may grow"),
    Edit("6.4", "12.4", told="reserve is not"),
    Edit(_LONGER, '"longer": layout', told="longer: it does not fit"),
    Edit(_LONGER, '"longer": {**layout, "micro": 1, "v": 1}', told="% longer than"),
    Edit(_LONGER, '"longer": {**layout, "micro": 1, "cp": 4}', told="% longer than"),
    Edit(_LONGER, '"longer": {**layout, "micro": 1, "zero": 0}', told="longer: zero is 1, 2 or 3"),
    Edit(_LONGER, '"longer": {**layout, "pp": 3}', told="refuses"),
    Edit('"pp": 2, "v": 20, "micro": 2', '"pp": 2, "v": 5, "micro": 4', told="your layout of 1,024 GPUs"),
    Edit(_HALF, '"seconds": 8.43', told="two numbers"),
    Edit('"reserve": 6.4, ', "", told="keys"),
]

RIGHT = [
    Edit(_HALF, '"seconds": 2 * (4.29 - 0.12 - 0.01) + 0.13, "left": 12.4 - 0.26 - 0.26 - 0.51'),
    Edit(_LONGER, '"longer": {**layout, "cp": 4}'),
    Edit(_LONGER, '"longer": dict(tp=8, cp=1, pp=1, v=1, micro=1, zero=3, recompute="none")'),
]


# %% right: another layout
def changed():
    layout = dict(tp=8, cp=1, pp=1, v=1, micro=2, zero=3, recompute="none")
    half = dict(seconds=2 * 4.24, left=27.2 - 1.0)
    return dict(layout=layout, half=half, fewest=64, selective=0, reserve=4 + 27.2 - 10, longer=layout | dict(micro=1))


# %% wrong: plans in the exercise
# told: closed in this exercise
def changed():
    from minimegatron.planner.planning import plan

    return plan
