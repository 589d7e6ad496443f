// CUDA C++ for a compiler of C++: what stands before a learner's text, which is compiled as it was written.
//
// Pointers are ordinary pointers. The compiler itself has every access call a function: `-fsanitize=thread` emits
// `__tsan_read4(address)` before a load of four bytes, `-fsanitize=bounds,alignment` a call where an index is beyond its
// array or an address between multiples, `-fsanitize-coverage=trace-pc` one at every branch. These functions are ours
// (`runtime.cc`): they count, look for races and stop what is out of bounds. `given/text.py` adds a table that names the
// line of each such call. Functions of this header call the runtime themselves, so they are marked LAB: not watched.
//
// nvcc takes the text too; then all of this is CUDA's own but the launcher at the end.
#pragma once
#include <cstdint>
#include <cstddef>
#include <type_traits>
#include <utility>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define LAB
#else
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <math.h>
#include <stdlib.h>

#define LAB __attribute__((no_sanitize("thread", "bounds", "bounds-strict", "alignment", "integer-divide-by-zero"), no_sanitize_coverage))
#define HERE int line = __builtin_LINE()
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __grid_constant__
#define __shared__ static __attribute__((aligned(16)))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// ------------------------------------------------------------------------------------------------------------- types
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  LAB constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  LAB constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
typedef unsigned char uchar;
typedef void* cudaStream_t;
#define LAB_VECTORS(T, name, two, four)                                                               \
  struct name##1 { T x; };                                                                            \
  struct alignas(two) name##2 { T x, y; };                                                            \
  struct alignas(four) name##4 { T x, y, z, w; };                                                     \
  LAB inline name##1 make_##name##1(T x) { return {x}; }                                              \
  LAB inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                      \
  LAB inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define LAB_THREE(T, name)                                                                            \
  struct name##3 { T x, y, z; };                                                                      \
  LAB inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }
LAB_VECTORS(float, float, 8, 16) LAB_VECTORS(int, int, 8, 16) LAB_VECTORS(unsigned, uint, 8, 16) LAB_VECTORS(double, double, 16, 16)
LAB_VECTORS(char, char, 2, 4) LAB_VECTORS(uchar, uchar, 2, 4) LAB_VECTORS(short, short, 4, 8) LAB_VECTORS(unsigned short, ushort, 4, 8)
LAB_VECTORS(long long, longlong, 16, 16)
LAB_THREE(float, float) LAB_THREE(int, int) LAB_THREE(double, double)
LAB inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------ what the runtime does (C)
namespace lab {
enum { LOAD, STORE, ATOMIC };
uint3 thread_id();
uint3 block_id();
dim3 block_dim();
dim3 grid_dim();
extern char dynamic_shared[];
void touch(const void* at, size_t bytes, int how, int line, const void* site);
void barrier(int line, const void* site);
int vote(int line, const void* site, bool yes);      // a barrier; how many of the block say yes
void warp_barrier(unsigned mask, int line);
unsigned ballot(unsigned mask, bool yes, int line, const char* what);
uint64_t shuffle(uint64_t mine, int from, unsigned mask, int line, const char* what);
int width_of(int width, int line);
int lane();
long long clock();
[[noreturn]] void failed(const char* what, int line);
int print(const char* format, ...) __attribute__((format(printf, 1, 2)));
int launch(const unsigned* grid, const unsigned* block, size_t shared, void (*body)(void*), void* with);
}  // namespace lab
#define threadIdx (lab::thread_id())
#define blockIdx (lab::block_id())
#define blockDim (lab::block_dim())
#define gridDim (lab::grid_dim())
#define LAB_SITE __builtin_return_address(0)
#define printf lab::print
#undef assert
#define assert(what) ((what) ? (void)0 : lab::failed("assert(" #what ") is not so", __LINE__))
LAB inline void __trap(HERE) { lab::failed("__trap()", line); }
LAB inline long long clock64() { return lab::clock(); }
LAB inline void __nanosleep(unsigned) {}
LAB inline void __threadfence() {}
LAB inline void __threadfence_block() {}

