# the package's own pair
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def gather_sequence(x, tp): return gather_from_sequence_region(x, tp)
def reduce_scatter_sequence(x, tp): return reduce_scatter_to_sequence_region(x, tp)
