"""One token of every sequence: the step that generation repeats, and its recording as a CUDA graph.

The problem in a sentence: at batch 1 a step of a 1 B-parameter model reads 2 GB, for which a GPU of 4.8 TB/s needs 0.42
milliseconds, and in that time Python cannot launch the hundreds of kernels that do so.

The step is a function of no arguments. It reads and writes tensors that stay where they are:

| place        | shape     | read as                     | written                                       |
|--------------|-----------|-----------------------------|-----------------------------------------------|
| `tokens`     | [b] int64 | the newest token            | by the step: the one it draws                 |
| positions    | [b] int64 | its place (`static_cache`)  | by the step: plus 1                           |
| `uniform`    | [b] fp64  | the draw (`sampling`)       | by the host, before each step                 |
| the cache    | [m, b, .] | keys and values             | by the step: row `position`                   |

So the answer of one step is the question of the next, and the host may be as many steps ahead as it likes. Everything
is in the recording, embedding to draw: what is left to the host is one copy of b numbers. One recording serves every
position; another number of sequences or other sampling parameters want another one.

A recording saves the launches; the many small kernels between two matrices stay. `compiled` has torch.compile fuse
them first, once for a shape. On a CPU, where nothing can be recorded, that is what helps.

What can neither be recorded nor compiled is refused: messages (tp), and experts, whose dispatcher asks how many tokens
each has got.

Megatron-LM: CUDA graphs of `megatron/core/inference/contexts/dynamic_context.py`, one for each of several batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minimegatron.cuda_graphs import Recorded, Recorder
from minimegatron.inference.checks import check_can_record
from minimegatron.inference.sampling import SamplingParams, sample
from minimegatron.inference.static_cache import StaticCache
from minimegatron.models.contract import LanguageModel

WARMUP_STEPS = 3


Tokens = tuple[torch.Tensor, torch.Tensor]


def compile_whole(run: Callable[[], Tokens]) -> Callable[[], Tokens]:
    """torch.compile, for the shapes that there are, in one piece or not at all."""
    return torch.compile(run, dynamic=False, fullgraph=True)


class DecodeStep:
    """The next token of every sequence in a cache.

    Args:
        model: see `inference.checks.check_can_generate`.
        cache: of these sequences.
        sampling: how words are drawn.
        recorder: records the step once, after `WARMUP_STEPS` real ones; None does without.
        compiled: torch.compile the step, when it is first called.

    Attributes:
        tokens, uniform: see the module docstring.

    Raises:
        ConfigError: the step cannot be recorded or compiled.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: StaticCache,
        sampling: SamplingParams,
        recorder: Recorder | None = None,
        compiled: bool = False,
    ) -> None:
        if recorder is not None or compiled:
            check_can_record(model)
        self.model = model
        self.cache = cache
        self.sampling = sampling
        self.tokens = torch.zeros_like(cache.positions)
        self.uniform = torch.zeros_like(cache.positions, dtype=torch.float64)
        self._compiled = compile_whole(self._run) if compiled else None
        self._recorded: Recorded[Tokens] | None = None if recorder is None else Recorded(WARMUP_STEPS, recorder)

    @torch.no_grad()
    def __call__(self, key_length: int | None = None) -> Tokens:
        """Draw one token for every sequence.

        Args:
            key_length: how many rows of the cache may be in use after this step, to read no others; default, and where
                the step is recorded or compiled always, all.

        Returns:
            The tokens [b] and their log-probabilities [b]; the next step overwrites both.
        """
        if self._recorded is not None:
            return self._recorded(self._compiled or self._run)
        return self._compiled() if self._compiled is not None else self._run(key_length)

    def _run(self, key_length: int | None = None) -> Tokens:
        logits = self.model.full_logits(self.tokens[:, None], inference_context=self.cache.decode(1, key_length))
        words, log_probs = sample(logits[:, 0], self.sampling, self.uniform)
        self.cache.advance(1)
        self.tokens.copy_(words)
        return self.tokens, log_probs
