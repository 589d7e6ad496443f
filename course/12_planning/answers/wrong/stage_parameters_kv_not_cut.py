# told: as queries are
# keys and values are few, so every rank has all of them
def stage_parameters(model, layers, first, last, tp, ep, etp):
    h, d, f = model["h"], model["d"], model["f"]
    per = 2*h + (2*h*model["heads"]*d)//tp + 2*h*model["groups"]*d
    exp = 0
    if model["experts"]:
        per += h*model["experts"]
        exp = layers*(model["experts"]//ep)*3*h*f//etp
    else:
        per += 3*h*f//tp
    V = -(-model["vocab"]//(128*tp))*128*tp
    n = layers*per + first*V*h//tp + last*h
    if last and not (model["tied"] and first): n += V*h//tp
    return {"dense": n, "experts": exp}
