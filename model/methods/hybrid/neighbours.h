// Records of verified nodes, found by the similarity of the model's state (neighbours.py).
//
// Shapes: N nodes, k tokens in a row, S logit samples, E records of nodes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../budget/best_first.h"
#include "shared.h"

namespace candidates {

using best_first::NOWHERE;

// The record of the last token with the most similar state before it, and that similarity.
struct Neighbour {
  int64_t number = NOWHERE, likeness = 0;
};

using State = std::vector<int8_t>;  // [S]; empty: not known

// Logit samples of nodes [N, S] inside their logits: every `step`-th number, rows `row_step` apart.
struct LogitSamples {
  const float* values;  // null: the nodes have no states
  int64_t row_step, step;
};

// Records of verified nodes: see neighbours.py.
class Neighbours {
 public:
  explicit Neighbours(const Shared& shared) : shared_(shared) {}

  // Compute the states of N nodes.
  void read(const LogitSamples& logit_samples, int64_t N) {
    const int64_t S = shared_.num_probes;
    whole_.resize(S);
    states_.resize(N * S);
    for (int64_t node = 0; node < N; ++node) {
      const float* values = logit_samples.values + node * logit_samples.row_step;
      int64_t sum = 0;
      for (int64_t i = 0; i < S; ++i) {
        const float value = values[i * logit_samples.step], most = shared_.largest_logit;
        const float bounded = std::isfinite(value) ? std::clamp(value, -most, most) : 0.0f;
        sum += whole_[i] = static_cast<int64_t>(std::nearbyint(bounded * static_cast<float>(shared_.logit_steps)));
      }
      int64_t squares = 0;
      for (int64_t i = 0; i < S; ++i) {
        whole_[i] = whole_[i] * S - sum;
        squares += whole_[i] * whole_[i];
      }
      const double scale = shared_.state_length / std::sqrt(static_cast<double>(std::max<int64_t>(1, squares)));
      for (int64_t i = 0; i < S; ++i) {
        states_[node * S + i] = static_cast<int8_t>(std::nearbyint(whole_[i] * scale));
      }
    }
  }

  // State of a node of the last `read`.
  const int8_t* state(int64_t node) const { return states_.data() + node * shared_.num_probes; }

  void add(int32_t token, const int8_t* before, const int8_t* after, const int32_t* row) const {
    if (token >= shared_.vocab_size) return;  // some prompts' tokens have no logit
    const int64_t number = shared_.num_recorded[0]++, place = number % shared_.num_records, S = shared_.num_probes;
    std::copy_n(before, S, shared_.before + place * S);
    std::copy_n(after, S, shared_.after + place * S);
    std::copy_n(row, shared_.k, shared_.record_rows + place * shared_.k);
    shared_.record_tokens[place] = token;
    shared_.previous[place] = shared_.latest[token];
    shared_.latest[token] = number;
  }

  Neighbour find(int32_t token, const int8_t* state) const {
    Neighbour found;
    if (!state || token >= shared_.vocab_size) return found;
    const int64_t E = shared_.num_records, S = shared_.num_probes, square = shared_.state_length * shared_.state_length;
    const int64_t oldest = std::max<int64_t>(0, shared_.num_recorded[0] - E);
    int64_t highest = -2 * square, number = shared_.latest[token];
    for (int64_t i = 0; i < shared_.num_compared && number >= oldest; ++i) {
      const int8_t* before = shared_.before + number % E * S;
      int32_t product = 0;
      for (int64_t j = 0; j < S; ++j) product += state[j] * before[j];
      if (product > highest) {
        highest = product;
        found.number = number;
      }
      number = shared_.previous[number % E];
    }
    if (highest > 0) found.likeness = std::min(highest * shared_.num_steps / square, shared_.num_steps - 1);
    return found;
  }

  const int8_t* after(int64_t number) const {
    return number == NOWHERE ? nullptr : shared_.after + number % shared_.num_records * shared_.num_probes;
  }

  const int32_t* row(int64_t number) const { return shared_.record_rows + number % shared_.num_records * shared_.k; }

 private:
  const Shared& shared_;
  State states_;                // [N, S]
  std::vector<int64_t> whole_;  // [S]
};

}  // namespace candidates
