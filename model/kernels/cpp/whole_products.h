// Products of weights of a few bits with rows of eight bits, as llama.cpp computes them: 32 inputs of a row share a
// scale, the products of a part are summed as whole numbers, exactly, and the sums of parts in float32, one after the
// other. It is another arithmetic than that of dequantised weights. Each row is rounded by itself, so that its bits are
// the same beside any others, and with any instructions.
//
// Weights are repacked: the same part of sixteen rows lies side by side, four numbers of each row after the other. So a
// vector has a sum for each of sixteen outputs, and a scale is multiplied once for all: with the blocks as a file has
// them, that took as long as the products, and passes over eight rows gained nothing.
//
// Shapes: n rows, I inputs, O outputs; parts of 32 inputs. Repacked weights are [O, I / 32, bytes of a part].

#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "quantised_weights.h"

namespace few_rows {

// Rows of weights side by side.
constexpr int64_t SIDE = 16;

// The layout of repacked weights: scales of sixteen rows, offsets, numbers. Numbers of eight bits have 128 added.
template <typename Scale_, int BITS_, int SCALES_, bool HAS_OFFSET_>
struct Packed {
  using Scale = Scale_;
  static constexpr int BITS = BITS_, SCALES = SCALES_;  // a scale for all of a part, or for each half
  static constexpr bool HAS_OFFSET = HAS_OFFSET_;
  static constexpr int64_t VALUES = SIDE * sizeof(Scale), NUMBERS = (SCALES + HAS_OFFSET) * VALUES;
  static constexpr int64_t BYTES = NUMBERS + SIDE * PART * BITS / 8;  // of a part of sixteen rows
  static constexpr int64_t row_bytes(int64_t I) { return I / PART * BYTES / SIDE; }
};

using Packed4 = Packed<at::Half, 4, 1, true>;
using Packed4K = Packed<float, 4, 1, true>;
using Packed8 = Packed<at::Half, 8, 1, false>;
using PackedInt8 = Packed<float, 8, 1, false>;
using Packed6K = Packed<float, 8, 2, false>;

// A part of a row: number i is scales[i / 16] * numbers[i] + offset.
struct WholePart {
  std::array<int8_t, PART> numbers;
  std::array<float, 2> scales;
  float offset = 0.0f;
};

// The halves of bytes: first all low ones, then all high ones.
inline std::array<int8_t, PART> whole_halves(Bytes place) {
  std::array<int8_t, PART> numbers;
  for (int i = 0; i < PART / 2; ++i) numbers[i] = place[i] & 15, numbers[i + PART / 2] = place[i] >> 4;
  return numbers;
}

inline void store_sixteen(__m128i numbers, int k, WholePart& part) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(part.numbers.data()) + k, numbers);
}

// The parts of each type of blocks, and how they are repacked.
inline WholePart whole_part(Q4_0, Bytes row, int64_t part) {
  const Bytes block = row + part * Q4_0::BYTES;
  const float scale = half_at(block);
  return {whole_halves(block + 2), {scale, scale}, -8.0f * scale};
}

inline WholePart whole_part(Q4_1, Bytes row, int64_t part) {
  const Bytes block = row + part * Q4_1::BYTES;
  const float scale = half_at(block);
  return {whole_halves(block + 4), {scale, scale}, half_at(block + 2)};
}

inline WholePart whole_part(Q5_0, Bytes row, int64_t part) {
  const Bytes block = row + part * Q5_0::BYTES;
  const float scale = half_at(block);
  WholePart found{{}, {scale, scale}};
  for (int k = 0; k < 2; ++k) store_sixteen(Q5_0::sixteen(block, k), k, found);
  return found;
}

template <int64_t SCALE_BYTES>
WholePart whole_part(EightBits<SCALE_BYTES>, Bytes row, int64_t part) {
  const Bytes block = row + part * EightBits<SCALE_BYTES>::BYTES;
  const float scale = EightBits<SCALE_BYTES>::scale(block);
  WholePart found{{}, {scale, scale}};
  std::memcpy(found.numbers.data(), block + SCALE_BYTES, PART);
  return found;
}

inline WholePart whole_part(Q4_K, Bytes row, int64_t part) {
  const Bytes block = row + part / 8 * Q4_K::BYTES, numbers = block + 16 + part % 8 / 2 * 32;
  const auto [scale, offset] = Q4_K::scales(block, part % 8);
  WholePart found{{}, {scale, scale}, offset};
  for (int i = 0; i < PART; ++i) found.numbers[i] = part % 2 ? numbers[i] >> 4 : numbers[i] & 15;
  return found;
}

