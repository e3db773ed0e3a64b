// Operations that torch computes slowly for a few rows: linear layers, the largest logits, and attention
// (short_attention.h).
//
// Linear layers, y = x W^T + b: every weight is read from memory once, whatever the number of rows. The inputs of
// wide layers are processed in blocks and many rows some at a time, so that they stay in the nearest cache. An
// output is one sum over the inputs, in the same order for any number of rows, so that the bits of a row do not
// depend on the rows beside it. bfloat16 is multiplied directly if the processor has units for it, else in float32.
// Weights may lie in blocks of a few bits (quantised_weights.h): they are dequantised as they are multiplied. Repacked,
// they are multiplied as whole numbers (whole_products.h).
//
// Shapes: n rows, I inputs and O outputs of a layer; V numbers in a row of logits, k of them.

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "held_objects.h"
#include "quantised_weights.h"
#include "program.h"
#include "row_operations.h"
#include "short_attention.h"
#include "short_pass.h"
#include "whole_products.h"

namespace {

using namespace few_rows;

// Rows and outputs of a tile: their sums fit into registers, and each number read serves several sums.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int TILE_ROWS = 6, TILE_OUTPUTS = 4;
#else
constexpr int TILE_ROWS = 4, TILE_OUTPUTS = 3;  // of 16 registers instead of 32
#endif

// Most bytes of one row's inputs in a block: eight rows and the weights of a tile then about fill the nearest cache.
constexpr int64_t BLOCK_BYTES = 3072;
// Most bytes of the inputs of several rows that stay there.
constexpr int64_t NEAR_BYTES = 8 * BLOCK_BYTES;
// This many outputs are computed over one block before the next block.
constexpr int64_t BAND = 64;

// With up to this many rows, a pass waits for memory more than for the products.
constexpr int LIGHT_ROWS = 2;

// Weights in a line of the caches.
template <typename T>
constexpr int64_t LINE = CACHE_LINE / sizeof(T);

// Weights to prefetch beside those of a tile: how far they lie ahead, and how far apart those of its neighbouring
// inputs and outputs.
struct Ahead {
  int64_t distance, of_inputs, of_outputs;
};

// Add a block's products to some outputs of some rows: x [ROWS, I] and w [OUTPUTS, I] begin at the block, which has
// `size` inputs; y [ROWS, OUTPUTS] has rows of BAND.
template <int ROWS, int OUTPUTS, typename T>
void tile(const Input<T>* x, const T* w, float* y, int64_t size, int64_t I, const Ahead& ahead) {
  using Numbers = typename Products<T>::Numbers;
  constexpr int64_t WIDTH = sizeof(Numbers) / sizeof(Input<T>);
  Floats sums[ROWS][OUTPUTS];
  for (auto& of_row : sums) std::fill_n(of_row, OUTPUTS, Floats(0.0f));
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    Numbers weights[OUTPUTS];
#pragma GCC unroll 6
    for (int o = 0; o < OUTPUTS; ++o) weights[o] = Products<T>::weights_at(w + o * I + i);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const Numbers inputs = Products<T>::inputs_at(x + r * I + i);
#pragma GCC unroll 6
      for (int o = 0; o < OUTPUTS; ++o) sums[r][o] = Products<T>::add(sums[r][o], inputs, weights[o]);
    }
  };
  // Beside the work of several rows weights come no nearer than the second cache: more lines can be on their way to it
  // than to the first, and passes of 6 rows of SmolLM2 take as long as those of one, not 1.5 times as long (Zen 4, one
  // thread).
  constexpr int NEARNESS = ROWS <= LIGHT_ROWS ? 3 : 2;
  int64_t i = 0;
  for (; i + LINE<T> <= size; i += LINE<T>) {
#pragma GCC unroll 6
    for (int o = 0; o < OUTPUTS; ++o) {
      __builtin_prefetch(w + ahead.distance + ahead.of_inputs * i + ahead.of_outputs * o, 0, NEARNESS);
    }
#pragma GCC unroll 6
    for (int64_t part = 0; part < LINE<T>; part += WIDTH) add(i + part);
  }
  for (; i + WIDTH <= size; i += WIDTH) add(i);
  float found[ROWS][4];
  total(sums, found);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 6
    for (int o = 0; o < OUTPUTS; ++o) {
      float sum = found[r][o];
      for (int64_t rest = i; rest < size; ++rest) {
        sum = std::fma(static_cast<float>(x[r * I + rest]), static_cast<float>(w[o * I + rest]), sum);
      }
      y[r * BAND + o] += sum;
    }
  }
}

