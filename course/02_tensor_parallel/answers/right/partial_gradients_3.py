# by the last two words of a name
def partial_gradients(names, sequence_parallel):
    out = ()
    for n in names:
        module, kind = n.split('.')[-2:]
        if module in ('q_layernorm', 'k_layernorm'):
            out += (n,)
        elif sequence_parallel and (module.endswith('layernorm') or module.startswith('position') or (module, kind) in {('linear_proj', 'bias'), ('linear_fc2', 'bias')}):
            out += (n,)
    return out
