"""From the logits of a batch to its `Result`: penalties, grammar masks, draws, verification, log-probabilities.

The last pipeline stage calls `result_of`. `sampling` defines a draw, `speculative` the verification of a proposal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from minimegatron.inference.grammar import unpacked
from minimegatron.inference.plan import Batch, Draw, Result
from minimegatron.inference.sampling import Rows, SamplingParams, distribution, log_probabilities, penalise, sample
from minimegatron.inference.sequence import Ranked
from minimegatron.inference.speculative import verified


def plain_and_changed(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of each draw, from the wanted logits [k, V]: (the model's own, after penalties and grammar masks).

    Both are [r, V]; without penalties, bans and grammars they are the same tensor.
    """
    at, device = [draw.at for draw in draws], logits.device
    plain = logits if at == list(range(len(logits))) else logits[torch.tensor(at, device=device)]
    special = [i for i, draw in enumerate(draws) if draw.params.penalises or draw.banned or draw.allowed]
    if not special:
        return plain, plain
    changed = plain.to(torch.promote_types(plain.dtype, torch.float32)).clone()
    for i in special:
        penalise(changed[i], draws[i].params, *draws[i].history)
        changed[i, torch.tensor(draws[i].banned, dtype=torch.int64, device=device)] = -math.inf
    bounded = {i: allowed for i in special if (allowed := draws[i].allowed) is not None}
    if bounded:
        mask = unpacked(list(bounded.values()), changed.shape[-1], device)
        rows = torch.tensor(list(bounded), device=device)
        changed[rows] = changed[rows].masked_fill(~mask, -math.inf)
    return plain, changed


def shares_of(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The distribution that each row of logits [r, V] is drawn from, [r, V] fp64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return distribution(wide, Rows.of(params, logits.device))


def judged(
    tokens: torch.Tensor,
    changed: torch.Tensor,
    u: torch.Tensor,
    draws: Sequence[Draw],
    shares: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """The token of each draw, [r]: `tokens` as they are; where a token was proposed, the outcome of its verification.

    Args:
        tokens: [r], drawn with `u` from `changed`.
        changed: [r, V], logits after penalties and grammar masks.
        u: [r] fp64, of the draws.
        draws: r of them.
        shares: of each pass of the proposer, what its proposals were drawn from, [rows, V].
    """
    proposals = {i: draw.proposal for i, draw in enumerate(draws) if draw.proposal is not None}
    if not proposals:
        return tokens
    some = torch.tensor(list(proposals), device=tokens.device)
    p = shares_of(changed[some], [draws[i].params for i in proposals])
    q = []
    for proposal in proposals.values():
        number, row = proposal.at
        kept = shares[number]
        assert kept is not None, "a token was proposed from no distribution"
        q.append(kept[row])
    proposed = torch.tensor([proposal.token for proposal in proposals.values()], device=tokens.device)
    verdicts = torch.tensor([each.u for each in proposals.values()], dtype=torch.float64, device=tokens.device)
    return tokens.index_copy(0, some, verified(p, torch.stack(q), proposed, verdicts, u[some]))


def result_of(logits: torch.Tensor, batch: Batch, shares: Sequence[torch.Tensor | None] = ()) -> Result:
    """Draw and score from the wanted logits [k, V] of a batch; for `shares` see `judged`."""
    draws, device = batch.draws, logits.device
    result = Result([], [math.nan] * len(draws), [()] * len(draws), [], [])
    if draws:
        plain, changed = plain_and_changed(logits, draws)
        u = torch.tensor([draw.u for draw in draws], dtype=torch.float64, device=device)
        tokens = judged(sample(changed, Rows.of([draw.params for draw in draws], device), u), changed, u, draws, shares)
        finite = plain.amax(-1).isfinite()
        result.tokens.extend(tokens.tolist())
        result.finite.extend(finite.tolist())
        asked = [i for i, draw in enumerate(draws) if draw.log_probs is not None]
        if asked:
            some = torch.tensor(asked, device=device)
            heat = [1.0 if draws[i].raw else draws[i].params.temperature for i in asked]
            most = max(draws[i].log_probs or 0 for i in asked)
            found = scored(plain[some], tokens[some], heat, most)
            for i, (value, top) in zip(asked, found, strict=True):
                result.log_probs[i], result.top[i] = value, top[: draws[i].log_probs or 0]
    if batch.scores:
        some = torch.tensor([score.at for score in batch.scores], device=device)
        tokens = torch.tensor([score.token for score in batch.scores], device=device)
        heat, most = [score.temperature for score in batch.scores], max(score.top for score in batch.scores)
        found = scored(logits[some], tokens, heat, most)
        result.scores.extend((value, top[: s.top]) for (value, top), s in zip(found, batch.scores, strict=True))
    return result


def scored(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: Sequence[float], most: int
) -> list[tuple[float, Ranked]]:
    """For each row of logits [r, V]: (log-probability of its token, the `most` most likely tokens with theirs)."""
    heat = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    values = log_probabilities(logits, tokens, heat).tolist()
    if not most:
        return [(value, ()) for value in values]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / heat[:, None].to(logits.dtype)
    best, ids = logits.log_softmax(-1).topk(min(most, logits.shape[-1]), -1)
    return [
        (value, tuple(zip(names, likely, strict=True)))
        for value, names, likely in zip(values, ids.tolist(), best.tolist(), strict=True)
    ]
