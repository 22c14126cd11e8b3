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
//
// Stored as int8, keys and values have one scale per token and KV head, max |x| / 127. The scales of
// 16 tokens are a vector too: the keys' multiply the scores, the values' multiply the weights.
#pragma once
#include <algorithm>
#include <cmath>
#include "vec.h"

constexpr int BLOCK = LANES;
constexpr int SEGMENT = 4 * BLOCK;
constexpr int MAX_ROWS = 6;       // 24 accumulators
constexpr int QUERY_TOKENS = 32;  // tokens of a chunk per work item

// One layer's keys and values; T is float, or int8_t with scales.
template <class T>
struct Cache {
    T* keys;    // (blocks, K, D, 16)
    T* values;  // (blocks, K, 16, D)
    float* key_scales;    // (blocks, K, 16)
    float* value_scales;  // (blocks, K, 16)
    int64_t kv_heads;
    int64_t head_dim;
    int64_t null_block;  // all zeros

    int64_t piece(int64_t block, int64_t head) const { return block * kv_heads + head; }
    T* key_block(int64_t piece) const { return keys + piece * head_dim * BLOCK; }
    T* value_block(int64_t piece) const { return values + piece * head_dim * BLOCK; }

    // Store key and value (D) of one token.
    void put(int64_t block, int64_t head, int64_t offset, const float* key, const float* value) {
        const int64_t at = piece(block, head);
        T* tokens = key_block(at) + offset;
        T* row = value_block(at) + offset * head_dim;
        float key_inverse = 1.0f, value_inverse = 1.0f;
        if constexpr (sizeof(T) == 1) {
            key_inverse = set_scale(key_scales[at * BLOCK + offset], key);
            value_inverse = set_scale(value_scales[at * BLOCK + offset], value);
        }
        for (int64_t d = 0; d < head_dim; d += LANES) {
            alignas(64) T part[LANES];
            keep(part, load(key + d), key_inverse);
            for (int i = 0; i < LANES; i++) tokens[(d + i) * BLOCK] = part[i];
            keep(row + d, load(value + d), value_inverse);
        }
    }

  private:
    static void keep(T* to, Vec x, float inverse) {
        if constexpr (sizeof(T) == 1) {
            x = rounded(x * inverse);
            store(to, __builtin_convertvector(x == x ? x : Vec{}, IVec));
        } else {
            store(to, x);
        }
    }

    // The scale of a vector, and its inverse; NaN and infinity go on in the scale.
    float set_scale(float& scale, const float* x) const {
        Vec largest = {}, total = {};
        for (int64_t d = 0; d < head_dim; d += LANES) {
            Vec part = load(x + d);
            largest = maximum(largest, maximum(part, -part));
            total += part;
        }
        const float most = max_of(largest), sum = sum_of(total);
        const bool is_sound = sum - sum == 0.0f;
        scale = is_sound ? most / 127.0f : sum;
        return is_sound && most > 0.0f ? 127.0f / most : 0.0f;
    }
};

// Consecutive tokens of one request: their first row, position, number, and the block table.
struct Span {
    int32_t row;
    int32_t start;
    int32_t count;
    int32_t table;
};

// Four blocks of keys and values, and those to fetch meanwhile: the hardware does not foresee
// where the next block lies.
template <class T>
struct Segment {
    const T *keys[4], *values[4];
    const float *key_scales[4], *value_scales[4];
};

constexpr int LINE = 64;

// Scores of BLOCKS blocks from `first` on.
template <int R, int BLOCKS, class T>
static void score_blocks(const float* const* queries, const Segment<T>& now, const Segment<T>& next,
                         int64_t head_dim, float* scores, int first) {
    Part acc[R][BLOCKS][PARTS] = {};
    for (int64_t d = 0; d < head_dim; d++) {
        Part k[BLOCKS][PARTS];
        for (int j = 0; j < BLOCKS; j++) {
            load_parts(k[j], now.keys[first + j] + d * BLOCK);
            if (d % (LINE / (BLOCK * sizeof(T))) == 0)
                __builtin_prefetch(next.keys[first + j] + d * BLOCK, 0, 2);
        }
        for (int r = 0; r < R; r++) {
            Part q = splat_part(queries[r][d]);
            for (int j = 0; j < BLOCKS; j++)
                for (int p = 0; p < PARTS; p++) acc[r][j][p] += q * k[j][p];
        }
    }
    for (int j = 0; j < BLOCKS; j++) {
        for (int r = 0; r < R; r++) {
            Vec whole = whole_of(acc[r][j]);
            if constexpr (sizeof(T) == 1) whole *= load(now.key_scales[first + j]);
            store(scores + r * SEGMENT + (first + j) * BLOCK, whole);
        }
    }
}

template <int R, class T>
static void score(const float* const* queries, const Segment<T>& now, const Segment<T>& next,
                  int64_t head_dim, float* scores) {
    constexpr int BLOCKS = PARTS == 1 ? 4 : 1;  // whose sums fit into the registers
    for (int first = 0; first < 4; first += BLOCKS)
        score_blocks<R, BLOCKS>(queries, now, next, head_dim, scores, first);
}

