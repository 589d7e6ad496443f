# told: closed
from minimegatron.parallel.pipeline.schedules import alternate, interleaved_table, interleaved_warmup
def interleaved(rank, p, m, v):
    table = interleaved_table(m, v, p)
    back = [(i, v - 1 - c) for i, c in table]
    return [str(a) for a in alternate(table, back, interleaved_warmup(p, rank, v, p))]
