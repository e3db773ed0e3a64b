// Shared by the kernels for a few rows: reading numbers as vectors of float32, and summing such vectors.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#if !defined(__x86_64__)
#include "portable.h"
#endif

namespace few_rows {

#if defined(__x86_64__)
using Floats = at::vec::Vectorized<float>;
#endif

// Prefetch distance in bytes: memory bandwidth times its latency.
constexpr int64_t LOOK_AHEAD = 6 * 1024;
constexpr int64_t CACHE_LINE = 64;
// Multiplications from which on another thread is worth waking.
constexpr int64_t GRAIN = 16384;

inline Floats floats_at(const float* place) { return Floats::loadu(place); }

template <typename T>
inline Floats floats_at(const T* place) {
  Floats floats;
  load_to_float<T>(place, floats);
  return floats;
}

// How inputs and weights are multiplied: in float32. Inputs are converted once, weights when they are read.
template <typename T>
struct Products {
  using Input = float;
  using Numbers = Floats;
  static Numbers inputs_at(const Input* place) { return Floats::loadu(place); }
  static Numbers weights_at(const T* place) { return floats_at(place); }
  static Floats add(const Floats& sums, const Numbers& inputs, const Numbers& weights) {
    return fmadd(inputs, weights, sums);
  }
};

#if defined(__AVX512BF16__)
// With bfloat16 units: two neighbouring products for each sum at once.
template <>
struct Products<at::BFloat16> {
  using Input = at::BFloat16;
  using Numbers = __m512bh;
  static Numbers inputs_at(const Input* place) { return (__m512bh)_mm512_loadu_si512(place); }
  static Numbers weights_at(const Input* place) { return inputs_at(place); }
  static Floats add(const Floats& sums, const Numbers& inputs, const Numbers& weights) {
    return _mm512_dpbf16_ps(sums, inputs, weights);
  }
};
#endif

template <typename T>
using Input = typename Products<T>::Input;

// Call `function` with a number of this dtype; refuse other dtypes, naming `operation`.
template <typename Function>
void for_dtype(at::ScalarType dtype, const char* operation, const Function& function) {
  if (dtype == at::kFloat) {
    function(float());
  } else if (dtype == at::kBFloat16) {
    function(at::BFloat16());
  } else if (dtype == at::kHalf) {
    function(at::Half());
  } else {
    TORCH_CHECK(false, operation, ": got ", dtype, "; allowed: float32, bfloat16, float16");
  }
}

#if defined(CPU_CAPABILITY_AVX512)
// Four sums in each of the four lanes: of the same lane of four vectors.
inline __m512 lane_totals(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
}

// The sums of the lower and the upper lanes of two vectors, two lanes each.
inline __m512 half_totals(const __m512& a, const __m512& b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}

// Return the sums of four vectors, computed together.
inline __m128 totals(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
  const __m512 lanes = lane_totals(a, b, c, d);
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}
#else
// Return the sums of four vectors, computed together.
inline __m128 totals(const __m256& a, const __m256& b, const __m256& c, const __m256& d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
#endif

// The sums of the vectors of some rows and outputs; with one order for any number of rows.
template <int ROWS, int OUTPUTS>
inline void total(const Floats (&sums)[ROWS][OUTPUTS], float (&found)[ROWS][4]) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (ROWS >= 4) {
    const auto lanes = [&](int r) {
      return lane_totals(sums[r][0], sums[r][1 % OUTPUTS], sums[r][2 % OUTPUTS], sums[r][3 % OUTPUTS]);
    };
    const __m512 first = half_totals(lanes(0), lanes(1)), second = half_totals(lanes(2), lanes(3));
    const __m512 even = _mm512_shuffle_f32x4(first, second, 0x88), odd = _mm512_shuffle_f32x4(first, second, 0xDD);
    _mm512_storeu_ps(found[0], _mm512_add_ps(even, odd));
  }
  constexpr int FIRST = ROWS >= 4 ? 4 : 0;
#else
  constexpr int FIRST = 0;
#endif
#pragma GCC unroll 6
  for (int r = FIRST; r < ROWS; ++r) {
    _mm_storeu_ps(found[r], totals(sums[r][0], sums[r][1 % OUTPUTS], sums[r][2 % OUTPUTS], sums[r][3 % OUTPUTS]));
  }
}

}  // namespace few_rows
