// What runs between the matrix products of a step, each in one pass over its rows.
//
// Values are float or bfloat16 (as uint16_t); every sum, exponential and product is in float32, and results are
// rounded to bfloat16 where the plain decoder rounds them, so that both give the same numbers. Rows are divided
// between the threads of the OpenMP pool that torch uses.

#include <type_traits>

#include "attend.h"
#include "lanes.h"
#include "shared.h"

namespace {

template <class T>
void norm_rows(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > kWorthSharing)
    for (int64_t row = 0; row < rows; row++) {
        T* x_row = x + row * size;
        const T* delta_row = delta ? delta + row * size : nullptr;
        T* out_row = out + row * size;
        float sum = 0;
        if (delta_row) {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) {
                T value = store<T>(load(x_row[i]) + load(delta_row[i]));
                x_row[i] = value;
                sum += load(value) * load(value);
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) sum += load(x_row[i]) * load(x_row[i]);
        }
        float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out_row[i] = store<T>(load(x_row[i]) * scale * load(weight[i]));
    }
}

template <class T> void gated(const T* gate_up, T* out, int64_t rows, int64_t inner) {
#pragma omp parallel for if (rows * inner > kWorthSharing)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = gate_up + row * 2 * inner;
        const T* up = gate + inner;
        T* out_row = out + row * inner;
#pragma omp simd
        for (int64_t i = 0; i < inner; i++) {
            float g = load(gate[i]);
            float silu = g / (1.0f + exponential(-g));
            out_row[i] = store<T>(rounded<T>(silu) * load(up[i]));
        }
    }
}

template <class T>
void rotate_store(const T* qkv, const T* cos, const T* sin, const T* q_weight, const T* k_weight, T* query,
                  const Place* places, const int64_t* positions, int64_t layer, int64_t tokens, int64_t heads,
                  int64_t kv_heads, int64_t size, float eps) {
    const int64_t width = (heads + 2 * kv_heads) * size, half = size / 2;
#pragma omp parallel for if (tokens * width > kWorthSharing)
    for (int64_t t = 0; t < tokens; t++) {
        const T* in = qkv + t * width;
        const T *c = cos + t * half, *s = sin + t * half;
        for (int64_t h = 0; h < heads; h++)
            turn(in + h * size, q_weight, c, s, query + (t * heads + h) * size, size, eps);
        const Place& place = places[t];
        T* key = reinterpret_cast<T*>(place.base) + layer * place.layer + positions[t] * size;
        for (int64_t k = 0; k < kv_heads; k++) {
            turn(in + (heads + k) * size, k_weight, c, s, key + k * place.head, size, eps);
            std::memcpy(key + place.value + k * place.head, in + (heads + kv_heads + k) * size, size * sizeof(T));
        }
    }
}

// Positions for which memory is asked at a time: the processor takes few such requests at once.
constexpr int64_t kFew = 16;

// Scores of HEADS queries over `count` positions, and the mixes of their values by weight: each key and value is
// widened once for all of them. Sums are kept in registers, those of four positions and of four vectors at a time.
template <class T, int SIZE, int HEADS>
void score(const float* query, const T* key, float* scores, int64_t line, int64_t count) {
    for (int64_t p = 0; p < count; p += kLanes) {
        Floats sums[HEADS][kLanes];
        for (int64_t at = 0; at < kLanes; at += 4) {
            const T* rows[4];
            for (int64_t j = 0; j < 4; j++) rows[j] = key + std::min(p + at + j, count - 1) * SIZE;
            Floats some[HEADS][4] = {};
            for (int64_t i = 0; i < SIZE; i += kLanes) {
                Floats q[HEADS];
                for (int h = 0; h < HEADS; h++) q[h] = lanes_at(query + h * SIZE + i);
                for (int j = 0; j < 4; j++) {
                    const Floats part = lanes_at(rows[j] + i);
                    for (int h = 0; h < HEADS; h++) some[h][j] = multiplied(q[h], part, some[h][j]);
                }
            }
            for (int h = 0; h < HEADS; h++)
                for (int j = 0; j < 4; j++) sums[h][at + j] = some[h][j];
        }
        for (int h = 0; h < HEADS; h++) {
            const Floats found = each_summed(sums[h]);
            std::memcpy(scores + h * line + p, &found, std::min(kLanes, count - p) * sizeof(float));
        }
    }
}

