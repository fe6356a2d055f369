// Attention of single positions over long rows: over all keys, shared between threads, and over chosen ones.
//
// Keys are folded in tile by tile with a running softmax (Dao et al. 2022), so that no thread holds a row of scores.
// Choosing is described in `sparse.py`, which computes the same where there are no kernels.

#include "shared.h"

namespace {

constexpr int64_t kFold = 64;      // keys folded in at once
constexpr int64_t kSplit = 4096;   // keys of one task, where all are attended to
constexpr int64_t kFamily = 16;    // blocks that share a coarse bound

// What the query heads that share a key head have seen so far. `size` is constant where `SIZE` is not 0.
template <class T, int SIZE> class Running {
  public:
    Running(const T* query, int64_t share, int64_t any_size)
        : share_(share), any_(any_size), q_(share * size()), top_(share, -INFINITY), sum_(share),
          mixed_(share * size()) {
        const float scale = 1.0f / std::sqrt(static_cast<float>(size()));
        for (int64_t i = 0; i < share * size(); i++) q_[i] = load(query[i]) * scale;
    }

    int64_t size() const { return SIZE ? SIZE : any_; }
    const float* query(int64_t head) const { return q_.data() + head * size(); }

    void fold(const T* key, const T* value, int64_t count) {
        for (int64_t p = 0; p < count; p += kFold) {
            const int64_t some = std::min(kFold, count - p);
            for (int64_t h = 0; h < share_; h++) fold_tile(h, key + p * size(), value + p * size(), some);
        }
    }

    // What is merged of several tasks, per head: highest score, sum of weights, mixed values.
    void save(float* into) const {
        for (int64_t h = 0; h < share_; h++, into += size() + 2) {
            into[0] = top_[h], into[1] = sum_[h];
            std::copy_n(mixed_.data() + h * size(), size(), into + 2);
        }
    }

    void finish(T* out) const {
        for (int64_t h = 0; h < share_; h++)
            for (int64_t i = 0; i < size(); i++) out[h * size() + i] = store<T>(mixed_[h * size() + i] / sum_[h]);
    }

  private:
    void fold_tile(int64_t h, const T* key, const T* value, int64_t count) {
        float scores[kFold], highest = top_[h];
        const float* q = query(h);
        for (int64_t p = 0; p < count; p++) {
            const T* row = key + p * size();
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size(); i++) sum += q[i] * load(row[i]);
            scores[p] = sum;
        }
        for (int64_t p = 0; p < count; p++) highest = std::max(highest, scores[p]);
        float* mixed = mixed_.data() + h * size();
        if (highest > top_[h]) {
            const float shrink = exponential(top_[h] - highest);
            sum_[h] *= shrink;
            for (int64_t i = 0; i < size(); i++) mixed[i] *= shrink;
            top_[h] = highest;
        }
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t p = 0; p < count; p++) {
            scores[p] = exponential(scores[p] - highest);
            sum += scores[p];
        }
        sum_[h] += sum;
        for (int64_t p = 0; p < count; p++) {
            const T* row = value + p * size();
#pragma omp simd
            for (int64_t i = 0; i < size(); i++) mixed[i] += scores[p] * load(row[i]);
        }
    }

    int64_t share_, any_;
    std::vector<float> q_, top_, sum_, mixed_;
};

template <class T> const T* keys_of(const Place& place, int64_t layer, int64_t group) {
    return reinterpret_cast<const T*>(place.base) + layer * place.layer + group * place.head;
}

template <class T, int SIZE>
void attend_split_sized(const T* query, T* out, const Place* places, const int64_t* positions, int64_t layer,
                        int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {
    struct Task {
        int64_t token, group, start;
    };
    const int64_t share = heads / kv_heads, width = share * (size + 2);
    std::vector<Task> tasks;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t g = 0; g < kv_heads; g++)
            for (int64_t start = 0; start <= positions[t]; start += kSplit) tasks.push_back({t, g, start});
    const int64_t count = static_cast<int64_t>(tasks.size());
    std::vector<float> parts(count * width);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t n = 0; n < count; n++) {
        const auto [t, g, start] = tasks[n];
        Running<T, SIZE> running(query + (t * heads + g * share) * size, share, size);
        const T* key = keys_of<T>(places[t], layer, g) + start * size;
        running.fold(key, key + places[t].value, std::min(kSplit, positions[t] + 1 - start));
        running.save(parts.data() + n * width);
    }
    for (int64_t n = 0; n < count;) {
        int64_t end = n + 1;
        while (end < count && tasks[end].start > 0) end++;
        T* into = out + (tasks[n].token * heads + tasks[n].group * share) * size;
        for (int64_t h = 0; h < share; h++) {
            const int64_t offset = h * (size + 2);
            float top = -INFINITY, sum = 0;
            std::vector<float> mixed(size);
            for (int64_t m = n; m < end; m++) top = std::max(top, parts[m * width + offset]);
            for (int64_t m = n; m < end; m++) {
                const float* part = parts.data() + m * width + offset;
                const float weight = exponential(part[0] - top);
                sum += weight * part[1];
                for (int64_t i = 0; i < size; i++) mixed[i] += weight * part[2 + i];
            }
            for (int64_t i = 0; i < size; i++) into[h * size + i] = store<T>(mixed[i] / sum);
        }
        n = end;
    }
}

