# told: already
# ep divides once more
def state_bytes(dense, experts, layout, zero, precision):
    n = layout["dp"]*layout["cp"]
    e = layout["tp"]*n//(layout["etp"]*layout["ep"])
    experts = experts // layout["ep"]
    b = {"bf16": (2,4,4,8), "fp32": (4,4,0,8)}[precision]
    return {k: (dense//n*x + experts//e*x if zero>=z else (dense+experts)*x) for k,x,z in zip(("parameters","gradients","main parameters","moments"),b,(3,2,1,1))}