inline WholePart whole_part(Q6_K, Bytes row, int64_t part) {
  const Bytes block = row + part / 8 * Q6_K::BYTES;
  const auto scales = reinterpret_cast<const int8_t*>(block + 192 + part % 8 * 2);
  const float scale = half_at(block + 208);
  WholePart found{{}, {scale * scales[0], scale * scales[1]}};
  for (int k = 0; k < 2; ++k) store_sixteen(Q6_K::sixteen(block, part, k), k, found);
  return found;
}

inline Packed4 packed_as(Q4_0) { return {}; }
inline Packed4 packed_as(Q4_1) { return {}; }
inline Packed8 packed_as(Q5_0) { return {}; }
inline Packed8 packed_as(Q8_0) { return {}; }
inline PackedInt8 packed_as(Int8) { return {}; }
inline Packed4K packed_as(Q4_K) { return {}; }
inline Packed6K packed_as(Q6_K) { return {}; }

// Call `function` with the layout of repacked weights with so many bytes in a part of a row.
template <typename Function>
void for_packed(int64_t bytes, const Function& function) {
  switch (bytes * SIDE) {
    case Packed4::BYTES: return function(Packed4());
    case Packed4K::BYTES: return function(Packed4K());
    case Packed8::BYTES: return function(Packed8());
    case PackedInt8::BYTES: return function(PackedInt8());
    case Packed6K::BYTES: return function(Packed6K());
  }
  TORCH_CHECK(false, "repacked weights: got parts of ", bytes, " bytes; allowed: what `packed` makes");
}

// Where a number of a row of sixteen lies, from the layout's NUMBERS on.
inline int64_t place_of(int64_t row, int64_t i) { return i / 4 * 64 + row * 4 + i % 4; }

// Repack a part of sixteen rows, which are `stride` bytes apart.
template <typename Block>
void repack(Bytes rows, int64_t stride, int64_t part, uint8_t* to) {
  using P = decltype(packed_as(Block()));
  const auto values = reinterpret_cast<typename P::Scale*>(to);
  std::fill_n(to + P::NUMBERS, P::BYTES - P::NUMBERS, 0);
  for (int64_t row = 0; row < SIDE; ++row) {
    const WholePart found = whole_part(Block(), rows + row * stride, part);
    for (int k = 0; k < P::SCALES; ++k) values[k * SIDE + row] = found.scales[k];
    if constexpr (P::HAS_OFFSET) values[P::SCALES * SIDE + row] = found.offset;
    for (int64_t i = 0; i < PART; ++i) {
      const auto number = static_cast<uint8_t>(found.numbers[i]);
      if constexpr (P::BITS == 8) to[P::NUMBERS + place_of(row, i)] = number ^ 128;
      else to[P::NUMBERS + place_of(row, i % 16)] |= i < 16 ? number : number << 4;
    }
  }
}

// Write the float32 numbers of a row of sixteen, as `unpack` does before they are repacked.
template <typename P>
void unpack_packed(Bytes group, int64_t row, int64_t I, float* numbers) {
  for (int64_t part = 0; part < I / PART; ++part, group += P::BYTES) {
    const auto values = reinterpret_cast<const typename P::Scale*>(group);
    for (int64_t i = 0; i < PART; ++i) {
      const float scale = values[(P::SCALES == 2 ? i / 16 : 0) * SIDE + row];
      if constexpr (P::BITS == 8) {
        *numbers++ = scale * static_cast<float>(group[P::NUMBERS + place_of(row, i)] - 128);
      } else {
        const uint8_t both = group[P::NUMBERS + place_of(row, i % 16)];
        *numbers++ = std::fma(scale, static_cast<float>(i < 16 ? both & 15 : both >> 4), static_cast<float>(values[SIDE + row]));
      }
    }
  }
}

// Rows [n, I] of eight bits.
struct WholeRows {
  int64_t n, I;
  std::vector<int8_t> numbers;  // [n, I]
  std::vector<float> scales;    // [n, I / PART]
  std::vector<int32_t> sums;    // [n, I / PART, 2], of the numbers of each half of a part

