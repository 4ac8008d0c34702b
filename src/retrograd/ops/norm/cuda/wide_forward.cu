// Forward of RMSNorm and LayerNorm over wide rows, for thread-block clusters (sm_90 and later). Needs no header.
//
// A cluster of CLUSTER CTAs stays for rows cluster_id, cluster_id + clusters, ...; each CTA owns a slice of SLICE
// columns, for which it holds weight and bias. Every element is read from memory once: rows come ahead of their use
// through rings of bulk copies. The CTAs of a row exchange two float32 sums through distributed shared memory; LOOK
// rows lie between what is sent and what is needed, which hides the exchange.
//
// Warps: THREADS / 32 consumers, a producer, a combiner. Per CTA, over the rows i of its cluster in their order:
//   producer:  for each i: wait r_empty, copy residual(i); wait x_empty, copy x(i)
//   consumers: A(0) .. A(LOOK - 1); for each k: A(k + LOOK), B(k)
//              A(i): wait x_full, r_full; s = x + residual; the warp's sums to part(i); release residual
//              B(k): wait stats(k); y; release x
//   combiner:  P(0) .. P(LOOK - 1); for each k: wait words(k), publish stats(k); P(k + LOOK)
//              P(i): wait part(i), send words(i) to every CTA of the cluster
// No barrier of the block or of the cluster is inside a loop.
//
// Why nothing is overwritten while it is still read:
//   part(i), LOOK + 1 slots. A warp writes rows 0 .. LOOK into slots of their own. Row j > LOOK is written after
//     B(j - LOOK - 1), so after stats(j - LOOK - 1), which the combiner published after P(j - 2): it has read part of
//     row j - 2, and all the more of row j - LOOK - 1, the last user of the slot.
//   stats(k), LOOK + 1 slots. Row j is published after P(min(j - 1 + LOOK, rows - 1)). All warps had then finished A of
//     that row and, before it, B(min(j - 2, rows - 2 - LOOK)). The last user of the slot is row j - LOOK - 1, which is
//     neither later than j - 2 nor than rows - 2 - LOOK.
//   words(i), 4 LOOK slots, 2 LOOK are needed. A combiner sends row i after it has received words(i - LOOK) from every
//     peer, and a peer sends those after it has read its words(i - 2 LOOK): at every receiver the last user of the
//     slot, row i - 4 LOOK, has been read, and its phase of the barrier is complete and armed again.
//   x(i), STAGES slots, and residual(i): the empty barriers, on which each warp arrives after its last read. Where s
//     was written in place, every thread first makes its writes known to the asynchronous proxy.
// In each ring a phase of a barrier cannot complete before all threads that wait for the phase before it have passed,
// by the same arguments: a parity never means two phases.
//
// Why nothing waits forever: order the events by row. x(i) waits for B(i - STAGES), which comes after
// A(i - STAGES + LOOK), of an earlier row, as STAGES > LOOK. residual(i) waits for A(i - RESIDUAL_STAGES), or for B of
// that row where RESIDUAL_STAGES == STAGES. A waits for copies of its row and, as the consumer's program goes, for B of
// earlier rows. P(i) waits for A(i) and words(i - LOOK). words(k) waits for P(k) in the CTAs of the cluster, which run
// at the same time. stats(k) waits for words(k), B(k) for stats(k) and A(k + LOOK). Every event waits for events of
// smaller rows, or of its own row in the order copy, A, P, words, stats, B, but for B(k) after A(k + LOOK): A of a row
// waits for no B or stats later than k - 1 = (k + LOOK) - LOOK - 1, so no circle closes.
// CTAs of a cluster have the same rows, so each waits for exactly what is sent; with no row they only meet at the ends.
//
// The order of every sum depends on N and the macros, never on the number of rows or of clusters.

#ifndef N  // for inspection by hand; launch.py gives all of them
#define N 131072
#define CLUSTER 8
#define THREADS 512
#define STAGES 6
#define RESIDUAL_STAGES 0
#define LOOK 1
#define CENTERED 0
#define X_TYPE 1
#define RESIDUAL_TYPE -1
#define WEIGHT_TYPE 1
#define BIAS_TYPE -1
#define Y_TYPE 1
#define S_TYPE 1
#define STORE_S 0
#define HAS_OFFSET 0
#define VECTORS_SHARED 0
#define GUARD 0
#endif

