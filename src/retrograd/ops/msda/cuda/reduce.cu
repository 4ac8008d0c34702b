// grad_value of sorted samples, pixel by pixel.

#include "common.cuh"

namespace {

struct Shared {
    Tables tables;
    unsigned unit;
    unsigned queries[WARPS][32];  // or NOBODY
    float4 shares[WARPS][32];     // of the pixels of a block
};

constexpr unsigned NOBODY = ALL;
constexpr int LARGEST_TILE = 16, SMALLEST_TILE = 8;

// Side of the square of pixels that a CTA takes: smaller where a pixel has more samples.
__device__ __forceinline__ int tile_of(const Problem& p, Level level, int points) {
    const float density = (float)p.queries * points / ((float)level.width * level.height);
    return LARGEST_TILE * LARGEST_TILE * density > 2048.0f ? SMALLEST_TILE : LARGEST_TILE;
}

__device__ __forceinline__ int tiles_of(const Problem& p, Level level, int points) {
    if (!level.width) return 0;
    const int tile = tile_of(p, level, points);
    return ((level.width + tile - 1) / tile) * ((level.height + tile - 1) / tile);
}

// Shares of pixels 0 and 1 in a sample of cell -1, 0 or 1 with fraction t; other cells do not reach them.
__device__ __forceinline__ float2 shares_of(int cell, float t) {
    return make_float2(cell == 0 ? 1.0f - t : cell == -1 ? t : 0.0f, cell == 1 ? 1.0f - t : cell == 0 ? t : 0.0f);
}

// A block of 2 x 2 pixels at (x, y). Its samples lie in 3 x 3 bins: three runs, of which lanes 4 r to 4 r + 3 know where
// the columns x - 1, x, x + 1 of row y - 1 + r begin and where the run ends. EXACT adds no products with a share of 0.
template <bool EXACT>
__device__ __forceinline__ void add_samples(Shared& shared, const Record* records, const char* grad_out, unsigned bound,
                                            float (&total)[4][VEC]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES;
    unsigned from[3], ends[3], first[3], second[3];
#pragma unroll
    for (int r = 0; r < 3; ++r) {
        from[r] = __shfl_sync(ALL, bound, 4 * r);
        first[r] = __shfl_sync(ALL, bound, 4 * r + 1), second[r] = __shfl_sync(ALL, bound, 4 * r + 2);
        ends[r] = __shfl_sync(ALL, bound, 4 * r + 3) - from[r] + (r ? ends[r - 1] : 0u);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int v = 0; v < VEC; ++v) total[c][v] = 0.0f;
    const auto load = [&](unsigned m, int& row, int& column) {
        row = m < ends[0] ? 0 : m < ends[1] ? 1 : 2;
        const unsigned at = m < ends[0]   ? from[0] + m
                            : m < ends[1] ? from[1] + (m - ends[0])
                                          : from[2] + (m - ends[1]);
        const unsigned one = row == 0 ? first[0] : row == 1 ? first[1] : first[2];
        const unsigned two = row == 0 ? second[0] : row == 1 ? second[1] : second[2];
        column = at < one ? 0 : at < two ? 1 : 2;
        return m < ends[2] ? __ldg((const uint4*)(records + at)) : make_uint4(0, 0, 0, 0);
    };
    int row, column, next_row, next_column;
    uint4 next = load(lane, row, column), later = load(32 + lane, next_row, next_column);
    for (unsigned batch = 0; batch < ends[2]; batch += 32) {
        const uint4 raw = next;
        next = later;
        if (batch + 32 + lane < ends[2])
            asm volatile("prefetch.global.L1 [%0];" ::"l"(grad_out + (unsigned long long)(next.x & QUERY) * PIXEL_BYTES));
        // A bin at the edge also has the cells outside of it.
        const float2 across = shares_of(column - 1 - (raw.x & MOVED_X ? 1 : 0), __uint_as_float(raw.y));
        const float2 down = shares_of(row - 1 - (raw.x & MOVED_Y ? 1 : 0), __uint_as_float(raw.z));
        const float weight = __uint_as_float(raw.w);
        const float products[4] = {down.x * across.x, down.x * across.y, down.y * across.x, down.y * across.y};
        float share[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) share[c] = products[c] == 0.0f ? 0.0f : weight * products[c];
        shared.queries[warp][lane] = batch + lane < ends[2] ? raw.x & QUERY : NOBODY;
        shared.shares[warp][lane] = make_float4(share[0], share[1], share[2], share[3]);
        row = next_row, column = next_column;
        later = load(batch + 64 + lane, next_row, next_column);
        __syncwarp();
        const unsigned left = ends[2] - batch;
#pragma unroll(EXACT ? 1 : LANES)
        for (int half = 0; half < LANES; half += (LANES > 4 ? 4 : LANES)) {
            if (half * GROUPS >= left) break;
            constexpr int STEPS = LANES > 4 ? 4 : LANES;
            Raw rows[STEPS] = {};
            float4 w[STEPS];
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const unsigned query = shared.queries[warp][(half + step) * GROUPS + group];
                w[step] = shared.shares[warp][(half + step) * GROUPS + group];
                if (query != NOBODY) rows[step] = load_row(grad_out + (unsigned long long)query * PIXEL_BYTES);
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                float g[VEC];
                unpack(rows[step], g);
                const float s[4] = {w[step].x, w[step].y, w[step].z, w[step].w};
#pragma unroll
                for (int c = 0; c < 4; ++c)
#pragma unroll
                    for (int v = 0; v < VEC; ++v)
                        if (!EXACT || s[c] != 0.0f) total[c][v] = fmaf(s[c], g[v], total[c][v]);
            }
        }
        __syncwarp();
    }
    // Lanes of the first group get the sums of all groups.
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2)
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int v = 0; v < VEC; ++v) total[c][v] += __shfl_xor_sync(ALL, total[c][v], mask);
}