template <typename T>
using Tile = void (*)(const Input<T>*, const T*, float*, int64_t, int64_t, const Ahead&);

// Tiles of 1, 2, ... rows.
template <int OUTPUTS, typename T, size_t... BEFORE>
constexpr std::array<Tile<T>, sizeof...(BEFORE)> tiles_by_rows(std::index_sequence<BEFORE...>) {
  return {tile<BEFORE + 1, OUTPUTS, T>...};
}

// The same for all n rows: x [n, I].
template <int OUTPUTS, typename T>
void tiles(int64_t n, const Input<T>* x, const T* w, float* y, int64_t size, int64_t I, const Ahead& ahead) {
  static constexpr auto BY_ROWS = tiles_by_rows<OUTPUTS, T>(std::make_index_sequence<TILE_ROWS>());
  for (int64_t r = 0; r < n; r += TILE_ROWS) {
    BY_ROWS[std::min<int64_t>(TILE_ROWS, n - r) - 1](x + r * I, w, y + r * BAND, size, I, ahead);
  }
}

// A layer's weights [O, I], as numbers, in blocks or repacked, bias [O] or none, and outputs [..., O].
struct Layer {
  at::Tensor weight, bias, outputs;
};

bool is_quantised(const at::Tensor& weight) { return weight.scalar_type() == at::kByte && weight.dim() == 3; }
bool is_packed(const at::Tensor& weight) { return weight.scalar_type() == at::kChar && weight.dim() == 3; }

// How inputs [n, I] are cut into blocks.
template <typename X>
struct Blocks {
  const X* x;
  int64_t n, I;
  // As few blocks as possible, equally wide, in whole cache lines and in whole parts of quantised weights.
  int64_t block = at::divup(at::divup(I, at::divup(I * sizeof(X), BLOCK_BYTES)), PART) * PART;
  // Rows whose inputs of a block stay in the nearest cache, in whole tiles.
  int64_t near = at::divup(NEAR_BYTES / (block * sizeof(X)), TILE_ROWS) * TILE_ROWS;
};

// Add the products of all inputs to the sums [n, BAND] of the outputs first to last.
template <typename T>
void add_numbers(const Blocks<Input<T>>& inputs, const T* w, int64_t first, int64_t last, float* sums) {
  const auto [x, n, I, block, near] = inputs;
  // A whole number of tiles: at other distances lie rows of this tile or the next, which are prefetched anyway.
  const int64_t of_tile = TILE_OUTPUTS * I, distance = at::divup(LOOK_AHEAD, of_tile * sizeof(T)) * of_tile;
  // Memory is fastest in its order: all blocks of a tile's weights before the next tile. With more rows, whose inputs
  // would not stay in the nearest cache, all tiles over one block before the next block.
  const bool by_tile = n <= LIGHT_ROWS;
  const bool is_ordered = by_tile || block >= I;
  const int64_t group = by_tile ? TILE_OUTPUTS : last - first;
  for (int64_t begin = first; begin < last; begin += group) {
    const int64_t end = std::min(begin + group, last);
    for (int64_t i = 0; i < I; i += block) {
      const int64_t width = std::min(block, I - i);
      for (int64_t r = 0; r < n; r += near) {
        const int64_t some = std::min(near, n - r);
        float* of_rows = sums + r * BAND - first;
        const auto add = [&](auto outputs, int64_t o) {
          constexpr int OUTPUTS = decltype(outputs)::value;
          const Ahead ahead = is_ordered ? Ahead{distance + (OUTPUTS - 1) * i, OUTPUTS, LINE<T>} : Ahead{distance, 1, I};
          tiles<OUTPUTS>(some, x + r * I + i, w + o * I + i, of_rows + o, width, I, ahead);
        };
        int64_t o = begin;
        for (; o + TILE_OUTPUTS <= end; o += TILE_OUTPUTS) add(std::integral_constant<int, TILE_OUTPUTS>(), o);
        for (; o < end; ++o) add(std::integral_constant<int, 1>(), o);
      }
    }
  }
}

