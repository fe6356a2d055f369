// Vectors as wide as the processor's registers.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));

// As many numbers as there are lanes, as floats.
inline Floats lanes_at(const float* from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline Floats lanes_at(const uint16_t* from) {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    uint32_t wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = static_cast<uint32_t>(from[i]) << 16;
    Floats found;
    std::memcpy(&found, wide, sizeof found);
    return found;
#endif
}

// a * b + c, rounded once, which the compiler neither divides nor puts in another order.
inline Floats multiplied(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The sum of each of `kLanes` vectors, all in the same order.
inline Floats each_summed(const Floats* v) {
#if defined(__AVX512F__)
    __m512 quads[4], halves[2];
    for (int i = 0; i < 4; i++) {
        const auto add = [&](int at) {
            const __m512 a = (__m512)v[at], b = (__m512)v[at + 1];
            return (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        };
        const __m512d low = add(4 * i), high = add(4 * i + 2);
        quads[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(low, high), (__m512)_mm512_unpackhi_pd(low, high));
    }
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xdd));
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#elif defined(__AVX2__)
    __m256 quads[2];
    for (int i = 0; i < 2; i++) {
        const auto add = [&](int at) {
            const __m256 a = (__m256)v[at], b = (__m256)v[at + 1];
            return (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        };
        const __m256d low = add(4 * i), high = add(4 * i + 2);
        quads[i] = _mm256_add_ps((__m256)_mm256_unpacklo_pd(low, high), (__m256)_mm256_unpackhi_pd(low, high));
    }
    return (Floats)_mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                                 _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#else
    Floats sums = {};
    for (int64_t k = 0; k < kLanes; k++)
        for (int64_t i = 0; i < kLanes; i++) sums[k] += v[k][i];
    return sums;
#endif
}

// Zeros that begin at a whole vector.
class Lines {
  public:
    explicit Lines(int64_t count) : memory_(count + kLanes) {}
    float* at(int64_t i) {
        const auto address = reinterpret_cast<uintptr_t>(memory_.data());
        return memory_.data() + (-address & (sizeof(Floats) - 1)) / sizeof(float) + i;
    }

  private:
    std::vector<float> memory_;
};

}  // namespace
