// What a training step does between its matrix products, backwards included; and attention over packed spans with
// the processor's matrix registers (AMX), scores never in memory beyond one block of queries.

#include "shared.h"

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Gradient of the root-mean-square norm, added to `residual`, that of the stream beside it.
template <class T>
void norm_back(const T* x, const T* weight, const T* grad, const T* residual, T* flow, float* grad_weight, int64_t rows,
               int64_t size, float eps) {
#pragma omp parallel
    {
        std::vector<float> own(size, 0.0f);
#pragma omp for nowait
        for (int64_t row = 0; row < rows; row++) {
            const T *x_row = x + row * size, *grad_row = grad + row * size, *beside = residual + row * size;
            T* flow_row = flow + row * size;
            float square = 0, along = 0;
#pragma omp simd reduction(+ : square, along)
            for (int64_t i = 0; i < size; i++) {
                float value = load(x_row[i]);
                square += value * value;
                along += value * load(grad_row[i]) * load(weight[i]);
            }
            const float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
            const float pull = along * scale * scale * scale / static_cast<float>(size);
#pragma omp simd
            for (int64_t i = 0; i < size; i++) {
                float value = load(x_row[i]), g = load(grad_row[i]);
                own[i] += g * value * scale;
                flow_row[i] = store<T>(load(beside[i]) + g * load(weight[i]) * scale - value * pull);
            }
        }
#pragma omp critical
        for (int64_t i = 0; i < size; i++) grad_weight[i] += own[i];
    }
}

// Gradient of silu(gate) * up with regard to both.
template <class T> void gated_back(const T* gate_up, const T* grad, T* flow, int64_t rows, int64_t inner) {
#pragma omp parallel for if (rows * inner > kWorthSharing)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner, *grad_row = grad + row * inner;
        T *to_gate = flow + row * 2 * inner, *to_up = to_gate + inner;
#pragma omp simd
        for (int64_t i = 0; i < inner; i++) {
            float g = load(gate[i]), d = load(grad_row[i]), open = 1.0f / (1.0f + exponential(-g));
            to_up[i] = store<T>(d * g * open);
            to_gate[i] = store<T>(d * load(up[i]) * open * (1.0f + g * (1.0f - open)));
        }
    }
}

#ifdef __AMX_BF16__

constexpr int64_t kBlock = 32;  // rows and columns that one product of registers covers

struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = 16;
    }
};

// Sets the registers up for as long as it lives, and then as they were: others keep theirs between calls.
struct Tiles {
    TileConfig before;
    Tiles() {
        const TileConfig mine;
        _tile_storeconfig(&before);
        _tile_loadconfig(&mine);
    }
    ~Tiles() { _tile_loadconfig(&before); }
};

// Columns of a right-hand side as the registers want them: blocks of 16 columns, in each steps of 32 rows, in each
// 16 pairs of rows. `steps` is how many steps a block of columns has.
inline uint32_t* tile(uint32_t* packed, int64_t column_block, int64_t step, int64_t steps) {
    return packed + (column_block * steps + step) * 256;
}

// C[32 m, 32 n] = or += A[32 m, 32 k] B, with A in rows of `lda` values and B packed from `column_block` and `step`.
template <bool ADD>
void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t lda, uint32_t* b, int64_t column_block,
             int64_t first_step, int64_t steps, float* c, int64_t ldc) {
    asm volatile("" ::: "memory");  // the compiler does not know that loading a register reads memory
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < m; i++) {
            float* to = c + i * 32 * ldc + j * 32;
            if (ADD) {
                _tile_loadd(0, to, ldc * 4);
                _tile_loadd(1, to + 16, ldc * 4);
                _tile_loadd(2, to + 16 * ldc, ldc * 4);
                _tile_loadd(3, to + 16 * ldc + 16, ldc * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t s = 0; s < k; s++) {
                const bf16* from = a + i * 32 * lda + s * 32;
                _tile_loadd(4, from, lda * 2);
                _tile_loadd(5, from + 16 * lda, lda * 2);
                _tile_loadd(6, tile(b, column_block + 2 * j, first_step + s, steps), 64);
                _tile_loadd(7, tile(b, column_block + 2 * j + 1, first_step + s, steps), 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, to, ldc * 4);
            _tile_stored(1, to + 16, ldc * 4);
            _tile_stored(2, to + 16 * ldc, ldc * 4);
            _tile_stored(3, to + 16 * ldc + 16, ldc * 4);
        }
}

// Packs rows so that products sum over a row's values: columns are rows. `rows` is a multiple of 32.
void pack_across(const bf16* rows_at, int64_t stride, int64_t real, int64_t rows, int64_t size, uint32_t* out) {
    const int64_t steps = size / 32;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = 0; s < steps; s++) {
            uint32_t* to = tile(out, r / 16, s, steps) + r % 16;
            uint32_t pairs[16] = {};
            if (r < real) std::memcpy(pairs, rows_at + r * stride + s * 32, 64);
            for (int64_t p = 0; p < 16; p++) to[p * 16] = pairs[p];
        }
}

