// Row-wise operators of a training step on a CPU, each in as few passes over memory as it needs: cross entropy with its
// gradient, RMSNorm, gated SiLU and the rotary embedding. Everything is computed in fp32 and rounded once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

inline float number(float value) { return value; }

inline float number(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class E>
inline E narrow(float value) {
  if constexpr (std::is_same_v<E, float>) {
    return value;
  } else {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t(value != value ? 0x7fc0u : half);  // the carry of rounding could leave a NaN's exponent
  }
}

// exp(x) for x <= 0: a power of 2 times a polynomial of the remainder (coefficients of Cephes; relative error 1e-7).
// e^-87, about 1e-38, below that.
inline float exponential(float x) {
  x = x < -87 ? -87 : x;
  constexpr float WHOLE = 12582912;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504f + WHOLE, power = shifted - WHOLE;
  // x - power * ln 2, with ln 2 as a sum of two numbers: the first product is exact.
  const float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  float polynomial = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  polynomial = polynomial * rest + 8.3334519073e-3f;
  polynomial = polynomial * rest + 4.1665795894e-2f;
  polynomial = polynomial * rest + 1.6666665459e-1f;
  polynomial = polynomial * rest + 5.0000001201e-1f;
  polynomial = polynomial * rest * rest + rest + 1;
  // 2^power: its exponent is in the lowest bits of `shifted`.
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;
  float two;
  std::memcpy(&two, &bits, 4);
  return polynomial * two;
}

constexpr int64_t IGNORED = -100;

// Overwrites a row of logits by softmax(row) - onehot(label); returns logsumexp - logits[label].
template <class E>
float entropy(E* row, int64_t label, int64_t vocabulary, float* scratch) {
  const float score = number(row[label]);
  float peak = -std::numeric_limits<float>::infinity(), sum = 0;
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < vocabulary; i++) peak = std::max(peak, number(row[i]));
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < vocabulary; i++) {
    const float e = exponential(number(row[i]) - peak);
    scratch[i] = e;
    sum += e;
  }
  const float one = 1 / sum, prob = scratch[label] * one;
#pragma omp simd
  for (int64_t i = 0; i < vocabulary; i++) row[i] = narrow<E>(scratch[i] * one);
  row[label] = narrow<E>(prob - 1);
  return peak + std::log(sum) - score;
}

template <class E>
void entropies(E* logits, const int64_t* labels, float* losses, int64_t rows, int64_t vocabulary, int threads,
               int64_t* wrong) {
  for (int64_t i = 0; i < rows; i++)
    if (labels[i] != IGNORED && (labels[i] < 0 || labels[i] >= vocabulary)) {
      *wrong = i;
      return;
    }
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch(vocabulary);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      E* row = logits + i * vocabulary;
      if (labels[i] != IGNORED)
        losses[i] = entropy(row, labels[i], vocabulary, scratch.data());
      else
        losses[i] = 0, std::memset(row, 0, vocabulary * sizeof(E));
    }
  }
}

template <class E>
void norm(const E* x, const float* weight, E* out, float* scale, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const E* row = x + i * width;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < width; d++) squares += number(row[d]) * number(row[d]);
    const float one = 1 / std::sqrt(squares / float(width) + eps);
    scale[i] = one;
#pragma omp simd
    for (int64_t d = 0; d < width; d++) out[i * width + d] = narrow<E>(number(row[d]) * one * weight[d]);
  }
}

constexpr int64_t PART = 256;  // rows whose weight gradients are summed by one thread, so that threads change no sum

// With n = x * scale and g = grad * weight: dx = scale * (g - n * mean(n g)); dw = sum over rows of n * grad.
template <class E>
void norm_backward(const E* grad, const E* x, const float* scale, const float* weight, E* by_x, float* by_weight,
                   int64_t rows, int64_t width, int threads) {
  const int64_t parts = (rows + PART - 1) / PART;
  std::vector<float> sums(parts * width);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; part++) {
    float* into = sums.data() + part * width;
    for (int64_t i = part * PART; i < std::min(rows, (part + 1) * PART); i++) {
      const E *row = x + i * width, *slope = grad + i * width;
      const float one = scale[i];
      float along = 0;
#pragma omp simd reduction(+ : along)
      for (int64_t d = 0; d < width; d++) {
        const float normed = number(row[d]) * one, given = number(slope[d]);
        into[d] += normed * given;
        along += normed * given * weight[d];
      }
      along /= float(width);
#pragma omp simd
      for (int64_t d = 0; d < width; d++)
        by_x[i * width + d] = narrow<E>((number(slope[d]) * weight[d] - number(row[d]) * one * along) * one);
    }
  }
  std::fill(by_weight, by_weight + width, 0.0f);
  for (int64_t part = 0; part < parts; part++)
    for (int64_t d = 0; d < width; d++) by_weight[d] += sums[part * width + d];
}

inline float sigmoid(float x) {
  const float e = exponential(-std::fabs(x));
  return (x < 0 ? e : 1) / (1 + e);
}

constexpr int64_t BLOCK = 4096;  // elements

template <class F>
void in_blocks(int64_t count, int threads, F each) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t from = 0; from < count; from += BLOCK) each(from, std::min(count, from + BLOCK));
}