// The same for weights in blocks.
template <typename T, typename Block>
void add_quantised(const Blocks<Input<T>>& inputs, Bytes w, int64_t first, int64_t last, float* sums) {
  static constexpr auto BY_ROWS = quantised_bands<T, Block>(std::make_index_sequence<QUANTISED_ROWS>());
  const auto [x, n, I, block, near] = inputs;
  const int64_t size = at::divup(n, at::divup(n, QUANTISED_ROWS));
  for (int64_t r = 0; r < n; r += size) {
    const Bytes of_band = w + first * row_bytes<Block>(I);
    BY_ROWS[std::min(size, n - r) - 1](x + r * I, of_band, last - first, sums + r * BAND, BAND, block, I);
  }
}

// Call `compute` with layers that share I inputs and the first and last of some outputs, in parallel; `side` outputs
// stay together.
template <typename Compute>
void for_outputs(const std::vector<Layer>& layers, int64_t side, int64_t I, const Compute& compute) {
  int64_t total = 0;
  for (const Layer& layer : layers) total += layer.weight.size(0) / side;
  at::parallel_for(0, total, std::max<int64_t>(1, GRAIN / (I * side)), [&](int64_t begin, int64_t end) {
    int64_t before = 0;  // outputs of the layers before
    for (const Layer& layer : layers) {
      const int64_t count = layer.weight.size(0) / side;
      const int64_t from = std::clamp<int64_t>(begin - before, 0, count), to = std::clamp<int64_t>(end - before, 0, count);
      if (from < to) compute(layer, from * side, to * side);
      before += count;
    }
  });
}

// Compute the outputs of layers that share their inputs, with rows and outputs of dtype T.
template <typename T, bool IS_QUANTISED>
void multiply(const at::Tensor& rows, const std::vector<Layer>& layers) {
  using X = Input<T>;
  const int64_t I = rows.size(-1), n = rows.numel() / I;
  const at::Tensor inputs = rows.to(c10::CppTypeToScalarType<X>::value).contiguous();
  const Blocks<X> blocks{inputs.const_data_ptr<X>(), n, I};
  for_outputs(layers, 1, I, [&](const Layer& layer, int64_t begin, int64_t end) {
    std::vector<float> found(n * BAND);
    float* const sums = found.data();
    const int64_t O = layer.weight.size(0);
    const T* b = layer.bias.defined() ? layer.bias.const_data_ptr<T>() : nullptr;
    T* y = layer.outputs.mutable_data_ptr<T>();
    for (int64_t first = begin; first < end; first += BAND) {
      const int64_t last = std::min(first + BAND, end);
      std::fill_n(sums, n * BAND, 0.0f);
      if constexpr (IS_QUANTISED) {
        for_blocks(layer.weight.size(2), [&](auto block) {
          const Bytes w = layer.weight.const_data_ptr<uint8_t>();
          add_quantised<T, decltype(block)>(blocks, w, first, last, sums);
        });
      } else {
        add_numbers(blocks, layer.weight.const_data_ptr<T>(), first, last, sums);
      }
      for (int64_t r = 0; r < n; ++r) {
        float* const of_row = sums + r * BAND;
        for (int64_t o = first; b && o < last; ++o) of_row[o - first] += static_cast<float>(b[o]);
        at::vec::convert(of_row, y + r * O + first, last - first);
      }
    }
  });
}

// The same with weights that are multiplied as whole numbers.
template <typename T>
void multiply_whole(const at::Tensor& rows, const std::vector<Layer>& layers) {
  const int64_t I = rows.size(-1), n = rows.numel() / I;
  const at::Tensor inputs = rows.to(at::kFloat).contiguous();
  const WholeRows whole(inputs.const_data_ptr<float>(), n, I);
  for_outputs(layers, SIDE, I, [&](const Layer& layer, int64_t begin, int64_t end) {
    const int64_t O = layer.weight.size(0);
    const T* b = layer.bias.defined() ? layer.bias.const_data_ptr<T>() : nullptr;
    T* y = layer.outputs.mutable_data_ptr<T>();
    for_packed(layer.weight.size(2), [&](auto packed) {
      using P = decltype(packed);
      const auto w = static_cast<Bytes>(layer.weight.const_data_ptr());
      for (int64_t o = begin; o < end; o += SIDE) {
        multiply_side_by_side<P>(whole, w + o * P::row_bytes(I), [&](int64_t r, float* sums) {
          for (int64_t i = 0; b && i < SIDE; ++i) sums[i] += static_cast<float>(b[o + i]);
          at::vec::convert(sums, y + r * O + o, SIDE);
        });
      }
    });
  });
}