namespace {

enum Type : int { NONE = -1, F32 = 0, BF16 = 1, F16 = 2 };

__host__ __device__ constexpr int size_of(int type) { return type == NONE ? 0 : type == F32 ? 4 : 2; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int over(int a, int b) { return (a + b - 1) / b; }

constexpr bool HAS_RESIDUAL = RESIDUAL_TYPE != NONE;
constexpr bool HAS_WEIGHT = WEIGHT_TYPE != NONE;
constexpr bool HAS_BIAS = BIAS_TYPE != NONE;
constexpr int X_SIZE = size_of(X_TYPE), RESIDUAL_SIZE = size_of(RESIDUAL_TYPE), S_SIZE = size_of(S_TYPE);
constexpr int Y_SIZE = size_of(Y_TYPE), WEIGHT_SIZE = size_of(WEIGHT_TYPE), BIAS_SIZE = size_of(BIAS_TYPE);

// Elements a thread takes at once: 16 bytes of the widest of the tensors that stream.
constexpr int VEC = 16 / larger(larger(X_SIZE, RESIDUAL_SIZE), larger(Y_SIZE, S_SIZE));
constexpr int SLICE = over(N, 64 * CLUSTER) * 64;
constexpr int VECS = over(SLICE, VEC * THREADS);
constexpr bool FULL = N == SLICE * CLUSTER && SLICE % (VEC * THREADS) == 0;
constexpr int WARPS = THREADS / 32;
constexpr int WORD_SLOTS = 4 * LOOK;
constexpr int SLOTS = LOOK + 1;

// s replaces x in shared memory where it fits into the place of its own x; else it is computed a second time.
constexpr bool ROUNDS = HAS_RESIDUAL || S_TYPE != X_TYPE;
constexpr bool IN_PLACE = HAS_RESIDUAL && S_SIZE <= X_SIZE;

// LayerNorm looks at a row twice; in between it stays in registers if there are enough.
constexpr int VECTOR_WORDS = VECTORS_SHARED ? 0 : VECS * VEC * (WEIGHT_SIZE + BIAS_SIZE) / 4;
// Warps get registers by fours.
constexpr int EVEN_SHARE = 65536 / (over(THREADS + 64, 128) * 128) / 8 * 8;
constexpr int REGISTERS = EVEN_SHARE > 248 ? 248 : EVEN_SHARE;
constexpr bool HOLDS = VECS * VEC * S_SIZE / 4 + VECTOR_WORDS <= REGISTERS - 48;

// From a thread's piece to its next.
constexpr int STEP = THREADS * VEC;
constexpr int X_STEP = STEP * X_SIZE, RESIDUAL_STEP = STEP * RESIDUAL_SIZE;

constexpr int X_BYTES = SLICE * X_SIZE, RESIDUAL_BYTES = SLICE * RESIDUAL_SIZE;
constexpr int RESIDUAL_AT = STAGES * X_BYTES;
constexpr int WEIGHT_AT = RESIDUAL_AT + (HAS_RESIDUAL ? RESIDUAL_STAGES * RESIDUAL_BYTES : 0);
constexpr int BIAS_AT = WEIGHT_AT + SLICE * WEIGHT_SIZE;

static_assert(THREADS % 32 == 0 && WARPS <= 30, "the combiner reads the sum of a warp in each lane");
static_assert(CLUSTER <= 16 && N % 8 == 0, "copies are of 16 bytes and more");
static_assert(STAGES > LOOK, "A(k + LOOK) comes before B(k)");
static_assert(!HAS_RESIDUAL || (IN_PLACE ? RESIDUAL_STAGES >= 1 : RESIDUAL_STAGES == STAGES), "see the top");

using Address = unsigned;  // of shared memory

struct Shared {
    unsigned long long x_full[STAGES], x_empty[STAGES];
    unsigned long long residual_full[RESIDUAL_STAGES + 1], residual_empty[RESIDUAL_STAGES + 1];
    unsigned long long part_full[SLOTS], stats_full[SLOTS], words_full[WORD_SLOTS];
    float2 part[SLOTS][WARPS];           // of this CTA's warps: sum of squares; or sum, squares about the warp's mean
    float2 words[WORD_SLOTS][CLUSTER];   // the same of the cluster's CTAs
    float2 stats[SLOTS];                 // mean, rstd
};

static_assert(sizeof(Shared) <= 3072, "227 KiB less what launch.py gives to the buffers");

// Place and round in a ring; the parity that the wait for a filled slot takes.
template <int SIZE>
struct Cursor {
    int at = 0;
    unsigned parity = 0;
    __device__ void next() {
        if (++at == SIZE) {
            at = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ Address address(const void* pointer) {
    return static_cast<Address>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(const void* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(const void* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(const void* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity is over; from peers of the cluster if FAR.
template <bool FAR>
__device__ __forceinline__ bool is_over(Address barrier, unsigned parity) {
    unsigned done;
    if constexpr (FAR)
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    else
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    return done;
}

// GUARD: a wait of a second is reported and given up, and so are later ones; the results are wrong then.
template <bool FAR = false>
__device__ __forceinline__ void wait(const void* barrier, unsigned parity, bool& stuck, const char* what) {
    const Address at = address(barrier);
#if GUARD
    const long long began = clock64();
    while (!stuck && !is_over<FAR>(at, parity))
        if (clock64() - began > 2000000000ll) {
            stuck = true;
            if (threadIdx.x % 32 == 0)
                printf("wide norm: CTA %d warp %d waits for %s, parity %u\n", int(blockIdx.x), int(threadIdx.x / 32),
                       what, parity);
        }
#else
    while (!is_over<FAR>(at, parity)) {
    }
#endif
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ Address address_in(Address here, int rank) {
    Address there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}

// 8 bytes to the CTA `rank` of the cluster, which are counted by its barrier.
__device__ __forceinline__ void send(const void* slot, const void* barrier, int rank, float2 value) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     address_in(address(slot), rank)),
                 "f"(value.x), "f"(value.y), "r"(address_in(address(barrier), rank))
                 : "memory");
}

__device__ __forceinline__ void copy_in(Address to, const void* from, unsigned bytes, const void* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address(barrier))
                 : "memory");
}

// VEC elements as stored.
template <int TYPE>
struct Raw {
    static constexpr int WORDS = VEC * size_of(TYPE) / 4;
    unsigned word[WORDS == 0 ? 1 : WORDS];
};

template <int TYPE>
__device__ __forceinline__ Raw<TYPE> load_shared(Address from) {
    Raw<TYPE> raw;
    if constexpr (Raw<TYPE>::WORDS == 2)
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(raw.word[0]), "=r"(raw.word[1]) : "r"(from) : "memory");
    else
#pragma unroll
        for (int i = 0; i < Raw<TYPE>::WORDS; i += 4)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(raw.word[i]), "=r"(raw.word[i + 1]), "=r"(raw.word[i + 2]), "=r"(raw.word[i + 3])
                         : "r"(from + 4 * i)
                         : "memory");
    return raw;
}

template <int TYPE>
__device__ __forceinline__ void store_shared(Address to, const Raw<TYPE>& raw) {
    if constexpr (Raw<TYPE>::WORDS == 2)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(raw.word[0]), "r"(raw.word[1]) : "memory");
    else
#pragma unroll
        for (int i = 0; i < Raw<TYPE>::WORDS; i += 4)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + 4 * i), "r"(raw.word[i]),
                         "r"(raw.word[i + 1]), "r"(raw.word[i + 2]), "r"(raw.word[i + 3])
                         : "memory");
}

