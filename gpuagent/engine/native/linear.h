// y = x W^T for a few to a few hundred rows, on weights packed once.
//
// Columns of W are packed in panels of 32: what two vector registers need at step k lies side by
// side, and a panel is read front to back. Example, W with 64 outputs and 3 inputs:
//
//     panel 0   w[0..31][0]  w[0..31][1]  w[0..31][2]
//     panel 1   w[32..63][0] ...
//
// Rows of x go through a panel in tiles of up to 12 (24 accumulators, 2 weights, the rest for
// broadcasts). One tile reads W in a stream, which the hardware foresees. With several tiles the
// memory would rest while all but the first are computed, so meanwhile the next panel is fetched,
// a part with each tile. Where registers are narrower and fewer (AVX2 has 16 of 8 floats), a tile has
// up to 6 rows and takes the halves of the panel in turn, 64 inputs each: 12 accumulators, 2 weights.
//
// int8: weights are signed with one scale per output, stored + 128 as unsigned (the multiply
// instruction wants one operand of each kind); activations are signed with one scale per token
// and group of 32 inputs. Sum of (w + 128) a = sum of w a + 128 sum of a, and the last term is the
// same for all outputs: it is what an accumulator starts with, negated.
#pragma once
#include <algorithm>
#include <cmath>
#include "vec.h"

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;
constexpr int FLOAT_ROWS = PART_LANES == LANES ? 12 : 6;  // of a tile
constexpr int INPUTS_A_PASS = 64;                         // 8 KiB of a panel

// Over the panel: one for each half where the sums of a tile do not fit into the registers together.
constexpr int passes(int rows) { return PART_LANES == LANES || rows <= 2 ? 1 : 2; }

enum Epilogue { STORE, ADD, SWIGLU };

// A packed matrix; `scales` is null for float32. With `group` only the weights are rounded: grouped.h.
struct Linear {
    const void* weight;
    const float* scales;  // (outputs rounded up to PANEL)
    const float* bias;    // (outputs rounded up to PANEL) or null
    int64_t inputs;
    int64_t outputs;
    const float* zeros;
    int64_t group;
    bool takes_int8() const { return scales && !group; }
    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
};

// Rows of activations; for int8 `values` is int8 and each row has inputs / GROUP scales and sums.
struct Rows {
    const float* values;
    const int8_t* quantised;
    const float* scales;
    const int32_t* starts;  // -128 * sum of the group
    int64_t count;
    int64_t stride;
};

struct Target {
    float* values;
    int64_t stride;
    Epilogue epilogue;
};

template <int M>
static inline void finish_tile(Vec (&acc)[M][2], const Linear& w, int64_t panel, int64_t row,
                               const Target& out) {
    for (int i = 0; i < M; i++) {
        Vec low = acc[i][0], high = acc[i][1];
        if (w.bias) {
            low += load(w.bias + panel * PANEL);
            high += load(w.bias + panel * PANEL + LANES);
        }
        float* y = out.values + (row + i) * out.stride;
        if (out.epilogue == SWIGLU) {  // panels of 16 gates and their 16 ups
            store(y + panel * LANES, silu(low) * high);
        } else if (out.epilogue == ADD) {
            store(y + panel * PANEL, load(y + panel * PANEL) + low);
            store(y + panel * PANEL + LANES, load(y + panel * PANEL + LANES) + high);
        } else {
            store(y + panel * PANEL, low);
            store(y + panel * PANEL + LANES, high);
        }
    }
}

static inline void fetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Adds the products of `count` inputs to sums of WIDTH registers for each of M rows. A sum takes its
// terms in the order of the inputs, however wide a register is. `Part` is what the machine has
// registers for: the compiler keeps wider vectors in memory, and each multiply-add waits for it.
template <int M, int WIDTH>
static inline void float_sums(const float* a, int64_t stride, const float* b, int64_t count,
                              Part (&sums)[M][WIDTH], const char* next, int64_t next_bytes) {
    constexpr int UNROLL = 8;
    const int64_t part = next_bytes * UNROLL / count;  // bytes to fetch each UNROLL steps
    Part held[M][WIDTH];
    std::memcpy(held, sums, sizeof sums);
    auto step = [&](int64_t k) {
        Part weights[WIDTH];
        for (int p = 0; p < WIDTH; p++) weights[p] = load_part(b + k * PANEL + p * PART_LANES);
        for (int i = 0; i < M; i++) {
            Part broadcast = splat_part(a[i * stride + k]);
            for (int p = 0; p < WIDTH; p++) held[i][p] += broadcast * weights[p];
        }
    };
    int64_t k = 0;
    for (; k + UNROLL <= count; k += UNROLL) {
        fetch(next, part);
        next += part;
        for (int u = 0; u < UNROLL; u++) step(k + u);
    }
    for (; k < count; k++) step(k);
    std::memcpy(sums, held, sizeof sums);
}

