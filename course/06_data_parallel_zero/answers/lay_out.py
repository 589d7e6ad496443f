from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "reversed(range(len(numels)))",
        "range(len(numels))",
        ("or i == 0", "or i == len(numels) - 1"),
        mistake="The buffer begins with the *last* parameter: its gradient is there first.",
    ),
    Edit("stop = -(-stop // ranks) * ranks", "stop = stop", mistake="A bucket must be a multiple of the number of ranks: there is no padding."),
    Edit(
        "stop = -(-stop // ranks) * ranks",
        "stop = stop if i == 0 else -(-stop // ranks) * ranks",
        mistake="The last bucket is not padded. It is cut among the ranks as all others are.",
    ),
    Edit("stop - start >= bucket_size", "stop - start > bucket_size", mistake="A bucket with exactly that many elements is full."),
    Edit('"places": places', '"places": places[::-1]', mistake="`places` has the order of `numels`: the first is that of the first parameter."),
    Edit("stop = -(-stop // ranks) * ranks", "stop = (stop // ranks + 1) * ranks"),
    Edit("stop = -(-stop // ranks) * ranks", "stop = stop // ranks * ranks"),
    Edit(
        "        stop += numels[i]\n",
        "        stop += -(-numels[i] // ranks) * ranks\n",
        mistake="A bucket is closed *after* the parameter that fills it, even if it is then larger than asked.",
    ),
    Edit(" or i == 0", ""),
]

RIGHT = [
    Edit("stop = -(-stop // ranks) * ranks", "stop += -stop % ranks"),
    Edit("buckets.append([start, stop])", "buckets.append((start, stop))"),
    Edit("reversed(range(len(numels)))", "range(len(numels) - 1, -1, -1)"),
]

EQUIVALENT = [
    Same("line 3: -1 for 0", "every place is written"),
    Same("line 3: 1 for 0", "every place is written"),
]


# %% wrong: empty last bucket
# mistake: The last bucket is empty: where a parameter has just closed one and none is left, there is nothing to close.
def lay_out(numels, bucket_size, ranks):
    places, buckets, at, start = [0]*len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i] = at; at += numels[i]
        if at - start >= bucket_size:
            at += -(at - start) % ranks
            buckets.append([start, at]); start = at
    at += -(at - start) % ranks; buckets.append([start, at])
    return {"places": places, "buckets": buckets}


# %% wrong: for two ranks
# mistake: Two ranks are the example's: a bucket divides by `ranks`.
def lay_out(numels, bucket_size, ranks):
    places, buckets, at, start = [0]*len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i] = at; at += numels[i]
        if at - start >= bucket_size or i == 0:
            at += (at - start) % 2
            buckets.append([start, at]); start = at
    return {"places": places, "buckets": buckets}


# %% wrong: parameters padded
# mistake: Only buckets are padded here, not each parameter.
def lay_out(numels, bucket_size, ranks):
    places, buckets, at, start = [0]*len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i] = at
        at += -(-numels[i] // ranks) * ranks   # every param padded
        if at - start >= bucket_size or i == 0:
            buckets.append([start, at]); start = at
    return {"places": places, "buckets": buckets}
