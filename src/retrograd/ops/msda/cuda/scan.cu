// Where the samples of a bin begin.

#include "common.cuh"

// One CTA a slice of bins (x) and image and head (y): counts become the place of a chunk's first sample in a bin.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scan(const __grid_constant__ Problem p) {
    static_assert(THREADS == SLICE, "a thread has a bin");
    __shared__ unsigned partial[WARPS], before;
    const int slices = gridDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long bin = blockIdx.x * SLICE + threadIdx.x;
    unsigned* counts = p.counts + blockIdx.y * p.chunks * p.bins + bin;
    unsigned mine = 0;
    if (bin < p.bins)
#pragma unroll 8
        for (int c = 0; c < p.chunks; ++c) mine += counts[c * p.bins];
    unsigned sum = 0;
    for (int i = threadIdx.x; i < p.chunks * (int)blockIdx.x; i += THREADS)
        sum += p.sums[((long long)blockIdx.y * p.chunks + i / blockIdx.x) * slices + i % blockIdx.x];
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    if (sum) atomicAdd(&before, sum);  // of integers: any order
    unsigned inclusive = mine;
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(ALL, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == 31) partial[warp] = inclusive;
    __syncthreads();
    unsigned place = before + inclusive - mine;
    for (int w = 0; w < warp; ++w) place += partial[w];
    if (bin < p.bins) {
        unsigned* starts = p.starts + blockIdx.y * (p.bins + 1) + bin;
        starts[0] = place;
        if (bin == p.bins - 1) starts[1] = place + mine;
#pragma unroll 8
        for (int c = 0; c < p.chunks; ++c) {
            const unsigned count = counts[c * p.bins];
            counts[c * p.bins] = place;
            place += count;
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.ticket = 0;
}
