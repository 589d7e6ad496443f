"""Speculative decoding: guess the next tokens cheaply, and let the model verify them all in one pass.

The problem in a sentence: a decode step reads every weight to make one token, and making five would hardly take longer.

    proposed    ... a b c | d e f        d, e, f are proposed to follow c, the newest token
    verified    one pass over c d e f gives the logits for d, e, f and for one token more
    kept        the proposals before the first rejected one, and one token drawn by the model: 1 to k + 1 a step

| method        | proposal                                                         | q                | costs          |
|---------------|------------------------------------------------------------------|------------------|----------------|
| "ngram"       | what followed when the last tokens occurred for the first time   | a point mass     | a look-up      |
| "draft_model" | by a smaller model with the same vocabulary                      | its distribution | k passes of it |
| "mtp"         | by the model's own depths (`models/mtp`), a token each           | its distribution | k layers       |

**The rule** (`verified`): rejection sampling. d was drawn from q, and the model's distribution at this place is p, both
after temperature, top-k and top-p:

    accept d with probability  min(1, p(d) / q(d)),  else draw from  max(0, p - q) / sum of it

    P(x) = q(x) min(1, p(x) / q(x)) + P(rejected) max(0, p(x) - q(x)) / sum = min(p, q) + max(0, p - q) = p(x)

So answers are distributed as without speculation, whatever q is; a bad proposer only costs time. For greedy requests p
is a point mass: d is accepted if it is the most likely token.

If q is a point mass on d, the rule becomes: draw x from p, and d is accepted if x = d. So "ngram", and greedy requests
with any method, give token for token what the engine gives without speculation.

**Random numbers.** Each place in an answer has three (`sampling.uniform`): for its proposal, its acceptance and its
token. Those of places after a rejected token had no effect, and are used again.

**How many.** At most k, fewer while proposals are rejected (`DraftLength`): a proposer that never guesses right is soon
asked once in 32 tokens. The number depends on the earlier drafts of the same sequence alone. So an answer with a seed
does not depend on other requests; and since the number is fixed before the next place is drawn, that place keeps the
distribution p.

**The draft model's pages** have the same numbers as the target's, so block tables, copies, forks and prefix caching
serve both. It computes each chunk that the target computes, then one token a pass. While it is not asked it computes
nothing, and the pass before its next proposal catches up. After a rejection both models go back to the last accepted
token. If all k are accepted, the draft model has not computed the last of them (`Sequence.lag`), and does so in the
next step; until then the page of that token is not in the prefix cache. q stays on the last stage's device, as p does.

**The depths' rows** (`models/mtp`) are in the model's own pages. After each pass of the model, all depths compute the
same tokens. The newest token, which the model has not computed yet, goes through the depths alone, in k passes on the
last stage: pass m computes one token (the newest, or the one just proposed) by the depths from m on, and depth m
proposes the next. So a depth proposes what it predicts in training, whatever was rejected before.

**CUDA graphs.** A recorded step has one new token a sequence, so a step with proposals runs without a graph.

Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318). Megatron-LM:
`megatron/core/inference/text_generation_controllers/text_generation_controller.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from minimegatron.errors import ConfigError
from minimegatron.inference.sampling import draw

Method = Literal["ngram", "draft_model", "mtp"]  # vLLM's


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """The method of proposals, and their number; vLLM's names.

    Args:
        method: see the table above.
        num_speculative_tokens: k, most proposals of a sequence in a step; fewer while they are rejected.
        prompt_lookup_max, prompt_lookup_min: of "ngram": most and fewest last tokens to look up, longest first.

    Raises:
        ConfigError: a value out of range.
    """

    method: Method = "ngram"
    num_speculative_tokens: int = 3
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"speculative method {self.method!r}", fix=f"one of {', '.join(get_args(Method))}")
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}", fix="at least 1, or speculative=None"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}",
                fix="1 <= prompt_lookup_min <= prompt_lookup_max",
            )


LONGEST_PAUSE = 5  # 2^5 - 1 tokens without a draft


@dataclasses.dataclass
class DraftLength:
    """How many tokens to propose to one sequence, from the outcome of its earlier drafts alone.

    | drafts in a row without an accepted token     | 0 | 1   | 2   | 3   | 4   | 5       | 6 and more |
    |-----------------------------------------------|---|-----|-----|-----|-----|---------|------------|
    | tokens of the next draft, at least 1          | k | k/2 | k/4 | k/8 | ... |         |            |
    | tokens generated without a draft before it    | 0 | 0   | 1   | 3   | 7   | 15      | 31         |

    Args:
        most: k.
    """

    most: int
    misses: int = 0
    resumes: int = 0  # length of the sequence at which the next draft is due

    def count(self, length: int) -> int:
        """Number of tokens to propose to the sequence at this length."""
        return 0 if length < self.resumes else max(1, self.most >> self.misses)

    def told(self, accepted: int, length: int) -> None:
        """Record the outcome of a draft: tokens accepted, and the sequence's length after it."""
        self.misses = 0 if accepted else self.misses + 1
        self.resumes = length + (1 << min(max(0, self.misses - 1), LONGEST_PAUSE)) - 1