// Packs rows so that products sum over rows: columns are the values of a row.
void pack_along(const bf16* rows_at, int64_t stride, int64_t real, int64_t rows, int64_t size, uint32_t* out) {
    const int64_t steps = rows / 32;
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t e = 0; e < size; e++) {
            uint32_t low = r < real ? rows_at[r * stride + e] : 0;
            uint32_t high = r + 1 < real ? rows_at[(r + 1) * stride + e] : 0;
            tile(out, e / 16, r / 32, steps)[(r % 32) / 2 * 16 + e % 16] = low | high << 16;
        }
}

inline __m512i narrow(__m512 x) {  // to bfloat16, in the low half of each lane
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
}

// Rows that see each other: all of one packed range, or those that share a context and the context.
struct Span {
    int64_t start, stop, context_start, context_stop;
};
struct Shape {
    int64_t heads, kv_heads, size, query_stride, key_stride, value_stride;  // strides between rows, in values
};

// The keys that a block of queries sees, in blocks of 32 counted from the family's first row: two runs.
struct Seen {
    int64_t from[2], count[2], keys, context, own;
    Seen(const Span& span, int64_t origin, int64_t row_stop) {
        context = span.context_stop - span.context_start;
        own = span.start - origin;
        int64_t shared = (context + 31) / 32, first = std::max(own / 32, shared);
        if (!context) first = own / 32;
        from[0] = 0, count[0] = shared;
        from[1] = first, count[1] = std::max<int64_t>(0, (row_stop - origin + 31) / 32 - first);
        keys = 32 * (count[0] + count[1]);
    }
    // Calls with the first and last visible column of `row`, compact, for each visible run.
    template <class F> void visible(int64_t row, F with) const {
        if (context) with(0, context);
        int64_t low = own, high = row + 1;  // counted from the family's first row
        if (context) {
            int64_t edge = 32 * count[0];
            if (low < edge) with(low, std::min(high, edge));
        }
        low = std::max(low, 32 * from[1]);
        if (high > low) with(low - 32 * from[1] + 32 * count[0], high - 32 * from[1] + 32 * count[0]);
    }
};

template <class F>
void over_blocks(const Span* spans, int64_t count, int64_t origin, F with) {
    for (int64_t s = 0; s < count; s++)
        for (int64_t row = spans[s].start; row < spans[s].stop; row += kBlock)
            with(spans[s], row, std::min(spans[s].stop, row + kBlock),
                 Seen(spans[s], origin, std::min(spans[s].stop, row + kBlock)));
}

void take(const bf16* all, int64_t stride, int64_t row, int64_t stop, int64_t first, int64_t group, int64_t size,
          bf16* out) {
    for (int64_t g = 0; g < group; g++)
        for (int64_t r = 0; r < kBlock; r++) {
            bf16* to = out + (g * kBlock + r) * size;
            if (row + r < stop)
                std::memcpy(to, all + (row + r) * stride + (first + g) * size, size * 2);
            else
                std::memset(to, 0, size * 2);
        }
}