// The same for any dtype; weights are all in blocks, all repacked, or all numbers.
void multiply(const at::Tensor& rows, const std::vector<Layer>& layers) {
  for_dtype(rows.scalar_type(), "few_rows", [&](auto number) {
    using T = decltype(number);
    const auto kind = layers.front().weight.scalar_type();
    for (const Layer& layer : layers) {
      TORCH_CHECK(
          layer.weight.scalar_type() == kind, "few_rows: got quantised and other weights; allowed: weights of one kind a call");
    }
    if (kind == at::kChar) return multiply_whole<T>(rows, layers);
    kind == at::kByte ? multiply<T, true>(rows, layers) : multiply<T, false>(rows, layers);
  });
}

// A layer for rows [..., I], weight [O, I] and bias [O] of one dtype, with room for its outputs.
Layer layer_for(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto dtype = rows.scalar_type();
  int64_t I = 0;
  if (is_quantised(weight)) {
    for_blocks(weight.size(2), [&](auto block) { I = weight.size(1) * decltype(block)::SIZE; });
  } else if (is_packed(weight)) {
    I = weight.size(1) * PART;
  } else if (weight.scalar_type() == dtype && weight.dim() == 2) {
    I = weight.size(1);
  }
  TORCH_CHECK(
      I > 0 && (!bias || bias->scalar_type() == dtype) && rows.dim() > 0 && rows.size(-1) == I &&
          (!bias || bias->numel() == weight.size(0)),
      "few_rows: got rows ", rows.dtype(), rows.sizes(), " and weight ", weight.dtype(), weight.sizes(),
      "; allowed: rows [..., I], weight [O, I] and bias [O] of one dtype, or weight in blocks or repacked; I above 0");
  auto sizes = rows.sizes().vec();
  sizes.back() = weight.size(0);
  return {weight.contiguous(), bias ? bias->contiguous() : at::Tensor(), at::empty(sizes, rows.options())};
}

// Returns [..., O], rounded once.
at::Tensor linear(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const Layer layer = layer_for(rows, weight, bias);
  multiply(rows, {layer});
  return layer.outputs;
}

// The same for several layers without bias that share their inputs.
std::vector<at::Tensor> linears(const at::Tensor& rows, at::TensorList weights) {
  std::vector<Layer> layers;
  for (const at::Tensor& weight : weights) layers.push_back(layer_for(rows, weight, std::nullopt));
  multiply(rows, layers);
  std::vector<at::Tensor> outputs;
  for (const Layer& layer : layers) outputs.push_back(layer.outputs);
  return outputs;
}

// Return the numbers [O, I] of weights, which `unpack_row(o, numbers)` writes in float32.
template <typename Unpack>
at::Tensor unpacked(const at::Tensor& weight, int64_t I, at::ScalarType dtype, const Unpack& unpack_row) {
  const int64_t O = weight.size(0);
  const at::Tensor numbers = at::empty({O, I}, weight.options().dtype(dtype));
  for_dtype(dtype, "dequantised", [&](auto number) {
    using T = decltype(number);
    T* to = numbers.mutable_data_ptr<T>();
    at::parallel_for(0, O, std::max<int64_t>(1, GRAIN / I), [&](int64_t begin, int64_t end) {
      std::vector<float> row(I);
      for (int64_t o = begin; o < end; ++o) {
        unpack_row(o, row.data());
        at::vec::convert(row.data(), to + o * I, I);
      }
    });
  });
  return numbers;
}

// The numbers [O, I] of weights in blocks, or repacked.
at::Tensor dequantised(const at::Tensor& weight, at::ScalarType dtype) {
  const at::Tensor all = weight.contiguous();
  const auto from = static_cast<Bytes>(all.const_data_ptr());
  at::Tensor numbers;
  if (is_packed(weight)) {
    const int64_t I = weight.size(1) * PART;
    for_packed(weight.size(2), [&](auto packed) {
      using P = decltype(packed);
      numbers = unpacked(weight, I, dtype, [&](int64_t o, float* row) {
        unpack_packed<P>(from + o / SIDE * SIDE * P::row_bytes(I), o % SIDE, I, row);
      });
    });
    return numbers;
  }
  for_blocks(weight.size(2), [&](auto block) {
    using Block = decltype(block);
    const int64_t I = weight.size(1) * Block::SIZE;
    numbers = unpacked(weight, I, dtype, [&](int64_t o, float* row) {
      unpack<Block>(from + o * row_bytes<Block>(I), I, row);
    });
  });
  return numbers;
}

