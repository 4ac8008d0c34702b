// What the kernels of deformable attention share: types, where a sample lies, which queries a CTA takes.
//
// A row is what a pixel or a query has for one head: CHANNELS elements, LANES lanes with 4 or 8 each. The GROUPS of
// LANES lanes of a warp work on one query (or one record) each. In backward and cells every lane finds the cell of one
// point of its group's query; the group then takes these points one after the other, told by shared memory. The forward
// has ways of its own, as its file says.
//
// grad_value comes in one of three ways (plan.py chooses):
//   ADD     backward.cu adds every corner's row atomically, where few samples touch a pixel;
//   CELLS   count, scan, scatter: a counting sort of the samples by the cell they lie in; cells.cu adds up a cell's
//           samples in registers and then the cell's four rows atomically;
//   REDUCE  count, scan, fill: the same sort, stable; reduce.cu adds up the samples of the cells around a pixel in the
//           order of the queries and writes the row once. Bitwise repeatable, as nothing in it depends on the order in
//           which CTAs run.
//   ORDERED count, scan, fill, cells: as CELLS, by a stable sort, but a cell's four rows are kept; combine.cu adds up
//           those of the four cells around a pixel. Bitwise repeatable likewise, where the host knows the levels.
//
// launch.py sets the macros: VALUE_TYPE and POINT_TYPE (enum Type), HEADS, CHANNELS, LEVELS, POINTS (of each level),
// BORDER, ALIGNED, DOTS, ADD and ORDERED (what of the backward), LANE_ELEMENTS, THREADS, BLOCKS.

#pragma once

namespace {

enum Type : int { F32 = 0, BF16 = 1, F16 = 2 };

__device__ constexpr int PER_LEVEL[LEVELS] = {POINTS};

__device__ constexpr int sum_points() {
    int sum = 0;
    for (int count : PER_LEVEL) sum += count;
    return sum;
}

constexpr int K = sum_points();
constexpr int ELEMENT = VALUE_TYPE == F32 ? 4 : 2;
constexpr int VEC = LANE_ELEMENTS;
constexpr int LANE_BYTES = VEC * ELEMENT;
constexpr int LANES = CHANNELS / VEC;
constexpr int GROUPS = 32 / LANES;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ROW_BYTES = CHANNELS * ELEMENT;
constexpr unsigned PIXEL_BYTES = HEADS * ROW_BYTES;
constexpr int SLICE = 1024;   // bins that a CTA scans
constexpr int SEGMENT = 64;   // samples of a group in `cells`, as in plan.py
constexpr unsigned ALL = 0xffffffffu;
#define INFINITE __int_as_float(0x7f800000)
static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0 && LANES * VEC == CHANNELS, "CHANNELS");

// A sample, where it lies among those of its image and head.
struct __align__(16) Record {
    unsigned query;  // MOVED_X and MOVED_Y: the cell is left of or above the bin, outside of the image
    float tx, ty, weight;
};

constexpr unsigned MOVED_X = 1u << 30, MOVED_Y = 1u << 31, QUERY = MOVED_X - 1;

struct Problem {
    const char* value;      // [B, S, H, C]
    const char* locations;  // [B, Q, H, K, 2]
    const char* weights;    // [B, Q, H, K]
    const char* grad_out;   // [B, Q, H, C]
    char* out;              // [B, Q, H, C]
    char* grad_value;       // [B, S, H, C]; float32 and zeros where ADD
    char* grad_locations;   // [B, Q, H, K, 2] or null
    char* grad_weights;     // [B, Q, H, K] or null
    const char* shapes;     // [LEVELS, 2] (height, width), or null: then `sizes`
    Record* records;        // [B, H, Q * K]
    unsigned* numbers;      // [B, H, Q * K] query * K + k, instead of records
    unsigned* counts;       // [B, H, chunks, bins] samples of a bin in a chunk of queries, then the first one's place
    unsigned* starts;       // [B, H, bins + 1] first sample of a bin
    unsigned* sums;         // [B, H, chunks, slices]
    unsigned* ticket;       // units taken
    float* partials;        // [B, H, bins + segments, 4, C] sums of a cell's corners, of its part in each segment
    long long pixels, queries;
    long long bins;  // a pixel each, or if ORDERED a cell each
    int sizes[2 * LEVELS];
    int shapes_bytes;  // of an integer of `shapes`
    int images;        // B
    int chunks, band;
    int unit_queries, tiled, in_turn;
};

struct Level {
    int width, height, start;
    int cells;  // of the levels before
};

struct Sample {
    float tx, ty;
    int x0, y0;        // of the cell; -1 is outside
    unsigned corners;  // bits: (x0, y0), (x1, y0), (x0, y1), (x1, y1) are in the level
    bool moves_x, moves_y;
};

