// Attention of a few queries to all keys, or causal attention of a prompt, in three steps: the scores of a row's
// keys, their softmax, the weighted sum of the values. Keys and values are read from memory once for all query
// heads that share them. Every sum over keys runs in key order, one by one, so neither other queries nor unseen
// keys change a bit of a query's result: a branch of a draft tree has the same bits as the same text without the
// tree.
//
// Shapes: n queries in each of H heads, T keys and values in each of K heads that H / K heads of queries share;
// D numbers in a key, E in a value. R rows are the queries of the heads that share, one head after the other.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "short_pass.h"

namespace few_rows {

// Rows, keys, and vectors of a value whose sums together fit into registers.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int MOST_ROWS = 4;
#else
constexpr int MOST_ROWS = 3;  // of 16 registers instead of 32
#endif
constexpr int SCORED_KEYS = 4;
constexpr int VALUE_PARTS = 4;
constexpr int VALUE_PARTS_OF_ONE = 8;  // of a single row
// All rows use one block of keys, or of values, before the next: the block stays in the nearest cache.
constexpr int64_t BLOCK_KEYS = 16;
constexpr int64_t BLOCK_VALUES = 32;
// Rows whose scores are in memory at once, in each thread.
constexpr int64_t TASK_ROWS = 64;
constexpr int64_t WIDTH = Floats::size();
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

inline int64_t whole_vectors(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

// Some rows of a matrix in memory.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
  T* row(int64_t index) const { return data + index * stride; }
  Matrix from(int64_t index) const { return {row(index), stride}; }
};

// Compute scores of SCORED_KEYS keys for some queries of `size` numbers each.
template <int ROWS>
inline void score(const float* queries, Matrix<const float> keys, float* scores, int64_t size, int64_t score_size) {
  Floats sums[ROWS][SCORED_KEYS];
  for (auto& of_row : sums) std::fill_n(of_row, SCORED_KEYS, Floats(0.0f));
  for (int64_t d = 0; d < size; d += WIDTH) {
    Floats of_keys[SCORED_KEYS];
#pragma GCC unroll 4
    for (int t = 0; t < SCORED_KEYS; ++t) of_keys[t] = Floats::loadu(keys.data + d + t * keys.stride);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Floats query = Floats::loadu(queries + d + r * size);
#pragma GCC unroll 4
      for (int t = 0; t < SCORED_KEYS; ++t) sums[r][t] = fmadd(query, of_keys[t], sums[r][t]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    _mm_storeu_ps(scores + r * score_size, totals(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
  }
}

// Add `count` weighted values, PARTS vectors of each, to the sums of some rows; with the FIRST parts also sum the
// weights.
template <int ROWS, int PARTS, bool FIRST>
inline void add(
    Matrix<float> weights, Matrix<const float> values, Matrix<float> outputs, float* weight_totals, int64_t count) {
  float of_weights[ROWS];
  std::copy_n(weight_totals, ROWS, of_weights);
  Floats sums[ROWS][PARTS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) sums[r][part] = Floats::loadu(outputs.row(r) + part * WIDTH);
  }
  for (int64_t t = 0; t < count; ++t) {
    Floats value[PARTS];
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) value[part] = Floats::loadu(values.row(t) + part * WIDTH);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Floats weight(weights.row(r)[t]);
      if (FIRST) of_weights[r] += weights.row(r)[t];
#pragma GCC unroll 8
      for (int part = 0; part < PARTS; ++part) sums[r][part] = fmadd(weight, value[part], sums[r][part]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) sums[r][part].store(outputs.row(r) + part * WIDTH);
  }
  if (FIRST) std::copy_n(of_weights, ROWS, weight_totals);
}

// The same for all parts of values with `size` numbers each.
template <int ROWS>
void add_all(
    Matrix<float> weights, Matrix<const float> values, Matrix<float> outputs, float* weight_totals, int64_t count,
    int64_t size) {
  int64_t d = 0;
  const auto add_parts = [&]<int PARTS>() {
    for (; d + PARTS * WIDTH <= size; d += PARTS * WIDTH) {
      (d ? add<ROWS, PARTS, false> : add<ROWS, PARTS, true>)(
          weights, {values.data + d, values.stride}, {outputs.data + d, outputs.stride}, weight_totals, count);
    }
  };
  if constexpr (ROWS == 1) add_parts.template operator()<VALUE_PARTS_OF_ONE>();
  add_parts.template operator()<VALUE_PARTS>();
  add_parts.template operator()<1>();
}

// Prefetch LOOK_AHEAD bytes after `count` rows of `size` numbers. Always inline: GCC sees no effect and would drop
// the calls.
template <typename T>
__attribute__((always_inline)) inline void ask_ahead(Matrix<const T> rows, int64_t count, int64_t size) {
  for (int64_t r = 0; r < count; ++r) {
    const char* ahead = reinterpret_cast<const char*>(rows.row(r)) + LOOK_AHEAD;
    for (int64_t byte = 0; byte < size * static_cast<int64_t>(sizeof(T)); byte += CACHE_LINE) {
      __builtin_prefetch(ahead + byte, 0, 2);
    }
  }
}

// Return `count` rows of `size` numbers as float32 in whole vectors: the rows themselves if they already are that
// and there are `whole` of them, so that nothing is read past the end; else a copy in `space`, whose padding stays
// as it is.
template <typename T>
Matrix<const float> as_floats(Matrix<const T> rows, int64_t count, int64_t size, float* space, int64_t whole) {
  const int64_t padded = whole_vectors(size);
  if constexpr (std::is_same_v<T, float>) {
    if (size == padded && count == whole) return rows;
  }
  for (int64_t r = 0; r < count; ++r) {
    const T* row = rows.row(r);
    int64_t d = 0;
    for (; d + WIDTH <= size; d += WIDTH) floats_at(row + d).store(space + r * padded + d);
    for (; d < size; ++d) space[r * padded + d] = static_cast<float>(row[d]);
  }
  return {space, padded};
}

// Turn a row's scores of T keys into weights of the values, not yet normalised. `mask` may be null.
inline void soften(float* scores, const float* mask, int64_t T) {
  const int64_t padded = whole_vectors(T);
  std::fill(scores + T, scores + padded, LOWEST);
  Floats largest(LOWEST);
  int64_t t = 0;
  if (mask) {
    for (; t + WIDTH <= T; t += WIDTH) {
      const Floats masked = Floats::loadu(scores + t) + Floats::loadu(mask + t);
      masked.store(scores + t);
      largest = maximum(largest, masked);
    }
    for (int64_t rest = t; rest < T; ++rest) scores[rest] += mask[rest];
  }
  for (; t < padded; t += WIDTH) largest = maximum(largest, Floats::loadu(scores + t));
  float lanes[WIDTH];
  largest.store(lanes);
  const float top = *std::max_element(lanes, lanes + WIDTH);
  const Floats shift(top == LOWEST ? 0.0f : top);  // a row that sees nothing
  for (t = 0; t < padded; t += WIDTH) (Floats::loadu(scores + t) - shift).exp_u20().store(scores + t);
}

// Shared by the query heads with the same keys [T, D] and values [T, E].
template <typename Number>
struct Shared {
  Matrix<const Number> keys, values;
  Matrix<const float> mask;  // [n, T], or null
  float scale;
  bool is_causal;
  int64_t n, T, D, E;

  // A row sees this many first keys, apart from the mask.
  int64_t num_seen(int64_t row) const { return is_causal ? T - n + row % n + 1 : T; }
};

// Attend with R rows from row `first` of the sharing heads on. `query` and `output` return the place of a row's
// numbers.
template <typename Number, typename Query, typename Output>
void attend_rows(const Shared<Number>& shared, int64_t first, int64_t R, const Query& query, const Output& output) {
  const int64_t key_size = whole_vectors(shared.D), value_size = whole_vectors(shared.E);
  // With a causal mask, later rows of a head see more keys.
  const bool is_rising = shared.is_causal && first / shared.n == (first + R - 1) / shared.n;
  const int64_t T = is_rising ? shared.num_seen(first + R - 1) : shared.T;
  // The first row that sees a key, rounded down to the rows computed together.
  const auto row_seeing = [&](int64_t key) -> int64_t {
    return is_rising ? std::max<int64_t>(0, key + 1 - shared.num_seen(first)) / MOST_ROWS * MOST_ROWS : 0;
  };
  // Padded, since rows a power of two apart would compete for a few places of the cache.
  const int64_t score_size = whole_vectors(T) + SCORED_KEYS;
  thread_local std::vector<float> small, large;
  small.assign(R * (key_size + value_size + 1) + std::max(BLOCK_KEYS * key_size, BLOCK_VALUES * value_size), 0.0f);
  large.resize(std::max<int64_t>(large.size(), R * score_size));
  const Matrix<float> queries{small.data(), key_size}, sums{queries.row(R), value_size}, scores{large.data(), score_size};
  float* const weight_totals = sums.row(R);
  float* const space = weight_totals + R;
  for (int64_t r = 0; r < R; ++r) {
    const Number* numbers = query(first + r);
    for (int64_t d = 0; d < shared.D; ++d) queries.row(r)[d] = static_cast<float>(numbers[d]) * shared.scale;
  }
  for (int64_t begin = 0; begin < T; begin += BLOCK_KEYS) {
    const int64_t count = std::min(BLOCK_KEYS, T - begin);
    ask_ahead(shared.keys.from(begin), count, shared.D);
    const Matrix<const float> block = as_floats(shared.keys.from(begin), count, shared.D, space, BLOCK_KEYS);
    for (int64_t t = 0; t < count; t += SCORED_KEYS) {
      const Matrix<const float> keys = block.from(t);
      float* const found = scores.data + begin + t;
      int64_t r = row_seeing(begin + t);
      for (; r + MOST_ROWS <= R; r += MOST_ROWS) {
        score<MOST_ROWS>(queries.data + r * key_size, keys, found + r * score_size, key_size, score_size);
      }
      for (; r < R; ++r) score<1>(queries.data + r * key_size, keys, found + r * score_size, key_size, score_size);
    }
  }
  for (int64_t r = 0; r < R; ++r) {
    const float* mask = shared.mask.data ? shared.mask.row((first + r) % shared.n) : nullptr;
    const int64_t seen = shared.num_seen(first + r);
    soften(scores.row(r), mask, seen);
    // Rows computed together add the values of whole blocks; a value that a row does not see has weight 0.
    const int64_t end = is_rising ? std::min(T, seen + MOST_ROWS + BLOCK_VALUES) : T;
    std::fill(scores.row(r) + seen, scores.row(r) + end, 0.0f);
  }
  for (int64_t begin = 0; begin < T; begin += BLOCK_VALUES) {
    const int64_t count = std::min(BLOCK_VALUES, T - begin);
    ask_ahead(shared.values.from(begin), count, shared.E);
    const Matrix<const float> block = as_floats(shared.values.from(begin), count, shared.E, space, count);
    const Matrix<float> weights{scores.data + begin, score_size};
    int64_t r = row_seeing(begin);
    for (; r + MOST_ROWS <= R; r += MOST_ROWS) {
      add_all<MOST_ROWS>(weights.from(r), block, sums.from(r), weight_totals + r, count, value_size);
    }
    for (; r < R; ++r) add_all<1>(weights.from(r), block, sums.from(r), weight_totals + r, count, value_size);
  }
  for (int64_t r = 0; r < R; ++r) {
    const float factor = weight_totals[r] > 0.0f ? 1.0f / weight_totals[r] : 0.0f;
    Number* numbers = output(first + r);
    for (int64_t d = 0; d < shared.E; ++d) numbers[d] = static_cast<Number>(sums.row(r)[d] * factor);
  }
}

// The matrix of one head of a tensor [1, heads, rows, numbers].
template <typename Number>
Matrix<const Number> head_of(const at::Tensor& tensor, int64_t head) {
  return {tensor.const_data_ptr<Number>() + head * tensor.stride(1), tensor.stride(2)};
}

// The queries [1, H, S, D] of several texts, `sizes` of each, and the rows that they see: the first `ends` keys and
// values of each text's cache. A row of the mask [1, 1, S, T], additive or undefined, begins with its text's keys; a
// single query sees all, unless `is_masked`.
struct Texts {
  at::Tensor query;
  at::TensorList keys, values;
  at::Tensor mask;
  at::IntArrayRef sizes, ends;
  bool is_masked;
};

template <typename Number>
void attend_heads(const Texts& texts, double scale, bool is_causal, const at::Tensor& outputs) {
  struct Task {
    int64_t text, base, head, first, R;
  };
  const at::Tensor& q = texts.query;
  const int64_t B = texts.sizes.size(), H = q.size(1), D = q.size(3), K = texts.keys[0].size(1);
  const int64_t E = texts.values[0].size(3), num_threads = at::get_num_threads();
  Number* const first_output = outputs.mutable_data_ptr<Number>();
  std::vector<Task> tasks;
  int64_t work = 0;
  for (int64_t head = 0; head < K; ++head) {
    for (int64_t text = 0, base = 0; text < B; base += texts.sizes[text++]) {
      // With fewer key heads than threads, threads share the rows of a head.
      const int64_t num_rows = H / K * texts.sizes[text], most = (num_rows + TASK_ROWS - 1) / TASK_ROWS;
      const int64_t num_parts = std::min(num_rows, std::max((num_threads + B * K - 1) / (B * K), most));
      const int64_t R = (num_rows + num_parts - 1) / num_parts;
      for (int64_t index = 0; index < num_parts; ++index) {
        // In the order first, last, second and so on: with a causal mask later rows take longer.
        const int64_t first = (index % 2 ? num_parts - 1 - index / 2 : index / 2) * R;
        if (first < num_rows) tasks.push_back({text, base, head, first, std::min(R, num_rows - first)});
      }
      work += num_rows * texts.ends[text] * D;
    }
  }
  const int64_t count = tasks.size(), grain = std::max<int64_t>(1, GRAIN * count / std::max<int64_t>(1, work));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const auto [text, base, head, first, R] = tasks[task];
      const int64_t n = texts.sizes[text];
      Matrix<const float> allowed{nullptr, 0};
      if (texts.mask.defined() && (n > 1 || texts.is_masked)) {
        allowed = Matrix<const float>{texts.mask.const_data_ptr<float>(), texts.mask.size(3)}.from(base);
      }
      const Shared<Number> shared{head_of<Number>(texts.keys[text], head), head_of<Number>(texts.values[text], head),
                                  allowed, static_cast<float>(scale), is_causal, n, texts.ends[text], D, E};
      const auto query = [&, base = base, head = head](int64_t row) {
        return head_of<Number>(q, head * (H / K) + row / n).row(base + row % n);
      };
      const auto output = [&, base = base, head = head](int64_t row) {
        return first_output + ((base + row % n) * H + head * (H / K) + row / n) * E;
      };
      attend_rows(shared, first, R, query, output);
    }
  });
}

