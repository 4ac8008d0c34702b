// Deformable attention for the CPU. Python side: launch.py, which fills struct Call.
//
// A task is one head of one image, of which a forward may take a part of the queries. It finds the cells of a query's
// points first, then goes through the channels in vectors. Nobody else adds to its slice of grad_value, and the order
// of every addition is written out, so neither the number of threads nor the vectoriser changes a bit.
//
// Positions are rounded after every step (-ffp-contract=off): all implementations agree on the cell of a point. Sums
// over channels and points use fused multiply-adds where the CPU has them.
//
// A is the type of the arithmetic: double for float64, else float.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <omp.h>

#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// ---- vectors of 32 bytes

template <class A> struct Vector;
template <> struct Vector<float> { typedef float V __attribute__((vector_size(32))); };
template <> struct Vector<double> { typedef double V __attribute__((vector_size(32))); };
typedef Vector<float>::V f32x8;
typedef Vector<double>::V f64x4;

template <class A> constexpr int64_t lanes() { return 32 / sizeof(A); }

template <class A> INLINE typename Vector<A>::V load(const A* p) {
  typename Vector<A>::V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class A> INLINE void store(A* p, typename Vector<A>::V v) { memcpy(p, &v, sizeof v); }

template <class A> INLINE typename Vector<A>::V all(A x) { return x - (typename Vector<A>::V){}; }

#if defined(__FMA__)
INLINE f32x8 fused(f32x8 a, f32x8 b, f32x8 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE f64x4 fused(f64x4 a, f64x4 b, f64x4 c) { return _mm256_fmadd_pd(a, b, c); }
#else
template <class V> INLINE V fused(V a, V b, V c) { return a * b + c; }
#endif

// sums[i] += the lanes of v[i]; in one order with and without AVX.
#if defined(__AVX__)
INLINE void add_lanes(const f32x8* v, float* sums) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m128 total = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm_loadu_ps(sums), total));
}
#else
INLINE void add_lanes(const f32x8* v, float* sums) {
  for (int i = 0; i < 4; i++) {
    const f32x8 t = v[i];
    sums[i] += ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
  }
}
#endif
INLINE void add_lanes(const f64x4* v, double* sums) {
  for (int i = 0; i < 4; i++) sums[i] += (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
}

// ---- rows of channels between their dtype and A

struct bf16 { uint16_t bits; };
#if defined(__F16C__)
struct f16 { uint16_t bits; };
INLINE float widened(f16 x) { return _cvtsh_ss(x.bits); }
INLINE void narrow(float x, f16* to) { to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
#if defined(__aarch64__)
typedef __fp16 f16;
#else
typedef _Float16 f16;
#endif
INLINE float widened(f16 x) { return (float)x; }
INLINE void narrow(float x, f16* to) { *to = (f16)x; }
#endif
template <class T> constexpr bool is_half = false;
template <> constexpr bool is_half<f16> = true;

INLINE float widened(bf16 x) {
  const uint32_t u = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &u, 4);
  return value;
}
INLINE float widened(float x) { return x; }
INLINE double widened(double x) { return x; }

// Round to nearest, ties to even; the addition must not carry a NaN into infinity, so NaNs are cut off and made quiet.
INLINE void narrow(float x, bf16* to) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
  to->bits = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}
INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(double x, double* to) { *to = x; }

// The first loops run over whole vectors: their fixed length lets the compiler vectorise them at -O2.
template <class A, class T> static void widen_row(const void* from_, A* to, int64_t n) {
  const T* from = (const T*)from_;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
#if defined(__F16C__)
    if constexpr (is_half<T>) {
      _mm256_storeu_ps((float*)to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
      continue;
    }
#endif
    for (int j = 0; j < 8; j++) to[i + j] = widened(from[i + j]);
  }
  for (; i < n; i++) to[i] = widened(from[i]);
}

template <class A, class T> static void narrow_row(const A* from, void* to_, int64_t n) {
  T* to = (T*)to_;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
#if defined(__F16C__)
    if constexpr (is_half<T>) {
      const __m256 v = _mm256_loadu_ps((const float*)from + i);
      _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
      continue;
    }
#endif
    for (int j = 0; j < 8; j++) narrow(from[i + j], to + i + j);
  }
  for (; i < n; i++) narrow(from[i], to + i);
}

