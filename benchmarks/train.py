"""How fast training is on a CPU: against the loop one would write with Hugging Face, and in parallel against alone.

    OMP_NUM_THREADS=1 python -m benchmarks.train            all comparisons, a few minutes
    OMP_NUM_THREADS=1 python -m benchmarks.train --smoke    the same code on tiny sizes, seconds
    ... --only "dp2 zero3" --against apart                  against two processes that send nothing
    ... --only tp2 dp2 pp2 --picotron FOLDER                against the same layout of picotron's, a checkout of it

| comparison | A                                | B                                     | reported            |
|------------|----------------------------------|---------------------------------------|---------------------|
| `hf`       | our step, one process            | transformers' Llama, AdamW, clipping  | speed-up, B / A     |
| `compiled` | our step, one process            | the same through torch.compile        | speed-up, B / A     |
| `tp2` ...  | two ranks, CPU-s of both added   | one process, the same tokens          | efficiency, B / A   |
| `apart`    | two processes, half of them each | one process, the same tokens          | efficiency, B / A   |

Every contender trains the same model on the same number of tokens in fp32: forward, backward, clip to 1, AdamW. The
cost is CPU-seconds of whole steps after two warm-up steps (`labkit/paired.py`). A step has 16 samples of 256 tokens
in 8 microbatches (4 on each of two replicas); where the sequence is cut, 4 samples of 2048 tokens.

`apart` sends nothing: what it loses is two processes sharing caches, memory and maybe one physical core, and one more
optimizer step. `--against apart` says what a layout of two replicas costs beyond that. ZeRO-2 and -3 communicate once a
microbatch: `--micro-batch 8` is the same batch in two microbatches, one on each replica.

All contenders keep freed memory (`procs.keep_memory`), as the ranks of a run do: else a step of either loop spends 2 to
7 % of its CPU-seconds on pages that the kernel zeroes. Beside each figure stands the load average of the last minute;
something else on the same physical cores makes every contender dearer, and two ranks more than one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from typing import Any

import torch

from benchmarks.contenders import FULL, LONG, SMOKE, Workload, cpu_seconds, hugging_face_step, on_rank, our_step
from benchmarks.picotron import on_picotron_rank
from labkit.paired import paired
from labkit.ranks.pool import WarmPool
from minimegatron.comm.mesh import Mesh
from minimegatron.launch import procs
from minimegatron.models.chunks import count_parameters

SERIAL = {"hf": "", "compiled": ", compiled"}  # comparisons in one process
STRATEGY = "data_parallel_sharding_strategy"
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "apart": None,
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "cp2 a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
    "dp2 overlap": {"overlap_grad_reduce": True, "ddp_bucket_size": 1_000_000},
    "dp2 zero1": {STRATEGY: "optim", "use_distributed_optimizer": True},
    "dp2 zero2": {STRATEGY: "optim_grads", "use_distributed_optimizer": True, "ddp_bucket_size": 1_000_000},
    "dp2 zero3": {STRATEGY: "optim_grads_params", "use_distributed_optimizer": True},
    "dp2 fsdp2": {"use_torch_fsdp2": True},
}


PICOTRON: dict[str, dict[str, Any] | None] = {"one": {}, "tp2": LAYOUTS["tp2"], "dp2": {}, "pp2": LAYOUTS["pp2"]}


def compare(name: str, work: Workload, pairs: int, warmups: int, apart: bool = False, picotron: str = "") -> str:
    """Run one comparison; a line for `RECORDS.md`."""
    if picotron:
        with WarmPool(1 if name == "one" else 2) as pool:
            ratio = paired(
                lambda: sum(pool.run(on_rank, work, PICOTRON[name], timeout=300)),
                lambda: sum(pool.run(on_picotron_rank, work, name, picotron, timeout=300)),
                pairs,
                warmups,
            )
        what = f"{name}: tokens per CPU-second against picotron"
    elif name in SERIAL:
        ours, theirs = our_step(work, Mesh.serial()), hugging_face_step(work, compiled=name == "compiled")
        ratio = paired(lambda: cpu_seconds(ours, work.steps), lambda: cpu_seconds(theirs, work.steps), pairs, warmups)
        what = f"tokens per CPU-second against the Hugging Face loop{SERIAL[name]}"
    else:
        layout = LAYOUTS[name]
        baseline = None if apart else {}
        with WarmPool(2) as two, WarmPool(2 if apart else 1) as other:
            ratio = paired(
                lambda: sum(two.run(on_rank, work, layout, timeout=300)),
                lambda: sum(other.run(on_rank, work, baseline, timeout=300)),
                pairs,
                warmups,
            )
        what = f"{name}: efficiency against {'two processes that send nothing' if apart else 'one process'}"
    per_second = work.batch * work.seq_length * work.steps
    rates = f"{per_second / ratio.a:.0f} against {per_second / ratio.b:.0f} tokens per CPU-second"
    return f"{what}: {ratio}; {rates}; load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", nargs="*", choices=["one", *SERIAL, *LAYOUTS], help="default all")
    parser.add_argument("--against", choices=["one", "apart"], default="one", help="apart: two that send nothing")
    parser.add_argument("--picotron", default="", metavar="FOLDER", help="a checkout: compare with its layouts")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--micro-batch", type=int, help="samples of a forward pass, 2 if not given")
    args = parser.parse_args()
    known = PICOTRON if args.picotron else SERIAL | LAYOUTS
    names = args.only or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{', '.join(unknown)} cannot be compared so; fix: choose from {', '.join(known)}")
    torch.set_num_threads(1)
    procs.keep_memory()
    work, pairs, warmups = (SMOKE, 2, 0) if args.smoke else (FULL, args.pairs, 2)
    if args.micro_batch:
        work = dataclasses.replace(work, micro_batch=args.micro_batch)
    size = count_parameters(work.config) / 1e6
    print(
        f"torch {torch.__version__}, {platform.machine()}, 1 thread a rank; {size:.1f} M-parameter Llama in fp32, "
        f"{work.batch} x {work.seq_length} tokens a step in microbatches of "
        f"{work.micro_batch} ({LONG.batch} x {LONG.seq_length} for cp, one by one); "
        f"median of {pairs} A B B A pairs (quartiles)"
    )
    for name in names:
        of = LONG if name.startswith("cp") and not args.smoke else work
        print(
            compare(
                name,
                of,
                pairs,
                warmups,
                args.against == "apart",
                os.path.abspath(args.picotron) if args.picotron else "",
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
