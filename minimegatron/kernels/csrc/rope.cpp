// Rotary position embedding on a CPU: pairs of channels turned by the angle of their position, as in rope.cu, in one pass.
#include "vector.h"

MM_EXPORT mm_rope(const void* x, const void* cos, const void* sin, void* y, int64_t s, int64_t batch, int64_t heads, int64_t d,
                  int64_t r, int64_t stride_s, int64_t stride_b, int64_t stride_h, int64_t angles_batch, int interleaved,
                  int backward, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(s * batch, threads_of(stream), double(s) * batch * heads * d * 8, [&](int64_t i) {
            const int64_t t = i / batch, b = i % batch, angles = (t * angles_batch + (angles_batch > 1 ? b : 0)) * r;
            const T* from = (const T*)x + t * stride_s + b * stride_b;
            T* to = (T*)y + i * heads * d;
            for (int64_t h = 0; h < heads; ++h)
                turn<T, A>(from + h * stride_h, (const A*)cos + angles, (const A*)sin + angles, backward ? A(-1) : A(1),
                           to + h * d, r, d, interleaved != 0);
        });
    });
}
