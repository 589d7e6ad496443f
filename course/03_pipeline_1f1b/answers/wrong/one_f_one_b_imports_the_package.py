# told: closed
import minimegatron.parallel.pipeline.schedules as package
def one_f_one_b(rank, p, m):
    return " ".join(str(action) for action in package.one_f_one_b(p, m).actions[rank])
