from labkit.answers import Edit

WRONG = [
    Edit("to_fp8(x * sx.scale, *E4M3)", "to_fp8(x.mul_(sx.scale), *E4M3)", told="changes its input `x`"),
    Edit("to_fp8(weight * sw.scale", "to_fp8(weight.data.mul_(sw.scale)", told="changes its input `weight`"),
    Edit("sdy.note(dy)", "sdy.note(dy.abs_())", told="changes its input `dy`"),
    Edit("to_fp8(x * sx.scale, *E4M3)", "to_fp8(x * sx.scale, *E5M2)", told="x goes to E4M3"),
    Edit("qdy.T @", "(dy * sdy.scale).T @", told="dy is not rounded in the product for dw"),
    Edit("dx = qdy @", "dx = (dy * sdy.scale) @", told="dy is not rounded in the product for dx"),
    Edit(
        "sx.note(x)",
        "sx.note(x)\n        own = 448 / x.abs().max().item()",
        ("(sx.scale, sw.scale), sdy", "(own, sw.scale), sdy"),
        ("x * sx.scale", "x * own"),
        ("/ (sx.scale * sw.scale)", "/ (own * sw.scale)"),
        told="x is cast with a scale of its own amax",
    ),
    Edit("to_fp8(dy * sdy.scale, *E5M2)", "to_fp8(dy * sdy.scale, *E4M3)", told="dy goes to E5M2"),
    Edit(
        "(sx.scale, sw.scale), sdy",
        "(sx, sw), sdy",
        ("(sdy.scale * scale_w)", "(sdy.scale * scale_w.scale)"),
        ("(sdy.scale * scale_x)", "(sdy.scale * scale_x.scale)"),
        told="the scales moved on",
    ),
    Edit("qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn)", "qx, qw", told="one a number"),
    Edit("/ (sx.scale * sw.scale)", "/ sx.scale", told="off by one factor"),
    Edit("        sdy.note(dy)\n", "", told="note(dy)"),
    Edit("sx.note(x)", "sx.note(x * sx.scale)", told="before it is scaled"),
    Edit(
        "to_fp8(x * sx.scale, *E4M3), to_fp8(weight * sw.scale, *E4M3)",
        "x * sx.scale, weight * sw.scale",
        told="wrong | one a number",
    ),
    Edit(
        "sdy.scale * scale_w",
        "sdy.scale * scale_x",
    ),
    Edit("sw.note(weight)", "sw.note(weight.T[0])"),
    Edit("        sx.note(x)\n", "", told="note(x)"),
    Edit("qdy = to_fp8(dy * sdy.scale, *E5M2)", "qdy = to_fp8(dy, *E5M2) * sdy.scale"),
    Edit("qx @ qw.T / (sx.scale * sw.scale)", "(qx @ qw.T / (sx.scale * sw.scale)).bfloat16()", told="dtype"),
    Edit("qx @ qw.T /", "(qx @ qw.T).bfloat16().float() /", told="wrong"),
    Edit("qx @ qw.T / (sx.scale * sw.scale)", "qx @ qw.T * sx.scale * sw.scale", told="y is off by one factor"),
    # the tensor that was given, not the one that was rounded
    Edit("return qx @ qw.T / (sx.scale * sw.scale)", "return x @ weight.T", told="wrong"),
    Edit("return dx,", "return None,", told="dx"),
    Edit(
        "ctx.save_for_backward(qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn))",
        "ctx.save_for_backward(qx.to(torch.float8_e4m3fn), qw)",
        told="bytes are kept",
    ),
    Edit(
        "ctx.save_for_backward(qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn))",
        "ctx.save_for_backward(qx.to(torch.float8_e5m2), qw.to(torch.float8_e4m3fn))",
        told="dw",
    ),
    Edit(
        "save_for_backward(qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn))",
        "kept = qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn)",
        ("saved_tensors", "kept"),
        (
            """qdy = to_fp8(dy * sdy.scale, *E5M2)
        dx = qdy @ qw.float() / (sdy.scale * scale_w)
        return dx, qdy.T @ qx.float() / (sdy.scale * scale_x), None, None, None""",
            """qdy = dy * sdy.scale
        return qdy @ qw.float() / (sdy.scale * scale_w), qdy.T @ qx.float() / (sdy.scale * scale_x), None, None, None""",
        ),
        told="dy is not rounded",
    ),
]

