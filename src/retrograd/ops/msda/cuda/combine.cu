// grad_value of the parts of cells that `cells` has kept, pixel by pixel.

#include "common.cuh"

// A group takes a pixel of one image and head (blockIdx.y). Its row is the sum of one corner's rows of each of the four
// cells around it, in a fixed order: a cell's own part, then those of the segments that it goes on in.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) combine(const __grid_constant__ Problem p) {
    __shared__ Tables tables;
    fill_tables(p, tables);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    const long long pixel = (long long)(blockIdx.x * WARPS + warp) * GROUPS + group;
    if (pixel >= p.pixels) return;
    const unsigned* starts = p.starts + blockIdx.y * (p.bins + 1);
    const long long segments = (p.queries * K + SEGMENT - 1) / SEGMENT;
    const float* parts = p.partials + blockIdx.y * (p.bins + segments) * 4 * CHANNELS + j * VEC;
    const auto part = [&](unsigned number, int corner) {
        return __ldg((const float4*)(parts + (number * 4ull + corner) * CHANNELS));
    };
    Level level = {};
    for (const Level& other : tables.levels)
        if (pixel >= other.start && pixel - other.start < (long long)other.width * other.height) level = other;
    float sum[VEC] = {};
    const auto add = [&](float4 row) { sum[0] += row.x, sum[1] += row.y, sum[2] += row.z, sum[3] += row.w; };
    if (level.width) {
        const int inside = (int)(pixel - level.start), x = inside % level.width, y = inside / level.width;
        unsigned begin[4], last[4];  // segment of a cell's first sample, and after the one of its last
        float4 own[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int cell = cell_of(x - c % 2, y - c / 2, level);
            const unsigned first = __ldg(starts + cell), end = __ldg(starts + cell + 1);
            begin[c] = first / SEGMENT, last[c] = first < end ? (end - 1) / SEGMENT + 1 : begin[c];
            // The last part of the cell to the left went on to the one to the right, if that begins in its segment.
            if (c % 2 && first < end && end % SEGMENT && end < __ldg(starts + cell + 2)) --last[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            own[c] = begin[c] < last[c] ? part(cell_of(x - c % 2, y - c / 2, level), c) : float4{};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            add(own[c]);
            for (unsigned segment = begin[c] + 1; segment < last[c]; ++segment) add(part((unsigned)p.bins + segment, c));
        }
    }
    store_row(p.grad_value + ((blockIdx.y / HEADS * p.pixels + pixel) * HEADS + blockIdx.y % HEADS) * ROW_BYTES +
                  j * LANE_BYTES,
              sum);
}