template <int R, int W, class T>
static void weigh(const float* weights, const Segment<T>& now, const Segment<T>& next, int64_t tokens,
                  int64_t head_dim, int64_t column, float* const* outputs, const float* factors) {
    Part acc[R][W][PARTS];
    for (int r = 0; r < R; r++) {
        for (int j = 0; j < W; j++) {
            load_parts(acc[r][j], outputs[r] + column + j * LANES);
            for (int p = 0; p < PARTS; p++) acc[r][j][p] *= factors[r];
        }
    }
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t offset = (t % BLOCK) * head_dim + column;
        Part values[W][PARTS];
        for (int j = 0; j < W; j++) {
            load_parts(values[j], now.values[t / BLOCK] + offset + j * LANES);
            if (j % (LINE / (LANES * sizeof(T))) == 0)
                __builtin_prefetch(next.values[t / BLOCK] + offset + j * LANES, 0, 2);
        }
        for (int r = 0; r < R; r++) {
            Part weight = splat_part(weights[r * SEGMENT + t]);
            for (int j = 0; j < W; j++)
                for (int p = 0; p < PARTS; p++) acc[r][j][p] += weight * values[j][p];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) store(outputs[r] + column + j * LANES, whole_of(acc[r][j]));
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

template <int R, class T>
static void segment_rows(Row* rows, const Segment<T>& now, const Segment<T>& next, int64_t start, int64_t head_dim) {
    alignas(64) float scores[R * SEGMENT];
    const float* queries[R];
    float* outputs[R];
    float factors[R];
    for (int r = 0; r < R; r++) queries[r] = rows[r].query, outputs[r] = rows[r].output;
    score<R>(queries, now, next, head_dim, scores);
    int64_t tokens = 0;
    for (int r = 0; r < R; r++) {
        int64_t visible = std::clamp<int64_t>(rows[r].position + 1 - start, 0, SEGMENT);
        factors[r] = soften(scores + r * SEGMENT, visible, rows[r].running);
        tokens = std::max(tokens, visible);
        if constexpr (sizeof(T) == 1) {
            for (int j = 0; j < 4; j++) {
                float* weights = scores + r * SEGMENT + j * BLOCK;
                store(weights, load(weights) * load(now.value_scales[j]));
            }
        }
    }
    constexpr int WIDTH = PARTS == 1 ? 4 : 1;  // whose sums fit into the registers
    int64_t column = 0;
    for (; column + WIDTH * LANES <= head_dim; column += WIDTH * LANES)
        weigh<R, WIDTH>(scores, now, next, tokens, head_dim, column, outputs, factors);
    for (; column < head_dim; column += LANES)
        weigh<R, 1>(scores, now, next, tokens, head_dim, column, outputs, factors);
}

template <class T>
static void segment_any(int64_t num, Row* rows, const Segment<T>& now, const Segment<T>& next, int64_t start, int64_t head_dim) {
    switch (num) {
        case 1: return segment_rows<1>(rows, now, next, start, head_dim);
        case 2: return segment_rows<2>(rows, now, next, start, head_dim);
        case 3: return segment_rows<3>(rows, now, next, start, head_dim);
        case 4: return segment_rows<4>(rows, now, next, start, head_dim);
        case 5: return segment_rows<5>(rows, now, next, start, head_dim);
        default: return segment_rows<6>(rows, now, next, start, head_dim);
    }
}

// Where the blocks of a request's segment at `start` are; those past its end are zeros.
template <class T>
static Segment<T> find(const Cache<T>& cache, const int32_t* table, int64_t head, int64_t start,
                    int64_t end) {
    Segment<T> found;
    for (int j = 0; j < 4; j++) {
        int64_t index = start / BLOCK + j;
        int64_t block = index * BLOCK < end ? table[index] : cache.null_block;
        int64_t piece = cache.piece(block, head);
        found.keys[j] = cache.key_block(piece);
        found.values[j] = cache.value_block(piece);
        found.key_scales[j] = cache.key_scales + piece * BLOCK;
        found.value_scales[j] = cache.value_scales + piece * BLOCK;
    }
    return found;
}

// All rows, in the order of their positions, over the request's blocks; outputs start as zeros.
// `after` is what this thread is likely to read next.
template <class T>
static void attend(Row* rows, int64_t num, const Cache<T>& cache, const int32_t* table,
                   int64_t head, const Segment<T>& after) {
    const int64_t end = rows[num - 1].position + 1;
    Segment<T> now = find(cache, table, head, 0, end);
    for (int64_t start = 0; start < end; start += SEGMENT) {
        const bool is_last = start + SEGMENT >= end;
        Segment<T> next = is_last ? after : find(cache, table, head, start + SEGMENT, end);
        for (int64_t r = 0; r < num; r += MAX_ROWS) {
            int64_t some = std::min<int64_t>(MAX_ROWS, num - r);
            if (rows[r + some - 1].position < start) continue;
            // Fetched once, with the last rows: they see all of the segment's tokens.
            const Segment<T>& ahead = r + some == num ? next : now;
            segment_any(some, rows + r, now, ahead, start, cache.head_dim);
        }
        now = next;
    }
    for (int64_t r = 0; r < num; r++) {
        float inverse = 1.0f / sum_of(rows[r].running.sum);
        for (int64_t d = 0; d < cache.head_dim; d += LANES)
            store(rows[r].output + d, load(rows[r].output + d) * inverse);
    }
}
