"""What speculation costs where it is always wrong, and where it is always right: eight answers at once, greedy.

    OMP_NUM_THREADS=1 python -m benchmarks.speculation

A model of 14.7 M parameters continues eight prompts by 120 tokens: without proposals; with those of another, smaller
model, of which none is accepted; with its own as its draft, of which all are. CPU-seconds, the best of three.
"""

from __future__ import annotations

import time

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.sequence import Request
from minimegatron.inference.speculative import SpeculativeConfig
from minimegatron.models.decoder import GPTModel, build_model
from minimegatron.models.families import family_config


def model(seed: int, layers: int, hidden: int) -> GPTModel:
    """With random weights."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 8, "ffn_hidden_size": 3 * hidden}
    config = family_config("llama", **sizes, vocab_size=4000, max_position_embeddings=512)
    return build_model(config, Mesh.serial(), seed).eval()


def main() -> None:
    torch.set_num_threads(1)
    target, other = model(0, 6, 384), model(1, 2, 256)
    config = SpeculativeConfig("draft_model", 4)
    for name, draft in (("no proposals", None), ("never accepted", other), ("always accepted", target)):
        seconds = []
        for _ in range(3):
            speculative = None if draft is None else config
            engine = Engine(target, EngineConfig(256, max_num_seqs=8, speculative=speculative), draft=draft)
            for i in range(8):
                engine.add_request(Request((5, 9, i, 77), 120), str(i))
            begun = time.process_time()
            while engine.has_work:
                engine.step()
            seconds.append(time.process_time() - begun)
        counts = f"{engine.accepted_tokens} of {engine.proposed_tokens} accepted, {engine.steps} steps"
        print(f"{name:<16} {min(seconds):.2f} CPU-s  {counts}", flush=True)


if __name__ == "__main__":
    main()
