"""From logits to a token: penalties, filters, the draw, and the token's log-probability.

The problem in a sentence: always taking the most likely token makes dull text, and drawing from all 128 k tokens makes
nonsense now and then; so one draws from the likely ones.

    l                         logits, penalised where a token has occurred (`penalise`)
    p = softmax(l / T)        T < 1 sharpens, T > 1 flattens
    top_k                     keeps the k most likely tokens (and those as likely as the k-th)
    top_p                     of these keeps the smallest set of most likely tokens whose mass is at least top_p
    min_p                     of these keeps those at least min_p times as likely as the first
    token                     the first i with  p_1 + ... + p_i > u,  u uniform in [0, 1): inverse transform sampling

The filters apply in this order, as in Hugging Face; top_k = 1 is greedy and draws nothing.

**Random numbers.** u is computed on the host, from (seed of the request, number of the answer, position in it) alone.
So a sequence gets the same tokens whatever else is in the batch, tp ranks (with equal logits) draw the same token
without a message, a run can be repeated on another device, and a CUDA graph needs no generator.

**Log-probabilities** are those of softmax(l / T) of the model's own logits, without penalties and filters: what a
teacher-forced pass at the same temperature gives, and what a policy gradient compares. Greedy has T = 1. A request may
ask for softmax(l) in place (`raw_log_probs`).

Each row of a batch has its own parameters, as tensors (`Rows`), so one recorded step serves any of them.

**Few candidates.** Sorting a row of V logits costs more than a layer of a small model. If every row has a filter,
`torch.topk` finds the most likely tokens, and filters and draw use these alone (`candidates`): the largest top_k and
some more, `NUCLEUS` for rows with only top_p or min_p. If they miss a token that some row keeps, which their mass and
the least likely of them show, all rows are sorted after all.

Holtzman et al. 2020 (arXiv 1904.09751). Megatron-LM: `megatron/core/inference/sampling_params.py`, and `sample` in
`text_generation_controller.py` in `megatron/core/inference/text_generation_controllers` (there top_k and top_p exclude
each other).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import torch

from minimegatron.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn.

    Args:
        temperature: T.
        top_k: keep the k most likely tokens; 0: all, 1: greedy.
        top_p: keep the most likely tokens with this mass; 0 or 1: all (0 is Megatron's default).
        min_p: keep tokens with at least this share of the most likely one's probability; 0: all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or answer, not
            in the source of an encoder-decoder (Keskar et al. 2019, arXiv 1909.05858).
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted from them once for each occurrence.
        logit_bias: (id, number added to its logit) pairs.

    Raises:
        ConfigError: a value out of range, or one that greedy would ignore.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature is {self.temperature}", fix="a number above 0; top_k=1 is greedy")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}", fix="a whole number, 0 for all tokens")
        if not 0.0 <= self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}", fix="a share of 1, such as 0.9; 0 or 1 for all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p is {self.min_p}", fix="a share of 1, such as 0.05; 0 for all tokens")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}", fix="a number above 0; 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}", fix="a number; 0 for none")
        if self.greedy and (self.temperature != 1.0 or 0.0 < self.top_p < 1.0 or self.min_p):
            raise ConfigError(
                f"top_k=1 is greedy, and temperature={self.temperature}, top_p={self.top_p}, min_p={self.min_p} would "
                "change nothing",
                fix="leave them out, or another top_k",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether `penalise` changes logits."""
        changes = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return changes or bool(self.logit_bias)


GREEDY = SamplingParams(top_k=1)
NUCLEUS = 256  # candidates of a row without a top_k: these hold 0.95 of the mass in a trained model


def uniform(seed: int, answer: int, place: int, of: str = "") -> float:
    """The random number in [0, 1) for token `place` of an answer; `of` names its purpose (see `speculative`)."""
    digest = hashlib.blake2b(f"{seed}:{answer}:{place}{of}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


@dataclasses.dataclass(frozen=True)
class Rows:
    """The sampling parameters of each row of a batch.

    Attributes:
        temperature, top_p, min_p: [r] fp64; top_k: [r] int64; 0: no filter.
        greedy: [r] bool.
        all_greedy: on the host, whether every row is greedy.
        filters: on the host, whether some row has a filter.
        counted: on the host, whether every row has a top_k.
        most: on the host, the number of `candidates` that most likely hold what any row keeps; 0 if a row keeps all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    greedy: torch.Tensor
    all_greedy: bool
    filters: bool
    counted: bool = False
    most: int = 0

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> Rows:
        """From the parameters of each row."""

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([getattr(each, name) for each in params], dtype=dtype, device=device)

        drawn = [each for each in params if not each.greedy]
        few = [each.top_k or (NUCLEUS if 0.0 < each.top_p < 1.0 or each.min_p else 0) for each in params]
        return cls(
            column("temperature", torch.float64),
            column("top_k", torch.int64),
            column("top_p", torch.float64),
            column("min_p", torch.float64),
            column("greedy", torch.bool),
            all_greedy=not drawn,
            filters=any(each.top_k or 0.0 < each.top_p < 1.0 or each.min_p for each in drawn),
            counted=all(each.top_k for each in params),
            most=max(few) if all(few) else 0,
        )


def penalise(logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Apply penalties and `logit_bias` to one row of logits [V], in place."""
    device = logits.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *answer}), device=device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(answer, device=device), return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    if params.logit_bias:
        ids = torch.tensor([token for token, _ in params.logit_bias], device=device)
        logits[ids] += torch.tensor([bias for _, bias in params.logit_bias], dtype=logits.dtype, device=device)


