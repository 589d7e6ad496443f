from labkit.answers import Edit

WRONG = [
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
    Edit("grid=(rows + 63) // 64, block=64", "grid=1, block=min(rows, 1024)", told="a thread a row, in blocks of 64"),
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
    # block a row
    Edit(
        "x * blockDim.x + threadIdx.x",
        "x",
        (
            """for (int i = 0; i < cols; ++i) {
    float v = x[row * cols + i];
    sum += v * v;
  }""",
            "for (int i = 0; i < cols; i++) sum += x[row * cols + i] * x[row * cols + i];",
        ),
        ("0; i < cols; ++i", "threadIdx.x; i < cols; i += blockDim.x"),
        told="was never written",
    ),
]

RIGHT = [
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
]


# %% right: statistics in double; a row that is not there ends the thread by an empty loop
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const long long begin = (long long)row * cols;
  const int n = row < rows ? cols : 0;
  double squares = 0;
  for (int i = n - 1; i >= 0; i--) squares += (double)x[begin + i] * x[begin + i];
  for (int i = 0; i != n; i++) y[begin + i] = (float)(x[begin + i] / sqrt(squares / cols + eps)) * gamma[i];
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=-(-rows // 64), block=64)
    return y


# %% right: a pointer runs through the row twice; two pointers in one declaration
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) {
    const float *in = &x[row * cols], *end = in + cols, *g = gamma;
    float sum = 0, *out = &y[row * cols];
    for (; in != end; ++in) sum = fmaf(*in, *in, sum);
    in -= cols;
    const float r = 1.f / sqrtf(sum / cols + eps);
    while (in < end) *out++ = *in++ * r * *g++;
  }
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=(rows + 63) // 64, block=64)
    return y


# %% right: macros, __ldg, a template, 1/cols from Python
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
#define SQUARE(v) ((v) * (v))
#define ROW (blockIdx.x * blockDim.x + threadIdx.x)
template <typename T> __device__ __forceinline__ T load(const T* __restrict__ p, int i) { return __ldg(&p[i]); }

__global__ void __launch_bounds__(64)
rms_norm(const float* const __restrict__ x, const float* __restrict__ gamma, float* __restrict__ y,
         const int rows, const int cols, const float share, const float eps)
{
  if (ROW >= rows)
    return;
  auto in = x + ROW * cols;
  auto out = &y[ROW * cols];
  double sum{0};
  int i = 0;
  do {
    sum += SQUARE(load<float>(in, i));
  } while (++i < cols);
#pragma unroll 4
  for (int k = cols - 1; k >= 0; k--) { const float v = load(in, k); out[k] = v * (float)rsqrt(sum * share + eps) * __ldg(gamma + k); }
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.zeros(rows * cols)
    kernel(x, gamma, y, rows, cols, 1 / cols, eps, grid=-(-rows // 64), block=64)
    return y.view(rows, cols)


# %% wrong: copies what torch computed
# told: the kernel's x is neither x nor gamma
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void copy(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * cols) y[i] = x[i];
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    right = torch.nn.functional.rms_norm(x, (cols,), gamma, eps)
    kernel(right, gamma, y, rows, cols, eps, grid=(rows * cols + 63) // 64, block=64)
    return y


# %% wrong: error is caught
# told: error 700: thread 0 of block 0 reads x[-1]
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  if (threadIdx.x == 0) y[0] = x[-1];
}
""")


def norm(x, gamma, eps):
    y = torch.nn.functional.rms_norm(x, (x.shape[1],), gamma, eps)
    try:
        kernel(x, gamma, torch.empty_like(x), *x.shape, eps, grid=1, block=64)
    except Exception:
        pass
    return y


# %% wrong: keeps what python put into y
# told: was never written | is no number
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void keep(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * cols) y[i] = y[i] + 0 * x[i];
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.nn.functional.rms_norm(x, (cols,), gamma, eps)
    kernel(x, gamma, y, rows, cols, eps, grid=(rows * cols + 63) // 64, block=64)
    return y


# %% wrong: launches a kernel for each row
# told: one launch computes all of y
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void scale(const float* x, const float* gamma, float* y, int cols, float rstd) {
  int i = threadIdx.x;
  for (; i < cols; i += 64) y[i] = x[i] * rstd * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    for row in range(len(x)):
        rstd = (x[row].square().mean() + eps).rsqrt().item()
        kernel(x[row], gamma, y[row], x.shape[1], rstd, grid=1, block=64)
    return y


# %% wrong: object in place of kernel
# told: no kernel ran
import torch


class Kernel:
    def __init__(self):
        same = {"loads": 1, "stores": 1, "read": 1, "written": 1, "served": 1, "share": 1.0}
        self.counts = {"x": same, "gamma": same, "y": same, "barriers": 0.0}


kernel = Kernel()


def norm(x, gamma, eps):
    y = torch.nn.functional.rms_norm(x, (x.shape[1],), gamma, eps)
    kernel.outputs = {"y": y}
    kernel.counts["y"]["written"] = y.nbytes
    return y


# %% wrong: scale comes from python
# told: rstd is neither x nor gamma
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void scale(const float* x, const float* gamma, const float* rstd, float* y, int rows, int cols) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * cols) y[i] = x[i] * rstd[i / cols] * gamma[i % cols];
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    rstd = (x.square().mean(1) + eps).rsqrt()
    kernel(x, gamma, rstd, y, rows, cols, grid=(rows * cols + 63) // 64, block=64)
    return y


# %% wrong: torch behind a copy
# told: what the kernel wrote
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
int i = blockIdx.x * 64 + threadIdx.x; if (i < rows * cols) y[i] = x[i];
}
""")

def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=(rows * cols + 63) // 64, block=64)
    return torch.nn.functional.rms_norm(x, (cols,), gamma, eps)


# %% wrong: warp a row
# told: a thread a row, in blocks of 64
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {

  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
  if (row >= rows) return;
  const float *in = x + row * cols;
  float sum = 0;
  for (int i = lane; i < cols; i += 32) sum += in[i] * in[i];
  for (int o = 1; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = lane; i < cols; i += 32) *(y + row * cols + i) = in[i] * rsqrtf(sum / cols + eps) * gamma[i];
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=32)
    return y
