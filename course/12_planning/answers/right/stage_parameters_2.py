# floats
def stage_parameters(model, layers, first, last, tp, ep, etp):
    import math
    h, d, f, E = model["h"], model["d"], model["f"], model["experts"]
    head = d*h*(model["heads"]+model["groups"])*2/tp
    V = math.ceil(model["vocab"]/(128*tp))*128*tp
    tables = (first + last) if not (model["tied"] and first and last) else 1
    dense = layers*(2*h+head+(h*E if E else 3*h*f/tp)) + last*h + tables*V*h/tp
    return {"dense": dense, "experts": layers*E/ep*3*h*f/etp}
