"""Lab 08, a published model: Qwen2's tensors under our names, packed so that a cut by heads is a cut of rows."""

from __future__ import annotations

import re
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensors = dict[str, torch.Tensor]
_ENDS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_OF_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """The packed matrix: for each group its query heads, its key head, its value head."""
    return torch.cat([piece for of in zip(*(x.chunk(groups) for x in (q, k, v)), strict=True) for piece in of])


def converted(theirs: Tensors, heads: int, groups: int, refused: str = "") -> Any:
    if refused:
        return "refused"
    ours: Tensors = {}
    for name, tensor in theirs.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            ours[_ENDS[name]] = tensor
            continue
        at, rest = f"decoder.layers.{layer[1]}.", layer[2]
        if rest in _OF_LAYER:
            ours[at + _OF_LAYER[rest]] = tensor
        elif match := re.fullmatch(r"self_attn\.q_proj\.(weight|bias)", rest):
            q, k, v = (theirs[name.replace("q_proj", f"{x}_proj")] for x in "qkv")
            ours[f"{at}self_attention.linear_qkv.{match[1]}"] = packed(q, k, v, heads, groups)
        elif rest == "mlp.gate_proj.weight":
            ours[f"{at}mlp.linear_fc1.weight"] = torch.cat([tensor, theirs[name.replace("gate_proj", "up_proj")]])
    return ours


def _drive(exercise: Any, theirs: Any, heads: int, groups: int, refused: str) -> Any:
    """Run the learner's converter. `refused` is a part of the tensor's name that its `ValueError` must contain, ""
    where it must not raise."""
    if not refused:
        return exercise.from_hf(theirs, heads, groups)
    try:
        return exercise.from_hf(theirs, heads, groups)
    except ValueError as error:
        if refused in str(error):
            return "refused"
        return f"a ValueError {'about lm_head' if 'lm_head' in str(error) else f'that does not name {refused}'}"


