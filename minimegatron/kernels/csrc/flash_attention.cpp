// Attention without the s x s matrix on a CPU, causal or full, forward and backward: the formulas of flash_attention.cu.
//
// Two products of small matrices forward and five backward, made as libraries of products make theirs: ROWS rows of the
// result by two vectors of its columns stay in registers while the inner dimension runs, so each number that is loaded is
// used many times. torch's kernel calls such a library for each of its blocks, whose sides of 32 to 256 give a call little
// to do, and computes both halves of a causal block.
//
//   forward     S = Q K^T, P = 2^(S - m), O = P V            of ROWS queries and a chunk of keys, then of the next chunk
//   backward    P = 2^(S - lse), dS = P (dO V^T - delta)     of BLOCK queries and a chunk of keys; delta = sum of dO O
//               dQ += dS K, dV += P^T dO, dK += dS^T Q
//
// Causal: of a chunk only the keys up to the last query's own are computed. Powers are of 2: K is multiplied by
// scale / ln 2 where it is laid out. A job has queries of one group, backward all of them: sums do not depend on threads.
#pragma GCC optimize("O2")  // -O3 unrolls what is vectors already: three times as long to compile, and no faster
#include "vector.h"
#include <memory>

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 12;  // by two vectors: 24 of 32 registers
#else
constexpr int ROWS = 6;  // 12 of 16
#endif
constexpr int MOST = 128;                 // channels of a head
constexpr int64_t CHUNK = 256;            // keys
constexpr int64_t BLOCK = 4 * ROWS;       // queries of a backward step
constexpr int64_t JOB = 24 * ROWS;        // queries of a forward job
constexpr int HEAD = MOST + 16;           // from a row to the next; 16 past a power of two, or rows share a cache set
constexpr int SCORES = CHUNK + 16;        // the same of rows of scores

template <typename A> using V = typename Vector<A>::type;
template <typename A> constexpr int PANEL = 2 * L<A>;  // columns that are computed together
template <typename A> constexpr A NONE = -std::numeric_limits<A>::infinity();
inline int64_t rounded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Heads of a sample, by strides in elements; channels are dense.
template <typename T>
struct Heads {
    T* at;
    int64_t batch, head, row;
    Heads of(int64_t sample, int64_t first) const { return {at + sample * batch + first * head, batch, head, row}; }
    T* operator()(int64_t h, int64_t i) const { return at + h * head + i * row; }
};

struct Sizes {
    int64_t a, g, n, m, d;  // heads of queries and of keys, queries, keys, channels
    bool causal;
    int64_t shared() const { return a / g; }
    // The number of `count` keys from k0 on that query i sees.
    int64_t seen(int64_t i, int64_t k0, int64_t count) const {
        return causal ? std::max<int64_t>(0, std::min(count, i + m - n + 1 - k0)) : count;
    }
};

// Room for a job's numbers; each piece of it begins at a cache line.
template <typename A>
struct Room {
    std::unique_ptr<A[]> all;
    A* at;
    explicit Room(int64_t count) : all(new A[count + 16 * 16]) {
        at = reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(all.get()) + 63) / 64 * 64);
    }
    A* take(int64_t count) { return std::exchange(at, at + rounded(count, 16)); }
};

// The largest of a vector's lanes.
template <typename A, int BYTES = WIDTH, int... I>
inline auto larger(typename Vector<A, BYTES>::type x, std::integer_sequence<int, I...>) {
    using Half = typename Vector<A, BYTES / 2>::type;
    const Half a{x[I]...}, b{x[I + sizeof...(I)]...};
    return a > b ? a : b;
}
template <typename A, int BYTES = WIDTH>
inline A highest(typename Vector<A, BYTES>::type x) {
    if constexpr (BYTES > 16) return highest<A, BYTES / 2>(larger<A, BYTES>(x, Lanes<A, BYTES / 2>{}));
    A most = x[0];
    for (int i = 1; i < Vector<A, BYTES>::lanes; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// factor * from, of d channels.
template <typename T, typename A>
void write(const A* from, A factor, int64_t d, T* to) {
    for (int64_t c = 0; c < d; c += L<A>) store(load(from + c, d - c) * factor, to + c, d - c);
}

// --------------------------------------------------------------------------------------------------------- products

// c[r][j] += the sum over k < count of a[r * ROW + k * STEP] times vector j of row k of b.
template <int N, int ROW, int STEP, typename A>
inline __attribute__((always_inline)) void multiply(const A* a, const A* b, int64_t b_row, int64_t count, Vec<A> (&c)[ROWS][N]) {
    for (int64_t k = 0; k < count; ++k, a += STEP, b += b_row) {
        Vec<A> x[N];
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) x[j] = load(b + j * L<A>);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const A y = a[r * ROW];
#pragma GCC unroll 2
            for (int j = 0; j < N; ++j) c[r][j] += y * x[j];
        }
    }
}