__device__ void zero_outside_of_levels(const Problem& p, const Tables& tables) {
    const int lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    const float zeros[VEC] = {};
    for (long long i = blockIdx.x * WARPS + threadIdx.x / 32; i < p.images * p.pixels; i += gridDim.x * WARPS) {
        bool covered = false;
        for (const Level& level : tables.levels) {
            const long long inside = i % p.pixels - level.start;
            covered = covered || (inside >= 0 && inside < (long long)level.width * level.height);
        }
        for (int head = group; !covered && head < HEADS; head += GROUPS)
            store_row(p.grad_value + (i * HEADS + head) * ROW_BYTES + j * LANE_BYTES, zeros);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) reduce(const __grid_constant__ Problem p) {
    __shared__ Shared shared;
    fill_tables(p, shared.tables);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    int per_image = 0;
    for (int l = 0; l < LEVELS; ++l) per_image += tiles_of(p, shared.tables.levels[l], PER_LEVEL[l]);
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) shared.unit = atomicAdd(p.ticket, 1u);
        __syncthreads();
        // One image and head after the other, so that rows of grad_out stay in L2.
        const unsigned image_head = per_image ? shared.unit / per_image : ALL;
        if (image_head >= p.images * HEADS) break;
        int inner = shared.unit % per_image;
        // The last levels have the most samples a pixel: they come first.
        int l = LEVELS - 1;
        for (int n; inner >= (n = tiles_of(p, shared.tables.levels[l], PER_LEVEL[l])); --l) inner -= n;
        const Level level = shared.tables.levels[l];
        const int tile = tile_of(p, level, PER_LEVEL[l]), across = (level.width + tile - 1) / tile;
        const long long image = image_head / HEADS, head = image_head % HEADS;
        const unsigned* starts = p.starts + (long long)image_head * (p.bins + 1) + level.start;
        const Record* records = p.records + (long long)image_head * p.queries * K;
        const char* grad_out = p.grad_out + (image * p.queries * HEADS + head) * ROW_BYTES + j * LANE_BYTES;
        for (int i = warp; i < tile * tile / 4; i += WARPS) {
            const int x = inner % across * tile + i % (tile / 2) * 2, y = inner / across * tile + i / (tile / 2) * 2;
            if (x >= level.width || y >= level.height) continue;
            unsigned bound = 0;
            const int bin_y = y - 1 + lane / 4, bin_x = min(max(x - 1 + lane % 4, 0), level.width);
            if (lane < 12 && bin_y >= 0 && bin_y < level.height) bound = starts[bin_y * level.width + bin_x];
            float total[4][VEC];
            add_samples<false>(shared, records, grad_out, bound, total);
            bool finite = true;
#pragma unroll
            for (int c = 0; c < 4; ++c)
#pragma unroll
                for (int v = 0; v < VEC; ++v) finite = finite && fabsf(total[c][v]) < INFINITE;
            if (!__all_sync(ALL, finite)) add_samples<true>(shared, records, grad_out, bound, total);
            const long long pixel = image * p.pixels + level.start + y * level.width + x;
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (group == c % GROUPS && x + c % 2 < level.width && y + c / 2 < level.height)
                    store_row(p.grad_value + ((pixel + c / 2 * level.width + c % 2) * HEADS + head) * ROW_BYTES + j * LANE_BYTES,
                              total[c]);
        }
    }
    if (!shared.tables.whole) zero_outside_of_levels(p, shared.tables);
}
