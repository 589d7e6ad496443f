# by what is complete
def partial_gradients(names, sequence_parallel):
    cut = ('word_embeddings.weight', 'output_layer.weight', 'linear_qkv.weight', 'linear_qkv.bias', 'linear_fc1.weight', 'linear_fc1.bias', 'linear_proj.weight', 'linear_fc2.weight')
    replicated = [n for n in names if not n.endswith(cut)]
    return replicated if sequence_parallel else [n for n in replicated if n.split('.')[-2] in ('q_layernorm', 'k_layernorm')]
