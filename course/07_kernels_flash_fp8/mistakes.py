"""Lab 07: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {
    "norm_bytes": [
        Edit("(2 + 1 + 2 + 2)", "4", told="also *writes*"),
        Edit("(2 + 1 + 2 + 2)", "5", told="`* gamma` is an operation of its own"),
        Edit("(2 + 1 + 2 + 2)", "8", told="one number a row"),
        Edit("2 * whole}", "3 * whole}", told="keep the row on the chip"),
        Edit("* element_size", "", told="In bytes"),
        Edit("* element_size", "* 4"),
    ],
    "at_best": [
        Edit("max(computing, moving)", "computing + moving", told="not the sum"),
        Edit("flops / nbytes", "nbytes / flops", told="FLOP per byte"),
        Edit("moving > computing", "moving < computing", told="what takes longer"),
        Edit("moving > computing", "moving >= computing", told="At the ridge itself"),
        Edit("max(computing, moving)", "min(computing, moving)", told="Both must be done"),
    ],
    "add": [
        Edit("if (i < n) ", "", told="it has 10 numbers"),
        Edit("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x", told="never written"),
        Edit("blockIdx.x * blockDim.x", "blockIdx.x", told="never written"),
        Edit("blockIdx.x * blockDim.x", "blockIdx.x * gridDim.x", told="never written"),
        Edit("(n + 255) // 256", "n // 256", told="grid is a number from 1"),
        Edit("(n + 255) // 256", "n // 256 + 1", told="expected 2"),
        Edit("(n + 255) // 256", "n", told="grid is 512, expected 2"),
        Edit("i < n", "i <= n", told="it has 10 numbers"),
        Edit("i < n", "i < n - 1", told="y[9] was never written; missing: 1 of 10"),
        Edit("x[i] + r[i]", "x[i]", told="r is not added"),
        Edit("x[i] + r[i]", "x[i] * r[i]", told="this is x times r"),
        Edit("y[i] = x[i] + r[i]", "y[i] += x[i] + r[i]", told="is no number"),
        # right, by one thread after another
        Edit(
            "if (i < n)",
            "for (; i < n; i += gridDim.x * blockDim.x)",
            ("(n + 255) // 256", "1"),
            told="grid is 1, expected",
        ),
        Edit("if (i < n)", "if (i == 0) for (i = 0; i < n; ++i)", told="neighbouring threads"),
        Edit("    kernel(x, r, y, n, grid=blocks, block=256)\n", "    y = x + r\n", told="no kernel ran"),
        # the kernel is launched, and torch's sum returned: equal to the last bit
        Edit("    return y", "    return x + r", told="must return what the kernel wrote"),
        # a register that was given no value
        Edit(
            "y[i] = x[i] + r[i];", "{ float v; v += x[i]; y[i] = v + r[i]; }", told="a variable that was given no value"
        ),
        Edit("y[i] = x[i] + r[i];", "{ float v[2]; v[0] += x[i]; y[i] = v[0] + r[i]; }", told="was given no value"),
        Edit("kernel(x, r, y, n", "kernel(x + r, torch.zeros_like(x), y, n", told="is neither x nor r"),
    ],
    "norm_rows": [
        Edit("if (row >= rows) return;", "", told="it has"),
        Edit("if (row >= rows) return;", "if (row > rows) return;", told="reads x["),
        Edit("sum / cols + eps", "sum + eps", told="divide the sum by cols"),
        Edit("rsqrtf(sum / cols + eps)", "sqrtf(sum / cols) + eps", told="divide by the root"),
        Edit(" * gamma[i]", "", told="without gamma"),
        Edit("sum += v * v;", "sum += v * v", told="expected `;`"),
        Edit("float sum = 0;", "", told="was not declared"),
        Edit("float sum = 0;", "float sum;", told="a variable that was given no value"),
        Edit("sum / cols + eps", "sum / cols", told="eps is missing, or another number"),
        Edit("sum / cols + eps", "sum / cols + 1e-5f", told="eps is missing, or another number"),
        Edit("sum / cols + eps", "sum / cols + 1e-3f", told="eps is missing, or another number"),
        # right numbers, by one thread, by one block, by a block a row
        Edit(
            "if (row >= rows) return;",
            "if (row) return;\n  for (; row < rows; ++row) {",
            ("rstd * gamma[i];", "rstd * gamma[i]; }"),
            ("grid=(rows + 63) // 64, block=64", "grid=1, block=1"),
            told="a thread a row, in blocks of 64",
        ),
        Edit(
            "grid=(rows + 63) // 64, block=64", "grid=1, block=min(rows, 1024)", told="a thread a row, in blocks of 64"
        ),
        # a row that fits into 4096 registers
        Edit(
            "  float sum = 0;",
            "  float keep[4096];\n  float sum = 0;",
            ("sum += v * v;", "sum += v * v; if (i < 4096) keep[i] = v;"),
            ("y[row * cols + i] = x[row * cols + i]", "y[row * cols + i] = keep[i % 4096]"),
            told="expected",
        ),
        Edit("* gamma[i];", "* gamma[i] + 0 * x[row * cols + cols - 1 - i];", told="2 are enough"),
        Edit("grid=(rows + 63) // 64", "grid=rows // 64", told="grid is a number from 1 | a thread a row"),
        Edit("for (int i = 0; i < cols; ++i) {", "for (int i = 0; i < cols; ) {", told="stuck"),
        # no kernel at all
        Edit(
            """    kernel(x, gamma, y, rows, cols, eps, grid=(rows + 63) // 64, block=64)
    return y""",
            "    return torch.nn.functional.rms_norm(x, (cols,), gamma, eps)",
            told="no kernel ran",
        ),
    ],
    "norm_block": [
        Edit("float sum = 0;", "float sum;", told="a variable that was given no value"),
        Edit("grid=rows, block=256", "grid=1, block=256", told="a block of 256 threads for each row"),
        # the row in four registers: right up to 1024 columns
        Edit(
            "  float sum = 0;",
            "  float keep[4];\n  float sum = 0;",
            ("sum += v * v;", "sum += v * v; if (i / 256 < 4) keep[i / 256] = v;"),
            ("out[i] = row[i] * rstd", "out[i] = keep[i / 256 % 4] * rstd"),
            told="expected",
        ),
        # one thread does all
        Edit(
            "  float sum = 0;",
            """  if (threadIdx.x) return;
  float all = 0;
  for (int i = 0; i < cols; ++i) all += row[i] * row[i];
  for (int i = 0; i < cols; ++i) out[i] = row[i] * rsqrtf(all / cols + eps) * gamma[i];
  return;
  float sum = 0;""",
            told="no thread reads from shared memory",
        ),
        Edit(
            """  __syncthreads();
  float rstd""",
            "  float rstd",
            told="a race",
        ),
        Edit(
            """    __syncthreads();
    if""",
            "    if",
            told="a race",
        ),
        Edit(
            """    __syncthreads();
    if (threadIdx.x < s) parts""",
            "    if (threadIdx.x < s) __syncthreads(), parts",
            told="all threads must meet the same one",
        ),
        Edit(
            """int i = threadIdx.x; i < cols; i += blockDim.x) {
    float v""",
            (
                "int i = threadIdx.x * ((cols + 255) / 256); i < min(cols, (int)(threadIdx.x + 1) * ((cols + "
                "255) / 256)); ++i) {\n"
                "    float v"
            ),
            told="neighbouring threads",
        ),
        Edit(
            "for (int i = threadIdx.x; i < cols; i += blockDim.x) out",
            "for (int i = 0; i < cols; ++i) out",
            told="times; once is enough",
        ),
        # the upper half is never added
        Edit("s = blockDim.x / 2", "s = blockDim.x / 4", told="expected"),
        # one thread adds up
        Edit(
            """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
            """__syncthreads();
  if (threadIdx.x == 0) for (int i = 1; i < 256; ++i) parts[0] += parts[i];""",
            told="in a tree",
        ),
        # all threads add to one number, at once
        Edit(
            """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
            """__syncthreads();
  if (threadIdx.x > 0) parts[0] += sum;""",
            told="a race",
        ),
        Edit(
            "    __syncthreads();\n    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];",
            "    if (threadIdx.x < s) { __syncthreads(); parts[threadIdx.x] += parts[threadIdx.x + s]; }\n"
            "    else __syncthreads();",
            told="all threads must meet the same one",
        ),
        Edit("parts[256];", "parts[200];", told="it has 200 numbers"),
        # all add to one word, in turn
        Edit(
            """  parts[threadIdx.x] = sum;
  for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }
