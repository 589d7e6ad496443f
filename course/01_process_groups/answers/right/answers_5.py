from exercises.axis_groups import axis_groups
from exercises.bytes_sent import bytes_sent
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // tp // cp // pp
    [first, *_] = axis_groups({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, ["dp", "cp"])
    return dict(dp=dp, edp=world / pp / ep / etp, same_weights_as_rank_0=tuple(first[:4]),
                all_reduce_seconds=bytes_sent("all_reduce", gigabytes, len(first)) / gb_per_second)
