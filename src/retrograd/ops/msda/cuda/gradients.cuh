// What the two kernels share that compute gradients of locations and weights, and add rows atomically.

#pragma once
#include "common.cuh"

namespace {

__device__ __forceinline__ void add_row(float* to, const float (&g)[VEC], float share) {
#pragma unroll
    for (int v = 0; v < VEC; v += 4) {
#if __CUDA_ARCH__ >= 900
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + v), "f"(share * g[v]),
                     "f"(share * g[v + 1]), "f"(share * g[v + 2]), "f"(share * g[v + 3])
                     : "memory");
#else
        for (int i = 0; i < 4; ++i) atomicAdd(to + v + i, share * g[v + i]);
#endif
    }
}

__device__ constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// Of two samples' four sums each, the lanes keep one sample's and add what their partner has of it.
__device__ __forceinline__ void merge(float (&even)[4], const float (&odd)[4], int lane, int bit) {
    const bool high = lane >> bit & 1;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float sent = high ? even[c] : odd[c], kept = high ? odd[c] : even[c];
        even[c] = kept + __shfl_xor_sync(ALL, sent, 1 << bit);
    }
}

// Takes in the sums of sample i, samples in ascending order; after the last a lane's own sample is on top of the stack.
__device__ __forceinline__ void collect(float (&stack)[log2_of(LANES) + 1][4], float (&dots)[4], int i, int lane) {
    int bit = 0;
#pragma unroll
    for (; (i >> bit & 1) != 0; ++bit) {
        merge(stack[bit], dots, lane, bit);
#pragma unroll
        for (int c = 0; c < 4; ++c) dots[c] = stack[bit][c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) stack[bit][c] = dots[c];
}

// Of one point, from the dot products of grad_out and its four corners.
__device__ __forceinline__ void store_gradients(const Problem& p, long long at, const Sample& s, Level level,
                                                float weight, const float (&d)[4]) {
    const float rx = 1.0f - s.tx, ry = 1.0f - s.ty;
    if (p.grad_weights)
        store_point(p.grad_weights, at, ry * (rx * d[0] + s.tx * d[1]) + s.ty * (rx * d[2] + s.tx * d[3]));
    if (p.grad_locations) {
        // Each part times its own share: a difference of parts would lose what a small share leaves of a large one.
        const float along_x = fmaf(s.ty, d[3] - d[2], ry * (d[1] - d[0]));
        const float along_y = fmaf(s.tx, d[3] - d[1], rx * (d[2] - d[0]));
        const float scale_x = (float)(ALIGNED ? level.width - 1 : level.width);
        const float scale_y = (float)(ALIGNED ? level.height - 1 : level.height);
        store_location(p.grad_locations, at, s.moves_x ? along_x * scale_x * weight : 0.0f,
                       s.moves_y ? along_y * scale_y * weight : 0.0f);
    }
}

}  // namespace
