// Linear layers of a few rows, y = x W^T + b: every weight is read once for up to eight rows.
//
// An output is one sum over the inputs, in the same order whatever the number of rows, so that the results of a
// row do not depend on the rows beside it, to the last bit.
//
// Shapes: n rows, I inputs and O outputs of a layer.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace {

using Floats = at::vec::Vectorized<float>;

// Rows whose sums fit into registers.
constexpr int64_t MOST_ROWS = 8;
// Outputs whose weights are still in the nearest cache when the next eight rows need them.
constexpr int64_t BLOCK = 16;
// Bytes ahead that weights are asked for. The processor's own look-ahead does not keep up with sums of several rows.
constexpr int64_t AHEAD = 4096;
// Weights for which a thread is worth waking.
constexpr int64_t GRAIN = 16384;

inline Floats floats_at(const float* place) { return Floats::loadu(place); }

template <typename T>
inline Floats floats_at(const T* place) {
  Floats floats;
  at::vec::load_to_float<T>(place, floats);
  return floats;
}

// Outputs `begin` to `end` of ROWS rows: x [ROWS, I], w [O, I], bias [O] or null, y [ROWS, O].
template <int ROWS, typename T>
void dot_products(
    const float* x, const T* w, const T* bias, T* y, int64_t I, int64_t O, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    const T* weights = w + o * I;
    Floats sums[ROWS];
    std::fill_n(sums, ROWS, Floats(0.0f));
    int64_t i = 0;
    for (; i + Floats::size() <= I; i += Floats::size()) {
      __builtin_prefetch(reinterpret_cast<const char*>(weights + i) + AHEAD);
      const Floats weight = floats_at(weights + i);
      for (int r = 0; r < ROWS; ++r) sums[r] = at::vec::fmadd(floats_at(x + r * I + i), weight, sums[r]);
    }
    for (int r = 0; r < ROWS; ++r) {
      float sum = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sums[r]);
      for (int64_t rest = i; rest < I; ++rest) {
        sum = std::fma(x[r * I + rest], static_cast<float>(weights[rest]), sum);
      }
      y[r * O + o] = static_cast<T>(bias ? sum + static_cast<float>(bias[o]) : sum);
    }
  }
}

template <typename T>
void multiply(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& outputs) {
  using DotProducts = void (*)(const float*, const T*, const T*, T*, int64_t, int64_t, int64_t, int64_t);
  static constexpr DotProducts BY_ROWS[MOST_ROWS] = {
      dot_products<1, T>, dot_products<2, T>, dot_products<3, T>, dot_products<4, T>,
      dot_products<5, T>, dot_products<6, T>, dot_products<7, T>, dot_products<8, T>};
  const int64_t O = weight.size(0), I = weight.size(1), n = rows.numel() / I;
  const float* x = rows.const_data_ptr<float>();
  const T* w = weight.const_data_ptr<T>();
  const T* b = bias.defined() ? bias.const_data_ptr<T>() : nullptr;
  T* y = outputs.mutable_data_ptr<T>();
  at::parallel_for(0, O, std::max<int64_t>(1, GRAIN / I), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += BLOCK) {
      const int64_t last = std::min(first + BLOCK, end);
      for (int64_t r = 0; r < n; r += MOST_ROWS) {
        BY_ROWS[std::min(MOST_ROWS, n - r) - 1](x + r * I, w, b, y + r * O, I, O, first, last);
      }
    }
  });
}

// Rows [..., I], weight [O, I] and bias [O] of one dtype; returns [..., O], rounded once.
at::Tensor linear(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto dtype = weight.scalar_type();
  TORCH_CHECK(
      rows.scalar_type() == dtype && (!bias || bias->scalar_type() == dtype) && weight.dim() == 2 &&
          rows.dim() > 0 && rows.size(-1) == weight.size(1) && (!bias || bias->numel() == weight.size(0)),
      "few_rows: got rows ", rows.dtype(), rows.sizes(), " and weight ", weight.dtype(), weight.sizes(),
      "; allowed: rows [..., I], weight [O, I] and bias [O] of one dtype");
  auto sizes = rows.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor outputs = at::empty(sizes, weight.options());
  const at::Tensor x = rows.to(at::kFloat).contiguous(), w = weight.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  if (dtype == at::kFloat) {
    multiply<float>(x, w, b, outputs);
  } else if (dtype == at::kBFloat16) {
    multiply<at::BFloat16>(x, w, b, outputs);
  } else if (dtype == at::kHalf) {
    multiply<at::Half>(x, w, b, outputs);
  } else {
    TORCH_CHECK(false, "few_rows: got ", weight.dtype(), "; allowed: float32, bfloat16, float16");
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY(token_recycling, library) {
  library.def("few_rows(Tensor rows, Tensor weight, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(token_recycling, CPU, library) { library.impl("few_rows", linear); }