// volatile: loaded once, not again where it is used.
template <int TYPE>
__device__ __forceinline__ Raw<TYPE> load_global(const char* from) {
    Raw<TYPE> raw;
    if constexpr (Raw<TYPE>::WORDS == 2)
        asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(raw.word[0]), "=r"(raw.word[1]) : "l"(from));
    else
#pragma unroll
        for (int i = 0; i < Raw<TYPE>::WORDS; i += 4)
            asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(raw.word[i]), "=r"(raw.word[i + 1]), "=r"(raw.word[i + 2]), "=r"(raw.word[i + 3])
                         : "l"(from + 4 * i));
    return raw;
}

template <int TYPE>
__device__ __forceinline__ void store_global(char* to, const Raw<TYPE>& raw) {
    if constexpr (Raw<TYPE>::WORDS == 2)
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(raw.word[0]), "r"(raw.word[1]) : "memory");
    else
#pragma unroll
        for (int i = 0; i < Raw<TYPE>::WORDS; i += 4)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * i), "r"(raw.word[i]),
                         "r"(raw.word[i + 1]), "r"(raw.word[i + 2]), "r"(raw.word[i + 3])
                         : "memory");
}

template <int TYPE>
__device__ __forceinline__ void widen(const Raw<TYPE>& raw, float (&value)[VEC]) {
#pragma unroll
    for (int i = 0; i < Raw<TYPE>::WORDS; ++i)
        if constexpr (TYPE == F32) {
            value[i] = __uint_as_float(raw.word[i]);
        } else if constexpr (TYPE == BF16) {
            value[2 * i] = __uint_as_float(raw.word[i] << 16);
            value[2 * i + 1] = __uint_as_float(raw.word[i] & 0xffff0000u);
        } else {
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(value[2 * i]), "=f"(value[2 * i + 1])
                : "r"(raw.word[i]));
        }
}

