// Causal attention on a CPU, forward and backward, for a head at a time: scores and their gradients stay in the core's
// cache. Sums, maxima and exponentials in fp32; probabilities are rounded to bf16 where the CPU multiplies pairs
// of bf16.
//
// Scores are computed as [keys, queries], so that maxima and sums of a query are plain vector operations over the rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif

namespace {

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

constexpr int64_t QUERIES = 48;  // of a block: few enough that little of the triangle's other half is computed
constexpr int64_t COLUMNS = QUERIES / WIDE;
constexpr int64_t PAD = 24;  // keys are padded to a multiple: every tile height below divides it

Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

void store(float* into, Floats values) { std::memcpy(into, &values, sizeof values); }

float widen(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t rounded(float value) {  // to nearest, ties to even
  if (value != value) return 0x7fc0;  // the carry of rounding could leave a NaN's exponent
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// fp32 -> bf16 in the upper half of each word, the lower half 0.
Words upper(Floats values) {
#if defined(__AVX512BF16__)
  Words words;
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)values)), 16);
  std::memcpy(&words, &wide, sizeof words);
  return words;
#else
  Words bits;
  std::memcpy(&bits, &values, sizeof bits);
  return ((values != values) ? Words{} + 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u;
#endif
}

// exp(x) for x <= 0: a power of 2 times a polynomial of the remainder (coefficients of Cephes; relative error 1e-7).
// 0 below e^-87.
Floats exponential(Floats x) {
  constexpr float WHOLE = 12582912;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x * 1.44269504f + WHOLE, power = shifted - WHOLE;
  // x - power * ln 2, with ln 2 as a sum of two numbers: the first product is exact.
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats polynomial = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  polynomial = polynomial * rest + 8.3334519073e-3f;
  polynomial = polynomial * rest + 4.1665795894e-2f;
  polynomial = polynomial * rest + 1.6666665459e-1f;
  polynomial = polynomial * rest + 5.0000001201e-1f;
  polynomial = polynomial * rest * rest + rest + 1;
  // 2^power: its exponent is in the lowest bits of `shifted`.
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  Floats two;
  std::memcpy(&two, &bits, sizeof two);
  return x < -87 ? Floats{} : polynomial * two;
}

// An operand of a product: fp32 numbers, or pairs of bf16 numbers along the summed dimension.
#if defined(__AVX512BF16__)
struct Pair {
  uint16_t first, second;
};

