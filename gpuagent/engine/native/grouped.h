// y = x W^T with weights of 8 or 4 bits, a scale per output and group of inputs, and float32 rows.
//
// A panel is widened to float32 in a buffer that stays in the nearest cache, and from there the
// product is that of float32 weights: w = (q - zero) * scale, so a result is the same bits as with
// a matrix that was widened when it was loaded, at a quarter or an eighth of the memory traffic.
// Example, 4 bits: byte j of step k holds output j of the panel in its low half and output 16 + j in
// its high half, so one load of 16 bytes gives both vectors of a step:
//
//     panel 0   16 bytes of k = 0, 16 bytes of k = 1, ...
//     scales    (groups, outputs rounded up to PANEL), zeros alike; 8 bits are signed, without zeros
//
// Kept apart from the rows' own int8 products: multiplying whole numbers needs rounded activations.
#pragma once
#include <vector>
#include "linear.h"

static inline IVec widen_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    return (IVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    typedef int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), IVec);
#endif
}

static inline Vec to_float(IVec v) { return __builtin_convertvector(v, Vec); }

// Panel `panel` of `w` as (inputs, PANEL) floats.
static void widen_panel(const Linear& w, int64_t panel, float* to) {
    const int64_t step = w.zeros ? PANEL / 2 : PANEL, padded = w.panels() * PANEL;
    const int8_t* from = static_cast<const int8_t*>(w.weight) + panel * w.inputs * step;
    for (int64_t g = 0; g < w.inputs / w.group; g++) {
        const int64_t at = g * padded + panel * PANEL;
        const Vec scale0 = load(w.scales + at), scale1 = load(w.scales + at + LANES);
        if (w.zeros) {
            const Vec zero0 = load(w.zeros + at), zero1 = load(w.zeros + at + LANES);
            for (int64_t k = 0; k < w.group; k++, from += step, to += PANEL) {
                const IVec both = widen_bytes(from);
                store(to, (to_float(both & 15) - zero0) * scale0);
                store(to + LANES, (to_float((both >> 4) & 15) - zero1) * scale1);
            }
        } else {
            for (int64_t k = 0; k < w.group; k++, from += step, to += PANEL) {
                store(to, to_float(widen_bytes(from)) * scale0);
                store(to + LANES, to_float(widen_bytes(from + LANES)) * scale1);
            }
        }
    }
}

// Panels [first, last) for all rows; panels below `limit` are worth fetching ahead.
static void grouped_linear(const Linear& w, const Rows& x, const Target& out, int64_t first,
                           int64_t last, int64_t limit) {
    static thread_local std::vector<float> buffer;
    const int64_t size = w.inputs * PANEL, bytes = w.zeros ? size / 2 : size;
    if (int64_t(buffer.size()) < size) buffer.resize(size);
    Linear wide = w;
    wide.scales = wide.zeros = nullptr;
    wide.group = 0;
    const int64_t tiles = (x.count + FLOAT_ROWS - 1) / FLOAT_ROWS;
    for (int64_t panel = first; panel < last; panel++) {
        widen_panel(w, panel, buffer.data());
        wide.weight = buffer.data() - panel * size;  // the tiles go by the panel's number
        const char* next = static_cast<const char*>(w.weight) + (panel + 1) * bytes;
        const int64_t part = panel + 1 < limit && tiles <= 32 ? bytes / tiles / 64 * 64 : 0;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = x.count * t / tiles, end = x.count * (t + 1) / tiles;
            tile<FLOAT_ROWS>(wide, panel, x, row, end - row, out, next + t * part, part);
        }
    }
}

static void any_linear(const Linear& w, const Rows& x, const Target& out, int64_t first,
                       int64_t last, int64_t limit) {
    if (w.group)
        grouped_linear(w, x, out, first, last, limit);
    else
        linear(w, x, out, first, last, limit);
}
