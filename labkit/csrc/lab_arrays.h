// Pointers, shared arrays, arrays of a thread: each an array and a place in it. Part of lab.h.
namespace lab {
template <class T> class Counted;
template <class T> class Ref;
template <class T> struct Plain { typedef T type; };
template <class T> struct Plain<Ref<T>> { typedef T type; };
template <class T> constexpr T value(const T& v) { return v; }
template <class T> T value(const Ref<T>& v) { return v; }
template <class I> constexpr bool integer = std::is_integral<typename Plain<I>::type>::value;
template <class I> constexpr typename std::enable_if<integer<I>, Index>::type index(const I& i, Place p) {
  return {(long long)value(i), p.line, p.site};
}
template <class I> typename std::enable_if<!integer<I>, Index>::type index(const I& i, Place p) = delete;  // cuda_text says why

#define LAB_ASSIGN(op) \
  template <class V> __attribute__((always_inline)) Ref& operator op##=(const V& v) { return *this = (T)((T)*this op value(v)); }
#define LAB_REF                                                                                                        \
  int id;                                                                                                              \
  unsigned generation;                                                                                                 \
  long long at;                                                                                                        \
  int line, site;                                                                                                      \
  __attribute__((always_inline)) operator T() const {                                                                  \
    return *(const T*)touch(id, generation, at, sizeof(T), false, nullptr, false, line, site);                         \
  }                                                                                                                    \
  __attribute__((always_inline)) Ref& operator=(const T& v) {                                                          \
    T kept = v;                                                                                                        \
    *(T*)touch(id, generation, at, sizeof(T), true, &kept, false, line, site) = kept;                                  \
    return *this;                                                                                                      \
  }                                                                                                                    \
  Ref(const Ref&) = default;                                                                                           \
  __attribute__((always_inline)) Ref& operator=(const Ref& other) { return *this = (T)other; }
template <class T> class Ref {                       // what p[i] is where it may be written
 public:
  LAB_REF
  Ref(int id, unsigned generation, long long at, int line, int site)
      : id(id), generation(generation), at(at), line(line), site(site) {}
  LAB_ASSIGN(+) LAB_ASSIGN(-) LAB_ASSIGN(*) LAB_ASSIGN(/) LAB_ASSIGN(%) LAB_ASSIGN(<<) LAB_ASSIGN(>>) LAB_ASSIGN(&)
  LAB_ASSIGN(|) LAB_ASSIGN(^)
  Ref& operator++() { return *this += 1; }
  Ref& operator--() { return *this -= 1; }
  T operator++(int) { T old = *this; *this = (T)(old + 1); return old; }
  T operator--(int) { T old = *this; *this = (T)(old - 1); return old; }
};
#define LAB_PART(name, n) name(id, generation, at + 4 * n, line, site)
#define LAB_VECTOR(T, E, members, ...)                                                                                  \
  template <> class Ref<T> {                                                                                            \
    typedef ::T vector;                                                                                                 \
   public:                                                                                                              \
    typedef ::T T_;                                                                                                     \
    int id;                                                                                                             \
    unsigned generation;                                                                                                \
    long long at;                                                                                                       \
    int line, site;                                                                                                     \
    Ref<E> members;                                                                                                     \
    Ref(int id, unsigned generation, long long at, int line, int site)                                                  \
        : id(id), generation(generation), at(at), line(line), site(site), __VA_ARGS__ {}                                \
    operator vector() const { return *(const vector*)touch(id, generation, at, sizeof(vector), false, nullptr, false, line, site); } \
    Ref& operator=(const vector& v) {                                                                                   \
      vector kept = v;                                                                                                  \
      *(vector*)touch(id, generation, at, sizeof(vector), true, &kept, false, line, site) = kept;                       \
      return *this;                                                                                                     \
    }                                                                                                                   \
    Ref(const Ref&) = default;                                                                                          \
    Ref& operator=(const Ref& other) { return *this = (vector)other; }                                                  \
  };
#define LAB_TWO x, y
#define LAB_FOUR x, y, z, w
LAB_VECTOR(float2, float, LAB_TWO, LAB_PART(x, 0), LAB_PART(y, 1))
LAB_VECTOR(int2, int, LAB_TWO, LAB_PART(x, 0), LAB_PART(y, 1))
LAB_VECTOR(float4, float, LAB_FOUR, LAB_PART(x, 0), LAB_PART(y, 1), LAB_PART(z, 2), LAB_PART(w, 3))
LAB_VECTOR(int4, int, LAB_FOUR, LAB_PART(x, 0), LAB_PART(y, 1), LAB_PART(z, 2), LAB_PART(w, 3))

template <class T> class Counted {                   // a pointer: a place in an array
  typedef typename std::remove_const<T>::type V;
  template <class U> friend class Counted;
  template <class To, class From> friend Counted<To> moved(const Counted<From>& from);
  int id = -1;
  unsigned generation = 0;
  long long at = 0;
 public:
  Counted() = default;
  explicit Counted(int id, unsigned generation = 0, long long at = 0) : id(id), generation(generation), at(at) {}
  template <class U, class = typename std::enable_if<std::is_same<const U, T>::value>::type>
  Counted(const Counted<U>& other) : id(other.id), generation(other.generation), at(other.at) {}
  __attribute__((always_inline)) auto operator[](Index i) const {
    const long long there = at + i.at * (long long)sizeof(V);
    if constexpr (std::is_const<T>::value)
      return *(const V*)touch(id, generation, there, sizeof(V), false, nullptr, false, i.line, i.site);
    else
      return Ref<V>(id, generation, there, i.line, i.site);
  }
  char* both(Place p, const V& v) const { return touch(id, generation, at, sizeof(V), true, &v, true, p.line, p.site); }
  Counted operator+(long long i) const { return Counted(id, generation, at + i * (long long)sizeof(V)); }
  Counted operator-(long long i) const { return *this + -i; }
  friend Counted operator+(long long i, const Counted& p) { return p + i; }
  template <class U> long long operator-(const Counted<U>& other) const { return (at - other.at) / (long long)sizeof(V); }
  Counted& operator+=(long long i) { return *this = *this + i; }
  Counted& operator-=(long long i) { return *this = *this - i; }
  Counted& operator++() { return *this += 1; }
  Counted& operator--() { return *this -= 1; }
  Counted operator++(int) { Counted old = *this; ++*this; return old; }
  Counted operator--(int) { Counted old = *this; --*this; return old; }
  template <class U> bool operator==(const Counted<U>& o) const { return id == o.id && at == o.at; }
  template <class U> bool operator!=(const Counted<U>& o) const { return !(*this == o); }
  template <class U> bool operator<(const Counted<U>& o) const { return at < o.at; }
  template <class U> bool operator>(const Counted<U>& o) const { return at > o.at; }
  template <class U> bool operator<=(const Counted<U>& o) const { return at <= o.at; }
  template <class U> bool operator>=(const Counted<U>& o) const { return at >= o.at; }
};
template <class To, class From> Counted<To> moved(const Counted<From>& from) {
  return Counted<To>(from.id, from.generation, from.at);
}

// ------------------------------------------------------------------------------------------------------ arrays
template <class T> constexpr bool can_be_shared = std::is_arithmetic<T>::value || std::is_same<T, float2>::value ||
    std::is_same<T, float4>::value || std::is_same<T, int2>::value || std::is_same<T, int4>::value;
template <class T, int N, int M = 0> class Shared {  // one array of a block; there is one block at a time
  static_assert(can_be_shared<T>, "shared memory is of numbers, or of float4");
  static_assert(N > 0 && M >= 0 && sizeof(T) * N * (M ? M : 1) <= 48 * 1024, "a block has 48 KiB of shared memory");
  static constexpr unsigned GRAIN = sizeof(T) < 4 ? sizeof(T) : 4;
  alignas(16) T values[N * (M ? M : 1)];
  Word words[sizeof(T) * N * (M ? M : 1) / GRAIN];
  int id;
 public:
  explicit Shared(const char* name) : id(ARRAYS + L.shared++) {
    if (L.shared > SHARED) stop(9, 0, "more than %d shared arrays", SHARED);
    std::memset((void*)values, 0xff, sizeof values);
    S.shared.emplace_back(values, sizeof values);
    Region& r = L.regions[id];
    r.name = name, r.begin = (char*)values, r.size = sizeof values, r.element = sizeof(T), r.kind = OF_BLOCK;
    r.words = words, r.grain = GRAIN;
  }
  Shared(const Shared&) = delete;
  Counted<T> pointer() const { return Counted<T>(id); }
  auto operator[](Index i) const {
    if constexpr (M == 0) {
      return pointer()[i];
    } else {
      if (i.at < 0 || i.at >= N) stop(700, i.line, "thread %d uses %s[%lld]; it has %d rows", S.current, L.regions[id].name, i.at, N);
      return pointer() + i.at * M;
    }
  }
};
// A variable of a thread that begins with no value: NaN, or the lowest integer, never by luck what would be right.
template <class T> constexpr T unset() {
  if constexpr (std::is_floating_point<T>::value) return std::numeric_limits<T>::quiet_NaN();
  else if constexpr (std::is_same<T, bool>::value) return true;
  else if constexpr (std::is_integral<T>::value) return std::numeric_limits<T>::max() / 3 * 2;
  else if constexpr (std::is_trivially_default_constructible<T>::value) {
    T v;
    std::memset((void*)&v, 0xff, sizeof v);
    return v;
  } else return T{};
}
struct Zero {};
template <class T, int N> class Local {              // an array of one thread
  static_assert(N > 0 && sizeof(T) * N <= 16 * 1024, "an array of a thread has at most 16 KiB");
  T values[N];
  mutable int id = -1;
  void check(Index i) const {
    if (i.at < 0 || i.at >= N) stop(700, i.line, "thread %d uses element %lld of an array of %d", S.current, i.at, N);
  }
 public:
  Local() { if constexpr (std::is_trivially_default_constructible<T>::value) for (T& v : values) v = unset<T>(); }
  Local(Zero) { for (T& v : values) v = T{}; }
  Local(std::initializer_list<T> list) {
    int n = 0;
    for (const T& v : list) if (n < N) values[n++] = v;
    for (; n < N; ++n) values[n] = T{};
  }
  Local(const Local& other) { for (int i = 0; i < N; ++i) values[i] = other.values[i]; }
  Local& operator=(const Local& other) { for (int i = 0; i < N; ++i) values[i] = other.values[i]; return *this; }
  ~Local() { if (id >= 0) ++L.regions[id].generation, L.regions[id].begin = nullptr; }
  T& operator[](Index i) & { return check(i), values[i.at]; }
  const T& operator[](Index i) const& { return check(i), values[i.at]; }
  T operator[](Index i) && { return check(i), values[i.at]; }
  Counted<T> pointer() const {                       // valid while this array lives: `generation`
    for (int k = 0; id < 0 && k < LOCALS; ++k)
      if (int free = ARRAYS + SHARED + S.current * LOCALS + k; !L.regions[free].begin) id = free;
    if (id < 0) stop(9, 0, "a thread points to more than %d arrays of its own", LOCALS);
    Region& r = L.regions[id];
    r.name = "an array", r.begin = (char*)values, r.size = sizeof values, r.element = sizeof(T), r.kind = OF_THREAD;
    return Counted<T>(id, r.generation);
  }
};
template <class T, int N> struct Table {             // of constants
  T values[N];
  constexpr T operator[](Index i) const {
    if (i.at < 0 || i.at >= N) stop(700, i.line, "thread %d uses element %lld of a table of %d", S.current, i.at, N);
    return values[i.at];
  }
};
template <class T, int N, int M> Counted<T> value(const Shared<T, N, M>& a) { return a.pointer(); }
template <class T, int N> Counted<T> value(const Local<T, N>& a) { return a.pointer(); }
template <class T, int N, int M, class I> auto operator+(const Shared<T, N, M>& a, const I& i) { return a.pointer() + value(i); }
template <class T, int N, class I> auto operator+(const Local<T, N>& a, const I& i) { return a.pointer() + value(i); }
template <class A> auto plus(const A& a, Index i) { return value(a) + i.at; }
template <class A> auto star(const A& a, Place p) { return value(a)[Index{0, p.line, p.site}]; }
template <class A> struct Target { typedef void type; };
template <class T> struct Target<Counted<T>> { typedef T type; };
template <class From> using Pointed = typename Target<decltype(value(std::declval<const From&>()))>::type;
template <class To, class From> constexpr bool keeps_const =
    !std::is_void<Pointed<From>>::value && (std::is_const<To>::value || !std::is_const<Pointed<From>>::value);
template <class To, class From> typename std::enable_if<keeps_const<To, From>, Counted<To>>::type cast(const From& from) {
  return moved<To>(value(from));
}
template <class To, class From> typename std::enable_if<!keeps_const<To, From>, Counted<To>>::type cast(const From& from) = delete;
// What is passed to a function of the learner's: variables by reference, arrays as pointers, words of memory as values.
template <class A> A&& argument(A&& a) { return static_cast<A&&>(a); }
template <class T> T argument(Ref<T>&& a) { return a; }
template <class T> T argument(Ref<T>& a) { return a; }
template <class T, int N, int M> Counted<T> argument(Shared<T, N, M>& a) { return a.pointer(); }
template <class T, int N> Counted<T> argument(Local<T, N>& a) { return a.pointer(); }
template <class T, int N> Counted<T> argument(const Local<T, N>& a) { return a.pointer(); }

}  // namespace lab