// ---- the call

struct Strides { int64_t batch, row, head; };  // in elements; channels lie next to each other

struct Call {
  const char *value, *grad_out;                 // [B, S, H, C] and [B, Q, H, C]; the second may be null
  const void *locations, *weights;              // [B, Q, H, K, 2] and [B, Q, H, K] in A, contiguous
  const int64_t *size, *start;                  // [K, 2] (width, height) and [K] of each point's level
  char *out, *grad_value;                       // [B, Q, H, C] and [B, S, H, C], contiguous; may be null
  void *grad_locations, *grad_weights;          // as locations and weights; may be null
  char* scratch;                                // [threads, retrograd_msda_scratch]
  Strides value_strides, grad_strides;
  int64_t batch, pixels, heads, channels, queries, points;
  int64_t threads, parts, border, align_corners, dtype;
};

constexpr int64_t F64 = 0, F32 = 1, BF16 = 2, F16 = 3;

template <class A> struct Rows {  // how rows of a call's dtype are read and written
  void (*widen)(const void*, A*, int64_t);
  void (*narrow)(const A*, void*, int64_t);
  int64_t bytes;
};

INLINE Rows<double> rows_of(const Call&, double) { return {widen_row<double, double>, narrow_row<double, double>, 8}; }
INLINE Rows<float> rows_of(const Call& a, float) {
  if (a.dtype == BF16) return {widen_row<float, bf16>, narrow_row<float, bf16>, 2};
  if (a.dtype == F16) return {widen_row<float, f16>, narrow_row<float, f16>, 2};
  return {widen_row<float, float>, narrow_row<float, float>, 4};
}

template <class A> struct Level {  // of one point
  A scale[2], last[2];  // (x, y)
  int64_t width, height, start;
};

template <class A> struct Point {  // one that reaches its level
  const A* corner[4];  // its pixels (y, x) = 00 01 10 11; zeros outside
  A* sum[4];           // where grad_value is added; a row nobody reads outside
  A share[4], fraction[2], weight;
  bool moves[2];
  int64_t k;
};

INLINE int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// What a thread works in. Rows in it have whole vectors, with zeros behind the channels.
template <class A> struct Scratch {
  Level<A>* levels;  // [K]
  Point<A>* points;  // [K]
  A *dots;           // [K, 4]
  A *zeros, *unread, *grad_out, *out;  // [row]
  A* corners;        // [K, 4, row] where pixels are widened one by one
  A *value, *sums;   // [S, row] slice of value and of grad_value
  int64_t row, bytes;

  // Places are counted from `base`; `bytes` is what all of them take.
  Scratch(const Call& a, char* base) : row(rounded_up(a.channels, lanes<A>())), bytes(0) {
    const auto take = [&](int64_t size) {
      char* place = base + bytes;
      bytes += rounded_up(size, 64);
      return place;
    };
    const int64_t row_bytes = row * (int64_t)sizeof(A);
    levels = (Level<A>*)take(a.points * (int64_t)sizeof(Level<A>));
    points = (Point<A>*)take(a.points * (int64_t)sizeof(Point<A>));
    dots = (A*)take(a.points * 4 * (int64_t)sizeof(A));
    zeros = (A*)take(row_bytes);
    unread = (A*)take(row_bytes);
    grad_out = (A*)take(row_bytes);
    out = (A*)take(row_bytes);
    const bool copied = copies_value(a);
    const bool plain = is_plain(a);
    corners = copied || plain ? 0 : (A*)take(a.points * 4 * row_bytes);
    value = copied ? (A*)take(a.pixels * row_bytes) : 0;
    sums = a.grad_value && (copied || !plain) ? (A*)take(a.pixels * row_bytes) : 0;
  }

  // Whether rows can be used where they are.
  static bool is_plain(const Call& a) {
    return (a.dtype == F32 || a.dtype == F64) && a.channels % lanes<A>() == 0;
  }

  // Whether a task copies its slice of value, whose pixels lie a head apart: often a power of two, which leaves most
  // sets of the cache unused. The limits are where both ways took the same time (S 22223, C 32, 2026-11).
  static bool copies_value(const Call& a) {
    const int64_t points = a.queries / a.parts * a.points;
    return is_plain(a) ? points >= 4 * a.pixels : 2 * points >= a.pixels;
  }
};

