// What attention over rows is made of, whatever number format the rows have.

#pragma once

#include "shared.h"

namespace {

// Rotates one head (Su et al. 2021), normalised first where there is a weight.
template <class T>
void turn(const T* in, const T* weight, const T* cos, const T* sin, T* out, int64_t size, float eps) {
    float scale = 1;
    if (weight) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += load(in[i]) * load(in[i]);
        scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
    }
    const int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = load(in[i]), high = load(in[i + half]);
        if (weight) {
            low = rounded<T>(low * scale * load(weight[i]));
            high = rounded<T>(high * scale * load(weight[i + half]));
        }
        float c = load(cos[i]), s = load(sin[i]);
        out[i] = store<T>(rounded<T>(low * c) - high * s);
        out[i + half] = store<T>(rounded<T>(high * c) + low * s);
    }
}

inline void softmax(float* line, int64_t count) {
    float top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
    for (int64_t p = 0; p < count; p++) top = line[p] > top ? line[p] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = 0; p < count; p++) {
        float e = exponential(line[p] - top);
        line[p] = e;
        sum += e;
    }
    const float inverse = 1.0f / sum;
#pragma omp simd
    for (int64_t p = 0; p < count; p++) line[p] *= inverse;
}

// Asks for memory that is needed soon: the processor's own look-ahead stops at every page.
template <class T> inline void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Positions whose keys and values stay in the nearest cache while all query heads that share them go over them.
constexpr int64_t kTile = 64;

}  // namespace