""",
            """  if (threadIdx.x == 0) parts[0] = 0;
  __syncthreads();
  atomicAdd(&parts[0], sum);
""",
            told="in a tree half of the threads",
        ),
        # a warp needs no barrier: true before Volta
        Edit("    __syncthreads();\n    if", "    if (s >= 32) __syncthreads();\n    if", told="a race"),
        # only thread 0 knows the root
        Edit(
            "  float rstd = rsqrtf(parts[0] / cols + eps);",
            "  float rstd = 0; if (threadIdx.x == 0) rstd = rsqrtf(parts[0]);",
        ),
        Edit(
            "  __syncthreads();\n  float",
            "  if (threadIdx.x == 0) __syncthreads();\n  float",
            told="did not meet the barrier",
        ),
    ],
    "norm_warp": [
        Edit("float sum = 0;", "float sum;", told="a variable that was given no value"),
        Edit(
            "int packs",
            "float4 keep[2];\n  int packs",
            ("float4 v = row4[i];\n", "float4 v = row4[i]; if (i / 256 < 2) keep[i / 256] = v;\n"),
            ("float4 v = row4[i], g", "float4 v = keep[i / 256 % 2], g"),
            told="expected",
        ),
        Edit("int packs = cols % 4 == 0 ? cols / 4 : 0;", "int packs = cols / 4;", told="no multiple of 16 bytes"),
        Edit("int packs = cols % 4 == 0 ? cols / 4 : 0;", "int packs = 0;", told="a load of x brings 4 bytes"),
        Edit("  __syncthreads();\n", "", told="a race"),
        Edit("lane < warps ? parts[lane] : 0.0f", "parts[lane]", told="never written"),
        # each of the 8 warps is counted 4 times
        Edit("lane < warps ? parts[lane] : 0.0f", "parts[lane % warps]", told="4 times too large"),
        Edit("int o = 16", "int o = 8", told="expected"),
        # lane 0 alone has the sum
        Edit("__shfl_xor_sync(0xffffffff, v, o)", "__shfl_down_sync(0xffffffff, v, o)", told="expected"),
        # the other half of the warp never comes
        Edit(
            "v += __shfl_xor", "if (threadIdx.x % 32 < o) v += __shfl_xor", told="names lane 16, too; thread 16 waits"
        ),
        Edit("0xffffffff", "0x1", told="with the mask 0x1, which does not name its own lane 1"),
        Edit(
            "  __syncthreads();\n",
            """  __syncthreads();
  __syncthreads();
  __syncthreads();
