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

// Queries, key and value of each group, packed [s, batch, groups, shared + 2, d]: q and k turned, v as it is. All dense.
MM_EXPORT mm_heads(const void* packed, const void* cos, const void* sin, void* q, void* k, void* v, int64_t s, int64_t batch,
                   int64_t groups, int64_t shared, int64_t d, int64_t r, int64_t angles_batch, int interleaved, int dtype,
                   void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(s * batch, threads_of(stream), double(s) * batch * groups * (shared + 2) * d * 8, [&](int64_t i) {
            const int64_t angles = (i / batch * angles_batch + (angles_batch > 1 ? i % batch : 0)) * r;
            const A *c = (const A*)cos + angles, *sn = (const A*)sin + angles;
            for (int64_t g = i * groups; g < (i + 1) * groups; ++g) {
                const T* from = (const T*)packed + g * (shared + 2) * d;
                for (int64_t h = 0; h < shared; ++h)
                    turn(from + h * d, c, sn, A(1), (T*)q + (g * shared + h) * d, r, d, interleaved != 0);
                turn(from + shared * d, c, sn, A(1), (T*)k + g * d, r, d, interleaved != 0);
                std::memcpy((T*)v + g * d, from + (shared + 1) * d, d * sizeof(T));
            }
        });
    });
}

// The gradient of `packed` from those of q, k and v.
MM_EXPORT mm_heads_backward(const void* dq, const void* dk, const void* dv, const void* cos, const void* sin, void* packed,
                            int64_t s, int64_t batch, int64_t groups, int64_t shared, int64_t d, int64_t r,
                            int64_t angles_batch, int interleaved, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(s * batch, threads_of(stream), double(s) * batch * groups * (shared + 2) * d * 8, [&](int64_t i) {
            const int64_t angles = (i / batch * angles_batch + (angles_batch > 1 ? i % batch : 0)) * r;
            const A *c = (const A*)cos + angles, *sn = (const A*)sin + angles;
            for (int64_t g = i * groups; g < (i + 1) * groups; ++g) {
                T* to = (T*)packed + g * (shared + 2) * d;
                for (int64_t h = 0; h < shared; ++h)
                    turn((const T*)dq + (g * shared + h) * d, c, sn, A(-1), to + h * d, r, d, interleaved != 0);
                turn((const T*)dk + g * d, c, sn, A(-1), to + shared * d, r, d, interleaved != 0);
                std::memcpy(to + (shared + 1) * d, (const T*)dv + g * d, d * sizeof(T));
            }
        });
    });
}
