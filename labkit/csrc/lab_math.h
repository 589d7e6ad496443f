// printf, and CUDA's functions of mathematics. Part of lab.h.
namespace lab {
struct Value { bool real; double d; long long i; };
template <class T> Value printable(T v) {
  static_assert(std::is_arithmetic<T>::value, "printf here takes numbers");
  return {std::is_floating_point<T>::value, (double)v, (long long)v};
}
inline void written(const char* format, const Value* values, int n) {
  if (L.quiet || ++L.printed > 2000) return;
  int next = 0;
  for (const char* p = format; *p; ++p) {
    if (*p != '%') { std::putchar(*p); continue; }
    char one[24] = "%";
    int k = 1;
    for (++p; *p && std::strchr("-+ #0123456789.", *p) && k < 12; ++p) one[k++] = *p;
    while (*p && std::strchr("hlz", *p)) ++p;
    if (!*p) return;
    if (*p == '%') { std::putchar('%'); continue; }
    const bool real = std::strchr("fFeEgGaA", *p), whole = std::strchr("diuxXo", *p);
    if ((!real && !whole) || next >= n) { std::fputs("<?>", stdout); continue; }
    const Value v = values[next++];
    if (whole) one[k++] = 'l', one[k++] = 'l';
    one[k++] = *p, one[k] = 0;
    if (real) std::printf(one, v.real ? v.d : (double)v.i);
    else std::printf(one, v.real ? (long long)v.d : v.i);
  }
  std::fflush(stdout);
}
template <class... A> int print(const char* format, const A&... a) {
  const Value values[] = {printable(a)..., Value{}};
  return written(format, values, sizeof...(A)), 0;
}
namespace math {
#define LAB_ONE(n) inline float n##f(float x) { return std::n(x); } inline float n(float x) { return std::n(x); } \
  inline double n(double x) { return std::n(x); } inline double n(int x) { return std::n((double)x); }
#define LAB_BOTH(n) inline float n##f(float x, float y) { return std::n(x, y); } inline float n(float x, float y) { return std::n(x, y); } \
  inline double n(double x, double y) { return std::n(x, y); }
LAB_ONE(sqrt) LAB_ONE(exp) LAB_ONE(exp2) LAB_ONE(log) LAB_ONE(log2) LAB_ONE(log10) LAB_ONE(log1p) LAB_ONE(expm1) LAB_ONE(sin)
LAB_ONE(cos) LAB_ONE(tan) LAB_ONE(tanh) LAB_ONE(fabs) LAB_ONE(floor) LAB_ONE(ceil) LAB_ONE(round) LAB_ONE(rint) LAB_ONE(trunc)
LAB_ONE(erf) LAB_ONE(cbrt) LAB_BOTH(pow) LAB_BOTH(fmod) LAB_BOTH(copysign) LAB_BOTH(hypot) LAB_BOTH(fmax) LAB_BOTH(fmin)
inline float pow(float x, int n) { return std::pow(x, (float)n); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma(double a, double b, double c) { return std::fma(a, b, c); }
inline float ldexpf(float x, int e) { return std::ldexp(x, e); }
#define LAB_LEAST(T) inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; }
LAB_LEAST(int) LAB_LEAST(unsigned) LAB_LEAST(long) LAB_LEAST(unsigned long) LAB_LEAST(long long) LAB_LEAST(unsigned long long)
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return std::fabs(x); }
inline double abs(double x) { return std::fabs(x); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::isinf(x); }
inline bool isfinite(float x) { return std::isfinite(x); }
inline float fsqrt_rn(float x) { return std::sqrt(x); }
inline float frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float frcp_rn(float x) { return 1.0f / x; }
inline float fdividef(float a, float b) { return a / b; }
inline float fdiv_rn(float a, float b) { return a / b; }
inline float fadd_rn(float a, float b) { return a + b; }
inline float fsub_rn(float a, float b) { return a - b; }
inline float fmul_rn(float a, float b) { return a * b; }
inline float fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float saturatef(float x) { return x > 0 ? x < 1 ? x : 1.0f : 0.0f; }
inline int float_as_int(float x) { return (int)emulator::bits(x); }
inline float int_as_float(int x) { return emulator::number((uint32_t)x); }
inline int float2int_rn(float x) { return x != x ? 0 : (int)std::nearbyint(std::fmax(std::fmin(x, 2147483520.f), -2147483648.f)); }
inline float int2float_rn(int x) { return (float)x; }
inline int popc(unsigned x) { return __builtin_popcount(x); }
inline int ffs(int x) { return __builtin_ffs(x); }
inline int clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
}  // namespace math

}  // namespace lab
