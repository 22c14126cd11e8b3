// One step of a Llama-type decoder over paged keys and values, in a single call.
//
// The caller (executor.py) owns all memory; the structs here are mirrored in structs.py. Phases of a
// layer, each waiting for the one before:
//
//     norm -> qkv -> rotate, store keys and values -> attention -> output -> norm -> gate, up
//     -> [int8: quantise] -> down
//
// Of the tokens of a prompt only the last one's scores are wanted. The last layer stores the keys
// and values of all, and computes the rest for the wanted rows alone, which move to the front:
//
//     rows     0 1 2 3 4 5 | 6     a prompt of 6 tokens beside one that decodes
//     wanted             5   6     -> rows 0 and 1 of the last attention, MLP and head
//
// Of a group's rank, heads and MLP are its part, and the hidden states become whole after "output"
// and after "down": rank 0 adds its partial sums to them, the others put theirs in their place, and
// `total` (sums.py) makes each rank's into the sum over all ranks.
#include <memory>
#include <sys/mman.h>
#include <time.h>
#include "attention.h"
#include "grouped.h"
#include "linear.h"
#include "team.h"

struct Layer {
    Linear qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm;
};

struct Model {
    const Layer* layers;
    int64_t num_layers;
    Linear head;
    const float* norm;
    const float* embedding;  // (vocab, hidden), or null: then it is the packed float32 head
    const float *cosines, *sines;  // (positions, D / 2)
    int64_t hidden, heads, kv_heads, head_dim, middle;
    float eps;
    float scale;
    void (*total)(float* values, int64_t count);  // null: nobody else has a part of the model
    int64_t is_later_rank;
};

struct Workspace {
    float *hidden, *normed, *qkv, *attended, *activated;
    int8_t* quantised;
    float* scales;
    int32_t* starts;
    double* seconds;  // of products, attention, and all else, added up by thread 0
};

struct Batch {
    const int32_t *tokens, *positions, *slots;  // slot = block * 16 + offset
    int64_t num_tokens;
    const Span* spans;
    int64_t num_spans;
    const int32_t* tables;
    void *keys, *values;                // (layers, blocks, ...) as in attention.h
    float *key_scales, *value_scales;   // null for float32
    int64_t num_blocks;                 // the null block included
    int64_t null_block;
    const int32_t* wanted;  // rows whose scores are wanted, ascending; null: hidden states of all
    int64_t num_wanted;
    float* logits;    // (wanted, vocabulary rounded up to PANEL)
    int32_t* best;    // (wanted): the first of the highest scores; -1 where they are not finite
    uint8_t* unsound; // (tokens): 1 where hidden state, key or value is not finite
};

namespace {

enum Part { PRODUCTS, ATTENTION, REST };

// Adds the processor time between two calls to a part of the step: other processes on the same
// cores do not count, waiting at a barrier does.
class Clock {
  public:
    Clock(double* seconds, bool is_on) : seconds_(is_on ? seconds : nullptr) {}
    void charge(Part part) {
        if (!seconds_) return;
        double time = now();
        seconds_[part] += time - last_;
        last_ = time;
    }

  private:
    static double now() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return time.tv_sec + 1e-9 * time.tv_nsec;
    }

    double* seconds_;
    double last_ = now();
};

struct Item {
    const Span* span;
    int32_t head, first, count;
    int32_t to;  // row of the output
};

// Numbers handed out to whoever is free, with fresh counters for each phase. A phase has ended when
// all its work is done, not when all threads have come by: one that had to give its core away in
// between finds nothing left, and catches up without anybody having waited for it.
class Shares {
  public:
    explicit Shares(int64_t slots) : counters_(new Counter[slots]()) {}

    // Take numbers below `total` from `slot`; what is done is counted in slot `done`.
    template <class Work>
    void take(int64_t slot, int64_t done, int64_t total, int64_t chunk, const Work& work) {
        auto& next = counters_[slot].next;
        for (int64_t i; (i = next.fetch_add(chunk, std::memory_order_relaxed)) < total;) {
            const int64_t end = std::min(total, i + chunk);
            work(i, end);
            counters_[done].done.fetch_add(end - i, std::memory_order_acq_rel);
        }
    }

