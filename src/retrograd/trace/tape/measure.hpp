// Statistics of the numbers in a CPU's memory in one pass: those that statistics/cpu.py and digest.py define, to the bit.
//
// Squares are added in float64 in 32 lanes, element i in lane i % 32, and the lanes halved: the same bits on every
// machine, however wide its vectors. Each function is compiled for three widths, and the CPU's own is taken.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include <c10/core/ScalarType.h>

namespace measure {

#define INLINE inline __attribute__((always_inline))

constexpr int64_t LANES = 32, BLOCK = 1024, UNIT = 8, BUCKETS = 512, OUTSIDE = 255, PIECE = BLOCK * UNIT;

struct Row {
  bool floating = false;
  int64_t count = 0, nan = 0, inf = 0, subnormal = 0, zero = 0;
  double low = 0, high = 0, rms = 0;
  uint64_t digest = 0;
  bool has_exponents = false;
  int64_t least = 0;                         // exponent of the first count
  std::vector<int64_t> positive, negative;
  int64_t finite() const { return count - nan - inf; }
};

// ---- digest ----

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

inline uint64_t factor(uint32_t block) {
  uint32_t x = block + 1;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return (x ^ (x >> 16)) | 1;
}

struct Keys {
  alignas(64) uint64_t of[BLOCK];
  Keys() {
    for (uint64_t i = 0; i < BLOCK; i++) of[i] = mix((i + 1) * GOLDEN);
  }
};
inline const Keys keys;

template <class V, class From> INLINE V load(const From* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <int BYTES> struct Vector {
  typedef float F32 __attribute__((vector_size(BYTES)));
  typedef double F64 __attribute__((vector_size(BYTES)));
  typedef int32_t I32 __attribute__((vector_size(BYTES)));
  typedef int64_t I64 __attribute__((vector_size(BYTES)));
  typedef uint32_t U32 __attribute__((vector_size(BYTES)));
  typedef uint64_t U64 __attribute__((vector_size(BYTES)));
  typedef float HALF __attribute__((vector_size(BYTES / 2)));
};

// The sum over the units of a block, or of the beginning of a block.
template <int BYTES> INLINE uint64_t block_hash(const uint8_t* bytes, int64_t size) {
  using U32 = typename Vector<BYTES>::U32;
  using U64 = typename Vector<BYTES>::U64;
  constexpr int64_t UNITS = BYTES / UNIT;
  U64 sums = {};
  int64_t unit = 0;
  for (; (unit + UNITS) * UNIT <= size; unit += UNITS) {
    const auto keyed = (U64)(load<U32>(bytes + unit * UNIT) + load<U32>(keys.of + unit));
    sums += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
  }
  uint64_t sum = 0;
  for (int64_t k = 0; k < UNITS; k++) sum += sums[k];
  for (; unit * UNIT < size; unit++) {
    uint32_t words[2] = {0, 0};
    std::memcpy(words, bytes + unit * UNIT, std::min(UNIT, size - unit * UNIT));
    sum += (uint64_t)(words[0] + (uint32_t)keys.of[unit]) * (uint32_t)(words[1] + (uint32_t)(keys.of[unit] >> 32));
  }
  return sum;
}

// ---- numbers ----

template <class T> struct Float;
template <> struct Float<float> {
  using Bits = int32_t;
  static constexpr Bits ABS = 0x7FFFFFFF, INF = 0x7F800000;
};
template <> struct Float<double> {
  using Bits = int64_t;
  static constexpr Bits ABS = 0x7FFFFFFFFFFFFFFF, INF = 0x7FF0000000000000;
};

inline double sum(double* lanes) {
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t k = 0; k < half; k++) lanes[k] += lanes[k + half];
  return lanes[0];
}

template <class T, int BYTES> struct Numbers {
  static constexpr bool NARROW = sizeof(T) == 4;
  using F = std::conditional_t<NARROW, typename Vector<BYTES>::F32, typename Vector<BYTES>::F64>;
  using I = std::conditional_t<NARROW, typename Vector<BYTES>::I32, typename Vector<BYTES>::I64>;
  using F64 = typename Vector<BYTES>::F64;
  static constexpr int WIDTH = BYTES / sizeof(T), WIDE = BYTES / 8;
  using Bits = typename Float<T>::Bits;

  I low, high, special = {}, nan = {}, below = {}, zero = {}, negative_zero = {};
  F64 squares[LANES / WIDE] = {};
  Bits tiny;

  INLINE explicit Numbers(Bits tiny) : tiny(tiny) {
    low = I{} + Float<T>::INF;
    high = low | ~Float<T>::ABS;
  }

  // LANES numbers.
  INLINE void add(const T* x) {
#pragma GCC unroll 8
    for (int k = 0; k < LANES / WIDTH; k++) {
      const auto bits = load<I>(x + k * WIDTH);
      const I magnitude = bits & Float<T>::ABS;
      const I bad = magnitude >= Float<T>::INF;
      special -= bad;
      nan -= magnitude > Float<T>::INF;
      below -= magnitude < tiny;
      zero -= magnitude == 0;
      negative_zero -= bits == ~Float<T>::ABS;
      const I finite = bits & ~bad;
      const F least = (F)(finite | (bad & Float<T>::INF)), most = (F)(finite | (bad & (Float<T>::INF | ~Float<T>::ABS)));
      low = least < (F)low ? (I)least : low;
      high = most > (F)high ? (I)most : high;
      if constexpr (NARROW) {
        typename Vector<BYTES>::HALF halves[2];
        std::memcpy(halves, &finite, sizeof halves);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          const auto wide = __builtin_convertvector(halves[half], F64);
          squares[2 * k + half] += wide * wide;
        }
      } else {
        squares[k] += (F)finite * (F)finite;
      }
    }
  }

