"""Lab 07's checks: the stub scores nothing, the solution everything, other right answers too, each mistake its hint."""

from __future__ import annotations

from importlib import import_module

import torch

from tests.labkit.marked import Marked, said

FP8 = import_module("course.07_kernels_flash_fp8.checks.fp8")
MARKED = Marked("07_kernels_flash_fp8", imports=True)
changed = MARKED.changed
HEAD = "import torch\nimport torch.distributed as dist\n"


def kernel(body: str, grid: str, block: str, before: str = "") -> str:
    """A whole cell from the body of a kernel and its launch."""
    return (
        f'import torch\nfrom labkit.cuda import Kernel\n\nkernel = Kernel(r"""{before}\n'
        "__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {\n"
        f'{body}\n}}\n""")\n\ndef norm(x, gamma, eps):\n    rows, cols = x.shape\n    y = torch.empty_like(x)\n'
        f"    kernel(x, gamma, y, rows, cols, eps, grid={grid}, block={block})\n    return y\n"
    )


test_the_stub_scores_nothing_and_the_solution_everything = MARKED.stubs_and_solutions()


def test_the_reference_of_the_cast_is_torchs_cast_for_every_bf16_number_and_many_others():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((bits, torch.randn(20000) * torch.exp(4 * torch.randn(20000))))
    for format, dtype in ((FP8.E4M3, torch.float8_e4m3fn), (FP8.E5M2, torch.float8_e5m2)):
        want = x.clamp(-format["top"], format["top"]).to(dtype)
        assert torch.equal(
            FP8.to_fp8(x, **format).to(dtype).view(torch.uint8)[~x.isnan()], want.view(torch.uint8)[~x.isnan()]
        )


# Every warp has a row of its own; the sum is handed down by shuffles.
WARP_A_ROW = kernel("""
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
  if (row >= rows) return;
  const float *in = x + row * cols;
  double sum = 0;
  for (int i = lane; i < cols; i += 32) sum += (double)in[i] * in[i];
  for (int o = 1; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = lane; i < cols; i += 32) *(y + row * cols + i) = in[i] * (float)rsqrt(sum / cols + eps) * gamma[i];""",
  "(rows + 1) // 2", "64")  # fmt: skip

# A grid of four blocks for all rows; shared memory is used again, so it needs a barrier at the end of each row.
FEW_BLOCKS = kernel("""
  __shared__ float parts[128];
  __shared__ float rstd;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += square(x[row * cols + i]);
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
      sum = 0;
      for (int i = threadIdx.x; i < blockDim.x; i += 32) sum += parts[i];
      for (int o = 16; o; o >>= 1) sum += __shfl_down_sync(0xffffffff, sum, o);
      if (threadIdx.x == 0) rstd = 1 / sqrtf(sum / cols + eps);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < cols; i += blockDim.x) y[row * cols + i] = x[row * cols + i] * rstd * gamma[i];
    __syncthreads();
  }""", "4", "128", "__device__ float square(float v) { return v * v; }")  # fmt: skip

# The row stays in registers: x is read once.
IN_REGISTERS = kernel("""
  __shared__ float parts[8];
  const bool wide = cols % 4 == 0 && cols <= 4 * 4 * 256;
  const long long at = (long long)blockIdx.x * cols;
  float4 kept[4];
  float sum = 0;
  if (wide) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int i = threadIdx.x + k * 256;
      if (i < cols / 4) {
        kept[k] = reinterpret_cast<const float4*>(x + at)[i];
        sum += kept[k].x * kept[k].x + kept[k].y * kept[k].y + kept[k].z * kept[k].z + kept[k].w * kept[k].w;
      }
    }
  } else for (int i = threadIdx.x; i < cols; i += 256) sum += x[at + i] * x[at + i] / 2 + x[at + i] * x[at + i] / 2 * 0 + 0;
  if (!wide) { sum = 0; for (int i = threadIdx.x; i < cols; i += 256) { float v = x[at + i]; sum += v * v; } }
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffff, sum, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < 8; ++w) sum += parts[w];
  const float r = rsqrtf(sum / cols + eps);
  if (wide) {
    for (int k = 0; k < 4; ++k) {
      int i = threadIdx.x + k * 256;
      if (i < cols / 4) {
        float4 g = ((const float4*)gamma)[i];
        float4* out = (float4*)(y + at);
        out[i] = make_float4(kept[k].x * r * g.x, kept[k].y * r * g.y, kept[k].z * r * g.z, kept[k].w * r * g.w);
      }
    }
  } else for (int i = threadIdx.x; i < cols; i += 256) y[at + i] = x[at + i] * r * gamma[i];""", "rows", "256")  # fmt: skip