  WholeRows(const float* x, int64_t n, int64_t I)
      : n(n), I(I), numbers(n * I), scales(n * I / PART), sums(n * I / PART * 2) {
    at::parallel_for(0, n * I / PART, std::max<int64_t>(1, GRAIN / PART), [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) round(x + part * PART, part);
    });
  }

 private:
  void round(const float* x, int64_t part) {
    // The bits of sizes are ordered as the sizes are, and those of a NaN are the largest.
    const auto size_at = [&](int i) {
      return _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), _mm256_set1_epi32(0x7FFFFFFF));
    };
    const __m256i eight = _mm256_max_epi32(
        _mm256_max_epi32(size_at(0), size_at(8)), _mm256_max_epi32(size_at(16), size_at(24)));
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1))));
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    const auto whole_at = [&](int i) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse)); };
    const __m256i mixed = _mm256_packs_epi16(
        _mm256_packs_epi32(whole_at(0), whole_at(8)), _mm256_packs_epi32(whole_at(16), whole_at(24)));
    const __m256i whole = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers.data() + part * PART), whole);
    alignas(32) std::array<int32_t, 8> found;
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), whole);
    _mm256_store_si256(reinterpret_cast<__m256i*>(found.data()), _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    scales[part] = largest / 127.0f;
    for (int half = 0; half < 2; ++half) {
      sums[2 * part + half] = found[4 * half] + found[4 * half + 1] + found[4 * half + 2] + found[4 * half + 3];
    }
  }
};

// Vectors with a number, or four numbers of eight bits, for each of some outputs. Sums of products are exact whole
// numbers. `begun` is where the sum of sixteen products begins, and `total` adds two of them.
#if defined(__AVX512VNNI__)
constexpr int WHOLE_ROWS = 8;
struct Outputs {
  static constexpr int64_t SIZE = 16;
  using Whole = __m512i;
  using Sums = __m512;
  static Whole numbers_at(Bytes place) { return _mm512_loadu_si512(place); }
  static Whole low(Whole bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static Whole high(Whole bytes) { return low(_mm512_srli_epi16(bytes, 4)); }
  static Whole four(int32_t inputs) { return _mm512_set1_epi32(inputs); }
  template <int BITS>
  static Whole begun(int32_t sum) { return _mm512_set1_epi32(BITS == 8 ? -128 * sum : 0); }
  template <int BITS>
  static Whole add(Whole sums, Whole weights, Whole inputs) { return _mm512_dpbusd_epi32(sums, weights, inputs); }
  template <int BITS>
  static Sums total(Whole a, Whole b) { return _mm512_cvtepi32_ps(_mm512_add_epi32(a, b)); }
  static Whole zero() { return _mm512_setzero_si512(); }
  static Sums scales_at(const at::Half* place) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)place)); }
  static Sums scales_at(const float* place) { return _mm512_loadu_ps(place); }
  static Sums all(float number) { return _mm512_set1_ps(number); }
  static Sums times(Sums a, Sums b) { return _mm512_mul_ps(a, b); }
  static Sums add_product(Sums a, Sums b, Sums sums) { return _mm512_fmadd_ps(a, b, sums); }
  static void store(float* place, Sums sums) { _mm512_storeu_ps(place, sums); }
};
#else
constexpr int WHOLE_ROWS = 4;
struct Outputs {
  static constexpr int64_t SIZE = 8;
  using Whole = __m256i;
  using Sums = __m256;
  static Whole numbers_at(Bytes place) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place)); }
  static Whole low(Whole bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static Whole high(Whole bytes) { return low(_mm256_srli_epi16(bytes, 4)); }
  static Whole four(int32_t inputs) { return _mm256_set1_epi32(inputs); }
  template <int BITS>
  static Whole begun(int32_t) { return zero(); }
  // Sixteen bits hold the sum of 32 products with numbers of four bits, but only of two with eight bits, and these only
  // if the first factor has no sign.
  template <int BITS>
  static Whole add(Whole sums, Whole weights, Whole inputs) {
    if constexpr (BITS == 4) return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, inputs));
    const Whole with_sign = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    const Whole pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(with_sign), _mm256_sign_epi8(inputs, with_sign));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  template <int BITS>
  static Sums total(Whole a, Whole b) {
    if constexpr (BITS == 8) return _mm256_cvtepi32_ps(_mm256_add_epi32(a, b));
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1)));
  }
  static Whole zero() { return _mm256_setzero_si256(); }
  static Sums scales_at(const at::Half* place) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)place)); }
  static Sums scales_at(const float* place) { return _mm256_loadu_ps(place); }
  static Sums all(float number) { return _mm256_set1_ps(number); }
  static Sums times(Sums a, Sums b) { return _mm256_mul_ps(a, b); }
  static Sums add_product(Sums a, Sums b, Sums sums) { return _mm256_fmadd_ps(a, b, sums); }
  static void store(float* place, Sums sums) { _mm256_storeu_ps(place, sums); }
};
#endif

