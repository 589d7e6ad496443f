# told: divides by `ranks`
def lay_out(numels, bucket_size, ranks):
    places, buckets, at, start = [0]*len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i] = at; at += numels[i]
        if at - start >= bucket_size or i == 0:
            at += (at - start) % 2
            buckets.append([start, at]); start = at
    return {"places": places, "buckets": buckets}
