def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    return dict(
        parameters=experts * h * (1 + 3 * f), active_parameters=h * (experts + 3 * k * f), copies_of_an_expert=dp / ep,
        rows_of_an_expert=tokens * ep * k / experts,
        allgather_over_alltoall=((ep - 1) * tokens) / (k * tokens * (ep - 1) / ep),
        compute_over_travel=3 * f * bandwidth * ep / (flops * element_size * (ep - 1)),
    )