    void wait(int64_t done, int64_t total) {
        for (int spins = 0; counters_[done].done.load(std::memory_order_acquire) < total; spins++)
            spins < MAX_SPINS ? relax() : void(sched_yield());
    }

  private:
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
    };
    std::unique_ptr<Counter[]> counters_;
};

void normalise(const float* x, const float* weight, int64_t count, float eps, float* y) {
    Vec sum = {};
    for (int64_t i = 0; i < count; i += LANES) sum += load(x + i) * load(x + i);
    float scale = 1.0f / std::sqrt(sum_of(sum) / float(count) + eps);
    for (int64_t i = 0; i < count; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, float scale) {
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = (low * cosines[i] - high * sines[i]) * scale;
        x[i + half] = (high * cosines[i] + low * sines[i]) * scale;
    }
}

template <class T>
class Step {
  public:
    Step(const Model& model, const Workspace& space, const Batch& batch, Team& team)
        : m(model), s(space), b(batch), team_(team), shares_((model.num_layers * 11 + 7) * team.size()),
          is_int8_(model.layers[0].qkv.takes_int8()) {
        for (int64_t i = 0; i < b.num_spans; i++)
            for (int32_t first = 0; first < b.spans[i].count; first += QUERY_TOKENS)
                add_items(items_, b.spans[i], first,
                          std::min(QUERY_TOKENS, b.spans[i].count - first),
                          b.spans[i].row + first);
        const Span* span = b.spans;
        for (int32_t i = 0; i < b.num_wanted; i++) {
            while (b.wanted[i] >= span->row + span->count) span++;
            add_items(wanted_items_, *span, b.wanted[i] - span->row, 1, i);
        }
    }

    void operator()(int thread) {
        int64_t phase = 0;
        Clock clock(s.seconds, thread == 0);
        auto each = [&](int64_t total, int64_t chunk, auto work, Part part = REST) {
            const int64_t slot = phase++ * team_.size();
            shares_.take(slot, slot, total, chunk, work);
            shares_.wait(slot, total);
            clock.charge(part);
        };
        int64_t num = b.num_tokens;
        auto product = [&](const Linear& w, const float* x, Target out) {
            multiply(thread, phase++, w, x, out, num);
            clock.charge(PRODUCTS);
        };
        const Epilogue into_hidden = m.is_later_rank ? STORE : ADD;
        auto whole = [&] {
            const int64_t slot = phase++ * team_.size();
            if (!m.total) return;
            auto sum = [&](int64_t, int64_t) { m.total(s.hidden, num * m.hidden); };
            if (thread == 0) shares_.take(slot, slot, 1, 1, sum);  // it calls back into Python
            shares_.wait(slot, 1);
            clock.charge(REST);
        };
        auto rows = [&](auto work) {
            each(num, std::max<int64_t>(1, num / (4 * team_.size())), [&](int64_t i, int64_t end) {
                for (; i < end; i++) work(i);
            });
        };
        rows([&](int64_t row) { embed(row); });
        for (int64_t l = 0; l < m.num_layers; l++) {
            const Layer& layer = m.layers[l];
            const Cache<T> cache = cache_of(l);
            const bool is_last = b.wanted && l + 1 == m.num_layers;
            const auto& items = is_last ? wanted_items_ : items_;
            rows([&](int64_t row) { norm(row, layer.attention_norm); });
            product(layer.qkv, s.normed, {s.qkv, qkv_width(), STORE});
            if (is_last) rows([&](int64_t row) { check(row); });
            rows([&](int64_t row) { keep(row, cache); });
            if (is_last) num = b.num_wanted;
            if (!num) return;
            each(items.size(), 1, [&](int64_t i, int64_t) { attend_item(items, i, cache); },
                 ATTENTION);
            if (is_last) each(1, 1, [&](int64_t, int64_t) { gather(); });
            product(layer.output, s.attended, {s.hidden, m.hidden, into_hidden});
            whole();
            rows([&](int64_t row) { norm(row, layer.mlp_norm); });
            product(layer.gate_up, s.normed, {s.activated, m.middle, SWIGLU});
            if (is_int8_) rows([&](int64_t row) { quantise_row(s.activated, m.middle, row); });
            else phase++;
            product(layer.down, s.activated, {s.hidden, m.hidden, into_hidden});
            whole();
        }
        if (!b.wanted || !b.logits) return;
        rows([&](int64_t row) { norm(row, m.norm); });
        product(m.head, s.normed, {b.logits, m.head.panels() * PANEL, STORE});
        each(num, 1, [&](int64_t row, int64_t) { choose(row); });
    }

