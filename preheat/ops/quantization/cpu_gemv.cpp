// Matmul of few rows with an int8 or int4 weight on x86 with AVX2. Inputs are quantized to int16 with one scale per row
// (error of half a unit in 32,767 of the largest value; bf16 has one in 256 of each value). Products of int16 inputs with
// int4 or int8 weights accumulate in integers, groups in fp32.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t AT_ONCE = 2048;  // inputs whose int8 sums fit in 32 bits

float wide(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t rounded(float value) {  // to nearest, ties to even
  if (value != value) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float sum(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

__m128i load16(const void* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
__m256i load32(const void* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// Converts `count` bf16 numbers to fp32; count is a multiple of 8.
void widen(const uint16_t* from, int64_t count, float* into) {
  for (int64_t n = 0; n < count; n += 8) {
    const __m256i bits = _mm256_cvtepu16_epi32(load16(from + n));
    _mm256_storeu_ps(into + n, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
  }
}

float largest(__m256 v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Inputs in int16; columns is a multiple of 32. A row that is not finite gets NaN as its scale.
// apart: reorders each 32 inputs, even positions first.
struct Inputs {
  std::vector<int16_t> codes;
  std::vector<float> scales;

  Inputs(const uint16_t* x, int64_t rows, int64_t columns, bool apart) : codes(rows * columns), scales(rows) {
    const __m256 unsigned_ = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    std::vector<float> row(columns);
    for (int64_t r = 0; r < rows; r++) {
      widen(x + r * columns, columns, row.data());
      __m256 most = _mm256_setzero_ps(), zero = most;
      for (int64_t n = 0; n < columns; n += 8) {
        const __m256 some = _mm256_loadu_ps(row.data() + n);
        most = _mm256_max_ps(most, _mm256_and_ps(some, unsigned_));
        zero = _mm256_add_ps(zero, _mm256_mul_ps(some, _mm256_setzero_ps()));
      }
      const bool finite = sum(zero) == 0;
      scales[r] = finite ? largest(most) / 32767 : std::numeric_limits<float>::quiet_NaN();
      const float by = 1 / scales[r];
      if (!std::isfinite(by)) continue;  // the row is 0, or too small to scale
      for (int64_t n = 0; n < columns; n += 16) {
        __m256i two[2];
        for (int i = 0; i < 2; i++) two[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row.data() + n + 8 * i), _mm256_set1_ps(by)));
        const __m256i some = _mm256_permute4x64_epi64(_mm256_packs_epi32(two[0], two[1]), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes.data() + r * columns + n), some);
      }
    }
    for (int64_t n = 0; apart && n < rows * columns; n += 32) {
      const __m256i first = load32(codes.data() + n), second = load32(codes.data() + n + 16);
      const __m256i even = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_slli_epi32(first, 16), 16), _mm256_srai_epi32(_mm256_slli_epi32(second, 16), 16));
      const __m256i odd = _mm256_packs_epi32(_mm256_srai_epi32(first, 16), _mm256_srai_epi32(second, 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes.data() + n), _mm256_permute4x64_epi64(even, 0xd8));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes.data() + n + 16), _mm256_permute4x64_epi64(odd, 0xd8));
    }
  }
};

// Computes one output for R rows, without the scales of inputs and weights.
template <int R>
void eight_bits(const int16_t* x, const int8_t* weights, float* out, int64_t columns) {
  __m256 all[R];
  for (auto& row : all) row = _mm256_setzero_ps();
  for (int64_t begin = 0; begin < columns; begin += AT_ONCE) {
    const int64_t end = begin + AT_ONCE < columns ? begin + AT_ONCE : columns;
    __m256i sums[R][2];
    for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
    for (int64_t at = begin; at < end; at += 32)
      for (int n = 0; n < 2; n++) {
        const __m256i some = _mm256_cvtepi8_epi16(load16(weights + at + 16 * n));
        for (int r = 0; r < R; r++)
          sums[r][n] = _mm256_add_epi32(sums[r][n], _mm256_madd_epi16(some, load32(x + r * columns + at + 16 * n)));
      }
    for (int r = 0; r < R; r++) all[r] = _mm256_add_ps(all[r], _mm256_cvtepi32_ps(_mm256_add_epi32(sums[r][0], sums[r][1])));
  }
  for (int r = 0; r < R; r++) out[r] = sum(all[r]);
}

