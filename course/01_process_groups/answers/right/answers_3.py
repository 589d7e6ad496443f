# NumPy: a grid of ranks, one column of it
import numpy
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dense = numpy.arange(world).reshape(pp, -1, cp, tp)
    expert = numpy.arange(world).reshape(pp, -1, ep, etp)
    peers = dense[0, :, :, 0].ravel()
    return dict(dp=dense.shape[1], edp=expert.shape[1], same_weights_as_rank_0=peers[:4],
                all_reduce_seconds=numpy.float64(gigabytes) * 2 * (1 - 1 / peers.size) / gb_per_second)
