// Rotation in position and attention over rows whose keys and values are int8.
//
// A stored vector is `size` bytes padded to a multiple of four, then the float that scales them: see quantise.py,
// which computes the same. The strides of a Place count bytes here. Scores and mixes stay in float32; an element is
// widened where it is used, so that memory is read at half the bytes of bfloat16.

#include "attend.h"
#include "shared.h"

namespace {

constexpr int64_t kScale = sizeof(float);

inline int64_t stored_width(int64_t size) { return (size + kScale - 1) / kScale * kScale + kScale; }

inline float scale_of(const int8_t* vector, int64_t width) {
    float scale;
    std::memcpy(&scale, vector + width - kScale, kScale);
    return scale;
}

// Walsh-Hadamard transform, orthonormal, of runs as long as the largest power of two that divides `size`.
inline void spread(float* x, int64_t size) {
    const int64_t run = size & -size;
    for (int64_t step = 1; step < run; step *= 2)
        for (int64_t i = 0; i < size; i += 2 * step)
#pragma omp simd
            for (int64_t j = i; j < i + step; j++) {
                const float low = x[j], high = x[j + step];
                x[j] = low + high;
                x[j + step] = low - high;
            }
    const float scale = 1.0f / std::sqrt(static_cast<float>(run));
#pragma omp simd
    for (int64_t i = 0; i < size; i++) x[i] *= scale;
}

// What is not finite stays so: it ends up in the scale.
template <class T> void quantise(const T* x, int8_t* out, int64_t size) {
    float largest = 0, broken = 0;
#pragma omp simd reduction(max : largest) reduction(+ : broken)
    for (int64_t i = 0; i < size; i++) {
        const float value = load(x[i]);
        largest = std::fabs(value) > largest ? std::fabs(value) : largest;
        broken += value - value;
    }
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f, scale = largest / 127.0f + broken;
    for (int64_t i = 0; i < size; i++) {
        float step = std::nearbyint(load(x[i]) * inverse);
        step = step > 127.0f ? 127.0f : step < -127.0f ? -127.0f : step == step ? step : 0.0f;
        out[i] = static_cast<int8_t>(step);
    }
    std::memcpy(out + stored_width(size) - kScale, &scale, kScale);
}

template <class T>
void rotate_store(const T* qkv, const T* cos, const T* sin, const T* q_weight, const T* k_weight, T* query,
                  const Place* places, const int64_t* positions, int64_t layer, int64_t tokens, int64_t heads,
                  int64_t kv_heads, int64_t size, float eps) {
    const int64_t all = (heads + 2 * kv_heads) * size, half = size / 2, width = stored_width(size);
#pragma omp parallel if (tokens * all > kWorthSharing)
    {
        std::vector<T> turned(size);
        std::vector<float> wide(size);
        const auto turn_and_spread = [&](const T* in, const T* weight, const T* c, const T* s) {
            turn(in, weight, c, s, turned.data(), size, eps);
            for (int64_t i = 0; i < size; i++) wide[i] = load(turned[i]);
            spread(wide.data(), size);
        };
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            const T* in = qkv + t * all;
            const T *c = cos + t * half, *s = sin + t * half;
            for (int64_t h = 0; h < heads; h++) {
                turn_and_spread(in + h * size, q_weight, c, s);
                T* into = query + (t * heads + h) * size;
                for (int64_t i = 0; i < size; i++) into[i] = store<T>(wide[i]);
            }
            const Place& place = places[t];
            int8_t* key = reinterpret_cast<int8_t*>(place.base) + layer * place.layer + positions[t] * width;
            for (int64_t k = 0; k < kv_heads; k++) {
                turn_and_spread(in + (heads + k) * size, k_weight, c, s);
                quantise(wide.data(), key + k * place.head, size);
                quantise(in + (heads + kv_heads + k) * size, key + place.value + k * place.head, size);
            }
        }
    }
}

template <int SIZE>
void score(const float* query, const int8_t* key, float* scores, int64_t count, int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, width = stored_width(size);
    for (int64_t p = 0; p < count; p++) {
        const int8_t* row = key + p * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += query[i] * static_cast<float>(row[i]);
        scores[p] = sum * scale_of(row, width);
    }
}

