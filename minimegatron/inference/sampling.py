"""From logits to a token: which tokens may be drawn, the draw, and how likely the model found it.

The problem in a sentence: the most likely token at every place makes dull text, and a token of all 128 k now and then
makes nonsense; so one draws, from the likely ones.

    p = softmax(l / T)                   T < 1 sharpens, T > 1 flattens
    top_k                                of these the k most likely (and what equals the k-th)
    top_p                                of these the smallest set of most likely tokens with a mass of at least p
    token = first i with  p_1 + ... + p_i > u            u uniform in [0, 1): the inverse of the distribution function

The three restrict each other in this order, as in Hugging Face; top_k = 1 is greedy and draws nothing.

**Who draws.** u is made on the host, from a seed and the number of the sequence, for all its tokens at once; the rest
is arithmetic on the device. So a sequence gets its tokens whatever else is in the batch, every rank of tp gets the same
(they hold the same logits), a run can be repeated on another device, and a CUDA graph needs no generator.

**Log-probabilities** are those of softmax(l / T), before anything is left out: what a teacher-forced pass at the same
temperature gives, and what a policy gradient compares. Greedy has T = 1.

Holtzman et al. 2020 (arXiv 1904.09751). Megatron-LM: `megatron/core/inference/sampling_params.py`, and `sample` in
`text_generation_controllers/text_generation_controller.py` (there top_k and top_p exclude each other).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch

from minimegatron.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Which tokens may be drawn.

    Args:
        temperature: T.
        top_k: how many of the most likely tokens; 0 for all, 1 for greedy.
        top_p: mass of the most likely tokens, in (0, 1]; 0 or 1 for all (0 is Megatron's default).

    Raises:
        ConfigError: a value that is out of range, or one that greedy would ignore.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature is {self.temperature}", fix="a number above 0; top_k=1 is greedy")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}", fix="a whole number, 0 for all tokens")
        if not 0.0 <= self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}", fix="a share of 1, such as 0.9; 0 or 1 for all tokens")
        if self.greedy and (self.temperature != 1.0 or 0.0 < self.top_p < 1.0):
            raise ConfigError(
                f"top_k=1 is greedy, and temperature={self.temperature}, top_p={self.top_p} would change nothing",
                fix="leave them out, or another top_k",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.top_k == 1


GREEDY = SamplingParams(top_k=1)


def uniforms(seed: int, sequence: int, count: int) -> torch.Tensor:
    """u of the first `count` tokens of a sequence: [count] fp64 in [0, 1), a function of (seed, sequence) alone."""
    digest = hashlib.blake2b(f"{seed}:{sequence}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """logits [b, V] -> logits / T, with minus infinity for tokens that may not be drawn."""
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if 0.0 < params.top_p < 1.0:
        ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
        share = ordered.softmax(-1)
        before = share.cumsum(-1) - share  # mass of all more likely tokens; 0 for the first, which always stays
        leave = torch.zeros_like(before, dtype=torch.bool).scatter(-1, tokens, before >= params.top_p)
        logits = logits.masked_fill(leave, -math.inf)
    return logits


def sample(logits: torch.Tensor, params: SamplingParams, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for every sequence; nothing comes to the host.

    Args:
        logits: [b, V], the same on every rank of tp; in less than fp32 they are computed with in fp32.
        params: which tokens may be drawn.
        u: [b] fp64 in [0, 1), see `uniforms`; greedy ignores it.

    Returns:
        Words [b] int64, and their log-probabilities [b] (see the module docstring), in fp32 or the logits' wider dtype.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if params.greedy:
        tokens = logits.argmax(-1)
    else:
        mass = filtered(logits, params).softmax(-1).double().cumsum(-1)
        target = u[:, None] * mass[:, -1:]  # below the whole mass, however it was rounded: u is below 1
        tokens = torch.searchsorted(mass, target, right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # logits that are no numbers: the caller will say so
    log_probs = (logits if params.temperature == 1.0 else logits / params.temperature).log_softmax(-1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)