// to = factor of its row * to + a b, of N vectors of columns.
template <int N, int ROW, int STEP, typename A>
void columns(const A* a, const A* b, int64_t count, A* to, int64_t width, const A* factor) {
    Vec<A> c[ROWS][N];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) c[r][j] = load(to + r * width + j * L<A>) * factor[r];
    multiply<N, ROW, STEP>(a, b, HEAD, count, c);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) store(c[r][j], to + r * width + j * L<A>);
}
template <typename A>
struct Ones {
    A x[ROWS];
    constexpr Ones() : x() {
        for (int r = 0; r < ROWS; ++r) x[r] = 1;
    }
};
template <typename A> constexpr Ones<A> ONES;

// The same of `width` columns, a multiple of a vector's lanes.
template <int ROW, int STEP, typename A>
void add(const A* a, const A* b, int64_t count, A* to, int64_t width, const A* factor = ONES<A>.x) {
    int64_t c = 0;
    for (; c + PANEL<A> <= width; c += PANEL<A>) columns<2, ROW, STEP>(a, b + c, count, to + c, width, factor);
    if (c < width) columns<1, ROW, STEP>(a, b + c, count, to + c, width, factor);
}

// --------------------------------------------------------------------------------------- rows and columns, laid out

// Rows of d channels, HEAD from each other: zeros up to whole vectors, and rows of zeros from `count` to `rows`.
template <typename T, typename A>
void lay_rows(const T* from, int64_t stride, int64_t count, int64_t rows, int64_t d, A factor, A* to) {
    for (int64_t i = 0; i < rows; ++i, to += HEAD) {
        const int64_t there = i < count ? d : 0;
        for (int64_t c = 0; c < d; c += L<A>) store(load(from + i * stride + c, there - c) * factor, to + c);
    }
}

template <int STEP, typename A, int... I>
inline Vec<A> even(Vec<A> a, Vec<A> b, std::integer_sequence<int, I...>) {
    return Vec<A>{(I & STEP ? b : a)[I & STEP ? I - STEP : I]...};
}
template <int STEP, typename A, int... I>
inline Vec<A> odd(Vec<A> a, Vec<A> b, std::integer_sequence<int, I...>) {
    return Vec<A>{(I & STEP ? b : a)[I & STEP ? I : I + STEP]...};
}
// A square of vectors, transposed: squares of 1, 2, 4 ... lanes beside the diagonal change places.
template <typename A, int STEP = 1>
inline void transpose(Vec<A> (&x)[L<A>]) {
    if constexpr (STEP < L<A>) {
#pragma GCC unroll 16
        for (int i = 0; i < L<A>; ++i)
            if (!(i & STEP)) {
                const Vec<A> a = x[i], b = x[i + STEP];
                x[i] = even<STEP, A>(a, b, Lanes<A>{});
                x[i + STEP] = odd<STEP, A>(a, b, Lanes<A>{});
            }
        transpose<A, 2 * STEP>(x);
    }
}

// Rows of d channels, transposed: [d][PANEL] for each PANEL of them, with zeros past `count`.
template <typename T, typename A>
void lay_columns(const T* from, int64_t stride, int64_t count, int64_t d, A factor, A* to) {
    for (int64_t j = 0; j < rounded(count, PANEL<A>); j += L<A>) {
        A* panel = to + j / PANEL<A> * PANEL<A> * d + j % PANEL<A>;
        int64_t c = 0;
        for (; j + L<A> <= count && c + L<A> <= d; c += L<A>) {
            Vec<A> x[L<A>];
#pragma GCC unroll 16
            for (int i = 0; i < L<A>; ++i) x[i] = load(from + (j + i) * stride + c) * factor;
            transpose<A>(x);
#pragma GCC unroll 16
            for (int i = 0; i < L<A>; ++i) store(x[i], panel + (c + i) * PANEL<A>);
        }
        for (; c < d; ++c)
            for (int64_t i = 0; i < L<A>; ++i)
                panel[c * PANEL<A> + i] = j + i < count ? wide(from[(j + i) * stride + c]) * factor : A(0);
    }
}

// ---------------------------------------------------------------------------------------------------------- forward

