// Weights that lie in the blocks of a GGUF file, as the file has them, or in blocks of torchao's numbers, and are turned
// into float32 when they are read; then into bfloat16 for rows in bfloat16, if the processor has units for it.
//
// A matrix [O, I] is a tensor of bytes [O, I / block, bytes of a block]: the bytes of a block tell its type. A weight
// is exactly the float32 number that the package `gguf` dequantises: a product of scale and whole number has no more bits
// than float32 holds, so a sum of it and an offset is rounded once, here as there.
//
// Layouts: llama.cpp, ggml-common.h (the blocks) and ggml-quants.c (their order).

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "short_pass.h"

namespace few_rows {

using Bytes = const uint8_t*;

// Weights are read so many at a time; every type's blocks are made of such parts.
constexpr int64_t PART = 32;
constexpr int VECTORS = PART / Floats::size();

inline float half_at(Bytes place) {
  uint16_t bits;
  std::memcpy(&bits, place, sizeof(bits));
  return _cvtsh_ss(bits);
}

inline __m128i bytes_at(Bytes place) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(place)); }

// Sixteen whole numbers from -128 to 127, times a scale.
inline void scaled(__m128i numbers, float scale, Floats* weights) {
#if defined(CPU_CAPABILITY_AVX512)
  weights[0] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)), _mm512_set1_ps(scale));
#else
  const __m256 factor = _mm256_set1_ps(scale);
  weights[0] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)), factor);
  weights[1] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(numbers, 8))), factor);
#endif
}

// Offset + scale times a number from 0 to 15: as a table where there are instructions that look numbers up.
#if defined(CPU_CAPABILITY_AVX512)
class Nibbles {
 public:
  Nibbles(float scale, float offset)
      : table_(_mm512_fmadd_ps(
            _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(scale),
            _mm512_set1_ps(offset))) {}
  // Of the low or the high halves of sixteen bytes.
  void low(__m128i bytes, Floats* weights) const {
    weights[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes), table_);
  }
  void high(__m128i bytes, Floats* weights) const { low(_mm_srli_epi16(bytes, 4), weights); }

 private:
  __m512 table_;
};
#else
class Nibbles {
 public:
  Nibbles(float scale, float offset) : scale_(_mm256_set1_ps(scale)), offset_(_mm256_set1_ps(offset)) {}
  void low(__m128i bytes, Floats* weights) const {
    const __m128i numbers = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const auto of = [&](__m128i eight) {
      return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)), scale_, offset_);
    };
    weights[0] = of(numbers);
    weights[1] = of(_mm_srli_si128(numbers, 8));
  }
  void high(__m128i bytes, Floats* weights) const { low(_mm_srli_epi16(bytes, 4), weights); }

 private:
  __m256 scale_, offset_;
};
#endif

// The numbers of sixteen bytes: their low halves, then their high halves.
inline void halves(Bytes place, const Nibbles& nibbles, Floats* weights) {
  nibbles.low(bytes_at(place), weights);
  nibbles.high(bytes_at(place), weights + VECTORS / 2);
}

// The types: numbers and bytes of a block, and how the part at an index of a row is read.
struct Q4_0 {
  static constexpr int64_t SIZE = 32, BYTES = 18;
  static void read(Bytes row, int64_t part, Floats (&weights)[VECTORS]) {
    const Bytes block = row + part * BYTES;
    const float scale = half_at(block);
    halves(block + 2, Nibbles(scale, -8.0f * scale), weights);
  }
};

struct Q4_1 {
  static constexpr int64_t SIZE = 32, BYTES = 20;
  static void read(Bytes row, int64_t part, Floats (&weights)[VECTORS]) {
    const Bytes block = row + part * BYTES;
    halves(block + 4, Nibbles(half_at(block), half_at(block + 2)), weights);
  }
};

// Four low bits of each number, after the fifth bits of all.
struct Q5_0 {
  static constexpr int64_t SIZE = 32, BYTES = 22;
  // The k-th sixteen numbers of a block.
  static __m128i sixteen(Bytes block, int k) {
    const __m128i four = _mm_and_si128(_mm_srli_epi16(bytes_at(block + 6), 4 * k), _mm_set1_epi8(15));
    uint16_t bits;
    std::memcpy(&bits, block + 2 + 2 * k, sizeof(bits));
    const __m128i of_each = _mm_shuffle_epi8(_mm_set1_epi16(bits), _mm_set_epi64x(0x0101010101010101, 0));
    const __m128i place = _mm_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    // A number without its fifth bit is 16 less.
    const __m128i without = _mm_cmpeq_epi8(_mm_and_si128(of_each, place), _mm_setzero_si128());
    return _mm_or_si128(four, _mm_and_si128(without, _mm_set1_epi8(-16)));
  }
  static void read(Bytes row, int64_t part, Floats (&weights)[VECTORS]) {
    const Bytes block = row + part * BYTES;
    for (int k = 0; k < 2; ++k) scaled(sixteen(block, k), half_at(block), weights + k * VECTORS / 2);
  }
};

