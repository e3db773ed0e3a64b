// The 256-bit vectors of the kernels on processors other than x86: the same instructions by SIMDe (simde-everywhere
// on GitHub, Debian's libsimde-dev), which are ARM's own where it has them.

#pragma once

#if !__has_include(<simde/x86/avx2.h>)
#error "SIMDe is not here, which the kernels need on this processor: install libsimde-dev"
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <algorithm>
#include <cmath>

#include <c10/util/Half.h>

inline float _cvtsh_ss(uint16_t bits) { return c10::detail::fp16_ieee_to_fp32_value(bits); }

namespace few_rows {

// What at::vec::Vectorized<float> has on x86 with AVX2, as far as the kernels use it.
class Floats {
 public:
  Floats() = default;
  Floats(float number) : numbers_(_mm256_set1_ps(number)) {}
  Floats(__m256 numbers) : numbers_(numbers) {}
  operator __m256() const { return numbers_; }
  static constexpr int size() { return 8; }

  static Floats loadu(const float* place) { return Floats(_mm256_loadu_ps(place)); }
  void store(float* place) const { _mm256_storeu_ps(place, numbers_); }

  Floats neg() const { return Floats(0.0f) - *this; }
  Floats exp() const {
    float numbers[size()];
    store(numbers);
    for (float& number : numbers) number = std::exp(number);
    return loadu(numbers);
  }
  Floats exp_u20() const { return exp(); }
  // Of a comparison's result: a bit for each number that did not hold.
  int zero_mask() const { return ~_mm256_movemask_ps(numbers_) & 0xFF; }

  friend Floats operator+(const Floats& a, const Floats& b) { return Floats(_mm256_add_ps(a, b)); }
  friend Floats operator-(const Floats& a, const Floats& b) { return Floats(_mm256_sub_ps(a, b)); }
  friend Floats operator*(const Floats& a, const Floats& b) { return Floats(_mm256_mul_ps(a, b)); }
  friend Floats operator/(const Floats& a, const Floats& b) { return Floats(_mm256_div_ps(a, b)); }
  friend Floats operator<=(const Floats& a, const Floats& b) { return Floats(_mm256_cmp_ps(a, b, _CMP_LE_OQ)); }
  friend Floats fmadd(const Floats& a, const Floats& b, const Floats& c) { return Floats(_mm256_fmadd_ps(a, b, c)); }
  friend Floats maximum(const Floats& a, const Floats& b) { return Floats(_mm256_max_ps(a, b)); }

 private:
  __m256 numbers_;
};

template <typename T>
void load_to_float(const T* place, Floats& floats) {
  float numbers[Floats::size()];
  std::copy_n(place, Floats::size(), numbers);
  floats = Floats::loadu(numbers);
}

}  // namespace few_rows