""",
            told="2 are enough",
        ),
        Edit(
            "    out4[i] = make_float4(v.x * rstd * g.x, v.y * rstd * g.y, v.z * rstd * g.z, v.w * rstd * g.w);",
            (
                "    out[4*i] = v.x * rstd * g.x; out[4*i+1] = v.y * rstd * g.y; out[4*i+2] = v.z * rstd * "
                "g.z; out[4*i+3] = v.w * rstd * g.w;"
            ),
            told="a store to y takes 4 bytes",
        ),
    ],
    "flash_bytes": [
        Edit("keys += (last // cols + 1) * cols", "keys += s", told="The mask is causal"),
        Edit("2 * s * d + s + 2", "2 * s * d + 2", told="lse is written too"),
        Edit("2 * keys * d", "2 * s * d", told="do not fit on the chip"),
        Edit("4 * s * s + 4", "2 * s * s + 4", told="the next one reads"),
        Edit("4 * s * s + 4 * s * d", "4 * s * s", told="Q, K, V and out move too"),
        # by the last key: 70 draws in 100 do not tell
        Edit("(last // cols + 1) * cols", "last + 1", told="loaded whole"),
        Edit("(last // cols + 1) * cols", "last // cols * cols", told="loaded, too | hidden"),
        Edit("(last // cols + 1) * cols", "((last + 1) // cols + 1) * cols", told="not loaded for it"),
        Edit("(last // cols + 1) * cols", "(last // cols + 1) * rows"),
        Edit("range(rows - 1, s, rows)", "range(0, s, rows)"),
        Edit("2 * keys * d", "keys * d", told="Only one of K and V"),
        Edit("4 * s * s + 4 * s * d", "3 * s * s + 4 * s * d"),
        Edit("range(rows - 1, s, rows)", "range(cols - 1, s, cols)"),
        Edit("(2 * s * d + s + 2 * keys * d) * element_size", "(2 * s * d + s + 2 * keys * d) * 2"),
        Edit("(2 * s * d + s + 2 * keys * d) * element_size", "(2 * s * d + 2 * keys * d) * element_size + 4 * s"),
        Edit("2 * s * d + s + 2", "s * d + s + 2"),
        Edit("2 * s * d + s + 2", "2 * s * d + 2 * s + 2"),
    ],
    "flash_tiles": [
        Edit("/ d**0.5", "", told="divided by sqrt(d)"),
        Edit(
            "torch.arange(start, start + cols) > at",
            "torch.arange(start, start + cols) < -1",
            told="inside of a block too",
        ),
        Edit(
            "torch.arange(start, start + cols) > at",
            "torch.arange(start, start + cols) < -1",
            ("range(0, first + rows, cols)", "range(0, s, cols)"),
            told="no later one",
        ),
        Edit("range(0, first + rows, cols)", "range(0, s, cols)", told="are enough"),
        Edit("o * shrink + p @ v", "o + p @ v", told="o was added up under the old maximum"),
        Edit("total * shrink + p", "total + p", told="l was added up under the old maximum"),
        Edit(
            "total * shrink + p", "total + p", ("o * shrink", "o"), told="l and o were added up under the old maximum"
        ),
        Edit("(top + total.log())", "total.log()", told="out is right, lse is wrong"),
        Edit("(top + total.log())", "(top * total.log())", told="out is right, lse is wrong"),
        Edit(
            "torch.exp(scores - higher), torch.exp(top - higher)",
            "torch.exp(scores), torch.ones(())",
            ("(top + total.log())", "total.log()"),
            told="subtract the largest score first",
        ),
        Edit("range(0, first + rows, cols)", "range(0, first + 1, cols)", told="wrong"),
        Edit("torch.arange(start, start + cols) > at", "torch.arange(start, start + cols) >= at"),
        Edit("torch.full((rows, 1), -torch.inf)", "torch.zeros(rows, 1)", told="m began at 0"),
        Edit("scores.amax(1, keepdim=True)", "scores.amax()", told="NaN | wrong"),
        Edit("o / total", "o", told="still to be divided by l"),
        Edit("/ d**0.5", "/ d", told="not by d"),
        Edit("> at, -torch.inf)", "> at, -1e4)", told="-1e4 is no -∞"),
        # 2 blocks of keys at most
        Edit("range(0, first + rows, cols)", "[*range(0, first + rows, cols)][-2:]"),
    ],
    "to_fp8": [
        Edit(".clamp(-top, top)", "", told="Beyond ±top"),
        Edit("torch.round(x / step)", "torch.trunc(x / step)", told="cuts bits off"),
        Edit("torch.round(x / step)", "torch.floor(x / step)", told="rounds down"),
        Edit("torch.round(x / step)", "torch.floor(x / step + 0.5)", told="not up"),
        Edit(".clamp(min=lowest)", "", told="get no finer"),
        Edit(
            "return torch.round(x / step) * step",
            "return torch.where(x.abs() < 2.0**lowest, 0.0, torch.round(x / step) * step)",
            told="there are still numbers",
        ),
        Edit("x.float().clamp(-top, top)", "x.clamp_(-top, top)", told="changes its input"),
        Edit("x = x.float().clamp(-top, top)", "x = torch.where(x.abs() > top, torch.nan, x.float())", told="got"),
        Edit("torch.round(x / step)", "torch.ceil(x / step)"),
        # stochastic
        Edit("torch.round(x / step)", "torch.floor(x / step + torch.rand_like(x))", told="got"),
        # twice: to 4 mantissa bits first
        Edit("torch.round(x / step) * step", "torch.round(torch.round(2 * x / step) / 2) * step", told="hidden"),
        Edit("torch.round(x / step)", "torch.ceil(x / step - 0.5)", told="hidden"),
        Edit("(torch.frexp(x).exponent - 1)", "torch.frexp(x).exponent"),
        Edit("clamp(min=lowest)", "clamp(min=lowest - 1)"),
        Edit("clamp(min=lowest)", "clamp(min=-6)"),
        Edit("exponent - mantissa", "exponent - 3"),
        Edit(".clamp(-top, top)", ".clamp(-448.0, 448.0)"),
        Edit("return torch.round(x / step) * step", "return (torch.round(x / step) * step).abs()"),
        Edit("return torch.round(x / step) * step", "return (torch.round(x / step) * step).nan_to_num(0.0)"),
        Edit("return torch.round(x / step) * step", "return (torch.round(x / step) * step).double()", told="float64"),
        # by way of bf16
        Edit("x = x.float()", "x = x.bfloat16().float()"),
    ],
    "tile_scales": [
        Edit("top / amax.double()", "amax.double() / top", ("torch.floor", "torch.ceil"), told="This is the inverse"),
        Edit(
            "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
            "top / amax.double()",
            told="power of two",
        ),
        Edit("torch.floor", "torch.round", told="to the nearest power"),
        Edit("torch.floor", "torch.ceil", told="Rounded up"),
        Edit(".abs()", "", told="abs first"),
        Edit(
            "torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127)), 1.0)",
            "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
            told="1 where amax is 0",
        ),
        Edit(".clamp(max=127)", "", told="at most 2**127"),
        Edit("amax.double()", "amax", told="In float32 log2 rounds | hidden"),
        Edit("torch.floor(", "torch.floor(-1e-9 + ", told="hidden"),
        Edit("torch.floor(", "torch.floor(1e-7 + ", told="hidden"),
        Edit("top / amax", "448.0 / amax"),
        Edit(".abs().max() for", ".abs().mean() for"),
        Edit(".abs().max() for", ".norm() for"),
        Edit("tile[1], 1)", "tile[0], 1)"),
        Edit("amax > 0", "amax > 1e-12"),
        Edit("1.0).float()", "0.0).float()", told="nothing to scale"),
        Edit("1.0).float()", "5.0).float()", told="expected tensor([[1.0"),
        Edit("1.0).float()", "1.0)", told="float64"),
        Edit(".abs().max()", ".abs().sum()"),
    ],
    "delayed_scaling": [
        Edit(
            ".nan_to_num(torch.inf, torch.inf)  # MAX could lose a NaN", "", told="A NaN of another rank than the first"
        ),
        # each rank decides by its own tensor
        Edit(
            "    dist.all_reduce(together",
            "    mine = together.tolist()\n    dist.all_reduce(together",
            (
                "for one, amax in zip(scales, together.tolist()):",
                "for one, amax, own in zip(scales, together.tolist(), mine):",
            ),
            ('finite = amax < float("inf")', 'finite = own < float("inf")'),
            told="Each rank decides by its own tensor",
        ),
        Edit("x.detach().abs().max()", "x.detach().abs_().max()", told="note changes the tensor"),
        Edit(
            "        self.amax = torch.maximum",
            "        self.last = x\n        self.amax = torch.maximum",
            told="note keeps",
        ),
        Edit(
            "        self.amax = torch.maximum",
            "        self.last = x.abs()\n        self.amax = torch.maximum",
            told="note keeps",
        ),
        Edit("    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)\n", "", told="largest of all"),
        Edit("dist.ReduceOp.MAX", "dist.ReduceOp.SUM", told="added up here"),
        # each rank hides its own infinity
        Edit(
            "torch.stack([one.amax for one in scales])",
            "torch.stack([one.amax for one in scales]).nan_to_num(0.0, 0.0)",
            told="hides it from the others | leaves the scale",
        ),
        Edit("[-one.history :]", "[-1:]", told="not of the last one"),
        # the mean of the history
        Edit("one.scale = one.top / max(one.past)", "one.scale = one.top * len(one.past) / sum(one.past)"),
        # moves as soon as it notes
        Edit(
            "self.amax = torch.maximum(self.amax, x.detach().abs().max())",
            "self.amax = torch.maximum(self.amax, x.detach().abs().max()); self.scale = self.top / self.amax.item()",
        ),
        Edit(
            "self.amax = torch.maximum(self.amax, x.detach().abs().max())",
            "self.amax = x.detach().abs().max()",
            told="keep the largest of them",
        ),
        Edit(".abs().max())", ".max())"),
        Edit("        one.amax = torch.zeros(())\n", ""),
        Edit("amax if finite else 0.0", "amax"),
        Edit(
            "    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)\n",
            """    for i in range(len(scales)):
        dist.all_reduce(together[i], op=dist.ReduceOp.MAX, group=tp.group)
