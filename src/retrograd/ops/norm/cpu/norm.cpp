// Row kernels of RMSNorm and LayerNorm for the CPU. Python side: launch.py, which fills the two structs below.
//
// The order of every addition is written out in vectors of fixed width and nothing is contracted into fused
// multiply-adds (-ffp-contract=off), so results do not depend on the compiler's vectoriser, on the number of threads or
// on the other rows of a batch.
//
// A is the type of the arithmetic: double wherever float32 data takes part, because float32 arithmetic leaves 2.4 times
// the error of rounding the exact result once; float for purely 16-bit data, where it adds nothing visible.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <omp.h>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define HERE __attribute__((always_inline))  // lambdas whose argument k has to become a constant

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

// ---- vectors of W elements: load to float, store from float

template <int W> struct Lanes;
template <> struct Lanes<4> { typedef f32x4 F; typedef u32x4 U; typedef u16x4 H; };
template <> struct Lanes<8> { typedef f32x8 F; typedef u32x8 U; typedef u16x8 H; };

template <int W> INLINE typename Lanes<W>::F load(const float* p) {
  typename Lanes<W>::F v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <int W> INLINE void store(float* p, typename Lanes<W>::F v) { memcpy(p, &v, sizeof v); }

// gcc 12 takes generic conversions between 16 and 32 bits apart element by element.
#if defined(__AVX2__)
INLINE u32x4 unpack(u16x4 v) { return (u32x4)_mm_cvtepu16_epi32(_mm_set_epi64x(0, (int64_t)v)); }
INLINE u32x8 unpack(u16x8 v) { return (u32x8)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE u16x4 pack(u32x4 v) {
  return (u16x4)_mm_cvtsi128_si64(_mm_packus_epi32((__m128i)v, (__m128i)v));
}
INLINE u16x8 pack(u32x8 v) {
  const __m256i all = (__m256i)v;
  return (u16x8)_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
#else
INLINE u32x4 unpack(u16x4 v) { return __builtin_convertvector(v, u32x4); }
INLINE u32x8 unpack(u16x8 v) { return __builtin_convertvector(v, u32x8); }
INLINE u16x4 pack(u32x4 v) { return __builtin_convertvector(v, u16x4); }
INLINE u16x8 pack(u32x8 v) { return __builtin_convertvector(v, u16x8); }
#endif

template <int W> INLINE typename Lanes<W>::F load(const bf16* p) {
  typename Lanes<W>::H h;
  memcpy(&h, p, sizeof h);
  return (typename Lanes<W>::F)(unpack(h) << 16);
}

// Round to nearest, ties to even; the addition must not carry a NaN into infinity, so NaNs are cut off and made quiet.
template <int W> INLINE void store(bf16* p, typename Lanes<W>::F v) {
  const typename Lanes<W>::U u = (typename Lanes<W>::U)v;
  const typename Lanes<W>::U is_nan = (typename Lanes<W>::U)(v != v);
  const typename Lanes<W>::U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const typename Lanes<W>::U quiet = (u >> 16) | 0x40;
  const typename Lanes<W>::H h = pack((rounded & ~is_nan) | (quiet & is_nan));
  memcpy(p, &h, sizeof h);
}

#if defined(__F16C__)
INLINE void load_half(const f16* p, f32x8* v) { *v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void load_half(const f16* p, f32x4* v) { *v = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)); }
INLINE void store_half(f16* p, f32x8 v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void store_half(f16* p, f32x4 v) {
  _mm_storel_epi64((__m128i*)p, _mm_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#else
#if defined(__aarch64__)
INLINE float widen_half(f16 h) {
  __fp16 value;
  memcpy(&value, &h, 2);
  return (float)value;
}
INLINE f16 narrow_half(float value) {
  const __fp16 narrow = (__fp16)value;
  f16 h;
  memcpy(&h, &narrow, 2);
  return h;
}
#else
// 2^112 moves the exponent bias from 15 to 127; multiplying also turns a subnormal half into a normal float.
INLINE float widen_half(f16 h) {
  const uint32_t sign = (uint32_t)(h.bits & 0x8000) << 16;
  uint32_t u = (uint32_t)(h.bits & 0x7fff) << 13;
  float value;
  if (u >= 0x7c00u << 13) {
    u |= 0x7f800000;
  } else {
    memcpy(&value, &u, 4);
    value *= 0x1p112f;
    memcpy(&u, &value, 4);
  }
  u |= sign;
  memcpy(&value, &u, 4);
  return value;
}
INLINE f16 narrow_half(float value) {
  uint32_t u;
  memcpy(&u, &value, 4);
  const uint16_t sign = (uint16_t)((u >> 16) & 0x8000);
  u &= 0x7fffffff;
  uint16_t bits;
  if (u > 0x7f800000) {
    bits = (uint16_t)(0x7e00 | ((u >> 13) & 0x3ff));
  } else if (u >= 0x477ff000) {  // 65520 and above round to infinity
    bits = 0x7c00;
  } else if (u < 0x38800000) {  // below 2^-14: adding 0.5 leaves the value in steps of 2^-24, rounded to even
    float small;
    memcpy(&small, &u, 4);
    small += 0.5f;
    memcpy(&u, &small, 4);
    bits = (uint16_t)(u - 0x3f000000);
  } else {
    bits = (uint16_t)((u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13);
  }
  return f16{(uint16_t)(bits | sign)};
}
#endif
template <class F> INLINE void load_half(const f16* p, F* v) {
  for (unsigned i = 0; i < sizeof(F) / 4; i++) (*v)[i] = widen_half(p[i]);
}
template <class F> INLINE void store_half(f16* p, F v) {
  for (unsigned i = 0; i < sizeof(F) / 4; i++) p[i] = narrow_half(v[i]);
}
#endif
template <int W> INLINE typename Lanes<W>::F load(const f16* p) {
  typename Lanes<W>::F v;
  load_half(p, &v);
  return v;
}
template <int W> INLINE void store(f16* p, typename Lanes<W>::F v) { store_half(p, v); }

// ---- arithmetic in A: vectors of 32 bytes

template <class A> struct Arith;
template <> struct Arith<float> {
  typedef f32x8 V;
  typedef i32x8 I;
  static constexpr int W = 8;
  INLINE V from(f32x8 v) { return v; }
  INLINE f32x8 to(V v) { return v; }
  INLINE I lanes() { return I{0, 1, 2, 3, 4, 5, 6, 7}; }
};
template <> struct Arith<double> {
  typedef f64x4 V;
  typedef i64x4 I;
  static constexpr int W = 4;
  INLINE V from(f32x4 v) { return __builtin_convertvector(v, f64x4); }
  INLINE f32x4 to(V v) { return __builtin_convertvector(v, f32x4); }
  INLINE I lanes() { return I{0, 1, 2, 3}; }
};

// Columns i .. i+k of a row in A; lanes from k on are 0. k is the constant W everywhere but at the end of a row.
template <class A, class T> INLINE typename Arith<A>::V get(const T* row, int64_t i, int k) {
  constexpr int W = Arith<A>::W;
  if (k == W) return Arith<A>::from(load<W>(row + i));
  T part[W] = {};
  memcpy(part, row + i, k * sizeof(T));
  return Arith<A>::from(load<W>(part));
}

// The same of partial sums, which are in A already.
template <class A> INLINE typename Arith<A>::V get_sums(const A* sums, int64_t i, int k) {
  typename Arith<A>::V v = {};
  memcpy(&v, sums + i, k * sizeof(A));
  return v;
}

template <class A, class T> INLINE void put(T* row, int64_t i, int k, typename Arith<A>::V v) {
  constexpr int W = Arith<A>::W;
  if (k == W) return store<W>(row + i, Arith<A>::to(v));
  T part[W];
  store<W>(part, Arith<A>::to(v));
  memcpy(row + i, part, k * sizeof(T));
}

template <class A> INLINE typename Arith<A>::V first(int k, typename Arith<A>::V v) {
  if (k == Arith<A>::W) return v;
  return (typename Arith<A>::V)((typename Arith<A>::I)v & (Arith<A>::lanes() < k));
}

// f(i, k) for all columns of a row.
template <class A, class F> INLINE void each(int64_t n, F f) {
  constexpr int W = Arith<A>::W;
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, (int)(n - i));
}

// K sums over a row at once; f(i, k, v) fills v[0..K) with the terms of columns i .. i+k.
template <class A, int K, class F> INLINE void sum_row(int64_t n, A* out, F f) {
  typedef typename Arith<A>::V V;
  constexpr int W = Arith<A>::W, U = K == 1 ? 4 : 2;  // 4 and 2K chains of additions hide their latency
  V sums[U][K] = {}, term[K];
  int64_t i = 0;
  for (; i + U * W <= n; i += U * W)
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
      f(i + u * W, W, term);
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) sums[u][k] += term[k];
    }
  for (; i < n; i += W) {
    f(i, n - i < W ? (int)(n - i) : W, term);
    for (int k = 0; k < K; k++) sums[0][k] += term[k];
  }
  for (int k = 0; k < K; k++) {
    V total = U == 4 ? (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[U - 1][k]) : sums[0][k] + sums[1][k];
    for (int half = W / 2; half; half /= 2)
      for (int lane = 0; lane < half; lane++) total[lane] += total[lane + half];
    out[k] = total[0];
  }
}

template <class A, class T> INLINE A row_mean(const T* s, int64_t n) {
  A sum[1];
  sum_row<A, 1>(n, sum, [&](int64_t i, int k, typename Arith<A>::V* v) HERE { v[0] = get<A>(s, i, k); });
  return sum[0] / (A)n;
}

INLINE float inverse_root(float square, float eps) { return 1.0f / sqrtf(square + eps); }
INLINE double inverse_root(double square, double eps) { return 1.0 / sqrt(square + eps); }

// ---- forward

constexpr int64_t F32 = 0, BF16 = 1, F16 = 2;

struct Rows {  // a 2-D tensor with adjacent columns; stride in elements
  char* data;
  int64_t stride;
  int64_t dtype;
};

struct Forward {
  Rows x, residual, y, s;  // residual.data and s.data may be null
  const float *weight, *bias;  // [heads, n]; bias may be null
  float *mean, *rstd;          // [m]; may be null
  float* scratch;              // [threads, n] where x is not read directly, else null
  int64_t m, n, heads, threads, centered, in_double;
  double eps;
};

struct NormRow {
  const float *weight, *bias;
  float *mean, *rstd;
  int64_t n;
  bool centered;
  double eps;
};

INLINE int64_t item_size(int64_t dtype) { return dtype == F32 ? 4 : 2; }
INLINE char* row_of(const Rows& rows, int64_t r) { return rows.data + r * rows.stride * item_size(rows.dtype); }

template <class T> struct Tag { typedef T type; };

// Calls f with a Tag of the element type: a way to turn a number into a template argument.
template <class F> INLINE auto with_type(int64_t dtype, F f) {
  if (dtype == F32) return f(Tag<float>());
  if (dtype == BF16) return f(Tag<bf16>());
  return f(Tag<f16>());
}

// Fresh memory costs a page fault each 4 KiB on first writing; huge pages make that one each 2 MiB.
static void expect_writes(const Rows& out, int64_t elements) {
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)2 << 20;
  const uintptr_t begin = ((uintptr_t)out.data + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)out.data + elements * item_size(out.dtype)) / page * page;
  if (out.data && end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

template <class A, class T, class TY> static void norm_row(const void* source, void* target, const NormRow& p) {
  typedef typename Arith<A>::V V;
  const T* s = (const T*)source;
  TY* y = (TY*)target;
  const A mean = p.centered ? row_mean<A>(s, p.n) : (A)0;
  A square[1];
  // The mean is taken off before squaring: E[s^2] - mean^2 cancels where the mean is large.
  sum_row<A, 1>(p.n, square, [&](int64_t i, int k, V* v) HERE {
    const V d = p.centered ? first<A>(k, get<A>(s, i, k) - mean) : get<A>(s, i, k);
    v[0] = d * d;
  });
  const A rstd = inverse_root(square[0] / (A)p.n, (A)p.eps);
  if (p.bias)
    each<A>(p.n, [&](int64_t i, int k) HERE {
      const V h = (get<A>(s, i, k) - mean) * rstd;
      put<A>(y, i, k, h * get<A>(p.weight, i, k) + get<A>(p.bias, i, k));
    });
  else
    each<A>(p.n, [&](int64_t i, int k) HERE {
      const V h = (get<A>(s, i, k) - mean) * rstd;
      put<A>(y, i, k, h * get<A>(p.weight, i, k));
    });
  if (p.mean) *p.mean = (float)mean;
  if (p.rstd) *p.rstd = (float)rstd;
}

template <class T> static void widen_as(const void* source, float* row, int64_t n) {
  each<float>(n, [&](int64_t i, int k) HERE { put<float>(row, i, k, get<float>((const T*)source, i, k)); });
}

template <class T> static void add_as(const void* source, float* row, int64_t n) {
  each<float>(n, [&](int64_t i, int k) HERE {
    put<float>(row, i, k, get<float>(row, i, k) + get<float>((const T*)source, i, k));
  });
}

// row becomes what T keeps of it, also written to `target` unless that is null.
template <class T> static void round_as(float* row, void* target, int64_t n) {
  each<float>(n, [&](int64_t i, int k) HERE {
    T rounded[8];
    store<8>(rounded, get<float>(row, i, k));
    if (target) memcpy((T*)target + i, rounded, k * sizeof(T));
    put<float>(row, i, k, load<8>(rounded));
  });
}

static const float* widen_row(const Rows& rows, int64_t r, float* row, int64_t n) {
  with_type(rows.dtype, [&](auto t) { widen_as<typename decltype(t)::type>(row_of(rows, r), row, n); });
  return row;
}

static void narrow_row(const float* row, const Rows& rows, int64_t r, int64_t n) {
  with_type(rows.dtype, [&](auto t) {
    typename decltype(t)::type* target = (typename decltype(t)::type*)row_of(rows, r);
    each<float>(n, [&](int64_t i, int k) HERE { put<float>(target, i, k, get<float>(row, i, k)); });
  });
}

// row = x + residual, summed in float32 and rounded to the dtype of s.
static void add_row(const Forward& a, int64_t r, float* row) {
  widen_row(a.x, r, row, a.n);
  if (a.residual.data)
    with_type(a.residual.dtype, [&](auto t) { add_as<typename decltype(t)::type>(row_of(a.residual, r), row, a.n); });
  void* s = a.s.data ? row_of(a.s, r) : 0;
  with_type(a.s.dtype, [&](auto t) { round_as<typename decltype(t)::type>(row, s, a.n); });
}

typedef void (*NormRowFn)(const void*, void*, const NormRow&);

// 16-bit rows are read directly where y has their dtype too, else as float from scratch: fewer functions to compile.
static NormRowFn pick_norm_row(bool in_double, int64_t from, int64_t to) {
  if (in_double) {
    if (to == F32) return norm_row<double, float, float>;
    return to == BF16 ? norm_row<double, float, bf16> : norm_row<double, float, f16>;
  }
  if (from == F32) return to == BF16 ? norm_row<float, float, bf16> : norm_row<float, float, f16>;
  return from == BF16 ? norm_row<float, bf16, bf16> : norm_row<float, f16, f16>;
}

extern "C" void retrograd_norm_forward(const Forward* arguments) {
  const Forward& a = *arguments;
  const NormRowFn norm = pick_norm_row(a.in_double, a.scratch ? F32 : a.x.dtype, a.y.dtype);
  expect_writes(a.y, a.m * a.n);
  expect_writes(a.s, a.m * a.n);
  const int64_t step = a.n < 65536 ? 65536 / a.n : 1;  // rows a thread takes at a time: 64 Ki elements
#pragma omp parallel for num_threads((int)a.threads) schedule(dynamic)
  for (int64_t start = 0; start < a.m; start += step) {
    const int64_t end = start + step < a.m ? start + step : a.m;
    for (int64_t r = start; r < end; r++) {
      const int64_t at = r % a.heads * a.n;
      const NormRow row = {a.weight + at, a.bias ? a.bias + at : 0, a.mean ? a.mean + r : 0,
                           a.rstd ? a.rstd + r : 0, a.n, a.centered != 0, a.eps};
      const void* source = row_of(a.x, r);
      if (a.scratch) {
        float* sum = a.scratch + omp_get_thread_num() * a.n;
        add_row(a, r, sum);
        source = sum;
      }
      norm(source, row_of(a.y, r), row);
    }
  }
}

// ---- backward

enum { GROUP = 4 };  // rows whose terms of grad_weight are added in registers before its sums are loaded and stored

struct Backward {
  Rows grad_out, s, grad_s, grad_x, grad_residual;  // from grad_s on, data may be null
  Rows grad_weight, grad_bias;                      // one row of heads * n; data may be null
  const float *weight, *mean, *rstd;                // [heads, n], [m], [m]; mean may be null
  void *weight_sums, *bias_sums;                    // [parts, heads, n] in A
  float* scratch;                                   // [threads, 4 GROUP, n]
  int64_t m, n, heads, threads, parts, centered, in_double, add_weight, add_bias;
  double eps;
};

struct Group {
  const void *s[GROUP], *grad_out[GROUP], *grad_s[GROUP];
  void* out[GROUP];
  float mean[GROUP], rstd[GROUP];
  const float* weight;
  void *weight_sums, *bias_sums;
  int64_t n;
  int count;
  double eps;
};

template <class A> struct Stats { A mean, rstd, mean_g, mean_gh; };

// What ds of one row needs of the whole row. In double the statistics are computed again from s: mean and rstd rounded
// to float32 would leave 1.5 times the error of rounding ds once.
template <class A, class T, bool CENTERED> static Stats<A> row_stats(const Group& group, int r) {
  typedef typename Arith<A>::V V;
  constexpr bool AGAIN = sizeof(A) == 8;
  constexpr int K = 1 + CENTERED + AGAIN;
  const T *s = (const T*)group.s[r], *grad_out = (const T*)group.grad_out[r];
  const A n = (A)group.n;
  Stats<A> stats = {(A)group.mean[r], (A)group.rstd[r], 0, 0};
  if constexpr (AGAIN && CENTERED) stats.mean = row_mean<A>(s, group.n);
  A sums[K];
  sum_row<A, K>(group.n, sums, [&](int64_t i, int k, V* v) HERE {
    V d = get<A>(s, i, k);
    if constexpr (CENTERED) d = first<A>(k, d - stats.mean);
    const V g = get<A>(grad_out, i, k) * get<A>(group.weight, i, k);
    v[0] = g * d;
    if constexpr (CENTERED) v[1] = g;
    if constexpr (AGAIN) v[K - 1] = d * d;
  });
  if constexpr (AGAIN) stats.rstd = inverse_root(sums[K - 1] / n, (A)group.eps);
  stats.mean_gh = sums[0] * stats.rstd / n;
  if constexpr (CENTERED) stats.mean_g = sums[1] / n;
  return stats;
}

template <class A, class T, class TO, bool CENTERED> static void backward_rows(const Group& group) {
  typedef typename Arith<A>::V V;
  A *weight_sums = (A*)group.weight_sums, *bias_sums = (A*)group.bias_sums;
  const bool need_h = group.out[0] || weight_sums;
  const int count = group.count;
  Stats<A> stats[GROUP] = {};
  if (need_h)
    for (int r = 0; r < count; r++) stats[r] = row_stats<A, T, CENTERED>(group, r);
  each<A>(group.n, [&](int64_t i, int k) HERE {
    V weight_sum = {}, bias_sum = {};
    if (weight_sums) weight_sum = get_sums<A>(weight_sums, i, k);
    if (bias_sums) bias_sum = get_sums<A>(bias_sums, i, k);
    const V weight = get<A>(group.weight, i, k);
    for (int r = 0; r < count; r++) {
      const V grad_out = get<A>((const T*)group.grad_out[r], i, k);
      bias_sum += grad_out;
      if (!need_h) continue;
      V h = get<A>((const T*)group.s[r], i, k);
      if constexpr (CENTERED) h -= stats[r].mean;
      h *= stats[r].rstd;
      weight_sum += grad_out * h;
      if (!group.out[r]) continue;
      V ds = grad_out * weight - h * stats[r].mean_gh;
      if constexpr (CENTERED) ds -= stats[r].mean_g;
      ds *= stats[r].rstd;
      if (group.grad_s[r]) ds += get<A>((const T*)group.grad_s[r], i, k);
      put<A>((TO*)group.out[r], i, k, ds);
    }
    if (weight_sums) memcpy(weight_sums + i, &weight_sum, k * sizeof(A));
    if (bias_sums) memcpy(bias_sums + i, &bias_sum, k * sizeof(A));
  });
}

typedef void (*BackwardFn)(const Group&);

template <bool CENTERED> static BackwardFn pick_backward_rows(bool in_double, int64_t from, int64_t to) {
  if (!in_double)
    return from == BF16 ? backward_rows<float, bf16, bf16, CENTERED> : backward_rows<float, f16, f16, CENTERED>;
  if (from == BF16) return backward_rows<double, bf16, bf16, CENTERED>;
  if (from == F16) return backward_rows<double, f16, f16, CENTERED>;
  if (to == F32) return backward_rows<double, float, float, CENTERED>;
  return to == BF16 ? backward_rows<double, float, bf16, CENTERED> : backward_rows<double, float, f16, CENTERED>;
}

struct Pass {  // what does not change from group to group
  BackwardFn rows;
  bool widen, narrow;
};

// Rows first, first + heads, ...: `count` rows of one head.
static void backward_group(const Backward& a, const Pass& pass, int64_t first, int count, int64_t part) {
  const int64_t n = a.n, at = first % a.heads * n, sums = (part * a.heads * n + at) * (a.in_double ? 8 : 4);
  float* scratch = a.scratch ? a.scratch + omp_get_thread_num() * 4 * GROUP * n : 0;
  Group group = {};
  for (int j = 0; j < count; j++) {
    const int64_t r = first + j * a.heads;
    const auto source = [&](const Rows& rows, int which) -> const void* {
      if (!rows.data) return 0;
      return pass.widen ? (const void*)widen_row(rows, r, scratch + (which * GROUP + j) * n, n) : row_of(rows, r);
    };
    group.s[j] = source(a.s, 0);
    group.grad_out[j] = source(a.grad_out, 1);
    group.grad_s[j] = source(a.grad_s, 2);
    const Rows& out = a.grad_x.data ? a.grad_x : a.grad_residual;
    group.out[j] = pass.narrow ? (void*)(scratch + (3 * GROUP + j) * n) : out.data ? row_of(out, r) : 0;
    group.mean[j] = a.mean ? a.mean[r] : 0;
    group.rstd[j] = a.rstd[r];
  }
  group.weight = a.weight + at;
  group.weight_sums = a.weight_sums ? (char*)a.weight_sums + sums : 0;
  group.bias_sums = a.bias_sums ? (char*)a.bias_sums + sums : 0;
  group.n = n;
  group.eps = a.eps;
  group.count = count;
  pass.rows(group);
  if (pass.narrow)
    for (int j = 0; j < count; j++) {
      narrow_row((const float*)group.out[j], a.grad_x, first + j * a.heads, n);
      narrow_row((const float*)group.out[j], a.grad_residual, first + j * a.heads, n);
    }
}

// out = the sum over parts, in their order; `add` adds it to the float32 values already there.
template <class A> static void add_parts(const void* parts_, const Rows& out, bool add, const Backward& a) {
  if (!out.data) return;
  const A* parts = (const A*)parts_;
  const int64_t length = a.heads * a.n, step = 256;
#pragma omp parallel for num_threads((int)a.threads) schedule(static)
  for (int64_t start = 0; start < length; start += step) {
    const int64_t columns = start + step < length ? step : length - start;
    double total[step] = {};
    for (int64_t p = 0; p < a.parts; p++)
      for (int64_t i = 0; i < columns; i++) total[i] += (double)parts[p * length + start + i];
    if (add)
      for (int64_t i = 0; i < columns; i++) total[i] += (double)((float*)out.data)[start + i];
    with_type(out.dtype, [&](auto t) {
      typename decltype(t)::type* row = (typename decltype(t)::type*)out.data + start;
      each<double>(columns, [&](int64_t i, int k) HERE {
        put<double>(row, i, k, get_sums<double>(total, i, k));
      });
    });
  }
}

extern "C" void retrograd_norm_backward(const Backward* arguments) {
  const Backward& a = *arguments;
  const bool two = a.grad_x.data && a.grad_residual.data, with_grad_s = a.grad_s.data != 0;
  Pass pass;
  pass.narrow = two;  // dtypes differ, or it would be one tensor
  const Rows& out = a.grad_x.data ? a.grad_x : a.grad_residual;
  const int64_t to = pass.narrow ? F32 : out.data ? out.dtype : a.s.dtype;
  pass.widen = a.s.dtype != a.grad_out.dtype || (with_grad_s && a.s.dtype != a.grad_s.dtype) ||
               (a.s.dtype != F32 && a.s.dtype != to);
  const int64_t from = pass.widen ? F32 : a.s.dtype;
  pass.rows = a.centered ? pick_backward_rows<true>(a.in_double, from, to)
                         : pick_backward_rows<false>(a.in_double, from, to);
  expect_writes(a.grad_x, a.m * a.n);
  expect_writes(a.grad_residual, a.m * a.n);
  // A row of `heads` vectors of n is one unit; four units of 8192 columns in float32 are 256 KiB: half a common L2.
  const int64_t units = a.m / a.heads, share = (units + a.parts - 1) / a.parts;
  const int most = a.heads * a.n <= 8192 ? GROUP : 1;
  const int64_t bytes = a.heads * a.n * (a.in_double ? 8 : 4);
#pragma omp parallel for num_threads((int)a.threads) schedule(dynamic)
  for (int64_t part = 0; part < a.parts; part++) {
    if (a.weight_sums) memset((char*)a.weight_sums + part * bytes, 0, bytes);
    if (a.bias_sums) memset((char*)a.bias_sums + part * bytes, 0, bytes);
    const int64_t end = (part + 1) * share < units ? (part + 1) * share : units;
    for (int64_t unit = part * share; unit < end;) {
      const int count = end - unit < most ? (int)(end - unit) : most;
      for (int64_t head = 0; head < a.heads; head++) backward_group(a, pass, unit * a.heads + head, count, part);
      unit += count;
    }
  }
  const auto finish = a.in_double ? add_parts<double> : add_parts<float>;
  finish(a.weight_sums, a.grad_weight, a.add_weight, a);
  finish(a.bias_sums, a.grad_bias, a.add_bias, a);
}