template <int M>
static void float_tile(const Linear& w, int64_t panel, const Rows& x, int64_t row,
                       const Target& out, const char* next, int64_t next_bytes) {
    constexpr int PASSES = passes(M), WIDTH = PANEL / PART_LANES / PASSES;
    const float* a = x.values + row * x.stride;
    const float* b = static_cast<const float*>(w.weight) + panel * w.inputs * PANEL;
    Part sums[PASSES][M][WIDTH] = {};
    const int64_t block = PASSES == 1 ? w.inputs : INPUTS_A_PASS;
    for (int64_t k = 0; k < w.inputs; k += block) {
        const int64_t count = std::min(block, w.inputs - k), bytes = next_bytes * count / w.inputs;
        for (int pass = 0; pass < PASSES; pass++) {
            float_sums<M, WIDTH>(a + k, x.stride, b + k * PANEL + pass * LANES, count, sums[pass],
                                 next, pass ? 0 : bytes);
        }
        next += bytes;
    }
    Vec acc[M][2];
    for (int i = 0; i < M; i++)
        for (int pass = 0; pass < PASSES; pass++)
            std::memcpy(&acc[i][pass], sums[pass][i], sizeof sums[pass][i]);
    finish_tile<M>(acc, w, panel, row, out);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Eight outputs times four inputs: the instruction wants one operand of each kind and must not
// saturate, so here the activation gives its sign to the weight.
static inline __m256i dot4(__m256i acc, __m256i weights, __m256i activations) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(activations),
                                         _mm256_sign_epi8(weights, activations));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <int M>
static void int8_sums(const Linear& w, const char* b, const Rows& x, int64_t row, Vec (&acc)[M][2],
                      const char* next, int64_t next_bytes) {
    const int64_t groups = w.inputs / GROUP, part = next_bytes / groups;
    const __m256i flip = _mm256_set1_epi8(-128);  // from stored + 128 to signed
    Part sums[4][M] = {};
    for (int64_t g = 0; g < groups; g++, b += GROUP * PANEL, next += part) {
        fetch(next, part);
        for (int quarter = 0; quarter < 4; quarter++) {
            __m256i dots[M] = {};
            for (int k = 0; k < GROUP; k += 4) {
                const char* from = b + k * PANEL + quarter * 32;
                __m256i weights = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)from), flip);
                for (int i = 0; i < M; i++) {
                    int32_t four;
                    std::memcpy(&four, x.quantised + (row + i) * x.stride + g * GROUP + k, 4);
                    dots[i] = dot4(dots[i], weights, _mm256_set1_epi32(four));
                }
            }
            for (int i = 0; i < M; i++)
                sums[quarter][i] += (Part)_mm256_cvtepi32_ps(dots[i]) *
                                    splat_part(x.scales[(row + i) * groups + g]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int quarter = 0; quarter < 4; quarter++)
            std::memcpy((float*)acc[i] + quarter * PART_LANES, &sums[quarter][i], sizeof(Part));
}
#else
static inline IVec dot4(IVec acc, IVec unsigned_bytes, int32_t signed_bytes) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)unsigned_bytes,
                                     _mm512_set1_epi32(signed_bytes));
#else
    for (int byte = 0; byte < 4; byte++) {
        acc += ((unsigned_bytes >> (8 * byte)) & 255) * int32_t(int8_t(signed_bytes >> (8 * byte)));
    }
    return acc;
#endif
}

