// Gradients of locations and weights, query by query; with ADD also grad_value, row by row.

#include "gradients.cuh"

namespace {

struct Shared {
    Tables tables;
    float4 shares[ADD ? WARPS : 1][32];  // of the corners, times the weight
    uint2 sums[ADD ? WARPS : 1][32];     // offset of the first corner | corners; offset to the row below
    uint2 places[WARPS][32];             // likewise of what is read
    Unit units[WARPS];
};

// Gradients of a group's points, and with ADD its part of grad_value. SAFE as in `attend` of the forward; what is read
// in place of a corner outside is dropped, so the result is right whatever it is.
template <bool SAFE>
__device__ __forceinline__ void differentiate(const Problem& p, Shared& shared, unsigned base, unsigned row,
                                              bool exists, const float (&g)[VEC]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    Point next = load_own(p, row, exists, j);
#pragma unroll 1
    for (int batch = 0; batch < K; batch += LANES) {
        const int k = batch + j;
        const bool mine = exists && k < K;
        const Point point = next;
        next = load_own(p, row, exists, k + LANES);
        const float weight = point.weight;
        Sample s = {};
        Level level = {};
        int x = 0, y = 0;
        uint2 place = make_uint2(0, 0);
        if (mine) {
            level = shared.tables.points[k];
            s = locate(point.at, level);
            x = SAFE ? s.x0 : nearest_pair(s.x0, level.width), y = SAFE ? s.y0 : nearest_pair(s.y0, level.height);
            place.x = (unsigned)(level.start + y * level.width + x) * PIXEL_BYTES | (SAFE ? s.corners : 0u);
            place.y = level.width * PIXEL_BYTES;
        }
        shared.places[warp][j * GROUPS + group] = place;
        if constexpr (ADD) {
            const float lower = weight * s.ty, upper = weight * (1.0f - s.ty);
            shared.shares[warp][j * GROUPS + group] =
                make_float4(upper * (1.0f - s.tx), upper * s.tx, lower * (1.0f - s.tx), lower * s.tx);
            const int first = level.start + s.y0 * level.width + s.x0;
            shared.sums[warp][j * GROUPS + group] = make_uint2((unsigned)first * PIXEL_BYTES | s.corners, place.y);
        }
        __syncwarp();
        float stack[log2_of(LANES) + 1][4];
#pragma unroll
        for (int i = 0; i < LANES && DOTS; ++i) {
            const uint2 where = shared.places[warp][i * GROUPS + group];
            Raw raw[4] = {};
            read_corners<SAFE>(p, base, where, raw);
            float dots[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float values[VEC];
                unpack(raw[c], values);
                dots[c] = values[0] * g[0];
#pragma unroll
                for (int v = 1; v < VEC; ++v) dots[c] = fmaf(values[v], g[v], dots[c]);
            }
            collect(stack, dots, i, lane);
        }
#pragma unroll
        for (int i = 0; i < LANES && ADD; ++i) {
            const uint2 where = shared.sums[warp][i * GROUPS + group];
            const float4 w = shared.shares[warp][i * GROUPS + group];
            const unsigned from = base + (where.x & ~15u);
            float* sums = (float*)p.grad_value;
            if (where.x & 1) add_row(sums + from / ELEMENT, g, w.x);
            if (where.x & 2) add_row(sums + (from + PIXEL_BYTES) / ELEMENT, g, w.y);
            if (where.x & 4) add_row(sums + (from + where.y) / ELEMENT, g, w.z);
            if (where.x & 8) add_row(sums + (from + where.y + PIXEL_BYTES) / ELEMENT, g, w.w);
        }
        if constexpr (DOTS) {
            float d[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) d[c] = stack[log2_of(LANES)][c];
            if constexpr (!SAFE) {
                const int right = s.x0 - x, below = s.y0 - y;  // of the cell, as seen from what was read
#pragma unroll
                for (int c = 0; c < 4; c += 2) {
                    const float first = d[c], second = d[c + 1];
                    d[c] = right == 0 ? first : right == 1 ? second : 0.0f;
                    d[c + 1] = right == 0 ? second : right == -1 ? first : 0.0f;
                }
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float first = d[c], second = d[c + 2];
                    d[c] = below == 0 ? first : below == 1 ? second : 0.0f;
                    d[c + 2] = below == 0 ? second : below == -1 ? first : 0.0f;
                }
            }
            if (mine) store_gradients(p, (long long)row * K + k, s, level, weight, d);
        }
        __syncwarp();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward(const __grid_constant__ Problem p) {
    __shared__ Shared shared;
    fill_tables(p, shared.tables);
    const int j = threadIdx.x % LANES;
    for_queries(p, shared.tables, shared.units, [&](unsigned base, unsigned row, bool exists) {
        float g[VEC] = {};
        if (exists) unpack(load_at(p.grad_out, row * ROW_BYTES + j * LANE_BYTES), g);
        if (!shared.tables.thin)
            differentiate<false>(p, shared, base, row, exists, g);
        else
            differentiate<true>(p, shared, base, row, exists, g);
    });
}
