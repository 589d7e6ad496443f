# shuffles of half a warp at the end; an atomic sum of the warps; one shared number
import torch
from labkit.cuda import Kernel

kernel = Kernel(r"""
__device__ float half_warp_sum(float v) {
  for (int o = 8; o > 0; o >>= 1) v += __shfl_down_sync(0xffff, v, o, 16);
  return v;
}
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[16][16], total;
  __shared__ float rstd;
  const int t = threadIdx.x;
  const float* row = x + (size_t)blockIdx.x * cols;
  float sum = 0.0f;
  for (int i = t; i < cols; i += blockDim.x) sum += row[i] * row[i];
  parts[t / 16][t % 16] = sum;
  if (t == 0) total = 0;
  __syncthreads();
  if (t < 16) {
    float mine = 0;
    for (int k = 0; k < 16; ++k) mine += parts[k][t];
    mine = half_warp_sum(mine);
    if (t == 0) atomicAdd(&total, mine);
    __syncwarp(0xffff);
    if (t == 3) rstd = rsqrtf(total / cols + eps);
  }
  __syncthreads();
  for (int i = t; i < cols; i += blockDim.x) y[(size_t)blockIdx.x * cols + i] = row[i] * rstd * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    kernel(x, gamma, y, *x.shape, eps, grid=len(x), block=256)
    return y
