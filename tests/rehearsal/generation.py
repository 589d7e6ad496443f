"""Prompts continued on the simulated device and on the CPU: an outcome like that of `training.outcome`."""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.inference.engine import Engine
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.rehearsal.record import RECORD

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
NEW = 12


def outcome(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Generate, and return the tokens, their log-probabilities and the record.

    Args:
        options: of the model, and `graph` (record a decode step, on a GPU) and `sampled` (else greedy).
        device: "cuda" or "cpu".
    """
    RECORD.clear()
    fields = {name: value for name, value in options.items() if name not in ("graph", "sampled")}
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "vocab_size": 128}
    config = family_config(**sizes, **fields, max_position_embeddings=32, params_dtype="fp32", kernels="torch")
    with RECORD.phase("build"):
        model = build_model(config, Mesh.serial(device=device), 1).eval()
    recorded = options.get("graph", False) and device == "cuda"
    engine = Engine(model, recorder=CudaRecorder(torch.device("cuda", 0)) if recorded else None)
    sampling = SamplingParams(temperature=0.8, top_k=10, top_p=0.9) if options.get("sampled") else GREEDY
    with RECORD.phase("generate"):
        found = generate(engine, PROMPTS, NEW, sampling, stop_ids=[0])
    return {
        "device": device,
        "tokens": [one.tokens for one in found],
        "log_probs": [one.log_probs for one in found],
        "record": RECORD.to_json(),
    }
