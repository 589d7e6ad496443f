"""Our engine as a model of lm-evaluation-harness (`pip install lm-eval`).

    from lm_eval import simple_evaluate
    simple_evaluate(Harness(engine, tokenizer), tasks=["arc_easy"])

What the harness asks is one of three things: how likely is this continuation, how likely is this text, how does this
text go on. The first two are `likelihood`; the third is greedy, or drawn, and ends before one of the texts of `until`.
Its `bootstrap_iters` and the tasks' own measures are the harness's. All ranks of a layout run the same evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import ConfigError
from minimegatron.evaluation.likelihood import Likelihood, Rows, pair_request, prefix, text_requests
from minimegatron.inference.answers import ending, watcher
from minimegatron.inference.engine import Engine
from minimegatron.inference.generate import complete
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.sequence import Request

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Harness(TemplateLM):
    """See the module.

    Args:
        engine: of `likelihood.engine_of`.
        tokenizer: reads special tokens in a text as tokens.
    """

    def __init__(self, engine: Engine, tokenizer: HuggingFaceTokenizer) -> None:
        super().__init__()
        self.engine, self.words = engine, tokenizer
        self.rows = Rows(engine.model.config, engine.max_model_len)
        self.backend = "seq2seq" if self.rows.halves else "causal"  # whether an answer's ids are its own

    @property
    def eot_token_id(self) -> int:
        return self.words.eod

    @property
    def prefix_token_id(self) -> int:
        return prefix(self.words)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; it begins as the tokenizer does, unless it spells that token itself."""
        begins = self.words.named.get("bos_token")
        if add_special_tokens is None and begins and string.startswith(begins):
            add_special_tokens = False
        return self.words.tokenize(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [pair_request(before, added, self.rows) for _, before, added in requests]
        return [(found.log_prob, found.greedy) for found in self._likelihoods(asked)]

    def _likelihoods(self, asked: Sequence[Request]) -> list[Likelihood]:
        return [Likelihood.of(answer) for (answer,) in complete(self.engine, asked)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text; the harness gives an encoder the one token before a window."""
        window = self.rows.most + 1
        of_text = [text_requests(each.args[0], self.words, self.rows, window=window) for each in requests]
        found = iter(self._likelihoods([window for windows in of_text for window in windows]))
        return [sum(next(found).log_prob for _ in windows) for windows in of_text]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """How each text goes on."""
        return [self._continued(*each.args) for each in requests]

    def _continued(self, context: str, asked: dict[str, Any]) -> str:
        most = next((int(asked[name]) for name in LIMITS if name in asked), 256)
        heat = float(asked.get("temperature") or 0.0) if asked.get("do_sample") else 0.0
        until = asked.get("until") or []
        stops = [until] if isinstance(until, str) else [text for text in until if text]
        room = self.rows.context(most)
        if room < 1:
            raise ConfigError(f"{most} new tokens, and a request has {self.rows.room}", fix="fewer tokens")
        sampling = SamplingParams(heat, top_p=asked.get("top_p", 1.0)) if heat else GREEDY
        prompt = self.rows.config.prompt_of(self.tok_encode(context)[-room:])
        request = Request(tuple(prompt), most, sampling, frozenset({self.eot_token_id}))
        ((answer,),) = complete(self.engine, [request], watcher(self.engine, self.words, stops, None))
        return ending(answer, self.words, stops)[0]


def tasks_of(
    engine: Engine,
    tokenizer: HuggingFaceTokenizer,
    tasks: Sequence[str],
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """The figures of each task.

    Args:
        engine, tokenizer: see `Harness`.
        tasks: names, or names of groups.
        include_path: a folder with further tasks.
        num_fewshot: examples before each question; default the task's.
        limit: questions of each.

    Raises:
        ConfigError: there is no such task.
    """
    known = TaskManager(include_path=include_path)
    missing = [name for name in tasks if name not in known.all_tasks]
    if missing:
        raise ConfigError(f"--tasks: lm-eval has no {', '.join(missing)}", fix="`lm-eval ls tasks` names them")
    found = simple_evaluate(
        Harness(engine, tokenizer),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=known,
        log_samples=False,
    )
    results = (found or {}).get("results", {})
    return {
        task: {name.removesuffix(",none"): value for name, value in each.items() if isinstance(value, (int, float))}
        for task, each in results.items()
    }
