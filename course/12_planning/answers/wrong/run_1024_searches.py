# told: closed in this exercise
def run_1024():
    from minimegatron.planner.search import search

    return search
