// The product of rows with a weight that lies as the registers take it.
//
// A weight [outputs, inputs] lies in panels of two registers of outputs: panel by panel, input by input. In bfloat16
// two inputs lie side by side, so that a word is widened by a shift and a mask. A few rows share each register of
// weights; while a panel is multiplied the next one is fetched. Every sum goes over the inputs from the first to the
// last, so that a row's result does not depend on what it is computed with.

#include "lanes.h"
#include "shared.h"

namespace {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int kRows = kLanes == 16 ? 12 : 6;  // rows at once: sums, weights and an input fill the registers
constexpr int64_t kInputs = 768;              // inputs at once: that part of a panel stays in the nearest cache
constexpr int64_t kChunk = 96;                // rows for which a panel is read once
constexpr int64_t kStretch = 8;               // inputs between two requests for memory

using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

inline Words words_at(const bf16* from) {
    Words found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// The lines of the next panel, some of which are asked for with every stretch.
struct Ahead {
    const char *next, *end;
    int64_t lines;
    inline void ask() {
        for (int64_t i = 0; i < lines && next < end; i++, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

template <int ROWS>
inline void add(Floats (&sums)[ROWS][2], const float* x, int64_t stride, const Floats& low, const Floats& high) {
    for (int r = 0; r < ROWS; r++) {
        const Floats value = x[r * stride] - Floats{};
        sums[r][0] = multiplied(low, value, sums[r][0]);
        sums[r][1] = multiplied(high, value, sums[r][1]);
    }
}

template <int ROWS>
inline void go_over(Floats (&sums)[ROWS][2], const float* x, int64_t stride, const float* weight, int64_t count) {
    for (int64_t k = 0; k < count; k++)
        add<ROWS>(sums, x + k, stride, lanes_at(weight + k * kPanel), lanes_at(weight + k * kPanel + kLanes));
}

template <int ROWS>
inline void go_over(Floats (&sums)[ROWS][2], const float* x, int64_t stride, const bf16* weight, int64_t count) {
    for (int64_t k = 0; k < count; k += 2) {
        const Words a = words_at(weight + k * kPanel), b = words_at(weight + k * kPanel + 2 * kLanes);
        add<ROWS>(sums, x + k, stride, (Floats)(a << 16), (Floats)(b << 16));
        add<ROWS>(sums, x + k + 1, stride, (Floats)(a & 0xFFFF0000u), (Floats)(b & 0xFFFF0000u));
    }
}

// Adds to the sums of ROWS rows what `count` inputs give.
template <int ROWS, class T>
void some_rows(const float* x, int64_t stride, const T* weight, float* into, int64_t count, Ahead& ahead) {
    Floats sums[ROWS][2];
    std::memcpy(sums, into, sizeof sums);
    int64_t k = 0;
    for (; k + kStretch <= count; k += kStretch) {
        ahead.ask();
        go_over<ROWS>(sums, x + k, stride, weight + k * kPanel, kStretch);
    }
    if (k < count) go_over<ROWS>(sums, x + k, stride, weight + k * kPanel, count - k);
    std::memcpy(into, sums, sizeof sums);
}

template <class T, int ROWS = kRows>
void rows_of(int64_t rows, const float* x, int64_t stride, const T* weight, float* into, int64_t count, Ahead& ahead) {
    if (rows == ROWS)
        some_rows<ROWS>(x, stride, weight, into, count, ahead);
    else if constexpr (ROWS > 1)
        rows_of<T, ROWS - 1>(rows, x, stride, weight, into, count, ahead);
}

inline const float* widened(const float* x, int64_t, std::vector<float>&) { return x; }
inline const float* widened(const bf16* x, int64_t count, std::vector<float>& room) {
    room.resize(count);
    for (int64_t i = 0; i < count; i++) room[i] = load(x[i]);
    return room.data();
}

// `count` inputs of a panel as floats, for more rows than are gone over at once.
inline const float* unpacked(const float* weight, int64_t, float*) { return weight; }
inline const float* unpacked(const bf16* weight, int64_t count, float* room) {
    for (int64_t at = 0; at < count * kPanel; at += 2 * kPanel)
        for (int64_t half = 0; half < kPanel; half += kLanes) {
            const Words pairs = words_at(weight + at + 2 * half);
            const Words low = pairs << 16, high = pairs & 0xFFFF0000u;
            std::memcpy(room + at + half, &low, sizeof low);
            std::memcpy(room + at + kPanel + half, &high, sizeof high);
        }
    return room;
}

template <class T>
void panel_of(const float* x, int64_t stride, const T* weight, float* sums, int64_t rows, int64_t count, Ahead& ahead) {
    const int64_t blocks = (rows + kRows - 1) / kRows;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * rows / blocks, last = (block + 1) * rows / blocks;
        rows_of<T>(last - first, x + first * stride, stride, weight, sums + first * kPanel, count, ahead);
    }
}

template <class T, class Out>
void panels(const T* x, const T* weight, const T* bias, Out* out, int64_t rows, int64_t inputs, int64_t outputs) {
    const int64_t count = (outputs + kPanel - 1) / kPanel;
    std::vector<float> room;
    const float* wide = widened(x, rows * inputs, room);
#pragma omp parallel if (inputs * outputs > kWorthSharing)
    {
        Lines sums(kChunk * kPanel), unrolled(sizeof(T) < 4 && rows > 2 * kRows ? kInputs * kPanel : 0);
        for (int64_t begin = 0; begin < rows; begin += kChunk) {
            const int64_t some = std::min(kChunk, rows - begin), blocks = (some + kRows - 1) / kRows;
#pragma omp for schedule(static) nowait
            for (int64_t panel = 0; panel < count; panel++) {
                const T* part = weight + panel * inputs * kPanel;
                const char* next = reinterpret_cast<const char*>(part + inputs * kPanel);
                const int64_t size = panel + 1 < count && rows > 1 ? inputs * kPanel * sizeof(T) : 0;
                Ahead ahead{next, next + size, (kStretch * kPanel * (int64_t)sizeof(T) / 64 + blocks - 1) / blocks};
                std::memset(sums.at(0), 0, some * kPanel * sizeof(float));
                for (int64_t k = 0; k < inputs; k += kInputs) {
                    const int64_t now = std::min(kInputs, inputs - k);
                    const float* from = wide + begin * inputs + k;
                    const T* weights = part + k * kPanel;
                    if (some > 2 * kRows)
                        panel_of(from, inputs, unpacked(weights, now, unrolled.at(0)), sums.at(0), some, now, ahead);
                    else
                        panel_of(from, inputs, weights, sums.at(0), some, now, ahead);
                }
                const int64_t at = panel * kPanel, width = std::min(kPanel, outputs - at);
                for (int64_t r = 0; r < some; r++) {
                    Out* into = out + (begin + r) * outputs + at;
                    const float* from = sums.at(r * kPanel);
                    for (int64_t i = 0; i < width; i++) into[i] = store<Out>(bias ? from[i] + load(bias[at + i]) : from[i]);
                }
            }
        }
    }
}

}  // namespace

#define EXPORT(name, T, Out)                                                                                       \
    void name(const T* x, const T* weight, const T* bias, Out* out, int64_t rows, int64_t inputs, int64_t outputs) \
    {                                                                                                              \
        panels(x, weight, bias, out, rows, inputs, outputs);                                                       \
    }

extern "C" {
EXPORT(panels_float32, float, float)
EXPORT(panels_bfloat16, bf16, bf16)
EXPORT(panels_wide_float32, float, float)
EXPORT(panels_wide_bfloat16, bf16, float)
int64_t panel_outputs() { return kPanel; }
// Whether these products were measured to be faster than oneDNN's with this processor's registers.
int64_t panels_pay() {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}
}