// Where a row's bounds lie: the first byte of its lowest and highest keys in layer 0, for blocks and for families
// of blocks, each with strides in elements. `kFamily` bounds lie side by side: for all lowest channels, then all
// highest ones, a line of `kFamily` numbers.
struct Bounds {
    int64_t fine, fine_layer, fine_head, coarse, coarse_layer, coarse_head;
};

// How many blocks are seen at the start, tokens at the end, chosen blocks, and tokens in a block.
struct Sparsity {
    int64_t sink_blocks, window, top_blocks, block;
};

// Compares bounds by the attention that queries would pay if they scored there what they can at most: the sum over
// the queries of each one's softmax over its bounds, squared.
template <class T> class Scout {
  public:
    // Bounds outside [low, high) do not count.
    Scout(const float* queries, int64_t rows, int64_t size, int64_t low, int64_t high)
        : queries_(queries), rows_(rows), size_(size), low_(low), high_(high), lines_(2 * size * kFamily),
          best_(rows, -INFINITY) {}

    // Considers the `kFamily` bounds at `lines`, which are numbered from `first` on.
    void look(const T* lines, int64_t first) {
        ids_.push_back(first);
        const int64_t from = std::max<int64_t>(low_ - first, 0), to = std::min(high_ - first, kFamily);
        for (int64_t i = 0; i < 2 * size_ * kFamily; i++) lines_[i] = load(lines[i]);
        scores_.resize(scores_.size() + rows_ * kFamily);
        float* scores = scores_.data() + scores_.size() - rows_ * kFamily;
        for (int64_t r = 0; r < rows_; r++, scores += kFamily) {
            const float* q = queries_ + r * size_;
            float sums[kFamily] = {};
            for (int64_t i = 0; i < size_; i++) {
                const float* line = lines_.data() + (q[i] < 0 ? i : size_ + i) * kFamily;
#pragma omp simd
                for (int64_t n = 0; n < kFamily; n++) sums[n] += q[i] * line[n];
            }
            float best = best_[r];
            for (int64_t n = 0; n < kFamily; n++) {
                scores[n] = n >= from && n < to ? sums[n] : -INFINITY;
                best = std::max(best, scores[n]);
            }
            best_[r] = best;
        }
    }

    // Returns the numbers of the `count` best bounds, or of all if there are no more, in ascending order.
    std::vector<int64_t> best(int64_t count) {
        std::vector<float> importance(ids_.size() * kFamily);
        for (int64_t r = 0; r < rows_; r++) {
            float sums[kFamily] = {}, sum = 0;
            for (size_t m = 0; m < ids_.size(); m++) {
                float* scores = scores_.data() + (m * rows_ + r) * kFamily;
#pragma omp simd
                for (int64_t n = 0; n < kFamily; n++) sums[n] += scores[n] = exponential(scores[n] - best_[r]);
            }
            for (int64_t n = 0; n < kFamily; n++) sum += sums[n];
            for (size_t m = 0; m < ids_.size(); m++) {
                const float* shares = scores_.data() + (m * rows_ + r) * kFamily;
#pragma omp simd
                for (int64_t n = 0; n < kFamily; n++) {
                    const float share = shares[n] / sum;
                    importance[m * kFamily + n] += share * share;
                }
            }
        }
        std::vector<int64_t> order;
        for (size_t i = 0; i < importance.size(); i++) {
            const int64_t number = ids_[i / kFamily] + static_cast<int64_t>(i) % kFamily;
            if (number >= low_ && number < high_) order.push_back(static_cast<int64_t>(i));
        }
        if (static_cast<int64_t>(order.size()) > count) {
            std::nth_element(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
                return importance[a] != importance[b] ? importance[a] > importance[b] : a < b;
            });
            order.resize(count);
        }
        for (int64_t& i : order) i = ids_[i / kFamily] + i % kFamily;
        std::sort(order.begin(), order.end());
        return order;
    }

  private:
    const float* queries_;
    int64_t rows_, size_, low_, high_;
    std::vector<int64_t> ids_;
    std::vector<float> lines_, scores_, best_;
};

// Returns `top` blocks of [low, high). Opens `kOpened` families for each.
constexpr int64_t kOpened = 2;

template <class T>
std::vector<int64_t> choose(const float* queries, int64_t rows, int64_t size, const T* fine, const T* coarse,
                            int64_t low, int64_t high, int64_t top) {
    const int64_t group = 2 * size * kFamily, first = low / kFamily, last = (high - 1) / kFamily + 1;
    Scout<T> families(queries, rows, size, first, last), blocks(queries, rows, size, low, high);
    for (int64_t n = first / kFamily; n <= (last - 1) / kFamily; n++)
        families.look(coarse + n * group, n * kFamily);
    for (int64_t family : families.best(kOpened * top))
        blocks.look(fine + family * group, family * kFamily);
    return blocks.best(top);
}

