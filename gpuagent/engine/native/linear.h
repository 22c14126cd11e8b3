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
// a part with each tile.
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

template <int M>
static void float_tile(const Linear& w, int64_t panel, const Rows& x, int64_t row,
                       const Target& out, const char* next, int64_t next_bytes) {
    const float* a = x.values + row * x.stride;
    const float* b = static_cast<const float*>(w.weight) + panel * w.inputs * PANEL;
    const int64_t stride = x.stride, inputs = w.inputs;
    Vec acc[M][2] = {};
    constexpr int UNROLL = 8;
    const int64_t part = next_bytes * UNROLL / inputs;  // bytes to fetch each UNROLL steps
    int64_t k = 0;
    for (; k + UNROLL <= inputs; k += UNROLL) {
        fetch(next, part);
        next += part;
        for (int u = 0; u < UNROLL; u++) {
            Vec b0 = load(b + (k + u) * PANEL), b1 = load(b + (k + u) * PANEL + LANES);
            for (int i = 0; i < M; i++) {
                Vec broadcast = splat(a[i * stride + k + u]);
                acc[i][0] += broadcast * b0;
                acc[i][1] += broadcast * b1;
            }
        }
    }
    for (; k < inputs; k++) {
        Vec b0 = load(b + k * PANEL), b1 = load(b + k * PANEL + LANES);
        for (int i = 0; i < M; i++) {
            Vec broadcast = splat(a[i * stride + k]);
            acc[i][0] += broadcast * b0;
            acc[i][1] += broadcast * b1;
        }
    }
    finish_tile<M>(acc, w, panel, row, out);
}

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
static void int8_tile(const Linear& w, int64_t panel, const Rows& x, int64_t row,
                      const Target& out, const char* next, int64_t next_bytes) {
    const int64_t groups = w.inputs / GROUP;
    const char* b = static_cast<const char*>(w.weight) + panel * w.inputs * PANEL;
    const int8_t* a = x.quantised + row * x.stride;
    const float* scales = x.scales + row * groups;
    const int32_t* starts = x.starts + row * groups;
    const int64_t stride = x.stride, part = next_bytes / groups;
    Vec acc[M][2] = {};
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
        float_tile<M>(w, panel, x, row, out, next, bytes);
    }
}

// Panels [first, last) for all rows; panels below `limit` are worth fetching ahead.
static void linear(const Linear& w, const Rows& x, const Target& out, int64_t first, int64_t last,
                   int64_t limit) {
    const int64_t largest = w.scales ? 6 : 12;
    const int64_t tiles = (x.count + largest - 1) / largest;
    const int64_t bytes = w.inputs * PANEL * (w.scales ? 1 : 4);
    for (int64_t panel = first; panel < last; panel++) {
        const char* next = static_cast<const char*>(w.weight) + (panel + 1) * bytes;
        const bool is_worth_it = panel + 1 < limit && tiles > 1 && tiles <= 32;
        const int64_t part = is_worth_it ? bytes / tiles / 64 * 64 : 0;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = x.count * t / tiles, end = x.count * (t + 1) / tiles;
            tile<12>(w, panel, x, row, end - row, out, next + t * part, part);
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
