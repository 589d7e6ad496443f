"""How fast generation is on a CPU, against Hugging Face's `generate` with the same weights.

    OMP_NUM_THREADS=1 python -m benchmarks.generate             about a minute
    OMP_NUM_THREADS=1 python -m benchmarks.generate --compiled  our decode step through torch.compile, minutes more
    OMP_NUM_THREADS=1 python -m benchmarks.generate --smoke     the same code on tiny sizes, seconds

| contender | what it does                                                                       |
|-----------|------------------------------------------------------------------------------------|
| ours      | `inference/generate`: pages, one thread, greedy                                    |
| theirs    | transformers' Llama, `generate(do_sample=False)` with its default (growing) cache  |

Both continue the same prompts in fp32 by the same number of words, and first it is checked that the words are the same.
The cost is CPU-seconds of a whole call, prefill and decode (`labkit/paired.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import platform

import torch

from benchmarks.contenders import FULL, SMOKE, Workload, cpu_seconds, hugging_face_model
from labkit.paired import paired
from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.comm.mesh import Mesh
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.layers.logical import load_logical
from minimegatron.models.chunks import count_parameters
from minimegatron.models.decoder import GPTModel


@dataclasses.dataclass(frozen=True)
class Question:
    """How many prompts of how many words, and how many words of answer."""

    batch: int
    prompt: int
    new: int


QUESTIONS = [Question(1, 64, 64), Question(8, 64, 64)]


def compare(work: Workload, question: Question, pairs: int, warmups: int, compiled: bool = False) -> str:
    """One comparison; a line for `RECORDS.md`.

    Raises:
        SystemExit: the two give other words.
    """
    torch.manual_seed(0)
    theirs = hugging_face_model(work).eval()
    theirs.config.use_cache = theirs.generation_config.use_cache = True
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    family, config = config_from_huggingface(theirs.config.to_dict())
    ours = GPTModel(config, Mesh.serial()).eval()
    load_logical(ours, state_from_huggingface(theirs.state_dict(), config, family))
    sizes = EngineConfig(question.prompt + question.new, enable_prefix_caching=False)  # it is asked again and again
    engine = Engine(ours, sizes, compiled=compiled)
    prompts = torch.randint(0, work.config.vocab_size, (question.batch, question.prompt))
    answers: dict[str, list[list[int]]] = {}

    def mine() -> None:
        answers["ours"] = [c.tokens for c in generate(engine, prompts.tolist(), question.new)]

    def his() -> None:
        seen = torch.ones_like(prompts)  # else it takes words 0 for padding
        words = theirs.generate(prompts, attention_mask=seen, max_new_tokens=question.new, do_sample=False)
        answers["theirs"] = words[:, question.prompt :].tolist()

    mine(), his()
    if answers["ours"] != answers["theirs"]:
        raise SystemExit(f"batch {question.batch}: the two give other words, so there is nothing to compare")
    ratio = paired(lambda: cpu_seconds(mine, 1), lambda: cpu_seconds(his, 1), pairs, warmups)
    words = question.batch * question.new
    return (
        f"batch {question.batch}, {question.prompt} + {question.new} words, against Hugging Face's generate: {ratio}; "
        f"{words / ratio.a:.0f} against {words / ratio.b:.0f} words per CPU-second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--compiled", action="store_true", help="our decode step through torch.compile")
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    work, pairs, warmups = (SMOKE, 2, 0) if args.smoke else (FULL, args.pairs, 2)
    size = count_parameters(work.config) / 1e6
    print(
        f"torch {torch.__version__}, {platform.machine()}, 1 thread; {size:.1f} M-parameter Llama in fp32, greedy"
        f"{', compiled' if args.compiled else ''}; "
        f"median of {pairs} A B B A pairs (quartiles)"
    )
    for question in [Question(2, 5, 6)] if args.smoke else QUESTIONS:
        print(compare(work, question, pairs, warmups, args.compiled), flush=True)


if __name__ == "__main__":
    main()