// Chooses for tiles of a prompt: `query` is [tiles, kv heads, rows, size], `local` the first block that each tile
// sees anyway, `out` [tiles, kv heads, top].
template <class T>
void choose_tiles(const T* query, const Bounds& at, const int64_t* local, int64_t* out, int64_t layer, int64_t tiles,
                  int64_t kv_heads, int64_t rows, int64_t size, int64_t sink_blocks, int64_t top) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t t = 0; t < tiles; t++) {
        for (int64_t g = 0; g < kv_heads; g++) {
            std::vector<float> queries(rows * size);
            const T* from = query + (t * kv_heads + g) * rows * size;
            for (int64_t i = 0; i < rows * size; i++) queries[i] = load(from[i]) * scale;
            const auto chosen = choose<T>(
                queries.data(), rows, size,
                reinterpret_cast<const T*>(at.fine) + layer * at.fine_layer + g * at.fine_head,
                reinterpret_cast<const T*>(at.coarse) + layer * at.coarse_layer + g * at.coarse_head, sink_blocks,
                local[t], top);
            std::copy(chosen.begin(), chosen.end(), out + (t * kv_heads + g) * top);
        }
    }
}

template <class T, int SIZE>
void attend_sparse_sized(const T* query, T* out, const Place* places, const Bounds* bounds, const int64_t* positions,
                         int64_t layer, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size,
                         const Sparsity& s) {
    const int64_t share = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t g = 0; g < kv_heads; g++) {
            const int64_t length = positions[t] + 1;
            const int64_t first = s.sink_blocks, last = std::max<int64_t>(0, length - s.window) / s.block;
            Running<T, SIZE> running(query + (t * heads + g * share) * size, share, size);
            const T* key = keys_of<T>(places[t], layer, g);
            const auto see = [&](int64_t from, int64_t to) {
                running.fold(key + from * size, key + places[t].value + from * size, to - from);
            };
            if (last - first <= s.top_blocks) {
                see(0, length);
            } else {
                const Bounds& at = bounds[t];
                const auto chosen = choose<T>(
                    running.query(0), share, size,
                    reinterpret_cast<const T*>(at.fine) + layer * at.fine_layer + g * at.fine_head,
                    reinterpret_cast<const T*>(at.coarse) + layer * at.coarse_layer + g * at.coarse_head, first,
                    last, s.top_blocks);
                see(0, first * s.block);
                for (int64_t block : chosen) see(block * s.block, (block + 1) * s.block);
                see(last * s.block, length);
            }
            running.finish(out + (t * heads + g * share) * size);
        }
    }
}

template <class T>
void attend_split(const T* query, T* out, const Place* places, const int64_t* positions, int64_t layer,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {
    const auto run = size == 16    ? attend_split_sized<T, 16>
                     : size == 64  ? attend_split_sized<T, 64>
                     : size == 128 ? attend_split_sized<T, 128>
                                   : attend_split_sized<T, 0>;
    run(query, out, places, positions, layer, tokens, heads, kv_heads, size);
}

template <class T>
void attend_sparse(const T* query, T* out, const Place* places, const Bounds* bounds, const int64_t* positions,
                   int64_t layer, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, const Sparsity& s) {
    const auto run = size == 16    ? attend_sparse_sized<T, 16>
                     : size == 64  ? attend_sparse_sized<T, 64>
                     : size == 128 ? attend_sparse_sized<T, 128>
                                   : attend_sparse_sized<T, 0>;
    run(query, out, places, bounds, positions, layer, tokens, heads, kv_heads, size, s);
}

}  // namespace

#define EXPORT(T, suffix)                                                                                            \
    void attend_split_##suffix(const T* query, T* out, const void* places, const int64_t* positions, int64_t layer,  \
                               int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {                      \
        attend_split<T>(query, out, static_cast<const Place*>(places), positions, layer, tokens, heads, kv_heads,    \
                        size);                                                                                       \
    }                                                                                                                \
    void attend_sparse_##suffix(const T* query, T* out, const void* places, const void* bounds,                      \
                                const int64_t* positions, int64_t layer, int64_t tokens, int64_t heads,              \
                                int64_t kv_heads, int64_t size, int64_t sink_blocks, int64_t window,                 \
                                int64_t top_blocks, int64_t block) {                                                 \
        attend_sparse<T>(query, out, static_cast<const Place*>(places), static_cast<const Bounds*>(bounds),          \
                         positions, layer, tokens, heads, kv_heads, size, {sink_blocks, window, top_blocks, block}); \
    }                                                                                                                \
    void choose_##suffix(const T* query, const void* bounds, const int64_t* local, int64_t* out, int64_t layer,      \
                         int64_t tiles, int64_t kv_heads, int64_t rows, int64_t size, int64_t sink_blocks,           \
                         int64_t top) {                                                                              \
        choose_tiles<T>(query, *static_cast<const Bounds*>(bounds), local, out, layer, tiles, kv_heads, rows, size,  \
                        sink_blocks, top);                                                                           \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
}
