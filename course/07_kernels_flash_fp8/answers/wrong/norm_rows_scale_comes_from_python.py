# told: rstd is neither x nor gamma
import torch
from labkit.cuda import Kernel

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