""",
            told="one for all tensors",
        ),
        Edit("x.detach().abs().max()", "x.detach().max().abs()"),
        Edit("x.detach().abs().max()", "(-x.detach()).max()"),
        Edit("if finite and max(one.past) > 0", "if max(one.past) > 0", told="leaves the scale as it is"),
        Edit("if finite and max(one.past) > 0", "if finite and amax > 0 and max(one.past) > 0", told="no reason"),
        Edit("if finite and max(one.past) > 0", "if finite"),
        Edit(
            "torch.maximum(self.amax, x.detach().abs().max())",
            "torch.tensor(max(self.amax.item(), x.abs().max().item()))",
            told="NaN is lost",
        ),
        Edit(
            "torch.maximum(self.amax, x.detach().abs().max())",
            "torch.fmax(self.amax, x.detach().abs().max())",
            told="NaN is lost",
        ),
        Edit("[-one.history :]", "[-one.history - 1 :]"),
        Edit("[-one.history :]", ""),
        Edit("[-one.history :]", "[-4:]"),
        Edit("one.top / max", "448.0 / max"),
        Edit("amax if finite else 0.0]", "*([amax] if finite else [])]", told="belongs to the history, too"),
        Edit(", group=tp.group", "", told="group | no answer | ranks"),
        # a step that overflows begins a new history
        Edit("        if finite and", "        one.past = one.past if finite else [0.0]\n        if finite and"),
    ],
    "fp8_linear": [
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
    ],
    "shares": [
        Edit(
            "return [torch",
            "return list(map(list, zip(*[torch",
            (" for out in outs]", " for out in outs])))"),
            told="a list a rank",
        ),
        Edit("outs]", "outs[:1] * len(outs)]"),
        Edit("part.flatten()", "part.abs().flatten()"),
    ],
    "answers": [
        Edit(
            "ridge, h, e = peak / bandwidth",
            "ridge, h, e = bandwidth / peak",
            ("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "1"),
            told="ridge = peak / bandwidth",
        ),
        Edit("math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))", "math.ceil(ridge * e / 2)", told="x and y move too"),
        Edit("layers * 4 * 3 * 4", "layers * 4 * 4", told="three numbers"),
        Edit("layers * 4 * 3 * 4", "layers * 3 * 4", told="four linear layers"),
        Edit("1 - 1 / growth", "1 / growth", told="what is left"),
        Edit("2**-9 / 448", "2**-6 / 448", told="seven more"),
        Edit("2 * 8192", "8192", told="*and* written"),
        Edit("2 * 8192 * h * e", "2 * 8192 * h * 2"),
        Edit("2 * 8192 * h * e", "2 * 8192 * 4096 * e"),
        Edit("math.ceil(ridge", "math.floor(ridge"),
        Edit("math.ceil(ridge", "round(ridge"),
        Edit("2 * h - 2 * ridge * e", "2 * h - ridge * e"),
        Edit("layers * 4 * 3 * 4", "layers * 4 * 3 * e"),
        Edit("layers * 4 * 3 * 4", "32 * 48"),
        Edit("1 - 1 / growth", "0.75"),
        Edit("2**-9 / 448", "2**-10 / 448", told="no number of E4M3"),
        Edit("1 - 1 / growth", "growth - 1", told="Relative to the true value"),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "add": [
        Edit("if (i < n) y", "if (i >= n) return;\n  y", ("(n + 255) // 256", "-(-n // 256)")),
        # blocks of another size
        Edit("(n + 255) // 256", "(n + 63) // 64", ("block=256", "block=64")),
        # pointers, and a function of one number
        Edit(
            "__global__",
            "__device__ float sum(float a, float b) { return a + b; }\n__global__",
            ("y[i] = x[i] + r[i];", "*(y + i) = sum(*(x + i), __ldg(&r[i]));"),
        ),
    ],
    "at_best": [
        Edit("max(computing, moving)", "moving if moving > computing else computing"),
    ],
    "norm_rows": [
        Edit(
            "if (row >= rows) return;",
            "if (row < rows) {",
            ("* gamma[i];", "* gamma[i]; }"),
            ("+ 63) // 64", "- 1) // 64 + 1"),
        ),
        # pointers that move
        Edit(
            "float sum = 0;",
            "float sum = 0; const float* in = x; in += row * cols; float* out = &y[row * cols];",
            ("float v = x[row * cols + i];", "float v = *in++;"),
            ("float rstd", "in = x + row * cols; float rstd"),
            (
                "y[row * cols + i] = x[row * cols + i] * rstd * gamma[i]",
                "{ out[i] = in[i] * rstd; out[i] *= gamma[i]; }",
            ),
            ("out[i] = in[i] * rstd; out[i] *= gamma[i];", "out[i] = in[i] * rstd * gamma[i];"),
        ),
    ],
    "norm_block": [
        # barriers at the end of each step
        Edit(
            "parts[threadIdx.x] = sum;",
            "parts[threadIdx.x] = sum; __syncthreads();",
            (
                """    __syncthreads();
    if""",
                "    if",
            ),
            (
                """parts[threadIdx.x + s];
  }
  __syncthreads();""",
                """parts[threadIdx.x + s];
    __syncthreads();
  }""",
            ),
        ),
        # neighbours first: s = 1, 2, 4, ...
        Edit(
            """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
            """for (int s = 1; s < blockDim.x; s *= 2) {
    __syncthreads();
    if (threadIdx.x % (2 * s) == 0) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
        ),
        # barriers of the block for s of 32 and more, of the warp below
        Edit(
            "    __syncthreads();\n    if",
            "    if (s >= 32) __syncthreads(); else __syncwarp();\n    if",
        ),
        # groups of 16 threads, then one of 16
        Edit(
            """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
            """__syncthreads();
  if (threadIdx.x % 16 == 0) for (int i = 1; i < 16; ++i) parts[threadIdx.x] += parts[threadIdx.x + i];
  __syncthreads();
  if (threadIdx.x == 0) for (int i = 16; i < 256; i += 16) parts[0] += parts[i];""",
        ),
    ],
    "norm_warp": [
        Edit("lane < warps ? parts[lane] : 0.0f", "lane < warps ? parts[lane] : 0", ("block=256", "block=96")),
        # one warp a row: no barrier at all
        Edit(
            """  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < warps ? parts[lane] : 0.0f);
""",
            "",
            ("block=256", "block=32"),
        ),
    ],
    "flash_bytes": [
        Edit("keys += (last // cols + 1) * cols", "keys += len(range(0, last + 1, cols)) * cols"),
    ],
    "flash_tiles": [
        Edit(
            "for start in range(0, first + rows, cols):",
            "for start in [c for c in range(0, s, cols) if c < first + rows]:",
        ),
    ],
    "to_fp8": [
        # as the hint says
        Edit("torch.exp2((exponent - mantissa).float())", "2.0 ** (exponent - mantissa)"),
        # the exponent by a logarithm: where it rounds up, the number rounds to the same power of two
        Edit(
            "(torch.frexp(x).exponent - 1).clamp(min=lowest)",
            "torch.floor(torch.log2(x.abs())).clamp(min=lowest)",
        ),
    ],
    "tile_scales": [
        # frexp
        Edit(
            "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
            "torch.exp2((torch.frexp(top / amax.double()).exponent - 1).clamp(max=127).double())",
        ),
    ],
    "delayed_scaling": [
        Edit(
            "[*one.past, amax if finite else 0.0][-one.history :]",
            "([amax if finite else 0.0] + one.past)[: one.history]",
        ),
    ],
    "fp8_linear": [
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
    ],
    "answers": [
        Edit(
            "math.ceil(ridge * e * h / (2 * h - 2 * ridge * e))",
            "next(n for n in range(1, 10**6) if 2 * n * h * h >= ridge * e * (2 * n * h + h * h) * (1 - 1e-12))",
        ),
        Edit("1 - 1 / growth", "(growth - 1) / growth", ("2**-9 / 448", "0.001953125 / 448")),
        Edit(
            "layers * 4 * 3 * 4",
            "float(48 * layers)",
            ("2 * 8192 * h * e / bandwidth * 1e6", "16384e6 * h * e / bandwidth"),
        ),
    ],
}

EQUIVALENT: dict[str, list[Same]] = {
    "at_best": [
        Same("line 4: `>=` for `>`", "on the ridge both take equally long, and either is the bound"),
    ],
    "norm_warp": [
        Same("line 25: twice it: `4`", "packs are all of the row, or none: 8 packs lie behind it, or are 0, too"),
        Same("line 38: twice it: `4`", "packs are all of the row, or none: 8 packs lie behind it, or are 0, too"),
        Same("line 30: 1 for 0: `0`", "after the butterfly all lanes hold the sum: any of them may write it"),
        Same("line 30: condition dropped: `if (lane == 0)`", "all lanes write the same number to the same word"),
    ],
    "delayed_scaling": [
        Same("line 13: `.detach()` dropped", "inside of an autograd.Function, where it is called, nothing is recorded"),
    ],
    "to_fp8": [
        Same("line 6: `.float()` dropped", "the tensors of this exercise are float32"),
        Same("line 8: `.float()` dropped", "exp2 of whole numbers is float32, too"),
    ],
}
