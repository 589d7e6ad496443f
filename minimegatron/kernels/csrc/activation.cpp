// SwiGLU on a CPU, forward and backward, each in one pass: the formulas of activation.cu.
#include "vector.h"

namespace {

// 1 / (1 + e^-x)
template <typename A>
inline Vec<A> sigmoid(Vec<A> x) {
    const Vec<A> t = x * (-1 / LN2<A>), most = Vec<A>{} + 126;  // not a number stays none
    return 1 / (1 + power(t > most ? most : t));
}

}  // namespace

MM_EXPORT mm_swiglu_forward(const void* x, void* y, int64_t rows, int64_t f, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(rows, threads_of(stream), double(rows) * f * 32, [&](int64_t r) {
            const T *gate = (const T*)x + 2 * r * f, *up = gate + f;
            T* out = (T*)y + r * f;
            for (int64_t i = 0; i < f; i += L<A>) {
                const Vec<A> g = load(gate + i, f - i);
                store(g * sigmoid<A>(g) * load(up + i, f - i), out + i, f - i);
            }
        });
    });
}

MM_EXPORT mm_swiglu_backward(const void* dy, const void* x, void* dx, int64_t rows, int64_t f, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(rows, threads_of(stream), double(rows) * f * 48, [&](int64_t r) {
            const T *gate = (const T*)x + 2 * r * f, *up = gate + f, *d = (const T*)dy + r * f;
            T *dgate = (T*)dx + 2 * r * f, *dup = dgate + f;
            for (int64_t i = 0; i < f; i += L<A>) {
                const Vec<A> g = load(gate + i, f - i), s = sigmoid<A>(g), e = load(d + i, f - i);
                store(e * g * s, dup + i, f - i);
                store(e * load(up + i, f - i) * s * (1 + g * (1 - s)), dgate + i, f - i);
            }
        });
    });
}
