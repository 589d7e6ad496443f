# told: a load of gamma brings 4 bytes
import torch
from labkit.cuda import Kernel
kernel = Kernel(r"""
__device__ float warp_sum(float v) {
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  return v;
}
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[32];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float s = 0;
  bool four = cols % 4 == 0;
  const float4* x4 = reinterpret_cast<const float4*>(row);
  const float4* g4 = reinterpret_cast<const float4*>(gamma);
  float4* y4 = reinterpret_cast<float4*>(out);
  if (four) {
    for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
      float4 v = x4[i];
      s += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int i = threadIdx.x; i < cols; i += blockDim.x) s += row[i] * row[i];
  }
  s = warp_sum(s);
  if (lane == 0) parts[warp] = s;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < warps; w++) total += parts[w];
  float rstd = rsqrtf(total / cols + eps);
  if (four) {
    for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
      float4 v = x4[i];
      y4[i] = make_float4(v.x * rstd * gamma[4*i], v.y * rstd * gamma[4*i+1], v.z * rstd * gamma[4*i+2], v.w * rstd * gamma[4*i+3]);
    }
  } else {
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
  }

}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y
