// Shared by the kernels for a few rows: reading numbers as vectors of float32, and summing such vectors.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

namespace few_rows {

using Floats = at::vec::Vectorized<float>;

// Prefetch distance in bytes: memory bandwidth times its latency.
constexpr int64_t LOOK_AHEAD = 12 * 1024;
constexpr int64_t CACHE_LINE = 64;
// Multiplications from which on another thread is worth waking.
constexpr int64_t GRAIN = 16384;

inline Floats floats_at(const float* place) { return Floats::loadu(place); }

template <typename T>
inline Floats floats_at(const T* place) {
  Floats floats;
  at::vec::load_to_float<T>(place, floats);
  return floats;
}

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

inline __m256 eight(const Floats& floats) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm256_add_ps(_mm512_castps512_ps256(floats), _mm512_extractf32x8_ps(floats, 1));
#else
  return floats;
#endif
}

// Return the sums of four vectors, computed together.
inline __m128 totals(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
  const __m256 e = eight(a), f = eight(b), g = eight(c), h = eight(d);
  const __m256 ef = _mm256_add_ps(_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
  const __m256 gh = _mm256_add_ps(_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ef, gh, 0x44), _mm256_shuffle_ps(ef, gh, 0xEE));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

}  // namespace few_rows
