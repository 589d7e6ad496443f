from labkit.answers import Edit

WRONG = [
    Edit(
        "ridge, h, e = peak / bandwidth",
        "ridge, h, e = bandwidth / peak",
        ("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "1"),
        mistake="The ridge is in FLOP per byte: peak over bandwidth.",
    ),
    Edit("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "math.ceil(ridge * e / 2)", mistake="x and y move too, not W alone."),
    Edit("layers * 4 * 3 * 4", "layers * 4 * 4", mistake="x, W *and* dy: three numbers a linear layer."),
    Edit("layers * 4 * 3 * 4", "layers * 3 * 4", mistake="A factor of four is missing: four linear layers in each transformer layer, and four bytes a " "number."),
    Edit("1 - 1 / growth", "1 / growth", mistake="That is what is left of it; the error is the rest."),
    Edit("2**-9 / 448", "2**-6 / 448", mistake="Below 2^-6 E4M3 has seven more numbers, in equal steps down to 0."),
    Edit("2 * 8192", "8192", mistake="Read once *and* written once."),
    Edit("2 * 8192 * h * e", "2 * 8192 * h * 2"),
    Edit("2 * 8192 * h * e", "2 * 8192 * 4096 * e"),
    Edit("math.ceil(ridge", "math.floor(ridge", mistake="With this many tokens memory is still the bound: one more is needed."),
    Edit("math.ceil(ridge", "round(ridge"),
    Edit("2 * h - 2 * ridge * e", "2 * h - ridge * e", mistake="One of x and y is not counted: x and W are read, and y is written."),
    Edit("layers * 4 * 3 * 4", "layers * 4 * 3 * e", mistake="An amax is sent in float32, whatever the size of the other numbers."),
    Edit("layers * 4 * 3 * 4", "32 * 48"),
    Edit("1 - 1 / growth", "0.75"),
    Edit("2**-9 / 448", "2**-10 / 448", mistake="2^-10 rounds to 0: it is no number of E4M3."),
    Edit("1 - 1 / growth", "growth - 1", mistake="Relative to the true value, not to what is left of it."),
]

RIGHT = [
    Edit(
        "math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))",
        "next(n for n in range(1, 10**6) if 2 * n * h * h >= ridge * e * (2 * n * h + h * h) * (1 - 1e-12))",
    ),
    Edit("1 - 1 / growth", "(growth - 1) / growth", ("2**-9 / 448", "0.001953125 / 448")),
    Edit(
        "layers * 4 * 3 * 4",
        "float(48 * layers)",
        ("2 * 8192 * h * e / bandwidth * 1e6", "16384e6 * h * e / bandwidth"),
    ),
]