void scores(const bf16* query, int64_t group, uint32_t* keys, const Seen& seen, int64_t size, float* out) {
    for (int run = 0; run < 2; run++)
        if (seen.count[run])
            product<false>(group, seen.count[run], size / 32, query, size, keys, 2 * seen.from[run], 0, size / 32,
                           out + (run ? 32 * seen.count[0] : 0), seen.keys);
}

struct Family {
    const Span* spans;
    int64_t count, first, last, padded;
    Family(const Span* all, const int64_t* ends, int64_t number) {
        int64_t from = number ? ends[number - 1] : 0;
        spans = all + from, count = ends[number] - from;
        first = spans[0].start, last = spans[count - 1].stop;
        padded = (last - first + 31) / 32 * 32;
    }
};

void attend_spans(const bf16* query, const bf16* key, const bf16* value, bf16* mixed, float* lse, const Span* spans,
                  const int64_t* ends, int64_t families, const Shape& shape) {
    const int64_t group = shape.heads / shape.kv_heads, size = shape.size;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
#pragma omp parallel
    {
        const Tiles tiles;
        std::vector<uint32_t> keys, values;
        std::vector<float> score, out(group * kBlock * size);
        std::vector<bf16> rows(group * kBlock * size), weights;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < families * shape.kv_heads; task++) {
            const Family family(spans, ends, task / shape.kv_heads);
            const int64_t kv = task % shape.kv_heads, n = family.last - family.first;
            keys.resize(family.padded * size / 2), values.resize(family.padded * size / 2);
            pack_across(key + family.first * shape.key_stride + kv * size, shape.key_stride, n, family.padded, size, keys.data());
            pack_along(value + family.first * shape.value_stride + kv * size, shape.value_stride, n, family.padded, size, values.data());
            over_blocks(family.spans, family.count, family.first,
                        [&](const Span&, int64_t row, int64_t stop, const Seen& seen) {
                score.resize(group * kBlock * seen.keys), weights.resize(group * kBlock * seen.keys);
                take(query, shape.query_stride, row, stop, kv * group, group, size, rows.data());
                scores(rows.data(), group, keys.data(), seen, size, score.data());
                std::fill(weights.begin(), weights.end(), 0);
                for (int64_t g = 0; g < group; g++)
                    for (int64_t r = row; r < stop; r++) {
                        const int64_t line = g * kBlock + r - row;
                        float* s = score.data() + line * seen.keys;
                        bf16* w = weights.data() + line * seen.keys;
                        float top = -INFINITY, sum = 0;
                        seen.visible(r - family.first, [&](int64_t a, int64_t b) {
#pragma omp simd reduction(max : top)
                            for (int64_t i = a; i < b; i++) top = s[i] > top ? s[i] : top;
                        });
                        seen.visible(r - family.first, [&](int64_t a, int64_t b) {
#pragma omp simd reduction(+ : sum)
                            for (int64_t i = a; i < b; i++) {
                                float e = exponential((s[i] - top) * scale);
                                sum += e;
                                s[i] = e;
                            }
                            for (int64_t i = a; i < b; i++) w[i] = store<bf16>(s[i]);
                        });
                        lse[r * shape.heads + kv * group + g] = top * scale + std::log(sum);
                        score[line * seen.keys] = sum;  // no longer needed for anything else
                    }
                for (int run = 0; run < 2; run++) {
                    if (!seen.count[run]) continue;
                    const bf16* w = weights.data() + (run ? 32 * seen.count[0] : 0);
                    if (run && seen.count[0])
                        product<true>(group, size / 32, seen.count[run], w, seen.keys, values.data(), 0,
                                      seen.from[run], family.padded / 32, out.data(), size);
                    else
                        product<false>(group, size / 32, seen.count[run], w, seen.keys, values.data(), 0,
                                       seen.from[run], family.padded / 32, out.data(), size);
                }
                for (int64_t g = 0; g < group; g++)
                    for (int64_t r = row; r < stop; r++) {
                        const int64_t line = g * kBlock + r - row;
                        const float by = 1.0f / score[line * seen.keys];
                        bf16* to = mixed + (r * shape.heads + kv * group + g) * size;
                        for (int64_t e = 0; e < size; e++) to[e] = store<bf16>(out[line * size + e] * by);
                    }
            });
        }
    }
}

