// Barriers, shuffles and atomics: what threads do together. Part of lab.h.
namespace lab {
inline void syncthreads(Place p) {
  S.lines[S.current] = p.line, S.sites[S.current] = p.site;
  emulator::wait(emulator::BLOCK);
}
// Before a barrier opens: all threads must be there, at the same one.
inline int met() {
  int first = -1, last = -1, gone = -1;
  for (int i = 0; i < S.threads; ++i) {
    if (S.fibers[i].done) { if (gone < 0) gone = i; continue; }
    if (first < 0) first = i;
    if (S.sites[i] != S.sites[first] && last < 0) last = i;
  }
  if (gone < 0 && last < 0) return raced() ? 719 : 0;
  L.line = S.lines[first];
  const char* must = "all threads must meet the same one, so none stands in an `if` that only some threads enter";
  if (gone >= 0) std::snprintf(S.message, sizeof S.message, "thread %d of block %u did not meet the barrier of line %d, where thread %d "
                               "waits, and has ended: %s", gone, S.block_id.x, S.lines[first], first, must);
  else std::snprintf(S.message, sizeof S.message, "thread %d of block %u did not meet the barrier of line %d, where thread %d waits; it "
                     "waits at that of line %d: %s", last, S.block_id.x, S.lines[first], first, S.lines[last], must);
  return 702;
}
// No thread can go on: a lane waits for another one that its mask names, and which waits elsewhere.
inline int hung() {
  for (int i = 0; i < S.threads; ++i)
    for (int lane = 0, first = i & ~31; lane < 32 && S.fibers[i].wait == emulator::WARP && !S.fibers[i].done; ++lane) {
      const int j = first + lane;
      if (!(S.masks[i] >> lane & 1) || j >= S.threads || S.fibers[j].done) continue;
      const bool there = S.fibers[j].wait == emulator::WARP;
      if (there && S.masks[j] == S.masks[i]) continue;
      L.line = S.lines[i];
      std::snprintf(S.message, sizeof S.message, "thread %d waits in a shuffle or __syncwarp whose mask 0x%x names lane %d, too; "
                    "thread %d waits at the %s of line %d", i, S.masks[i], lane, j,
                    there ? "one with another mask" : "__syncthreads()", S.lines[j]);
      return 702;
    }
  return 0;
}
inline void among(unsigned mask, Place p, const char* what) {
  S.lines[S.current] = p.line, S.masks[S.current] = mask;
  if (!(mask >> (S.current & 31) & 1))
    stop(719, p.line, "thread %d calls %s with the mask 0x%x, which does not name its own lane %d", S.current, what, mask, S.current & 31);
}
inline void syncwarp(Place p, unsigned mask = ~0u) { among(mask, p, "__syncwarp"), emulator::wait(emulator::WARP); }
template <class T> T exchange(T mine, int from, unsigned mask, Place p, const char* what) {
  static_assert(std::is_arithmetic<T>::value, "a shuffle is of numbers");
  const int me = S.current, there = (me & ~31) + from;
  uint64_t bits = 0;
  std::memcpy(&bits, &mine, sizeof mine);
  among(mask, p, what);
  S.slots[me] = bits;
  emulator::wait(emulator::WARP);
  const bool named = mask >> from & 1, here = there < S.threads && !S.fibers[there].done;
  if (!named || !here)
    note(p.line, "thread %d takes a value from lane %d, which %s", me, from,
         !here ? "is not there: the warp has fewer threads, or it has ended, or it did not come to this shuffle" : "the mask does not name");
  bits = named && here ? S.slots[there] : ~0ull;
  S.masks[me] = mask;
  emulator::wait(emulator::WARP);
  std::memcpy(&mine, &bits, sizeof mine);
  return mine;
}
template <class T> using Of = typename Plain<T>::type;
inline int wide(int width, int line) {
  if (width < 1 || width > 32 || width & (width - 1)) stop(9, line, "a shuffle among %d lanes: 1, 2, 4, 8, 16 or 32", width);
  return width;
}
template <class T> Of<T> shfl_sync(Place p, unsigned mask, const T& v, int lane, int width = 32) {
  const int me = S.current & 31, first = me & ~(wide(width, p.line) - 1);
  return exchange<Of<T>>(v, first + (lane & (width - 1)), mask, p, "__shfl_sync");
}
template <class T> Of<T> shfl_xor_sync(Place p, unsigned mask, const T& v, int by, int width = 32) {
  const int me = S.current & 31, other = me ^ (by & 31), end = (me & ~(wide(width, p.line) - 1)) + width;
  return exchange<Of<T>>(v, other < end ? other : me, mask, p, "__shfl_xor_sync");
}
template <class T> Of<T> shfl_down_sync(Place p, unsigned mask, const T& v, unsigned by, int width = 32) {
  const int me = S.current & 31, end = (me & ~(wide(width, p.line) - 1)) + width;
  return exchange<Of<T>>(v, me + (long long)by < end ? me + by : me, mask, p, "__shfl_down_sync");
}
template <class T> Of<T> shfl_up_sync(Place p, unsigned mask, const T& v, unsigned by, int width = 32) {
  const int me = S.current & 31, first = me & ~(wide(width, p.line) - 1);
  return exchange<Of<T>>(v, me - (long long)by >= first ? me - by : me, mask, p, "__shfl_up_sync");
}
inline unsigned ballot_sync(Place p, unsigned mask, bool yes) {
  among(mask, p, "__ballot_sync");
  S.slots[S.current] = yes;
  emulator::wait(emulator::WARP);
  unsigned all = 0;
  for (int i = 0, first = S.current & ~31; i < 32; ++i)
    if (mask >> i & 1 && first + i < S.threads && !S.fibers[first + i].done) all |= (unsigned)(S.slots[first + i] == 1) << i;
  S.masks[S.current] = mask;
  emulator::wait(emulator::WARP);
  return all;
}
inline bool any_sync(Place p, unsigned mask, bool yes) { return ballot_sync(p, mask, yes) != 0; }
inline bool all_sync(Place p, unsigned mask, bool yes) { return ballot_sync(p, mask, !yes) == 0; }
template <class A> auto ldg(Place p, const A& a) { return value(star(a, p)); }
#define LAB_ATOMIC(name, expression)                                                                  \
  template <class A, class V> auto name(Place p, const A& a, const V& by) {                           \
    auto there = value(a);                                                                            \
    typedef decltype(value(there[Index{}])) T;                                                        \
    const T v = (T)value(by);                                                                         \
    T* word = (T*)there.both(p, v);                                                                   \
    const T old = *word;                                                                              \
    ++S.counters[3];                                                                                  \
    *word = expression;                                                                               \
    return old;                                                                                       \
  }
LAB_ATOMIC(atomicAdd, old + v)
LAB_ATOMIC(atomicMax, v > old ? v : old)
LAB_ATOMIC(atomicMin, v < old ? v : old)

}  // namespace lab