def filtered(logits: torch.Tensor, rows: Rows, rest: torch.Tensor | None = None) -> torch.Tensor:
    """logits [r, V] -> logits / T, with -inf for tokens that are filtered out.

    Args:
        logits: of all tokens, or of the `candidates`.
        rows: the filters.
        rest: [r], logsumexp of logits / T over all other tokens; None without others.
    """
    logits = logits / rows.temperature[:, None].to(logits.dtype)
    if not rows.filters:
        return logits
    size = logits.shape[-1]
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    last = torch.where(rows.top_k == 0, size, rows.top_k.clamp(max=size)) - 1
    least = ordered.gather(-1, last[:, None])
    share = ordered.masked_fill(ordered < least, -math.inf)
    share = share.softmax(-1) if rest is None else torch.cat([share, rest[:, None]], -1).softmax(-1)[:, :-1]
    before = share.cumsum(-1) - share  # mass of all more likely tokens; 0 for the first, which is always kept
    limits = (rows.top_p > 0.0) & (rows.top_p < 1.0)
    leave = (before >= rows.top_p[:, None].to(share.dtype)) & limits[:, None]
    leave |= share < (rows.min_p[:, None] * share[:, :1]).to(share.dtype)
    return logits.masked_fill((logits < least) | torch.zeros_like(leave).scatter(-1, tokens, leave), -math.inf)


def distribution(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """logits [r, V] -> the probabilities that tokens are drawn with, [r, V] fp64; one-hot for greedy rows."""
    shares = filtered(logits, rows).softmax(-1).double()
    if rows.all_greedy or bool(rows.greedy.any()):
        best = torch.zeros_like(shares).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        shares = torch.where(rows.greedy[:, None], best, shares)
    return shares


SPARE = 32  # candidates beyond the largest top_k, for logits equal to the k-th
Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def candidates(logits: torch.Tensor, rows: Rows) -> Candidates | None:
    """(logits [r, c] of the most likely tokens, in the order of ids; these ids [r, c]; `rest` for `filtered`).

    None if c candidates miss a token that some row keeps, or if V is too small to gain. The host reads the device.
    """
    count = rows.most + SPARE
    if not rows.most or 4 * count > logits.shape[-1]:
        return None
    found, tokens = logits.topk(count, dim=-1)
    heat = rows.temperature[:, None].to(logits.dtype)
    tempered = found / heat  # the division can make different logits equal
    last, rest = tempered[:, -1], None
    enough = tempered.gather(-1, rows.top_k.clamp(min=1)[:, None] - 1).squeeze(-1) > last
    if not rows.counted:
        whole = (logits / heat).logsumexp(-1)
        mass = (tempered.logsumexp(-1) - whole).exp().clamp(max=1.0)
        holds = (mass >= rows.top_p) & (rows.top_p > 0.0) & (rows.top_p < 1.0)
        holds |= last - tempered[:, 0] < rows.min_p.log()
        enough = torch.where(rows.top_k > 0, enough, holds)
        rest = torch.where(rows.top_k > 0, -math.inf, whole + torch.log1p(-mass))
    if not bool(enough.all()):
        return None
    tokens, order = tokens.sort(dim=-1)
    return found.gather(-1, order), tokens, rest


def draw(shares: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative share exceeds u: shares [r, V], not normalised, u [r] -> [r]."""
    mass = shares.double().cumsum(-1)
    target = u[:, None] * mass[:, -1:]  # below the whole mass in spite of rounding, since u < 1
    tokens = torch.searchsorted(mass, target, right=True).squeeze(-1)
    return tokens.clamp(max=shares.shape[-1] - 1)  # with NaN logits, which the caller reports


def sample(logits: torch.Tensor, rows: Rows, u: torch.Tensor) -> torch.Tensor:
    """Draw one token for every row. The host reads the device once, for whether `candidates` suffice.

    Args:
        logits: [r, V], the same on every tp rank; computed in fp32 or their wider dtype.
        rows: sampling parameters.
        u: [r] fp64 in [0, 1), see `uniform`; ignored by greedy rows.

    Returns:
        [r] int64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if rows.all_greedy:
        return logits.argmax(-1)
    if (few := candidates(logits, rows)) is not None:
        logits, tokens, rest = few
        return tokens.gather(-1, _drawn(logits, rows, u, rest)[:, None]).squeeze(-1)
    return _drawn(logits, rows, u)


def _drawn(logits: torch.Tensor, rows: Rows, u: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
    """The index drawn from each row of logits [r, c]: see `sample` and `filtered`."""
    return torch.where(rows.greedy, logits.argmax(-1), draw(filtered(logits, rows, rest).softmax(-1), u))


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities [r] of tokens [r] under logits [r, V] / temperature [r], in fp32 or the logits' wider dtype."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, tokens[:, None])
    if temperature is not None:
        t = temperature[:, None].to(logits.dtype)
        logits, chosen = logits / t, chosen / t
    return (chosen - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
