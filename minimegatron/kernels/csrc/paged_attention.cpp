// Attention of a few new tokens of each sequence to all tokens of it, on a CPU, from pages where they lie.
//
// For one sequence and one head of keys, the queries that share it (a / g heads of each new token) pass over the keys
// page by page. Of each page first all scores, then one maximum, then weights, then their sum of values: the online
// softmax, a page at a time.
//
//     m' = max(m, max_j s_j)      l' = l e^(m - m') + sum_j e^(s_j - m')      o' = o e^(m - m') + sum_j e^(s_j - m') v_j
//
// Sums are in fp32, for fp64 in fp64. Keys behind a sequence's last are never read.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#define MM_EXPORT extern "C" __attribute__((visibility("default"))) int

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void put(float x, float* to) { *to = x; }
inline void put(double x, double* to) { *to = x; }
inline void put(float x, bf16* to) {  // to nearest even; not a number stays none
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 0, in a form that a compiler makes vectors of: 2^n times a polynomial of degree 6 on [-1/2, 1/2] ln 2.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f + r * (0.041666667f + r * (0.0083333333f + r * 0.0013888889f)))));
    int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}
inline double exponential(double x) { return std::exp(x); }

template <typename T, typename A>
void one_head(const T* q, int64_t q_token, int64_t q_head, int queries, int heads, const T* keys, const T* values,
              const int64_t* key_strides, const int64_t* value_strides, const int32_t* table, int page_size, int total,
              int d, int dv, A scale, int window, A softcap, T* out, int64_t out_token, int64_t out_head, A* room) {
    const A lowest = -std::numeric_limits<A>::infinity();
    A* wide_q = room;              // [d]
    A* scores = wide_q + d;        // [page_size]
    A* sum = scores + page_size;   // [dv]
    for (int i = 0; i < queries; ++i) {
        const int last = total - queries + i;  // the place of this token: it sees what is not behind it
        const int first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
        for (int h = 0; h < heads; ++h) {
            const T* query = q + i * q_token + h * q_head;
            for (int c = 0; c < d; ++c) wide_q[c] = wide(query[c]) * scale;
            for (int c = 0; c < dv; ++c) sum[c] = 0;
            A top = lowest, mass = 0;
            for (int page = first / page_size; page <= last / page_size; ++page) {
                const int begin = page * page_size < first ? first - page * page_size : 0;
                const int end = (page + 1) * page_size > last + 1 ? last + 1 - page * page_size : page_size;
                const T* key = keys + table[page] * key_strides[0];
                const T* value = values + table[page] * value_strides[0];
                A best = lowest;
                for (int j = begin; j < end; ++j) {
                    const T* k = key + j * key_strides[1];
                    A dot = 0;
#pragma omp simd reduction(+ : dot)
                    for (int c = 0; c < d; ++c) dot += wide_q[c] * wide(k[c]);
                    if (softcap > 0) dot = softcap * std::tanh(dot / softcap);
                    scores[j] = dot;
                    best = dot > best ? dot : best;
                }
                if (!(best <= top)) {  // larger, or not a number, which then spreads
                    const A fade = top == lowest ? A(0) : exponential(top - best);
                    mass *= fade;
                    for (int c = 0; c < dv; ++c) sum[c] *= fade;
                    top = best;
                }
                for (int j = begin; j < end; ++j) scores[j] = exponential(scores[j] - top);
                for (int j = begin; j < end; ++j) {
                    const T* v = value + j * value_strides[1];
                    const A weight = scores[j];
                    mass += weight;
#pragma omp simd
                    for (int c = 0; c < dv; ++c) sum[c] += weight * wide(v[c]);
                }
            }
            T* to = out + i * out_token + h * out_head;
            for (int c = 0; c < dv; ++c) put(sum[c] / mass, to + c);
        }
    }
}

template <typename T, typename A>
void attend(const void* q, const void* keys, const void* values, void* out, const int32_t* starts,
            const int32_t* lengths, const int32_t* table, int64_t sequences, int64_t most, int64_t longest,
            int64_t page_size, int64_t heads, int64_t groups, int64_t d, int64_t dv, const int64_t* key_strides,
            const int64_t* value_strides, double scale, int64_t window, double softcap) {
    std::vector<A> room(d + page_size + dv);
    const int64_t shared = heads / groups;
    for (int64_t s = 0; s < sequences; ++s) {
        const int queries = starts[s + 1] - starts[s];
        if (queries == 0 || queries > longest) continue;
        for (int64_t g = 0; g < groups; ++g) {
            const T* mine = static_cast<const T*>(q) + (starts[s] * heads + g * shared) * d;
            T* to = static_cast<T*>(out) + (starts[s] * heads + g * shared) * dv;
            one_head<T, A>(mine, heads * d, d, queries, shared, static_cast<const T*>(keys) + g * key_strides[2],
                           static_cast<const T*>(values) + g * value_strides[2], key_strides, value_strides,
                           table + s * most, page_size, lengths[s], d, dv, static_cast<A>(scale), window,
                           static_cast<A>(softcap), to, heads * dv, dv, room.data());
        }
    }
}

}  // namespace

// q [n, heads, d] and out [n, heads, dv] are dense; keys and values have strides of (page, row, head) in elements, and
// dense channels. Sequences with more than `longest` new tokens are left out. window 0 and softcap 0 for none.
MM_EXPORT mm_paged_attention(const void* q, const void* keys, const void* values, void* out, const void* starts,
                             const void* lengths, const void* table, const void* key_strides,
                             const void* value_strides, int64_t sequences, int64_t most, int64_t longest,
                             int64_t page_size, int64_t heads, int64_t groups, int64_t d, int64_t dv, double scale,
                             int64_t window, double softcap, int dtype, void* stream) {
    (void)stream;
#define MM_ATTEND(T, A)                                                                                              \
    attend<T, A>(q, keys, values, out, static_cast<const int32_t*>(starts), static_cast<const int32_t*>(lengths),    \
                 static_cast<const int32_t*>(table), sequences, most, longest, page_size, heads, groups, d, dv,      \
                 static_cast<const int64_t*>(key_strides), static_cast<const int64_t*>(value_strides), scale,        \
                 window, softcap)
    switch (dtype) {
        case 0: MM_ATTEND(float, float); return 0;
        case 1: MM_ATTEND(bf16, float); return 0;
        case 3: MM_ATTEND(double, double); return 0;
        default: return -1;
    }
}
