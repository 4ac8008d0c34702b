// Forward of RMSNorm and LayerNorm, one wide row a cluster of CTAs or a CTA (sm_90 and later).
//
// A CTA copies its slice of SLICE columns to shared memory, asks for the first BATCH pieces of weight and bias meanwhile,
// sums the slice up, sends the sums of its warps to every CTA of the cluster through distributed shared memory, waits for
// those of the others, and writes its slice of y. Every element is read from memory once; in shared memory only the
// thread that is to use an element reads it. A CTA lives for one row: while some of the multiprocessors' CTAs wait for
// memory or for each other, others store. What of weight and bias finds no room in registers comes through registers
// later, or into places in shared memory that x has left (HOLD).
//
// Each warp sends its own sums to a place of their own and adds up all that have come, in one order everywhere. One
// barrier counts them by bytes. Before anything is sent all CTAs of the cluster have met, so that they run and their
// barriers are set; afterwards a CTA may end as soon as it has all sums, because none is sent to it later and what it
// sent itself is on its way to CTAs that wait for it.
//
// The order of every sum depends on N and the macros, never on the number of rows.

#ifndef N  // for inspection by hand; launch.py gives all of them
#define N 65536
#define CLUSTER 2
#define THREADS 512
#define RESIDENT 2
#define BATCH 8
#define HOLD 0
#define BULK 1
#define CENTERED 0
#define X_TYPE 1
#define RESIDUAL_TYPE -1
#define WEIGHT_TYPE 1
#define BIAS_TYPE -1
#define Y_TYPE 1
#define S_TYPE 1
#define STORE_S 0
#define HAS_OFFSET 0
#endif

#define STREAMS X_TYPE, RESIDUAL_TYPE, Y_TYPE, S_TYPE
#include "wide.cuh"

