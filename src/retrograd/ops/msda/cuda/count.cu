// How many samples of each chunk of queries lie in each bin.

#include "bins.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) count(const __grid_constant__ Problem p) {
    __shared__ Tables tables;
    const int from = blockIdx.y * p.band, band = band_of(p, from);
    for (int bin = threadIdx.x; bin < band; bin += THREADS) bins[bin] = 0;
    fill_tables(p, tables);
    for_samples(p, tables, from, band, [&](int, int, int bin) {
        if (bin >= 0) atomicAdd(&bins[bin], 1u);
    });
    __syncthreads();
    const int slices = (int)((p.bins + SLICE - 1) / SLICE);
    for (int slice = threadIdx.x / 32; slice * SLICE < band; slice += WARPS) {
        unsigned sum = 0;
#pragma unroll 8
        for (int i = threadIdx.x % 32; i < SLICE; i += 32) {
            if (slice * SLICE + i >= band) break;
            const unsigned count = bins[slice * SLICE + i];
            p.counts[blockIdx.x * p.bins + from + slice * SLICE + i] = count;
            sum += count;
        }
        for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(ALL, sum, mask);
        if (threadIdx.x % 32 == 0) p.sums[(long long)blockIdx.x * slices + from / SLICE + slice] = sum;
    }
}
