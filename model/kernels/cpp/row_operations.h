// Small operations of a layer, each in one call: norms, gates, and the rotation of queries and keys by their
// positions.
//
// A row's numbers are computed in float32 and rounded once. Sums run in one order, so no other row changes its bits.
//
// Shapes: rows of D numbers; n positions of H heads.

#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "short_pass.h"

namespace few_rows {

// The kinds of norms, as in model/kernels/norms.py.
enum NormKind : int64_t { WEIGHTED = 0, WEIGHTED_FROM_ONE = 1, CENTERED = 2 };

inline float lanes_total(const Floats& sums) {
  float lanes[Floats::size()];
  sums.store(lanes);
  float total = 0.0f;
  for (const float lane : lanes) total += lane;
  return total;
}

// Norm `size` numbers; `wide` has room for them.
template <typename T>
void norm_row(const T* row, const T* weight, T* normed, float* wide, int64_t size, float epsilon, int64_t kind) {
  constexpr int64_t WIDTH = Floats::size();
  const int64_t whole = size - size % WIDTH;
  for (int64_t i = 0; i < whole; i += WIDTH) floats_at(row + i).store(wide + i);
  for (int64_t i = whole; i < size; ++i) wide[i] = static_cast<float>(row[i]);
  const auto total = [&](const auto& of_vector, const auto& of_number) {
    Floats sums(0.0f);
    for (int64_t i = 0; i < whole; i += WIDTH) sums = of_vector(sums, Floats::loadu(wide + i));
    float sum = lanes_total(sums);
    for (int64_t i = whole; i < size; ++i) sum = of_number(sum, wide[i]);
    return sum;
  };
  if (kind == CENTERED) {
    const float mean = total([](Floats sums, Floats x) { return sums + x; }, [](float sum, float x) { return sum + x; }) / size;
    for (int64_t i = 0; i < size; ++i) wide[i] -= mean;
  }
  const float squares = total(
      [](Floats sums, Floats x) { return fmadd(x, x, sums); },
      [](float sum, float x) { return std::fma(x, x, sum); });
  const float scale = 1.0f / std::sqrt(squares / size + epsilon);
  for (int64_t i = 0; i < size; ++i) {
    const float of_weight = weight ? static_cast<float>(weight[i]) + (kind == WEIGHTED_FROM_ONE ? 1.0f : 0.0f) : 1.0f;
    normed[i] = static_cast<T>(wide[i] * scale * of_weight);
  }
}

// Rows [..., D] and weight [D] of one dtype; returns [..., D].
inline at::Tensor norm(const at::Tensor& rows, const std::optional<at::Tensor>& weight, double epsilon, int64_t kind) {
  const at::Tensor inputs = rows.contiguous(), of_weight = weight ? weight->contiguous() : at::Tensor();
  const int64_t size = inputs.size(-1), n = inputs.numel() / size;
  TORCH_CHECK(
      !weight || (weight->scalar_type() == rows.scalar_type() && weight->numel() == size),
      "norm: got rows ", rows.dtype(), rows.sizes(), " and weight ", weight->dtype(), weight->sizes(),
      "; allowed: rows [..., D] and weight [D] of one dtype");
  at::Tensor outputs = at::empty_like(inputs);
  for_dtype(inputs.scalar_type(), "norm", [&](auto number) {
    using T = decltype(number);
    const T* x = inputs.const_data_ptr<T>();
    const T* w = weight ? of_weight.const_data_ptr<T>() : nullptr;
    T* y = outputs.mutable_data_ptr<T>();
    at::parallel_for(0, n, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
      std::vector<float> wide(size);
      for (int64_t r = begin; r < end; ++r) norm_row(x + r * size, w, y + r * size, wide.data(), size, epsilon, kind);
    });
  });
  return outputs;
}

// silu(gate) times rows, of one shape and dtype.
inline at::Tensor gated(const at::Tensor& gate, const at::Tensor& rows) {
  TORCH_CHECK(
      gate.scalar_type() == rows.scalar_type() && gate.sizes() == rows.sizes(), "gated: got ", gate.dtype(), gate.sizes(),
      " and ", rows.dtype(), rows.sizes(), "; allowed: two of one shape and dtype");
  const at::Tensor gates = gate.contiguous(), inputs = rows.contiguous();
  at::Tensor outputs = at::empty_like(inputs);
  for_dtype(rows.scalar_type(), "gated", [&](auto number) {
    using T = decltype(number);
    const T *g = gates.const_data_ptr<T>(), *x = inputs.const_data_ptr<T>();
    T* y = outputs.mutable_data_ptr<T>();
    at::parallel_for(0, inputs.numel(), GRAIN, [&](int64_t begin, int64_t end) {
      float lanes[Floats::size()];
      T some_gates[Floats::size()] = {}, some_inputs[Floats::size()] = {};
      for (int64_t i = begin; i < end; i += Floats::size()) {
        // The last few numbers too as a vector: a number has the same bits at any place.
        const int64_t count = std::min<int64_t>(Floats::size(), end - i);
        const bool is_whole = count == Floats::size();
        if (!is_whole) {
          std::copy_n(g + i, count, some_gates);
          std::copy_n(x + i, count, some_inputs);
        }
        const Floats gate = floats_at(is_whole ? g + i : some_gates), input = floats_at(is_whole ? x + i : some_inputs);
        (gate / (Floats(1.0f) + gate.neg().exp()) * input).store(lanes);
        for (int64_t k = 0; k < count; ++k) y[i + k] = static_cast<T>(lanes[k]);
      }
    });
  });
  return outputs;
}

// Rotate the heads x [1, H, n, D] by their positions' cosines and sines [1, n, D]: number d of the first half is
// paired with d + D / 2. Returns [1, H, n, D].
inline at::Tensor rotate(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
  const int64_t H = x.size(1), n = x.size(2), D = x.size(3), half = D / 2;
  TORCH_CHECK(
      x.dim() == 4 && x.size(0) == 1 && D % 2 == 0 && x.stride(3) == 1 && cosines.numel() == n * D &&
          sines.numel() == n * D && cosines.scalar_type() == x.scalar_type() && sines.scalar_type() == x.scalar_type(),
      "rotate: got heads ", x.dtype(), x.sizes(), " and cosines ", cosines.dtype(), cosines.sizes(),
      "; allowed: heads [1, H, n, D] and cosines and sines [1, n, D] of one dtype, D even");
  const at::Tensor of_cosines = cosines.contiguous(), of_sines = sines.contiguous();
  at::Tensor outputs = at::empty({1, H, n, D}, x.options());
  for_dtype(x.scalar_type(), "rotate", [&](auto number) {
    using T = decltype(number);
    const T* c = of_cosines.const_data_ptr<T>();
    const T* s = of_sines.const_data_ptr<T>();
    const T* from = x.const_data_ptr<T>();
    T* to = outputs.mutable_data_ptr<T>();
    at::parallel_for(0, H * n, std::max<int64_t>(1, GRAIN / D), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t position = row % n;
        const T* in = from + row / n * x.stride(1) + position * x.stride(2);
        const T *cosine = c + position * D, *sine = s + position * D;
        T* out = to + row * D;
        for (int64_t d = 0; d < half; ++d) {
          const float low = static_cast<float>(in[d]), high = static_cast<float>(in[d + half]);
          out[d] = static_cast<T>(low * static_cast<float>(cosine[d]) - high * static_cast<float>(sine[d]));
          out[d + half] = static_cast<T>(
              high * static_cast<float>(cosine[d + half]) + low * static_cast<float>(sine[d + half]));
        }
      }
    });
  });
  return outputs;
}

}  // namespace few_rows
