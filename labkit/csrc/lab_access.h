// What each access of a kernel passes through: bounds, counts, races. Part of lab.h.
namespace lab {
using emulator::S;
constexpr int ARRAYS = 8, SHARED = 64, LOCALS = 8, SECTOR = 32;
struct Place { int line, site; };                    // of the text
struct Index { long long at; int line, site; };
struct Word {                                        // of shared memory: who used it last, and in which epochs
  struct Use { int thread = -1, line = 0; long long serial = -1, block = 0, warp = 0; bool atomic = false; };
  Use wrote, read[2];                                // the two readers are of two warps, or of one
};
enum Kind { ARRAY, OF_BLOCK, OF_THREAD };
struct Region {
  const char* name = "";
  char* begin = nullptr;
  size_t size = 0;
  unsigned element = 4, generation = 0;
  Kind kind = ARRAY;
  Word* words = nullptr;
  unsigned grain = 4;                                // bytes of a word
  bool constant = false;
};
struct Counts { long long times[2], bytes[2], sectors[2]; };   // loads, stores
struct Request { int n; uintptr_t sectors[32]; };
struct Site {                                        // a place that loads, or one that stores
  std::vector<uint32_t> times;                       // by thread
  std::vector<std::vector<Request>> warps;           // by warp, then by time
};
struct Last { int id; long long at; size_t bytes; long long waits; };
struct Ledger {
  Region regions[ARRAYS + SHARED + 1024 * LOCALS];
  Counts counts[ARRAYS];
  std::vector<unsigned char> writes[ARRAYS];         // of each word
  Last last[1024];                                   // what each thread loaded last, and before which wait
  long long block = -1, ticks = 0, limit = 0, shared_uses[1024];
  long long busiest = 0;                             // most loads of shared memory by one thread of one block
  int shared = 0, line = 0, note_line = 0, race_line = 0, printed = 0;
  bool quiet = false;
  std::vector<Site> sites;                           // 2 * place + whether it stores
  char note[200];
  char race[256];                                    // the first one, until it is known whether a barrier was missed
};
inline Ledger L;

// A race that was seen is what the launch fails with, whatever comes of it later; but see `met`.
inline bool raced() {
  if (L.race_line) std::memcpy(S.message, L.race, sizeof S.message), L.line = L.race_line;
  return L.race_line;
}
template <class... A> [[noreturn]] void stop(int error, int line, const char* format, A... a) {
  if (S.fibers.empty() || !S.running) std::abort();  // not in a kernel
  if (!raced()) std::snprintf(S.message, sizeof S.message, format, a...), L.line = line;
  emulator::stop(L.race_line ? 719 : error);
}
// No error by itself: it is told when the result is wrong.
template <class... A> void note(int line, const char* format, A... a) {
  if (L.note_line) return;
  L.note_line = line;
  std::snprintf(L.note, sizeof L.note, format, a...);
}
inline void turned(int line) {
  if (++L.ticks > L.limit) stop(702, line, "stuck: after %lld turns of its loops the kernel is still not done", L.limit);
}
constexpr void tick(int line) { if (!__builtin_is_constant_evaluated()) turned(line); }

inline void next_block() {
  for (auto& site : L.sites) {
    for (auto& warp : site.warps) warp.clear();
    std::fill(site.times.begin(), site.times.end(), 0u);
  }
  for (long long& n : L.shared_uses) L.busiest = std::max(L.busiest, n), n = 0;
  L.block = S.serial;
}
// ------------------------------------------------------------------------------------------------- one access
inline void count(int id, long long at, size_t bytes, bool store, int place) {
  const long long waits = S.counters[1] + S.counters[2];
  if (L.block != S.serial) next_block();
  Last& last = L.last[S.current];
  if (!store && last.id == id && last.at == at && last.bytes == bytes && last.waits == waits) return;  // in a register
  if (!store) last = {id, at, bytes, waits};
  Counts& counts = L.counts[id];
  counts.bytes[store] += bytes, ++counts.times[store];
  const size_t number = 2 * place + store;
  if (L.sites.size() <= number) L.sites.resize(number + 1);
  Site& site = L.sites[number];
  if (site.times.empty()) site.times.resize(1024), site.warps.resize(32);
  auto& warp = site.warps[S.current >> 5];
  const uint32_t time = site.times[S.current]++;
  if (warp.size() <= time) warp.resize(time + 1, Request{});
  Request& request = warp[time];
  const uintptr_t sector = at / SECTOR;
  for (int i = 0; i < request.n; ++i)
    if (request.sectors[i] == sector) return;
  if (request.n < 32) request.sectors[request.n++] = sector, ++counts.sectors[store];
}
inline bool before(const Word::Use& use) {           // whether a barrier stands between that use and now
  return use.serial != S.serial || use.thread == S.current || use.block < S.block_epoch ||
         (use.thread / 32 == S.current / 32 && use.warp < S.warp_epochs[S.current / 32]);
}
inline void race(const Region& r, long long number, const Word::Use& other, const char* did, const char* does, int line) {
  if (L.race_line) return;
  L.race_line = line;
  std::snprintf(L.race, sizeof L.race, "a race: thread %d of block %u %s %s[%lld], which thread %d %s at line %d, and no "
                "__syncthreads() is between", S.current, S.block_id.x, does, r.name, number, other.thread, did, other.line);
}
inline void watch(Region& r, long long at, size_t bytes, bool store, const void* value, bool atomic, int line) {
  const Word::Use now{S.current, line, S.serial, S.block_epoch, S.warp_epochs[S.current / 32], atomic};
  const bool same = store && !atomic && !std::memcmp(r.begin + at, value, bytes);
  if (!store) ++L.shared_uses[S.current];
  if (L.block != S.serial) next_block();
  for (size_t i = at / r.grain; i * r.grain < at + bytes; ++i) {
    Word& word = r.words[i];
    const long long number = i * r.grain / r.element;
    const bool both = atomic && word.wrote.atomic;
    if (word.wrote.serial != S.serial && (!store || atomic))
      note(line, "thread %d of block %u reads %s[%lld], which was never written", S.current, S.block_id.x, r.name, number);
    if (!both && !same && !before(word.wrote)) race(r, number, word.wrote, "writes", store ? "writes" : "reads", line);
    if (!store || atomic) {
      auto& first = word.read[0];
      if (first.thread != S.current || first.serial != S.serial) word.read[1] = first;
      first = now;
    }
    if (!store) continue;
    for (auto& use : word.read)
      if (!same && !(atomic && use.atomic) && !before(use)) race(r, number, use, "reads", "writes", line);
    word.wrote = now;
  }
}
// One access of one thread; returns where it is to be done.
__attribute__((noinline)) inline char* touch(int id, unsigned generation, long long at, size_t bytes, bool store, const void* value,
                                             bool atomic, int line, int site) {
  if (id < 0) stop(700, line, "thread %d of block %u uses a pointer that points to no array", S.current, S.block_id.x);
  Region& r = L.regions[id];
  const char* verb = store ? "writes" : "reads";
  if (r.generation != generation) stop(700, line, "thread %d %s an array of a function that has ended", S.current, verb);
  if (at < 0 || at > (long long)r.size - (long long)bytes)  // no sum here: it could overflow
    stop(700, line, "thread %d of block %u %s %s[%lld]; it has %zu numbers", S.current, S.block_id.x, verb, r.name,
         (at < 0 ? at - (int)r.element + 1 : at) / (int)r.element, r.size / r.element);
  if ((uintptr_t)(r.begin + at) % bytes)
    stop(716, line, "thread %d of block %u %s %s[%lld] as float%zu: no multiple of %zu bytes", S.current, S.block_id.x, verb, r.name,
         at / r.element, bytes / 4, bytes);
  if (r.kind == ARRAY) {
    if (!store || atomic) count(id, at, bytes, false, site);
    if ((!store || atomic) && !r.constant && !L.writes[id][at / 4])
      note(line, "thread %d of block %u reads %s[%lld] before the kernel has written it", S.current, S.block_id.x, r.name, at / 4);
    if (store) {
      count(id, at, bytes, true, site);
      for (size_t i = at / 4; i < (at + bytes) / 4; ++i) L.writes[id][i] += L.writes[id][i] < 255;
    }
  } else if (r.kind == OF_BLOCK) {
    watch(r, at, bytes, store, value, atomic, line);
  }
  return r.begin + at;
}

}  // namespace lab
