# told: scales of their own amax
import torch
from exercises.to_fp8 import to_fp8
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, sx, sw, sdy):
        sx.note(x)
        sw.note(weight)
        ctx.s = (448.0 / x.abs().max().item()), (448.0 / weight.abs().max().item())
        ctx.sdy = sdy
        qx = to_fp8(x * (448.0 / x.abs().max().item()), *E4M3).to(torch.float8_e4m3fn)
        qw = to_fp8(weight * (448.0 / weight.abs().max().item()), *E4M3).to(torch.float8_e4m3fn)
        ctx.save_for_backward(qx, qw)
        return qx.float() @ qw.float().T / ((448.0 / x.abs().max().item()) * (448.0 / weight.abs().max().item()))
    @staticmethod
    def backward(ctx, dy):
        qx, qw = (t.float() for t in ctx.saved_tensors)
        sx, sw = ctx.s
        sdy = ctx.sdy.scale
        ctx.sdy.note(dy)
        q = to_fp8(dy * sdy, *E5M2)
        return q @ qw / (sdy * sw), q.T @ qx / (sdy * sx), None, None, None