namespace {

constexpr bool HAS_RESIDUAL = RESIDUAL_TYPE != NONE;
constexpr bool HAS_WEIGHT = WEIGHT_TYPE != NONE;
constexpr bool HAS_BIAS = BIAS_TYPE != NONE;
constexpr int X_SIZE = size_of(X_TYPE), RESIDUAL_SIZE = size_of(RESIDUAL_TYPE), S_SIZE = size_of(S_TYPE);
constexpr int Y_SIZE = size_of(Y_TYPE), WEIGHT_SIZE = size_of(WEIGHT_TYPE), BIAS_SIZE = size_of(BIAS_TYPE);

constexpr int SLICE = over(N, 64 * CLUSTER) * 64;
constexpr int VECS = over(SLICE, VEC * THREADS);
constexpr bool FULL = N == SLICE * CLUSTER && SLICE % (VEC * THREADS) == 0;
constexpr int WARPS = THREADS / 32;
constexpr int WORDS = WARPS * CLUSTER;

// s replaces x in shared memory where it fits into the place of its own x; else it is computed again.
constexpr bool ROUNDS = HAS_RESIDUAL || S_TYPE != X_TYPE;
constexpr bool IN_PLACE = HAS_RESIDUAL && S_SIZE <= X_SIZE;

// From a thread's piece to its next.
constexpr int STEP = THREADS * VEC;
constexpr int X_STEP = STEP * X_SIZE, RESIDUAL_STEP = STEP * RESIDUAL_SIZE;
constexpr int RESIDUAL_AT = SLICE * X_SIZE;

static_assert(THREADS % 32 == 0 && THREADS <= 1024 && CLUSTER <= 16 && N % 8 == 0, "pieces of 16 bytes");

// With HOLD, what comes after the first BATCH pieces of weight and bias is copied to places in shared memory that x has
// left: a thread takes HOLD pieces of x ahead, the first of them before it waits for the other warps' sums. In registers
// there is room for BATCH of eight and more pieces, and each further batch would wait for L2: 4 % of the whole.
struct Schedule {
    int place[2 * VECS];  // of piece j of the weight (2 j) and of the bias (2 j + 1)
    int step[2 * VECS];   // when it is asked for: after piece `step` of x was taken, -1 with the first HOLD
};

__host__ __device__ constexpr Schedule schedule_of_vectors() {
    Schedule all = {};
    int places[3 * VECS] = {}, given = 0, taken = 0, next = 2 * BATCH;
    for (int step = -1; step < VECS; ++step) {
        if (step >= BATCH) {
            places[given++] = all.place[2 * step];
            places[given++] = all.place[2 * step + 1];
        }
        for (int j = step < 0 ? 0 : step + HOLD; j < VECS && j < (step < 0 ? HOLD : step + HOLD + 1); ++j)
            places[given++] = j;
        for (; taken < given && next < 2 * VECS; ++next) {
            all.place[next] = places[taken++];
            all.step[next] = step;
        }
    }
    return all;
}

constexpr bool FITS = FULL && !ROUNDS && WEIGHT_SIZE == X_SIZE && BIAS_SIZE == X_SIZE;
static_assert(HOLD == 0 || (FITS && !BULK), "a place of x holds a piece of weight or bias, written in the same way");

constexpr Schedule VECTORS = schedule_of_vectors();

template <int NUMBER>
struct Int {
    static constexpr int value = NUMBER;
};

template <int FROM, int TO, class Step>
__device__ __forceinline__ void for_each(const Step& step) {
    if constexpr (FROM < TO) {
        step(Int<FROM>());
        for_each<FROM + 1, TO>(step);
    }
}

struct Shared {
    unsigned long long x_there, words_there;
    float2 words[WORDS];  // of each warp of the cluster: sum of squares; or sum, squares about the warp's mean
};

// s = x + residual as stored, of one piece.
__device__ __forceinline__ Raw<S_TYPE> load_s(Address x_at, Address residual_at) {
    const Raw<X_TYPE> x = load_shared<X_TYPE>(x_at);
    if constexpr (!ROUNDS) {
        Raw<S_TYPE> s;
#pragma unroll
        for (int i = 0; i < Raw<S_TYPE>::WORDS; ++i) s.word[i] = x.word[i];  // the types are the same
        return s;
    } else {
        float s[VEC];
        widen<X_TYPE>(x, s);
        if constexpr (HAS_RESIDUAL) {
            float residual[VEC];
            widen<RESIDUAL_TYPE>(load_shared<RESIDUAL_TYPE>(residual_at), residual);
#pragma unroll
            for (int i = 0; i < VEC; ++i) s[i] += residual[i];
        }
        return rounded<S_TYPE>(s);
    }
}

// Columns of slice `rank`.
__device__ __forceinline__ int columns_of(int rank) { return max(0, min(SLICE, N - rank * SLICE)); }

// Of these columns, those of a warp: of pieces warp * 32 + lane + j * THREADS.
__device__ __forceinline__ float columns_of_warp(int columns, int warp) {
    int pieces = 0;
#pragma unroll
    for (int j = 0; j < VECS; ++j) pieces += max(0, min(32, columns / VEC - j * THREADS - warp * 32));
    return static_cast<float>(pieces * VEC);
}

__device__ __forceinline__ float mean_of(float sum, float count) {
    constexpr int ALL = VECS * VEC * 32;
    if constexpr (FULL && (ALL & (ALL - 1)) == 0) return sum * (1.0f / ALL);  // exact
    return count > 0 ? __fdiv_rn(sum, count) : 0.0f;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) wide_forward(
    const char* __restrict__ x,         // [M, N], rows x_stride elements apart
    const char* __restrict__ residual,  // [M, N] or none
    const char* __restrict__ weight,    // [N] or none
    const char* __restrict__ bias,      // [N] or none
    char* __restrict__ y,               // [M, N] contiguous
    char* __restrict__ s_out,           // [M, N] contiguous, if STORE_S
    float* __restrict__ mean_out,       // [M] or null
    float* __restrict__ rstd_out,       // [M] or null
    long long x_stride, long long residual_stride, float eps, float weight_offset) {
    __shared__ Shared shared;
    extern __shared__ __align__(128) char buffers[];
    wait_for_kernels_ahead();

    const long long row = blockIdx.x / CLUSTER;
    const int rank = blockIdx.x % CLUSTER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int columns = columns_of(rank);
    const long long slice = static_cast<long long>(rank) * SLICE, first_column = slice + threadIdx.x * VEC;
    const auto exists = [&](int j) { return FULL || (j * THREADS + static_cast<int>(threadIdx.x)) * VEC < columns; };
    const char* const x_from = x + row * x_stride * X_SIZE;
    const Policy policy = evicted_last();
    const char* const residual_from = residual + row * residual_stride * RESIDUAL_SIZE;

    if constexpr (BULK || CLUSTER > 1) {
        if (threadIdx.x == 0) {
            barrier_init(&shared.x_there, 1);
            barrier_init(&shared.words_there, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            arrive_expecting(&shared.words_there, WORDS * sizeof(float2));
            if constexpr (BULK) {
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                arrive_expecting(&shared.x_there, columns * (X_SIZE + RESIDUAL_SIZE));
                copy_slice(address(buffers), x_from + slice * X_SIZE, columns * X_SIZE, &shared.x_there,
                           policy);
                if constexpr (HAS_RESIDUAL)
                    copy_slice(address(buffers) + RESIDUAL_AT, residual_from + slice * RESIDUAL_SIZE,
                               columns * RESIDUAL_SIZE, &shared.x_there, policy);
            }
        }
        __syncwarp();
        cluster_arrive();
    }

    const Address x_at = of_this_thread(address(buffers) + threadIdx.x * VEC * X_SIZE);
    const Address residual_at = of_this_thread(address(buffers) + RESIDUAL_AT + threadIdx.x * VEC * RESIDUAL_SIZE);
    if constexpr (!BULK) {
#pragma unroll
        for (int j = 0; j < VECS; ++j) {
            if (!exists(j)) continue;
            copy_in<VEC * X_SIZE>(x_at + j * X_STEP, x_from + first_column * X_SIZE + j * X_STEP, policy);
            if constexpr (HAS_RESIDUAL)
                copy_in<VEC * RESIDUAL_SIZE>(residual_at + j * RESIDUAL_STEP,
                                             residual_from + first_column * RESIDUAL_SIZE + j * RESIDUAL_STEP, policy);
        }
    }
    Raw<WEIGHT_TYPE> weights[BATCH];
    Raw<BIAS_TYPE> biases[BATCH];
    const auto ask_for_vectors = [&](int first) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i >= VECS || !exists(first + i)) continue;
            const long long column = first_column + (first + i) * STEP;
            if constexpr (HAS_WEIGHT) weights[i] = load_global<WEIGHT_TYPE>(weight + column * WEIGHT_SIZE);
            if constexpr (HAS_BIAS) biases[i] = load_global<BIAS_TYPE>(bias + column * BIAS_SIZE);
        }
    };
    ask_for_vectors(0);
    if constexpr (BULK || CLUSTER > 1) cluster_wait();
    if constexpr (BULK)
        wait(&shared.x_there, 0);
    else
        asm volatile("cp.async.wait_all;" ::: "memory");

    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    char* const s_to = s_out + (row * N + first_column) * S_SIZE;
