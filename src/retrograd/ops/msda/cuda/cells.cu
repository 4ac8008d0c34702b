// All three gradients of sorted samples, cell by cell; if ORDERED the sums of a cell's corners in place of grad_value.

#include "gradients.cuh"

namespace {

struct Batch {
    float4 shares[32];  // of the corners, times the weight
    uint4 places[32];   // offset of the first corner | corners; offset to the row below; offset in grad_out; cell
    uint4 own[32];      // tx and ty, -0.0 where the sample does not move with x or y; weight; number of the sample
};

struct Shared {
    Tables tables;
    Batch batches[WARPS][2];
};

constexpr unsigned NOWHERE = ALL;

__device__ __forceinline__ void add_cell(float* sums, unsigned base, unsigned cell, unsigned down,
                                         const float (&total)[4][VEC]) {
    if (cell == NOWHERE) return;
    const unsigned from = base + (cell & ~15u);
    if (cell & 1) add_row(sums + from / ELEMENT, total[0], 1.0f);
    if (cell & 2) add_row(sums + (from + PIXEL_BYTES) / ELEMENT, total[1], 1.0f);
    if (cell & 4) add_row(sums + (from + down) / ELEMENT, total[2], 1.0f);
    if (cell & 8) add_row(sums + (from + down + PIXEL_BYTES) / ELEMENT, total[3], 1.0f);
}

// The corners' sums of a part of a cell, each a row.
// Those on the right of it go on to the next cell, if that is `beside` it.
__device__ __forceinline__ void keep_part(float* parts, unsigned part, const float (&total)[4][VEC], bool beside) {
    if (part == NOWHERE) return;
#pragma unroll
    for (int c = 0; c < 4; ++c)
        if (!(c % 2 && beside))
            *(float4*)(parts + (part * 4ull + c) * CHANNELS) = make_float4(total[c][0], total[c][1], total[c][2], total[c][3]);
}

// What a lane knows of its sample of a batch before the batch is prepared.
struct Ahead {
    unsigned number;  // NOWHERE if there is none
    Point point;
};

// Writes a batch down and returns in bit i whether some group's sample i lies in another cell than its sample before,
// where `last` is that of the batch before.
__device__ __forceinline__ unsigned prepare(const Problem& p, const Tables& tables, Batch& batch, const Ahead& ahead,
                                            int image, int head, unsigned& last) {
    const int lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    uint4 place = make_uint4(NOWHERE, 0, 0, 0), own = make_uint4(0, 0, 0, NOWHERE);
    float4 share = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (ahead.number != NOWHERE) {
        const unsigned query = ahead.number / K, k = ahead.number % K;
        const Level level = tables.points[k];
        const Sample s = locate(ahead.point.at, level);
        const float weight = ahead.point.weight;
        place.x = (unsigned)(level.start + s.y0 * level.width + s.x0) * PIXEL_BYTES | s.corners;
        place.y = level.width * PIXEL_BYTES;
        place.z = (unsigned)((image * p.queries + query) * HEADS + head) * ROW_BYTES;
        if constexpr (ORDERED) place.w = cell_of(s.x0, s.y0, level);
        const float lower = weight * s.ty, upper = weight * (1.0f - s.ty);
        share = make_float4(upper * (1.0f - s.tx), upper * s.tx, lower * (1.0f - s.tx), lower * s.tx);
        own = make_uint4(__float_as_uint(s.moves_x ? s.tx : -0.0f), __float_as_uint(s.moves_y ? s.ty : -0.0f),
                         __float_as_uint(weight), ahead.number);
    }
    batch.places[j * GROUPS + group] = place;
    batch.shares[j * GROUPS + group] = share;
    batch.own[lane] = own;
    const unsigned before = __shfl_up_sync(ALL, place.x, 1, LANES);
    const bool another = place.x != (j == 0 ? last : before);
    last = __shfl_sync(ALL, place.x, LANES - 1, LANES);
    unsigned changes = __ballot_sync(ALL, another);
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) changes |= changes >> other;
    return changes;
}

}  // namespace