Floats multiply(const Pair* one, const Pair* many, Floats sum) {
  int32_t bits;
  std::memcpy(&bits, one, 4);
  const __m512i a = _mm512_set1_epi32(bits), b = _mm512_loadu_si512(many);
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

Floats multiply(const float* one, const float* many, Floats sum) { return load(many) * *one + sum; }

template <class T>
constexpr int64_t DEEP = std::is_same_v<T, float> ? 1 : 2;  // numbers of the summed dimension in a T

struct Side {  // of a: element (m, k) is at start + m * row + k * column
  int64_t row, column;
};

// c [HIGH, MANY * WIDE] (+)= a [HIGH, deep] b [deep, MANY * WIDE]
template <int HIGH, int MANY, bool ADD, class T>
void tile(const T* a, Side side, const T* b, int64_t b_row, int64_t deep, float* c, int64_t c_row) {
  Floats sums[HIGH][MANY];
#pragma GCC unroll 16
  for (int m = 0; m < HIGH; m++)
#pragma GCC unroll 4
    for (int n = 0; n < MANY; n++) sums[m][n] = ADD ? load(c + m * c_row + n * WIDE) : Floats{};
  for (int64_t k = 0; k < deep; k++, a += side.column, b += b_row) {
#pragma GCC unroll 16
    for (int m = 0; m < HIGH; m++)
#pragma GCC unroll 4
      for (int n = 0; n < MANY; n++) sums[m][n] = multiply(a + m * side.row, b + n * WIDE, sums[m][n]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < HIGH; m++)
#pragma GCC unroll 4
    for (int n = 0; n < MANY; n++) store(c + m * c_row + n * WIDE, sums[m][n]);
}

template <int HIGH, int MANY, bool ADD, class T>
int64_t strips(int64_t rows, int64_t from, int64_t columns, const T* a, Side side, const T* b, int64_t b_row,
               int64_t deep, float* c, int64_t c_row) {
  for (; from + MANY * WIDE <= columns; from += MANY * WIDE)
    for (int64_t m = 0; m < rows; m += HIGH)
      tile<HIGH, MANY, ADD>(a + m * side.row, side, b + from, b_row, deep, c + m * c_row + from, c_row);
  return from;
}

// c [rows, columns] (+)= a [rows, deep] b [deep, columns]; rows are a multiple of PAD, columns of 16.
template <bool ADD, class T>
void product(int64_t rows, int64_t columns, const T* a, Side side, const T* b, int64_t b_row, int64_t deep, float* c,
             int64_t c_row) {
  int64_t from = 0;
  if constexpr (WIDE == 16) {  // 24 of 32 registers hold sums
    if (columns % 64 == 0)
      from = strips<6, 4, ADD>(rows, from, columns, a, side, b, b_row, deep, c, c_row);
    else
      from = strips<8, 3, ADD>(rows, from, columns, a, side, b, b_row, deep, c, c_row);
    from = strips<12, 2, ADD>(rows, from, columns, a, side, b, b_row, deep, c, c_row);
    strips<12, 1, ADD>(rows, from, columns, a, side, b, b_row, deep, c, c_row);
  } else {  // 12 of 16
    strips<6, 2, ADD>(rows, from, columns, a, side, b, b_row, deep, c, c_row);
  }
}

struct Strides {  // of row, head and token, in elements; a head's numbers are contiguous
  int64_t row, head, token;
};

struct Sizes {
  int64_t rows, heads, shared, length, width;  // shared: heads of keys and values
  float scale;
};

int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

template <class E>
float number(E value) {
  if constexpr (std::is_same_v<E, float>)
    return value;
  else
    return widen(value);
}

template <class E>
E narrow(float value) {
  if constexpr (std::is_same_v<E, float>)
    return value;
  else
    return rounded(value);
}

// The three arrangements of x [count, width] with `token` numbers between rows; rows from count on are 0.
// By rows: [rows, width / DEEP]; the sum runs over the width.
template <class T, class E>
void by_rows(const E* x, int64_t token, int64_t count, int64_t rows, int64_t width, T* into) {
  for (int64_t i = 0; i < rows; i++, into += width / DEEP<T>) {
    if (i >= count)
      std::memset(into, 0, width / DEEP<T> * sizeof(T));
    else if constexpr (std::is_same_v<T, float> && !std::is_same_v<E, float>)
      for (int64_t d = 0; d < width; d++) into[d] = number(x[i * token + d]);
    else
      std::memcpy(into, x + i * token, width * sizeof(E));
  }
}

// Transposed: [width / DEEP, rows]; the sum runs over the width.
template <class T, class E>
void transposed(const E* x, int64_t token, int64_t count, int64_t rows, int64_t width, T* into) {
  if (count < rows) std::memset((void*)into, 0, rows * width / DEEP<T> * sizeof(T));
  constexpr int64_t STRIP = 16;  // bytes of a cache line are written together
  for (int64_t from = 0; from < count; from += STRIP)
    for (int64_t d = 0; d < width / DEEP<T>; d++)
      for (int64_t i = from; i < std::min(count, from + STRIP); i++) {
        T& place = into[d * rows + i];
        if constexpr (std::is_same_v<T, float>)
          place = number(x[i * token + d]);
        else
          std::memcpy(&place, x + i * token + 2 * d, 4);
      }
}

// Interleaved: [rows / DEEP, width]; the sum runs over the rows.
template <class T, class E>
void interleaved(const E* x, int64_t token, int64_t count, int64_t rows, int64_t width, T* into) {
  for (int64_t i = 0; i < rows / DEEP<T>; i++, into += width) {
    if constexpr (std::is_same_v<T, float>) {
      for (int64_t d = 0; d < width; d++) into[d] = i < count ? number(x[i * token + d]) : 0.0f;
    } else {
      const E *first = x + 2 * i * token, *second = first + token;
      if (2 * i >= count) {
        std::memset((void*)into, 0, width * sizeof(T));
        continue;
      }
      const bool both = 2 * i + 1 < count;
      for (int64_t d = 0; d < width; d++) {
        const uint32_t word = first[d] | (both ? uint32_t(second[d]) << 16 : 0);
        std::memcpy(into + d, &word, 4);
      }
    }
  }
}

// Lanes whose query is not before key `i`; both counted from the block's first query.
Ints seen(int64_t column, int64_t i) {
  Ints lanes;
  for (int n = 0; n < WIDE; n++) lanes[n] = n;
  return lanes + int32_t(column * WIDE) >= Ints{} + int32_t(i);
}

// The first vector of queries of which one is not before key `i`, counted from the block's first query.
int64_t first_seen(int64_t i) { return i <= 0 ? 0 : std::min(i / WIDE, COLUMNS); }

// Two rows of `columns` vectors, keys i and i + 1, interleaved: [queries] pairs.
template <class T>
void store_pair(T* into, Floats first, Floats second) {
  const Words words = (upper(first) >> 16) | upper(second);
  std::memcpy(into, &words, sizeof words);
}

template <class T>
struct Room {  // a thread's buffers
  std::vector<T> keys, values, keys_in, values_in, queries, slopes, queries_in, slopes_in, probs, probs_in, grads;
  std::vector<float> scores, slope_scores, sums, grad_keys, grad_values;
};

template <class T>
T* room(std::vector<T>& buffer, int64_t count) {
  if (int64_t(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// Maxima of the scaled scores of each query over the keys up to itself.
void maxima(const float* scores, int64_t keys, int64_t first, int64_t columns, float scale, Floats* peak) {
  for (int n = 0; n < COLUMNS; n++) peak[n] = Floats{} - std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < keys; i++)
    for (int64_t n = first_seen(i - first); n < columns; n++) {
      Floats score = load(scores + i * QUERIES + n * WIDE) * scale;
      if (i > first) score = seen(n, i - first) ? score : peak[n];
      peak[n] = score > peak[n] ? score : peak[n];
    }
}

template <class T, class E>
void forward_head(const Sizes& s, const E* q, Strides qs, const E* k, Strides ks, const E* v, Strides vs, E* out,
                  Strides os, Room<T>& room_) {
  const int64_t all = padded(s.length, PAD), width = s.width, group = s.heads / s.shared;
  constexpr int64_t D = DEEP<T>;
  T* keys = room(room_.keys, all * width);
  T* values = room(room_.values_in, all * width);
  T* queries = room(room_.queries, width * QUERIES);
  T* probs = room(room_.probs, all * QUERIES);
  float* scores = room(room_.scores, all * QUERIES);
  float* sums = room(room_.sums, QUERIES * width);
  by_rows<T>(k, ks.token, s.length, all, width, keys);
  interleaved<T>(v, vs.token, s.length, all, width, values);
  for (int64_t h = 0; h < group; h++)
    for (int64_t first = 0; first < s.length; first += QUERIES) {
      const int64_t count = std::min(QUERIES, s.length - first), columns = padded(count, 16), many = columns / WIDE;
      const int64_t near = padded(first + count, PAD);
      const E* block = q + h * qs.head + first * qs.token;
      transposed<T>(block, qs.token, count, QUERIES, width, queries);
      product<false>(near, columns, keys, {width / D, 1}, queries, QUERIES, width / D, scores, QUERIES);
      Floats peak[COLUMNS], total[COLUMNS] = {};
      maxima(scores, near, first, many, s.scale, peak);
      for (int64_t i = 0; i < near; i += D) {
        const int64_t begin = first_seen(i - first);
        std::memset((void*)(probs + i / D * QUERIES), 0, begin * WIDE * sizeof(T));
        for (int64_t n = begin; n < many; n++) {
          Floats e[D];
          for (int j = 0; j < D; j++) {
            e[j] = exponential(load(scores + (i + j) * QUERIES + n * WIDE) * s.scale - peak[n]);
            if (i + j > first) e[j] = seen(n, i + j - first) ? e[j] : Floats{};
            total[n] += e[j];
          }
          if constexpr (D == 1)
            store(probs + i * QUERIES + n * WIDE, e[0]);
          else
            store_pair(probs + i / 2 * QUERIES + n * WIDE, e[0], e[1]);
        }
      }
      product<false>(padded(count, PAD), width, probs, {1, QUERIES}, values, width, near / D, sums, width);
      float one[QUERIES];
      for (int n = 0; n < COLUMNS; n++) store(one + n * WIDE, 1 / total[n]);
      E* into = out + h * os.head + first * os.token;
      for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < width; d++) into[i * os.token + d] = narrow<E>(sums[i * width + d] * one[i]);
    }
}

template <class T, class E>
void backward_head(const Sizes& s, const E* grad, Strides gs, const E* q, Strides qs, const E* k, Strides ks,
                   const E* v, Strides vs, E* grad_q, Strides gq, E* grad_k, Strides gk, E* grad_v, Strides gv,
                   Room<T>& room_) {
  const int64_t all = padded(s.length, PAD), width = s.width, group = s.heads / s.shared;
  constexpr int64_t D = DEEP<T>;
  T* keys = room(room_.keys, all * width);
  T* values = room(room_.values, all * width);
  T* keys_in = room(room_.keys_in, all * width);
  T* queries = room(room_.queries, width * QUERIES);
  T* slopes = room(room_.slopes, width * QUERIES);
  T* queries_in = room(room_.queries_in, width * QUERIES);
  T* slopes_in = room(room_.slopes_in, width * QUERIES);
  T* probs = room(room_.probs, all * QUERIES);      // [keys, queries / D]
  T* grads = room(room_.grads, all * QUERIES);          // the same of the scores' gradient
  T* grads_in = room(room_.probs_in, all * QUERIES);  // [keys / D, queries]
  float* scores = room(room_.scores, all * QUERIES);
  float* slope_scores = room(room_.slope_scores, all * QUERIES);
  float* sums = room(room_.sums, QUERIES * width);
  float* to_keys = room(room_.grad_keys, all * width);
  float* to_values = room(room_.grad_values, all * width);
  std::memset(to_keys, 0, all * width * sizeof(float));
  std::memset(to_values, 0, all * width * sizeof(float));
  by_rows<T>(k, ks.token, s.length, all, width, keys);
  by_rows<T>(v, vs.token, s.length, all, width, values);
  interleaved<T>(k, ks.token, s.length, all, width, keys_in);
  for (int64_t h = 0; h < group; h++)
    for (int64_t first = 0; first < s.length; first += QUERIES) {
      const int64_t count = std::min(QUERIES, s.length - first), columns = padded(count, 16), many = columns / WIDE;
      const int64_t near = padded(first + count, PAD);
      const E* block = q + h * qs.head + first * qs.token;
      const E* slope = grad + h * gs.head + first * gs.token;
      transposed<T>(block, qs.token, count, QUERIES, width, queries);
      transposed<T>(slope, gs.token, count, QUERIES, width, slopes);
      interleaved<T>(block, qs.token, count, QUERIES, width, queries_in);
      interleaved<T>(slope, gs.token, count, QUERIES, width, slopes_in);
      product<false>(near, columns, keys, {width / D, 1}, queries, QUERIES, width / D, scores, QUERIES);
      // dP = V dO^T
      product<false>(near, columns, values, {width / D, 1}, slopes, QUERIES, width / D, slope_scores, QUERIES);
      Floats peak[COLUMNS], total[COLUMNS] = {}, along[COLUMNS] = {};
      maxima(scores, near, first, many, s.scale, peak);
      for (int64_t i = 0; i < near; i++) {
        const int64_t begin = first_seen(i - first);
        std::memset(scores + i * QUERIES, 0, begin * WIDE * sizeof(float));
        for (int64_t n = begin; n < many; n++) {
          float* place = scores + i * QUERIES + n * WIDE;
          Floats e = exponential(load(place) * s.scale - peak[n]);
          if (i > first) e = seen(n, i - first) ? e : Floats{};
          total[n] += e;
          along[n] += e * load(slope_scores + i * QUERIES + n * WIDE);
          store(place, e);
        }
      }
      for (int n = 0; n < COLUMNS; n++) total[n] = 1 / total[n], along[n] *= total[n];
      // dS = P (dP - sum over keys of P dP) * scale
      for (int64_t i = 0; i < near; i += D)
        for (int64_t n = 0; n < many; n++) {
          Floats p[D], g[D];
          for (int j = 0; j < D; j++) {
            const int64_t at = (i + j) * QUERIES + n * WIDE;
            p[j] = load(scores + at) * total[n];
            g[j] = p[j] * (load(slope_scores + at) - along[n]) * s.scale;
          }
          if constexpr (D == 1) {
            store(probs + i * QUERIES + n * WIDE, p[0]);
            store(grads + i * QUERIES + n * WIDE, g[0]);
          } else {
            store_pair(grads_in + i / 2 * QUERIES + n * WIDE, g[0], g[1]);
            for (int j = 0; j < D; j++) {
              const int64_t at = ((i + j) * QUERIES + n * WIDE) / 2;
              const Halves a = __builtin_convertvector(upper(p[j]) >> 16, Halves);
              const Halves b = __builtin_convertvector(upper(g[j]) >> 16, Halves);
              std::memcpy(probs + at, &a, sizeof a);
              std::memcpy(grads + at, &b, sizeof b);
            }
          }
        }
      // dV += P^T dO, dK += dS^T Q, dQ = dS K. Columns of the last block beyond its queries are not computed.
      const int64_t deep = columns / D;
      product<true>(near, width, probs, {QUERIES / D, 1}, slopes_in, width, deep, to_values, width);
      product<true>(near, width, grads, {QUERIES / D, 1}, queries_in, width, deep, to_keys, width);
      product<false>(padded(count, PAD), width, D == 1 ? grads : grads_in, {1, QUERIES}, keys_in, width, near / D, sums,
                     width);
      E* into = grad_q + h * gq.head + first * gq.token;
      for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < width; d++) into[i * gq.token + d] = narrow<E>(sums[i * width + d]);
    }
  for (int64_t i = 0; i < s.length; i++)
    for (int64_t d = 0; d < width; d++) {
      grad_k[i * gk.token + d] = narrow<E>(to_keys[i * width + d]);
      grad_v[i * gv.token + d] = narrow<E>(to_values[i * width + d]);
    }
}

template <class T, class E>
void forward(const Sizes& s, const E* q, const E* k, const E* v, E* out, const Strides* t, int threads) {
  const int64_t group = s.heads / s.shared;
#pragma omp parallel num_threads(threads)
  {
    Room<T> buffers;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < s.rows * s.shared; n++) {
      const int64_t row = n / s.shared, head = n % s.shared;
      auto at = [&](auto* x, Strides of, int64_t each) { return x + row * of.row + head * each * of.head; };
      forward_head<T>(s, at(q, t[0], group), t[0], at(k, t[1], 1), t[1], at(v, t[2], 1), t[2], at(out, t[3], group),
                      t[3], buffers);
    }
  }
}

template <class T, class E>
void backward(const Sizes& s, const E* grad, const E* q, const E* k, const E* v, E* grad_q, E* grad_k, E* grad_v,
              const Strides* t, int threads) {
  const int64_t group = s.heads / s.shared;
#pragma omp parallel num_threads(threads)
  {
    Room<T> buffers;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < s.rows * s.shared; n++) {
      const int64_t row = n / s.shared, head = n % s.shared;
      auto at = [&](auto* x, Strides of, int64_t each) { return x + row * of.row + head * each * of.head; };
      backward_head<T>(s, at(grad, t[0], group), t[0], at(q, t[1], group), t[1], at(k, t[2], 1), t[2], at(v, t[3], 1),
                       t[3], at(grad_q, t[4], group), t[4], at(grad_k, t[5], 1), t[5], at(grad_v, t[6], 1), t[6],
                       buffers);
    }
  }
}

