"""Speculative decoding: guess the next tokens cheaply, and let the model verify them all in one pass.

The problem in a sentence: a decode step reads every weight to make one token, and would take hardly longer for five.

    tokens      ... a b c | d e f        d, e, f are proposed behind c, the newest token
    verified    one pass over c d e f gives the logits of d, e, f and of one more
    kept        the proposals up to the first that is rejected, and one token of the model's own: 1 to k + 1 a step

| method        | who proposes                                                     | q                | costs          |
|---------------|------------------------------------------------------------------|------------------|----------------|
| "ngram"       | what followed when the last tokens occurred for the first time   | a point mass     | a look-up      |
| "draft_model" | a smaller model with the same vocabulary                         | its distribution | k passes of it |
| "mtp"         | the model's own depths (`models/mtp`), each a token              | its distribution | k layers of it |

**The rule** (`verified`). d was drawn from q, and the model has p in its place, both after temperature, top-k, top-p:

    accept d with probability  min(1, p(d) / q(d)),  else draw from  max(0, p - q) / sum of it

    P(x) = q(x) min(1, p(x) / q(x)) + P(rejected) max(0, p(x) - q(x)) / sum = min(p, q) + max(0, p - q) = p(x)

So words are distributed as without speculation, whoever proposes; a bad proposer costs time only. Greedy is a point
mass p: accepted is what is the most likely token.

Where q is a point mass on d, the rule is: draw x from p; x = d is an acceptance, any other x is a draw from p without
d. So "ngram", and greedy with any method, give token for token what the engine gives without speculation.

**Draws.** A place in an answer has three numbers of its own (`sampling.uniform`): for its proposal, for the verdict and
for its token. The numbers of a proposal behind a rejected one have decided nothing, so they serve again. How many
tokens are proposed depends on the sequence alone: with a seed, an answer does not depend on its neighbours.

**How many.** k at most, and fewer where they are rejected (`DraftLength`): a proposer that never guesses right is soon
asked once in 32 tokens. The count is a function of what became of the sequence's own drafts before, so it depends on no
neighbour; and because it is known before the numbers of the next place are drawn, that place keeps the distribution p.

**The draft model's pages** have the numbers of the target's, so tables, copies, forks and prefix reuse serve both. It
computes each chunk that the target computes, and after that one token a pass; in a pause it computes nothing, and all
that it has missed at once in the pass that ends the pause. After a rejection both counts go back to
the last accepted token. If all k are accepted the draft model lacks the last of them (`Sequence.lag`) and computes it
in the next step; until then nobody else finds a page with it. q stays on the device of the last stage, where p is.

**The depths' rows** (`models/mtp`) lie in the same pages as the model's own. A step of the model ends with all depths
over the tokens that it has computed; the newest token, which nobody has computed, goes through the depths alone, in k
passes on the last stage: in pass m the depths from m on compute one more row, and depth m proposes. So a proposal is
what the depth would give in training, whatever was rejected before.

**Not recorded.** A step with a proposal has several new tokens of a sequence, so a CUDA graph of one token each does
not serve it. Steps without any are recorded as ever.

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
    """Who proposes tokens, and how many; vLLM's names.

    Args:
        method: see the table above.
        num_speculative_tokens: k, proposals of a sequence in a step at most; fewer where they are rejected.
        prompt_lookup_max, prompt_lookup_min: of "ngram": how many last tokens are looked for, the longest first.

    Raises:
        ConfigError: a value that is out of range.
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


LONGEST_PAUSE = 5  # 2^5 - 1 tokens


@dataclasses.dataclass
class DraftLength:
    """How many tokens are proposed to one sequence, from what became of its drafts alone.

    | drafts in a row of which nothing was accepted | 0 | 1   | 2   | 3   | 4   | 5       | 6 and more |
    |-----------------------------------------------|---|-----|-----|-----|-----|---------|------------|
    | tokens of the next one, at least 1            | k | k/2 | k/4 | k/8 | ... |         |            |
    | tokens before it without one                  | 0 | 0   | 1   | 3   | 7   | 15      | 31         |

    Args:
        most: k.
    """

    most: int
    misses: int = 0
    resumes: int = 0  # once the sequence has so many tokens

    def count(self, length: int) -> int:
        """How many to propose behind so many tokens."""
        return 0 if length < self.resumes else max(1, self.most >> self.misses)

    def told(self, accepted: int, length: int) -> None:
        """So many were accepted of a draft; the sequence has so many tokens now."""
        self.misses = 0 if accepted else self.misses + 1
        self.resumes = length + (1 << min(max(0, self.misses - 1), LONGEST_PAUSE)) - 1


class NGrams:
    """What has followed each n-gram of one sequence, the first time.

    Args:
        least, most: n.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._followed: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it
        self._read = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens, which followed the longest n-gram at the end of `tokens`.

        Args:
            tokens: of the sequence; only ever more than in the last call.
            count: at most so many.
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
    """The token of each place: the proposed one where it is accepted, else a draw from what p has more than q.

    Args:
        p, q: [r, V] fp64, of the model and of the proposer, as drawn from (`sampling.distribution`).
        proposed: [r], drawn from q.
        u, v: [r] fp64 in [0, 1), for the verdict and for the draw.

    Returns:
        [r]. A rejected token is never what it gives: there p < q.
    """
    at = proposed[:, None]
    accepted = u * q.gather(-1, at).squeeze(-1) < p.gather(-1, at).squeeze(-1)
    more = (p - q).clamp(min=0.0)
    # Nothing is left where p = q but for rounding, or where q is no number: then p itself is drawn from.
    more = torch.where(more.sum(-1, keepdim=True) > 0.0, more, p)
    return torch.where(accepted, proposed, draw(more, v))


def check_can_propose(config: SpeculativeConfig | None, model: Any, draft: Any, max_model_len: int) -> None:
    """Refuse a draft model that does not go with the method, with the model, or with the longest sequence; and depths
    that are not there.

    Args:
        config: None for no speculation.
        model: whose tokens are proposed.
        draft: the draft model, or None.
        max_model_len: longest prompt and answer together.

    Raises:
        ConfigError: as it says.
    """
    method = None if config is None else config.method
    if (draft is not None) != (method == "draft_model"):
        raise ConfigError(
            f"speculative method {method!r} {'without' if draft is None else 'with'} a draft model",
            fix='method "draft_model" and Engine(model, config, draft=...) together',
        )
    depths = model.config.mtp_num_layers or 0
    if config is not None and method == "mtp" and config.num_speculative_tokens > depths:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, and the model has {depths} depths of "
            "multi-token prediction, a token each",
            fix=f"at most {depths}" if depths else 'method "ngram", or "draft_model" with a smaller model',
        )
    if draft is None:
        return
    if draft.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"a draft model of {draft.config.vocab_size} words for a model of {model.config.vocab_size}",
            fix="a draft model with the same tokenizer",
        )
    for name in ("tp", "pp", "ep"):
        mine, its = getattr(model.mesh, name).size, getattr(draft.mesh, name).size
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
