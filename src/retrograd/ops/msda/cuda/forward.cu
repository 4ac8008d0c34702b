// The forward: out of value, locations and weights.
//
// A warp takes a query at a time, and each of its groups some of the query's points, in order. Every lane of a group
// computes where a point lies: telling each other through shared memory would use the unit that reads the rows, which
// bounds the kernel.

#include "common.cuh"

namespace {

constexpr int TURNS = (K + GROUPS - 1) / GROUPS;  // points of a group
constexpr int AHEAD = TURNS < 4 ? TURNS : 4;      // of these, asked for at a time
constexpr int BATCHES = (TURNS + AHEAD - 1) / AHEAD;

__device__ constexpr bool groups_stay_in_a_level() {
    for (int group = 0, first = 0, l = 0; group < GROUPS; ++group, first += TURNS) {
        int end = 0;
        for (l = 0; l < LEVELS && end <= first; ++l) end += PER_LEVEL[l];
        if (first + TURNS > end) return false;
    }
    return true;
}

// Where a point's level is, as the fast path needs it.
struct __align__(16) Grid {
    float scale_x, scale_y;    // position = location * scale - 0.5, or without 0.5 where ALIGNED
    float before_x, before_y;  // last but one column and row
    unsigned start, down;      // offset of a cell whose column and row are bits of a float; from a row to the next
    unsigned pad[2];
};

struct Shared {
    Tables tables;
    Grid grids[GROUPS * TURNS];
    int taken;  // runs that some warp has taken
};

// Queries next to each other that a warp takes one after the other; -1 queries after the last run.
struct Run {
    int image, head, first, queries;
};

// What a CTA's warps take: where queries are pixels, runs are rows of strips UNIT_WIDTH wide, so that what the warps read
// lies around one place.
struct Runs {
    int per_image, begin, end, length;
    bool tiled, in_turn;

    __device__ Runs(const Problem& p, const Tables& tables) : length(p.unit_queries), in_turn(p.in_turn) {
        tiled = p.tiled && tables.whole;
        per_image = (int)((p.queries + length - 1) / length);
        if (tiled) {
            per_image = 0;
            for (const Level& level : tables.levels) per_image += strips(level) * level.height;
        }
        const long long all = (long long)per_image * p.images * HEADS;
        begin = (int)(all * blockIdx.x / gridDim.x), end = (int)(all * (blockIdx.x + 1) / gridDim.x);
        if (in_turn) begin = 0, end = (int)all;
    }

    __device__ static int strips(Level level) { return (level.width + UNIT_WIDTH - 1) / UNIT_WIDTH; }

    __device__ Run run(const Problem& p, const Tables& tables, int taken) const {
        // In turn where the images together are too large for L2: all CTAs are at the same few of them.
        const int number = in_turn ? (taken / WARPS * (int)gridDim.x + (int)blockIdx.x) * WARPS + taken % WARPS : begin + taken;
        if (number >= end) return {0, 0, 0, -1};
        const int image_head = number / per_image;
        int inner = number % per_image;
        Run run{image_head / HEADS, image_head % HEADS, inner * length, length};
        run.queries = (int)min((long long)length, p.queries - run.first);
        if (!tiled) return run;
        int l = 0;
        for (int n; inner >= (n = strips(tables.levels[l]) * tables.levels[l].height); ++l) inner -= n;
        const Level level = tables.levels[l];
        const int strip = inner / level.height, y = inner % level.height;
        const int wide = (level.width + strips(level) - 1) / strips(level);
        run.first = level.start + y * level.width + strip * wide;
        run.queries = min(wide, level.width - strip * wide);
        return run;
    }
};

constexpr float SHIFT = 8388608.0f;  // 2^23: what is added to it, rounded down, leaves its floor in the low bits
constexpr unsigned SHIFT_BITS = 0x4b000000u;
constexpr int LARGEST = 1 << 23;  // side of a level for which that holds

__device__ __forceinline__ void fill_grids(Shared& shared) {
    for (int k = threadIdx.x; k < GROUPS * TURNS; k += THREADS) {
        const Level level = shared.tables.points[min(k, K - 1)];
        const unsigned down = level.width * PIXEL_BYTES;
        shared.grids[k] = {(float)(ALIGNED ? level.width - 1 : level.width),
                           (float)(ALIGNED ? level.height - 1 : level.height),
                           (float)(level.width - 2),
                           (float)(level.height - 2),
                           level.start * PIXEL_BYTES - SHIFT_BITS * (PIXEL_BYTES + down),
                           down};
    }
    __syncthreads();
}

// Along one axis: the first pixel of the cell, or of the nearest one inside, as bits of SHIFT + pixel; and the shares of
// that pixel and the next, both 0 where x is not finite or far outside.
__device__ __forceinline__ unsigned nearest_cell(float p, float scale, float before, float& first, float& second) {
    float x = ALIGNED ? __fmul_rn(p, scale) : __fsub_rn(__fmul_rn(p, scale), 0.5f);
    if constexpr (BORDER) x = fminf(fmaxf(x, 0.0f), before + 1.0f);
    const float shifted = __fadd_rd(fminf(fmaxf(x, 0.0f), before), SHIFT);
    const float distance = x - (shifted - SHIFT);
    first = fmaxf(1.0f - fabsf(distance), 0.0f);
    second = fmaxf(fminf(distance, 2.0f - distance), 0.0f);
    return __float_as_uint(shifted);
}

__device__ __forceinline__ void add(float (&total)[VEC], const Raw (&raw)[4], const float (&shares)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float values[VEC];
        unpack(raw[c], values);
#pragma unroll
        for (int v = 0; v < VEC; ++v) total[v] = fmaf(shares[c], values[v], total[v]);
    }
}

