# statistics in double; a row that is not there ends the thread by an empty loop
import torch
from labkit.cuda import Kernel

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
