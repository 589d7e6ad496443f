// CUDA's functions of mathematics that C++ does not have, and its min and max. Part of lab.h.
//
// Fast ones (`__expf`) compute here what the exact ones do: the emulator shows whether a kernel is right, not how it rounds.
#define LAB_F1(name, ...) LAB inline float name(float x) { return __VA_ARGS__; }
#define LAB_F2(name, ...) LAB inline float name(float x, float y) { return __VA_ARGS__; }
#define LAB_LEAST(T) LAB inline T min(T a, T b) { return b < a ? b : a; } LAB inline T max(T a, T b) { return a < b ? b : a; }
LAB_LEAST(int) LAB_LEAST(unsigned) LAB_LEAST(long) LAB_LEAST(unsigned long) LAB_LEAST(long long) LAB_LEAST(unsigned long long)
LAB inline float min(float a, float b) { return std::fmin(a, b); }
LAB inline float max(float a, float b) { return std::fmax(a, b); }
LAB inline double min(double a, double b) { return std::fmin(a, b); }
LAB inline double max(double a, double b) { return std::fmax(a, b); }
LAB inline double min(float a, double b) { return std::fmin((double)a, b); }
LAB inline double max(float a, double b) { return std::fmax((double)a, b); }
LAB inline double min(double a, float b) { return std::fmin(a, (double)b); }
LAB inline double max(double a, float b) { return std::fmax(a, (double)b); }
LAB inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
LAB inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
LAB inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
LAB inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
LAB_F1(rsqrtf, 1.0f / std::sqrt(x)) LAB_F1(rsqrt, 1.0f / std::sqrt(x)) LAB_F1(rcbrtf, 1.0f / std::cbrt(x)) LAB_F1(exp10f, std::pow(10.0f, x))
LAB inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
LAB_F1(__expf, std::exp(x)) LAB_F1(__exp10f, std::pow(10.0f, x)) LAB_F1(__logf, std::log(x)) LAB_F1(__log2f, std::log2(x))
LAB_F1(__log10f, std::log10(x)) LAB_F1(__sinf, std::sin(x)) LAB_F1(__cosf, std::cos(x)) LAB_F1(__tanf, std::tan(x))
LAB_F1(__fsqrt_rn, std::sqrt(x)) LAB_F1(__frsqrt_rn, 1.0f / std::sqrt(x)) LAB_F1(__frcp_rn, 1.0f / x)
LAB_F1(__saturatef, x > 0 ? x < 1 ? x : 1.0f : 0.0f) LAB_F1(normcdff, 0.5f * std::erfc(-x * 0.70710678f)) LAB_F1(sinpif, std::sin(3.14159265f * x))
LAB_F2(__powf, std::pow(x, y)) LAB_F2(__fdividef, x / y) LAB_F2(fdividef, x / y) LAB_F2(__fdiv_rn, x / y) LAB_F2(__fadd_rn, x + y)
LAB_F2(__fsub_rn, x - y) LAB_F2(__fmul_rn, x * y)
LAB inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
LAB inline void __sincosf(float x, float* s, float* c) { *s = std::sin(x), *c = std::cos(x); }
LAB inline int __float_as_int(float x) { int i; __builtin_memcpy(&i, &x, 4); return i; }
LAB inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
LAB inline float __int_as_float(int i) { float x; __builtin_memcpy(&x, &i, 4); return x; }
LAB inline float __uint_as_float(unsigned i) { return __int_as_float((int)i); }
LAB inline long long __double_as_longlong(double x) { long long i; __builtin_memcpy(&i, &x, 8); return i; }
LAB inline double __longlong_as_double(long long i) { double x; __builtin_memcpy(&x, &i, 8); return x; }
LAB inline int __float2int_rn(float x) {
  return x != x ? 0 : x >= 2147483648.f ? INT_MAX : x < -2147483648.f ? INT_MIN : (int)std::nearbyint(x);
}
LAB inline int __float2int_rz(float x) { return __float2int_rn(std::trunc(x)); }
LAB inline int __float2int_rd(float x) { return __float2int_rn(std::floor(x)); }
LAB inline int __float2int_ru(float x) { return __float2int_rn(std::ceil(x)); }
LAB inline float __int2float_rn(int x) { return (float)x; }
LAB inline float __uint2float_rn(unsigned x) { return (float)x; }
LAB inline int __popc(unsigned x) { return __builtin_popcount(x); }
LAB inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
LAB inline int __ffs(int x) { return __builtin_ffs(x); }
LAB inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
LAB inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
LAB inline unsigned __brev(unsigned x) { unsigned y = 0; for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i); return y; }
LAB inline int __mul24(int a, int b) { return a * b; }
LAB inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
LAB inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