// Return a mask [1, 1, n, T], boolean or additive, as contiguous additive float32.
inline at::Tensor additive(const at::Tensor& mask) {
  if (mask.scalar_type() != at::kBool) return mask.to(at::kFloat).contiguous();
  return at::zeros(mask.sizes(), mask.options().dtype(at::kFloat)).masked_fill_(mask.logical_not(), LOWEST);
}

// Return the tensor with contiguous rows.
inline at::Tensor in_rows(const at::Tensor& tensor) {
  return tensor.stride(3) == 1 ? tensor : tensor.contiguous();
}

// Query [1, H, n, D], key [1, K, T, D] and value [1, K, T, E] of one dtype, mask [1, 1, n, T], boolean (true: seen)
// or additive; returns [1, n, H, E], rounded once. A query that sees nothing gets zeros. Causal: the last query
// sees all keys, each earlier one a key less.
inline at::Tensor attend(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double scale, bool is_causal) {
  const auto dtype = query.scalar_type();
  const bool is_shaped = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.size(0) == 1 &&
                         key.size(0) == 1 && value.size(0) == 1 && key.size(1) > 0 &&
                         query.size(1) % key.size(1) == 0 && value.size(1) == key.size(1) &&
                         key.size(2) > 0 && value.size(2) == key.size(2) && key.size(3) == query.size(3) &&
                         (!is_causal || query.size(2) <= key.size(2));
  TORCH_CHECK(
      is_shaped && key.scalar_type() == dtype && value.scalar_type() == dtype &&
          (!mask || mask->sizes() == at::IntArrayRef({1, 1, query.size(2), key.size(2)})),
      "attend: got query ", query.dtype(), query.sizes(), ", key ", key.dtype(), key.sizes(), " and value ",
      value.dtype(), value.sizes(), mask ? ", another mask" : "",
      "; allowed: query [1, H, n, D], key [1, K, T, D] and value [1, K, T, E] of one dtype, H a multiple of K, T above 0, "
      "mask [1, 1, n, T], causal with n up to T");
  at::Tensor outputs = at::empty({1, query.size(2), query.size(1), value.size(3)}, query.options());
  if (outputs.numel() == 0) return outputs;
  const at::Tensor k = in_rows(key), v = in_rows(value), allowed = mask ? additive(*mask) : at::Tensor();
  const int64_t n = query.size(2), T = key.size(2);
  const Texts text{in_rows(query), k, v, allowed, n, T, true};
  for_dtype(dtype, "attend", [&](auto number) { attend_heads<decltype(number)>(text, scale, is_causal, outputs); });
  return outputs;
}

