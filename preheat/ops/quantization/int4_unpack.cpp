// Dequantizes int4 weights to bf16 for prefill: (code - 8) * scale + zero in fp32, rounded once, in one pass over memory.
// Computes the sixteen values of a group once; its codes then look up their bytes.

#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace {

float wide(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t rounded(float value) {  // to nearest, ties to even; scales are finite
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512BW__)
#define LOOKS_UP 1

// The sixteen values of a group, each stored twice: the index is twice the code, with any lowest bit.
struct Table {
  __m512i values;

  Table(float scale, float zero) {
    const __m512 steps = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i bits = _mm512_castps_si512(_mm512_fmadd_ps(steps, _mm512_set1_ps(scale), _mm512_set1_ps(zero)));  // the product is exact
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    values = _mm512_mask_blend_epi16(0x55555555, bits, _mm512_srli_epi32(bits, 16));
  }

  // 16 bytes of codes -> 32 values. The lookup uses the lowest five bits of an index.
  void look_up(const uint8_t* codes, uint16_t* out) const {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i places = _mm512_or_si512(_mm512_slli_epi32(both, 1), _mm512_slli_epi32(both, 13));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(places, values));
  }
};
#elif defined(__GNUC__) && !defined(__clang__)
#define LOOKS_UP 1
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
constexpr Floats STEPS = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr Bytes FIRST = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
constexpr Bytes SECOND = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// The sixteen values of a group, split into low and high bytes.
struct Table {
  Bytes low, high;

  Table(float scale, float zero) {
    const Floats values = STEPS * scale + zero;
    Words bits;
    std::memcpy(&bits, &values, 64);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    low = __builtin_convertvector(bits & 0xff, Bytes);
    high = __builtin_convertvector(bits >> 8, Bytes);
  }

  // 16 bytes of codes -> 32 values.
  void look_up(const uint8_t* codes, uint16_t* out) const {
    Bytes both;
    std::memcpy(&both, codes, 16);
    const Bytes even = both & 15, odd = both >> 4;
    const Bytes places[] = {__builtin_shuffle(even, odd, FIRST), __builtin_shuffle(even, odd, SECOND)};
    for (int n = 0; n < 2; n++) {
      const Bytes small = __builtin_shuffle(low, places[n]), large = __builtin_shuffle(high, places[n]);
      const Bytes made[] = {__builtin_shuffle(small, large, FIRST), __builtin_shuffle(small, large, SECOND)};
      std::memcpy(out + 16 * n, made, 32);
    }
  }
};
#endif

}  // namespace

// codes [rows, columns / 2]; scales and zeros (may be null) [rows, columns / group] in bf16; out [rows, columns] in bf16.
// group must be even.
extern "C" void preheat_unpack(const uint8_t* codes, const uint16_t* scales, const uint16_t* zeros, uint16_t* out, int64_t rows,
                               int64_t columns, int64_t group, int threads) {
  const int64_t groups = columns / group, bytes = group / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < rows * groups; at++) {
    const float scale = wide(scales[at]), zero = zeros ? wide(zeros[at]) : 0.0f;
    const uint8_t* from = codes + at * bytes;
    uint16_t* into = out + at * group;
    int64_t done = 0;
#ifdef LOOKS_UP
    const Table table(scale, zero);
    for (; done + 16 <= bytes; done += 16) table.look_up(from + done, into + 2 * done);
#endif
    for (; done < bytes; done++) {
      into[2 * done] = rounded(float((from[done] & 15) - 8) * scale + zero);
      into[2 * done + 1] = rounded(float((from[done] >> 4) - 8) * scale + zero);
    }
  }
}
