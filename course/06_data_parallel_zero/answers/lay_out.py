from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "reversed(range(len(numels)))",
        "range(len(numels))",
        ("or i == 0", "or i == len(numels) - 1"),
        told="begins with the *last*",
    ),
    Edit("stop = -(-stop // ranks) * ranks", "stop = stop", told="no padding"),
    Edit(
        "stop = -(-stop // ranks) * ranks",
        "stop = stop if i == 0 else -(-stop // ranks) * ranks",
        told="last bucket is not padded",
    ),
    Edit("stop - start >= bucket_size", "stop - start > bucket_size", told="is full"),
    Edit('"places": places', '"places": places[::-1]', told="order of `numels`"),
    Edit("stop = -(-stop // ranks) * ranks", "stop = (stop // ranks + 1) * ranks"),
    Edit("stop = -(-stop // ranks) * ranks", "stop = stop // ranks * ranks"),
    Edit(
        "        stop += numels[i]\n",
        "        stop += -(-numels[i] // ranks) * ranks\n",
        told="not each parameter | *after*",
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
# told: The last bucket is empty
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
# told: divides by `ranks`
def lay_out(numels, bucket_size, ranks):
    places, buckets, at, start = [0]*len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i] = at; at += numels[i]
        if at - start >= bucket_size or i == 0:
            at += (at - start) % 2
            buckets.append([start, at]); start = at
    return {"places": places, "buckets": buckets}


# %% wrong: parameters padded
# told: not each parameter
def lay_out(numels, bucket_size, ranks):
    places, buckets, at, start = [0]*len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i] = at
        at += -(-numels[i] // ranks) * ranks   # every param padded
        if at - start >= bucket_size or i == 0:
            buckets.append([start, at]); start = at
    return {"places": places, "buckets": buckets}
