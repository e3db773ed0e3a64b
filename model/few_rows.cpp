// Linear layers of a few rows, y = x W^T + b: every weight is read from memory once, whatever the rows.
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

// Rows and outputs whose sums fit into registers together: a number that is read serves several sums.
constexpr int TILE_ROWS = 4;
constexpr int TILE_OUTPUTS = 3;
// Weights for which a thread is worth waking.
constexpr int64_t GRAIN = 16384;

inline Floats floats_at(const float* place) { return Floats::loadu(place); }

template <typename T>
inline Floats floats_at(const T* place) {
  Floats floats;
  at::vec::load_to_float<T>(place, floats);
  return floats;
}

// Some outputs of some rows: x [ROWS, I], w [OUTPUTS, I], bias [OUTPUTS] or null, y [ROWS, OUTPUTS] in rows of O.
template <int ROWS, int OUTPUTS, typename T>
void tile(const float* x, const T* w, const T* bias, T* y, int64_t I, int64_t O) {
  Floats sums[ROWS][OUTPUTS];
  for (auto& of_row : sums) std::fill_n(of_row, OUTPUTS, Floats(0.0f));
  int64_t i = 0;
  for (; i + Floats::size() <= I; i += Floats::size()) {
    Floats weights[OUTPUTS];
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; ++o) {
      const T* place = w + o * I + i;
      // The next tile's: the processor's own look-ahead does not keep up with several rows of weights.
      __builtin_prefetch(place + OUTPUTS * I, 0, 2);
      weights[o] = floats_at(place);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Floats inputs = floats_at(x + r * I + i);
#pragma GCC unroll 4
      for (int o = 0; o < OUTPUTS; ++o) sums[r][o] = at::vec::fmadd(inputs, weights[o], sums[r][o]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; ++o) {
      float sum = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sums[r][o]);
      for (int64_t rest = i; rest < I; ++rest) {
        sum = std::fma(x[r * I + rest], static_cast<float>(w[o * I + rest]), sum);
      }
      y[r * O + o] = static_cast<T>(bias ? sum + static_cast<float>(bias[o]) : sum);
    }
  }
}

// The same for all n rows: x [n, I].
template <int OUTPUTS, typename T>
void tiles(int64_t n, const float* x, const T* w, const T* bias, T* y, int64_t I, int64_t O) {
  using Tile = void (*)(const float*, const T*, const T*, T*, int64_t, int64_t);
  static constexpr Tile BY_ROWS[TILE_ROWS] = {
      tile<1, OUTPUTS, T>, tile<2, OUTPUTS, T>, tile<3, OUTPUTS, T>, tile<4, OUTPUTS, T>};
  for (int64_t r = 0; r < n; r += TILE_ROWS) {
    BY_ROWS[std::min<int64_t>(TILE_ROWS, n - r) - 1](x + r * I, w, bias, y + r * O, I, O);
  }
}

template <typename T>
void multiply(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& outputs) {
  const int64_t O = weight.size(0), I = weight.size(1), n = rows.numel() / I;
  const float* x = rows.const_data_ptr<float>();
  const T* w = weight.const_data_ptr<T>();
  const T* b = bias.defined() ? bias.const_data_ptr<T>() : nullptr;
  T* y = outputs.mutable_data_ptr<T>();
  at::parallel_for(0, O, std::max<int64_t>(1, GRAIN / I), [&](int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + TILE_OUTPUTS <= end; o += TILE_OUTPUTS) {
      tiles<TILE_OUTPUTS>(n, x, w + o * I, b ? b + o : b, y + o, I, O);
    }
    for (; o < end; ++o) tiles<1>(n, x, w + o * I, b ? b + o : b, y + o, I, O);
  });
}

// Rows [..., I], weight [O, I] and bias [O] of one dtype; returns [..., O], rounded once.
at::Tensor linear(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto dtype = weight.scalar_type();
  TORCH_CHECK(
      rows.scalar_type() == dtype && (!bias || bias->scalar_type() == dtype) && weight.dim() == 2 &&
          rows.dim() > 0 && rows.size(-1) == weight.size(1) && weight.size(1) > 0 && (!bias || bias->numel() == weight.size(0)),
      "few_rows: got rows ", rows.dtype(), rows.sizes(), " and weight ", weight.dtype(), weight.sizes(),
      "; allowed: rows [..., I], weight [O, I] and bias [O] of one dtype, I above 0");
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
