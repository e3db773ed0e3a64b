// What the candidate pool shares with Python, which owns the arrays; and its sources beside rows and text: records of
// verified nodes, and a guide.
//
// Shapes: N nodes, M nodes of a guide's tree, k tokens in a row, S logit samples, E records of nodes, V vocabulary.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../budget/best_first.h"

// Settings and arrays.
struct Shared {
  int64_t num_slots, k, vocab_size;
  int64_t num_buckets, num_codes, first_of_row;  // of probabilities; of codes; added to a first token's code
  int64_t num_match_weights, num_frequent, first_frequent, first_guided, num_kinds;
  int64_t num_records, num_probes, num_compared, num_steps;  // of similarity
  int64_t state_length;
  double in_text_weight, most_observations, largest_logit;
  double guide_offset, guide_slope;  // of a guided token's weight, by the logarithm of its probability
  const double* minus_edges;     // [num_buckets - 1], rising
  const double* row_weights;     // [2 * num_buckets + 2]
  const double* match_weights;   // [num_match_weights]
  const double* kind_centres;    // [num_kinds]; those of frequent tokens are not read
  const double* neighbour_weights;  // [num_steps]
  int64_t* keys;                 // [num_slots]
  int32_t* rows;                 // [num_slots, k]
  double* rates;                 // [2, num_kinds]: rates and numbers of observations
  int32_t* counts;               // [V], of emitted tokens
  int32_t* frequent;             // [num_frequent], the most frequent first, -1 after them
  // Records of verified nodes, each at its number modulo E: states before and after the token.
  int8_t* before;                // [E, S]
  int8_t* after;                 // [E, S]
  int32_t* record_tokens;        // [E]
  int32_t* record_rows;          // [E, k]
  int64_t* previous;             // [E], numbers
  int64_t* latest;               // [V]
  int64_t* num_recorded;         // [1]
};

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

// Records of verified nodes, found by the similarity of the model's state: see tables.py.
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
        sum += whole_[i] = static_cast<int64_t>(std::nearbyint(bounded));
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

constexpr int32_t ANY_TOKEN = -1;

struct Guided {
  int32_t token;
  double log_probability;
};

// What a guide, such as trained heads, says after the nodes of a tree of its own.
class Guide {
 public:
  void clear() { nodes_.clear(); }

  // Take a tree of M nodes, the root first: tokens and parents [M], rows [M, k].
  void take(
      int64_t M, int64_t k, const int32_t* tokens, const int32_t* parents, const int32_t* rows,
      const double* log_probabilities) {
    nodes_.assign(M, {});
    for (int64_t node = 0; node < M; ++node) {
      nodes_[node].token = tokens[node];
      for (int64_t i = node * k; i < (node + 1) * k; ++i) nodes_[node].row.push_back({rows[i], log_probabilities[i]});
      if (node > 0) nodes_[parents[node]].children.push_back(node);
    }
  }

  int64_t root() const { return nodes_.empty() ? NOWHERE : 0; }

  int64_t child(int64_t node, int32_t token) const {
    if (node == NOWHERE) return NOWHERE;
    for (const int64_t child : nodes_[node].children) {
      if (nodes_[child].token == token || nodes_[child].token == ANY_TOKEN) return child;
    }
    return NOWHERE;
  }

  const std::vector<Guided>& row(int64_t node) const { return nodes_[node].row; }

  bool names(int64_t node, int32_t token) const {
    if (node == NOWHERE) return false;
    const auto& row = nodes_[node].row;
    return std::any_of(row.begin(), row.end(), [token](const Guided& guided) { return guided.token == token; });
  }

 private:
  struct Node {
    int32_t token;
    std::vector<Guided> row;
    std::vector<int64_t> children;
  };

  std::vector<Node> nodes_;
};

}  // namespace candidates
