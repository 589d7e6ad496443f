# a pointer runs through the row twice; two pointers in one declaration
import torch
from labkit.cuda import Kernel

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
