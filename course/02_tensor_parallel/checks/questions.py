"""Lab 02, the questions of its end that have a number: heads, rows, all-reduces, bytes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead


def answers(
    heads: int, groups: int, ffn: int, tp: int, rank: int, layers: int, hidden: int, vocab: int
) -> dict[str, Any]:
    mine = heads // tp
    queries = list(range(rank * mine, (rank + 1) * mine))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden**2 // (8 * hidden) + 1,
    }


def _equal_cut(groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return list(range(rank * groups // tp, rank * groups // tp + groups // tp))


def _cut_groups(groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return list(range(rank * groups // tp, (rank + 1) * groups // tp))


def _first_head(heads: int, groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return [rank * (heads // tp) // (heads // groups)]


def _middle_cut(ffn: int, tp: int, rank: int, **_: int) -> list[list[int]]:
    return [[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]


_HEADS = ("query_heads", "kv_heads")


def _by_remainder(groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return [rank % groups] if groups < tp else _cut_groups(groups, tp, rank)


def _one_for_each_rank(groups: int, tp: int, rank: int, **_: int) -> list[int]:
    own = max(groups // tp, 1)
    return list(range(rank * own, (rank + 1) * own))


def _dealt_heads(heads: int, tp: int, rank: int, **_: int) -> list[int]:
    return list(range(rank, heads, tp))


def _some_model(few: bool) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        groups = draw.choice([1, 2]) if few else draw.choice([8, 16])
        tp = draw.choice([4, 8])
        heads = tp * groups * draw.integer(1, 3) if few else groups * draw.integer(2, 4)
        return {
            "heads": heads, "groups": groups, "tp": tp, "rank": draw.integer(1, tp - 1),
            "layers": draw.integer(2, 96), "hidden": 64 * heads, "vocab": 1024 * draw.integer(30, 250),
            "ffn": 64 * tp * draw.integer(4, 40),
        }  # fmt: skip

    return inputs


# More groups than ranks, and no multiple: a rank's queries use two or three groups, one of them with another rank.
_UNEVEN = {"heads": 24, "groups": 6, "ffn": 1536, "tp": 4, "rank": 1, "layers": 7, "hidden": 1536, "vocab": 32000}
_THREE_GROUPS = {**_UNEVEN, "heads": 48, "groups": 24, "tp": 8, "rank": 2, "hidden": 3072}
_FEW = {"heads": 16, "groups": 2, "ffn": 4096, "tp": 8, "rank": 2, "layers": 12, "hidden": 1024, "vocab": 50304}

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("4 query heads in 2 groups, rank 1 of 2, one layer; Llama-3 70B, rank 5 of 8",
             {"heads": 4, "groups": 2, "ffn": 8, "tp": 2, "rank": 1, "layers": 1, "hidden": 8, "vocab": 12},
             fixed=[{"heads": 64, "groups": 8, "ffn": 28672, "tp": 8, "rank": 5, "layers": 80, "hidden": 8192,
                     "vocab": 128256}]),
        Case("other models", _some_model(few=False), hidden=True, fixed=[_UNEVEN, _THREE_GROUPS]),
        Case("fewer groups than ranks", _some_model(few=True), points=2, hidden=True,
             fixed=[_FEW, {**_FEW, "rank": 6}]),
    ],
    mistakes=[
        *(
            Mistake(
                instead(answers, kv_heads=heads),
                "A rank uses the key/value heads of all its queries: that may be several, and several ranks may use "
                "the same key/value head.",
            )
            for heads in (_equal_cut, _cut_groups, _first_head)
        ),
        Mistake(
            instead(answers, gate_up_rows=_middle_cut),
            "One cut through the stack gives rank 0 only gates. A rank needs the same rows of both halves: two ranges.",
        ),
        Mistake(
            instead(answers, kv_heads=lambda heads, groups, tp, rank, **_: [
                q * groups // heads for q in range(rank * heads // tp, (rank + 1) * heads // tp)]),
            "You name a key/value head once for each query that uses it: each is asked for once.",
        ),  # fmt: skip
        Mistake(
            instead(answers, kv_heads=lambda groups, **_: list(range(groups))),
            "These are all key/value heads: asked are those that this rank's queries use.",
        ),
        *(
            Mistake(
                instead(answers, kv_heads=heads),
                "With fewer groups than ranks, neighbouring ranks use the same key/value head: query q uses head "
                "q // (a/g).",
            )
            for heads in (_by_remainder, _one_for_each_rank)
        ),
        Mistake(
            lambda **given: {**answers(**given), **{name: answers(**{**given, "rank": 0})[name] for name in _HEADS}},
            "These are the heads of rank 0, or numbers that begin at 0 on each rank: asked are those of the whole "
            "model.",
        ),
        Mistake(
            instead(answers, query_heads=_dealt_heads, kv_heads=lambda heads, groups, **given: sorted(
                {q * groups // heads for q in _dealt_heads(heads=heads, **given)})),
            "The query heads are dealt out to the ranks one by one: a rank has a block of consecutive heads.",
        ),  # fmt: skip
        *(
            Mistake(instead(answers, gate_up_rows=rows), text)
            for rows, text in (
                (lambda ffn, tp, rank, **_: [[rank * ffn // tp, (rank + 1) * ffn // tp]],
                 "These are rows of gate alone: up has rows, too, which begin at ffn."),
                (lambda ffn, tp, rank, **_: [[rank * ffn // tp, (rank + 1) * ffn // tp]] * 2,
                 "The second half, up, begins at row ffn of the stack."),
                (lambda ffn, tp, rank, **_: [[half + rank * ffn // tp, ffn // tp] for half in (0, ffn)],
                 "These are start and length: asked is [start, stop]."),
                (lambda ffn, tp, rank, **_: [
                    [half + rank * ffn // tp, half + (rank + 1) * ffn // tp - 1] for half in (0, ffn)],
                 "Your stop is the last row; asked is the row behind it, as in Python."),
            )
        ),  # fmt: skip
        *(
            Mistake(instead(answers, all_reduces_forward=sums), text)
            for sums, text in (
                (lambda layers, **_: layers + 1, "A layer has two pairs, attention and MLP, with a sum each."),
                (lambda layers, **_: 2 * layers + 2, "One too many: behind the layers no s b h is summed."),
                (lambda layers, **_: 2 * layers + 4, "The loss is not to be counted: it sums three numbers a token."),
            )
        ),
        Mistake(instead(answers, all_reduces_forward=lambda layers, **_: 2 * layers), "The embedding is summed too."),
        *(
            Mistake(instead(answers, all_reduces_forward=sums), "Forward only: two sums a layer, one for each pair.")
            for sums in (lambda layers, **_: 4 * layers, lambda layers, **_: 4 * layers + 1)
        ),
        Mistake(
            instead(answers, all_reduces_forward=lambda layers, **_: 4 * layers + 2),
            "Forward only: two sums a layer, and one for the embedding.",
        ),
        Mistake(
            instead(answers, logits_over_three=lambda vocab, **_: vocab / 3),
            "A ring all-reduce of n bytes sends twice what an all-gather of n bytes does.",
        ),
        *(
            Mistake(instead(answers, logits_over_three=ratio), text)
            for ratio, text in (
                (lambda vocab, **_: 6 / vocab, "You divide the three numbers by the logits; asked is the other way "
                 "round."),
                (lambda vocab, **_: 2 * vocab / 3, "Of the two it is the all-reduce, of the three numbers, that sends "
                 "its tensor twice."),
                (lambda vocab, tp, **_: vocab / tp / 6, "An all-gather is counted by the whole tensor that comes of "
                 "it, all V logits."),
                (lambda vocab, tp, **_: vocab * (tp - 1) / tp / 6, "Both send (t-1)/t of their bytes: the factor "
                 "cancels."),
                (lambda vocab, **_: vocab / 2, "There are three numbers a token, not one."),
            )
        ),
        *(
            Mistake(instead(answers, zero3_sends_less_from=tokens), text)
            for tokens, text in (
                (lambda hidden, **_: 9 * hidden + 1, "tp sends 8 b s h: four all-reduces, and each sends its tensor "
                 "twice."),
                (lambda hidden, tp, **_: 36 * hidden // 8 // tp + 1, "These are the tokens of one rank; b s counts "
                 "those of all t ranks together."),
                (lambda hidden, tp, **_: 36 * hidden * tp // 8 + 1, "You multiply by the number of ranks: b s counts "
                 "the tokens of all t ranks already."),
                (lambda hidden, layers, **_: 36 * hidden * layers // 8 + 1, "One layer against one layer: the number "
                 "of layers is on both sides."),
                (lambda hidden, **_: 6 * hidden + 1, "A reduce-scatter sends its tensor once, as a gather does: an "
                 "all-reduce sends it twice."),
                (lambda hidden, **_: 12 * hidden // 8 + 1, "ZeRO-3 moves the weights three times: gathered forward and "
                 "backward, gradients scattered."),
            )
        ),
        Mistake(
            instead(answers, zero3_sends_less_from=lambda hidden, **_: 3 * hidden + 1),
            "ZeRO-3 moves the weights three times: gathered forward and backward, gradients scattered.",
        ),
        Mistake(
            instead(answers, zero3_sends_less_from=lambda hidden, **_: 4.5 * hidden),
            "With so many tokens both send the same. Asked is the first number with which ZeRO-3 sends less.",
        ),
    ],
    idea="Each entry counts something that you have built: heads of a rank, rows of a stack, sums on the way forward, "
    "elements that travel.",
    hint="query heads: a/t of them from rank*a/t on. key/value heads: q // (a/g) of each. gate and up: rows "
    "r f/t to (r+1) f/t of the first half, and the same rows of the second. Forward: the embedding and "
    "two sums a layer. Ratio: s b V (an all-gather) to 2 * 3 s b. "
    "ZeRO-3: both send the same where 3 * 12 h^2 = 8 b s h; one token more is asked for.",
)  # fmt: skip