// Gradients by recomputing the weights from the log-sum-exp (Dao et al. 2022, arXiv 2205.14135).
void attend_spans_back(const bf16* query, const bf16* key, const bf16* value, const bf16* mixed, const float* lse,
                       const bf16* grad, bf16* to_query, bf16* to_key, bf16* to_value, const Span* spans,
                       const int64_t* ends, int64_t families, const Shape& shape) {
    const int64_t group = shape.heads / shape.kv_heads, size = shape.size, stride = shape.kv_heads * size;
    const int64_t lines = group * kBlock;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
#pragma omp parallel
    {
        const Tiles tiles;
        std::vector<uint32_t> keys, values, key_rows, weight_pairs, flow_pairs;
        std::vector<float> score, inner, out(lines * size), sum_key, sum_value, delta(lines), high(lines);
        std::vector<bf16> rows(lines * size), grads(lines * size), rows_t(lines * size), grads_t(lines * size), flow;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < families * shape.kv_heads; task++) {
            const Family family(spans, ends, task / shape.kv_heads);
            const int64_t kv = task % shape.kv_heads, n = family.last - family.first, padded = family.padded;
            const bf16* k_at = key + family.first * shape.key_stride + kv * size;
            const bf16* v_at = value + family.first * shape.value_stride + kv * size;
            keys.resize(padded * size / 2), values.resize(padded * size / 2), key_rows.resize(padded * size / 2);
            pack_across(k_at, shape.key_stride, n, padded, size, keys.data());
            pack_across(v_at, shape.value_stride, n, padded, size, values.data());
            pack_along(k_at, shape.key_stride, n, padded, size, key_rows.data());
            sum_key.assign(size * padded, 0.0f), sum_value.assign(size * padded, 0.0f);
            over_blocks(family.spans, family.count, family.first,
                        [&](const Span&, int64_t row, int64_t stop, const Seen& seen) {
                const int64_t width = seen.keys;
                score.resize(lines * width), inner.resize(lines * width), flow.resize(lines * width);
                weight_pairs.resize(lines * width / 2), flow_pairs.resize(lines * width / 2);
                take(query, shape.query_stride, row, stop, kv * group, group, size, rows.data());
                take(grad, shape.heads * size, row, stop, kv * group, group, size, grads.data());
                for (int64_t line = 0; line < lines; line++)
                    for (int64_t e = 0; e < size; e++) {
                        rows_t[e * lines + line] = rows[line * size + e];
                        grads_t[e * lines + line] = grads[line * size + e];
                    }
                scores(rows.data(), group, keys.data(), seen, size, score.data());
                scores(grads.data(), group, values.data(), seen, size, inner.data());
                for (int64_t g = 0; g < group; g++)
                    for (int64_t r = 0; r < kBlock; r++) {
                        const int64_t line = g * kBlock + r, at = (row + r) * shape.heads + kv * group + g;
                        float sum = 0;
                        if (row + r < stop) {
#pragma omp simd reduction(+ : sum)
                            for (int64_t e = 0; e < size; e++)
                                sum += load(grads[line * size + e]) * load(mixed[at * size + e]);
                        }
                        delta[line] = sum;
                        high[line] = row + r < stop ? lse[at] : INFINITY;
                        float *s = score.data() + line * width, *d = inner.data() + line * width;
                        int64_t done = 0;
                        auto blank = [&](int64_t until) {
                            for (; done < until; done++) s[done] = d[done] = 0;
                        };
                        if (row + r < stop)
                            seen.visible(row + r - family.first, [&](int64_t a, int64_t b) {
                                blank(a);
#pragma omp simd
                                for (int64_t i = a; i < b; i++) {
                                    float p = exponential(s[i] * scale - high[line]);
                                    s[i] = p;
                                    d[i] = p * (d[i] - delta[line]) * scale;
                                }
                                done = b;
                            });
                        blank(width);
                    }
                const int64_t steps = lines / 32;
                for (int64_t line = 0; line < lines; line += 2)
                    for (int64_t c = 0; c < width; c += 16) {
                        const int64_t at = line * width + c;
                        __m512i p0 = narrow(_mm512_loadu_ps(&score[at]));
                        __m512i p1 = narrow(_mm512_loadu_ps(&score[at + width]));
                        __m512i d0 = narrow(_mm512_loadu_ps(&inner[at]));
                        __m512i d1 = narrow(_mm512_loadu_ps(&inner[at + width]));
                        const int64_t place = (line % 32) / 2 * 16;
                        _mm512_storeu_si512(tile(weight_pairs.data(), c / 16, line / 32, steps) + place,
                                            _mm512_or_si512(p0, _mm512_slli_epi32(p1, 16)));
                        _mm512_storeu_si512(tile(flow_pairs.data(), c / 16, line / 32, steps) + place,
                                            _mm512_or_si512(d0, _mm512_slli_epi32(d1, 16)));
                        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&flow[at]), _mm512_cvtepi32_epi16(d0));
                        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&flow[at + width]), _mm512_cvtepi32_epi16(d1));
                    }
                std::fill(out.begin(), out.end(), 0.0f);
                for (int run = 0; run < 2; run++) {
                    if (!seen.count[run]) continue;
                    const int64_t skip = run ? seen.count[0] : 0, from = 32 * seen.from[run];
                    product<true>(group, size / 32, seen.count[run], flow.data() + 32 * skip, width, key_rows.data(), 0,
                                  seen.from[run], padded / 32, out.data(), size);
                    product<true>(size / 32, seen.count[run], steps, rows_t.data(), lines, flow_pairs.data(), 2 * skip,
                                  0, steps, sum_key.data() + from, padded);
                    product<true>(size / 32, seen.count[run], steps, grads_t.data(), lines, weight_pairs.data(),
                                  2 * skip, 0, steps, sum_value.data() + from, padded);
                }
                for (int64_t g = 0; g < group; g++)
                    for (int64_t r = row; r < stop; r++)
                        for (int64_t e = 0; e < size; e++)
                            to_query[(r * shape.heads + kv * group + g) * size + e] =
                                store<bf16>(out[(g * kBlock + r - row) * size + e]);
            });
            for (int64_t r = 0; r < n; r++)
                for (int64_t e = 0; e < size; e++) {
                    to_key[(family.first + r) * stride + kv * size + e] = store<bf16>(sum_key[e * padded + r]);
                    to_value[(family.first + r) * stride + kv * size + e] = store<bf16>(sum_value[e * padded + r]);
                }
        }
    }
}

