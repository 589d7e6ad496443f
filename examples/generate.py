"""Continue a prompt with a model that Hugging Face has published.

    python examples/generate.py FOLDER "Once upon a time" --max-new-tokens 50 --temperature 0.8 --top-p 0.95
    torchrun --standalone --nproc-per-node 2 examples/generate.py FOLDER "Once upon a time"       2 ranks (tp2)

FOLDER is a downloaded model: `config.json`, its weights in `*.safetensors`, and `tokenizer.json`. Nothing is downloaded
here. Without `--temperature`, `--top-k` and `--top-p` every word is the most likely one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from minimegatron.checkpoint.folder import read_folder
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.launch.rank import init, run_rank
from minimegatron.layers.logical import load_logical
from minimegatron.models.decoder import GPTModel


def load(folder: Path, mesh: Mesh, params_dtype: str) -> GPTModel:
    """The model of a folder, this rank's part of it, ready to generate."""
    _, config, state = read_folder(folder)
    model = GPTModel(config.replace(params_dtype=params_dtype), mesh)
    load_logical(model, state)
    return model.eval().to(mesh.device)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params-dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args(argv)

    rank, world = init()
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    tokenizer, model = HuggingFaceTokenizer(args.folder), load(args.folder, mesh, args.params_dtype)
    draws = (args.temperature, args.top_k, args.top_p) != (1.0, 0, 0.0)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p) if draws else GREEDY
    prompt = tokenizer.tokenize(args.prompt)
    (made,) = generate(model, [prompt], args.max_new_tokens, sampling, stop_ids=[tokenizer.eod], seed=args.seed)
    if rank == 0:
        print(args.prompt + tokenizer.detokenize(prompt + made.tokens)[len(tokenizer.detokenize(prompt)) :])
        mean = torch.tensor(made.log_probs).mean().item()
        print(f"({len(made.tokens)} tokens, mean log-probability {mean:.3f})", file=sys.stderr)


if __name__ == "__main__":
    run_rank(lambda: main(sys.argv[1:]))