    // Logits (num, vocabulary rounded up to PANEL) of some rows of the hidden states.
    void score(int thread, const float* hidden, int64_t num, float* logits) {
        Clock clock(s.seconds, thread == 0);
        shares_.take(0, 0, num, 1, [&](int64_t i, int64_t) {
            normalise(hidden + i * m.hidden, m.norm, m.hidden, m.eps, s.normed + i * m.hidden);
            if (m.head.takes_int8()) quantise_row(s.normed, m.hidden, i);
        });
        shares_.wait(0, num);
        multiply(thread, 1, m.head, s.normed, {logits, m.head.panels() * PANEL, STORE}, num);
        clock.charge(PRODUCTS);
    }

  private:
    int64_t qkv_width() const { return (m.heads + 2 * m.kv_heads) * m.head_dim; }

    Cache<T> cache_of(int64_t layer) const {
        const int64_t pieces = layer * b.num_blocks * m.kv_heads, size = m.head_dim * BLOCK;
        return {static_cast<T*>(b.keys) + pieces * size, static_cast<T*>(b.values) + pieces * size,
                b.key_scales + pieces * BLOCK, b.value_scales + pieces * BLOCK, m.kv_heads,
                m.head_dim, b.null_block};
    }

    void add_items(std::vector<Item>& items, const Span& span, int32_t first, int32_t count,
                   int32_t to) {
        for (int32_t head = 0; head < m.kv_heads; head++)
            items.push_back({&span, head, first, count, to});
    }

    // Before the last layer's keys and values are stored: is all that this token leaves finite?
    // Whatever went wrong in a layer before has stayed in the hidden state.
    void check(int64_t row) {
        const float total = sum(s.hidden + row * m.hidden, m.hidden) +
                            sum(s.qkv + row * qkv_width(), qkv_width());
        b.unsound[row] = !(total - total == 0.0f);
    }

    static float sum(const float* x, int64_t count) {
        Vec total = {};
        for (int64_t i = 0; i < count; i += LANES) total += load(x + i);
        return sum_of(total);
    }

    // Hidden states of the wanted rows to the front.
    void gather() {
        for (int64_t i = 0; i < b.num_wanted; i++)
            std::memmove(s.hidden + i * m.hidden, s.hidden + b.wanted[i] * m.hidden,
                         m.hidden * sizeof(float));
    }

    void choose(int64_t row) {
        const float* x = b.logits + row * m.head.panels() * PANEL;
        const int64_t count = m.head.outputs, whole = count / LANES * LANES;
        const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Vec most = splat(-INFINITY), total = {};
        IVec where = {};
        for (int64_t i = 0; i < whole; i += LANES) {
            Vec scores = load(x + i);
            where = scores > most ? lanes + int32_t(i) : where;
            most = maximum(scores, most);
            total += scores;
        }
        float sum = sum_of(total), highest = -INFINITY;
        int32_t best = 0;
        for (int i = 0; i < LANES; i++)
            if (most[i] > highest || (most[i] == highest && where[i] < best))
                highest = most[i], best = where[i];
        for (int64_t i = whole; i < count; i++) {
            sum += x[i];
            if (x[i] > highest) highest = x[i], best = int32_t(i);
        }
        b.best[row] = sum - sum == 0.0f ? best : -1;
    }