// Weights [O, blocks, bytes] for products in whole numbers: int8 [O, I / 32, bytes of a part], a multiple of 16 outputs.
at::Tensor packed(const at::Tensor& weight) {
  TORCH_CHECK(
      is_quantised(weight) && weight.size(0) % SIDE == 0, "packed: got ", weight.dtype(), weight.sizes(),
      "; allowed: weights in blocks, with a multiple of ", SIDE, " outputs");
  const at::Tensor blocks = weight.contiguous();
  at::Tensor found;
  for_blocks(weight.size(2), [&](auto block) {
    using Block = decltype(block);
    using P = decltype(packed_as(Block()));
    const int64_t O = weight.size(0), parts = weight.size(1) * Block::SIZE / PART;
    const int64_t stride = weight.size(1) * Block::BYTES;
    found = at::empty({O, parts, P::BYTES / SIDE}, weight.options().dtype(at::kChar));
    const Bytes from = blocks.const_data_ptr<uint8_t>();
    const auto to = reinterpret_cast<uint8_t*>(found.mutable_data_ptr<int8_t>());
    at::parallel_for(0, O / SIDE, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        for (int64_t part = 0; part < parts; ++part) {
          repack<Block>(from + group * SIDE * stride, stride, part, to + (group * parts + part) * P::BYTES);
        }
      }
    });
  });
  return found;
}

// Whether a comes before b among the largest: a NaN counts as the largest, as in torch.
inline bool is_larger(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// The k largest of V numbers in falling order, and their places; of equal numbers the first ones.
template <typename T>
void largest_of(const T* numbers, int64_t V, int64_t k, float* values, int64_t* places) {
  int64_t count = 0;
  const auto consider = [&](int64_t place) {
    const float number = static_cast<float>(numbers[place]);
    if (count == k && !is_larger(number, values[k - 1])) return;
    int64_t rank = count < k ? count++ : k - 1;
    for (; rank > 0 && is_larger(number, values[rank - 1]); --rank) {
      values[rank] = values[rank - 1];
      places[rank] = places[rank - 1];
    }
    values[rank] = number;
    places[rank] = place;
  };
  int64_t i = 0;
  for (; i < k; ++i) consider(i);
  for (; i + Floats::size() <= V; i += Floats::size()) {
    // Few numbers are larger than the k-th so far. A comparison with a NaN is false.
    const int others = (floats_at(numbers + i) <= Floats(values[k - 1])).zero_mask();
    for (int lanes = others; lanes; lanes &= lanes - 1) consider(i + __builtin_ctz(lanes));
  }
  for (; i < V; ++i) consider(i);
}

// The k largest logits of every row [n, V], falling, float32 [n, k], and their columns, int64 [n, k].
std::tuple<at::Tensor, at::Tensor> largest(const at::Tensor& logits, int64_t k) {
  TORCH_CHECK(
      logits.dim() == 2 && 0 < k && k <= logits.size(1),
      "largest: got ", k, " of ", logits.sizes(), "; allowed: 1 to V of [n, V]");
  const at::Tensor rows = logits.contiguous();
  const int64_t n = rows.size(0), V = rows.size(1);
  at::Tensor values = at::empty({n, k}, rows.options().dtype(at::kFloat));
  at::Tensor places = at::empty({n, k}, rows.options().dtype(at::kLong));
  float* found = values.mutable_data_ptr<float>();
  int64_t* where = places.mutable_data_ptr<int64_t>();
  for_dtype(rows.scalar_type(), "largest", [&](auto number) {
    const auto* numbers = rows.const_data_ptr<decltype(number)>();
    at::parallel_for(0, n, std::max<int64_t>(1, GRAIN / V), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        largest_of(numbers + row * V, V, k, found + row * k, where + row * k);
      }
    });
  });
  return {values, places};
}

inline uint64_t mixed(uint64_t number) {
  number *= 0x9E3779B97F4A7C15;
  return number ^ number >> 32;
}