template <class T, int SIZE, int HEADS>
void mix(const float* weights, int64_t line, const T* value, float* mixed, int64_t count) {
    for (int64_t i = 0; i < SIZE; i += 4 * kLanes) {
        Floats sums[HEADS][4];
        for (int h = 0; h < HEADS; h++) std::memcpy(sums[h], mixed + h * SIZE + i, sizeof sums[h]);
        for (int64_t p = 0; p < count; p++) {
            const T* row = value + p * SIZE + i;
            Floats shares[HEADS];
            for (int h = 0; h < HEADS; h++) shares[h] = weights[h * line + p] - Floats{};
            for (int n = 0; n < 4; n++) {
                const Floats part = lanes_at(row + n * kLanes);
                for (int h = 0; h < HEADS; h++) sums[h][n] = multiplied(shares[h], part, sums[h][n]);
            }
        }
        for (int h = 0; h < HEADS; h++) std::memcpy(mixed + h * SIZE + i, sums[h], sizeof sums[h]);
    }
}

// The same for a size that is only known at run time, one head after the other.
template <class T>
void score_any(const float* query, const T* key, float* scores, int64_t count, int64_t size) {
    for (int64_t p = 0; p < count; p++) {
        const T* row = key + p * size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += query[i] * load(row[i]);
        scores[p] = sum;
    }
}

template <class T>
void mix_any(const float* weights, const T* value, float* mixed, int64_t count, int64_t size) {
    for (int64_t p = 0; p < count; p++)
#pragma omp simd
        for (int64_t i = 0; i < size; i++) mixed[i] += weights[p] * load(value[p * size + i]);
}

// Calls `work` with a constant number of heads, 1 to 3, until `share` are done.
template <class Work> inline void by_heads(int64_t share, const Work& work) {
    for (int64_t h = 0; h < share;) {
        const int64_t left = share - h, some = left == 4 ? 2 : std::min<int64_t>(left, 3);
        if (some == 3)
            work(h, std::integral_constant<int, 3>());
        else if (some == 2)
            work(h, std::integral_constant<int, 2>());
        else
            work(h, std::integral_constant<int, 1>());
        h += some;
    }
}

template <class T, int SIZE>
void score_all(const float* query, const T* key, float* scores, int64_t line, int64_t count, int64_t share,
               int64_t size) {
    if constexpr (SIZE > 0)
        by_heads(share, [&](int64_t h, auto heads) {
            score<T, SIZE, heads()>(query + h * SIZE, key, scores + h * line, line, count);
        });
    else
        for (int64_t h = 0; h < share; h++) score_any(query + h * size, key, scores + h * line, count, size);
}

template <class T, int SIZE>
void mix_all(const float* weights, int64_t line, const T* value, float* mixed, int64_t count, int64_t share,
             int64_t size) {
    if constexpr (SIZE > 0)
        by_heads(share, [&](int64_t h, auto heads) {
            mix<T, SIZE, heads()>(weights + h * line, line, value, mixed + h * SIZE, count);
        });
    else
        for (int64_t h = 0; h < share; h++) mix_any(weights + h * line, value, mixed + h * size, count, size);
}

template <class T> inline const T* first_key(const Place& place, int64_t layer) {
    return reinterpret_cast<const T*>(place.base) + layer * place.layer;
}

// One query position per token over all positions up to its own. The query heads that share a key head go over the
// same tile of keys and values while it is in the nearest cache.
template <class T, int SIZE>
void attend_sized(const T* query, T* out, const Place* places, const int64_t* positions, int64_t layer,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {
    const int64_t share = heads / kv_heads;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    int64_t work = 0, longest = 0;
    for (int64_t t = 0; t < tokens; t++) {
        work += positions[t] + 1;
        longest = std::max(longest, positions[t] + 1);
    }
#pragma omp parallel if (work * heads * size > kWorthSharing)
    {
        std::vector<float> scores(share * longest), q(share * size), mixed(share * size);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t t = 0; t < tokens; t++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                const int64_t length = positions[t] + 1;
                const Place& place = places[t];
                const T* key = first_key<T>(place, layer) + g * place.head;
                const T* value = key + place.value;
                const T* from = query + (t * heads + g * share) * size;
                for (int64_t i = 0; i < share * size; i++) q[i] = load(from[i]) * scale;
                const T* following = g + 1 < kv_heads ? key + place.head
                                     : t + 1 < tokens ? first_key<T>(places[t + 1], layer)
                                                      : key;
                for (int64_t p = 0; p < length; p += kFew) {
                    const int64_t some = std::min(kFew, length - p);
                    fetch(value + p * size, some * size);
                    score_all<T, SIZE>(q.data(), key + p * size, scores.data() + p, longest, some, share, size);
                }
                for (int64_t h = 0; h < share; h++) softmax(scores.data() + h * longest, length);
                std::fill(mixed.begin(), mixed.end(), 0.0f);
                for (int64_t p = 0; p < length; p += kFew) {
                    const int64_t some = std::min(kFew, length - p);
                    fetch(following + p * size, some * size);
                    mix_all<T, SIZE>(scores.data() + p, longest, value + p * size, mixed.data(), some, share, size);
                }
                T* into = out + (t * heads + g * share) * size;
                for (int64_t i = 0; i < share * size; i++) into[i] = store<T>(mixed[i]);
            }
        }
    }
}

