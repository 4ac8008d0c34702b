// The samples as records, or if ORDERED their numbers, sorted by bin and within it by query.

#include "bins.cuh"

// A warp has a level's samples of the chunk and takes them in order, so that a bin keeps the order of the queries.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fill(const __grid_constant__ Problem p) {
    constexpr int AHEAD = 8, STEP = 32 * AHEAD;
    __shared__ Tables tables;
    const int from = blockIdx.y * p.band, band = band_of(p, from);
    for (int bin = threadIdx.x; bin < band; bin += THREADS)
        bins[bin] = p.counts[blockIdx.x * p.bins + from + bin];
    fill_tables(p, tables);
    const Units units(p, tables);
    const Chunk chunk(p, units);
    const int lane = threadIdx.x % 32, l = threadIdx.x / 32;
    int count = PER_LEVEL[0], k0 = 0;
    for (int i = 0; i < l; ++i) k0 += PER_LEVEL[i], count = PER_LEVEL[i + 1];
    if (count == 0) return;
    const Level level = tables.levels[l];
    Record* records = p.records + chunk.image_head * p.queries * K;
    unsigned* numbers = p.numbers + chunk.image_head * p.queries * K;
    const long long row = chunk.image_head / HEADS * p.queries * HEADS + chunk.image_head % HEADS;
    // A step of 32 * AHEAD samples lies in one unit, as a unit has 256 queries.
    const int steps = p.unit_queries / STEP * count, end = (chunk.end - chunk.begin) * steps;
    Unit unit;
    float2 at[AHEAD];
    float weight[AHEAD];
    int query[AHEAD];
    const auto load = [&](int a, int step) {
        const int i = step % steps * STEP + a * 32 + lane;
        query[a] = step < end ? Unit::query(unit, units.tiled, i / count) : -1;
        const long long sample = (row + (long long)max(query[a], 0) * HEADS) * K + k0 + i % count;
        at[a] = load_location(p.locations, sample);
        if constexpr (!ORDERED) weight[a] = load_point(p.weights, sample);
    };
    if (end > 0) unit = units.unit(p, tables, chunk.first_unit + chunk.begin);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) load(a, 0);
    for (int step = 0; step < end; ++step) {
        if ((step + 1) % steps == 0 && step + 1 < end)
            unit = units.unit(p, tables, chunk.first_unit + chunk.begin + (step + 1) / steps);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const Sample s = locate(at[a], level);
            const int bin = query[a] >= 0 ? bin_of(s, level, from, band) : -1;
            const int k = k0 + (step % steps * STEP + a * 32 + lane) % count;
            const unsigned moved = (s.x0 < 0 ? MOVED_X : 0u) | (s.y0 < 0 ? MOVED_Y : 0u);
            const unsigned number = (unsigned)query[a] * K + k;
            const uint4 record = make_uint4((unsigned)query[a] | moved, __float_as_uint(s.tx), __float_as_uint(s.ty),
                                            __float_as_uint(weight[a]));
            if (ORDERED && query[a] >= 0 && !s.corners && !from) store_zeros(p, (row + (long long)query[a] * HEADS) * K + k);
            load(a, step + 1);
            const unsigned same = __match_any_sync(ALL, bin), before = same & ((1u << lane) - 1);
            unsigned place = 0;
            if (bin >= 0) place = bins[bin];
            __syncwarp();
            if (bin >= 0 && !before) bins[bin] = place + __popc(same);
            __syncwarp();
            if (bin < 0) continue;
            if constexpr (ORDERED)
                numbers[place + __popc(before)] = number;
            else
                *(uint4*)&records[place + __popc(before)] = record;
        }
    }
}