// Whole numbers of eight bits, after their scale: in half precision, or torchao's in float32.
template <int64_t SCALE_BYTES>
struct EightBits {
  static constexpr int64_t SIZE = 32, BYTES = SCALE_BYTES + SIZE;
  static float scale(Bytes block) {
    float scale = half_at(block);
    if constexpr (SCALE_BYTES == sizeof(scale)) std::memcpy(&scale, block, sizeof(scale));
    return scale;
  }
  static void read(Bytes row, int64_t part, Floats (&weights)[VECTORS]) {
    const Bytes block = row + part * BYTES, numbers = block + SCALE_BYTES;
    scaled(bytes_at(numbers), scale(block), weights);
    scaled(bytes_at(numbers + 16), scale(block), weights + VECTORS / 2);
  }
};

using Q8_0 = EightBits<2>;
using Int8 = EightBits<4>;

// A scale and an offset for each part, of six bits each.
struct Q4_K {
  static constexpr int64_t SIZE = 256, BYTES = 144;
  // Of the j-th part of a block.
  static std::pair<float, float> scales(Bytes block, int64_t j) {
    const Bytes scales = block + 4;
    const int scale = j < 4 ? scales[j] & 63 : (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4;
    const int offset = j < 4 ? scales[j + 4] & 63 : scales[j + 4] >> 4 | (scales[j] >> 6) << 4;
    return {half_at(block) * scale, -(half_at(block + 2) * offset)};
  }
  static void read(Bytes row, int64_t part, Floats (&weights)[VECTORS]) {
    const Bytes block = row + part / 8 * BYTES;
    const int64_t j = part % 8;
    const auto [scale, offset] = scales(block, j);
    const Nibbles nibbles(scale, offset);
    const Bytes numbers = block + 16 + j / 2 * 32;
    if (j % 2) {
      nibbles.high(bytes_at(numbers), weights);
      nibbles.high(bytes_at(numbers + 16), weights + VECTORS / 2);
    } else {
      nibbles.low(bytes_at(numbers), weights);
      nibbles.low(bytes_at(numbers + 16), weights + VECTORS / 2);
    }
  }
};

// Four low and two high bits of each number, and a scale for each sixteen.
struct Q6_K {
  static constexpr int64_t SIZE = 256, BYTES = 210;
  // The k-th sixteen numbers of a part.
  static __m128i sixteen(Bytes block, int64_t part, int k) {
    const int64_t half = part % 8 / 4, j = part % 4;
    const Bytes low = block + half * 64 + j % 2 * 32, high = block + 128 + half * 32;
    const __m128i low_shift = _mm_cvtsi32_si128(j / 2 * 4), high_shift = _mm_cvtsi32_si128(j * 2);
    const __m128i four = _mm_and_si128(_mm_srl_epi16(bytes_at(low + 16 * k), low_shift), _mm_set1_epi8(15));
    const __m128i two = _mm_and_si128(_mm_srl_epi16(bytes_at(high + 16 * k), high_shift), _mm_set1_epi8(3));
    return _mm_sub_epi8(_mm_or_si128(four, _mm_slli_epi16(two, 4)), _mm_set1_epi8(32));
  }
  static void read(Bytes row, int64_t part, Floats (&weights)[VECTORS]) {
    const Bytes block = row + part / 8 * BYTES;
    const auto scales = reinterpret_cast<const int8_t*>(block + 192 + part % 8 * 2);
    const float scale = half_at(block + 208);
    for (int k = 0; k < 2; ++k) scaled(sixteen(block, part, k), scale * scales[k], weights + k * VECTORS / 2);
  }
};

template <typename Block>
constexpr int64_t row_bytes(int64_t I) {
  return I / Block::SIZE * Block::BYTES;
}

// Write the float32 numbers of a row.
template <typename Block>
void unpack(Bytes row, int64_t I, float* numbers) {
  for (int64_t part = 0; part < I / PART; ++part, numbers += PART) {
    Floats weights[VECTORS];
    Block::read(row, part, weights);
    for (int v = 0; v < VECTORS; ++v) weights[v].store(numbers + v * Floats::size());
  }
}

// The weights of a part, as they are multiplied with rows of dtype T: in float32, or rounded to bfloat16 in pairs if
// the processor multiplies those.
template <typename T>
struct Part {
  using Numbers = typename Products<T>::Numbers;
  static constexpr int COUNT = VECTORS;
  template <typename Block>
  static void read(Bytes row, int64_t part, Numbers (&numbers)[COUNT]) {
    Block::read(row, part, numbers);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Part<at::BFloat16> {
  static constexpr int COUNT = 1;
  template <typename Block>
  static void read(Bytes row, int64_t part, __m512bh (&numbers)[COUNT]) {
    Floats weights[VECTORS];
    Block::read(row, part, weights);
    numbers[0] = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
  }
};
#endif

// Most rows of a tile, and its outputs: their sums fit into registers, beside the weights of a part, which fill one
// register or two.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int QUANTISED_ROWS = 8;
constexpr int quantised_outputs(int rows, int registers) { return rows <= 6 ? 4 : registers == 1 ? 3 : 2; }
#else
constexpr int QUANTISED_ROWS = 4;
constexpr int quantised_outputs(int, int) { return 2; }
#endif

// Add the products of whole rows x [ROWS, I] and w [OUTPUTS, I] to y [ROWS, OUTPUTS], whose rows are `distance` apart.
// Sums run over one block of inputs after the other, as those of dequantised weights do: the bits are the same. Weights
// are read in the order of memory: blocks of many rows first would be read at half the speed.
template <int ROWS, int OUTPUTS, typename T, typename Block>
void quantised_tile(const Input<T>* x, Bytes w, float* y, int64_t distance, int64_t block, int64_t I) {
  const int64_t stride = row_bytes<Block>(I);
  constexpr int64_t STEP = PART * Block::BYTES / Block::SIZE;
  Bytes ahead = w + at::divup(LOOK_AHEAD, OUTPUTS * stride) * OUTPUTS * stride;
  for (int64_t begin = 0; begin < I; begin += block) {
    Floats sums[ROWS][OUTPUTS];
    for (auto& of_row : sums) std::fill_n(of_row, OUTPUTS, Floats(0.0f));
    const int64_t end = std::min(begin + block, I) / PART;
    for (int64_t part = begin / PART; part < end; ++part) {
      typename Products<T>::Numbers weights[OUTPUTS][Part<T>::COUNT];
#pragma GCC unroll 4
      for (int o = 0; o < OUTPUTS; ++o, ahead += STEP) {
        __builtin_prefetch(ahead, 0, 3);
        Part<T>::template read<Block>(w + o * stride, part, weights[o]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < Part<T>::COUNT; ++v) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const auto inputs = Products<T>::inputs_at(x + r * I + part * PART + v * (PART / Part<T>::COUNT));
#pragma GCC unroll 4
          for (int o = 0; o < OUTPUTS; ++o) sums[r][o] = Products<T>::add(sums[r][o], inputs, weights[o][v]);
        }
      }
    }
    float found[ROWS][4];
    total(sums, found);
    for (int r = 0; r < ROWS; ++r) {
      for (int o = 0; o < OUTPUTS; ++o) y[r * distance + o] += found[r][o];
    }
  }
}

// The same for a number of outputs O.
template <int ROWS, typename T, typename Block>
void quantised_band(const Input<T>* x, Bytes w, int64_t O, float* y, int64_t distance, int64_t block, int64_t I) {
  constexpr int OUTPUTS = quantised_outputs(ROWS, Part<T>::COUNT);
  int64_t o = 0;
  for (; o + OUTPUTS <= O; o += OUTPUTS) {
    quantised_tile<ROWS, OUTPUTS, T, Block>(x, w + o * row_bytes<Block>(I), y + o, distance, block, I);
  }
  for (; o < O; ++o) quantised_tile<ROWS, 1, T, Block>(x, w + o * row_bytes<Block>(I), y + o, distance, block, I);
}

// The functions for 1, 2, ... rows.
template <typename T, typename Block, size_t... BEFORE>
constexpr auto quantised_bands(std::index_sequence<BEFORE...>) {
  return std::array{quantised_band<BEFORE + 1, T, Block>...};
}

// Call `function` with the type of blocks of so many bytes; refuse others.
template <typename Function>
void for_blocks(int64_t bytes, const Function& function) {
  switch (bytes) {
    case Q4_0::BYTES: return function(Q4_0());
    case Q4_1::BYTES: return function(Q4_1());
    case Q5_0::BYTES: return function(Q5_0());
    case Q8_0::BYTES: return function(Q8_0());
    case Int8::BYTES: return function(Int8());
    case Q4_K::BYTES: return function(Q4_K());
    case Q6_K::BYTES: return function(Q6_K());
  }
  TORCH_CHECK(false, "quantised weights: got blocks of ", bytes, " bytes; allowed: Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K, int8");
}

}  // namespace few_rows
