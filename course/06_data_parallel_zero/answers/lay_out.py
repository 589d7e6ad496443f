from labkit.answers import Edit, Same

_PAD = "stop = -(-stop // ranks) * ranks"

WRONG = [
    Edit(
        "reversed(range(len(numels)))", "range(len(numels))", ("or i == 0", "or i == len(numels) - 1"),
        mistake="The buffer begins with the *last* parameter: its gradient is there first.",
    ),
    Edit('"places": places', '"places": places[::-1]', mistake="`places` has the order of `numels`: the first is that of the first parameter."),
    Edit(_PAD, "pass", mistake="A bucket must be a multiple of the number of ranks: there is no padding."),
    Edit("stop += numels[i]", "stop += -(-numels[i] // ranks) * ranks", mistake="Only buckets are padded, not each parameter."),
    Edit(_PAD, "stop += stop % 2", mistake="A bucket is a multiple of `ranks`, not of two."),
    Edit(_PAD, f"{_PAD} if i else stop", mistake="The last bucket is not padded. It is cut among the ranks as all others are."),
    Edit("stop - start >= bucket_size", "stop - start > bucket_size", mistake="A bucket with exactly that many elements is full."),
    Edit(
        "        places[i] = stop\n",
        "        if start < stop and stop - start + numels[i] > bucket_size:\n"
        f"            {_PAD}\n            buckets.append([start, stop])\n            start = stop\n"
        "        places[i] = stop\n",
        ("stop - start >= bucket_size or i == 0", "i == 0"),
        mistake="A bucket is closed *after* the parameter that fills it, even if it is then larger than asked.",
    ),
    Edit(
        " or i == 0", "", ("    return {", "    buckets.append([start, -(-stop // ranks) * ranks])\n    return {"),
        mistake="The last bucket is empty: where a parameter has just closed one and none is left, there is nothing to close.",
    ),
    Edit(_PAD, "stop = (stop // ranks + 1) * ranks"),
    Edit(_PAD, "stop = stop // ranks * ranks"),
    Edit(" or i == 0", ""),
]

RIGHT = [
    Edit(_PAD, "stop += -stop % ranks"),
    Edit("buckets.append([start, stop])", "buckets.append((start, stop))"),
    Edit("reversed(range(len(numels)))", "range(len(numels) - 1, -1, -1)"),
]

EQUIVALENT = [
    Same("line 3: -1 for 0", "every place is written"),
    Same("line 3: 1 for 0", "every place is written"),
]
