# another layout
def run_1024():
    return dict(tp=4, cp=1, pp=4, v=10, micro=1, zero=3, recompute="none", left=18.8, largest="activations")
