// AdamW over many tensors in one launch, and the squared norm of many tensors in two: no loop of launches, no wait.
//
//   g = scale grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   main = main (1 - lr wd) - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps);     model = main, rounded
//
// A table says where the pieces lie: a row of addresses for each chunk of at most `chunk` elements of a tensor, so a bias
// and an embedding keep the same number of threads busy. Clipping and skipping are numbers in the device's memory: the
// host writes neither the coefficient nor the decision, so it does not wait.
//
// The ladder, and what bounds each step:
//   0  ten torch operators a tensor       launches for small tensors, ten passes over memory for large ones
//   1  a kernel a tensor                  launches: a model has hundreds of tensors
//   2  a table of chunks, one launch      instructions at 4 bytes a load
//   3  16 bytes a load                    memory. The bf16 weight is written by the same pass
// Bound reached by design: 4 grad + 12 in, 12 + 2 out = 30 bytes a parameter; the norm 4 bytes in.
#include <type_traits>

#include "device.h"

#define MM_ADAM_THREADS 256

struct AdamChunk { int64_t main, grad, exp_avg, exp_avg_sq, model, count; };   // addresses; model 0: main is the parameter
struct AdamNumbers { double lr, beta1, beta2, eps, weight_decay, correction1, correction2; };  // 1 - b1^t, sqrt(1 - b2^t)

template <typename T, bool LOW_GRAD, int VEC>
__device__ void adam_chunk(const AdamChunk& c, const AdamNumbers& n, Acc<T> scale) {
  using A = Acc<T>;
  using G = typename std::conditional<LOW_GRAD, T, A>::type;
  using P = Pack<A, VEC>;
  const A decay = (A)(1 - n.lr * n.weight_decay), b1 = (A)n.beta1, b2 = (A)n.beta2, eps = (A)n.eps;
  const A step = (A)(n.lr / n.correction1), inverse = (A)(1 / n.correction2), a1 = (A)(1 - n.beta1), a2 = (A)(1 - n.beta2);
  for (int64_t i = threadIdx.x; i * VEC < c.count; i += blockDim.x) {
    P p = reinterpret_cast<const P*>(c.main)[i], m = reinterpret_cast<const P*>(c.exp_avg)[i], v = reinterpret_cast<const P*>(c.exp_avg_sq)[i];
    Pack<G, VEC> d = reinterpret_cast<const Pack<G, VEC>*>(c.grad)[i];
    Pack<T, VEC> low;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const A g = (A)load(d.v[j]) * scale;
      m.v[j] = b1 * m.v[j] + a1 * g;
      v.v[j] = b2 * v.v[j] + a2 * g * g;
      p.v[j] = p.v[j] * decay - step * m.v[j] / (sqrt_of(v.v[j]) * inverse + eps);
      low.v[j] = store<T>(p.v[j]);
    }
    reinterpret_cast<P*>(c.main)[i] = p;
    reinterpret_cast<P*>(c.exp_avg)[i] = m;
    reinterpret_cast<P*>(c.exp_avg_sq)[i] = v;
    if (c.model) reinterpret_cast<Pack<T, VEC>*>(c.model)[i] = low;
  }
}

template <typename T, bool LOW_GRAD>
__global__ void __launch_bounds__(256) adam(const AdamChunk* __restrict__ table, AdamNumbers n, const double* scale, const double* nonfinite) {
  if (nonfinite && *nonfinite != 0) return;  // all blocks and all ranks decide alike
  const AdamChunk c = table[blockIdx.x];
  const Acc<T> s = scale ? (Acc<T>)*scale : (Acc<T>)1;
  constexpr int VEC = vector_width<Acc<T>>();
  const bool wide = ((c.main | c.grad | c.exp_avg | c.exp_avg_sq | c.model) & 15) == 0 && c.count % VEC == 0;
  if (wide) adam_chunk<T, LOW_GRAD, VEC>(c, n, s);
  else adam_chunk<T, LOW_GRAD, 1>(c, n, s);
}

struct NormChunk { int64_t x, count; };

// partial[block] = {sum of squares, elements that are not finite}; squares are added in fp64, as optim/clip.py does.
template <typename T, int VEC> __device__ void squares(const NormChunk& c, double (&sums)[2]) {
  using P = Pack<T, VEC>;
  for (int64_t i = threadIdx.x; i * VEC < c.count; i += blockDim.x) {
    P p = reinterpret_cast<const P*>(c.x)[i];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const double v = (double)load(p.v[j]);
      sums[0] += v * v;
      sums[1] += v - v == 0 ? 0.0 : 1.0;
    }
  }
}
template <typename T> __global__ void __launch_bounds__(256) squared_norm(const NormChunk* __restrict__ table, double* __restrict__ partial) {
  const NormChunk c = table[blockIdx.x];
  double sums[2] = {0, 0};
  constexpr int VEC = vector_width<T>();
  if ((c.x & 15) == 0 && c.count % VEC == 0) squares<T, VEC>(c, sums);
  else squares<T, 1>(c, sums);
  block_sum<2>(sums);
  if (threadIdx.x == 0) partial[2 * blockIdx.x] = sums[0], partial[2 * blockIdx.x + 1] = sums[1];
}
__global__ void __launch_bounds__(1024) add_partials(const double* __restrict__ partial, double* __restrict__ out, int64_t parts) {  // out += sums
  double sums[2] = {0, 0};
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) sums[0] += partial[2 * i], sums[1] += partial[2 * i + 1];
  block_sum<2>(sums);
  if (threadIdx.x == 0) out[0] += sums[0], out[1] += sums[1];
}

// table [chunks] of AdamChunk in the device's memory. dtype: of the model's copy; main and moments are Acc of it, gradients
// too, or of the dtype itself where low_grad. scale, nonfinite: fp64 scalars in the device's memory, or null.
MM_EXPORT mm_adam(const void* table, const void* scale, const void* nonfinite, int64_t chunks, double lr, double beta1,
                  double beta2, double eps, double weight_decay, int64_t step, int low_grad, int dtype, void* stream) {
  if (chunks == 0) return 0;
  if (chunks < 0 || chunks > 0x7fffffff || step < 1) return MM_BAD_ARGUMENT;
  AdamNumbers n{lr, beta1, beta2, eps, weight_decay, 1 - pow(beta1, (double)step), sqrt(1 - pow(beta2, (double)step))};
  return MM_BY_DTYPE(dtype, {
    if (low_grad) return MM_LAUNCH((adam<T, true>), (unsigned)chunks, MM_ADAM_THREADS, 0, stream, (const AdamChunk*)table, n, (const double*)scale, (const double*)nonfinite);
    return MM_LAUNCH((adam<T, false>), (unsigned)chunks, MM_ADAM_THREADS, 0, stream, (const AdamChunk*)table, n, (const double*)scale, (const double*)nonfinite);
  });
}

// table [chunks] of NormChunk; partial fp64 [2 chunks]; out fp64 [2] is added to.
MM_EXPORT mm_squared_norm(const void* table, void* partial, void* out, int64_t chunks, int dtype, void* stream) {
  if (chunks == 0) return 0;
  if (chunks < 0 || chunks > 0x7fffffff) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    int error = MM_LAUNCH((squared_norm<T>), (unsigned)chunks, MM_ADAM_THREADS, 0, stream, (const NormChunk*)table, (double*)partial);
    return error ? error : MM_LAUNCH((add_partials), 1, 1024, 0, stream, (const double*)partial, (double*)out, chunks);
  });
}
