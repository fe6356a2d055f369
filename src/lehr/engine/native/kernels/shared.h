// Number formats, the exponential, and where a row of keys and values lies: what all kernels share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

inline float load(float x) { return x; }
inline float load(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <class T> inline T store(float x);
template <> inline float store<float>(float x) { return x; }
template <> inline bf16 store<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<bf16>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

template <class T> inline float rounded(float x) { return load(store<T>(x)); }

// exp(x) for x <= 0 or little above, to about one unit in the last place; exp(-inf) = 0, NaN stays NaN.
inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float n = std::nearbyint(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t shift = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &shift, 4);
    return x < -87.0f ? 0.0f : x == x ? p * power : x;
}

constexpr int64_t kWorthSharing = 1 << 16;  // elements from which on other threads are woken

// Where one token's keys and values lie: the first byte of its row's keys in layer 0, and strides in elements.
struct Place {
    int64_t base, layer, value, head;
};

}  // namespace
