"""The whole idea on one page: several processes train one model and print the loss that one process would print.

    python examples/simple_loop.py                              one process
    torchrun --nproc-per-node 2 examples/simple_loop.py         2 ranks share every matrix (tp2)
    torchrun --nproc-per-node 4 examples/simple_loop.py         2 such pairs, each with half of the batch (tp2 x dp2)
    ... --text                                                  Python's docstrings instead of a synthetic sequence

Compare the printed numbers: they do not depend on how many ranks there are. Everything below is what the trainer does
(`minimegatron/training`), without its options.
"""

import argparse
import contextlib

import torch

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.data.builder import build_datasets
from minimegatron.data.corpus import prepare_corpus
from minimegatron.data.gpt_dataset import GPTDatasetConfig
from minimegatron.data.loader import DataLoader
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.launch.rank import init, run_rank
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.parallel.data.plain import PlainDataParallel

MICRO_BATCH, GLOBAL_BATCH, SEQ_LENGTH = 2, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="train a tiny model, tensor- and data-parallel")
    parser.add_argument("--text", action="store_true", help="train on the docstrings of Python's standard library")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    # 1. Who shares what with whom: a grid of ranks. tp ranks share matrices, dp ranks share the batch.
    rank, world = init()
    tp = 2 if world % 2 == 0 else 1
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1))

    # 2. Tokens. The order of samples is fixed: dp rank d of D takes microbatches d, d + D, ...
    corpus = prepare_corpus(".corpus", vocab_size=1024, kind="docs") if args.text else None
    tokenizer = corpus.tokenizer() if corpus else NullTokenizer(255)
    dataset, _, _ = build_datasets(
        GPTDatasetConfig(SEQ_LENGTH, tokenizer), (args.steps * GLOBAL_BATCH, 0, 0), [corpus.data_path] if corpus else []
    )
    batches = iter(DataLoader(dataset, MICRO_BATCH, mesh.dp.rank, mesh.dp.size))

    # 3. The model: this rank's part of every matrix. The whole initial weights depend on the seed alone.
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        vocab_size=tokenizer.vocab_size,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
    )
    model = PlainDataParallel(build_model(config, mesh, seed=1234), mesh)
    optimizer = build_optimizer(OptimizerConfig(lr=3e-3), model, mesh)

    # 4. Steps: every microbatch contributes sums, and one division by the global token count comes at the very end.
    num_microbatches = GLOBAL_BATCH // (MICRO_BATCH * mesh.dp.size)
    for step in range(1, args.steps + 1):
        model.zero_grad_buffer()
        loss_sum, tokens = torch.zeros(2, dtype=torch.float64, device=mesh.device).unbind()
        for i in range(num_microbatches):
            batch = {name: tensor.to(mesh.device) for name, tensor in next(batches).items()}
            last = i == num_microbatches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                losses = model(batch["tokens"], batch["position_ids"], batch["labels"])  # [b, s], one a token
                loss = (losses * batch["loss_mask"]).sum()
                loss.backward()
            loss_sum += loss.detach()
            tokens += batch["loss_mask"].sum()
        all_tokens = finalize_model_grads(model, mesh, tokens)  # sum over ranks, divide once
        result = optimizer.step()
        mean = all_reduce(loss_sum.clone(), mesh.dp_cp) / all_tokens
        if rank == 0:
            print(f"step {step:3d}   loss {mean.item():.5f}   grad norm {result.grad_norm:.4f}", flush=True)


if __name__ == "__main__":
    run_rank(main)
