// Paged attention that reads the blocks where they are.
//
// A block holds 16 tokens. Per KV head its keys are stored with the tokens innermost, [D][16], and
// its values as [16][D], so that scores and outputs are both sums of vectors and nothing is summed
// across a register:
//
//     scores of 16 tokens   += q[d] * keys[d][0..15]        for d in 0..D
//     output (D elements)   += p[t] * values[t][0..D]       for t in 0..16
//
// One pass over a KV head serves all its query heads, and for a prompt's chunk 32 tokens at a time.
// Contexts are taken in segments of 64 tokens counted from position 0, with a running maximum and
// sum (Milakov and Gimelshein 2018, algorithm 3). Where a segment ends depends on nothing but
// positions, so a token's output is the same bits alone, in a batch, or in another chunking.
#pragma once
#include <algorithm>
#include "vec.h"

constexpr int BLOCK = LANES;
constexpr int SEGMENT = 4 * BLOCK;
constexpr int MAX_ROWS = 6;       // 24 accumulators
constexpr int QUERY_TOKENS = 32;  // tokens of a chunk per work item

struct Cache {
    float* keys;    // of this layer: (blocks, K, D, 16)
    float* values;  // of this layer: (blocks, K, 16, D)
    int64_t kv_heads;
    int64_t head_dim;
    int64_t null_block;  // all zeros
    float* key_block(int64_t block, int64_t head) const {
        return keys + (block * kv_heads + head) * head_dim * BLOCK;
    }
    float* value_block(int64_t block, int64_t head) const {
        return values + (block * kv_heads + head) * head_dim * BLOCK;
    }
};

// Consecutive tokens of one request: their first row, position, number, and the block table.
struct Span {
    int32_t row;
    int32_t start;
    int32_t count;
    int32_t table;
};

template <int R>
static void score(const float* const* queries, const float* const* keys, int64_t head_dim,
                  float* scores) {
    Vec acc[R][4] = {};
    for (int64_t d = 0; d < head_dim; d++) {
        Vec k[4];
        for (int j = 0; j < 4; j++) k[j] = load(keys[j] + d * BLOCK);
        for (int r = 0; r < R; r++) {
            Vec q = splat(queries[r][d]);
            for (int j = 0; j < 4; j++) acc[r][j] += q * k[j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) store(scores + r * SEGMENT + j * BLOCK, acc[r][j]);
}

template <int R, int W>
static void weigh(const float* weights, const float* const* values, int64_t tokens,
                  int64_t head_dim, int64_t column, float* const* outputs, const float* factors) {
    Vec acc[R][W];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++)
            acc[r][j] = load(outputs[r] + column + j * LANES) * factors[r];
    for (int64_t t = 0; t < tokens; t++) {
        const float* v = values[t / BLOCK] + (t % BLOCK) * head_dim + column;
        Vec parts[W];
        for (int j = 0; j < W; j++) parts[j] = load(v + j * LANES);
        for (int r = 0; r < R; r++) {
            Vec p = splat(weights[r * SEGMENT + t]);
            for (int j = 0; j < W; j++) acc[r][j] += p * parts[j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) store(outputs[r] + column + j * LANES, acc[r][j]);
}

// What a row has seen so far.
struct Running {
    float maximum;
    Vec sum;
};

// Scores to weights in place, of which the first `visible` count; returns the factor for what
// was summed up before.
static inline float soften(float* scores, int64_t visible, Running& running) {
    const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vec parts[4], largest = splat(running.maximum);
    IVec is_seen[4];
    for (int j = 0; j < 4; j++) {
        is_seen[j] = lanes + j * LANES < int32_t(visible);
        parts[j] = load(scores + j * LANES);
        largest = maximum(largest, is_seen[j] ? parts[j] : largest);
    }
    float now = max_of(largest);
    float factor = exp_of(splat(running.maximum - now))[0];
    running.sum *= factor;
    for (int j = 0; j < 4; j++) {
        parts[j] = is_seen[j] ? exp_of(parts[j] - now) : Vec{};
        running.sum += parts[j];
        store(scores + j * LANES, parts[j]);
    }
    running.maximum = now;
    return factor;
}

struct Row {
    const float* query;
    float* output;
    int64_t position;
    Running running;
};

template <int R>
static void segment_rows(Row* rows, const float* const* keys, const float* const* values,
                         int64_t start, int64_t head_dim) {
    alignas(64) float scores[R * SEGMENT];
    const float* queries[R];
    float* outputs[R];
    float factors[R];
    for (int r = 0; r < R; r++) queries[r] = rows[r].query, outputs[r] = rows[r].output;
    score<R>(queries, keys, head_dim, scores);
    int64_t tokens = 0;
    for (int r = 0; r < R; r++) {
        int64_t visible = std::clamp<int64_t>(rows[r].position + 1 - start, 0, SEGMENT);
        factors[r] = soften(scores + r * SEGMENT, visible, rows[r].running);
        tokens = std::max(tokens, visible);
    }
    int64_t column = 0;
    for (; column + 4 * LANES <= head_dim; column += 4 * LANES)
        weigh<R, 4>(scores, values, tokens, head_dim, column, outputs, factors);
    for (; column < head_dim; column += LANES)
        weigh<R, 1>(scores, values, tokens, head_dim, column, outputs, factors);
}

static void segment_any(int64_t num, Row* rows, const float* const* keys,
                        const float* const* values, int64_t start, int64_t head_dim) {
    switch (num) {
        case 1: return segment_rows<1>(rows, keys, values, start, head_dim);
        case 2: return segment_rows<2>(rows, keys, values, start, head_dim);
        case 3: return segment_rows<3>(rows, keys, values, start, head_dim);
        case 4: return segment_rows<4>(rows, keys, values, start, head_dim);
        case 5: return segment_rows<5>(rows, keys, values, start, head_dim);
        default: return segment_rows<6>(rows, keys, values, start, head_dim);
    }
}

// All rows, in the order of their positions, over the request's blocks; outputs start as zeros.
static void attend(Row* rows, int64_t num, const Cache& cache, const int32_t* table, int64_t head) {
    const int64_t end = rows[num - 1].position + 1;
    for (int64_t start = 0; start < end; start += SEGMENT) {
        const float *keys[4], *values[4];
        for (int j = 0; j < 4; j++) {
            int64_t index = start / BLOCK + j;
            int64_t block = index * BLOCK < end ? table[index] : cache.null_block;
            keys[j] = cache.key_block(block, head);
            values[j] = cache.value_block(block, head);
        }
        for (int64_t r = 0; r < num; r += MAX_ROWS) {
            int64_t some = std::min<int64_t>(MAX_ROWS, num - r);
            if (rows[r + some - 1].position < start) continue;
            segment_any(some, rows + r, keys, values, start, cache.head_dim);
        }
    }
    for (int64_t r = 0; r < num; r++) {
        float inverse = 1.0f / sum_of(rows[r].running.sum);
        for (int64_t d = 0; d < cache.head_dim; d += LANES)
            store(rows[r].output + d, load(rows[r].output + d) * inverse);
    }
}