__device__ __forceinline__ float from_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ float from_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned word;
#if VALUE_TYPE == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

template <int BYTES>
struct Words;
template <>
struct Words<16> {
    using Type = uint4;
};
template <>
struct Words<8> {
    using Type = uint2;
};
using Raw = Words<LANE_BYTES>::Type;  // what a lane has of a row

__device__ __forceinline__ void unpack(Raw raw, float (&row)[VEC]) {
    __align__(16) unsigned words[LANE_BYTES / 4];
    *(Raw*)words = raw;
#pragma unroll
    for (int i = 0; i < LANE_BYTES / 4; ++i) {
        if constexpr (VALUE_TYPE == F32) {
            row[i] = __uint_as_float(words[i]);
        } else if constexpr (VALUE_TYPE == BF16) {
            row[2 * i] = __uint_as_float(words[i] << 16);
            row[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        } else {
            row[2 * i] = from_f16((unsigned short)(words[i] & 0xffffu));
            row[2 * i + 1] = from_f16((unsigned short)(words[i] >> 16));
        }
    }
}

__device__ __forceinline__ void store_row(char* to, const float (&row)[VEC]) {
    __align__(16) unsigned words[LANE_BYTES / 4];
#pragma unroll
    for (int i = 0; i < LANE_BYTES / 4; ++i)
        words[i] = VALUE_TYPE == F32 ? __float_as_uint(row[i]) : pack(row[2 * i % VEC], row[(2 * i + 1) % VEC]);
    *(Raw*)to = *(Raw*)words;
}

__device__ __forceinline__ void store_value(char* to, float value) {
    if constexpr (VALUE_TYPE == F32)
        *(float*)to = value;
    else
        *(unsigned short*)to = (unsigned short)pack(value, 0.0f);
}

__device__ __forceinline__ float load_point(const char* from, long long i) {
    if constexpr (POINT_TYPE == F32) return __ldg((const float*)from + i);
    const unsigned short bits = __ldg((const unsigned short*)from + i);
    return POINT_TYPE == BF16 ? from_bf16(bits) : from_f16(bits);
}

__device__ __forceinline__ float2 load_location(const char* from, long long i) {
    if constexpr (POINT_TYPE == F32) return __ldg((const float2*)from + i);
    const unsigned bits = __ldg((const unsigned*)from + i);
    const unsigned short x = (unsigned short)(bits & 0xffffu), y = (unsigned short)(bits >> 16);
    return POINT_TYPE == BF16 ? make_float2(from_bf16(x), from_bf16(y)) : make_float2(from_f16(x), from_f16(y));
}

__device__ __forceinline__ unsigned short narrow(float value) {
    unsigned short bits;
    if constexpr (POINT_TYPE == BF16)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ void store_point(char* to, long long i, float value) {
    if constexpr (POINT_TYPE == F32)
        ((float*)to)[i] = value;
    else
        ((unsigned short*)to)[i] = narrow(value);
}

__device__ __forceinline__ void store_location(char* to, long long i, float x, float y) {
    if constexpr (POINT_TYPE == F32)
        ((float2*)to)[i] = make_float2(x, y);
    else
        ((unsigned*)to)[i] = narrow(x) | (unsigned)narrow(y) << 16;
}

// One coordinate: x = fl(fl(p * size) - 0.5), or fl(p * (size - 1)) where aligned; the intrinsics are never contracted.
__device__ __forceinline__ float position(float p, int size, float& scale) {
    scale = (float)(ALIGNED ? size - 1 : size);
    const float product = __fmul_rn(p, scale);
    return ALIGNED ? product : __fsub_rn(product, 0.5f);
}

__device__ __forceinline__ Sample locate(float2 p, Level level) {
    Sample s;
    float scale;
    const float last_x = (float)(level.width - 1), last_y = (float)(level.height - 1);
    float x = position(p.x, level.width, scale), y = position(p.y, level.height, scale);
    s.moves_x = s.moves_y = true;
    bool exists = true;
    if constexpr (BORDER) {
        exists = fabsf(p.x) < INFINITE && fabsf(p.y) < INFINITE;
        s.moves_x = x > 0.0f && x < last_x;
        s.moves_y = y > 0.0f && y < last_y;
        x = fminf(fmaxf(x, 0.0f), last_x);
        y = fminf(fmaxf(y, 0.0f), last_y);
    }
    const float cell_x = floorf(x), cell_y = floorf(y);
    // Compared as floats: a far position must not reach the conversion to integers. NaN and infinity fail here too.
    const bool reachable = exists && cell_x >= -1.0f && cell_x <= last_x && cell_y >= -1.0f && cell_y <= last_y;
    s.moves_x = s.moves_x && reachable;
    s.moves_y = s.moves_y && reachable;
    s.tx = reachable ? x - cell_x : 0.0f;
    s.ty = reachable ? y - cell_y : 0.0f;
    s.x0 = reachable ? (int)cell_x : -2;
    s.y0 = reachable ? (int)cell_y : -2;
    const unsigned left = (unsigned)s.x0 < (unsigned)level.width, right = (unsigned)(s.x0 + 1) < (unsigned)level.width;
    const unsigned upper = (unsigned)s.y0 < (unsigned)level.height,
                   lower = (unsigned)(s.y0 + 1) < (unsigned)level.height;
    s.corners = (left & upper) | (right & upper) << 1 | (left & lower) << 2 | (right & lower) << 3;
    return s;
}

// The cell of a sample among those of its image and head: a row and a column of them more than there are pixels.
__device__ __forceinline__ int cell_of(int x, int y, Level level) {
    return level.cells + (y + 1) * (level.width + 1) + x + 1;
}

struct Tables {
    Level levels[LEVELS];
    Level points[K > 0 ? K : 1];
    int whole;  // the levels are exactly the pixels
    int thin;   // some level has but one row or column: no two corners can be taken from inside
};

__device__ __forceinline__ long long size_of(const Problem& p, int i) {
    if (!p.shapes) return p.sizes[i];
    return p.shapes_bytes == 8 ? __ldg((const long long*)p.shapes + i) : __ldg((const int*)p.shapes + i);
}

// Level l, from sizes as the host or the device knows them; one that does not fit into the pixels is empty. `whole` is
// whether the levels up to l are exactly the first `end` pixels.
__device__ Level level_at(const Problem& p, int l, bool& whole, long long& end) {
    long long height = -1, width = 0, area = 0;
    int cells = 0;
    bool fits = true;
    whole = true, end = 0;
    for (int i = 0; i <= l; ++i) {
        cells += (int)((width + 1) * (height + 1));
        height = size_of(p, 2 * i), width = size_of(p, 2 * i + 1);
        area = height * width;
        end += area;
        fits = height >= 0 && width >= 0 && area >= 0 && end >= area && end <= p.pixels;
        whole = whole && fits;
    }
    return fits && area ? Level{(int)width, (int)height, (int)(end - area), cells} : Level{0, 0, 0, 0};
}

// Every thread up to K or LEVELS makes its own entry: the sizes are few, and one barrier does.
__device__ void fill_tables(const Problem& p, Tables& tables) {
    bool whole;
    long long end;
    if (threadIdx.x == 0) tables.thin = 0;
    if (threadIdx.x < K) {
        int k = threadIdx.x, l = 0;
        while (k >= PER_LEVEL[l]) k -= PER_LEVEL[l++];
        tables.points[threadIdx.x] = level_at(p, l, whole, end);
    }
    __syncthreads();
    if (threadIdx.x < LEVELS) {
        const Level level = tables.levels[threadIdx.x] = level_at(p, threadIdx.x, whole, end);
        if (level.width < 2 || level.height < 2) tables.thin = 1;
        if (threadIdx.x == LEVELS - 1) tables.whole = whole && end == p.pixels;
    }
    __syncthreads();
}

constexpr int UNIT_WIDTH = 16;

// The queries that a CTA takes at a time: neighbours in the image where queries are pixels, else in their order.
struct Unit {
    int image, head;
    int first, stride;  // of the query at the upper left, from one row of queries to the next
    int wide, high;     // queries that there are

    // Number i of the unit, or -1. A volatile one stays in shared memory.
    template <typename Self>
    __device__ static int query(Self& unit, bool tiled, int i) {
        const int x = tiled ? i % UNIT_WIDTH : i, y = tiled ? i / UNIT_WIDTH : 0;
        return x < unit.wide && y < unit.high ? unit.first + y * unit.stride + x : -1;
    }
};

struct Units {
    int per_image, unit_queries;
    bool tiled;

    __device__ Units(const Problem& p, const Tables& tables) : unit_queries(p.unit_queries) {
        tiled = p.tiled && tables.whole;
        per_image = (int)((p.queries + unit_queries - 1) / unit_queries);
        if (!tiled) return;
        per_image = 0;
        for (const Level& level : tables.levels) per_image += across(level) * down(level);
    }

    __device__ int across(Level level) const { return (level.width + UNIT_WIDTH - 1) / UNIT_WIDTH; }
    __device__ int down(Level level) const {
        const int high = unit_queries / UNIT_WIDTH;
        return (level.height + high - 1) / high;
    }

    __device__ Unit unit(const Problem& p, const Tables& tables, int number) const {
        const int image_head = number / per_image;
        int inner = number % per_image;
        Unit unit{image_head / HEADS, image_head % HEADS};
        if (!tiled) {
            unit.first = inner * unit_queries, unit.stride = 0, unit.high = 1;
            unit.wide = (int)min((long long)unit_queries, p.queries - unit.first);
            return unit;
        }
        int l = 0;
        for (int n; inner >= (n = across(tables.levels[l]) * down(tables.levels[l])); ++l) inner -= n;
        const Level level = tables.levels[l];
        const int high = unit_queries / UNIT_WIDTH;
        const int x = inner % across(level) * UNIT_WIDTH, y = inner / across(level) * high;
        unit.first = level.start + y * level.width + x, unit.stride = level.width;
        unit.wide = min(UNIT_WIDTH, level.width - x), unit.high = min(high, level.height - y);
        return unit;
    }
};

// Which units a CTA takes: number, number + step, ... below end. Neighbours where L1 can keep their rows, and the
// BLOCKS CTAs of an SM neighbours of each other, as far as CTAs are dealt out to SMs in turn; in turn where the images
// together are too large for L2, so that all CTAs are at the same few of them.
struct Share {
    int number, end, step;

    __device__ Share(const Problem& p, const Units& units) {
        const int all = units.per_image * p.images * HEADS;
        if (p.in_turn && !units.tiled) {
            number = blockIdx.x, end = all, step = gridDim.x;
            return;
        }
        const unsigned turn = gridDim.x / BLOCKS;
        const long long place = gridDim.x % BLOCKS ? blockIdx.x : blockIdx.x % turn * BLOCKS + blockIdx.x / turn;
        number = (int)(all * place / gridDim.x), end = (int)(all * (place + 1) / gridDim.x), step = 1;
    }
};

__device__ __forceinline__ Raw load_row(const char* row) { return __ldg((const Raw*)row); }

// Of a tensor of less than 4 GiB, so that no 64-bit offset is computed.
__device__ __forceinline__ Raw load_at(const char* tensor, unsigned offset) {
    return __ldg((const Raw*)(tensor + offset));
}

// Calls use(base, row, exists) for each query that a group of this CTA has: offsets of the lane in its image and head, the
// query's row of [B, Q, H], and whether there is one. `kept` are WARPS units in shared memory, since registers are short:
// every warp has its own and needs no barrier.
template <typename Use>
__device__ __forceinline__ void for_queries(const Problem& p, const Tables& tables, Unit (&kept)[WARPS], Use use) {
    const Units units(p, tables);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    const Share mine(p, units);
    for (int number = mine.number; number < mine.end; number += mine.step) {
        __syncwarp();
        if (lane == 0) kept[warp] = units.unit(p, tables, number);
        __syncwarp();
        const volatile Unit& unit = kept[warp];
        const long long image = unit.image;
        const unsigned head = unit.head, queries = (unsigned)p.queries;
        const unsigned base = (unsigned)((image * p.pixels * HEADS + head) * ROW_BYTES + j * LANE_BYTES);
        for (int first = warp * GROUPS; first < units.unit_queries; first += WARPS * GROUPS) {
            const int q = Unit::query(unit, units.tiled, first + group);
            if (__all_sync(ALL, q < 0)) continue;
            use(base, (unit.image * queries + q) * HEADS + head, q >= 0);
        }
    }
}

struct Point {
    float2 at;
    float weight;
};

// Point k of a query, if there is one.
__device__ __forceinline__ Point load_own(const Problem& p, long long row, bool exists, int k) {
    if (!exists || k >= K) return {};
    return {load_location(p.locations, row * K + k), load_point(p.weights, row * K + k)};
}

// The two columns (or rows) of a level that are read for a cell: those of the cell where it is inside, else the nearest.
__device__ __forceinline__ int nearest_pair(int first, int size) { return min(max(first, 0), size - 2); }

// A lane's part of four corners. `where` is the offset of the first and that to the row below. SAFE reads only corners that
// are inside, which the low bits of the first offset tell; what else is in `raw` stays.
template <bool SAFE>
__device__ __forceinline__ void read_corners(const Problem& p, unsigned base, uint2 where, Raw (&raw)[4]) {
    if constexpr (SAFE) {
        // The first corner may be before the level: its offset wraps around, as the sums here do again.
        const unsigned from = base + (where.x & ~15u);
        if (where.x & 1) raw[0] = load_at(p.value, from);
        if (where.x & 2) raw[1] = load_at(p.value, from + PIXEL_BYTES);
        if (where.x & 4) raw[2] = load_at(p.value, from + where.y);
        if (where.x & 8) raw[3] = load_at(p.value, from + where.y + PIXEL_BYTES);
    } else {
        const unsigned corner = base + where.x, below = corner + where.y;
        raw[0] = load_at(p.value, corner), raw[1] = load_at(p.value + PIXEL_BYTES, corner);
        raw[2] = load_at(p.value, below), raw[3] = load_at(p.value + PIXEL_BYTES, below);
    }
}

}  // namespace