template <int SIZE>
void mix(const float* weights, const int8_t* value, float* mixed, int64_t count, int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, width = stored_width(size);
    if constexpr (SIZE > 0) {
        float sums[SIZE];
        for (int i = 0; i < SIZE; i++) sums[i] = mixed[i];
        for (int64_t p = 0; p < count; p++) {
            const int8_t* row = value + p * width;
            const float weight = weights[p] * scale_of(row, width);
#pragma omp simd
            for (int i = 0; i < SIZE; i++) sums[i] += weight * static_cast<float>(row[i]);
        }
        for (int i = 0; i < SIZE; i++) mixed[i] = sums[i];
    } else {
        for (int64_t p = 0; p < count; p++) {
            const int8_t* row = value + p * width;
            const float weight = weights[p] * scale_of(row, width);
#pragma omp simd
            for (int64_t i = 0; i < size; i++) mixed[i] += weight * static_cast<float>(row[i]);
        }
    }
}

template <class T, int SIZE>
void attend_sized(const T* query, T* out, const Place* places, const int64_t* positions, int64_t layer,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {
    const int64_t share = heads / kv_heads, width = stored_width(size);
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
                const int8_t* key = reinterpret_cast<const int8_t*>(place.base) + layer * place.layer + g * place.head;
                const int8_t* value = key + place.value;
                const T* from = query + (t * heads + g * share) * size;
                for (int64_t i = 0; i < share * size; i++) q[i] = load(from[i]) * scale;
                for (int64_t p = 0; p < length; p += kTile) {
                    const int64_t count = std::min(kTile, length - p);
                    fetch(value + p * width, count * width);
                    for (int64_t h = 0; h < share; h++)
                        score<SIZE>(q.data() + h * size, key + p * width, scores.data() + h * longest + p, count, size);
                }
                for (int64_t h = 0; h < share; h++) softmax(scores.data() + h * longest, length);
                std::fill(mixed.begin(), mixed.end(), 0.0f);
                for (int64_t p = 0; p < length; p += kTile)
                    for (int64_t h = 0; h < share; h++)
                        mix<SIZE>(scores.data() + h * longest + p, value + p * width, mixed.data() + h * size,
                                  std::min(kTile, length - p), size);
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

// Widens `count` positions of keys and values, [2, kv head, position, stored width], to [2, kv head, count, size].
template <class T>
void widen(const int8_t* from, T* out, int64_t value_stride, int64_t head_stride, int64_t kv_heads, int64_t count,
           int64_t size) {
    const int64_t width = stored_width(size);
#pragma omp parallel for collapse(2) if (2 * kv_heads * count * size > kWorthSharing)
    for (int64_t line = 0; line < 2 * kv_heads; line++) {
        for (int64_t p = 0; p < count; p++) {
            const int8_t* row = from + line / kv_heads * value_stride + line % kv_heads * head_stride + p * width;
            T* into = out + (line * count + p) * size;
            const float scale = scale_of(row, width);
#pragma omp simd
            for (int64_t i = 0; i < size; i++) into[i] = store<T>(static_cast<float>(row[i]) * scale);
        }
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                            \
    void rotate_int8_##suffix(const T* qkv, const T* cos, const T* sin, const T* q_weight, const T* k_weight,        \
                              T* query, const void* places, const int64_t* positions, int64_t layer, int64_t tokens, \
                              int64_t heads, int64_t kv_heads, int64_t size, float eps) {                            \
        rotate_store<T>(qkv, cos, sin, q_weight, k_weight, query, static_cast<const Place*>(places), positions,      \
                        layer, tokens, heads, kv_heads, size, eps);                                                  \
    }                                                                                                                \
    void attend_int8_##suffix(const T* query, T* out, const void* places, const int64_t* positions, int64_t layer,   \
                              int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {                       \
        attend<T>(query, out, static_cast<const Place*>(places), positions, layer, tokens, heads, kv_heads, size);   \
    }                                                                                                                \
    void widen_int8_##suffix(const void* from, T* out, int64_t value_stride, int64_t head_stride, int64_t kv_heads,  \
                             int64_t count, int64_t size) {                                                          \
        widen<T>(static_cast<const int8_t*>(from), out, value_stride, head_stride, kv_heads, count, size);           \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
}