// ---- one head of one image

template <class A> struct Head {
  const Call& a;
  Rows<A> rows;
  Scratch<A> own;
  int64_t batch, head;
  const char* source;             // pixel 0 in value
  int64_t source_step;            // bytes from pixel to pixel
  const A* pixels;                // pixel 0 where rows of A are read directly, else null
  int64_t pixel_step;
  A* sums;                        // pixel 0 of what grad_value is added up in; a row nobody reads if not asked for
  int64_t sum_step;
  int64_t first_row() const { return batch * a.queries * a.heads + head; }  // of query 0 in [B, Q, H]
};

template <class A> static void fill_levels(const Call& a, Level<A>* levels) {
  for (int64_t k = 0; k < a.points; k++) {
    Level<A>& level = levels[k];
    level.width = a.size[2 * k];
    level.height = a.size[2 * k + 1];
    level.start = a.start[k];
    for (int axis = 0; axis < 2; axis++) {
      level.last[axis] = (A)(a.size[2 * k + axis] - 1);
      level.scale[axis] = a.align_corners ? level.last[axis] : (A)a.size[2 * k + axis];
    }
  }
}

// Where the pixels of this head are read and its gradient is added, after the copying or clearing that takes.
template <class A> static void open_head(Head<A>& h) {
  const Call& a = h.a;
  const Strides& s = a.value_strides;
  h.source = a.value + (h.batch * s.batch + h.head * s.head) * h.rows.bytes;
  h.source_step = s.row * h.rows.bytes;
  h.pixels = h.own.value;
  h.pixel_step = h.own.row;
  if (h.own.value) {
    for (int64_t i = 0; i < a.pixels; i++)
      h.rows.widen(h.source + i * h.source_step, h.own.value + i * h.own.row, a.channels);
  } else if (!h.own.corners) {
    h.pixels = (const A*)h.source;
    h.pixel_step = s.row;
  }
  h.sums = h.own.unread;
  h.sum_step = 0;
  if (h.own.sums) {
    h.sums = h.own.sums;
    h.sum_step = h.own.row;
    memset(h.sums, 0, a.pixels * h.own.row * sizeof(A));
  } else if (a.grad_value) {
    h.sums = (A*)a.grad_value + (h.batch * a.pixels * a.heads + h.head) * a.channels;
    h.sum_step = a.heads * a.channels;
    for (int64_t i = 0; i < a.pixels; i++) memset(h.sums + i * h.sum_step, 0, a.channels * sizeof(A));
  }
}

template <class A> static void close_head(const Head<A>& h) {
  if (!h.own.sums) return;
  const Call& a = h.a;
  char* to = a.grad_value + (h.batch * a.pixels * a.heads + h.head) * a.channels * h.rows.bytes;
  for (int64_t i = 0; i < a.pixels; i++)
    h.rows.narrow(h.own.sums + i * h.own.row, to + i * a.heads * a.channels * h.rows.bytes, a.channels);
}

INLINE void expect_reads(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i);
}

// (x, y) of the cell of a point, and where in it the point lies; false if the point reaches no pixel of its level.
template <class A> INLINE bool find_cell(const Call& a, const Level<A>& level, const A* p, Point<A>& point, A* cell) {
  const A shift = a.align_corners ? (A)0 : (A)0.5;
  bool reaches = p[0] - p[0] == 0 && p[1] - p[1] == 0;  // finite
  for (int axis = 0; axis < 2; axis++) {
    const A last = level.last[axis];
    A x = p[axis] * level.scale[axis] - shift;
    point.moves[axis] = !a.border || (x > 0 && x < last);
    if (a.border) {
      x = x > 0 ? x : 0;
      x = x < last ? x : last;
    }
    cell[axis] = sizeof(A) == 8 ? floor(x) : floorf(x);
    point.fraction[axis] = x - cell[axis];
    reaches &= cell[axis] >= -1 && cell[axis] <= last;  // in A: int64 does not hold a far position
  }
  return reaches;
}

