// What the kernels of wide rows share: pieces of 16 bytes, barriers of a cluster, words sent from CTA to CTA.
//
// Included after STREAMS is defined: the types of the tensors [M, N] that a thread reads and writes piece by piece.

#pragma once

namespace {

enum Type : int { NONE = -1, F32 = 0, BF16 = 1, F16 = 2 };

__host__ __device__ constexpr int size_of(int type) { return type == NONE ? 0 : type == F32 ? 4 : 2; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int over(int a, int b) { return (a + b - 1) / b; }

template <int... TYPES>
__host__ __device__ constexpr int largest() {
    int most = 0;
    constexpr int types[] = {TYPES...};
    for (const int type : types) most = larger(most, size_of(type));
    return most;
}

// Elements a thread takes at once: 16 bytes of the widest of the tensors that stream.
constexpr int VEC = 16 / largest<STREAMS>();

using Address = unsigned;  // of shared memory

__device__ __forceinline__ Address address(const void* pointer) {
    return static_cast<Address>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(const void* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive_expecting(const void* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Until a phase of this parity is over, with what CTAs of the cluster sent.
__device__ __forceinline__ void wait(const void* barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// Nothing of the kernels ahead may be touched before: this one is launched while the last of them ends.
__device__ __forceinline__ void wait_for_kernels_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Relaxed: a release would be a fence of the whole GPU ahead of the first load. What others have to see is the barriers,
// for which there is a fence of their own.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
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

using Policy = unsigned long long;

// L2 is to lose what is written before what is read: 2 to 4 % of everything.
__device__ __forceinline__ Policy evicted_last() {
    Policy policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The same address, of which the compiler does not know that threads have a part in common. It would take that from a
// uniform register, and a copy with a policy and such an address is an instruction that an H200 does not know (CUDA 13.0).
__device__ __forceinline__ Address of_this_thread(Address address) {
    return __shfl_sync(0xffffffffu, address, threadIdx.x % 32);
}

// BYTES (8 or 16) to shared memory, for this thread; `to` comes from `of_this_thread`.
template <int BYTES>
__device__ __forceinline__ void copy_in(Address to, const char* from, Policy policy) {
    const auto source = __cvta_generic_to_global(from);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "l"(policy)
                     : "memory");
    else  // with a policy an H200 does not know the instruction, although ptxas makes it
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(source) : "memory");
}

// Many bytes to shared memory, for all who wait on the barrier.
__device__ __forceinline__ void copy_slice(Address to, const void* from, unsigned bytes, const void* barrier,
                                           Policy policy) {
    if (bytes > 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address(barrier)), "l"(policy)
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

// volatile: loaded here and once, not again where it is used.
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

// PASSING: to leave L1 and L2 before what is read.
template <int TYPE, bool PASSING = false>
__device__ __forceinline__ void store_global(char* to, const Raw<TYPE>& raw) {
    if constexpr (Raw<TYPE>::WORDS == 2) {
        if constexpr (PASSING)
            asm volatile("st.global.L1::evict_first.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(raw.word[0]),
                         "r"(raw.word[1])
                         : "memory");
        else
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(raw.word[0]), "r"(raw.word[1]) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < Raw<TYPE>::WORDS; i += 4)
            if constexpr (PASSING)
                asm volatile("st.global.L1::evict_first.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * i),
                             "r"(raw.word[i]), "r"(raw.word[i + 1]), "r"(raw.word[i + 2]), "r"(raw.word[i + 3])
                             : "memory");
            else
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * i), "r"(raw.word[i]),
                             "r"(raw.word[i + 1]), "r"(raw.word[i + 2]), "r"(raw.word[i + 3])
                             : "memory");
    }
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

// The same, opaque: else the compiler widens early what was asked for early, to twice the registers.
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

}  // namespace