  // The results, but for so many NaN that were put there to fill the lanes; how many zeros are negative.
  INLINE int64_t into(Row& row, int64_t filling) {
    double lanes[LANES];
    std::memcpy(lanes, squares, sizeof lanes);
    int64_t bad = -filling, nans = -filling, small = 0, negative_zeros = 0;
    T least = std::numeric_limits<T>::infinity(), most = -least;
    for (int k = 0; k < WIDTH; k++) {
      bad += special[k];
      nans += nan[k];
      small += below[k];
      row.zero += zero[k];
      negative_zeros += negative_zero[k];
      least = std::min(least, ((F)low)[k]);
      most = std::max(most, ((F)high)[k]);
    }
    row.nan = nans;
    row.inf = bad - nans;
    row.subnormal = small - row.zero;
    row.low = least + 0.0;  // a negative zero is a zero
    row.high = most + 0.0;
    row.rms = std::sqrt(sum(lanes) / row.finite());
    return negative_zeros;
  }
};

// Counts of elements by sign and exponent, in the buckets of statistics/exponents.py.
struct Histogram {
  int64_t turns;  // neighbours are often in one bucket and would wait for each other: they are counted in turns
  alignas(64) int64_t counts[4][BUCKETS];

  explicit Histogram(int64_t turns) : turns(turns) { std::memset(counts, 0, turns * sizeof *counts); }

  INLINE static int64_t bucket(int32_t bits) { return (uint32_t)bits >> 23; }
  INLINE static int64_t bucket(int64_t bits) {
    const int64_t exponent = (uint64_t)bits >> 52 & 2047;
    return (bits < 0) * (BUCKETS / 2) + (exponent == 2047 ? OUTSIDE : std::clamp<int64_t>(exponent - 896, 0, 254));
  }

  template <class Bits> INLINE void add(const Bits* bits, int64_t count) {
    int64_t at = 0;
    if (turns == 4)
      for (; at + 4 <= count; at += 4)
        for (int k = 0; k < 4; k++) counts[k][bucket(bits[at + k])]++;
    for (; at < count; at++) counts[0][bucket(bits[at])]++;
  }

  template <int BYTES> INLINE void into(Row& row, int64_t zeros, int64_t negative_zeros) {
    using I64 = typename Vector<BYTES>::I64;
    auto* all = counts[0];
    for (int64_t k = 1; k < turns; k++)
      for (int64_t at = 0; at < BUCKETS; at += BYTES / 8) {
        const I64 sums = load<I64>(all + at) + load<I64>(counts[k] + at);
        std::memcpy(all + at, &sums, sizeof sums);
      }
    auto* negative = all + BUCKETS / 2;
    all[0] -= zeros - negative_zeros;
    negative[0] -= negative_zeros;
    row.has_exponents = true;
    int64_t first = 0, end = OUTSIDE;
    while (first < end && !(all[first] | negative[first])) first++;
    if (first == end) return;
    while (!(all[end - 1] | negative[end - 1])) end--;
    row.least = first - 127;
    row.positive.assign(all + first, all + end);
    row.negative.assign(negative + first, negative + end);
  }
};

// Hashes the elements and calls `each` with pieces of them.
template <int BYTES, class E, class Each> INLINE Row hashed(const E* x, int64_t count, const Each& each) {
  constexpr int64_t ELEMENTS = PIECE / sizeof(E);
  Row row;
  row.count = count;
  for (int64_t begin = 0, block = 0; begin < count; begin += ELEMENTS, block++) {
    const int64_t here = std::min(ELEMENTS, count - begin);
    row.digest += block_hash<BYTES>(reinterpret_cast<const uint8_t*>(x + begin), here * sizeof(E)) * factor(block);
    each(x + begin, here);
  }
  row.digest = mix(row.digest ^ mix(count * sizeof(E) * GOLDEN));
  return row;
}