#define LAB_CALLED __attribute__((noinline))         // its return address is the place of the call
LAB LAB_CALLED inline void __syncthreads(HERE) { lab::barrier(line, LAB_SITE); }
LAB LAB_CALLED inline int __syncthreads_count(int yes, HERE) { return lab::vote(line, LAB_SITE, yes); }
LAB LAB_CALLED inline int __syncthreads_or(int yes, HERE) { return lab::vote(line, LAB_SITE, yes) > 0; }
LAB LAB_CALLED inline int __syncthreads_and(int yes, HERE) { return lab::vote(line, LAB_SITE, !yes) == 0; }
LAB inline void __syncwarp(unsigned mask = ~0u, HERE) { lab::warp_barrier(mask, line); }

namespace lab {
template <class T> LAB T shuffled(T mine, int from, unsigned mask, int line, const char* what) {
  static_assert(sizeof(T) <= 8, "a shuffle is of values of at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &mine, sizeof mine);
  bits = shuffle(bits, from, mask, line, what);
  __builtin_memcpy((void*)&mine, &bits, sizeof mine);
  return mine;
}
LAB inline int first_of(int width, int line) { return lane() & ~(width_of(width, line) - 1); }
}  // namespace lab
template <class T> LAB T __shfl_sync(unsigned mask, T v, int from, int width = 32, HERE) {
  return lab::shuffled(v, lab::first_of(width, line) + (from & (width - 1)), mask, line, "__shfl_sync");
}
template <class T> LAB T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32, HERE) {
  const int end = lab::first_of(width, line) + width, other = lab::lane() ^ (by & 31);
  return lab::shuffled(v, other < end ? other : lab::lane(), mask, line, "__shfl_xor_sync");
}
template <class T> LAB T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, HERE) {
  const int end = lab::first_of(width, line) + width, me = lab::lane();
  return lab::shuffled(v, me + (long long)by < end ? me + (int)by : me, mask, line, "__shfl_down_sync");
}
template <class T> LAB T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, HERE) {
  const int first = lab::first_of(width, line), me = lab::lane();
  return lab::shuffled(v, me - (long long)by >= first ? me - (int)by : me, mask, line, "__shfl_up_sync");
}
LAB inline unsigned __ballot_sync(unsigned mask, int yes, HERE) { return lab::ballot(mask, yes, line, "__ballot_sync"); }
LAB inline int __any_sync(unsigned mask, int yes, HERE) { return lab::ballot(mask, yes, line, "__any_sync") != 0; }
LAB inline int __all_sync(unsigned mask, int yes, HERE) { return lab::ballot(mask, !yes, line, "__all_sync") == 0; }
LAB inline unsigned __activemask() { return ~0u; }

// ---------------------------------------------------------------------------------------------- atomics, cached loads
template <class T> LAB LAB_CALLED T __ldg(const T* p, HERE) { return lab::touch(p, sizeof(T), lab::LOAD, line, LAB_SITE), *p; }
#define LAB_LOADS(name) template <class T> LAB LAB_CALLED T name(const T* p, HERE) { return lab::touch(p, sizeof(T), lab::LOAD, line, LAB_SITE), *p; }
#define LAB_STORES(name) template <class T> LAB LAB_CALLED void name(T* p, typename lab::Same<T>::type v, HERE) { lab::touch(p, sizeof(T), lab::STORE, line, LAB_SITE), *p = v; }
#define LAB_ATOMIC(name, ...)                                                                           \
  template <class T> LAB LAB_CALLED T name(T* p, typename lab::Same<T>::type v, HERE) {                  \
    lab::touch((const void*)p, sizeof(T), lab::ATOMIC, line, LAB_SITE);                                  \
    const T old = *p;                                                                                    \
    *p = __VA_ARGS__;                                                                                    \
    return old;                                                                                          \
  }