    void embed(int64_t row) {
        int64_t token = b.tokens[row];
        float* x = s.hidden + row * m.hidden;
        if (m.embedding) {
            std::memcpy(x, m.embedding + token * m.hidden, m.hidden * sizeof(float));
            return;
        }
        const float* panel = static_cast<const float*>(m.head.weight) +
                             token / PANEL * m.hidden * PANEL + token % PANEL;
        for (int64_t k = 0; k < m.hidden; k++) x[k] = panel[k * PANEL];
    }

    void norm(int64_t row, const float* weight) {
        normalise(s.hidden + row * m.hidden, weight, m.hidden, m.eps, s.normed + row * m.hidden);
        if (is_int8_) quantise_row(s.normed, m.hidden, row);
    }

    void quantise_row(const float* values, int64_t width, int64_t row) {
        quantise_part(values + row * width, width, row * width);
    }

    void quantise_part(const float* values, int64_t count, int64_t at) {
        quantise(values, count, s.quantised + at, s.scales + at / GROUP, s.starts + at / GROUP);
    }

    // Each thread has a share of the panels, so that what it fetches ahead is its own, and helps the
    // others when that is done: a thread that had to give its core away does not hold up the rest.
    void multiply(int thread, int64_t phase, const Linear& w, const float* x, Target out,
                  int64_t num) {
        Rows rows{x, s.quantised, s.scales, s.starts, num, w.inputs};
        const int64_t panels = w.panels(), size = team_.size();
        for (int64_t i = 0; i < size; i++) {
            const int64_t owner = (thread + i) % size;
            const int64_t first = panels * owner / size, last = panels * (owner + 1) / size;
            auto some = [&](int64_t from, int64_t to) {
                any_linear(w, rows, out, first + from, first + to, last);
            };
            shares_.take(phase * size + owner, phase * size, last - first, 1, some);
        }
        shares_.wait(phase * size, panels);
    }

    void keep(int64_t row, Cache<T> cache) {
        float* x = s.qkv + row * qkv_width();
        const int64_t half = m.head_dim / 2, position = b.positions[row];
        const float *cosines = m.cosines + position * half, *sines = m.sines + position * half;
        for (int64_t h = 0; h < m.heads + m.kv_heads; h++)
            rotate(x + h * m.head_dim, cosines, sines, half, h < m.heads ? m.scale : 1.0f);
        const int64_t block = b.slots[row] / BLOCK, offset = b.slots[row] % BLOCK;
        for (int64_t h = 0; h < m.kv_heads; h++) {
            const float* key = x + (m.heads + h) * m.head_dim;
            cache.put(block, h, offset, key, key + m.kv_heads * m.head_dim);
        }
    }

    void attend_item(const std::vector<Item>& items, int64_t index, const Cache<T>& cache) {
        const Item& item = items[index];
        const Item& later = items[std::min<int64_t>(index + team_.size(), items.size() - 1)];
        const int64_t per_kv = m.heads / m.kv_heads, dim = m.head_dim, width = m.heads * dim;
        std::vector<Row> rows;
        rows.reserve(item.count * per_kv);
        for (int64_t t = item.first; t < item.first + item.count; t++) {
            for (int64_t h = item.head * per_kv; h < (item.head + 1) * per_kv; h++) {
                const int64_t row = item.span->row + t, to = item.to + t - item.first;
                float* output = s.attended + to * width + h * dim;
                std::fill(output, output + dim, 0.0f);
                rows.push_back({s.qkv + row * qkv_width() + h * dim, output, item.span->start + t,
                                {-INFINITY, Vec{}}});
            }
        }
        Segment<T> after = find(cache, b.tables + later.span->table, later.head, 0,
                             later.span->start + later.first + 1);
        attend(rows.data(), rows.size(), cache, b.tables + item.span->table, item.head, after);
        if (is_int8_)
            for (auto& row : rows) quantise_part(row.output, dim, row.output - s.attended);
    }