// Copy rows [1, K, n, D] into a buffer [1, K, M, D] of the same dtype, after its first `length` rows.
inline void append(const at::Tensor& buffer, const at::Tensor& rows, int64_t length) {
  const int64_t K = rows.size(1), n = rows.size(2), D = rows.size(3);
  TORCH_CHECK(
      buffer.dim() == 4 && buffer.scalar_type() == rows.scalar_type() && buffer.size(1) == K && buffer.size(3) == D &&
          length + n <= buffer.size(2) && buffer.stride(3) == 1,
      "append: got rows ", rows.dtype(), rows.sizes(), " for a buffer ", buffer.dtype(), buffer.sizes(), " with ", length,
      " in use; allowed: rows [1, K, n, D] that fit into [1, K, M, D]");
  const at::Tensor from = in_rows(rows);
  const size_t bytes = rows.element_size();
  for (int64_t head = 0; head < K; ++head) {
    for (int64_t r = 0; r < n; ++r) {
      const int64_t source = head * from.stride(1) + r * from.stride(2);
      const int64_t place = head * buffer.stride(1) + (length + r) * buffer.stride(2);
      std::memcpy(
          static_cast<char*>(buffer.mutable_data_ptr()) + place * bytes,
          static_cast<const char*>(from.const_data_ptr()) + source * bytes, D * bytes);
    }
  }
}

