// Backward of RMSNorm and LayerNorm over wide rows: a cluster of CTAs, or one CTA, a row (sm_90 and later).
//
// Clusters stay, to keep their sums for weight and bias in registers, and take every groups-th row. A CTA has its slices
// of s and grad_out of SLOTS rows in shared memory, so that every element is read from memory once. A row is looked at
// twice there: a row before its turn its sums are sent to the CTAs of the cluster, warp by warp, through distributed
// shared memory; at its turn those of all warps have come and are added up, in one order everywhere. In shared memory
// only the thread that is to use an element writes and reads it: a piece is overwritten by that of a later row, which is
// asked for as soon as it has been used. So threads of a CTA wait for each other only where they wait for the words.
//
// Words lie in a ring of ROUND rows. While the slowest warp of the cluster reads those of row r, it has sent its own of
// row r + 1; others, which take a row only when all its words have come, send those of row r + 3 at most.
//
// The order of every sum over a row depends on N and the macros, that over rows on the number of clusters too.

#ifndef N  // for inspection by hand; backward.py gives all of them
#define N 131072
#define CLUSTER 8
#define THREADS 256
#define SLOTS 3
#define CENTERED 1
#define S_TYPE 1
#define GRAD_OUT_TYPE 1
#define WEIGHT_TYPE 1
#define GRAD_TYPE 1
#define WEIGHT_SUM 1
#define BIAS_SUM 1
#define HAS_OFFSET 0
#endif

#define STREAMS S_TYPE, GRAD_OUT_TYPE, GRAD_TYPE
#include "wide.cuh"