template <class A> INLINE void set_corner(const Head<A>& h, Point<A>& point, int i, int64_t pixel, bool inside) {
  point.corner[i] = h.own.zeros;
  point.sum[i] = h.own.unread;
  if (!inside) return;
  if (h.pixels) {
    point.corner[i] = h.pixels + pixel * h.pixel_step;
    expect_reads(point.corner[i], 128);
  } else {
    A* row = h.own.corners + (4 * point.k + i) * h.own.row;
    h.rows.widen(h.source + pixel * h.source_step, row, h.a.channels);
    point.corner[i] = row;
  }
  point.sum[i] = h.sums + pixel * h.sum_step;
  if (h.a.grad_value) expect_reads(point.sum[i], 128);
}

template <class A> INLINE void set_corners(const Head<A>& h, const Level<A>& level, const A* cell, Point<A>& point) {
  const int64_t x = (int64_t)cell[0], y = (int64_t)cell[1], at = level.start + y * level.width + x;
  const A tx = point.fraction[0], ty = point.fraction[1];
  const bool left = x >= 0 && x < level.width, right = x + 1 >= 0 && x + 1 < level.width;
  const bool upper = y >= 0 && y < level.height, lower = y + 1 >= 0 && y + 1 < level.height;
  point.share[0] = (1 - ty) * (1 - tx);
  point.share[1] = (1 - ty) * tx;
  point.share[2] = ty * (1 - tx);
  point.share[3] = ty * tx;
  set_corner(h, point, 0, at, upper && left);
  set_corner(h, point, 1, at + 1, upper && right);
  set_corner(h, point, 2, at + level.width, lower && left);
  set_corner(h, point, 3, at + level.width + 1, lower && right);
}

// Fills h.own.points with those points of query `at` in [B, Q, H] that reach their level, in their order. `idle`
// becomes the sum of 0 * weight over the others: 0, or NaN.
template <class A> static int64_t find_points(const Head<A>& h, int64_t at, A* idle) {
  const Call& a = h.a;
  const A *p = (const A*)a.locations + at * a.points * 2, *weights = (const A*)a.weights + at * a.points;
  // Queries of a head lie too far apart for the CPU to expect the next one; 8 ahead are 10 to 20 % of the time.
  const int64_t later = 8 * a.heads * a.points;
  expect_reads(p + 2 * later, 2 * a.points * sizeof(A));
  expect_reads(weights + later, a.points * sizeof(A));
  int64_t count = 0;
  *idle = 0;
  for (int64_t k = 0; k < a.points; k++) {
    const Level<A>& level = h.own.levels[k];
    Point<A>& point = h.own.points[count];
    A cell[2];
    if (find_cell(a, level, p + 2 * k, point, cell)) {
      point.k = k;
      point.weight = weights[k];
      set_corners(h, level, cell, point);
      count++;
    } else {
      *idle += 0 * weights[k];
    }
  }
  return count;
}

// f(chunk, c) for all vectors of a row in chunks of 4, 2 and 1; chunk.N is how many.
template <int COUNT> struct Chunk { static constexpr int N = COUNT; };
template <class A, class F> INLINE void each_chunk(int64_t row, F f) {
  constexpr int64_t W = lanes<A>();
  int64_t c = 0;
  for (; c + 4 * W <= row; c += 4 * W) f(Chunk<4>(), c);
  if (c + 2 * W <= row) {
    f(Chunk<2>(), c);
    c += 2 * W;
  }
  if (c < row) f(Chunk<1>(), c);
}

template <class A, int N> INLINE typename Vector<A>::V sample(const Point<A>& point, int64_t c, int n) {
  typedef typename Vector<A>::V V;
  const int64_t at = c + n * lanes<A>();
  V v = load(point.corner[0] + at) * all<A>(point.share[0]);
  for (int i = 1; i < 4; i++) v = fused(load(point.corner[i] + at), all<A>(point.share[i]), v);
  return v;
}

