from labkit.answers import Edit

_HALF = "Half of it. A layer has two pairs, each with a sum forward and one backward; an all-reduce sends all twice."
_RETURN = "return 2 * pair + 2 * pair + for_dw + again.get(recompute, 0)"
_DW = "2 * all_gather if sequence_parallel else 0"
_SP, _TP = '{"mlp": all_gather, "full": pair + all_gather}', '{"full": pair}'
_AGAIN = f"{_SP} if sequence_parallel else {_TP}"
_ARROWS = (
    "You count the arrows alone. The backward pass needs x whole before it can make dW: where does a rank get it, and "
    "for how many products?"
)
_TO_THE_END = (
    "Your second run goes to the end of its part. Which tensor is the last that the backward pass needs, and which "
    "arrows lie behind it?"
)
_KEPT = (
    "The second run gathers x, and you use this x for dW. But it keeps its tensors as the first run would have kept "
    "them: in which form is x kept?"
)

WRONG = [
    Edit("reduce_scatter = s * b * h", "reduce_scatter = 0.5 * s * b * h", mistake=_HALF),
    Edit(_RETURN, "return 2 * pair + again.get(recompute, 0)", mistake=_HALF),
    Edit(_DW, "0", mistake=_ARROWS),
    Edit(_DW, "0", (_AGAIN, '{"mlp": pair, "full": 2 * pair}'), mistake=_ARROWS),
    Edit(_DW, "all_gather if sequence_parallel else 0",
         mistake="One all-gather is missing: a layer has two column layers, and the backward pass gathers the input of "
                 "each."),
    Edit(_DW, "4 * all_gather if sequence_parallel else 0",
         mistake="Two all-gathers too many: a row layer's input is cut by features, and its dW needs no other rank's."),
    Edit(_DW, "2 * all_gather",
         mistake="With tensor parallelism alone nothing is gathered again: every rank keeps x whole."),
    Edit(" * (t - 1) / t", "", mistake="A ring sends t-1 of t parts: one rank alone sends nothing."),
    Edit("(t - 1) / t", "(t - 1)", mistake="This is what all t ranks send together."),
    Edit("s * b * h", "s * h", mistake="You count one sequence: a batch has b of them."),
    Edit(" * element_size", "", mistake="These are elements: a message has element_size bytes for each."),
    Edit("* element_size", "* 2", mistake="You count 2 bytes an element, whatever `element_size` says."),
    Edit("2 * pair + 2 * pair", "3 * 2 * pair",
         mistake="The backward pass has twice the products of the forward pass, but as many arrows."),
    # recompute: all that stands in the part, then the same for one of the two parts or one of the two ways
    Edit(_AGAIN, '{"mlp": pair, "full": 2 * pair}', mistake=_TO_THE_END),
    Edit(_AGAIN, f'{{"mlp": all_gather, "full": 2 * pair}} if sequence_parallel else {_TP}', mistake=_TO_THE_END),
    Edit(_AGAIN, '{"mlp": all_gather, "full": 2 * pair} if sequence_parallel else {"full": 2 * pair}',
         mistake=_TO_THE_END),
    Edit(_AGAIN, f'{_SP} if sequence_parallel else {{"full": 2 * pair}}', mistake=_TO_THE_END),
    Edit(_AGAIN, f'{_SP} if sequence_parallel else {{"mlp": pair, "full": pair}}', mistake=_TO_THE_END),
    Edit(_AGAIN, '{"mlp": pair, "full": pair + all_gather} if sequence_parallel else {"full": pair}',
         mistake=_TO_THE_END),
    # x of the second run in place of the gather for dW, with a second run that ends early, and with a whole one
    Edit(_AGAIN, f'{{"full": pair - all_gather}} if sequence_parallel else {_TP}', mistake=_KEPT),
    Edit(_AGAIN, f'{{"mlp": all_gather, "full": pair - all_gather}} if sequence_parallel else {_TP}', mistake=_KEPT),
    Edit(_AGAIN, '{"mlp": pair - all_gather, "full": 2 * pair - 2 * all_gather} if sequence_parallel else '
                 '{"mlp": pair, "full": 2 * pair}', mistake=_TO_THE_END),
    Edit(_AGAIN, '{"full": 2 * pair - 2 * all_gather} if sequence_parallel else {"full": 2 * pair}',
         mistake=_TO_THE_END),
    Edit(_AGAIN, f"{_SP} if sequence_parallel else {{}}",
         mistake="With tensor parallelism alone the second run of a whole layer comes to an arrow, too."),
    Edit(_AGAIN, "{}", mistake="You count no second run: a part that runs once more makes its arrows once more, as far "
                               "as it runs."),
    Edit(_AGAIN, f'{{"full": pair + all_gather}} if sequence_parallel else {_TP}',
         mistake="The MLP's kept input is cut by tokens with sequence parallelism. What must the second run of the MLP "
                 "do first?"),
    Edit(_AGAIN, f'{{"mlp": all_gather, "full": pair}} if sequence_parallel else {_TP}',
         mistake="One gather of the second run is missing: without all tokens of x, fc1 cannot make the input of the "
                 "GELU again."),
    Edit(_AGAIN, f'{{**{_SP}, "core_attn": pair}} if sequence_parallel else {{**{_TP}, "core_attn": pair}}',
         mistake="Recompute of `core_attn` sends something in your count: it works on this rank's heads, between two "
                 "arrows."),
    Edit(_AGAIN, f'{{**{_SP}, "core_attn": all_gather}} if sequence_parallel else {_TP}',
         mistake="Recompute of `core_attn` sends something in your count: it works on this rank's heads, between two "
                 "arrows."),
]


# %% right: exact fractions, by kind of collective
from fractions import Fraction
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel, recompute):
    ring = Fraction(t - 1, t) * s * b * h * element_size
    halves = 2 * (2 + 2) + 2 * int(sequence_parallel)
    if recompute == "full":
        halves += 3 if sequence_parallel else 2
    elif recompute == "mlp" and sequence_parallel:
        halves += 1
    return float(halves * ring)


# %% right: step by step of each ring
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel, recompute="none"):
    part = s * b * h * element_size / t
    steps = t - 1
    total = 0
    for pair in ('attention', 'mlp'):
        for way in ('forward', 'backward'):
            total += 2 * steps * part
        total += steps * part if sequence_parallel else 0
        again = recompute == "full" or recompute == pair
        if again and sequence_parallel:
            total += steps * part
        if again and pair == 'attention':
            total += steps * part * (1 if sequence_parallel else 2)
    return total


# %% right: message by message, the second run up to the input of fc2
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel, recompute):
    before, after = (["all_gather"], ["reduce_scatter"]) if sequence_parallel else ([], ["all_reduce"])
    forward = [*before, "qkv", "core", "proj", *after, *before, "fc1", "gelu", "fc2", *after]
    runs = {"none": [], "core_attn": ["core"], "mlp": forward[forward.index("fc1") - len(before):], "full": forward}
    second = runs[recompute]
    if "fc2" in second:
        second = second[: second.index("fc2")]
    one = (["all_gather", "all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"])
    messages = forward + second + 2 * one
    weights = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return sum(weights.get(m, 0) * s * b * h * element_size * (t - 1) / t for m in messages)