// The weights of a query for `seen` keys from their scores, and zeros up to `most`; `shrink` is what `top` has grown by.
template <typename A>
void softmax(A* s, int64_t seen, int64_t most, A& top, A& sum, A& shrink) {
    const int64_t end = rounded(seen, PANEL<A>);
    for (int64_t j = std::max<int64_t>(0, end - PANEL<A>); j < end; j += L<A>) store(first(seen - j, load(s + j), NONE<A>), s + j);
    Vec<A> high = Vec<A>{} + top, also = high, all{}, more{};
    for (int64_t j = 0; j < end; j += PANEL<A>) {
        const Vec<A> x = load(s + j), y = load(s + j + L<A>);
        high = x > high ? x : high;
        also = y > also ? y : also;
    }
    const A m = highest<A>(high > also ? high : also), from = m == NONE<A> ? A(0) : m;
    for (int64_t j = 0; j < end; j += PANEL<A>) {
        const Vec<A> x = power(load(s + j) - from), y = power(load(s + j + L<A>) - from);
        all += x;
        more += y;
        store(x, s + j);
        store(y, s + j + L<A>);
    }
    for (int64_t j = end; j < most; j += L<A>) store(Vec<A>{}, s + j);
    shrink = top == m || top == NONE<A> ? A(1) : power(Vec<A>{} + (top - from))[0];  // nothing before, or nothing larger
    sum = sum * shrink + total<A>(all + more);
    top = m;
}

// `rows` queries from i0 on, of one group's heads.
template <typename T, typename A>
void forward(const Sizes& z, Heads<const T> q, Heads<const T> k, Heads<const T> v, Heads<T> out, A* lse, int64_t i0, int64_t rows,
             A scale) {
    const int64_t width = rounded(z.d, L<A>), padded = rounded(rows, ROWS), all = padded * z.shared(), most = std::min(CHUNK, z.m);
    const int64_t chunk = rounded(most, PANEL<A>);
    Room<A> room(chunk * z.d + (most + ROWS) * HEAD + ROWS * (SCORES + 1) + all * (width + 2));
    A *keys = room.take(chunk * z.d), *values = room.take(most * HEAD), *query = room.take(ROWS * HEAD), *s = room.take(ROWS * SCORES);
    A *o = room.take(all * width), *top = room.take(all), *sum = room.take(all), *factor = room.take(ROWS);
    std::fill_n(o, all * width, A(0));
    std::fill_n(top, all, NONE<A>);
    std::fill_n(sum, all, A(0));
    for (int64_t k0 = 0; k0 < z.m; k0 += CHUNK) {
        const int64_t count = z.seen(i0 + rows - 1, k0, std::min(CHUNK, z.m - k0));
        lay_columns<T, A>(k(0, k0), k.row, count, z.d, scale / LN2<A>, keys);
        lay_rows<T, A>(v(0, k0), v.row, count, count, z.d, 1, values);
        for (int64_t job = 0; job < all; job += ROWS) {
            const int64_t h = job / padded, i = job % padded, last = std::min(i + ROWS, rows) - 1;
            const int64_t see = z.seen(i0 + last, k0, count);
            if (!see) continue;
            lay_rows<T, A>(q(h, i0 + i), q.row, rows - i, ROWS, z.d, 1, query);
            for (int64_t j = 0; j < see; j += PANEL<A>) {
                Vec<A> c[ROWS][2] = {};
                multiply<2, HEAD, 1>(query, keys + j * z.d, PANEL<A>, z.d, c);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                    for (int u = 0; u < 2; ++u) store(c[r][u], s + r * SCORES + j + u * L<A>);
            }
            for (int r = 0; r < ROWS; ++r)
                softmax(s + r * SCORES, std::min(see, z.seen(i0 + i + r, k0, count)), see, top[job + r], sum[job + r], factor[r]);
            add<SCORES, 1>(s, values, see, o + job * width, width, factor);
        }
    }
    for (int64_t h = 0; h < z.shared(); ++h)
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t row = h * padded + i;
            const A part = sum[row] == 0 ? A(0) : 1 / sum[row];
            write(o + row * width, part, z.d, out(h, i0 + i));
            lse[h * z.n + i0 + i] = (top[row] + std::log2(sum[row])) * LN2<A>;
        }
}

// --------------------------------------------------------------------------------------------------------- backward

