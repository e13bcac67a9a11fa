// Attention of few tokens over a KV cache in bf16: scores, their exponentials and sums in fp32, rounded once at the end.

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
  if (value != value) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e to x, where x is not above 0: 2 to the nearest whole power, and a polynomial for the rest (Cephes' coefficients; 1e-7). Below e^-87: 0.
Floats exponential(Floats x) {
  constexpr float WHOLE = 12582912;  // 1.5 * 2^23: added, it leaves no place for a fraction
  const Floats power = (x * 1.44269504f + WHOLE) - WHOLE;
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats made = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  made = made * rest + 8.3334519073e-3f;
  made = made * rest + 4.1665795894e-2f;
  made = made * rest + 1.6666665459e-1f;
  made = made * rest + 5.0000001201e-1f;
  made = made * rest * rest + rest + 1;
  const Ints bits = (__builtin_convertvector(power, Ints) + 127) << 23;
  Floats two;
  std::memcpy(&two, &bits, sizeof two);
  return x < -87 ? Floats{} : made * two;
}

struct Sizes {
  int64_t batch, heads, pairs, queries, keys, width, values;                // pairs: heads of keys and values
  int64_t q[3], k[3], v[3];                                                // elements from a row, head and token to the next
  int64_t mask_row;                                                        // 0: one for all rows
};

// All queries that share one head of keys and values. C: vectors of a key and of a value, where the compiler may know it.
template <int C>
void attend(const Sizes& s, const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint8_t* mask, uint16_t* out, float scale, int64_t row, int64_t pair) {
  const int64_t group = s.heads / s.pairs, rows = group * s.queries, width = C ? C * WIDE : s.width, values = C ? C * WIDE : s.values;
  const int64_t room = (s.keys + WIDE - 1) / WIDE * WIDE;
  std::vector<float> asked(rows * width), scores(rows * room), made(rows * values);
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t* from = q + row * s.q[0] + (pair * group + r / s.queries) * s.q[1] + r % s.queries * s.q[2];
    for (int64_t c = 0; c < width; c += WIDE) store(&asked[r * width + c], widen(from + c) * scale);
  }
  k += row * s.k[0] + pair * s.k[1];
  v += row * s.v[0] + pair * s.v[1];
  for (int64_t n = 0; n < s.keys; n++)
    for (int64_t r = 0; r < rows; r++) {
      Floats all = {};
      for (int64_t c = 0; c < width; c += WIDE) all += load(&asked[r * width + c]) * widen(k + n * s.k[2] + c);
      scores[r * room + n] = sum(all);
    }
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; r++) {
    float *of = &scores[r * room], most = NEVER;
    const uint8_t* seen = mask ? mask + row * s.mask_row + r % s.queries * s.keys : nullptr;
    for (int64_t n = 0; n < room; n++) {
      if (n >= s.keys || (seen && !seen[n])) of[n] = NEVER;
      if (of[n] > most || of[n] != of[n]) most = of[n];  // what is not a number stays so
    }
    Floats all = {};
    for (int64_t n = 0; n < room; n += WIDE) {
      const Floats some = most == NEVER ? Floats{} : exponential(load(of + n) - most);
      store(of + n, some);
      all += some;
    }
    const float whole = sum(all);
    for (int64_t n = 0; n < room; n += WIDE) store(of + n, most == NEVER ? Floats{} : load(of + n) / whole);  // a token that sees nothing: zeros
  }
  for (int64_t n = 0; n < s.keys; n++)
    for (int64_t r = 0; r < rows; r++) {
      const float by = scores[r * room + n];
      for (int64_t c = 0; c < values; c += WIDE) store(&made[r * values + c], load(&made[r * values + c]) + widen(v + n * s.v[2] + c) * by);
    }
  for (int64_t r = 0; r < rows; r++) {
    uint16_t* into = out + ((row * s.queries + r % s.queries) * s.heads + pair * group + r / s.queries) * values;
    for (int64_t c = 0; c < values; c++) into[c] = rounded(made[r * values + c]);
  }
}

}  // namespace

// q [batch, heads, queries, width], k [batch, pairs, keys, width], v [batch, pairs, keys, values] in bf16, the last dimension dense and a multiple of 16;
// mask (may be null) [batch or 1, queries, keys], true where a key is seen; out [batch, queries, heads, values], dense.
extern "C" void preheat_cached_attention(const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint8_t* mask, uint16_t* out, const int64_t* sizes,
                                         float scale, int threads) {
  Sizes s;
  std::memcpy(&s, sizes, sizeof s);
  const int64_t chunks = s.width == s.values ? s.width / WIDE : 0;
  const auto by = chunks == 4 ? attend<4> : chunks == 8 ? attend<8> : attend<0>;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < s.batch * s.pairs; n++) by(s, q, k, v, mask, out, scale, n / s.pairs, n % s.pairs);
}
