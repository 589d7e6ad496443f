# told: dy is not rounded
import torch
from exercises.to_fp8 import to_fp8

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, sx, sw, sdy):
        sx.note(x)
        sw.note(weight)
        ctx.scales, ctx.sdy = (sx.scale, sw.scale), sdy
        qx, qw = to_fp8(x * sx.scale, *E4M3), to_fp8(weight * sw.scale, *E4M3)
        ctx.kept = qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn)
        return qx @ qw.T / (sx.scale * sw.scale)

    @staticmethod
    def backward(ctx, dy):
        (qx, qw), (scale_x, scale_w), sdy = ctx.kept, ctx.scales, ctx.sdy
        sdy.note(dy)
        qdy = dy * sdy.scale
        return qdy @ qw.float() / (sdy.scale * scale_w), qdy.T @ qx.float() / (sdy.scale * scale_x), None, None, None