class NGrams:
    """What followed the first occurrence of each n-gram of one sequence.

    Args:
        least, most: smallest and largest n.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._followed: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it
        self._read = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that followed the longest known n-gram at the end of `tokens`, at most `count`.

        Args:
            tokens: of the sequence; they extend those of the last call.
            count: most tokens to return.
        """
        sizes = range(self.least, self.most + 1)
        for end in range(self._read + 1, len(tokens)):
            for n in sizes:
                if n <= end:
                    self._followed.setdefault(tuple(tokens[end - n : end]), end)
        self._read = max(self._read, len(tokens) - 1)
        for n in reversed(sizes):
            at = self._followed.get(tuple(tokens[-n:]))
            if at is not None:
                return list(tokens[at : at + count])
        return []


def verified(
    p: torch.Tensor, q: torch.Tensor, proposed: torch.Tensor, u: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The token of each place: the proposed one if accepted, else a draw from max(0, p - q).

    Args:
        p, q: [r, V] fp64, the distributions of model and proposer (`sampling.distribution`).
        proposed: [r], drawn from q.
        u, v: [r] fp64 in [0, 1), random numbers of acceptance and draw.

    Returns:
        [r]; never a rejected token, since p < q there.
    """
    at = proposed[:, None]
    accepted = u * q.gather(-1, at).squeeze(-1) < p.gather(-1, at).squeeze(-1)
    more = (p - q).clamp(min=0.0)
    # No mass is left if p and q differ by rounding alone, or if q is NaN: draw from p then.
    more = torch.where(more.sum(-1, keepdim=True) > 0.0, more, p)
    return torch.where(accepted, proposed, draw(more, v))


def check_can_propose(
    config: SpeculativeConfig | None, stage: Any, draft: Any, max_model_len: int, recorded: bool
) -> None:
    """Refuse a proposer that does not fit the model.

    Args:
        config: None without speculation.
        stage: this rank's stage of the model that verifies.
        draft: the draft model, or None.
        max_model_len: most tokens of a prompt and its answer together.
        recorded: steps are recorded or compiled.

    Raises:
        ConfigError: a draft model without method "draft_model" or the reverse, another vocabulary or layout, too few
            learned positions, more proposals than the model has MTP depths, or depths that say nothing of what they
            keep or would have to be recorded.
    """
    method = None if config is None else config.method
    if (draft is not None) != (method == "draft_model"):
        raise ConfigError(
            f"speculative method {method!r} {'without' if draft is None else 'with'} a draft model",
            fix='method "draft_model" and Engine(model, config, draft=...) together',
        )
    depths = stage.config.mtp_num_layers or 0
    if config is not None and method == "mtp" and config.num_speculative_tokens > depths:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, and the model has {depths} depths of "
            "multi-token prediction, a token each",
            fix=f"at most {depths}" if depths else 'method "ngram", or "draft_model" with a smaller model',
        )
    if method == "mtp" and recorded:
        raise ConfigError(
            'speculative method "mtp" with recorded or compiled steps: these hold no passes of its depths',
            fix="neither recorder nor compiled",
        )
    if method == "mtp" and not hasattr(stage, "prediction_state"):
        raise ConfigError(
            f'speculative method "mtp" with a {type(stage).__name__}, which does not say what its depths keep',
            fix="another method, or give the class `prediction_state` and `predicted` (models/contract)",
        )
    if draft is None:
        return
    if draft.config.vocab_size != stage.config.vocab_size:
        raise ConfigError(
            f"a draft model of {draft.config.vocab_size} words for a model of {stage.config.vocab_size}",
            fix="a draft model with the same tokenizer",
        )
    for name in ("tp", "pp", "ep"):
        mine, its = getattr(stage.mesh, name).size, getattr(draft.mesh, name).size
        if mine != its:
            raise ConfigError(
                f"the model has {name} = {mine} and the draft model {name} = {its}: each rank computes a part of both",
                fix="the same layout for both; weights are loaded into any layout",
            )
    most = draft.config.max_position_embeddings
    if max_model_len > most and draft.config.position_embedding_type == "learned_absolute":
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the draft model has {most} learned positions",
            fix=f"max_model_len of at most {most}",
        )