template <int TYPE>
__device__ __forceinline__ Raw<TYPE> rounded(const float (&value)[VEC]) {
    Raw<TYPE> raw;
#pragma unroll
    for (int i = 0; i < Raw<TYPE>::WORDS; ++i)
        if constexpr (TYPE == F32)
            raw.word[i] = __float_as_uint(value[i]);
        else if constexpr (TYPE == BF16)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw.word[i]) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
        else
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(raw.word[i]) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
    return raw;
}

// The same, opaque: else the compiler widens weight and bias before the loop, to twice the registers.
template <int TYPE>
__device__ __forceinline__ Raw<TYPE> here(Raw<TYPE> raw) {
#pragma unroll
    for (int i = 0; i < Raw<TYPE>::WORDS; ++i) asm volatile("" : "+r"(raw.word[i]));
    return raw;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far);
    return value;
}

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

__device__ __forceinline__ float mean_of(float sum, float count) { return count > 0 ? __fdiv_rn(sum, count) : 0.0f; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1) wide_forward(
    const char* __restrict__ x,         // [M, N], rows x_stride elements apart
    const char* __restrict__ residual,  // [M, N] or none
    const char* __restrict__ weight,    // [N] or none
    const char* __restrict__ bias,      // [N] or none
    char* __restrict__ y,               // [M, N] contiguous
    char* __restrict__ s_out,           // [M, N] contiguous, if STORE_S
    float* __restrict__ mean_out,       // [M] or null
    float* __restrict__ rstd_out,       // [M] or null
    long long x_stride, long long residual_stride, long long rows_in_all, float eps, float weight_offset) {
    __shared__ Shared shared;
    extern __shared__ __align__(128) char buffers[];

    unsigned rank, cluster, clusters;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(clusters));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = cluster < rows_in_all ? static_cast<int>((rows_in_all - 1 - cluster) / clusters) + 1 : 0;
    const int columns = columns_of(rank);
    bool stuck = false;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.x_full[i], 1);
            barrier_init(&shared.x_empty[i], WARPS);
        }
        for (int i = 0; i < RESIDUAL_STAGES; ++i) {
            barrier_init(&shared.residual_full[i], 1);
            barrier_init(&shared.residual_empty[i], WARPS);
        }
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(&shared.part_full[i], WARPS);
            barrier_init(&shared.stats_full[i], 1);
        }
        for (int i = 0; i < WORD_SLOTS; ++i) barrier_init(&shared.words_full[i], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        for (int i = 0; i < WORD_SLOTS; ++i) arrive_expecting(&shared.words_full[i], CLUSTER * sizeof(float2));
    }
    __syncwarp();
    cluster_arrive();

    if (warp < WARPS) {  // consumers
        const Address mine = address(buffers) + threadIdx.x * VEC * X_SIZE;
        const Address mine_residual = address(buffers) + RESIDUAL_AT + threadIdx.x * VEC * RESIDUAL_SIZE;
        const Address mine_weight = address(buffers) + WEIGHT_AT + threadIdx.x * VEC * WEIGHT_SIZE;
        const Address mine_bias = address(buffers) + BIAS_AT + threadIdx.x * VEC * BIAS_SIZE;
        const long long first_column = static_cast<long long>(rank) * SLICE + threadIdx.x * VEC;
        const int piece = threadIdx.x;
        const auto exists = [&](int j) { return FULL || (j * THREADS + piece) * VEC < columns; };
        Raw<WEIGHT_TYPE> weights[VECTORS_SHARED ? 1 : VECS];
        Raw<BIAS_TYPE> biases[VECTORS_SHARED ? 1 : VECS];
#pragma unroll
        for (int j = 0; j < VECS; ++j) {
            if (!exists(j)) continue;
            const long long column = first_column + j * STEP;
            if constexpr (HAS_WEIGHT) {
                const Raw<WEIGHT_TYPE> stored = load_global<WEIGHT_TYPE>(weight + column * WEIGHT_SIZE);
                if constexpr (VECTORS_SHARED)  // read by this thread alone
                    store_shared<WEIGHT_TYPE>(mine_weight + j * STEP * WEIGHT_SIZE, stored);
                else
                    weights[j] = stored;
            }
            if constexpr (HAS_BIAS) {
                const Raw<BIAS_TYPE> stored = load_global<BIAS_TYPE>(bias + column * BIAS_SIZE);
                if constexpr (VECTORS_SHARED)
                    store_shared<BIAS_TYPE>(mine_bias + j * STEP * BIAS_SIZE, stored);
                else
                    biases[j] = stored;
            }
        }
        const float count = columns_of_warp(columns, warp);
        cluster_wait();

        Cursor<STAGES> x_a, x_b;
        Cursor<RESIDUAL_STAGES + (RESIDUAL_STAGES == 0)> residual_a, residual_b;
        Cursor<SLOTS> part_a, stats_b;
        const auto sum_up = [&](int i) {  // A(i)
            const long long row = cluster + static_cast<long long>(i) * clusters;
            const Address x_at = mine + x_a.at * X_BYTES, residual_at = mine_residual + residual_a.at * RESIDUAL_BYTES;
            char* const to = s_out + (row * N + first_column) * S_SIZE;
            wait(&shared.x_full[x_a.at], x_a.parity, stuck, "x");
            if constexpr (HAS_RESIDUAL)
                wait(&shared.residual_full[residual_a.at], residual_a.parity, stuck, "residual");
            float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            Raw<S_TYPE> held[CENTERED && HOLDS ? VECS : 1];
#pragma unroll
            for (int j = 0; j < VECS; ++j) {
                if (!exists(j)) continue;
                const Raw<S_TYPE> stored = load_s(x_at + j * X_STEP, residual_at + j * RESIDUAL_STEP);
                if constexpr (IN_PLACE) store_shared<S_TYPE>(x_at + j * X_STEP, stored);
                if constexpr (STORE_S) store_global<S_TYPE>(to + j * STEP * S_SIZE, stored);
                if constexpr (CENTERED && HOLDS) held[j] = stored;
                float s[VEC];
                widen<S_TYPE>(stored, s);
#pragma unroll
                for (int e = 0; e < VEC; ++e)
                    lanes[e % 4] = CENTERED ? lanes[e % 4] + s[e] : fmaf(s[e], s[e], lanes[e % 4]);
            }
            float2 sums = {warp_sum((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])), 0.0f};
            if constexpr (CENTERED) {
                const float centre = mean_of(sums.x, count);
                float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < VECS; ++j) {
                    if (!exists(j)) continue;
                    float s[VEC];
                    if constexpr (HOLDS)
                        widen<S_TYPE>(held[j], s);
                    else if constexpr (IN_PLACE)
                        widen<S_TYPE>(load_shared<S_TYPE>(x_at + j * X_STEP), s);
                    else
                        widen<S_TYPE>(load_s(x_at + j * X_STEP, residual_at + j * RESIDUAL_STEP), s);
#pragma unroll
                    for (int e = 0; e < VEC; ++e) squares[e % 4] = fmaf(s[e] - centre, s[e] - centre, squares[e % 4]);
                }
                sums.y = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
            }
            __syncwarp();
            if (lane == 0) {
                shared.part[part_a.at][warp] = sums;
                arrive(&shared.part_full[part_a.at]);
                if constexpr (IN_PLACE) arrive(&shared.residual_empty[residual_a.at]);
            }
            x_a.next();
            part_a.next();
            if constexpr (HAS_RESIDUAL) residual_a.next();
        };
        const auto normalise = [&](int k) {  // B(k)
            const long long row = cluster + static_cast<long long>(k) * clusters;
            const Address x_at = mine + x_b.at * X_BYTES, residual_at = mine_residual + residual_b.at * RESIDUAL_BYTES;
            char* const to = y + (row * N + first_column) * Y_SIZE;
            wait(&shared.stats_full[stats_b.at], stats_b.parity, stuck, "stats");
            const float2 stats = shared.stats[stats_b.at];
#pragma unroll
            for (int j = 0; j < VECS; ++j) {
                if (!exists(j)) continue;
                float value[VEC], scale[VEC], shift[VEC];
                if constexpr (IN_PLACE)
                    widen<S_TYPE>(load_shared<S_TYPE>(x_at + j * X_STEP), value);
                else
                    widen<S_TYPE>(load_s(x_at + j * X_STEP, residual_at + j * RESIDUAL_STEP), value);
                if constexpr (HAS_WEIGHT) {
                    if constexpr (VECTORS_SHARED)
                        widen<WEIGHT_TYPE>(load_shared<WEIGHT_TYPE>(mine_weight + j * STEP * WEIGHT_SIZE), scale);
                    else
                        widen<WEIGHT_TYPE>(here(weights[j]), scale);
                }
                if constexpr (HAS_BIAS) {
                    if constexpr (VECTORS_SHARED)
                        widen<BIAS_TYPE>(load_shared<BIAS_TYPE>(mine_bias + j * STEP * BIAS_SIZE), shift);
                    else
                        widen<BIAS_TYPE>(here(biases[j]), shift);
                }
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    value[e] = (CENTERED ? value[e] - stats.x : value[e]) * stats.y;
                    if constexpr (HAS_WEIGHT) value[e] *= HAS_OFFSET ? scale[e] + weight_offset : scale[e];
                    if constexpr (HAS_BIAS) value[e] += shift[e];
                }
                store_global<Y_TYPE>(to + j * STEP * Y_SIZE, rounded<Y_TYPE>(value));
            }
            if constexpr (IN_PLACE) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) {
                arrive(&shared.x_empty[x_b.at]);
                if constexpr (HAS_RESIDUAL && !IN_PLACE) arrive(&shared.residual_empty[residual_b.at]);
            }
            x_b.next();
            stats_b.next();
            if constexpr (HAS_RESIDUAL && !IN_PLACE) residual_b.next();
        };