template <class E>
void gate(const E* a, const E* b, E* out, int64_t count, int threads) {
  in_blocks(count, threads, [=](int64_t from, int64_t to) {
#pragma omp simd
    for (int64_t i = from; i < to; i++) out[i] = narrow<E>(number(a[i]) * sigmoid(number(a[i])) * number(b[i]));
  });
}

template <class E>
void gate_backward(const E* grad, const E* a, const E* b, E* by_a, E* by_b, int64_t count, int threads) {
  in_blocks(count, threads, [=](int64_t from, int64_t to) {
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
      const float x = number(a[i]), given = number(grad[i]), s = sigmoid(x);
      by_b[i] = narrow<E>(given * x * s);
      by_a[i] = narrow<E>(given * number(b[i]) * s * (1 + x * (1 - s)));
    }
  });
}

struct Strides {  // of row, head and token, in elements
  int64_t row, head, token;
};

// out = x cos + rotated halves of x sin, or its gradient by x; out is [rows, length, heads, width].
template <class E>
void rotate(const E* x, Strides at, const E* cos, const E* sin, int64_t table_row, E* out, int64_t rows, int64_t heads,
            int64_t length, int64_t width, bool back, int threads) {
  const int64_t half = width / 2;  // often 24 or 32: vectors of 16 would leave a rest
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < rows * length; n++) {
    const int64_t row = n / length, token = n % length;
    const E *c = cos + row * table_row + token * width, *s = sin + row * table_row + token * width;
    for (int64_t h = 0; h < heads; h++) {
      const E* from = x + row * at.row + token * at.token + h * at.head;
      E* to = out + (n * heads + h) * width;
      if (back) {
#pragma omp simd simdlen(8)
        for (int64_t d = 0; d < half; d++) {
          const float first = number(from[d]), second = number(from[d + half]);
          to[d] = narrow<E>(first * number(c[d]) + second * number(s[d + half]));
          to[d + half] = narrow<E>(second * number(c[d + half]) - first * number(s[d]));
        }
      } else {
#pragma omp simd simdlen(8)
        for (int64_t d = 0; d < half; d++) {
          const float first = number(from[d]), second = number(from[d + half]);
          to[d] = narrow<E>(first * number(c[d]) - second * number(s[d]));
          to[d + half] = narrow<E>(second * number(c[d + half]) + first * number(s[d + half]));
        }
      }
    }
  }
}

}  // namespace

using Half = uint16_t;

extern "C" {

// wrong: becomes the first row whose label is no column; nothing is computed then.
void preheat_cross_entropy(void* logits, const int64_t* labels, float* losses, int64_t rows, int64_t vocabulary,
                           int half, int threads, int64_t* wrong) {
  if (half)
    entropies((Half*)logits, labels, losses, rows, vocabulary, threads, wrong);
  else
    entropies((float*)logits, labels, losses, rows, vocabulary, threads, wrong);
}

void preheat_norm(const void* x, const float* weight, void* out, float* scale, int64_t rows, int64_t width, float eps,
                  int half, int threads) {
  if (half)
    norm((const Half*)x, weight, (Half*)out, scale, rows, width, eps, threads);
  else
    norm((const float*)x, weight, (float*)out, scale, rows, width, eps, threads);
}

void preheat_norm_backward(const void* grad, const void* x, const float* scale, const float* weight, void* by_x,
                           float* by_weight, int64_t rows, int64_t width, int half, int threads) {
  if (half)
    norm_backward((const Half*)grad, (const Half*)x, scale, weight, (Half*)by_x, by_weight, rows, width, threads);
  else
    norm_backward((const float*)grad, (const float*)x, scale, weight, (float*)by_x, by_weight, rows, width, threads);
}

void preheat_gate(const void* a, const void* b, void* out, int64_t count, int half, int threads) {
  if (half)
    gate((const Half*)a, (const Half*)b, (Half*)out, count, threads);
  else
    gate((const float*)a, (const float*)b, (float*)out, count, threads);
}

void preheat_gate_backward(const void* grad, const void* a, const void* b, void* by_a, void* by_b, int64_t count,
                           int half, int threads) {
  if (half)
    gate_backward((const Half*)grad, (const Half*)a, (const Half*)b, (Half*)by_a, (Half*)by_b, count, threads);
  else
    gate_backward((const float*)grad, (const float*)a, (const float*)b, (float*)by_a, (float*)by_b, count, threads);
}

// table_row: elements between the rows of cos and sin; 0: one for all rows.
void preheat_rotate(const void* x, const int64_t* strides, const void* cos, const void* sin, int64_t table_row,
                    void* out, int64_t rows, int64_t heads, int64_t length, int64_t width, int64_t back, int half,
                    int threads) {
  const Strides at{strides[0], strides[1], strides[2]};
  if (half)
    rotate((const Half*)x, at, (const Half*)cos, (const Half*)sin, table_row, (Half*)out, rows, heads, length, width,
           back, threads);
  else
    rotate((const float*)x, at, (const float*)cos, (const float*)sin, table_row, (float*)out, rows, heads, length,
           width, back, threads);
}
}
