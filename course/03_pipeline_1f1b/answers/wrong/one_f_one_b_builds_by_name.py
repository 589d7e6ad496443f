# told: closed
import importlib
def one_f_one_b(rank, p, m):
    package = importlib.import_module("minimegatron.parallel.pipeline.schedules")
    return list(map(str, package.build_schedule("1f1b", p, m).actions[rank]))