#pragma unroll 1
        for (int i = 0; i < LOOK; ++i)
            if (i < rows) sum_up(i);
#pragma unroll 1
        for (int k = 0; k < rows; ++k) {
            if (k + LOOK < rows) sum_up(k + LOOK);
            normalise(k);
        }
    } else if (warp == WARPS) {  // producer
        cluster_wait();
        if (lane == 0) {
            Cursor<STAGES> x_at;
            Cursor<RESIDUAL_STAGES + (RESIDUAL_STAGES == 0)> residual_at;
            const auto copy_row = [&](const void* full, Address to, const char* from, int bytes) {
                arrive_expecting(full, bytes);
                if (bytes > 0) copy_in(to, from, bytes, full);
            };
            // The other parity: an untouched barrier counts as if the phase before its first were over.
#pragma unroll 1
            for (int i = 0; i < rows; ++i) {
                const long long row = cluster + static_cast<long long>(i) * clusters;
                const long long column = static_cast<long long>(rank) * SLICE;
                if constexpr (HAS_RESIDUAL) {
                    wait(&shared.residual_empty[residual_at.at], residual_at.parity ^ 1, stuck, "room for residual");
                    copy_row(&shared.residual_full[residual_at.at],
                             address(buffers) + RESIDUAL_AT + residual_at.at * RESIDUAL_BYTES,
                             residual + (row * residual_stride + column) * RESIDUAL_SIZE, columns * RESIDUAL_SIZE);
                    residual_at.next();
                }
                wait(&shared.x_empty[x_at.at], x_at.parity ^ 1, stuck, "room for x");
                copy_row(&shared.x_full[x_at.at], address(buffers) + x_at.at * X_BYTES,
                         x + (row * x_stride + column) * X_SIZE, columns * X_SIZE);
                x_at.next();
                if (stuck) break;
            }
        }
        __syncwarp();
    } else {  // combiner
        const float count = lane < WARPS ? columns_of_warp(columns, lane) : 0.0f;
        cluster_wait();
        Cursor<SLOTS> part, stats;
        Cursor<WORD_SLOTS> sent, received;
        const auto publish = [&] {  // P(i)
            wait(&shared.part_full[part.at], part.parity, stuck, "part");
            float2 sums = {0.0f, 0.0f};
            if (lane < WARPS) sums = shared.part[part.at][lane];
            float2 all = {warp_sum(sums.x), 0.0f};
            if constexpr (CENTERED) {
                const float off = mean_of(sums.x, count) - mean_of(all.x, static_cast<float>(columns));
                all.y = warp_sum(fmaf(count * off, off, sums.y));
            }
            if (lane < CLUSTER) send(&shared.words[sent.at][rank], &shared.words_full[sent.at], lane, all);
            __syncwarp();
            part.next();
            sent.next();
        };
#pragma unroll 1
        for (int i = 0; i < LOOK; ++i)
            if (i < rows) publish();
#pragma unroll 1
        for (int k = 0; k < rows; ++k) {
            wait<true>(&shared.words_full[received.at], received.parity, stuck, "words");
            float2 words[CLUSTER];
#pragma unroll
            for (int g = 0; g < CLUSTER; ++g) words[g] = shared.words[received.at][g];
            __syncwarp();
            if (lane == 0) arrive_expecting(&shared.words_full[received.at], CLUSTER * sizeof(float2));
            float total = 0.0f, mean = 0.0f, squares = 0.0f;
#pragma unroll
            for (int g = 0; g < CLUSTER; ++g) total += words[g].x;
            if constexpr (CENTERED) {
                mean = __fdiv_rn(total, static_cast<float>(N));
#pragma unroll
                for (int g = 0; g < CLUSTER; ++g) {
                    const float here = static_cast<float>(columns_of(g)), off = mean_of(words[g].x, here) - mean;
                    squares += fmaf(here * off, off, words[g].y);
                }
            } else {
                squares = total;
            }
            const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(squares, static_cast<float>(N)) + eps));
            if (lane == 0) {
                shared.stats[stats.at] = {mean, rstd};
                arrive(&shared.stats_full[stats.at]);
                const long long row = cluster + static_cast<long long>(k) * clusters;
                if (rank == 0 && rstd_out != nullptr) rstd_out[row] = rstd;
                if (CENTERED && rank == 0 && mean_out != nullptr) mean_out[row] = mean;
            }
            __syncwarp();
            received.next();
            stats.next();
            if (k + LOOK < rows) publish();
        }
    }
    // A peer may still write here what it sent.
    cluster_arrive();
    cluster_wait();
}