namespace lab { template <class T> struct Same { typedef T type; }; }
LAB_LOADS(__ldcs) LAB_LOADS(__ldcg) LAB_LOADS(__ldca) LAB_STORES(__stcs) LAB_STORES(__stcg) LAB_STORES(__stwb)
LAB_ATOMIC(atomicAdd, (T)(old + v)) LAB_ATOMIC(atomicSub, (T)(old - v)) LAB_ATOMIC(atomicExch, v)
LAB_ATOMIC(atomicMax, v > old ? v : old) LAB_ATOMIC(atomicMin, v < old ? v : old)
LAB_ATOMIC(atomicAnd, old & v) LAB_ATOMIC(atomicOr, old | v) LAB_ATOMIC(atomicXor, old ^ v)
LAB_ATOMIC(atomicInc, old >= v ? 0 : old + 1) LAB_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T> LAB LAB_CALLED T atomicCAS(T* p, typename lab::Same<T>::type expected, typename lab::Same<T>::type v, HERE) {
  lab::touch(p, sizeof(T), lab::ATOMIC, line, LAB_SITE);
  const T old = *p;
  if (!__builtin_memcmp(&old, &expected, sizeof old)) *p = v;
  return old;
}

#include "lab_math.h"
#include "lab_half.h"

#endif  // __CUDACC__

// ---------------------------------------------------------------------------------------------------------- launcher
namespace lab {
template <class T> struct Name { static constexpr const char* text = "other"; };
#define LAB_NAME(T, what) template <> struct Name<T> { static constexpr const char* text = what; };
LAB_NAME(float, "float32") LAB_NAME(double, "float64") LAB_NAME(__half, "float16") LAB_NAME(__nv_bfloat16, "bfloat16")
LAB_NAME(bool, "bool") LAB_NAME(char, "int8") LAB_NAME(signed char, "int8") LAB_NAME(unsigned char, "uint8")
LAB_NAME(short, "int16") LAB_NAME(unsigned short, "uint16") LAB_NAME(int, "int32") LAB_NAME(unsigned, "uint32")
LAB_NAME(long, "int64") LAB_NAME(unsigned long, "uint64") LAB_NAME(long long, "int64") LAB_NAME(unsigned long long, "uint64")
LAB_NAME(float2, "float32") LAB_NAME(float3, "float32") LAB_NAME(float4, "float32") LAB_NAME(int2, "int32") LAB_NAME(int4, "int32")
LAB_NAME(double2, "float64") LAB_NAME(__half2, "float16") LAB_NAME(__nv_bfloat162, "bfloat16")
template <class T> struct Kind {                     // of a parameter: " float32", "*float32", "c float32" for const float*
  static void put(char*& to, const char* text) { while (*text) *to++ = *text++; }
  template <class P> static void one(char*& to) {
    typedef typename std::remove_pointer<P>::type U;
    put(to, !std::is_pointer<P>::value ? " " : std::is_const<U>::value ? "c" : "*");
    put(to, Name<typename std::remove_cv<U>::type>::text), put(to, ";");
  }
};
template <class... P> const char* signature(void (*)(P...)) {
  static char text[1024];
  char* to = text;
  int each[] = {0, (Kind<void>::template one<typename std::remove_cv<typename std::remove_reference<P>::type>::type>(to), 0)...};
  (void)each, *to = 0;
  return text;
}
#ifdef __CUDACC__
template <class... P> int run(void (*kernel)(P...), void** values, const unsigned* g, const unsigned* b, size_t shared, void* stream) {
  if (shared > 48 << 10) cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
  return (int)cudaLaunchKernel((const void*)kernel, dim3(g[0], g[1], g[2]), dim3(b[0], b[1], b[2]), values, shared, (cudaStream_t)stream);
}
#else
template <class... P> struct Call {
  void (*kernel)(P...);
  void** values;
  template <size_t... I> LAB void with(std::index_sequence<I...>) {
    kernel(*(typename std::remove_reference<P>::type*)values[I]...);
  }
  LAB static void body(void* call) { ((Call*)call)->with(std::index_sequence_for<P...>{}); }
};
template <class... P> LAB int run(void (*kernel)(P...), void** values, const unsigned* g, const unsigned* b, size_t shared, void*) {
  Call<P...> call{kernel, values};
  return launch(g, b, shared, Call<P...>::body, &call);
}
#endif
}  // namespace lab
#define LAB_KERNEL(...)                                                                                                     \
  extern "C" LAB int lab_launch(void** values, const unsigned* grid, const unsigned* block, size_t shared, void* stream) {  \
    return lab::run(__VA_ARGS__, values, grid, block, shared, stream);                                                      \
  }                                                                                                                         \
  extern "C" const char* lab_signature() { return lab::signature(__VA_ARGS__); }
