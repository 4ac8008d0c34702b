// The forward: out of value, locations and weights.

#include "common.cuh"

namespace {

struct Shared {
    Tables tables;
    float4 shares[WARPS][32];  // of the corners, times the weight
    uint2 places[WARPS][32];   // offset of the first corner | corners; offset to the row below
    Unit units[WARPS];
};

// The rows of a group's query; SAFE reads only corners that are inside. Otherwise pixels nearby stand for those
// outside, with a share of 0: four loads without a branch, right unless one of them is not finite.
template <bool SAFE>
__device__ __forceinline__ void attend(const Problem& p, Shared& shared, unsigned base, unsigned row, bool exists,
                                       float (&total)[VEC]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
#pragma unroll
    for (int v = 0; v < VEC; ++v) total[v] = 0.0f;
    Point next = load_own(p, row, exists, j);
#pragma unroll 1
    for (int batch = 0; batch < K; batch += LANES) {
        const int k = batch + j;
        const Point point = next;
        next = load_own(p, row, exists, k + LANES);
        float4 share = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        uint2 place = make_uint2(0, 0);
        if (exists && k < K) {
            const float weight = point.weight;
            const Level level = shared.tables.points[k];
            const Sample s = locate(point.at, level);
            float left = 1.0f - s.tx, right = s.tx, upper = 1.0f - s.ty, lower = s.ty;
            int x = s.x0, y = s.y0;
            if constexpr (!SAFE) {
                x = nearest_pair(s.x0, level.width), y = nearest_pair(s.y0, level.height);
                left = s.x0 == x ? left : s.x0 < x ? right : 0.0f;
                right = s.x0 == x ? right : s.x0 > x ? 1.0f - s.tx : 0.0f;
                upper = s.y0 == y ? upper : s.y0 < y ? lower : 0.0f;
                lower = s.y0 == y ? lower : s.y0 > y ? 1.0f - s.ty : 0.0f;
            }
            upper *= weight, lower *= weight;
            share = make_float4(upper * left, upper * right, lower * left, lower * right);
            place.x = (unsigned)(level.start + y * level.width + x) * PIXEL_BYTES | (SAFE ? s.corners : 0u);
            place.y = level.width * PIXEL_BYTES;
        }
        shared.shares[warp][j * GROUPS + group] = share;
        shared.places[warp][j * GROUPS + group] = place;
        __syncwarp();
#pragma unroll(SAFE ? 1 : LANES)
        for (int i = 0; i < LANES; ++i) {
            if (batch + i >= K) break;
            const float4 w = shared.shares[warp][i * GROUPS + group];
            const uint2 where = shared.places[warp][i * GROUPS + group];
            Raw raw[4] = {};
            read_corners<SAFE>(p, base, where, raw);
            const float shares[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float values[VEC];
                unpack(raw[c], values);
#pragma unroll
                for (int v = 0; v < VEC; ++v) total[v] = fmaf(shares[c], values[v], total[v]);
            }
        }
        __syncwarp();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ Problem p) {
    __shared__ Shared shared;
    fill_tables(p, shared.tables);
    const int j = threadIdx.x % LANES;
    for_queries(p, shared.tables, shared.units, [&](unsigned base, unsigned row, bool exists) {
        float total[VEC];
        bool finite = false;
        if (!shared.tables.thin) {
            attend<false>(p, shared, base, row, exists, total);
            finite = true;
#pragma unroll
            for (int v = 0; v < VEC; ++v) finite = finite && fabsf(total[v]) < INFINITE;
        }
        if (!__all_sync(ALL, finite)) attend<true>(p, shared, base, row, exists, total);
        if (exists) store_row(p.out + (row * ROW_BYTES + j * LANE_BYTES), total);
    });
}