template <class T>
void attend(const T* query, T* out, const Place* places, const int64_t* positions, int64_t layer, int64_t tokens,
            int64_t heads, int64_t kv_heads, int64_t size) {
    const auto run = size == 64 ? attend_sized<T, 64> : size == 128 ? attend_sized<T, 128> : attend_sized<T, 0>;
    run(query, out, places, positions, layer, tokens, heads, kv_heads, size);
}

// Draws one token per row by inverse transform over blocks of `kBlock` words, in float32 with sums in double.
// `where` in [0, 1); temperature 0 takes the first best. Gives log-softmax(logits / T) of the token.
constexpr int64_t kBlock = 256;

void draw_rows(const float* logits, const float* inverse_temperature, const double* where, int64_t* tokens,
               double* logprobs, int64_t rows, int64_t words) {
    const int64_t blocks = (words + kBlock - 1) / kBlock;
#pragma omp parallel if (rows > 1)
    {
        std::vector<double> sums(blocks);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            const float* line = logits + row * words;
            const float scale = inverse_temperature[row] > 0 ? inverse_temperature[row] : 1.0f;
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < words; i++) top = line[i] > top ? line[i] : top;
            double total = 0;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t end = std::min(words, (b + 1) * kBlock);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = b * kBlock; i < end; i++) sum += exponential((line[i] - top) * scale);
                sums[b] = sum;
                total += sum;
            }
            int64_t chosen = -1;
            if (inverse_temperature[row] > 0) {
                double left = where[row] * total;
                int64_t b = 0;
                while (b + 1 < blocks && left >= sums[b]) left -= sums[b++];
                const int64_t end = std::min(words, (b + 1) * kBlock);
                double passed = 0;
                for (int64_t i = b * kBlock; i < end; i++) {
                    float weight = exponential((line[i] - top) * scale);
                    if (weight > 0) chosen = i;
                    passed += weight;
                    if (passed > left && weight > 0) break;
                }
            }
            if (chosen < 0) {  // greedy, or a last block of nothing but zeros
                chosen = 0;
                while (chosen + 1 < words && !(line[chosen] >= top)) chosen++;
            }
            tokens[row] = chosen;
            logprobs[row] = static_cast<double>((line[chosen] - top) * scale) - std::log(total);
        }
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                            \
    void norm_##suffix(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t size, float eps) {       \
        norm_rows<T>(x, delta, weight, out, rows, size, eps);                                                        \
    }                                                                                                                \
    void gated_##suffix(const T* gate_up, T* out, int64_t rows, int64_t inner) {                                     \
        gated<T>(gate_up, out, rows, inner);                                                                         \
    }                                                                                                                \
    void rotate_##suffix(const T* qkv, const T* cos, const T* sin, const T* q_weight, const T* k_weight, T* query,   \
                         const void* places, const int64_t* positions, int64_t layer, int64_t tokens, int64_t heads, \
                         int64_t kv_heads, int64_t size, float eps) {                                                \
        rotate_store<T>(qkv, cos, sin, q_weight, k_weight, query, static_cast<const Place*>(places), positions,      \
                        layer, tokens, heads, kv_heads, size, eps);                                                  \
    }                                                                                                                \
    void attend_##suffix(const T* query, T* out, const void* places, const int64_t* positions, int64_t layer,        \
                         int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {                            \
        attend<T>(query, out, static_cast<const Place*>(places), positions, layer, tokens, heads, kv_heads, size);   \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
void draw(const float* logits, const float* inverse_temperature, const double* where, int64_t* tokens, double* logprobs,
          int64_t rows, int64_t words) {
    draw_rows(logits, inverse_temperature, where, tokens, logprobs, rows, words);
}
}
