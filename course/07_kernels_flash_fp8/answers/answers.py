from labkit.answers import Edit

WRONG = [
    Edit("ridge, h, e = peak / bandwidth", "ridge, h, e = bandwidth / peak", told="tokens_for_arithmetic"),
    Edit("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "math.ceil(ridge * e / 2)", mistake="x and y move too, not W alone."),
    Edit("math.ceil(ridge", "math.floor(ridge", mistake="With this many tokens memory is still the bound: one more is needed."),
    Edit("math.ceil(ridge", "round(ridge"),
    Edit("2 * h - 2 * ridge * e", "2 * h - ridge * e", mistake="One of x and y is not counted: x and W are read, and y is written."),
    Edit("1e6 * max(launch, 2 * one)", "1e6 * 2 * one", told="fused_microseconds"),
    Edit("1e6 * max(launch, 2 * one)", "1e6 * (launch + 2 * one)", told="fused_microseconds"),
    Edit("1e6 * max(launch, 2 * one)", "1e6 * max(launch, one)", told="fused_microseconds"),
    # seven passes as one, or the longest of six
    Edit("3 * max(launch, 2 * one) + max(launch, one) + 2 * launch", "max(6 * launch, 7 * one)", told="eager_microseconds"),
    Edit("3 * max(launch, 2 * one) + max(launch, one) + 2 * launch", "7 * one", told="eager_microseconds"),
    Edit("3 * max(launch, 2 * one) + max(launch, one) + 2 * launch", "3 * max(launch, 2 * one) + max(launch, one)", mistake="Eager: the kernels of `add` and `rsqrt` move next to nothing, and are launched all the same."),
    Edit("3 * max(launch, 2 * one) + max(launch, one) + 2 * launch", "2 * max(launch, 2 * one) + max(launch, one) + 2 * launch", mistake="Eager: `mul` is two kernels, six in all."),
    Edit("3 * max(launch, 2 * one) + max(launch, one) + 2 * launch", "7 * one + 6 * launch", mistake="Eager: in a long series a launch goes on while the kernel before runs; each kernel takes the longer of the two."),
    Edit("tokens * h * e / bandwidth", "tokens * h * 2 / bandwidth", told="microseconds"),
    Edit("layers * 4 * 3 * 4", "layers * 4 * 4"),
    Edit("layers * 4 * 3 * 4", "layers * 3 * 4", mistake="A factor of four is missing: four linear layers in each transformer layer, and four bytes a number."),
    Edit("layers * 4 * 3 * 4", "layers * 4 * 3 * e", told="amax_bytes"),
    Edit("1 - 1 / growth", "1 / growth", told="cut_off"),
    Edit("1 - 1 / growth", "growth - 1", told="cut_off"),
    Edit("2**-9 / 448", "2**-6 / 448", mistake="Below 2^-6 E4M3 has seven more numbers, in equal steps down to 0."),
    Edit("2**-9 / 448", "2**-10 / 448", told="smallest_kept"),
]

RIGHT = [
    Edit(
        "math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))",
        "next(n for n in range(1, 10**6) if 2 * n * h * h >= ridge * e * (2 * n * h + h * h) * (1 - 1e-12))",
    ),
    Edit("1 - 1 / growth", "(growth - 1) / growth", ("2**-9 / 448", "0.001953125 / 448")),
    Edit(
        "3 * max(launch, 2 * one) + max(launch, one) + 2 * launch",
        "sum(max(launch, n * one) for n in (2, 1, 0, 0, 2, 2))",
        ("layers * 4 * 3 * 4", "float(48 * layers)"),
    ),
]