#if defined(__AVX512BF16__)
using Half = Pair;
#else
using Half = float;
#endif

}  // namespace

extern "C" {

// Tensors [rows, heads, length, width]; strides: three of each tensor in the order of the arguments.
void preheat_causal_forward(const void* q, const void* k, const void* v, void* out, const int64_t* strides,
                            int64_t rows, int64_t heads, int64_t shared, int64_t length, int64_t width, float scale,
                            int half, int threads) {
  const Sizes s{rows, heads, shared, length, width, scale};
  const Strides* t = reinterpret_cast<const Strides*>(strides);
  if (half)
    forward<Half>(s, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v, (uint16_t*)out, t, threads);
  else
    forward<float>(s, (const float*)q, (const float*)k, (const float*)v, (float*)out, t, threads);
}

void preheat_causal_backward(const void* grad, const void* q, const void* k, const void* v, void* grad_q, void* grad_k,
                             void* grad_v, const int64_t* strides, int64_t rows, int64_t heads, int64_t shared,
                             int64_t length, int64_t width, float scale, int half, int threads) {
  const Sizes s{rows, heads, shared, length, width, scale};
  const Strides* t = reinterpret_cast<const Strides*>(strides);
  if (half)
    backward<Half>(s, (const uint16_t*)grad, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v,
                   (uint16_t*)grad_q, (uint16_t*)grad_k, (uint16_t*)grad_v, t, threads);
  else
    backward<float>(s, (const float*)grad, (const float*)q, (const float*)k, (const float*)v, (float*)grad_q,
                    (float*)grad_k, (float*)grad_v, t, threads);
}
}