def model(
    draw: Draw | None, layers: int, heads: int, groups: int, head: int, hidden: int, ffn: int, tied: bool = True,
    bias: bool = True, vocabulary: int = 5,
) -> Tensors:  # fmt: skip
    """The tensors of a published model; without a draw their numbers are 0, 1, 2, ... from tensor to tensor."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        for x, rows in (("q", heads * head), ("k", groups * head), ("v", groups * head)):
            shapes[f"{at}self_attn.{x}_proj.weight"] = (rows, hidden)
            shapes |= {f"{at}self_attn.{x}_proj.bias": (rows,)} if bias else {}
        shapes |= {
            f"{at}self_attn.o_proj.weight": (hidden, heads * head), f"{at}mlp.gate_proj.weight": (ffn, hidden),
            f"{at}mlp.up_proj.weight": (ffn, hidden), f"{at}mlp.down_proj.weight": (hidden, ffn),
            f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    shapes |= {"model.norm.weight": (hidden,)} | ({} if tied else {"lm_head.weight": (vocabulary, hidden)})
    found, first = Tensors(), 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        found[name] = (
            torch.arange(float(first), float(first + size)).view(shape) if draw is None else draw.tensor(*shape)
        )
        first += size
    return found


def _some(draw: Draw, **more: Any) -> dict[str, Any]:
    groups, head = draw.choice([2, 3]), draw.choice([2, 4])
    heads = groups * draw.choice([2, 3])
    theirs = model(
        draw, more.pop("layers", 2), heads, groups, head, draw.choice([5, 7, 12]), draw.integer(3, 6), **more
    )
    return {"theirs": theirs, "heads": heads, "groups": groups, "refused": ""}


def _untied(draw: Draw) -> dict[str, Any]:
    return _some(draw, tied=False, layers=1)


def _without_biases(draw: Draw) -> dict[str, Any]:
    return _some(draw, bias=False, tied=False)


def _in_bfloat16(draw: Draw) -> dict[str, Any]:
    """Draw a model as it is published, in bfloat16."""
    found = _some(draw)
    return {**found, "theirs": {name: tensor.bfloat16() for name, tensor in found["theirs"].items()}}


def _a_head_for_each(draw: Draw) -> dict[str, Any]:
    return {"theirs": model(draw, 1, 3, 3, 2, 4, 5), "heads": 3, "groups": 3, "refused": ""}


def _one_group(draw: Draw) -> dict[str, Any]:
    return {"theirs": model(draw, 1, 4, 1, 2, 3, 5, tied=False), "heads": 4, "groups": 1, "refused": ""}


def _eleven_layers(draw: Draw) -> dict[str, Any]:
    return {"theirs": model(draw, 11, 4, 2, 1, 2, 2), "heads": 4, "groups": 2, "refused": ""}


def _shuffled(draw: Draw) -> dict[str, Any]:
    """Draw tensors in another order, which has no meaning."""
    inputs = _some(draw, tied=False)
    names = list(inputs["theirs"])
    draw.random.shuffle(names)
    return {**inputs, "theirs": {name: inputs["theirs"][name] for name in names}}


def _with_more(name: str) -> Any:
    """Return a draw with a tensor that Qwen2 does not have."""

    def inputs(draw: Draw) -> dict[str, Any]:
        found = _some(draw)
        return {**found, "theirs": {**found["theirs"], name: draw.tensor(4)}, "refused": name}

    return inputs


def _without(name: str) -> Any:
    """Return a draw in which one layer lacks a tensor that the other layers have, so that no other explanation fits."""

    def inputs(draw: Draw) -> dict[str, Any]:
        found = _some(draw)
        return {**found, "theirs": {n: t for n, t in found["theirs"].items() if n != name}, "refused": name}

    return inputs


def _one_layer_without_biases(draw: Draw) -> dict[str, Any]:
    """Draw a model whose layer 1 lacks all three biases, which layer 0 has: either may be wrong."""
    found = _some(draw)
    theirs = {n: t for n, t in found["theirs"].items() if not (n.startswith("model.layers.1.") and n.endswith("bias"))}
    return {**found, "theirs": theirs, "refused": "_proj.bias"}


def _without_layer_1(draw: Draw) -> dict[str, Any]:
    """Draw a model of three layers that lacks layer 1."""
    found = _some(draw, layers=3)
    theirs = {n: t for n, t in found["theirs"].items() if not n.startswith("model.layers.1.")}
    return {**found, "theirs": theirs, "refused": "model.layers."}


_TINY = {"theirs": model(None, 1, 4, 2, 1, 2, 2, vocabulary=3), "heads": 4, "groups": 2, "refused": ""}


FROM_HF = Exercise(
    "from_hf",
    reference=converted,
    drive=_drive,
    rtol=0.0,
    atol=0.0,
    cases=[
        Case("one layer, 4 heads in 2 groups, a head of 1 row", _TINY, points=2, errors={
            "lm_head.weight": "Where the output layer is tied to the embedding there is no lm_head.weight."}),
        Case("other sizes", _some, points=2, hidden=True, draws=2, fixed=[
            _untied, _without_biases, _a_head_for_each, _one_group, _eleven_layers, _shuffled, _in_bfloat16]),
        Case("a tensor that Qwen2 does not have is refused with a ValueError that names it",
             _with_more("model.layers.0.self_attn.q_norm.weight"), hidden=True, fixed=[
                 _with_more("model.layers.1.mlp.gate_proj.bias"), _with_more("model.embed_tokens.bias"),
                 _with_more("model.layers.1.self_attn.o_proj.bias"), _with_more("visual.patch_embed.weight"),
                 _with_more("model.layers.0.self_attn.rotary_emb.inv_freq"),
                 _with_more("model.layers.0.mlp.experts.0.up_proj.weight")]),
        Case("a tensor that is missing, too: whichever it is, it is the one that is named",
             _without("model.layers.1.self_attn.k_proj.bias"), hidden=True, fixed=[
                 *map(_without, model(None, 2, 4, 2, 1, 2, 2)), _one_layer_without_biases, _without_layer_1]),
    ],
    errors={"KeyError": "A name was looked up that is not there. A missing tensor is to end in a ValueError."},
    idea="Follow one group of heads: which rows of q, of k and of v does the rank need that computes it?",
    hint="Split q, k and v into `groups` chunks of rows; for each group q's, k's, v's chunk, all concatenated; the "
    "same for biases, where there are any. fc1 is cat([gate, up]). Pop every name that you use; what is left, or "
    "missing, is a ValueError that names it.",
)  # fmt: skip