// A group takes SEGMENT samples of one image and head (blockIdx.y) in the order of their cells. While the cell stays the
// same, its corners and their sums stay in registers: a row of grad_out is all that is read for a sample. What a batch
// of LANES samples a group needs is asked for up to three batches ahead, as few warps fit on an SM.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cells(const __grid_constant__ Problem p) {
    __shared__ Shared shared;
    fill_tables(p, shared.tables);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, j = lane % LANES;
    const int image = blockIdx.y / HEADS, head = blockIdx.y % HEADS;
    const unsigned* starts = p.starts + blockIdx.y * (p.bins + 1);
    const unsigned samples = starts[p.bins];
    const unsigned* numbers = p.numbers + blockIdx.y * p.queries * K;
    const unsigned base = (unsigned)((image * p.pixels * HEADS + head) * ROW_BYTES + j * LANE_BYTES);
    const unsigned first = ((blockIdx.x * WARPS + warp) * GROUPS + group) * SEGMENT;
    if (((blockIdx.x * WARPS + warp) * GROUPS) * SEGMENT >= samples) return;
    float* sums = (float*)p.grad_value;
    const long long segments = (p.queries * K + SEGMENT - 1) / SEGMENT;
    float* parts = p.partials + blockIdx.y * (p.bins + segments) * 4 * CHANNELS + j * VEC;
    const auto number_of = [&](int batch) {
        const unsigned m = first + batch + j;
        return m < samples && batch + j < SEGMENT ? numbers[m] : NOWHERE;
    };
    const auto point_of = [&](unsigned number) {
        if (number == NOWHERE) return Point{};
        const long long row = (image * p.queries + number / K) * HEADS + head;
        return load_own(p, row, true, number % K);
    };
    unsigned last = NOWHERE;
    Ahead one{number_of(0), {}};
    one.point = point_of(one.number);
    unsigned two = number_of(LANES);
    unsigned changes = prepare(p, shared.tables, shared.batches[warp][0], one, image, head, last);
    one = {two, point_of(two)};
    two = number_of(2 * LANES);
    __syncwarp();
    unsigned cell = NOWHERE, down = 0, bin = NOWHERE, part = NOWHERE;
    float corner[4][VEC] = {}, total[4][VEC] = {};
#pragma unroll 1
    for (int start = 0; start < SEGMENT; start += LANES) {
        const Batch& batch = shared.batches[warp][start / LANES & 1];
        const unsigned next_changes = prepare(p, shared.tables, shared.batches[warp][start / LANES + 1 & 1], one, image,
                                              head, last);
        one = {two, point_of(two)};
        two = number_of(start + 3 * LANES);
        Raw rows[LANES > 8 ? 8 : LANES];
        float stack[log2_of(LANES) + 1][4];
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            if (i % 8 == 0) {
#pragma unroll
                for (int ahead = 0; ahead < 8 && i + ahead < LANES; ++ahead)
                    rows[ahead] = load_at(p.grad_out, batch.places[(i + ahead) * GROUPS + group].z + j * LANE_BYTES);
            }
            const float4 w = batch.shares[i * GROUPS + group];
            if (changes >> i & 1) {
                const uint4 where = batch.places[i * GROUPS + group];
                if (where.x != cell) {
                    bool beside = false;
                    if constexpr (ORDERED) {
                        beside = where.w == bin + 1 && (where.x & ~15u) == (cell & ~15u) + PIXEL_BYTES;
                        bin = where.w;
                        keep_part(parts, part, total, beside);
                        // What a cell has in segments after its first one is kept apart, one part a segment.
                        const bool later = cell == NOWHERE && where.x != NOWHERE && starts[where.w] < first;
                        part = where.x == NOWHERE ? NOWHERE : later ? (unsigned)p.bins + first / SEGMENT : where.w;
                    } else {
                        add_cell(sums, base, cell, down, total);
                    }
                    cell = where.x, down = where.y;
                    Raw raw[4] = {};
                    if (DOTS && cell != NOWHERE) read_corners<true>(p, base, make_uint2(cell, down), raw);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        unpack(raw[c], corner[c]);
#pragma unroll
                        for (int v = 0; v < VEC; ++v) total[c][v] = c % 2 == 0 && beside ? total[c + 1][v] : 0.0f;
                    }
                }
            }
            float g[VEC];
            unpack(rows[i % 8], g);
            const float shares[4] = {w.x, w.y, w.z, w.w};
            float dots[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                dots[c] = corner[c][0] * g[0];
#pragma unroll
                for (int v = 1; v < VEC; ++v) dots[c] = fmaf(corner[c][v], g[v], dots[c]);
#pragma unroll
                for (int v = 0; v < VEC; ++v) total[c][v] = fmaf(shares[c], g[v], total[c][v]);
            }
            if constexpr (DOTS) collect(stack, dots, i, lane);
        }
        if constexpr (DOTS) {
            const uint4 own = batch.own[lane];
            if (own.w != NOWHERE) {
                Sample s = {};
                s.tx = __uint_as_float(own.x), s.ty = __uint_as_float(own.y);
                s.moves_x = own.x >> 31 == 0, s.moves_y = own.y >> 31 == 0;
                const long long row = (image * p.queries + own.w / K) * HEADS + head;
                store_gradients(p, row * K + own.w % K, s, shared.tables.points[own.w % K], __uint_as_float(own.z),
                                stack[log2_of(LANES)]);
            }
        }
        changes = next_changes;
        __syncwarp();
    }
    if constexpr (ORDERED)
        keep_part(parts, part, total, false);
    else
        add_cell(sums, base, cell, down, total);
}
