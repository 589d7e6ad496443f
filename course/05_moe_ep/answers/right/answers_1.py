# times of one row's computation and travel
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    mlp, router = 3 * h * f, h * experts
    compute = 6 * h * f / flops
    travel = 2 * h * element_size * (1 - 1 / ep) / bandwidth
    return dict(parameters=experts * mlp + router, active_parameters=k * mlp + router, copies_of_an_expert=dp / ep, rows_of_an_expert=tokens * k / (experts / ep),
                allgather_over_alltoall=ep / k, compute_over_travel=compute / travel)