// Append the keys [1, K, S, D] and values [1, K, S, E] of several texts, `sizes` of each, to the `lengths` rows of
// their caches.
inline void append_texts(
    const at::Tensor& keys, const at::Tensor& values, at::TensorList key_buffers, at::TensorList value_buffers,
    at::IntArrayRef sizes, at::IntArrayRef lengths) {
  int64_t begin = 0;
  for (size_t text = 0; text < sizes.size(); begin += sizes[text++]) {
    append(key_buffers[text], keys.narrow(2, begin, sizes[text]), lengths[text]);
    append(value_buffers[text], values.narrow(2, begin, sizes[text]), lengths[text]);
  }
}

// Attend with several texts (`Texts`): the bits of `attend` for each.
inline at::Tensor attend_texts(
    const at::Tensor& query, at::TensorList keys, at::TensorList values, const std::optional<at::Tensor>& mask,
    double scale, at::IntArrayRef sizes, at::IntArrayRef ends, bool is_masked) {
  const size_t B = sizes.size();
  bool is_shaped = query.dim() == 4 && B > 0 && keys.size() == B && values.size() == B && ends.size() == B;
  for (size_t text = 0; is_shaped && text < B; ++text) {
    const at::Tensor &key = keys[text], &value = values[text];
    is_shaped = key.dim() == 4 && value.dim() == 4 && key.size(1) > 0 && key.size(1) == keys[0].size(1) &&
                value.size(1) == key.size(1) && key.size(3) == query.size(3) && value.size(3) == values[0].size(3) &&
                key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type() &&
                key.stride(3) == 1 && value.stride(3) == 1 && sizes[text] > 0 && ends[text] >= sizes[text] &&
                ends[text] <= std::min(key.size(2), value.size(2)) && (!mask || ends[text] <= mask->size(3));
  }
  TORCH_CHECK(
      is_shaped && query.size(0) == 1 && query.size(1) % keys[0].size(1) == 0 &&
          query.size(2) == std::accumulate(sizes.begin(), sizes.end(), int64_t(0)) &&
          (!mask || mask->sizes().slice(0, 3) == at::IntArrayRef({1, 1, query.size(2)})),
      "attend_texts: got query ", query.dtype(), query.sizes(), " of ", B, " texts; allowed: query [1, H, S, D], for each "
      "text its caches [1, K, M, D] and [1, K, M, E] of the same dtype, its size and its end; mask [1, 1, S, T]");
  const Texts texts{in_rows(query), keys, values, mask ? additive(*mask) : at::Tensor(), sizes, ends, is_masked};
  const at::Tensor outputs = at::empty({1, query.size(2), query.size(1), values[0].size(3)}, query.options());
  for_dtype(query.scalar_type(), "attend_texts", [&](auto number) {
    attend_heads<decltype(number)>(texts, scale, false, outputs);
  });
  return outputs;
}

// Append keys [1, K, n, D] and values [1, K, n, E] to the `length` rows of a cache, then attend to all of them; `mask`
// without numbers: each query sees all.
inline at::Tensor attend_with_cache(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key_buffer,
    const at::Tensor& value_buffer, const at::Tensor& mask, double scale, int64_t length) {
  append(key_buffer, keys, length);
  append(value_buffer, values, length);
  const int64_t end = length + keys.size(2);
  const auto allowed = mask.numel() ? std::make_optional(mask) : std::nullopt;
  return attend(query, key_buffer.narrow(2, 0, end), value_buffer.narrow(2, 0, end), allowed, scale, false);
}

}  // namespace few_rows
