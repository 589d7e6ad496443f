# told: computes k rows for each token
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    expert, router = 3 * h * f, experts * h
    seconds = 2 * expert * tokens / flops
    travel = 2 * k * tokens * h * element_size * (ep - 1) / ep / bandwidth
    return {
        "parameters": experts * expert + router, "active_parameters": k * expert + router,
        "copies_of_an_expert": dp // ep, "rows_of_an_expert": k * tokens * ep / experts,
        "allgather_over_alltoall": ep / k, "compute_over_travel": seconds / travel,
    }
