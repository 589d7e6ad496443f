// What kernels for CPUs stand on: vectors as wide as this CPU has, powers, sums, and threads that share pieces of work.
//
// Plain C++ for g++ and clang, compiled on the machine it runs on (`build.py`), so any CPU has the code for its own
// instructions.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#define MM_EXPORT extern "C" __attribute__((visibility("default"))) int

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;  // bytes of a vector
#elif defined(__AVX__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr double WORTH_A_THREAD = 1 << 21;  // products: about 0.1 ms, several times what it costs to start one

struct bf16 {
    uint16_t bits;
};

template <typename A, int bytes = WIDTH>
struct Vector {
    typedef A type __attribute__((vector_size(bytes)));
    static constexpr int lanes = bytes / sizeof(A);
};

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <typename A> using Vec = typename Vector<A>::type;
template <typename A> constexpr int L = Vector<A>::lanes;
typedef uint32_t Words __attribute__((vector_size(WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH / 2)));

template <typename A>
inline Vec<A> load(const A* from) {
    Vec<A> x;
    std::memcpy(&x, from, WIDTH);
    return x;
}
inline Vec<float> load(const bf16* from) {
    Halves x;
    std::memcpy(&x, from, WIDTH / 2);
    return (Vec<float>)(__builtin_convertvector(x, Words) << 16);
}

template <typename A>
inline void store(Vec<A> x, A* to) {
    std::memcpy(to, &x, WIDTH);
}
inline void store(Vec<float> x, bf16* to) {  // to nearest even; not a number stays none
    const Words bits = (Words)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves y = __builtin_convertvector(x == x ? nearest : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &y, WIDTH / 2);
}

inline void put(float x, float* to) { *to = x; }
inline void put(double x, double* to) { *to = x; }
inline void put(float x, bf16* to) {  // to nearest even; not a number stays none
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename A, int bytes = WIDTH>
using Lanes = std::make_integer_sequence<int, Vector<A, bytes>::lanes>;

// The two halves of a vector, added.
template <typename A, int bytes, int... I>
inline auto halved(typename Vector<A, bytes>::type x, std::integer_sequence<int, I...>) {
    using Half = typename Vector<A, bytes / 2>::type;
    return Half{x[I]...} + Half{x[I + sizeof...(I)]...};
}

// The sum of a vector: of its halves, until they are 16 bytes.
template <typename A, int bytes = WIDTH>
inline A total(typename Vector<A, bytes>::type x) {
    if constexpr (bytes > 16) return total<A, bytes / 2>(halved<A, bytes>(x, Lanes<A, bytes / 2>{}));
    else if constexpr (sizeof(A) == 8) return x[0] + x[1];
    else return (x[0] + x[2]) + (x[1] + x[3]);
}

// Of each 16 bytes of a and b in turn: a0 + a2, b0 + b2, a1 + a3, b1 + b3; and a0 + a1, ... of what that gives.
template <int... I>
inline Vec<float> woven(Vec<float> a, Vec<float> b, std::integer_sequence<int, I...>) {
    return Vec<float>{(I % 2 ? b : a)[I / 4 * 4 + I % 4 / 2]...} + Vec<float>{(I % 2 ? b : a)[I / 4 * 4 + 2 + I % 4 / 2]...};
}
template <int... I>
inline Vec<float> joined(Vec<float> a, Vec<float> b, std::integer_sequence<int, I...>) {
    return Vec<float>{(I % 4 / 2 ? b : a)[I / 4 * 4 + I % 2]...} + Vec<float>{(I % 4 / 2 ? b : a)[I / 4 * 4 + 2 + I % 2]...};
}

template <int bytes>
inline void store_four(typename Vector<float, bytes>::type x, float* out) {
    if constexpr (bytes > 16) store_four<bytes / 2>(halved<float, bytes>(x, Lanes<float, bytes / 2>{}), out);
    else std::memcpy(out, &x, 16);
}

// The sums of four vectors, for less than twice what one costs.
inline void four_totals(const Vec<float>* x, float* out) {
    const Lanes<float> all{};
    store_four<WIDTH>(joined(woven(x[0], x[1], all), woven(x[2], x[3], all), all), out);
}

// 2^x for x <= 127, 0 below 2^-126: 2^n times a polynomial on [-1/2, 1/2], at most 3e-9 from it.
inline Vec<float> power(Vec<float> x) {
    const float shift = 12582912.0f + 127.0f;  // a float of this size has no fraction: n + 127 is in its lowest bits
    const Vec<float> t = x + shift, r = x - (t - shift);
    Vec<float> p = r * 1.546144472e-4f + 1.340042818e-3f;
    p = p * r + 9.618056678e-3f;
    p = p * r + 5.550327227e-2f;
    p = p * r + 2.402265092e-1f;
    p = p * r + 6.931472067e-1f;
    p = p * r + 1.0f;
    p *= (Vec<float>)((Words)t << 23);
    return x < -126.0f ? Vec<float>{} : p;
}
inline Vec<double> power(Vec<double> x) {
    for (int i = 0; i < L<double>; ++i) x[i] = std::exp2(x[i]);
    return x;
}
template <typename A> constexpr A LN2 = 0.69314718055994530942;

template <typename A, int... I>
inline Vec<A> counted(std::integer_sequence<int, I...>) {
    return Vec<A>{A(I)...};
}
// x in the first n lanes, `other` in the rest.
template <typename A>
inline Vec<A> first(int64_t n, Vec<A> x, A other) {
    return counted<A>(Lanes<A>{}) < A(n) ? x : Vec<A>{} + other;
}

// A vector of which only the first `left` lanes are in memory, if that is fewer than it has.
template <typename T>
inline auto load(const T* from, int64_t left) {
    using A = decltype(wide(T{}));
    if (left >= L<A>) return load(from);
    Vec<A> x{};
    for (int64_t i = 0; i < left; ++i) x[i] = wide(from[i]);
    return x;
}
template <typename T, typename A = decltype(wide(T{}))>
inline void store(Vec<A> x, T* to, int64_t left) {
    if (left >= L<A>) return store(x, to);
    for (int64_t i = 0; i < left; ++i) put(x[i], to + i);
}

// scores[r][j] = q[r] . k[j] of `rows` dense vectors q and `keys` vectors k. Additions take four cycles and two begin in
// each, so it wants eight sums or more.
template <int rows, int keys, typename T, typename A>
inline void dots(const A* q, const T* k, int64_t key_row, int64_t d, A* scores, int64_t scores_row) {
    using V = typename Vector<A>::type;
    constexpr int lanes = Vector<A>::lanes;
    V sums[rows][keys] = {};
    int64_t c = 0;
    for (; c + lanes <= d; c += lanes) {
        V x[keys];
#pragma GCC unroll 4
        for (int j = 0; j < keys; ++j) x[j] = load(k + j * key_row + c);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const V y = load(q + r * d + c);
#pragma GCC unroll 4
            for (int j = 0; j < keys; ++j) sums[r][j] += y * x[j];
        }
    }
    for (int r = 0; r < rows; ++r) {
        if constexpr (keys == 4 && sizeof(A) == 4) four_totals(sums[r], scores + r * scores_row);
        else for (int j = 0; j < keys; ++j) scores[r * scores_row + j] = total<A>(sums[r][j]);
        for (int64_t e = c; e < d; ++e)
            for (int j = 0; j < keys; ++j) scores[r * scores_row + j] += q[r * d + e] * wide(k[j * key_row + e]);
    }
}