// p and e, the weights and dS of ROWS queries x, whose outputs have the gradients y, for a chunk's keys.
template <typename A>
void weights(const Sizes& z, const A* x, const A* y, const A* keys, const A* values, const A* lse, const A* delta, int64_t i,
             int64_t k0, int64_t count, int64_t most, A* p, A* e) {
    const int64_t end = rounded(most, PANEL<A>), whole = z.seen(i, k0, count);  // all rows see the first `whole` keys
    for (int64_t j = 0; j < end; j += PANEL<A>) {
        Vec<A> c[ROWS][2] = {}, g[ROWS][2] = {};
        multiply<2, HEAD, 1>(x, keys + j * z.d, PANEL<A>, z.d, c);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int u = 0; u < 2; ++u) store(power(c[r][u] - lse[r]), p + r * SCORES + j + u * L<A>);
        if (whole < j + PANEL<A>)
            for (int r = 0; r < ROWS; ++r)
                for (int u = 0; u < 2; ++u) {
                    A* to = p + r * SCORES + j + u * L<A>;
                    store(first(z.seen(i + r, k0, count) - j - u * L<A>, load(to), A(0)), to);
                }
        multiply<2, HEAD, 1>(y, values + j * z.d, PANEL<A>, z.d, g);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int u = 0; u < 2; ++u) {
                const int64_t at = r * SCORES + j + u * L<A>;
                store(load(p + at) * (g[r][u] - delta[r]), e + at);
            }
    }
    for (int r = 0; r < ROWS; ++r)  // as many columns as dK and dV may ask for
        for (int64_t j = end; j < end + ROWS && j < SCORES; j += L<A>) {
            store(Vec<A>{}, p + r * SCORES + j);
            store(Vec<A>{}, e + r * SCORES + j);
        }
}

// All queries of one group's heads.
template <typename T, typename A>
void backward(const Sizes& z, Heads<const T> dout, Heads<const T> q, Heads<const T> k, Heads<const T> v, Heads<const T> out,
              const A* lse, Heads<T> dq, Heads<T> dk, Heads<T> dv, A scale) {
    const int64_t width = rounded(z.d, L<A>), padded = rounded(z.n, ROWS), all = padded * z.shared(), most = std::min(CHUNK, z.m);
    const int64_t chunk = rounded(most, PANEL<A>), rows = rounded(most, ROWS);
    Room<A> room(2 * chunk * z.d + (most + 2 * BLOCK) * HEAD + 2 * BLOCK * SCORES + 2 * rows * width + all * (width + 2));
    A *key_columns = room.take(chunk * z.d), *value_columns = room.take(chunk * z.d), *keys = room.take(most * HEAD);
    A *x = room.take(BLOCK * HEAD), *y = room.take(BLOCK * HEAD), *p = room.take(BLOCK * SCORES), *e = room.take(BLOCK * SCORES);
    A *of_k = room.take(rows * width), *of_v = room.take(rows * width), *of_q = room.take(all * width);
    A *base = room.take(all), *delta = room.take(all);
    std::fill_n(of_q, all * width, A(0));
    for (int64_t h = 0; h < z.shared(); ++h)
        for (int64_t i = 0; i < padded; ++i) {  // a row that is none has weights of 0
            const int64_t row = h * padded + i;
            base[row] = i < z.n ? lse[h * z.n + i] / LN2<A> : -NONE<A>;
            delta[row] = i < z.n ? sum_over<A>(z.d, [&](int64_t c, int64_t left) { return load(dout(h, i) + c, left) * load(out(h, i) + c, left); }) : A(0);
        }
    for (int64_t k0 = 0; k0 < z.m; k0 += CHUNK) {
        const int64_t count = std::min(CHUNK, z.m - k0), begin = z.causal ? std::max<int64_t>(0, k0 - (z.m - z.n)) / ROWS * ROWS : 0;
        lay_columns<T, A>(k(0, k0), k.row, count, z.d, scale / LN2<A>, key_columns);
        lay_columns<T, A>(v(0, k0), v.row, count, z.d, 1, value_columns);
        lay_rows<T, A>(k(0, k0), k.row, count, count, z.d, scale, keys);
        std::fill_n(of_k, rows * width, A(0));
        std::fill_n(of_v, rows * width, A(0));
        for (int64_t h = 0; h < z.shared(); ++h)
            for (int64_t i0 = begin; i0 < z.n; i0 += BLOCK) {
                const int64_t end = std::min(i0 + BLOCK, padded), here = end - i0;
                lay_rows<T, A>(q(h, i0), q.row, z.n - i0, here, z.d, 1, x);
                lay_rows<T, A>(dout(h, i0), dout.row, z.n - i0, here, z.d, 1, y);
                const auto see = [&](int64_t i) { return z.seen(std::min(i0 + i + ROWS, z.n) - 1, k0, count); };  // of ROWS from i
                for (int64_t i = 0; i < here; i += ROWS) {
                    const int64_t row = h * padded + i0 + i;
                    weights(z, x + i * HEAD, y + i * HEAD, key_columns, value_columns, base + row, delta + row, i0 + i, k0, count, see(i),
                            p + i * SCORES, e + i * SCORES);
                    add<SCORES, 1>(e + i * SCORES, keys, see(i), of_q + row * width, width);
                }
                int64_t from = 0;  // of the queries that see key j
                for (int64_t j = 0; j < see(here - ROWS); j += ROWS) {
                    while (see(from) <= j) from += ROWS;
                    add<1, SCORES>(p + from * SCORES + j, y + from * HEAD, here - from, of_v + j * width, width);
                    add<1, SCORES>(e + from * SCORES + j, x + from * HEAD, here - from, of_k + j * width, width);
                }
            }
        for (int64_t j = 0; j < count; ++j) {
            write(of_k + j * width, scale, z.d, dk(0, k0 + j));
            write(of_v + j * width, A(1), z.d, dv(0, k0 + j));
        }
    }
    for (int64_t h = 0; h < z.shared(); ++h)
        for (int64_t i = 0; i < z.n; ++i) write(of_q + (h * padded + i) * width, A(1), z.d, dq(h, i));
}

}  // namespace