RIGHT = [
    # by torch's own cast
    Edit(
        "from exercises.to_fp8 import to_fp8\n",
        """
def to_fp8(x, mantissa, lowest, top):
    return x.clamp(-top, top).to({3: torch.float8_e4m3fn, 2: torch.float8_e5m2}[mantissa]).float()
""",
    ),
    # divide the factors, not the product
    Edit(
        "return qx @ qw.T / (sx.scale * sw.scale)",
        "return (qx / sx.scale) @ (qw / sw.scale).T",
        (
            "dx = qdy @ qw.float() / (sdy.scale * scale_w)",
            "dx = torch.einsum('no,oi->ni', qdy / sdy.scale, qw.float() / scale_w)",
        ),
    ),
    Edit(
        "ctx.scales, ctx.sdy = (sx.scale, sw.scale), sdy",
        "ctx.scales, ctx.sdy = (float(sx.scale), float(sw.scale)), sdy",
        ("        sdy.note(dy)\n", "        ctx.sdy.note(dy.clone())\n"),
    ),
]


# %% right: bytes on ctx, products of what is divided
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
        ctx.kept = (qx.to(torch.float8_e4m3fn).view(torch.uint8), qw.to(torch.float8_e4m3fn).view(torch.uint8))
        return qx @ qw.T / (sx.scale * sw.scale)

    @staticmethod
    def backward(ctx, dy):
        (qx, qw), (scale_x, scale_w) = (t.view(torch.float8_e4m3fn).float() for t in ctx.kept), ctx.scales
        ctx.sdy.note(dy)
        qdy = to_fp8(dy * ctx.sdy.scale, *E5M2) / ctx.sdy.scale
        return torch.mm(qdy, qw) / scale_w, torch.einsum("no,ni->oi", qdy, qx).div(scale_x), None, None, None


# %% right: in float64, the scales saved as tensors
import torch
from exercises.to_fp8 import to_fp8

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, sx, sw, sdy):
        for state, given in ((sx, x), (sw, weight)):
            state.note(given)
        q = [to_fp8(t * s, *E4M3).to(torch.float8_e4m3fn) for t, s in ((x, sx.scale), (weight, sw.scale))]
        ctx.save_for_backward(*q, torch.tensor(sx.scale), torch.tensor(sw.scale))
        ctx.sdy = sdy
        return torch.nn.functional.linear(q[0].double() / sx.scale, q[1].double() / sw.scale).float()

    @staticmethod
    def backward(ctx, dy):
        qx, qw, scale_x, scale_w = ctx.saved_tensors
        ctx.sdy.note(dy)
        qdy = to_fp8(dy * ctx.sdy.scale, *E5M2).to(torch.float8_e5m2).double()
        dx, dw = qdy @ qw.double(), (qx.double().T @ qdy).T
        return (dx / (ctx.sdy.scale * scale_w)).float(), (dw / (ctx.sdy.scale * scale_x)).float(), None, None, None


# %% wrong: dy becomes infinite
# told: beyond the top
import torch
from exercises.to_fp8 import to_fp8
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, sx, sw, sdy):
        sx.note(x)
        sw.note(weight)
        ctx.s = sx.scale, sw.scale
        ctx.sdy = sdy
        qx = to_fp8(x * sx.scale, *E4M3).to(torch.float8_e4m3fn)
        qw = to_fp8(weight * sw.scale, *E4M3).to(torch.float8_e4m3fn)
        ctx.save_for_backward(qx, qw)
        return qx.float() @ qw.float().T / (sx.scale * sw.scale)
    @staticmethod
    def backward(ctx, dy):
        qx, qw = (t.float() for t in ctx.saved_tensors)
        sx, sw = ctx.s
        sdy = ctx.sdy.scale
        ctx.sdy.note(dy)
        q = (dy * sdy).to(torch.float8_e5m2).float()
        return q @ qw / (sdy * sw), q.T @ qx / (sdy * sx), None, None, None


# %% wrong: scales of its own
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
