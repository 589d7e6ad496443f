// SwiGLU on a CPU, forward and backward, each in one pass: the formulas of activation.cu.
#include "vector.h"

namespace {

// 1 / (1 + e^-x)
template <typename A>
inline A sigmoid(A x) {
    const A e = exponential(x < 0 ? x : -x);
    return (x < 0 ? e : A(1)) / (1 + e);
}

}  // namespace

MM_EXPORT mm_swiglu_forward(const void* x, void* y, int64_t rows, int64_t f, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        each_row(rows, threads_of(stream), double(rows) * f * 32, [&](int64_t r) {
            const T *gate = (const T*)x + 2 * r * f, *up = gate + f;
            T* out = (T*)y + r * f;
            for (int64_t i = 0; i < f; ++i) {
                const Acc<T> g = wide(gate[i]);
                put(g * sigmoid(g) * wide(up[i]), out + i);
            }
        });
    });
}

MM_EXPORT mm_swiglu_backward(const void* dy, const void* x, void* dx, int64_t rows, int64_t f, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        each_row(rows, threads_of(stream), double(rows) * f * 48, [&](int64_t r) {
            const T *gate = (const T*)x + 2 * r * f, *up = gate + f, *d = (const T*)dy + r * f;
            T *dgate = (T*)dx + 2 * r * f, *dup = dgate + f;
            for (int64_t i = 0; i < f; ++i) {
                const Acc<T> g = wide(gate[i]), s = sigmoid(g), e = wide(d[i]);
                put(e * g * s, dup + i);
                put(e * wide(up[i]) * s * (1 + g * (1 - s)), dgate + i);
            }
        });
    });
}