// ---- forward

template <class A, int N> static void sum_points(const Point<A>* points, int64_t count, int64_t c, A idle, A* out) {
  typedef typename Vector<A>::V V;
  V total[N];
  for (int n = 0; n < N; n++) total[n] = all<A>(idle);
  for (int64_t i = 0; i < count; i++) {
    const V weight = all<A>(points[i].weight);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) total[n] = fused(sample<A, N>(points[i], c, n), weight, total[n]);
  }
  for (int n = 0; n < N; n++) store(out + c + n * lanes<A>(), total[n]);
}

template <class A> static void forward_queries(Head<A>& h, int64_t begin, int64_t end) {
  const Call& a = h.a;
  for (int64_t q = begin; q < end; q++) {
    const int64_t at = h.first_row() + q * a.heads;
    A idle;
    const int64_t count = find_points(h, at, &idle);
    each_chunk<A>(h.own.row, [&](auto chunk, int64_t c) {
      sum_points<A, decltype(chunk)::N>(h.own.points, count, c, idle, h.own.out);
    });
    h.rows.narrow(h.own.out, a.out + at * a.channels * h.rows.bytes, a.channels);
  }
}

// ---- backward

// dots[k] += <g, each of: sample, v01 - v00, v11 - v10, slope along y>: the first and the slope along x follow from
// them. Corners are subtracted before the product, which loses less.
template <class A, int N>
static void dot_points(const Point<A>* points, int64_t count, int64_t c, const A* grad_out, A* dots) {
  typedef typename Vector<A>::V V;
  V g[N];
  for (int n = 0; n < N; n++) g[n] = load(grad_out + c + n * lanes<A>());
  for (int64_t i = 0; i < count; i++) {
    const Point<A>& point = points[i];
    const V tx = all<A>(point.fraction[0]), rest = all<A>(1 - point.fraction[0]);
    V sums[4] = {};
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const int64_t at = c + n * lanes<A>();
      const V v00 = load(point.corner[0] + at), v01 = load(point.corner[1] + at);
      const V v10 = load(point.corner[2] + at), v11 = load(point.corner[3] + at);
      const V left = v10 - v00, right = v11 - v01;
      sums[0] = fused(g[n], sample<A, N>(point, c, n), sums[0]);
      sums[1] = fused(g[n], v01 - v00, sums[1]);
      sums[2] = fused(g[n], v11 - v10, sums[2]);
      sums[3] = fused(g[n], fused(tx, right, rest * left), sums[3]);
    }
    add_lanes(sums, dots + 4 * i);
  }
}

template <class A, int N> static void add_points(const Point<A>* points, int64_t count, int64_t c, const A* grad_out) {
  typedef typename Vector<A>::V V;
  V g[N];
  for (int n = 0; n < N; n++) g[n] = load(grad_out + c + n * lanes<A>());
  for (int64_t i = 0; i < count; i++) {
    const Point<A>& point = points[i];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const V share = all<A>(point.weight * point.share[j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        A* sum = point.sum[j] + c + n * lanes<A>();
        store(sum, fused(share, g[n], load(sum)));
      }
    }
  }
}

// Gradients of the locations and weights of one query from its dots.
template <class A> static void put_gradients(const Head<A>& h, int64_t count, int64_t at, const A* grad_out) {
  const Call& a = h.a;
  A *grad_locations = (A*)a.grad_locations, *grad_weights = (A*)a.grad_weights;
  if (grad_weights) {
    grad_weights += at * a.points;
    A nothing = 0;  // a sample that is 0, times grad_out: NaN where that is not finite
    if (count < a.points)
      for (int64_t c = 0; c < a.channels; c++) nothing += 0 * grad_out[c];
    for (int64_t k = 0; k < a.points; k++) grad_weights[k] = nothing;
  }
  if (grad_locations) {
    grad_locations += at * a.points * 2;
    memset(grad_locations, 0, a.points * 2 * sizeof(A));
  }
  for (int64_t i = 0; i < count; i++) {
    const Point<A>& point = h.own.points[i];
    const A* dots = h.own.dots + 4 * i;
    if (grad_weights) grad_weights[point.k] = dots[0];
    if (!grad_locations) continue;
    // Each part times its own share: the difference of parts would lose what a small share leaves of a large one.
    const A ty = point.fraction[1], slope[2] = {(1 - ty) * dots[1] + ty * dots[2], dots[3]};
    for (int axis = 0; axis < 2; axis++)
      if (point.moves[axis])
        grad_locations[2 * point.k + axis] = slope[axis] * h.own.levels[point.k].scale[axis] * point.weight;
  }
}