// q [b, a, n, d], k and v [b, g, m, d], by strides in elements of (sample, head, token) each; lse [b, a, n] is dense.
MM_EXPORT mm_flash_forward(const void* q, const void* k, const void* v, void* out, void* lse, int64_t b, int64_t a, int64_t g,
                           int64_t n, int64_t m, int64_t d, int64_t q_b, int64_t q_h, int64_t q_n, int64_t k_b, int64_t k_h,
                           int64_t k_n, int64_t v_b, int64_t v_h, int64_t v_n, int64_t o_b, int64_t o_h, int64_t o_n,
                           double scale, int causal, int dtype, void* stream) {
    if (d > MOST) return -1;
    const Sizes z{a, g, n, m, d, causal != 0};
    const int64_t blocks = (n + JOB - 1) / JOB;
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        const Heads<const T> qs{(const T*)q, q_b, q_h, q_n}, ks{(const T*)k, k_b, k_h, k_n}, vs{(const T*)v, v_b, v_h, v_n};
        const Heads<T> os{(T*)out, o_b, o_h, o_n};
        share<A>(b * g * blocks, threads_of(stream), double(b) * a * n * m * d, [&](int64_t job, std::vector<A>&) {
            const int64_t i = job % blocks * JOB, group = job / blocks % g, sample = job / blocks / g, head = group * z.shared();
            forward<T, A>(z, qs.of(sample, head), ks.of(sample, group), vs.of(sample, group), os.of(sample, head),
                          (A*)lse + (sample * a + head) * n, i, std::min(JOB, n - i), (A)scale);
        });
    });
}

MM_EXPORT mm_flash_backward(const void* dout, const void* q, const void* k, const void* v, const void* out, const void* lse,
                            void* dq, void* dk, void* dv, int64_t b, int64_t a, int64_t g, int64_t n, int64_t m, int64_t d,
                            int64_t y_b, int64_t y_h, int64_t y_n, int64_t q_b, int64_t q_h, int64_t q_n, int64_t k_b,
                            int64_t k_h, int64_t k_n, int64_t v_b, int64_t v_h, int64_t v_n, int64_t o_b, int64_t o_h,
                            int64_t o_n, int64_t dq_b, int64_t dq_h, int64_t dq_n, int64_t dk_b, int64_t dk_h, int64_t dk_n,
                            int64_t dv_b, int64_t dv_h, int64_t dv_n, double scale, int causal, int dtype, void* stream) {
    if (d > MOST) return -1;
    const Sizes z{a, g, n, m, d, causal != 0};
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        const Heads<const T> ys{(const T*)dout, y_b, y_h, y_n}, qs{(const T*)q, q_b, q_h, q_n}, ks{(const T*)k, k_b, k_h, k_n};
        const Heads<const T> vs{(const T*)v, v_b, v_h, v_n}, os{(const T*)out, o_b, o_h, o_n};
        const Heads<T> dqs{(T*)dq, dq_b, dq_h, dq_n}, dks{(T*)dk, dk_b, dk_h, dk_n}, dvs{(T*)dv, dv_b, dv_h, dv_n};
        share<A>(b * g, threads_of(stream), double(b) * a * n * m * d * 3, [&](int64_t job, std::vector<A>&) {
            const int64_t group = job % g, sample = job / g, head = group * z.shared();
            backward<T, A>(z, ys.of(sample, head), qs.of(sample, head), ks.of(sample, group), vs.of(sample, group),
                           os.of(sample, head), (const A*)lse + (sample * a + head) * n, dqs.of(sample, head),
                           dks.of(sample, group), dvs.of(sample, group), (A)scale);
        });
    });
}