template <int M>
static void int8_sums(const Linear& w, const char* b, const Rows& x, int64_t row, Vec (&acc)[M][2],
                      const char* next, int64_t next_bytes) {
    const int64_t groups = w.inputs / GROUP;
    const int8_t* a = x.quantised + row * x.stride;
    const float* scales = x.scales + row * groups;
    const int32_t* starts = x.starts + row * groups;
    const int64_t stride = x.stride, part = next_bytes / groups;
    for (int64_t g = 0; g < groups; g++) {
        fetch(next, part);
        next += part;
        IVec dots[M][2];
        for (int i = 0; i < M; i++) dots[i][0] = dots[i][1] = IVec{} + starts[i * groups + g];
        for (int k = 0; k < GROUP; k += 4) {
            IVec b0 = *reinterpret_cast<const IVecU*>(b), b1 = *reinterpret_cast<const IVecU*>(b + 64);
            b += 4 * PANEL;
            for (int i = 0; i < M; i++) {
                int32_t four;
                std::memcpy(&four, a + i * stride + g * GROUP + k, 4);
                dots[i][0] = dot4(dots[i][0], b0, four);
                dots[i][1] = dot4(dots[i][1], b1, four);
            }
        }
        for (int i = 0; i < M; i++) {
            Vec scale = splat(scales[i * groups + g]);
            acc[i][0] += __builtin_convertvector(dots[i][0], Vec) * scale;
            acc[i][1] += __builtin_convertvector(dots[i][1], Vec) * scale;
        }
    }
}
#endif

template <int M>
static void int8_tile(const Linear& w, int64_t panel, const Rows& x, int64_t row,
                      const Target& out, const char* next, int64_t next_bytes) {
    const char* b = static_cast<const char*>(w.weight) + panel * w.inputs * PANEL;
    Vec acc[M][2] = {};
    int8_sums<M>(w, b, x, row, acc, next, next_bytes);
    Vec low = load(w.scales + panel * PANEL), high = load(w.scales + panel * PANEL + LANES);
    for (int i = 0; i < M; i++) {
        acc[i][0] *= low;
        acc[i][1] *= high;
    }
    finish_tile<M>(acc, w, panel, row, out);
}

template <int M>
static void tile(const Linear& w, int64_t panel, const Rows& x, int64_t row, int64_t rows,
                 const Target& out, const char* next, int64_t bytes) {
    if (rows < M) {
        if constexpr (M > 1) tile<M - 1>(w, panel, x, row, rows, out, next, bytes);
    } else if (w.scales) {
        if constexpr (M <= 6) int8_tile<M>(w, panel, x, row, out, next, bytes);
    } else {
        if constexpr (M <= FLOAT_ROWS) float_tile<M>(w, panel, x, row, out, next, bytes);
    }
}

// Panels [first, last) for all rows; panels below `limit` are worth fetching ahead.
static void linear(const Linear& w, const Rows& x, const Target& out, int64_t first, int64_t last,
                   int64_t limit) {
    const int64_t largest = w.scales ? 6 : FLOAT_ROWS;
    const int64_t tiles = (x.count + largest - 1) / largest;
    const int64_t bytes = w.inputs * PANEL * (w.scales ? 1 : 4);
    for (int64_t panel = first; panel < last; panel++) {
        const char* next = static_cast<const char*>(w.weight) + (panel + 1) * bytes;
        const bool is_worth_it = panel + 1 < limit && tiles > 1 && tiles <= 32;
        const int64_t part = is_worth_it ? bytes / tiles / 64 * 64 : 0;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = x.count * t / tiles, end = x.count * (t + 1) / tiles;
            tile<std::max(FLOAT_ROWS, 6)>(w, panel, x, row, end - row, out, next + t * part, part);
        }
    }
}

// Quantise a row in groups: q = round(x / s) with s = max |x| / 127 of the group.
static void quantise(const float* x, int64_t count, int8_t* q, float* scales, int32_t* starts) {
    for (int64_t g = 0; g < count / GROUP; g++) {
        Vec parts[2] = {load(x + g * GROUP), load(x + g * GROUP + LANES)};
        float largest = max_of(maximum(maximum(parts[0], -parts[0]), maximum(parts[1], -parts[1])));
        // A group with NaN or infinity must stay unsound: its scale carries that on.
        float total = sum_of(parts[0] + parts[1]);
        scales[g] = total - total == 0.0f ? largest / 127.0f : total;
        float inverse = largest > 0.0f && total - total == 0.0f ? 127.0f / largest : 0.0f;
        IVec sum = {};
        for (int half = 0; half < 2; half++) {
            IVec whole = __builtin_convertvector(rounded(parts[half] * inverse), IVec);
            sum += whole;
            store(q + g * GROUP + half * LANES, whole);
        }
        starts[g] = -128 * sum_of(sum);
    }
}