// The same for int4. x holds, for each 16 bytes of codes, the inputs of their low halves, then those of their high ones.
// G: the group size if known at compile time, else 0.
template <int R, int64_t G>
void four_bits(const int16_t* x, const uint8_t* weights, const float* scales, float* out, int64_t columns, int64_t of_group) {
  const int64_t group = G ? G : of_group;
  const __m128i low = _mm_set1_epi8(15);
  __m256 all[R];
  for (auto& row : all) row = _mm256_setzero_ps();
  for (int64_t begin = 0, g = 0; begin < columns; begin += group, g++) {
    __m256i sums[R];
    for (auto& row : sums) row = _mm256_setzero_si256();
    for (int64_t at = begin; at < begin + group; at += 32) {
      const __m128i both = load16(weights + at / 2);
      const __m256i first = _mm256_cvtepu8_epi16(_mm_and_si128(both, low));
      const __m256i second = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(both, 4), low));
      for (int r = 0; r < R; r++) {
        const int16_t* of = x + r * columns + at;
        sums[r] = _mm256_add_epi32(sums[r], _mm256_add_epi32(_mm256_madd_epi16(first, load32(of)), _mm256_madd_epi16(second, load32(of + 16))));
      }
    }
    const __m256 scale = _mm256_broadcast_ss(scales + g);
    for (int r = 0; r < R; r++) all[r] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums[r]), all[r]);
  }
  for (int r = 0; r < R; r++) out[r] = sum(all[r]);
}

}  // namespace

// x [rows, columns], out [rows, outputs] and scales [outputs] in bf16, codes [outputs, columns]; columns is a multiple of 32.
extern "C" void preheat_eight_bits(const uint16_t* x, const int8_t* codes, const uint16_t* scales, uint16_t* out, int64_t rows, int64_t outputs,
                                   int64_t columns, int threads) {
  const Inputs in(x, rows, columns, false);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t o = 0; o < outputs; o++) {
    for (int64_t row = 0; row < rows;) {
      float found[4];
      const int16_t* of = in.codes.data() + row * columns;
      const int count = row + 4 <= rows ? 4 : 1;
      if (count == 4)
        eight_bits<4>(of, codes + o * columns, found, columns);
      else
        eight_bits<1>(of, codes + o * columns, found, columns);
      for (int n = 0; n < count; n++, row++) out[row * outputs + o] = rounded(found[n] * (in.scales[row] * wide(scales[o])));
    }
  }
}

// The same for int4, (code - 8) * scale + zero: codes [outputs, columns / 2], the first of two in the low half of a byte;
// scales and zeros (may be null) [outputs, columns / group] in bf16. group is a multiple of 32.
extern "C" void preheat_four_bits(const uint16_t* x, const uint8_t* codes, const uint16_t* scales, const uint16_t* zeros, uint16_t* out, int64_t rows,
                                  int64_t outputs, int64_t columns, int64_t group, int threads) {
  const Inputs in(x, rows, columns, true);
  const int64_t groups = columns / group;
  std::vector<float> sums(rows * groups);
  for (int64_t at = 0; at < rows * columns; at += 32) {
    int32_t some[8];
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(load32(in.codes.data() + at), ones), _mm256_madd_epi16(load32(in.codes.data() + at + 16), ones));
    std::memcpy(some, &pairs, 32);
    for (int32_t one : some) sums[at / group] += one;
  }
  const auto four = group == 32 ? four_bits<4, 32> : four_bits<4, 0>;
  const auto one = group == 32 ? four_bits<1, 32> : four_bits<1, 0>;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scale(groups), shift(groups);
#pragma omp for schedule(static)
    for (int64_t o = 0; o < outputs; o++) {
      for (int64_t g = 0; g < groups; g++) {
        scale[g] = wide(scales[o * groups + g]);
        shift[g] = (zeros ? wide(zeros[o * groups + g]) : 0) - 8 * scale[g];
      }
      for (int64_t row = 0; row < rows;) {
        float found[4];
        const int16_t* of = in.codes.data() + row * columns;
        const int count = row + 4 <= rows ? 4 : 1;
        (count == 4 ? four : one)(of, codes + o * columns / 2, scale.data(), found, columns, group);
        for (int n = 0; n < count; n++, row++) {
          __m256 part = _mm256_setzero_ps();
          int64_t g = 0;
          for (; g + 8 <= groups; g += 8) part = _mm256_fmadd_ps(_mm256_loadu_ps(shift.data() + g), _mm256_loadu_ps(sums.data() + row * groups + g), part);
          float value = found[n] + sum(part);
          for (; g < groups; g++) value += shift[g] * sums[row * groups + g];
          out[row * outputs + o] = rounded(in.scales[row] * value);
        }
      }
    }
  }
}