// Four loads without a branch: pixels nearby stand for those outside, with a share of 0. Right unless one of them is not
// finite, or the level has one row or column or more than LARGEST.
__device__ __forceinline__ void add_fast(const char* value, const Grid& grid, Point point, float (&total)[VEC]) {
    float left, right, upper, lower;
    float weight = point.weight;
    if constexpr (BORDER) weight = fabsf(point.at.x) < INFINITE && fabsf(point.at.y) < INFINITE ? weight : 0.0f;
    const unsigned column = nearest_cell(point.at.x, grid.scale_x, grid.before_x, left, right);
    const unsigned row = nearest_cell(point.at.y, grid.scale_y, grid.before_y, upper, lower);
    upper *= weight, lower *= weight;
    const char* from = value + (grid.start + row * grid.down + column * PIXEL_BYTES);
    const char* below = from + grid.down;
    const Raw raw[4] = {load_row(from), load_row(from + PIXEL_BYTES), load_row(below), load_row(below + PIXEL_BYTES)};
    const float shares[4] = {upper * left, upper * right, lower * left, lower * right};
    add(total, raw, shares);
}

// Reads only corners that are inside.
__device__ __forceinline__ void add_safe(const Problem& p, unsigned base, Level level, Point point, float (&total)[VEC]) {
    const Sample s = locate(point.at, level);
    const float lower = s.ty * point.weight, upper = (1.0f - s.ty) * point.weight;
    const float shares[4] = {upper * (1.0f - s.tx), upper * s.tx, lower * (1.0f - s.tx), lower * s.tx};
    const unsigned corner = (unsigned)(level.start + s.y0 * level.width + s.x0) * PIXEL_BYTES | s.corners;
    Raw raw[4] = {};
    read_corners<true>(p, base, make_uint2(corner, level.width * PIXEL_BYTES), raw);
    add(total, raw, shares);
}

// The groups' sums together, spread over all lanes as far as it goes.
__device__ __forceinline__ void store_total(char* row, float (&total)[VEC]) {
    const int lane = threadIdx.x % 32;
    int n = VEC, first = lane % LANES * VEC;  // elements that this lane has
    bool own = true;
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
        const bool high = lane & mask;
        if (n > 1) {
            n /= 2;
#pragma unroll
            for (int v = 0; v < n; ++v) {
                const float sent = high ? total[v] : total[v + n], kept = high ? total[v + n] : total[v];
                total[v] = kept + __shfl_xor_sync(ALL, sent, mask);
            }
            first += high ? n : 0;
        } else {
            total[0] += __shfl_xor_sync(ALL, total[0], mask);
            own = own && !high;
        }
    }
    if constexpr (GROUPS == 1) {
        store_row(row + first * ELEMENT, total);
    } else if (own) {
#pragma unroll
        for (int v = 0; v < n; ++v) store_value(row + (first + v) * ELEMENT, total[v]);
    }
}