// Call `piece(i, room)` for pieces 0 .. pieces - 1, by as many threads as `products` of them are worth.
template <typename A, typename Piece>
void share(int64_t pieces, int64_t threads, double products, Piece piece) {
    threads = std::max<int64_t>(std::min<int64_t>(threads, products / WORTH_A_THREAD), 1);
    std::atomic<int64_t> next{0};
    auto take = [&] {
        std::vector<A> room;
        for (int64_t i; (i = next++) < pieces;) piece(i, room);
    };
    std::vector<std::thread> others;
    try {
        while (static_cast<int64_t>(others.size()) + 1 < threads) others.emplace_back(take);
    } catch (const std::system_error&) {  // no more threads: those that are there do it
    }
    take();
    for (std::thread& other : others) other.join();
}

// Calls row(i) for each of `rows` rows, whose work together is `work` products.
template <typename Row>
void each_row(int64_t rows, int64_t threads, double work, Row row) {
    constexpr int64_t PIECE = 16;  // rows that a thread takes at a time
    share<float>((rows + PIECE - 1) / PIECE, threads, work, [&](int64_t piece, std::vector<float>&) {
        for (int64_t i = piece * PIECE; i < std::min(rows, (piece + 1) * PIECE); ++i) row(i);
    });
}

// The sum of n numbers, of which of(i, left) is the vector from i on. Thirty-two sums side by side, whatever the CPU's
// vectors: the order never depends on it.
template <typename A, typename Of>
inline A sum_over(int64_t n, Of of) {
    constexpr int SIDE = 32 / L<A>;
    Vec<A> side[SIDE] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
#pragma GCC unroll 8
        for (int j = 0; j < SIDE; ++j) side[j] += of(i + j * L<A>, n);
    for (int j = 0; i < n; ++j, i += L<A>) side[j] += first(n - i, of(i, n - i), A(0));
    for (int half = SIDE / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) side[j] += side[j + half];
    return total<A>(side[0]);
}

// RoPE of one head: turns the first 2 r channels by their angles, sign -1 backward, and copies the others.
template <typename T, typename A>
void turn(const T* x, const A* cos, const A* sin, A sign, T* y, int64_t r, int64_t d, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < r; ++i) {
            const A a = wide(x[2 * i]), b = wide(x[2 * i + 1]), s = sign * sin[i];
            put(a * cos[i] - b * s, y + 2 * i);
            put(b * cos[i] + a * s, y + 2 * i + 1);
        }
    } else {
        for (int64_t i = 0; i < r; i += L<A>) {
            const Vec<A> a = load(x + i, r - i), b = load(x + r + i, r - i), c = load(cos + i, r - i), s = load(sin + i, r - i) * sign;
            store(a * c - b * s, y + i, r - i);
            store(b * c + a * s, y + r + i, r - i);
        }
    }
    if (d > 2 * r) std::memcpy(y + 2 * r, x + 2 * r, (d - 2 * r) * sizeof(T));
}

}  // namespace

// The launchers of kernels that have a CUDA twin (`norm.cu` ...) have its signature, attention's with strides: `dtype` is a
// place in `operators.DTYPES`, and `stream` the number of threads, since a CPU has no streams.
template <typename T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <typename T> using Acc = typename AccOf<T>::type;

inline int64_t threads_of(void* stream) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(stream)); }

template <typename Launch>
int by_dtype(int code, Launch launch) {  // launch(a pointer of the type): C++17 has no template arguments for lambdas
    switch (code) {
        case 0: return launch(static_cast<float*>(nullptr)), 0;
        case 1: return launch(static_cast<bf16*>(nullptr)), 0;
        case 3: return launch(static_cast<double*>(nullptr)), 0;
    }
    return -1;
}
