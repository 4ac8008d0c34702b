// The samples of a part of the queries and the bins (pixels, if ORDERED cells) they are sorted into.

#pragma once
#include "common.cuh"

namespace {

extern __shared__ unsigned bins[];

__device__ __forceinline__ int band_of(const Problem& p, int from) {
    return (int)(p.bins - from < p.band ? p.bins - from : p.band);
}

// No gradient, of a point that touches nothing.
__device__ __forceinline__ void store_zeros(const Problem& p, long long at) {
    if (p.grad_weights) store_point(p.grad_weights, at, 0.0f);
    if (p.grad_locations) store_location(p.grad_locations, at, 0.0f, 0.0f);
}

// A part of an image's queries for one head: whole units, whose order is the order of the samples in a bin.
struct Chunk {
    int image_head, begin, end;  // units
    int first_unit;              // of the image and head

    __device__ Chunk(const Problem& p, const Units& units) : image_head(blockIdx.x / p.chunks) {
        const long long chunk = blockIdx.x % p.chunks;
        begin = (int)(units.per_image * chunk / p.chunks), end = (int)(units.per_image * (chunk + 1) / p.chunks);
        first_unit = image_head * units.per_image;
    }
};

// The bin of a sample among those of this CTA, or -2; where it is a pixel, a cell left of or above the level is in the
// first one inside.
__device__ __forceinline__ int bin_of(const Sample& s, Level level, int from, int band) {
    const int pixel = level.start + (s.y0 > 0 ? s.y0 : 0) * level.width + (s.x0 > 0 ? s.x0 : 0);
    const int bin = (ORDERED ? cell_of(s.x0, s.y0, level) : pixel) - from;
    return s.corners && bin >= 0 && bin < band ? bin : -2;
}

// Calls use(query, k, bin) for every sample of the chunk, in no order; bin is -1 for none and -2 for one of another CTA.
template <typename Use>
__device__ __forceinline__ void for_samples(const Problem& p, const Tables& tables, int from, int band, Use use) {
    constexpr int AHEAD = 4;
    const Units units(p, tables);
    const Chunk chunk(p, units);
    const int samples = p.unit_queries * K;
    for (int u = chunk.begin; u < chunk.end; ++u) {
        const Unit unit = units.unit(p, tables, chunk.first_unit + u);
        const long long row = unit.image * p.queries * HEADS + unit.head;
        for (int first = threadIdx.x; first < samples; first += THREADS * AHEAD) {
            float2 at[AHEAD];
            int query[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int i = first + a * THREADS;
                query[a] = i < samples ? Unit::query(unit, units.tiled, i / K) : -1;
                at[a] = load_location(p.locations, (row + (long long)max(query[a], 0) * HEADS) * K + i % K);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int k = (first + a * THREADS) % K;
                const Level level = tables.points[k];
                const Sample s = locate(at[a], level);
                if (query[a] >= 0) use(query[a], k, s.corners ? bin_of(s, level, from, band) : -1);
            }
        }
    }
}

}  // namespace