// Elements of type E, as numbers of type T.
template <int BYTES, class T, class E> INLINE Row floats(const E* x, int64_t count, double tiny, bool exponents) {
  using Bits = typename Float<T>::Bits;
  const T limit = tiny;
  Numbers<T, BYTES> numbers(load<Bits>(&limit));
  int64_t filling = 0;
  std::optional<Histogram> histogram;
  if (exponents) histogram.emplace(count < 8 * BUCKETS ? 1 : 4);
  auto row = hashed<BYTES>(x, count, [&](const E* some, int64_t here) __attribute__((always_inline)) {
    alignas(64) T piece[PIECE / sizeof(E)];
    const T* numbers_here;
    if constexpr (std::is_same_v<T, E>) {
      numbers_here = some;
    } else {
      for (int64_t k = 0; k < here; k++) piece[k] = static_cast<T>(some[k]);
      numbers_here = piece;
    }
    int64_t at = 0;
    for (; at + LANES <= here; at += LANES) numbers.add(numbers_here + at);
    if (at < here) {
      T last[LANES];
      std::fill_n(std::copy_n(numbers_here + at, here - at, last), filling = LANES - (here - at),
                  std::numeric_limits<T>::quiet_NaN());
      numbers.add(last);
    }
    if (histogram) histogram->add(reinterpret_cast<const Bits*>(numbers_here), here);
  });
  row.floating = true;
  const auto negative_zeros = numbers.into(row, filling);
  if (histogram) histogram->template into<BYTES>(row, row.zero, negative_zeros);
  return row;
}

template <int BYTES, class E> INLINE Row integers(const E* x, int64_t count) {
  double lanes[LANES] = {};
  auto low = std::numeric_limits<E>::max(), high = std::numeric_limits<E>::lowest();
  int64_t zero = 0;
  auto row = hashed<BYTES>(x, count, [&](const E* some, int64_t here) __attribute__((always_inline)) {
    for (int64_t k = 0; k < here; k++) {
      const double wide = some[k];
      lanes[k % LANES] += wide * wide;
      low = std::min(low, some[k]);
      high = std::max(high, some[k]);
      zero += some[k] == 0;
    }
  });
  row.low = low;
  row.high = high;
  row.zero = zero;
  row.rms = std::sqrt(sum(lanes) / count);
  return row;
}

template <int BYTES> INLINE Row of(at::ScalarType dtype, const void* x, int64_t count, bool exponents) {
  constexpr double TINY = std::numeric_limits<float>::min();
  switch (dtype) {
    case at::kFloat: return floats<BYTES, float>((const float*)x, count, TINY, exponents);
    case at::kBFloat16: return floats<BYTES, float>((const at::BFloat16*)x, count, TINY, exponents);
    case at::kHalf: return floats<BYTES, float>((const at::Half*)x, count, 0x1p-14, exponents);
    case at::kDouble:
      return floats<BYTES, double>((const double*)x, count, std::numeric_limits<double>::min(), exponents);
    case at::kLong: return integers<BYTES>((const int64_t*)x, count);
    case at::kInt: return integers<BYTES>((const int32_t*)x, count);
    case at::kShort: return integers<BYTES>((const int16_t*)x, count);
    case at::kChar: return integers<BYTES>((const int8_t*)x, count);
    default: return integers<BYTES>((const uint8_t*)x, count);  // bool, too
  }
}

using Of = Row (*)(at::ScalarType, const void*, int64_t, bool);

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))) inline Row of_64(
    at::ScalarType dtype, const void* x, int64_t count, bool exponents) {
  return of<64>(dtype, x, count, exponents);
}
__attribute__((target("avx2"))) inline Row of_32(at::ScalarType dtype, const void* x, int64_t count, bool exponents) {
  return of<32>(dtype, x, count, exponents);
}
#endif

inline Row of_16(at::ScalarType dtype, const void* x, int64_t count, bool exponents) {
  return of<16>(dtype, x, count, exponents);
}

// The statistics of elements in memory, of a dtype that `takes`; by vectors of so many bytes at most.
inline Of widest(int bytes) {
#if defined(__x86_64__)
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (bytes >= 64 && wide) return of_64;
  if (bytes >= 32 && __builtin_cpu_supports("avx2")) return of_32;
#endif
  return of_16;
}

inline bool takes(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: case at::kBFloat16: case at::kHalf: case at::kDouble: case at::kLong: case at::kInt:
    case at::kShort: case at::kChar: case at::kByte: case at::kBool: return true;
    default: return false;
  }
}

}  // namespace measure
