"""From logits to a token: which tokens may be drawn, the draw, and how likely the model found it.

The problem in a sentence: the most likely token at every place makes dull text, and a token of all 128 k now and then
makes nonsense; so one draws, from the likely ones.

    l                                    penalised where tokens have occurred (`penalise`)
    p = softmax(l / T)                   T < 1 sharpens, T > 1 flattens
    top_k                                of these the k most likely (and what equals the k-th)
    top_p                                of these the smallest set of most likely tokens with a mass of at least p
    min_p                                of these the ones with at least min_p times the likelihood of the first
    token = first i with  p_1 + ... + p_i > u            u uniform in [0, 1): the inverse of the distribution function

They restrict each other in this order, as in Hugging Face; top_k = 1 is greedy and draws nothing.

**Who draws.** u is made on the host, a function of the request's seed, the number of the answer and the place in it;
the rest is arithmetic on the device. So a sequence gets its tokens whatever else is in the batch and whenever its turn
comes, every rank of tp gets the same (they hold the same logits), a run can be repeated on another device, and a CUDA
graph needs no generator.

**Log-probabilities** are those of softmax(l / T) of the model's own logits, before anything is left out or penalised:
what a teacher-forced pass at the same temperature gives, and what a policy gradient compares. Greedy has T = 1. A
request may ask for those of softmax(l) (`raw_log_probs`).

Each row of a batch has parameters of its own (`Rows`), as tensors: one recording of a step serves any of them.

**Few candidates.** To sort a row of V logits costs more than a layer of a small model. Where every row leaves something
out, the most likely tokens are found without sorting the rest, and everything else is done with these alone
(`candidates`): the largest top_k and some more, `NUCLEUS` where a row has only top_p or min_p. Should they not be all
that such a row keeps, which is seen by their mass and by the last of them, the rows are sorted.

Holtzman et al. 2020 (arXiv 1904.09751). Megatron-LM: `megatron/core/inference/sampling_params.py`, and `sample` in
`text_generation_controllers/text_generation_controller.py` (there top_k and top_p exclude each other).
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
    """Which tokens may be drawn.

    Args:
        temperature: T.
        top_k: how many of the most likely tokens; 0 for all, 1 for greedy.
        top_p: mass of the most likely tokens, in (0, 1]; 0 or 1 for all (0 is Megatron's default).
        min_p: least likelihood, as a share of the most likely token's; 0 for any.
        repetition_penalty: logits of tokens of prompt and answer are divided by it where above 0, else multiplied
            (Keskar et al. 2019, arXiv 1909.05858).
        presence_penalty: taken from the logits of tokens of the answer.
        frequency_penalty: taken from them for each time that they occur.
        logit_bias: (id, what is added to its logit).

    Raises:
        ConfigError: a value that is out of range, or one that greedy would ignore.
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
        """Whether the most likely token is taken."""
        return self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether logits are changed before anything else."""
        changes = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return changes or bool(self.logit_bias)


GREEDY = SamplingParams(top_k=1)
NUCLEUS = 256  # candidates of a row without a top_k: as many as hold 0.95 of what a trained model expects


def uniform(seed: int, answer: int, place: int, of: str = "") -> float:
    """u of token `place` of an answer, in [0, 1): a function of these three numbers, and of what is drawn, alone."""
    digest = hashlib.blake2b(f"{seed}:{answer}:{place}{of}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


@dataclasses.dataclass(frozen=True)
class Rows:
    """The parameters of each row of a batch.

    Attributes:
        temperature, top_p, min_p: [r] fp64; top_k: [r] int64, each 0 for none.
        greedy: [r] bool.
        all_greedy, filters: on the host: nothing is drawn; something is left out.
        counted: on the host: every row has a top_k.
        most: on the host: how many candidates hold what any row keeps, as far as one can know; 0 where a row keeps all.
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
        """From one for each row."""

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
    """Change one row of logits [V] by what has occurred, in place."""
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
    """logits [r, V] -> logits / T, with minus infinity for tokens that may not be drawn.

    Args:
        logits: of all tokens, or of the `candidates`.
        rows: which may be drawn.
        rest: [r], logarithm of what e^(l / T) of all other tokens add up to; default there are none.
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
    before = share.cumsum(-1) - share  # mass of all more likely tokens; 0 for the first, which always stays
    limits = (rows.top_p > 0.0) & (rows.top_p < 1.0)
    leave = (before >= rows.top_p[:, None].to(share.dtype)) & limits[:, None]
    leave |= share < (rows.min_p[:, None] * share[:, :1]).to(share.dtype)
    return logits.masked_fill((logits < least) | torch.zeros_like(leave).scatter(-1, tokens, leave), -math.inf)


def distribution(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """logits [r, V] -> the likelihood with which each token is drawn, [r, V] fp64."""
    shares = filtered(logits, rows).softmax(-1).double()
    if rows.all_greedy or bool(rows.greedy.any()):
        best = torch.zeros_like(shares).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        shares = torch.where(rows.greedy[:, None], best, shares)
    return shares


SPARE = 32  # candidates beyond the largest top_k: as many logits may equal a k-th
Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def candidates(logits: torch.Tensor, rows: Rows) -> Candidates | None:
    """The logits [r, c] that `filtered` could keep, in the order of their tokens, these, and its `rest`.

    None where c = V is less work, or would be needed. The host waits for the answer.
    """
    count = rows.most + SPARE
    if not rows.most or 4 * count > logits.shape[-1]:
        return None
    found, tokens = logits.topk(count, dim=-1)
    heat = rows.temperature[:, None].to(logits.dtype)
    tempered = found / heat  # by which different logits can become equal
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
    """The first token with a mass of more than u before and in it: shares [r, V], not normalised, and u [r] -> [r]."""
    mass = shares.double().cumsum(-1)
    target = u[:, None] * mass[:, -1:]  # below the whole mass, however it was rounded: u is below 1
    tokens = torch.searchsorted(mass, target, right=True).squeeze(-1)
    return tokens.clamp(max=shares.shape[-1] - 1)  # logits that are no numbers: the caller will say so


def sample(logits: torch.Tensor, rows: Rows, u: torch.Tensor) -> torch.Tensor:
    """Draw one token for every row; nothing comes to the host but whether `candidates` are enough.

    Args:
        logits: [r, V], the same on every rank of tp; in less than fp32 they are computed with in fp32.
        rows: which tokens may be drawn.
        u: [r] fp64 in [0, 1), see `uniform`; greedy ignores it.

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
    """Which of the logits [r, c]: see `sample` and `filtered`."""
    return torch.where(rows.greedy, logits.argmax(-1), draw(filtered(logits, rows, rest).softmax(-1), u))


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """Of tokens [r] under logits [r, V]: [r], in fp32 or the logits' wider dtype, at a temperature [r]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, tokens[:, None])
    if temperature is not None:
        t = temperature[:, None].to(logits.dtype)
        logits, chosen = logits / t, chosen / t
    return (chosen - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
