// What a guide, such as trained heads, says after the nodes of a tree of its own.
//
// Shapes: M nodes of the tree, k tokens in a row.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../budget/best_first.h"

namespace candidates {

using best_first::NOWHERE;

constexpr int32_t ANY_TOKEN = -1;

struct Guided {
  int32_t token;
  double log_probability;
};

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
