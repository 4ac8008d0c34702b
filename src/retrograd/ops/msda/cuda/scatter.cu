// The numbers of the samples, sorted by bin.

#include "bins.cuh"

// The samples of a bin in any order, for sums that are no less any order; gradients of points that touch nothing.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scatter(const __grid_constant__ Problem p) {
    __shared__ Tables tables;
    const int from = blockIdx.y * p.band, band = band_of(p, from);
    for (int bin = threadIdx.x; bin < band; bin += THREADS)
        bins[bin] = p.counts[blockIdx.x * p.bins + from + bin];
    fill_tables(p, tables);
    const int image_head = blockIdx.x / p.chunks;
    unsigned* numbers = p.numbers + image_head * p.queries * K;
    const long long row = image_head / HEADS * p.queries * HEADS + image_head % HEADS;
    for_samples(p, tables, from, band, [&](int query, int k, int bin) {
        if (bin >= 0) numbers[atomicAdd(&bins[bin], 1u)] = (unsigned)query * K + k;
        if (bin != -1 || from) return;
        store_zeros(p, (row + (long long)query * HEADS) * K + k);
    });
}
