# two regular expressions
import re
def partial_gradients(names, sequence_parallel):
    always = re.compile(r'\.[qk]_layernorm')
    tokens = re.compile(r'(linear_proj|linear_fc2)\.bias|_layernorm|position')
    return [n for n in names if always.search(n) or sequence_parallel and tokens.search(n)]
