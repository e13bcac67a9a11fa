// Decoding attention over a bf16 KV cache: scores, exponentials and sums in fp32, rounded once at the end.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int WIDE = 16;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

Floats widen(const uint16_t* from) {
  Halves some;
  std::memcpy(&some, from, sizeof some);
  // bf16 is the upper half of an fp32 number.
  const Ints bits = __builtin_convertvector(some, Ints) << 16;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

void store(float* into, Floats values) { std::memcpy(into, &values, sizeof values); }

float sum(Floats values) {
  float some[WIDE];
  store(some, values);
  for (int half = WIDE / 2; half; half /= 2)
    for (int n = 0; n < half; n++) some[n] += some[n + half];
  return some[0];
}

uint16_t rounded(float value) {  // to nearest, ties to even
  if (value != value) return 0x7fc0;  // the carry of rounding could leave a NaN's exponent
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0: a power of 2 times a polynomial of the remainder (coefficients of Cephes; relative error 1e-7).
// 0 below e^-87.
Floats exponential(Floats x) {
  constexpr float WHOLE = 12582912;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats power = (x * 1.44269504f + WHOLE) - WHOLE;
  // x - power * ln 2, with ln 2 as a sum of two numbers: the first product is exact.
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats polynomial = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  polynomial = polynomial * rest + 8.3334519073e-3f;
  polynomial = polynomial * rest + 4.1665795894e-2f;
  polynomial = polynomial * rest + 1.6666665459e-1f;
  polynomial = polynomial * rest + 5.0000001201e-1f;
  polynomial = polynomial * rest * rest + rest + 1;
  // 2^power, written into the exponent bits of an fp32 number.
  const Ints bits = (__builtin_convertvector(power, Ints) + 127) << 23;
  Floats two;
  std::memcpy(&two, &bits, sizeof two);
  return x < -87 ? Floats{} : polynomial * two;
}

struct Sizes {
  int64_t batch, heads, pairs, queries, keys, width, values;  // pairs: heads of keys and values
  int64_t q[3], k[3], v[3];  // strides of row, head and token, in elements
  int64_t mask_row;  // 0: one for all rows
};

// All queries that share one head of keys and values: [rows, width] with rows = heads / pairs * queries, so that each
// key and value is read from memory once. C: vectors per key and value, if known at compile time (loops unroll then).
template <int C>
void attend(const Sizes& s, const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint8_t* mask, uint16_t* out,
            float scale, int64_t row, int64_t pair) {
  const int64_t group = s.heads / s.pairs, rows = group * s.queries, width = C ? C * WIDE : s.width,
                values = C ? C * WIDE : s.values;
  // Rows of scores are padded to whole vectors.
  const int64_t room = (s.keys + WIDE - 1) / WIDE * WIDE;
  std::vector<float> scaled_q(rows * width), scores(rows * room), weighted(rows * values);
  // Scaling the queries instead of the scores saves a product per key.
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t* from = q + row * s.q[0] + (pair * group + r / s.queries) * s.q[1] + r % s.queries * s.q[2];
    for (int64_t c = 0; c < width; c += WIDE) store(&scaled_q[r * width + c], widen(from + c) * scale);
  }
  k += row * s.k[0] + pair * s.k[1];
  v += row * s.v[0] + pair * s.v[1];
  // scores[r][n] = q_r . k_n, with the keys in the outer loop: each is read once for all rows.
  for (int64_t n = 0; n < s.keys; n++)
    for (int64_t r = 0; r < rows; r++) {
      Floats all = {};
      for (int64_t c = 0; c < width; c += WIDE) all += load(&scaled_q[r * width + c]) * widen(k + n * s.k[2] + c);
      scores[r * room + n] = sum(all);
    }
  // Softmax over each row, minus its maximum so that no exponential overflows.
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; r++) {
    float *of = &scores[r * room], most = NEVER;
    const uint8_t* visible = mask ? mask + row * s.mask_row + r % s.queries * s.keys : nullptr;
    for (int64_t n = 0; n < room; n++) {
      if (n >= s.keys || (visible && !visible[n])) of[n] = NEVER;
      if (of[n] > most || of[n] != of[n]) most = of[n];  // propagates NaN
    }
    Floats all = {};
    for (int64_t n = 0; n < room; n += WIDE) {
      const Floats weights = most == NEVER ? Floats{} : exponential(load(of + n) - most);
      store(of + n, weights);
      all += weights;
    }
    const float denominator = sum(all);
    // Zeros for a query without visible keys.
    for (int64_t n = 0; n < room; n += WIDE) store(of + n, most == NEVER ? Floats{} : load(of + n) / denominator);
  }
  // weighted[r] = sum over n of softmax[r][n] v_n.
  for (int64_t n = 0; n < s.keys; n++)
    for (int64_t r = 0; r < rows; r++) {
      const float by = scores[r * room + n];
      for (int64_t c = 0; c < values; c += WIDE)
        store(&weighted[r * values + c], load(&weighted[r * values + c]) + widen(v + n * s.v[2] + c) * by);
    }
  for (int64_t r = 0; r < rows; r++) {
    uint16_t* into = out + ((row * s.queries + r % s.queries) * s.heads + pair * group + r / s.queries) * values;
    for (int64_t c = 0; c < values; c++) into[c] = rounded(weighted[r * values + c]);
  }
}

}  // namespace

// bf16 q [batch, heads, queries, width], k [batch, pairs, keys, width], v [batch, pairs, keys, values], the last
// dimension dense and a multiple of 16; mask (may be null) [batch or 1, queries, keys], true for visible keys;
// out [batch, queries, heads, values], dense.
extern "C" void preheat_cached_attention(const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint8_t* mask,
                                         uint16_t* out, const int64_t* sizes, float scale, int threads) {
  Sizes s;
  std::memcpy(&s, sizes, sizeof s);
  // Head dimensions of 64 and 128, the usual ones, have code of their own.
  const int64_t chunks = s.width == s.values ? s.width / WIDE : 0;
  const auto by = chunks == 4 ? attend<4> : chunks == 8 ? attend<8> : attend<0>;
  // One task per row and head of keys and values: tasks share no output, so they need no synchronization.
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < s.batch * s.pairs; n++) by(s, q, k, v, mask, out, scale, n / s.pairs, n % s.pairs);
}
