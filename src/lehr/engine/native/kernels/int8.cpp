// The product of a few rows with a weight of one byte an element. Few rows take as long as reading the weight, so
// half the bytes are half the time. Inputs are not rounded: they are multiplied in float32.
//
// A weight [outputs, inputs] lies in panels of 64 outputs: panel by panel, input by input, 64 bytes, one cache line.
// A sum needs no step across lanes that way, and a thread reads forward only. Outputs beyond the last are zeros.

#include "lanes.h"
#include "shared.h"

namespace {

constexpr int64_t kPanel = 64;

// The compiler turns a vector of bytes into one of floats lane by lane unless it is told the instruction.
inline Floats widened(const int8_t* bytes) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
    Floats wide;
    for (int i = 0; i < kLanes; i++) wide[i] = bytes[i];
    return wide;
#endif
}

// ROWS rows, all inputs, one panel. `x` is [ROWS, inputs].
template <int ROWS> void panel_rows(const float* x, const int8_t* weight, float* sums, int64_t inputs) {
    constexpr int kParts = kPanel / kLanes;
    Floats acc[ROWS][kParts] = {};
    for (int64_t k = 0; k < inputs; k++) {
        __builtin_prefetch(weight + (k + 32) * kPanel);
        Floats w[kParts];
        for (int p = 0; p < kParts; p++) w[p] = widened(weight + k * kPanel + p * kLanes);
        for (int r = 0; r < ROWS; r++) {
            const float value = x[r * inputs + k];
            for (int p = 0; p < kParts; p++) acc[r][p] += w[p] * value;
        }
    }
    std::memcpy(sums, acc, sizeof acc);
}

template <class T, class Out>
void int8_rows(const T* x, const int8_t* weight, const float* scales, const T* bias, Out* out, int64_t rows,
               int64_t inputs, int64_t outputs) {
    constexpr int64_t kAtOnce = 4;
    std::vector<float> wide(rows * inputs);
    for (int64_t i = 0; i < rows * inputs; i++) wide[i] = load(x[i]);
    const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static) if (inputs * outputs > kWorthSharing)
    for (int64_t panel = 0; panel < panels; panel++) {
        const int8_t* part = weight + panel * inputs * kPanel;
        const int64_t first = panel * kPanel, count = std::min(kPanel, outputs - first);
        for (int64_t row = 0; row < rows; row += kAtOnce) {
            float sums[kAtOnce * kPanel];
            const float* from = wide.data() + row * inputs;
            const int64_t some = std::min(kAtOnce, rows - row);
            switch (some) {
                case 1: panel_rows<1>(from, part, sums, inputs); break;
                case 2: panel_rows<2>(from, part, sums, inputs); break;
                case 3: panel_rows<3>(from, part, sums, inputs); break;
                default: panel_rows<4>(from, part, sums, inputs);
            }
            for (int64_t r = 0; r < some; r++) {
                Out* into = out + (row + r) * outputs + first;
                for (int64_t i = 0; i < count; i++) {
                    const float value = sums[r * kPanel + i] * scales[first + i];
                    into[i] = store<Out>(bias ? value + load(bias[first + i]) : value);
                }
            }
        }
    }
}

}  // namespace

#define EXPORT(name, T, Out)                                                                                    \
    void name(const T* x, const int8_t* weight, const float* scales, const T* bias, Out* out, int64_t rows,     \
              int64_t inputs, int64_t outputs) {                                                                \
        int8_rows(x, weight, scales, bias, out, rows, inputs, outputs);                                         \
    }

extern "C" {
EXPORT(int8_rows_float32, float, float)
EXPORT(int8_rows_bfloat16, bf16, bf16)
EXPORT(int8_rows_wide_float32, float, float)
EXPORT(int8_rows_wide_bfloat16, bf16, float)
}
