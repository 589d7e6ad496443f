"""Updates of the weights: the step over fp32 main parameters, gradient norm and clipping, loss scale, schedule."""