IN_REGISTERS = IN_REGISTERS.replace(
    "  } else for (int i = threadIdx.x; i < cols; i += 256) sum += x[at + i] * x[at + i] / 2 + x[at + i] * x[at + i] / 2 * 0 + 0;\n",
    "  }\n",
)

RIGHT = {
    "norm_bytes": [
        "def norm_bytes(rows, cols, element_size):\n    n = rows * cols\n    return dict(fused=n * element_size * 2, eager=n * 7 * element_size)",
        "def norm_bytes(rows, cols, element_size):\n    reads, writes = [1, 1, 1, 1], [1, 0, 1, 1]\n    b = rows * cols * element_size\n"
            "    return {'eager': float(b * (sum(reads) + sum(writes))), 'fused': float(2 * b)}",
        "import math\ndef norm_bytes(rows, cols, element_size):\n    return {k: math.prod((v, rows, cols, element_size)) for k, v in (('eager', 7), ('fused', 2))}",
    ],
    "at_best": [
        "def at_best(flops, nbytes, peak, bandwidth):\n    i = flops / nbytes\n    rate = min(peak, i * bandwidth)\n"
            "    return {'intensity': i, 'seconds': flops / rate, 'bound': 'memory' if i < peak / bandwidth else 'arithmetic'}",
        "def at_best(flops, nbytes, peak, bandwidth):\n    s, b = max((flops / peak, 'arithmetic'), (nbytes / bandwidth, 'memory'))\n    return dict(seconds=s, bound=b, intensity=flops / nbytes)",
        changed("at_best", ("max(computing, moving)", "moving if moving > computing else computing")),
    ],
    "norm_rows": [
        WARP_A_ROW,
        changed("norm_rows", ("if (row >= rows) return;", "for (; row < rows; row += gridDim.x * blockDim.x) {"), ("* gamma[i];", "* gamma[i]; }"),
            ("grid=(rows + 63) // 64, block=64", "grid=1, block=32")),
        # pointers that move
        changed("norm_rows", ("float sum = 0;", "float sum = 0; const float* in = x; in += row * cols; float* out = &y[row * cols];"),
            ("float v = x[row * cols + i];", "float v = *in++;"), ("float rstd", "in = x + row * cols; float rstd"),
            ("y[row * cols + i] = x[row * cols + i] * rstd * gamma[i]", "{ out[i] = in[i] * rstd; out[i] *= gamma[i]; }"),
            ("out[i] = in[i] * rstd; out[i] *= gamma[i];", "out[i] = in[i] * rstd * gamma[i];")),
    ],
    "norm_block": [
        FEW_BLOCKS,
        # barriers at the end of each step
        changed("norm_block", ("parts[threadIdx.x] = sum;", "parts[threadIdx.x] = sum; __syncthreads();"), ("    __syncthreads();\n    if", "    if"),
            ("parts[threadIdx.x + s];\n  }\n  __syncthreads();", "parts[threadIdx.x + s];\n    __syncthreads();\n  }")),
        # one thread adds up
        changed("norm_block", ("for (int s = blockDim.x / 2; s > 0; s /= 2) {\n    __syncthreads();\n    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];\n  }",
            "__syncthreads();\n  if (threadIdx.x == 0) for (int i = 1; i < 256; ++i) parts[0] += parts[i];")),
    ],
    "norm_warp": [
        IN_REGISTERS,
        changed("norm_warp", ("lane < warps ? parts[lane] : 0.0f", "lane < warps ? parts[lane] : 0"), ("block=256", "block=96")),
        # one warp a row: no barrier at all
        changed("norm_warp", ("  if (lane == 0) parts[warp] = sum;\n  __syncthreads();\n  sum = warp_sum(lane < warps ? parts[lane] : 0.0f);\n", ""), ("block=256", "block=32")),
    ],
    "flash_bytes": [
        "def flash_bytes(s, d, rows, cols, element_size):\n    kv = 0\n    for i in range(s // rows):\n        for j in range(s // cols):\n            if j * cols <= (i + 1) * rows - 1:\n                kv += 2 * cols * d\n"
            "    return dict(standard=(s * d * 2 + s * s + s * s * 2 + s * s + s * d * 2) * element_size, flash=element_size * (kv + s * d * 2 + s))",
        "import math\ndef flash_bytes(s, d, rows, cols, element_size):\n    blocks = sum(math.ceil((i + 1) * rows / cols) for i in range(s // rows))\n"
            "    return {'standard': 4 * s * (s + d) * element_size, 'flash': (s * (2 * d + 1) + 2 * d * cols * blocks) * element_size}",
        changed("flash_bytes", ("keys += (last // cols + 1) * cols", "keys += len(range(0, last + 1, cols)) * cols")),
    ],
    "flash_tiles": [
        # merged pieces: each block of keys is a small attention
        HEAD + "def flash_tiles(memory, s, d, rows, cols):\n    for a in range(0, s, rows):\n        q = memory.load('q', a, a + rows)\n        out, lse = torch.zeros(rows, d), torch.full((rows,), -torch.inf)\n"
            "        for b in range(0, a + rows, cols):\n            S = memory.load('k', b, b + cols) @ q.T / d ** .5\n            hide = torch.arange(b, b + cols)[:, None] > torch.arange(a, a + rows)\n"
            "            S = S.masked_fill(hide, -torch.inf).T\n            l = torch.logsumexp(S, 1)\n            new = torch.logaddexp(lse, l)\n"
            "            p = torch.exp(S - new[:, None].nan_to_num(neginf=0.0))\n            out = out * torch.exp(lse - new.nan_to_num(neginf=0.0))[:, None] + p @ memory.load('v', b, b + cols)\n            lse = new\n"
            "        memory.store('out', a, a + rows, out)\n        memory.store('lse', a, a + rows, lse)",
        # from the last block of queries to the first, blocks of keys backwards, base two
        HEAD + "import math\ndef flash_tiles(memory, s, d, rows, cols):\n    for a in reversed(range(0, s, rows)):\n        q = memory.load('q', a, a + rows) * (math.log2(math.e) / d ** .5)\n        m, l, o = torch.full((rows, 1), -1e30), 0.0, 0.0\n"
            "        for b in reversed(range(0, a + rows, cols)):\n            k, v = (memory.load(n, b, b + cols) for n in 'kv')\n            seen = torch.arange(a, a + rows)[:, None] >= torch.arange(b, b + cols)\n"
            "            S = torch.where(seen, q @ k.T, -torch.inf)\n            n = torch.maximum(m, S.amax(1, True))\n            p, c = torch.exp2(S - n), torch.exp2(m - n)\n            l, o, m = l * c + p.sum(1, True), o * c + p @ v, n\n"
            "        memory.store('out', a, a + rows, o / l)\n        memory.store('lse', a, a + rows, ((m + torch.log2(l)) / math.log2(math.e)).flatten())",
        changed("flash_tiles", ("for start in range(0, first + rows, cols):", "for start in [c for c in range(0, s, cols) if c < first + rows]:")),
    ],
    "to_fp8": [
        # integers: round the bits of a float32
        HEAD + "def to_fp8(x, digits, lowest, top):\n    a = x.float().abs().clamp(max=top)\n    u = a.view(torch.int32)\n    cut = 23 - digits\n    u = u + (1 << (cut - 1)) - 1 + (u >> cut & 1)\n"
            "    normal = (u >> cut << cut).view(torch.float32)\n    small = torch.round(a * 2.0 ** (digits - lowest)) * 2.0 ** (lowest - digits)\n    return torch.copysign(torch.where(a < 2.0 ** lowest, small, normal), x)",
        # a magic number that pushes the last digits out
        HEAD + "def to_fp8(x, digits, lowest, top):\n    y = x.double().clamp(-top, top)\n    e = torch.floor(torch.log2(y.abs())).clamp(min=lowest)\n    magic = 1.5 * 2.0 ** (52 + e - digits)\n    return ((y + magic) - magic).float()",
        # the grid, and its nearest number
        HEAD + "def to_fp8(x, digits, lowest, top):\n    grid = [m * 2.0 ** (lowest - digits) for m in range(2 ** digits)]\n    e = lowest\n    while 2.0 ** e <= top:\n        grid += [(1 + m / 2 ** digits) * 2.0 ** e for m in range(2 ** digits)]\n        e += 1\n"
            "    grid = torch.tensor([g for g in grid if g <= top], dtype=torch.float64)\n    gap = (x.double().abs().clamp(max=top)[..., None] - grid).abs()\n    tied = gap == gap.amin(-1, keepdim=True)\n"
            "    even = torch.arange(len(grid)) % 2 == 0\n    i = (tied.int() * 2 + (tied & even).int()).argmax(-1)\n    return torch.copysign(grid[i].float(), x)",
    ],
    "tile_scales": [
        "import torch\nimport torch.nn.functional as F\ndef tile_scales(x, tile, top):\n    m, n = tile\n    p = F.pad(x.abs(), (0, -x.shape[1] % n, 0, -x.shape[0] % m))\n"
            "    a = p.unflatten(1, (-1, n)).unflatten(0, (-1, m)).amax((1, 3))\n    return torch.where(a > 0, torch.exp2((top / a.double()).log2().floor()).float(), 1.0)",
        "import torch, math\ndef tile_scales(x, tile, top):\n    M, N = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])\n    out = torch.ones(M, N)\n    for i in range(M):\n        for j in range(N):\n"
            "            a = x[i * tile[0]:(i + 1) * tile[0], j * tile[1]:(j + 1) * tile[1]].abs().max().item()\n            if a:\n                out[i, j] = 2.0 ** math.floor(math.log2(top / a))\n    return out",
        # frexp
        changed("tile_scales", ("torch.exp2(torch.floor(torch.log2(top / amax.double())))", "torch.ldexp(torch.ones(()), torch.frexp(top / amax.double()).exponent - 1)")),
    ],
    "delayed_scaling": [
        HEAD + "class DelayedScale:\n    def __init__(self, history, top):\n        self.scale, self.top = torch.ones(()), top\n        self.h = torch.zeros(history)\n        self.now = 0.0\n    def note(self, x):\n        self.now = max(self.now, float(x.abs().max()))\n"
            "def update(scales, tp):\n    t = torch.tensor([s.now for s in scales])\n    dist.all_reduce(t, dist.ReduceOp.MAX, group=tp.group)\n    for s, a in zip(scales, t):\n        s.now = 0.0\n"
            "        s.h = torch.cat((s.h[1:], torch.where(a.isfinite(), a, 0.0)[None]))\n        if a.isfinite() and s.h.max() > 0:\n            s.scale = s.top / s.h.max()",
        # a ring buffer, and the package's collective
        "import torch\nfrom minimegatron.comm.collectives import all_reduce\nclass DelayedScale:\n    def __init__(self, history, top):\n        self.scale, self.top, self.h, self.i = 1.0, top, [0.0] * history, 0\n    def note(self, x):\n"
            "        self.h[self.i] = max(self.h[self.i], x.abs().max().item())\n    def at(self):\n        return self.h[self.i]\n"
            "def update(scales, tp):\n    for s, a in zip(scales, all_reduce(torch.tensor([s.at() for s in scales]), tp, 'max').tolist()):\n        s.h[s.i] = a if a != float('inf') else 0.0\n"
            "        if a != float('inf') and any(s.h):\n            s.scale = s.top / max(s.h)\n        s.i = (s.i + 1) % len(s.h)\n        s.h[s.i] = 0.0",
        changed("delayed_scaling", ("[*one.past, amax if finite else 0.0][-one.history :]", "([amax if finite else 0.0] + one.past)[: one.history]")),
    ],
    "fp8_linear": [
        # by torch's own cast
        changed("fp8_linear", ("from exercises.to_fp8 import to_fp8\n", "\ndef to_fp8(x, digits, lowest, top):\n    return x.clamp(-top, top).to({3: torch.float8_e4m3fn, 2: torch.float8_e5m2}[digits]).float()\n")),
        # divide the factors, not the product
        changed("fp8_linear", ("return qx @ qw.T / (sx.scale * sw.scale)", "return (qx / sx.scale) @ (qw / sw.scale).T"),
            ("dx = qdy @ qw.float() / (sdy.scale * scale_w)", "dx = torch.einsum('no,oi->ni', qdy / sdy.scale, qw.float() / scale_w)")),
        changed("fp8_linear", ("ctx.scales, ctx.sdy = (sx.scale, sw.scale), sdy", "ctx.scales, ctx.sdy = (float(sx.scale), float(sw.scale)), sdy"), ("        sdy.note(dy)\n", "        ctx.sdy.note(dy.clone())\n")),
    ],
    "shares": [
        HEAD + "def shares(outs, parts):\n    P = torch.stack([p.flatten() for p in parts]).double()\n    return [torch.linalg.solve(P @ P.T, P @ o.flatten().double()).tolist() for o in outs]",
        HEAD + "def shares(outs, parts):\n    A = torch.stack([p.flatten() for p in parts], 1)\n    B = torch.stack([o.flatten() for o in outs], 1)\n    return torch.linalg.lstsq(A, B).solution.T.tolist()",
        "import numpy as np\ndef shares(outs, parts):\n    A = np.stack([p.numpy().ravel() for p in parts], 1)\n    return [[float(c) for c in np.linalg.pinv(A) @ o.numpy().ravel()] for o in outs]",
    ],
    "answers": [
        changed("answers", ("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "next(n for n in range(1, 10**6) if 2 * n * h * h >= ridge * e * (2 * n * h + h * h) * (1 - 1e-12))")),
        changed("answers", ("1 - 1 / growth", "(growth - 1) / growth"), ("2**-9 / 448", "0.001953125 / 448")),
        changed("answers", ("layers * 4 * 3 * 4", "float(48 * layers)"), ("2 * 8192 * h * e / bandwidth * 1e6", "16384e6 * h * e / bandwidth")),
    ],
}  # fmt: skip


def test_three_other_right_answers_each():
    MARKED.assert_three_each(RIGHT)


test_other_right_answers_get_full_marks = MARKED.right_answers(RIGHT)


WRONG = {
    "norm_bytes": [
        (changed("norm_bytes", ("(2 + 1 + 2 + 2)", "4")), "also *writes*"),
        (changed("norm_bytes", ("(2 + 1 + 2 + 2)", "5")), "`* gamma` is an operation of its own"),
        (changed("norm_bytes", ("(2 + 1 + 2 + 2)", "8")), "one number a row"),
        (changed("norm_bytes", ("2 * whole}", "3 * whole}")), "keep the row on the chip"),
        (changed("norm_bytes", ("* element_size", "")), "In bytes"),
    ],
    "at_best": [
        (changed("at_best", ("max(computing, moving)", "computing + moving")), "not the sum"),
        (changed("at_best", ("flops / nbytes", "nbytes / flops")), "FLOP per byte"),
        (changed("at_best", ("moving > computing", "moving < computing")), "what takes longer"),
        (changed("at_best", ("max(computing, moving)", "min(computing, moving)")), "Both must be done"),
    ],
    "norm_rows": [
        (changed("norm_rows", ("if (row >= rows) return;", "")), "it has"),
        (changed("norm_rows", ("if (row >= rows) return;", "if (row > rows) return;")), "reads x["),
        (changed("norm_rows", ("sum / cols + eps", "sum + eps")), "divide the sum by cols"),
        (changed("norm_rows", ("rsqrtf(sum / cols + eps)", "sqrtf(sum / cols) + eps")), "divide by the root"),
        (changed("norm_rows", (" * gamma[i]", "")), "without gamma"),
        (changed("norm_rows", ("sum += v * v;", "sum += v * v")), "line 12: sum += v * v"),
        (changed("norm_rows", ("float sum = 0;", "")), "was not declared"),
        (changed("norm_rows", ("* gamma[i];", "* gamma[i] + 0 * x[row * cols + cols - 1 - i];")), "2 are enough"),
        (changed("norm_rows", ("grid=(rows + 63) // 64", "grid=rows // 64")), "is"),
        (changed("norm_rows", ("for (int i = 0; i < cols; ++i) {", "for (int i = 0; i < cols; ) {")), "no answer within"),
        # no kernel at all
        (changed("norm_rows", ("    kernel(x, gamma, y, rows, cols, eps, grid=(rows + 63) // 64, block=64)\n    return y", "    return torch.nn.functional.rms_norm(x, (cols,), gamma, eps)")), "no kernel ran"),
        # a kernel that copies, and torch behind it
        (kernel("int i = blockIdx.x * 64 + threadIdx.x; if (i < rows * cols) y[i] = x[i];", "(rows * cols + 63) // 64", "64").replace("return y", "return torch.nn.functional.rms_norm(x, (cols,), gamma, eps)"), "what the kernel wrote"),
    ],
    "norm_block": [
        (changed("norm_block", ("  __syncthreads();\n  float rstd", "  float rstd")), "__syncthreads() is missing"),
        (changed("norm_block", ("    __syncthreads();\n    if", "    if")), "__syncthreads"),
        (changed("norm_block", ("    __syncthreads();\n    if (threadIdx.x < s) parts", "    if (threadIdx.x < s) __syncthreads(), parts")), "y["),
        (changed("norm_block", ("int i = threadIdx.x; i < cols; i += blockDim.x) {\n    float v", "int i = threadIdx.x * ((cols + 255) / 256); i < min(cols, (int)(threadIdx.x + 1) * ((cols + 255) / 256)); ++i) {\n    float v")), "neighbouring threads"),
        (changed("norm_block", ("for (int i = threadIdx.x; i < cols; i += blockDim.x) out", "for (int i = 0; i < cols; ++i) out")), "times; once is enough"),
        (changed("norm_block", ("parts[256]", "parts[64]"), ("block=256", "block=64"), ("s = blockDim.x / 2", "s = blockDim.x / 4")), "wrong"),
    ],
    "norm_warp": [
        (changed("norm_warp", ("int packs = cols % 4 == 0 ? cols / 4 : 0;", "int packs = cols / 4;")), "no multiple of 16 bytes"),
        (changed("norm_warp", ("int packs = cols % 4 == 0 ? cols / 4 : 0;", "int packs = 0;")), "a load of x brings 4 bytes"),
        (changed("norm_warp", ("  __syncthreads();\n", "")), "shared memory starts as NaN"),
        (changed("norm_warp", ("lane < warps ? parts[lane] : 0.0f", "parts[lane]")), "shared memory starts as NaN"),
        (changed("norm_warp", ("int o = 16", "int o = 8")), "is wrong"),
        (changed("norm_warp", ("  __syncthreads();\n", "  __syncthreads();\n  __syncthreads();\n  __syncthreads();\n")), "2 are enough"),
        (changed("norm_warp", ("    out4[i] = make_float4(v.x * rstd * g.x, v.y * rstd * g.y, v.z * rstd * g.z, v.w * rstd * g.w);",
            "    out[4*i] = v.x * rstd * g.x; out[4*i+1] = v.y * rstd * g.y; out[4*i+2] = v.z * rstd * g.z; out[4*i+3] = v.w * rstd * g.w;")), "a store to y takes 4 bytes"),
    ],
    "flash_bytes": [
        (changed("flash_bytes", ("keys += (last // cols + 1) * cols", "keys += s")), "The mask is causal"),
        (changed("flash_bytes", ("2 * s * d + s + 2", "2 * s * d + 2")), "lse is written too"),
        (changed("flash_bytes", ("2 * keys * d", "2 * s * d")), "do not fit on the chip"),
        (changed("flash_bytes", ("4 * s * s + 4", "2 * s * s + 4")), "Four times"),
        (changed("flash_bytes", ("4 * s * s + 4 * s * d", "4 * s * s")), "beside the 4 s x s"),
    ],
    "flash_tiles": [
        (changed("flash_tiles", ("/ d**0.5", "")), "divided by sqrt(d)"),
        (changed("flash_tiles", ("torch.arange(start, start + cols) > at", "torch.arange(start, start + cols) < -1")), "inside of a block too"),
        (changed("flash_tiles", ("torch.arange(start, start + cols) > at", "torch.arange(start, start + cols) < -1"), ("range(0, first + rows, cols)", "range(0, s, cols)")), "no later one"),
        (changed("flash_tiles", ("range(0, first + rows, cols)", "range(0, s, cols)")), "are enough"),
        (changed("flash_tiles", ("o * shrink + p @ v", "o + p @ v")), "out is wrong"),
        (changed("flash_tiles", ("(top + total.log())", "total.log()")), "lse is wrong"),
        (changed("flash_tiles", ("torch.exp(scores - higher), torch.exp(top - higher)", "torch.exp(scores), torch.ones(())"), ("(top + total.log())", "total.log()")), "NaN"),
        (HEAD + "def flash_tiles(memory, s, d, rows, cols):\n    for a in range(0, s, rows):\n        q, K, V = memory.load('q', a, a + rows), [], []\n        for b in range(0, a + rows, cols):\n            K.append(memory.load('k', b, b + cols)); V.append(memory.load('v', b, b + cols))\n"
            "        S = (q @ torch.cat(K).T / d ** .5)\n        S = S.masked_fill(torch.arange(S.shape[1]) > torch.arange(a, a + rows)[:, None], -torch.inf)\n"
            "        memory.store('out', a, a + rows, S.softmax(1) @ torch.cat(V))\n        memory.store('lse', a, a + rows, S.logsumexp(1))", "half of a block of queries"),
    ],
    "to_fp8": [
        ("import torch\ndef to_fp8(x, digits, lowest, top):\n    d = torch.float8_e4m3fn if digits == 3 else torch.float8_e5m2\n    return x.clamp(-top, top).to(d).float()", "hidden"),
        (changed("to_fp8", (".clamp(-top, top)", "")), "Beyond the top"),
        (changed("to_fp8", ("torch.round(x / step)", "torch.trunc(x / step)")), "cuts digits off"),
        (changed("to_fp8", ("torch.round(x / step)", "torch.floor(x / step)")), "rounds down"),
        (changed("to_fp8", ("torch.round(x / step)", "torch.floor(x / step + 0.5)")), "not up"),
        (changed("to_fp8", (".clamp(min=lowest)", "")), "get no finer"),
        (changed("to_fp8", ("return torch.round(x / step) * step", "return torch.where(x.abs() < 2.0**lowest, 0.0, torch.round(x / step) * step)")), "there are still numbers"),
    ],
    "tile_scales": [
        (changed("tile_scales", ("top / amax.double()", "amax.double() / top"), ("torch.floor", "torch.ceil")), "This is the inverse"),
        (changed("tile_scales", ("torch.exp2(torch.floor(torch.log2(top / amax.double())))", "top / amax.double()")), "power of two"),
        (changed("tile_scales", ("torch.floor", "torch.round")), "to the nearest power"),
        (changed("tile_scales", ("torch.floor", "torch.ceil")), "Rounded up"),
        (changed("tile_scales", (".abs()", "")), "abs first"),
        (changed("tile_scales", ("torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(top / amax.double()))), 1.0)", "torch.exp2(torch.floor(torch.log2(top / amax.double())))")), "1 where amax is 0"),
    ],
    "delayed_scaling": [
        (changed("delayed_scaling", ("    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)\n", "")), "largest of all"),
        (changed("delayed_scaling", ("dist.ReduceOp.MAX", "dist.ReduceOp.SUM")), "hidden"),
        (changed("delayed_scaling", ("[-one.history :]", "[-1:]")), "not of the last one"),
        (changed("delayed_scaling", ("self.amax = torch.maximum(self.amax, x.detach().abs().max())", "self.amax = x.detach().abs().max()")), "keep the largest of them"),
        (changed("delayed_scaling", (".abs().max())", ".max())")), "hint"),
        (changed("delayed_scaling", ("        one.amax = torch.zeros(())\n", "")), "hint"),
        (changed("delayed_scaling", ("amax if finite else 0.0", "amax")), "hint"),
        (changed("delayed_scaling", ("    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)\n", "    for i in range(len(scales)):\n        dist.all_reduce(together[i], op=dist.ReduceOp.MAX, group=tp.group)\n")), "one for all tensors"),
    ],
    "fp8_linear": [
        (changed("fp8_linear", ("to_fp8(dy * sdy.scale, *E5M2)", "to_fp8(dy * sdy.scale, *E4M3)")), "dy goes to E5M2"),
        (changed("fp8_linear", ("(sx.scale, sw.scale), sdy", "(sx, sw), sdy"), ("(sdy.scale * scale_w)", "(sdy.scale * scale_w.scale)"), ("(sdy.scale * scale_x)", "(sdy.scale * scale_x.scale)")), "the scales moved on"),
        (changed("fp8_linear", ("qx.to(torch.float8_e4m3fn), qw.to(torch.float8_e4m3fn)", "qx, qw")), "one a number"),
        (changed("fp8_linear", ("/ (sx.scale * sw.scale)", "/ sx.scale")), "off by one factor"),
        (changed("fp8_linear", ("        sdy.note(dy)\n", "")), "note(dy)"),
        (changed("fp8_linear", ("sx.note(x)", "sx.note(x * sx.scale)")), "before it is scaled"),
        (changed("fp8_linear", ("to_fp8(x * sx.scale, *E4M3), to_fp8(weight * sw.scale, *E4M3)", "x * sx.scale, weight * sw.scale")), "wrong|one a number"),
    ],
    "shares": [
        ("def shares(outs, parts):\n    return [[1.0] * len(parts) for _ in outs]", "do not assume"),
        (changed("shares", ("return [torch", "return list(map(list, zip(*[torch"), (" for out in outs]", " for out in outs])))")), "a list a rank"),
        (HEAD + "def shares(outs, parts):\n    return [[float((o * p).sum() / (p * p).sum()) for p in parts] for o in outs]", "not orthogonal|hidden"),
    ],
    "answers": [
        (changed("answers", ("ridge, h, e = peak / bandwidth", "ridge, h, e = bandwidth / peak"), ("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "1")), "ridge = peak / bandwidth"),
        (changed("answers", ("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "math.ceil(ridge * e / 2)")), "x and y move too"),
        (changed("answers", ("layers * 4 * 3 * 4", "layers * 4 * 4")), "three numbers"),
        (changed("answers", ("layers * 4 * 3 * 4", "layers * 3 * 4")), "Four linear layers"),
        (changed("answers", ("1 - 1 / growth", "1 / growth")), "what is left"),
        (changed("answers", ("2**-9 / 448", "2**-6 / 448")), "down to 2^-9"),
        (changed("answers", ("2 * 8192", "8192")), "*and* written"),
    ],
}  # fmt: skip

test_each_mistake_loses_points_and_is_told_why = MARKED.wrong_answers(
    WRONG, told=lambda verdict, words: any(word in f"hint {said(verdict)}" for word in words.split("|"))
)
test_an_answer_that_returns_nothing_scores_nothing = MARKED.empty_answers()
