// Attention in which every query goes over its keys in one order, that of their positions, whatever other queries
// are computed beside it: see invariant.py.
//
// Keys and values are widened tile by tile; tiles begin at multiples of `kTile`. All queries of a block, neighbours
// in one row, and the heads that share a key head use a tile while it is in the nearest cache. What a query does
// with a tile depends on nothing but its own position: a running softmax (Dao et al. 2022) over its scores.

#include "attend.h"
#include "lanes.h"
#include "shared.h"

namespace {

constexpr int64_t kQueries = 16;  // positions of a block, at most

// Tells where keys and values of one format lie and widens them.
template <class T> struct Plain {
    static int64_t width(int64_t size) { return size; }
    static void widen(const T* from, float* out, int64_t size) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = load(from[i]);
    }
    using Stored = T;
};

struct Rounded {
    static int64_t width(int64_t size) { return (size + 3) / 4 * 4 + 4; }
    static void widen(const int8_t* from, float* out, int64_t size) {
        float scale;
        std::memcpy(&scale, from + width(size) - 4, 4);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = static_cast<float>(from[i]) * scale;
    }
    using Stored = int8_t;
};

// `N` neighbouring vectors of a mix: sums += weights[p] * value[p], p ascending. `stride` in floats.
template <int N> inline void mix(const float* weights, const float* value, float* into, int64_t count, int64_t stride) {
    Floats sums[N];
    std::memcpy(sums, into, sizeof sums);
    for (int64_t p = 0; p < count; p++, value += stride)
        for (int n = 0; n < N; n++) sums[n] += weights[p] * *reinterpret_cast<const Floats*>(value + n * kLanes);
    std::memcpy(into, sums, sizeof sums);
}

// What one thread needs for a block. All lines are `stride` floats long, a multiple of `kLanes`.
struct Room {
    Room(int64_t rows, int64_t stride)
        : stride(stride), key(kTile * stride), value(kTile * stride), query(rows * stride), mixed(rows * stride),
          top(rows), sum(rows) {}
    int64_t stride;
    Lines key, value, query, mixed;
    std::vector<float> top, sum;
};

// Folds the first `count` keys of the tile into what query `row` has seen.
inline void fold(Room& room, int64_t row, int64_t count) {
    const int64_t stride = room.stride;
    const float* query = room.query.at(row * stride);
    alignas(64) float scores[kTile];
    for (int64_t p = 0; p < kTile; p += kLanes) {
        if (p >= count) {
            std::fill(scores + p, scores + kTile, -INFINITY);
            break;
        }
        Floats sums[kLanes] = {};
        const float* key = room.key.at(p * stride);
        for (int64_t i = 0; i < stride; i += kLanes) {
            const Floats q = *reinterpret_cast<const Floats*>(query + i);
            for (int64_t k = 0; k < kLanes; k++)
                sums[k] += q * *reinterpret_cast<const Floats*>(key + k * stride + i);
        }
        *reinterpret_cast<Floats*>(scores + p) = each_summed(sums);
    }
    for (int64_t p = count; p < kTile; p++) scores[p] = -INFINITY;
    float highest = room.top[row];
#pragma omp simd reduction(max : highest)
    for (int64_t p = 0; p < kTile; p++) highest = scores[p] > highest ? scores[p] : highest;
    float* mixed = room.mixed.at(row * stride);
    if (highest > room.top[row]) {
        const float shrink = exponential(room.top[row] - highest);
        room.sum[row] *= shrink;
#pragma omp simd
        for (int64_t i = 0; i < stride; i++) mixed[i] *= shrink;
        room.top[row] = highest;
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = 0; p < kTile; p++) {
        scores[p] = exponential(scores[p] - highest);
        sum += scores[p];
    }
    room.sum[row] += sum;
    int64_t i = 0;
    for (; i + 4 * kLanes <= stride; i += 4 * kLanes) mix<4>(scores, room.value.at(i), mixed + i, count, stride);
    for (; i < stride; i += kLanes) mix<1>(scores, room.value.at(i), mixed + i, count, stride);
}

template <class T, class Format>
void attend(const T* query, T* out, const Place* places, const int64_t* positions, int64_t layer, int64_t tokens,
            int64_t heads, int64_t kv_heads, int64_t size) {
    using Stored = typename Format::Stored;
    struct Block {
        int64_t first, count;
    };
    const int64_t share = heads / kv_heads, width = Format::width(size);
    const int64_t stride = (size + kLanes - 1) / kLanes * kLanes;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    std::vector<Block> blocks;
    int64_t work = 0;
    for (int64_t t = 0; t < tokens; t++) {
        const bool follows = t > 0 && places[t].base == places[t - 1].base && positions[t] == positions[t - 1] + 1;
        if (follows && blocks.back().count < kQueries)
            blocks.back().count++;
        else
            blocks.push_back({t, 1});
        work += positions[t] + 1;
    }
    const int64_t count = static_cast<int64_t>(blocks.size());
#pragma omp parallel if (work * heads * size > kWorthSharing)
    {
        Room room(kQueries * share, stride);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t n = 0; n < count; n++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                const auto [first, queries] = blocks[n];
                const Place& place = places[first];
                const int64_t begin = positions[first], end = begin + queries;
                const Stored* key = reinterpret_cast<const Stored*>(place.base) + layer * place.layer + g * place.head;
                for (int64_t row = 0; row < queries * share; row++) {
                    const T* from = query + ((first + row / share) * heads + g * share + row % share) * size;
                    float* into = room.query.at(row * stride);
                    for (int64_t i = 0; i < size; i++) into[i] = load(from[i]) * scale;
                    std::fill_n(room.mixed.at(row * stride), stride, 0.0f);
                    room.top[row] = -INFINITY, room.sum[row] = 0;
                }
                for (int64_t p = 0; p < end; p += kTile) {
                    const int64_t some = std::min(kTile, end - p);
                    for (int64_t k = 0; k < some; k++) {
                        const Stored* from = key + (p + k) * width;
                        Format::widen(from, room.key.at(k * stride), size);
                        Format::widen(from + place.value, room.value.at(k * stride), size);
                    }
                    for (int64_t q = p > begin ? p - begin : 0; q < queries; q++)
                        for (int64_t h = 0; h < share; h++)
                            fold(room, q * share + h, std::min(kTile, begin + q + 1 - p));
                }
                for (int64_t row = 0; row < queries * share; row++) {
                    T* into = out + ((first + row / share) * heads + g * share + row % share) * size;
                    const float* mixed = room.mixed.at(row * stride);
                    for (int64_t i = 0; i < size; i++) into[i] = store<T>(mixed[i] / room.sum[row]);
                }
            }
        }
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                            \
    void attend_alone_##suffix(const T* query, T* out, const void* places, const int64_t* positions, int64_t layer,  \
                               int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {                      \
        attend<T, Plain<T>>(query, out, static_cast<const Place*>(places), positions, layer, tokens, heads,          \
                            kv_heads, size);                                                                         \
    }                                                                                                                \
    void attend_alone_int8_##suffix(const T* query, T* out, const void* places, const int64_t* positions,            \
                                    int64_t layer, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {  \
        attend<T, Rounded>(query, out, static_cast<const Place*>(places), positions, layer, tokens, heads, kv_heads, \
                           size);                                                                                    \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
}