template <class A> static void backward_queries(Head<A>& h, int64_t begin, int64_t end) {
  const Call& a = h.a;
  const Strides& s = a.grad_strides;
  const char* grad_out = a.grad_out + (h.batch * s.batch + h.head * s.head) * h.rows.bytes;
  for (int64_t q = begin; q < end; q++) {
    const int64_t at = h.first_row() + q * a.heads;
    A idle;
    const int64_t count = find_points(h, at, &idle);
    h.rows.widen(grad_out + q * s.row * h.rows.bytes, h.own.grad_out, a.channels);
    const A* g = h.own.grad_out;
    const Point<A>* points = h.own.points;
    if (a.grad_locations || a.grad_weights) {
      memset(h.own.dots, 0, count * 4 * sizeof(A));
      each_chunk<A>(h.own.row, [&](auto chunk, int64_t c) {
        dot_points<A, decltype(chunk)::N>(points, count, c, g, h.own.dots);
      });
      put_gradients(h, count, at, g);
    }
    if (a.grad_value)
      each_chunk<A>(h.own.row, [&](auto chunk, int64_t c) { add_points<A, decltype(chunk)::N>(points, count, c, g); });
  }
}

// ---- entry

// Fresh memory costs a page fault each 4 KiB on first writing; huge pages make that one each 2 MiB.
static void expect_writes(char* out, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)2 << 20;
  const uintptr_t begin = ((uintptr_t)out + page - 1) / page * page, end = ((uintptr_t)out + bytes) / page * page;
  if (out && end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

template <class A> static void run(const Call& a) {
  const Rows<A> rows = rows_of(a, A());
  const int64_t tasks = a.batch * a.heads * a.parts, bytes = Scratch<A>(a, 0).bytes;
  expect_writes(a.out, a.batch * a.queries * a.heads * a.channels * rows.bytes);
  expect_writes(a.grad_value, a.batch * a.pixels * a.heads * a.channels * rows.bytes);
  expect_writes(a.scratch, a.threads * bytes);
#pragma omp parallel num_threads((int)a.threads)
  {
    Scratch<A> own(a, a.scratch + omp_get_thread_num() * bytes);
    for (A* row : {own.zeros, own.unread, own.grad_out}) memset(row, 0, own.row * sizeof(A));
    if (own.corners) memset(own.corners, 0, a.points * 4 * own.row * sizeof(A));
    if (own.value && own.row != a.channels) memset(own.value, 0, a.pixels * own.row * sizeof(A));
    fill_levels(a, own.levels);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
      const int64_t which = task / a.parts, part = task % a.parts;
      Head<A> h = {a, rows, own, which / a.heads, which % a.heads, 0, 0, 0, 0, 0, 0};
      open_head(h);
      const int64_t begin = part * a.queries / a.parts, end = (part + 1) * a.queries / a.parts;
      if (a.out)
        forward_queries(h, begin, end);
      else
        backward_queries(h, begin, end);
      close_head(h);
    }
  }
}

// Bytes of scratch that each thread needs.
extern "C" int64_t retrograd_msda_scratch(const Call* a) {
  return a->dtype == F64 ? Scratch<double>(*a, 0).bytes : Scratch<float>(*a, 0).bytes;
}

// The forward where `out` is given, else the backward.
extern "C" void retrograd_msda(const Call* a) {
  if (a->dtype == F64)
    run<double>(*a);
  else
    run<float>(*a);
}
