"""What TRL 1.16.0, verl 0.9.1 and OpenRLHF 0.11.2 compute, written to `posttraining.json`.

    pip download --no-deps trl==1.16.0 verl==0.9.1 openrlhf==0.11.2; unzip each into FOLDER
    python tests/golden/posttraining_oracles.py FOLDER > tests/golden/posttraining.json

Their packages import far more than their formulas need, so the functions, or the statements that compute a loss, are
taken out of their files and run by themselves. Inputs are drawn in fp64, ragged, with an answer of no token. Where
their code itself rounds to fp32, it is read with fp64 in its place (`InDouble`).
"""

from __future__ import annotations

import ast
import collections
import contextlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed.tensor  # their code asks whether a matrix is a DTensor
import torch.nn.functional as F

B, S, V, WIDTH = 5, 7, 11, 6
BETAS = (0.0, 0.3, 0.5, 1.0)
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # `OPTIONAL_OUTPUTS` of `chunked_logprob.py`


class InDouble(ast.NodeTransformer):
    """A program that computes in fp32 as one that computes in fp64; imports inside of functions are given names."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return ast.Attribute(node.value, {"float32": "float64", "float": "double"}.get(node.attr, node.attr), node.ctx)


def taken(path: Path, *names: str, double: bool = False, **known: Any) -> dict[str, Any]:
    """Functions and classes of a file, by name, run without its imports."""
    tree = ast.parse(path.read_text())
    if double:
        tree = ast.fix_missing_locations(InDouble().visit(tree))
    found = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
    ]
    for node in found:
        node.decorator_list = []
    room: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "nn": torch.nn,
        "Optional": Optional,
        "Tuple": tuple,
        "Any": Any,
    } | known
    exec(compile(ast.Module(found, []), str(path), "exec"), room)
    return room


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([0, 7, 3, 5, 1])
    old = -draw(B, S).abs()
    return {
        "mask": (torch.arange(S) < lengths[:, None]).double(),
        "old": old,
        "log_probs": old + 0.4 * draw(B, S),
        "engine": old + 0.2 * draw(B, S),
        "reference": old + 0.3 * draw(B, S),
        "entropy": draw(B, S).abs(),
        "advantages": draw(B, 1).expand(B, S).clone(),
        "rewards": draw(B, S),
        "values": draw(B, S),
        "old_values": draw(B, S),
        "returns": draw(B, S),
        "ratios": 3 * draw(B, 2),
        "answer_lengths": torch.tensor([[3.0, 5], [1, 1], [7, 2], [4, 4], [2, 9]], dtype=torch.float64),
        "student_hidden": draw(B, S, WIDTH),
        "student_output": draw(V, WIDTH),
        "teacher_hidden": draw(B, S, WIDTH + 2),
        "teacher_output": draw(V, WIDTH + 2),
        "labels": torch.randint(0, V, (B, S), generator=generator).double(),
    }


def with_gradient(value: torch.Tensor, of: torch.Tensor) -> dict[str, Any]:
    (gradient,) = torch.autograd.grad(value, of)
    return {"loss": value.item(), "gradient": gradient.tolist()}


def trl_grpo(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`GRPOTrainer._compute_loss` for each loss type and level of the ratio."""
    compute = taken(folder / "trl/trainer/grpo_trainer.py", "_compute_loss", nanmin=torch.min, nanmax=torch.max)[
        "_compute_loss"
    ]
    found = {}
    for kind in ("grpo", "bnpo", "dapo", "dr_grpo"):
        for level in ("token", "sequence"):
            now = x["log_probs"].clone().requires_grad_()
            same = types.SimpleNamespace(gather=lambda v: v, gather_for_metrics=lambda v: v,
                                         reduce=lambda v, reduction: v, num_processes=1,
                                         sync_gradients=True)  # fmt: skip
            trainer = types.SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *a, now=now, **k: (now, x["entropy"], None),
                aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.04,
                importance_sampling_level=level, loss_type=kind, epsilon_low=0.2, epsilon_high=0.28, use_vllm=True,
                vllm_importance_sampling_correction=True, model=types.SimpleNamespace(training=True),
                current_gradient_accumulation_steps=1, max_completion_length=10, accelerator=same,
                _entropy_bonus_enabled=False, _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
                args=types.SimpleNamespace(use_bias_correction_kl=False, delta=1.5, steps_per_generation=1),
            )  # fmt: skip
            # vllm_importance_sampling_mode token_truncate, as `_generate_and_score_completions` computes it
            weight = ((x["old"] - x["engine"]) * x["mask"]).exp().clamp(max=1.1)
            ids = torch.zeros(B, S, dtype=torch.int64)
            loss = compute(trainer, None, {
                "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": x["mask"],
                "advantages": x["advantages"][:, 0], "old_per_token_logps": x["old"],
                "ref_per_token_logps": x["reference"],
                "importance_sampling_ratio": weight, "num_items_in_batch": x["mask"].sum(),
            })  # fmt: skip
            found[f"{kind} {level}"] = with_gradient(loss, now)
    return found