#pragma unroll BATCH
    for (int j = 0; j < VECS; ++j) {
        if (!exists(j)) continue;
        const Raw<S_TYPE> stored = load_s(x_at + j * X_STEP, residual_at + j * RESIDUAL_STEP);
        if constexpr (IN_PLACE) store_shared<S_TYPE>(x_at + j * X_STEP, stored);
        if constexpr (STORE_S) store_global<S_TYPE>(s_to + j * STEP * S_SIZE, stored);
        float s[VEC];
        widen<S_TYPE>(stored, s);
#pragma unroll
        for (int e = 0; e < VEC; ++e)
            lanes[e % 4] = CENTERED ? lanes[e % 4] + s[e] : fmaf(s[e], s[e], lanes[e % 4]);
    }
    const auto again = [&](int j) {
        if constexpr (IN_PLACE)
            return load_shared<S_TYPE>(x_at + j * X_STEP);
        else
            return load_s(x_at + j * X_STEP, residual_at + j * RESIDUAL_STEP);
    };
    float2 sums = {warp_sum((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])), 0.0f};
    if constexpr (CENTERED) {
        const float centre = mean_of(sums.x, columns_of_warp(columns, warp));
        float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll BATCH
        for (int j = 0; j < VECS; ++j) {
            if (!exists(j)) continue;
            float s[VEC];
            widen<S_TYPE>(again(j), s);
#pragma unroll
            for (int e = 0; e < VEC; ++e) squares[e % 4] = fmaf(s[e] - centre, s[e] - centre, squares[e % 4]);
        }
        sums.y = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    }

    if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) send(&shared.words[rank * WARPS + warp], &shared.words_there, lane, sums);
    } else {
        if (lane == 0) shared.words[warp] = sums;
    }
    Raw<S_TYPE> held[HOLD == 0 ? 1 : HOLD];
    const auto ask_after = [&](auto step) {
        for_each<2 * BATCH, 2 * VECS>([&](auto of) {
            constexpr int k = decltype(of)::value, j = k / 2;
            if constexpr (VECTORS.step[k] == decltype(step)::value)
                copy_in<VEC * X_SIZE>(x_at + VECTORS.place[k] * X_STEP,
                                      (k % 2 == 0 ? weight : bias) + first_column * X_SIZE + j * X_STEP,
                                      policy);
        });
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if constexpr (HOLD > 0) {
#pragma unroll
        for (int j = 0; j < HOLD; ++j) held[j] = load_shared<S_TYPE>(x_at + j * X_STEP);
        ask_after(Int<-1>());
    }
    if constexpr (CLUSTER > 1)
        wait(&shared.words_there, 0);
    else
        __syncthreads();
    float total = 0.0f, mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int of = lane; of < over(WORDS, 32) * 32; of += 32) total += of < WORDS ? shared.words[of].x : 0.0f;
    total = warp_sum(total);
    if constexpr (CENTERED) {
        mean = __fdiv_rn(total, static_cast<float>(N));
#pragma unroll 1
        for (int of = lane; of < WORDS; of += 32) {
            const float count = columns_of_warp(columns_of(of / WARPS), of % WARPS);
            const float off = mean_of(shared.words[of].x, count) - mean;
            squares += fmaf(count * off, off, shared.words[of].y);
        }
        squares = warp_sum(squares);
    } else {
        squares = total;
    }
    const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(squares, static_cast<float>(N)) + eps));
    if (rank == 0 && threadIdx.x == 0) {
        if (rstd_out != nullptr) rstd_out[row] = rstd;
        if (CENTERED && mean_out != nullptr) mean_out[row] = mean;
    }

    char* const to = y + (row * N + first_column) * Y_SIZE;
    const auto finish = [&](int j, const Raw<S_TYPE>& stored, const Raw<WEIGHT_TYPE>& w, const Raw<BIAS_TYPE>& b) {
        float value[VEC], scale[VEC], shift[VEC];
        widen<S_TYPE>(stored, value);
        if constexpr (HAS_WEIGHT) widen<WEIGHT_TYPE>(w, scale);
        if constexpr (HAS_BIAS) widen<BIAS_TYPE>(b, shift);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            value[e] = (CENTERED ? value[e] - mean : value[e]) * rstd;
            if constexpr (HAS_WEIGHT) value[e] *= HAS_OFFSET ? scale[e] + weight_offset : scale[e];
            if constexpr (HAS_BIAS) value[e] += shift[e];
        }
        store_global<Y_TYPE>(to + j * STEP * Y_SIZE, rounded<Y_TYPE>(value));
    };
    if constexpr (HOLD > 0) {
        for_each<0, VECS>([&](auto step) {
            constexpr int j = decltype(step)::value;
            Raw<WEIGHT_TYPE> w;
            Raw<BIAS_TYPE> b;
            if constexpr (j < BATCH) {
                w = here(weights[j]);
                b = here(biases[j]);
            } else {
                static_assert(VECTORS.step[2 * j + 1] < j, "asked for before it is used");
                asm volatile("cp.async.wait_group %0;" ::"n"(j - 1 - VECTORS.step[2 * j + 1]) : "memory");
                w = load_shared<WEIGHT_TYPE>(x_at + VECTORS.place[2 * j] * X_STEP);
                b = load_shared<BIAS_TYPE>(x_at + VECTORS.place[2 * j + 1] * X_STEP);
            }
            const Raw<S_TYPE> stored = held[j % HOLD];  // its place was read before anything is copied there
            if constexpr (j + HOLD < VECS) held[j % HOLD] = load_shared<S_TYPE>(x_at + (j + HOLD) * X_STEP);
            ask_after(step);
            finish(j, stored, w, b);
        });
    } else {
#pragma unroll 1
        for (int first = 0; first < VECS; first += BATCH) {
            if (first > 0) ask_for_vectors(first);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int j = first + i;
                if (j >= VECS || !exists(j)) continue;
                finish(j, again(j), here(weights[i]), here(biases[i]));
            }
        }
    }
}
