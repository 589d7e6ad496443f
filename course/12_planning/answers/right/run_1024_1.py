# another layout
def run_1024():
    return dict(tp=4, cp=2, pp=2, v=8, micro=2, zero=2, recompute="none", left=11.1, largest="activations")