def trl_pairs(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The statements of `DPOTrainer._compute_loss` that turn scores into a loss."""
    tree = ast.parse((folder / "trl/trainer/dpo_trainer.py").read_text())
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_compute_loss")
    loop = next(n for n in ast.walk(function) if isinstance(n, ast.For) and "loss_type" in ast.unparse(n.target))
    code = compile(ast.Module([loop], []), "dpo_trainer.py", "exec")
    found = {}
    masks = (torch.arange(9) < x["answer_lengths"].t().flatten()[:, None]).double()
    for kind in ("sigmoid", "hinge", "ipo"):
        ratios = x["ratios"].clone().requires_grad_()
        trainer = types.SimpleNamespace(beta=0.3, loss_types=[kind], loss_weights=[1.0], label_smoothing=0.0,
                                        use_weighting=False)  # fmt: skip
        room = {"torch": torch, "F": F, "self": trainer, "loss": 0.0, "completion_mask": masks, "device": "cpu",
                "chosen_scores": ratios[:, 0], "rejected_scores": ratios[:, 1],
                "delta_score": ratios[:, 0] - ratios[:, 1]}  # fmt: skip
        exec(code, room)
        found[kind] = with_gradient(room["loss"], ratios)  # type: ignore[arg-type]
    return found


def logits_of(x: dict[str, torch.Tensor], who: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] of a model, and the matrix of its output layer as a leaf; they are linear in both."""
    matrix = x[f"{who}_output"].clone().requires_grad_(who == "student")
    return x[f"{who}_hidden"] @ matrix.t(), matrix


def trl_gkd(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`GKDTrainer.generalized_jsd_loss`, of answers that are given as of those that the student drew."""
    path = folder / "trl/experimental/gkd/gkd_trainer.py"
    loss_of = taken(path, "generalized_jsd_loss")["generalized_jsd_loss"]
    labels = x["labels"].long().masked_fill(x["mask"] == 0, -100)
    teacher, found = x["teacher_hidden"] @ x["teacher_output"].t(), {}
    for beta in BETAS:
        for temperature in (1.0, 2.0):
            student = (x["student_hidden"] @ x["student_output"].t()).requires_grad_()
            found[f"{beta} {temperature}"] = with_gradient(
                loss_of(student, teacher, labels, beta, temperature), student
            )
    return found


def trl_from_hidden(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Losses that TRL computes tile by tile from hidden states; gradients of the student's output matrix.

    `SFTTrainer.compute_loss`, and `_chunked_divergence_loss` of `DistillationTrainer`. On a GPU their tiles are
    Triton's, elsewhere torch's, which run here.
    """
    tiles, room = folder / "trl/kernels", {"math": math, "TOKEN_CHUNK_SIZE": 4, "VOCAB_CHUNK_SIZE": 4, "_BLOCK_SIZE": 0}
    room |= {"_TRITON_AVAILABLE": False, "_MM_OUT_DTYPE": False, "OPTIONAL_OUTPUTS": OUTPUTS}
    room |= {"maybe_gather_lm_head_ctx": lambda *weights: contextlib.nullcontext()}
    shared = ("_use_triton", "_torch_transform", "_addmm_fp32", "_forward_tile", "_backward_tile")
    log_prob = taken(tiles / "chunked_logprob.py", *shared, "ChunkedLogProbFunction", double=True, **room)
    room |= {name: log_prob[name] for name in shared[:3]}
    names = ("_stats_tile", "_jsd_tile", "_backward_tile", "_compute_dtype", "_project", "ChunkedDivergenceFunction")
    room = taken(tiles / "chunked_divergence.py", *names, double=True, **room)
    divergence = taken(folder / "trl/trainer/distillation_trainer.py", "_chunked_divergence_loss", **room)

    tree = ast.parse((folder / "trl/trainer/sft_trainer.py").read_text())
    branch = next(n.orelse for n in ast.walk(tree) if isinstance(n, ast.If) and "per_token_loss = -" in ast.unparse(n)
                  and ast.unparse(n.orelse[0]).startswith("outputs = "))  # fmt: skip
    code = compile(ast.Module(branch[1:], []), "sft_trainer.py", "exec")  # without the call of the model

    matrix, labels, mask, found = x["student_output"].clone().requires_grad_(), x["labels"].long(), x["mask"], {}
    log_probs = log_prob["ChunkedLogProbFunction"].apply(x["student_hidden"].flatten(0, 1), matrix, None,
                                                         labels.flatten(), 1.0, 4)[0].view(B, S)  # fmt: skip
    outputs = types.SimpleNamespace(log_probs=log_probs.masked_fill(mask == 0, 0.0), label_mask=mask != 0)
    trainer = types.SimpleNamespace(args=types.SimpleNamespace(loss_type="nll"), aux_loss_enabled=False)
    place = {"torch": torch, "self": trainer, "outputs": outputs, "num_items_in_batch": None}
    exec(code, place)
    found["sft"] = with_gradient(place["loss"], matrix)  # type: ignore[arg-type]
    for beta in BETAS:
        loss = divergence["_chunked_divergence_loss"](
            x["student_hidden"], x["teacher_hidden"], matrix, x["teacher_output"], mask, beta, temperature=2.0
        )[0]
        found[f"distill {beta}"] = with_gradient(loss, matrix)
    return found


def trl_reward(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The statements of `RewardTrainer.compute_loss` that follow the scores, with `center_rewards_coefficient`."""
    tree = ast.parse((folder / "trl/trainer/reward_trainer.py").read_text())
    method = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "compute_loss")
    tests = ("'margin' in inputs", "self.args.center_rewards_coefficient is not None")
    branches: list[ast.stmt] = [n for n in ast.walk(method) if isinstance(n, ast.If) and ast.unparse(n.test) in tests]
    scores = x["ratios"].clone().requires_grad_()
    place: dict[str, Any] = {"torch": torch, "nn": torch.nn, "inputs": {}, "rewards_chosen": scores[:, 0]}
    place["rewards_rejected"] = scores[:, 1]
    place["self"] = types.SimpleNamespace(args=types.SimpleNamespace(center_rewards_coefficient=0.2))
    exec(compile(ast.Module(branches, []), "reward_trainer.py", "exec"), place)
    return with_gradient(place["loss"], scores)


def openrlhf(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    package = folder / "openrlhf-0.11.2.data/purelib/openrlhf/models"
    room = taken(package / "utils.py", "masked_mean")
    names = ("aggregate_loss", "PolicyLoss", "ValueLoss", "PairWiseLoss", "DPOLoss")
    losses = taken(package / "loss.py", *names, masked_mean=room["masked_mean"])
    found = {}
    for name, smoothing, ipo in (("sigmoid", 0.1, False), ("ipo_sum", 0.0, True)):
        ratios, zero = x["ratios"].clone().requires_grad_(), torch.zeros(B, dtype=torch.float64)
        loss = losses["DPOLoss"](0.3, smoothing, ipo)(ratios[:, 0], ratios[:, 1], zero, zero)[0]
        found[f"dpo {name}"] = with_gradient(loss, ratios)
    ratios = x["ratios"].clone().requires_grad_()
    found["reward"] = with_gradient(losses["PairWiseLoss"]()(ratios[:, 0], ratios[:, 1]), ratios)
    for kind, per_token in (("ppo", True), ("ppo", False), ("gspo", False)):
        now = x["log_probs"].clone().requires_grad_()
        policy = losses["PolicyLoss"](0.2, 0.28, None, per_token, kind)
        loss = policy(now, x["old"], x["advantages"], x["mask"])[0]
        found[f"{kind} {'token' if per_token else 'sample'}"] = with_gradient(loss, now)
    values = x["values"].clone().requires_grad_()
    found["value"] = with_gradient(losses["ValueLoss"](0.2)(values, x["old_values"], x["returns"], x["mask"]), values)
    return found


def verl(folder: Path, x: dict[str, torch.Tensor]) -> dict[str, Any]:
    names = ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value")
    functions = types.SimpleNamespace(**taken(folder / "verl/utils/torch_functional.py", *names))
    wanted = ("compute_gae_advantage_return", "compute_value_loss", "agg_loss")
    core = taken(folder / "verl/trainer/ppo/core_algos.py", *wanted, verl_F=functions)
    turns = x["mask"].clone()
    turns[1, 2:4] = 0  # an answer of two turns
    advantages, returns = core["compute_gae_advantage_return"](x["rewards"], x["values"], turns, 0.97, 0.9)
    values = x["values"].clone().requires_grad_()
    loss = core["compute_value_loss"](values, x["returns"], x["old_values"], x["mask"], 0.2)[0]
    return {
        "gae": {"mask": turns.tolist(), "advantages": advantages.tolist(), "returns": returns.tolist()},
        "value": with_gradient(loss, values),
    }


if __name__ == "__main__":
    where, given = Path(sys.argv[1]), inputs()
    with contextlib.redirect_stdout(sys.stderr):
        all_of = {
            "inputs": {name: tensor.tolist() for name, tensor in given.items()},
            "trl grpo": trl_grpo(where, given),
            "trl pairs": trl_pairs(where, given),
            "trl reward": trl_reward(where, given),
            "trl gkd": trl_gkd(where, given),
            "trl from hidden": trl_from_hidden(where, given),
            "openrlhf": openrlhf(where, given),
            "verl": verl(where, given),
        }
    json.dump(all_of, sys.stdout)