inline int32_t four_at(const int8_t* place) {
  int32_t four;
  std::memcpy(&four, place, sizeof(four));
  return four;
}

// The products of whole rows from `first` on with sixteen rows of weights, from output `from` of these on: y [ROWS, SIDE].
template <int ROWS, typename P>
void whole_tile(const WholeRows& x, int64_t first, Bytes w, int64_t from, float* y) {
  using V = Outputs;
  constexpr int BITS = P::BITS;
  const int64_t parts = x.I / PART;
  typename V::Sums sums[ROWS];
  for (auto& of_row : sums) of_row = V::all(0.0f);
  for (int64_t part = 0; part < parts; ++part, w += P::BYTES) {
    for (int64_t line = 0; line < P::BYTES; line += CACHE_LINE) __builtin_prefetch(w + LOOK_AHEAD + line, 0, 3);
    const auto value = [&](int k) {
      return V::scales_at(reinterpret_cast<const typename P::Scale*>(w + k * P::VALUES) + from);
    };
    typename V::Whole products[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const int32_t* const of_halves = x.sums.data() + ((first + r) * parts + part) * 2;
      for (int half = 0; half < 2; ++half) products[r][half] = V::template begun<BITS>(of_halves[half]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Bytes numbers = w + P::NUMBERS + 4 * from;
      const auto bytes = V::numbers_at(numbers + 64 * k);
      const auto low = BITS == 4 ? V::low(bytes) : bytes;
      const auto high = BITS == 4 ? V::high(bytes) : V::numbers_at(numbers + 64 * (k + 4));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const int8_t* const inputs = x.numbers.data() + (first + r) * x.I + part * PART + 4 * k;
        products[r][0] = V::template add<BITS>(products[r][0], low, V::four(four_at(inputs)));
        products[r][1] = V::template add<BITS>(products[r][1], high, V::four(four_at(inputs + 16)));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const int64_t at = (first + r) * parts + part;
      const auto scale = V::all(x.scales[at]);
      const auto add = [&](typename V::Whole a, typename V::Whole b, int k) {
        sums[r] = V::add_product(V::template total<BITS>(a, b), V::times(value(k), scale), sums[r]);
      };
      if constexpr (P::SCALES == 2) {
        for (int k = 0; k < 2; ++k) add(products[r][k], V::zero(), k);
      } else {
        add(products[r][0], products[r][1], 0);
      }
      if constexpr (P::HAS_OFFSET) {
        const float sum = x.scales[at] * static_cast<float>(x.sums[2 * at] + x.sums[2 * at + 1]);
        sums[r] = V::add_product(value(P::SCALES), V::all(sum), sums[r]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) V::store(y + r * SIDE + from, sums[r]);
}

// The functions for 1, 2, ... rows.
template <typename P, size_t... BEFORE>
constexpr auto whole_tiles(std::index_sequence<BEFORE...>) {
  return std::array{whole_tile<BEFORE + 1, P>...};
}

// Compute the products of all rows with sixteen rows of weights, some rows at a time, and hand each row's to
// `take(row, sums)`.
template <typename P, typename Take>
void multiply_side_by_side(const WholeRows& x, Bytes w, const Take& take) {
  static constexpr auto BY_ROWS = whole_tiles<P>(std::make_index_sequence<WHOLE_ROWS>());
  const int64_t size = at::divup(x.n, at::divup(x.n, WHOLE_ROWS));
  float sums[WHOLE_ROWS * SIDE];
  for (int64_t first = 0; first < x.n; first += size) {
    const int64_t count = std::min(size, x.n - first);
    for (int64_t from = 0; from < SIDE; from += Outputs::SIZE) BY_ROWS[count - 1](x, first, w, from, sums);
    for (int64_t r = 0; r < count; ++r) take(first + r, sums + r * SIDE);
  }
}

}  // namespace few_rows
