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