namespace {

constexpr bool HAS_WEIGHT = WEIGHT_TYPE != NONE;
constexpr int S_SIZE = size_of(S_TYPE), GRAD_OUT_SIZE = size_of(GRAD_OUT_TYPE);
constexpr int GRAD_SIZE = size_of(GRAD_TYPE), WEIGHT_SIZE = size_of(WEIGHT_TYPE);

constexpr int SLICE = N / CLUSTER;
constexpr int STEP = THREADS * VEC;  // from a thread's piece to its next
constexpr int VECS = SLICE / STEP;
constexpr int WARPS = THREADS / 32;
constexpr int WORDS = WARPS * CLUSTER;
constexpr int ROUND = 4;
constexpr int GRAD_OUT_AT = SLICE * S_SIZE;  // in a slot
constexpr int SLOT = SLICE * (S_SIZE + GRAD_OUT_SIZE);

static_assert(THREADS % 32 == 0 && CLUSTER <= 16 && SLICE * CLUSTER == N && VECS * STEP == SLICE, "whole pieces");
static_assert(SLOTS >= 3, "a row at its turn, the next, and one on its way");

struct Shared {
    unsigned long long there[ROUND];
    float2 words[ROUND][WORDS];  // of each warp of the cluster: sums of g * xhat and of g
};

__device__ __forceinline__ void arrive(const void* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ float load_float(const float* from) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_backward(
    const char* __restrict__ grad_out,  // [M, N], rows grad_out_stride elements apart
    const char* __restrict__ s_in,      // [M, N], rows s_stride elements apart
    const char* __restrict__ weight,    // [N] or none
    const float* __restrict__ mean_in,  // [M], if CENTERED
    const float* __restrict__ rstd_in,  // [M]
    char* __restrict__ grad,            // [M, N] contiguous
    float* __restrict__ weight_parts,   // [groups, N], if WEIGHT_SUM
    float* __restrict__ bias_parts,     // [groups, N], if BIAS_SUM
    long long grad_out_stride, long long s_stride, int rows, float weight_offset) {
    __shared__ Shared shared;
    extern __shared__ __align__(128) char buffers[];
    wait_for_kernels_ahead();

    const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER, groups = gridDim.x / CLUSTER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_column = rank * SLICE + threadIdx.x * VEC;
    const Policy policy = evicted_last();

    if (threadIdx.x == 0) {
        for (int i = 0; i < ROUND; ++i) barrier_init(&shared.there[i], CLUSTER > 1 ? 1 : WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if constexpr (CLUSTER > 1)
            for (int i = 0; i < ROUND; ++i) arrive_expecting(&shared.there[i], WORDS * sizeof(float2));
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive();

    // A slot goes by where this thread's first piece of s lies in it.
    const Address first_slot = of_this_thread(address(buffers) + threadIdx.x * VEC * S_SIZE);
    const Address last_slot = first_slot + (SLOTS - 1) * SLOT;
    const auto next = [&](Address slot) { return slot == last_slot ? first_slot : slot + SLOT; };
    const auto s_at = [](Address slot, int j) { return slot + j * STEP * S_SIZE; };
    const auto grad_out_at = [](Address slot, int j) {
        return slot + threadIdx.x * VEC * (GRAD_OUT_SIZE - S_SIZE) + GRAD_OUT_AT + j * STEP * GRAD_OUT_SIZE;
    };
    const auto ask = [&](Address slot, long long row, int j) {
        const int column = first_column + j * STEP;
        copy_in<VEC * S_SIZE>(s_at(slot, j), s_in + (row * s_stride + column) * S_SIZE, policy);
        copy_in<VEC * GRAD_OUT_SIZE>(grad_out_at(slot, j), grad_out + (row * grad_out_stride + column) * GRAD_OUT_SIZE,
                                     policy);
    };
    const auto s_of = [&](Address slot, int j, float (&s)[VEC]) { widen<S_TYPE>(load_shared<S_TYPE>(s_at(slot, j)), s); };
    const auto grad_out_of = [&](Address slot, int j, float (&g)[VEC]) {
        widen<GRAD_OUT_TYPE>(load_shared<GRAD_OUT_TYPE>(grad_out_at(slot, j)), g);
    };
    // A group of copies a row, empty ones too, so that how many may be under way is always the same.
    const auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const long long row = group + static_cast<long long>(i) * groups;
        if (row < rows)
#pragma unroll
            for (int j = 0; j < VECS; ++j) ask(first_slot + i * SLOT, row, j);
        commit();
    }
    Raw<WEIGHT_TYPE> weights[VECS];
    if constexpr (HAS_WEIGHT)
#pragma unroll
        for (int j = 0; j < VECS; ++j)
            weights[j] = load_global<WEIGHT_TYPE>(weight + (first_column + j * STEP) * WEIGHT_SIZE);
    const auto scale_of = [&](int j, float (&scale)[VEC]) {
        widen<WEIGHT_TYPE>(here(weights[j]), scale);
        if constexpr (HAS_OFFSET)
#pragma unroll
            for (int e = 0; e < VEC; ++e) scale[e] += weight_offset;
    };
    const auto mean_of = [&](long long row) {
        return CENTERED ? load_float(mean_in + min(row, static_cast<long long>(rows - 1))) : 0.0f;
    };
    const auto rstd_of = [&](long long row) {
        return load_float(rstd_in + min(row, static_cast<long long>(rows - 1)));
    };

    const auto publish = [&](Address slot, int round, float mean, float rstd) {
        float products[4] = {0.0f, 0.0f, 0.0f, 0.0f}, plain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < VECS; ++j) {
            float s[VEC], g[VEC], scale[VEC];
            s_of(slot, j, s);
            grad_out_of(slot, j, g);
            if constexpr (HAS_WEIGHT) scale_of(j, scale);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if constexpr (HAS_WEIGHT) g[e] *= scale[e];
                products[e % 4] = fmaf(g[e], CENTERED ? s[e] - mean : s[e], products[e % 4]);
                if constexpr (CENTERED) plain[e % 4] += g[e];
            }
        }
        float2 word = {warp_sum((products[0] + products[1]) + (products[2] + products[3])) * rstd, 0.0f};
        if constexpr (CENTERED) word.y = warp_sum((plain[0] + plain[1]) + (plain[2] + plain[3]));
        if constexpr (CLUSTER > 1) {
            if (lane < CLUSTER) send(&shared.words[round][rank * WARPS + warp], &shared.there[round], lane, word);
        } else if (lane == 0) {
            shared.words[round][warp] = word;
            arrive(&shared.there[round]);
        }
    };
    Address ahead_slot = first_slot;
    int ahead_round = 0;
    float ahead_mean = mean_of(group), ahead_rstd = rstd_of(group);
    const auto publish_next = [&](long long row) {
        asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 2) : "memory");
        const float mean = ahead_mean, rstd = ahead_rstd;
        ahead_mean = mean_of(row + groups);  // asked for a row before they are used
        ahead_rstd = rstd_of(row + groups);
        if (row < rows) publish(ahead_slot, ahead_round, mean, rstd);
        ahead_slot = next(ahead_slot);
        ahead_round = (ahead_round + 1) % ROUND;
    };

    float weight_sum[WEIGHT_SUM ? VECS : 1][VEC] = {}, bias_sum[BIAS_SUM ? VECS : 1][VEC] = {};
    if constexpr (CLUSTER > 1) cluster_wait();
    publish_next(group);
    Address slot = first_slot;
    int round = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (long long row = group; row < rows; row += groups) {
        const float mean = mean_of(row), rstd = rstd_of(row);
        publish_next(row + groups);
        wait(&shared.there[round], parity);
        float projection = 0.0f, shift = 0.0f;
#pragma unroll
        for (int of = lane; of < over(WORDS, 32) * 32; of += 32)
            if (WORDS % 32 == 0 || of < WORDS) {
                projection += shared.words[round][of].x;
                shift += shared.words[round][of].y;
            }
        projection = warp_sum(projection) * (1.0f / N);
        if constexpr (CENTERED) shift = warp_sum(shift) * (1.0f / N) * rstd;
        // Before its next phase ends every warp has read the words of this one; see above.
        if (CLUSTER > 1 && threadIdx.x == 0) arrive_expecting(&shared.there[round], WORDS * sizeof(float2));

        const long long later = row + static_cast<long long>(SLOTS) * groups;
        char* const to = grad + (row * N + first_column) * GRAD_SIZE;
#pragma unroll
        for (int j = 0; j < VECS; ++j) {
            float s[VEC], g[VEC], scale[VEC];
            s_of(slot, j, s);
            grad_out_of(slot, j, g);
            if (later < rows) ask(slot, later, j);
            if constexpr (HAS_WEIGHT) scale_of(j, scale);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float h = (CENTERED ? s[e] - mean : s[e]) * rstd;
                if constexpr (BIAS_SUM) bias_sum[j][e] += g[e];
                if constexpr (WEIGHT_SUM) weight_sum[j][e] = fmaf(g[e], h, weight_sum[j][e]);
                if constexpr (HAS_WEIGHT) g[e] *= scale[e];
                s[e] = fmaf(-h, projection, g[e]) * rstd;
                if constexpr (CENTERED) s[e] -= shift;
            }
            // Passing, and with the policy of reads: RMSNorm 3 to 5 % at 131072 and 65536 columns, LayerNorm up to 1 %.
            store_global<GRAD_TYPE, true>(to + j * STEP * GRAD_SIZE, rounded<GRAD_TYPE>(s));
        }
        commit();
        slot = next(slot);
        round = (round + 1) % ROUND;
        parity ^= round == 0;
    }

    const auto put = [&](float* parts, const float (&sums)[VEC], int j) {
        float* const part = parts + static_cast<long long>(group) * N + first_column + j * STEP;
#pragma unroll
        for (int e = 0; e < VEC; e += 4)
            *reinterpret_cast<float4*>(part + e) = make_float4(sums[e], sums[e + 1], sums[e + 2], sums[e + 3]);
    };
#pragma unroll
    for (int j = 0; j < VECS; ++j) {
        if constexpr (WEIGHT_SUM) put(weight_parts, weight_sum[j], j);
        if constexpr (BIAS_SUM) put(bias_parts, bias_sum[j], j);
    }
    if constexpr (CLUSTER > 1) {  // what it sent last has to find its CTA
        cluster_arrive();
        cluster_wait();
    }
}
