from labkit.answers import Edit

WRONG = [
    Edit("if (i < n) ", "", told="it has 10 numbers"),
    Edit("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x", told="never written"),
    Edit("blockIdx.x * blockDim.x", "blockIdx.x", told="never written"),
    Edit("blockIdx.x * blockDim.x", "blockIdx.x * gridDim.x", told="never written"),
    Edit("(n + 255) // 256", "n // 256", told="grid is a number from 1"),
    Edit("(n + 255) // 256", "n // 256 + 1", told="expected 2"),
    Edit("(n + 255) // 256", "n", told="grid is 512, expected 2"),
    Edit("i < n", "i <= n", told="it has 10 numbers"),
    Edit("i < n", "i < n - 1", told="y[9] was never written; missing: 1 of 10"),
    Edit("x[i] + r[i]", "x[i]", told="r is not added"),
    Edit("x[i] + r[i]", "x[i] * r[i]", told="this is x times r"),
    Edit("y[i] = x[i] + r[i]", "y[i] += x[i] + r[i]", told="is no number"),
    # right, by one thread after another
    Edit(
        "if (i < n)",
        "for (; i < n; i += gridDim.x * blockDim.x)",
        ("(n + 255) // 256", "1"),
        told="grid is 1, expected",
    ),
    Edit("if (i < n)", "if (i == 0) for (i = 0; i < n; ++i)", told="neighbouring threads"),
    Edit("    kernel(x, r, y, n, grid=blocks, block=256)\n", "    y = x + r\n", told="no kernel ran"),
    # a register that was given no value
    Edit("y[i] = x[i] + r[i];", "{ float v; v += x[i]; y[i] = v + r[i]; }", told="a variable that was given no value"),
    Edit("y[i] = x[i] + r[i];", "{ float v[2]; v[0] += x[i]; y[i] = v[0] + r[i]; }", told="was given no value"),
    Edit("kernel(x, r, y, n", "kernel(x + r, torch.zeros_like(x), y, n", told="is neither x nor r"),
]

RIGHT = [
    Edit("if (i < n) y", "if (i >= n) return;\n  y", ("(n + 255) // 256", "-(-n // 256)")),
    # blocks of another size
    Edit("(n + 255) // 256", "(n + 63) // 64", ("block=256", "block=64")),
    # pointers, and a function of one number
    Edit(
        "__global__",
        "__device__ float sum(float a, float b) { return a + b; }\n__global__",
        ("y[i] = x[i] + r[i];", "*(y + i) = sum(*(x + i), __ldg(&r[i]));"),
    ),
]