#endif

}  // namespace

#define TRAIN(T, NAME)                                                                                               \
    extern "C" void norm_back_##NAME(const T* x, const T* weight, const T* grad, const T* residual, T* flow,         \
                                     float* grad_weight, int64_t rows, int64_t size, float eps) {                                        \
        norm_back<T>(x, weight, grad, residual, flow, grad_weight, rows, size, eps);                                           \
    }                                                                                                                \
    extern "C" void gated_back_##NAME(const T* gate_up, const T* grad, T* flow, int64_t rows, int64_t inner) {       \
        gated_back<T>(gate_up, grad, flow, rows, inner);                                                             \
    }
TRAIN(float, float32)
TRAIN(bf16, bfloat16)

// Whether this processor has matrix registers and the kernel lets this process use them.
extern "C" int64_t can_attend_spans() {
#ifdef __AMX_BF16__
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}

#ifdef __AMX_BF16__
extern "C" void attend_spans(const bf16* query, const bf16* key, const bf16* value, bf16* mixed, float* lse,
                             const Span* spans, const int64_t* ends, int64_t families, const Shape* shape) {
    attend_spans(query, key, value, mixed, lse, spans, ends, families, *shape);
}

extern "C" void attend_spans_back(const bf16* query, const bf16* key, const bf16* value, const bf16* mixed,
                                  const float* lse, const bf16* grad, bf16* to_query, bf16* to_key, bf16* to_value,
                                  const Span* spans, const int64_t* ends, int64_t families, const Shape* shape) {
    attend_spans_back(query, key, value, mixed, lse, grad, to_query, to_key, to_value, spans, ends, families, *shape);
}
#endif
