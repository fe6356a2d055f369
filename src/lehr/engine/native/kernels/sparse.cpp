// Attention of single positions over long rows: over all keys, shared between threads, and over chosen ones.
//
// Keys are folded in tile by tile with a running softmax (Dao et al. 2022), so that no thread holds a row of scores.
// Choosing is described in `sparse.py`, which computes the same where there are no kernels.

#include <numeric>

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
// of blocks, each with strides in elements. A bound is all lowest channels, then all highest.
struct Bounds {
    int64_t fine, fine_layer, fine_head, coarse, coarse_layer, coarse_head;
};

// How many blocks are seen at the start, tokens at the end, chosen blocks, and tokens in a block.
struct Sparsity {
    int64_t sink_blocks, window, top_blocks, block;
};

// Appends to `importance` that of bounds [first, last): the most that any head can score there, less the most that
// it can score anywhere in its range, which only `settle` knows.
template <class T, int SIZE> class Scout {
  public:
    Scout(const Running<T, SIZE>& running, int64_t share) : running_(running), share_(share) {}

    void look(const T* bounds, int64_t first, int64_t last) {
        const int64_t size = running_.size();
        for (int64_t n = first; n < last; n++) {
            const T *low = bounds + n * 2 * size, *high = low + size;
            ids.push_back(n);
            for (int64_t h = 0; h < share_; h++) {
                const float* q = running_.query(h);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < size; i++) {
                    const float a = q[i] * load(low[i]), b = q[i] * load(high[i]);
                    sum += a > b ? a : b;
                }
                scores_.push_back(sum);
            }
        }
    }

    // Keeps the `count` most important ids, in ascending order.
    void settle(int64_t count) {
        const int64_t found = static_cast<int64_t>(ids.size());
        if (found <= count) return;
        std::vector<float> best(share_, -INFINITY), importance(found, -INFINITY);
        for (int64_t n = 0; n < found; n++)
            for (int64_t h = 0; h < share_; h++) best[h] = std::max(best[h], scores_[n * share_ + h]);
        for (int64_t n = 0; n < found; n++)
            for (int64_t h = 0; h < share_; h++)
                importance[n] = std::max(importance[n], scores_[n * share_ + h] - best[h]);
        std::vector<int64_t> order(found);
        std::iota(order.begin(), order.end(), 0);
        std::nth_element(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
            return importance[a] != importance[b] ? importance[a] > importance[b] : a < b;
        });
        std::sort(order.begin(), order.begin() + count);
        for (int64_t n = 0; n < count; n++) order[n] = ids[order[n]];
        ids.assign(order.begin(), order.begin() + count);
    }

    std::vector<int64_t> ids;

  private:
    const Running<T, SIZE>& running_;
    int64_t share_;
    std::vector<float> scores_;
};

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
                Scout<T, SIZE> families(running, share), chosen(running, share);
                families.look(reinterpret_cast<const T*>(at.coarse) + layer * at.coarse_layer + g * at.coarse_head,
                              first / kFamily, (last - 1) / kFamily + 1);
                families.settle(2 * s.top_blocks);
                const T* fine = reinterpret_cast<const T*>(at.fine) + layer * at.fine_layer + g * at.fine_head;
                for (int64_t family : families.ids)
                    chosen.look(fine, std::max(first, family * kFamily), std::min(last, (family + 1) * kFamily));
                chosen.settle(s.top_blocks);
                see(0, first * s.block);
                for (int64_t block : chosen.ids) see(block * s.block, (block + 1) * s.block);
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
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
}