// A number that tells the bytes of some memory from others: of blocks of a fixed size, so that it does not depend on
// threads. Each step can be undone, so that no single change goes unseen.
int64_t checksum(const at::Tensor& bytes) {
  constexpr int64_t LANES = 64, BLOCK = 1 << 18, FACTOR = 0x9E3779B1;
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.is_contiguous(), "checksum: got ", bytes.toString());
  const int64_t size = bytes.numel(), count = (size + BLOCK - 1) / BLOCK;
  const uint8_t* all = bytes.const_data_ptr<uint8_t>();
  std::vector<uint64_t> sums(count);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const uint8_t* data = all + block * BLOCK;
      const int64_t length = std::min(BLOCK, size - block * BLOCK), step = LANES * sizeof(uint32_t);
      std::array<uint32_t, LANES> lanes;
      lanes.fill(1);
      const auto add = [&](const uint8_t* from, int64_t number) {
        std::array<uint32_t, LANES> words{};
        std::memcpy(words.data(), from, number);
        for (int64_t i = 0; i < LANES; ++i) {
          lanes[i] = (lanes[i] ^ words[i]) * static_cast<uint32_t>(FACTOR);
          lanes[i] ^= lanes[i] >> 15;  // else the highest bits would stay there, and cancel each other
        }
      };
      int64_t at = 0;
      for (; at + step <= length; at += step) add(data + at, step);
      add(data + at, length - at);
      uint64_t sum = length;
      for (const uint32_t lane : lanes) sum = mixed(sum ^ lane);
      sums[block] = sum;
    }
  });
  uint64_t sum = size;
  for (const uint64_t one : sums) sum = mixed(sum ^ one);
  return static_cast<int64_t>(sum);
}

// Marks for the two places of a layer where a program hands over to Python: the cache, and the attention.
std::tuple<at::Tensor, at::Tensor> captured_update(const at::Tensor& keys, const at::Tensor& values) {
  return {keys.clone(), values.clone()};
}

at::Tensor captured_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor& value) {
  return at::zeros({query.size(0), query.size(2), query.size(1), value.size(3)}, query.options());
}

}  // namespace

TORCH_LIBRARY(token_recycling, library) {
  const auto on_cpu = [](auto* function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  library.def("few_rows(Tensor rows, Tensor weight, Tensor? bias) -> Tensor", on_cpu(linear));
  // Any layout is fine: without this tag torch.compile copies the cache to change its layout.
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool is_causal=False) -> Tensor",
      on_cpu(few_rows::attend), {at::Tag::flexible_layout});
  library.def("few_rows_of_layers(Tensor rows, Tensor[] weights) -> Tensor[]", on_cpu(linears));
  library.def("dequantised(Tensor weight, ScalarType dtype) -> Tensor", on_cpu(dequantised));
  library.def("packed(Tensor weight) -> Tensor", on_cpu(packed));
  library.def("norm(Tensor rows, Tensor? weight, float epsilon, int kind) -> Tensor", on_cpu(few_rows::norm));
  library.def("rotate(Tensor heads, Tensor cosines, Tensor sines) -> Tensor", on_cpu(few_rows::rotate));
  library.def(
      "attend_with_cache(Tensor query, Tensor keys, Tensor values, Tensor(a!) key_buffer, Tensor(b!) value_buffer, "
      "Tensor mask, float scale, int length) -> Tensor",
      on_cpu(few_rows::attend_with_cache));
  library.def(
      "append_texts(Tensor keys, Tensor values, Tensor(a!)[] key_buffers, Tensor(b!)[] value_buffers, int[] sizes, "
      "int[] lengths) -> ()",
      on_cpu(few_rows::append_texts));
  library.def(
      "attend_texts(Tensor query, Tensor[] keys, Tensor[] values, Tensor? mask, float scale, int[] sizes, int[] ends, "
      "bool is_masked) -> Tensor",
      on_cpu(few_rows::attend_texts));
  library.def("checksum(Tensor bytes) -> int", on_cpu(checksum));
  library.def("gated(Tensor gate, Tensor rows) -> Tensor", on_cpu(few_rows::gated));
  library.def("captured_update(Tensor keys, Tensor values) -> (Tensor, Tensor)", on_cpu(captured_update));
  library.def("captured_attention(Tensor query, Tensor key, Tensor value) -> Tensor", on_cpu(captured_attention));
  library.class_<few_rows::Program>("Program")
      .def(torch::init<>())
      .def("operation", &few_rows::Program::operation)
      .def("constant", &few_rows::Program::constant)
      .def("value", &few_rows::Program::value)
      .def("rows", &few_rows::Program::rows)
      .def("length", &few_rows::Program::length)
      .def("list", &few_rows::Program::list)
      .def("result", &few_rows::Program::result)
      .def("run", &few_rows::Program::run);
  library.def("largest(Tensor logits, int k) -> (Tensor, Tensor)", on_cpu(largest));
}
