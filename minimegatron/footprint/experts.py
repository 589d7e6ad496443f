"""Bytes of a mixture of experts: the router, tokens on their way, experts, shared experts.

T tokens of this rank, k experts a token, R rows that come to the experts of this rank, f features of an expert here:

| step      | keeps                                                                     | bytes                       |
|-----------|---------------------------------------------------------------------------|-----------------------------|
| router    | its input and scores in the router's dtype; which rows go where           | 4 T h + 4 T E + 8 T E       |
| fc1       | the rows                                                                  | e R h                       |
| act       | gate and up, act(gate), the product, and times the weight of the row      | e R 5 f, plain e R 3 f      |
| fc2       | nothing more                                                              |                             |
| combine   | the rows that came back                                                   | e k T h                     |

**R is in the data.** Where all experts have equal loads a rank gets R = k T rows (times etp). Without a capacity all
tokens of the ranks that share the experts may choose those of one rank, R = T ep etp min(k, E/ep); with a capacity C
it gets (E/ep) C ep etp rows at most, and exactly so many with padding. Both ends are predicted (`Sizes.crowded`).
"""

from __future__ import annotations

import dataclasses

from minimegatron.footprint.dense import activation, mlp
from minimegatron.footprint.tape import Sizes, Step, Tape, formula, tape_of
from minimegatron.layers.moe import Experts, MoELayer, SharedExperts
from minimegatron.layers.router import TopKRouter, capacity


@formula(MoELayer)
def mixture(module: MoELayer, z: Sizes) -> Tape:
    steps = [*tape_of(module.router, z), *_dispatch(z), *tape_of(module.experts, z), _combine(z)]
    if module.shared_experts is None:
        return Tape(steps)
    shared = list(tape_of(module.shared_experts, z))
    if z.e >= router_element(z):  # the router has kept x itself
        shared[0] = dataclasses.replace(shared[0], keeps=0)
    return Tape([*steps, *shared])


def router_element(z: Sizes) -> int:
    """Bytes of an element of the router's products."""
    return max(z.e, 8 if z.config.moe_router_dtype == "fp64" else 4)


def tokens_and_rows(z: Sizes) -> tuple[int, int, int]:
    """T; rows that this rank sends; R, which its experts get."""
    config, mesh, tokens = z.config, z.mesh, z.n_cut
    assert config.num_experts is not None
    local, others = config.num_experts // mesh.ep.size, mesh.ep.size * mesh.etp.size
    k, sent = config.moe_router_topk, config.moe_router_topk * tokens
    most = tokens * others * min(k, local)
    if config.moe_expert_capacity_factor is not None:
        c = capacity(tokens, config)
        most = min(most, local * c * others)
        if config.moe_pad_expert_input_to_capacity:
            return tokens, config.num_experts * c, local * c * others
    return tokens, sent, most if z.crowded else min(most, sent * mesh.etp.size)


@formula(TopKRouter)
def router(module: TopKRouter, z: Sizes) -> Tape:
    config, tokens, wide = z.config, z.n_cut, router_element(z)
    experts, x = module.num_experts, wide * tokens * config.hidden_size
    scores = wide * tokens * experts
    losses = 1 + len(config.balancing_losses) + bool(config.moe_z_loss_coeff)
    copy = wide * module.weight.numel() if wide > z.e else 0
    jitter = z.e * tokens * config.hidden_size if config.moe_input_jitter_eps is not None else 0
    keeps = x + copy + jitter + losses * scores + tokens * module.k * (8 + wide)
    return Tape([Step("router", keeps, 4 * scores, x + 2 * scores + 2 * wide * module.weight.numel())])


def _dispatch(z: Sizes) -> Tape:
    """Rows leave for their experts; kept are indices alone, the rows themselves belong to fc1."""
    config, mesh = z.config, z.mesh
    assert config.num_experts is not None
    tokens, sent, rows = tokens_and_rows(z)
    everyone, h = tokens * mesh.etp_ep.size, z.e * config.hidden_size
    local, wide = config.num_experts // mesh.ep.size, router_element(z)
    if config.moe_token_dispatcher_type == "allgather":
        index = 8 * everyone * local + 8 * rows + wide * rows
        return Tape([Step("dispatch", index, everyone * h + 24 * everyone * local, (everyone + rows) * h)])
    index = 8 * tokens * config.num_experts + 8 * sent + wide * rows
    if mesh.etp_ep.size == 1:
        return Tape([Step("dispatch", index, rows * h, (tokens + rows) * h)])
    reorder = 16 * rows if local > 1 else 0
    return Tape([Step("dispatch", index + reorder, (sent + 2 * rows) * h, (2 * rows + sent) * h)])


@formula(Experts)
def experts(module: Experts, z: Sizes) -> Tape:
    rows, h = tokens_and_rows(z)[2], z.e * z.config.hidden_size
    w1, w2 = z.e * module.weight1.numel(), z.e * module.weight2.numel()
    f = z.e * module.weight2.shape[2]
    between = activation(module.kind, rows * f, z)
    weighed = Step("weights of rows", rows * f, 4 // z.e * rows * f, (3 if z.e == 4 else 7) * rows * f)  # in fp32
    bits = 1 if module.fp8 is not None else z.e  # bytes of what the products keep of their inputs
    return Tape(
        [
            _each(
                Step("fc1 of experts", rows * h * bits // z.e),
                module.grouped,
                w1,
                (2 if module.gated else 1) * rows * f,
                rows * h,
            ),
            between,
            weighed,
            _each(Step("fc2 of experts", rows * f * bits // z.e), module.grouped, w2, rows * h, rows * f),
        ]
    )


def _each(step: Step, grouped: bool, weights: int, out: int, x: int) -> Step:
    """The products of all experts: one after the other, results and gradients exist for each first and then for all."""
    if grouped:
        return dataclasses.replace(step, forward=out, backward=weights + out + x)
    return dataclasses.replace(step, forward=2 * out, backward=max(2 * weights, weights + out + x))


def _combine(z: Sizes) -> Step:
    tokens, sent, rows = tokens_and_rows(z)
    h, gathers = z.e * z.config.hidden_size, z.config.moe_token_dispatcher_type == "allgather"
    back, everyone = (rows, tokens * z.mesh.etp_ep.size) if gathers else (sent, tokens)
    return Step("combine", back * h, everyone * h, (back + (rows if z.mesh.etp_ep.size > 1 else 0)) * h)


@formula(SharedExperts)
def shared_experts(module: SharedExperts, z: Sizes) -> Tape:
    """The MLP, and with a gate its output."""
    steps = [dataclasses.replace(step, name=f"shared {step.name}") for step in mlp(module, z)]
    y = z.stream if module.gate_weight is not None else 0
    return Tape([*steps, *[Step("shared gate", y, y, 2 * y)] * bool(y)])