struct Points {
    Point of[AHEAD];
};

// All points of a group by loads of 16 bytes.
constexpr bool WIDE = POINT_TYPE == F32 && GROUPS * TURNS == K && BATCHES == 1 && AHEAD % 2 == 0;

// Of a group, from its point `batch * AHEAD` on; `at` is the number of the first in [B, Q, H, K].
__device__ __forceinline__ Points load_points(const Problem& p, long long at, int batch) {
    Points points = {};
    if constexpr (WIDE) {
        __align__(16) float weights[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a += AHEAD % 4 ? 2 : 4) {
            if constexpr (AHEAD % 4)
                *(float2*)(weights + a) = __ldg((const float2*)((const float*)p.weights + at + a));
            else
                *(float4*)(weights + a) = __ldg((const float4*)((const float*)p.weights + at + a));
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a += 2) {
            const float4 two = __ldg((const float4*)((const float*)p.locations + 2 * (at + a)));
            points.of[a] = {make_float2(two.x, two.y), weights[a]};
            points.of[a + 1] = {make_float2(two.z, two.w), weights[a + 1]};
        }
    } else {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int turn = batch * AHEAD + a, k = threadIdx.x % 32 / LANES * TURNS + turn;
            if (turn < TURNS && k < K) points.of[a] = {load_location(p.locations, at + turn), load_point(p.weights, at + turn)};
        }
    }
    return points;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ Problem p) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) shared.taken = 0;
    fill_tables(p, shared.tables);
    fill_grids(shared);
    const Runs runs(p, shared.tables);
    const int lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    bool fast = !shared.tables.thin;
    for (const Level& level : shared.tables.levels) fast = fast && max(level.width, level.height) <= LARGEST;
    const Grid own = shared.grids[group * TURNS];
    while (true) {
        // Warps differ in how long they take, and levels in how many queries a run has.
        int taken = lane == 0 ? atomicAdd(&shared.taken, 1) : 0;
        taken = __shfl_sync(ALL, taken, 0);
        const Run run = runs.run(p, shared.tables, taken);
        if (run.queries < 0) break;
        const unsigned base =
            (unsigned)(((long long)run.image * p.pixels * HEADS + run.head) * ROW_BYTES + j * LANE_BYTES);
        const char* value = p.value + base;
        long long row = (run.image * p.queries + run.first) * HEADS + run.head;
        long long at = row * K + group * TURNS;
        Points next = load_points(p, at, 0);
#pragma unroll 1
        for (int left = run.queries; left > 0; --left, row += HEADS, at += HEADS * K) {
            Points points = next;
            // A turn ahead: ptxas moves loads down to what waits for them, but not into the next turn of a loop.
            if (left > 1) next = load_points(p, at + HEADS * K, 0);
            float total[VEC] = {};
            bool finite = false;
            if (fast) {
#pragma unroll 1
                for (int batch = 0; batch < BATCHES; ++batch) {
                    if (batch) points = load_points(p, at, batch);
#pragma unroll
                    for (int a = 0; a < AHEAD; ++a) {
                        const int turn = min(batch * AHEAD + a, TURNS - 1);
                        add_fast(value, groups_stay_in_a_level() ? own : shared.grids[group * TURNS + turn], points.of[a],
                                 total);
                    }
                }
                float zero = 0.0f;  // NaN if any is not finite
#pragma unroll
                for (int v = 0; v < VEC; ++v) zero = fmaf(total[v], 0.0f, zero);
                finite = zero == 0.0f;
            }
            if (!__all_sync(ALL, finite)) {
#pragma unroll
                for (int v = 0; v < VEC; ++v) total[v] = 0.0f;
#pragma unroll 1
                for (int turn = 0; turn < TURNS; ++turn) {
                    const int k = group * TURNS + turn;
                    if (k < K) add_safe(p, base, shared.tables.points[k], load_own(p, row, true, k), total);
                }
            }
            store_total(p.out + row * ROW_BYTES, total);
        }
    }
}