    const Model& m;
    const Workspace& s;
    const Batch& b;
    Team& team_;
    Shares shares_;
    bool is_int8_;
    std::vector<Item> items_, wanted_items_;
};

// Signed bytes with one scale per output; returns the scale.
float to_int8(const float* row, int64_t inputs, int8_t* q) {
    float largest = 0.0f;
    for (int64_t k = 0; k < inputs; k++) largest = std::max(largest, std::fabs(row[k]));
    float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t k = 0; k < inputs; k++) q[k] = int8_t(std::nearbyint(row[k] * inverse));
    return largest / 127.0f;
}

}  // namespace

extern "C" {

// Ask for huge pages before a large buffer is first written: streaming crosses fewer page borders.
void advise_huge(char* begin, int64_t bytes) {
    constexpr uintptr_t SIZE = 2 << 20;
    uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + SIZE - 1) / SIZE * SIZE;
    uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / SIZE * SIZE;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

Team* team_new(int size) { return new Team(size); }
void team_delete(Team* team) { delete team; }
const char* kernels() {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return "avx512-vnni";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "portable";
#endif
}

// Pack a row of W (inputs) as output `index` of a matrix; see linear.h.
void pack_float(const float* row, int64_t index, int64_t inputs, float* packed) {
    float* panel = packed + index / PANEL * PANEL * inputs + index % PANEL;
    for (int64_t k = 0; k < inputs; k++) panel[k * PANEL] = row[k];
}

void pack_floats(const float* rows, const int64_t* indices, int64_t num, int64_t inputs,
                 float* packed) {
    for (int64_t i = 0; i < num; i++) pack_float(rows + i * inputs, indices[i], inputs, packed);
}

void pack_int8s(const float* rows, const int64_t* indices, int64_t num, int64_t inputs,
                uint8_t* packed, float* scales) {
    std::vector<int8_t> q(inputs);
    for (int64_t i = 0; i < num; i++) {
        int64_t index = indices[i];
        scales[index] = to_int8(rows + i * inputs, inputs, q.data());
        uint8_t* panel = packed + index / PANEL * PANEL * inputs + index % PANEL * 4;
        for (int64_t k = 0; k < inputs; k++)
            panel[k / 4 * 4 * PANEL + k % 4] = uint8_t(q[k] + 128);
    }
}

void decoder_forward(Team* team, const Model* model, const Workspace* space, const Batch* batch) {
    if (batch->key_scales) {
        Step<int8_t> step(*model, *space, *batch, *team);
        team->run([&](int thread) { step(thread); });
    } else {
        Step<float> step(*model, *space, *batch, *team);
        team->run([&](int thread) { step(thread); });
    }
}

void decoder_logits(Team* team, const Model* model, const Workspace* space, const float* hidden,
                    int64_t num, float* logits) {
    Batch none{};
    Step<float> step(*model, *space, none, *team);
    team->run([&](int thread) { step.score(thread, hidden, num, logits); });
}

// y = x W^T alone, for tests and measurements; x (num, inputs), y (num, panels * 32).
void linear_run(Team* team, const Linear* w, const Workspace* space, const float* x, int64_t num,
                float* y) {
    Shares shares(1);
    team->run([&](int thread) {
        if (w->takes_int8()) {
            shares.take(0, 0, num, 1, [&](int64_t i, int64_t) {
                int64_t at = i * w->inputs;
                quantise(x + at, w->inputs, space->quantised + at, space->scales + at / GROUP,
                         space->starts + at / GROUP);
            });
            team->meet();
        }
        Rows rows{x, space->quantised, space->scales, space->starts, num, w->inputs};
        int64_t panels = w->panels(), size = team->size();
        any_linear(*w, rows, {y, panels * PANEL, STORE}, panels * thread / size,
               panels * (thread + 1) / size, panels);
    });
}
}
