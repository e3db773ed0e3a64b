// Best-first growth of trees (best_first.py), the choice of their size (as in model/engine/budget.py), and learned
// acceptance rates. A pass of the model evicts a step's objects from the processor's caches, so Python spends most
// of a step waiting for memory; here a step touches only a few arrays.
//
// Shapes: N nodes of a tree, k tokens in a row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

namespace best_first {

constexpr int64_t NOWHERE = -1;

struct Guess {
  double probability;
  int32_t token, kind;

  bool operator>(const Guess& other) const {
    if (probability != other.probability) return probability > other.probability;
    if (token != other.token) return token > other.token;
    return kind > other.kind;
  }
};

// Milliseconds of a step by its number of nodes, rising; if empty, trees grow to the limit.
struct CostCurve {
  int64_t count;
  const int64_t* sizes;
  const double* milliseconds;
  double margin;
};

// Acceptance rates by kind of guess, and their numbers of observations; Python owns the array.
struct Rates {
  double* rates;    // [2, num_kinds]
  int64_t num_kinds;
  double most_observations;

  double operator[](int64_t kind) const { return rates[kind]; }

  void learn(int64_t kind, bool came_true) const {
    double& weight = rates[num_kinds + kind];
    weight = std::min(weight + 1.0, most_observations);
    rates[kind] += (came_true - rates[kind]) / weight;
  }
};

// Buckets of probabilities; edges are negated probabilities, rising.
struct Buckets {
  const double* minus_edges;  // [count - 1]
  int64_t count;

  int64_t of(double minus_probability) const {
    return std::lower_bound(minus_edges, minus_edges + count - 1, minus_probability) - minus_edges;
  }

  // Compute weights of the k largest logits, proportional to their probabilities; return the sum.
  double weigh(const double* logits, int64_t k, double* weights) const {
    double total = 0.0;
    for (int64_t i = 0; i < k; ++i) total += weights[i] = std::exp(logits[i] - logits[0]);
    return total;
  }

  // Return the code of a weight, given the sum of all weights.
  int32_t code(double weight, double total) const { return 1 + of(weight / -total); }
};

// A tree from the guesses of a source: `guess(context, guesses)` appends the guesses at a context, the likeliest
// first; `follow(context, token)` returns the context after one more token.
template <typename Source, typename Context>
class Growth {
 public:
  // Grow a tree; return its nodes N, the root included.
  int64_t grow(
      Source& source, int32_t root, const Context& context, int64_t num_drafted, int64_t max_depth, bool chain_only,
      const CostCurve& costs) {
    plant(source, root, context, num_drafted, max_depth, chain_only);
    if (costs.count) return 1 + worth(costs);
    int64_t drawn = 0;
    while (next() >= 0.0) ++drawn;
    return 1 + drawn;
  }

  // Grow a tree without costs, as long as nodes are accepted with a probability of at least `least`; write these
  // probabilities, falling, [num_drafted] at most; return their number.
  int64_t offer(
      Source& source, int32_t root, const Context& context, int64_t num_drafted, int64_t max_depth, bool chain_only,
      double least, double* gains) {
    plant(source, root, context, num_drafted, max_depth, chain_only);
    int64_t count = 0;
    for (double gain = next(); gain >= std::max(0.0, least); gain = next()) gains[count++] = gain;
    return count;
  }

  // Write the first N nodes in depth-first order: tokens, parents and kinds [N], the root first.
  void put_in_order(int64_t N, int32_t* tokens, int32_t* parents, int32_t* kinds) {
    order_.clear();
    place(0, -1, N, tokens, parents, kinds);
  }

  // Depth of a node, by its index in depth-first order.
  int64_t depth_of(int64_t node) const { return nodes_[order_[node]].depth; }

  // Learn from every guess after an accepted node, drafted or only considered: path [count] in depth-first order,
  // and the tokens [count] emitted after its nodes.
  void teach(const Rates& rates, const int64_t* path, const int32_t* tokens, int64_t count) const {
    std::vector<int32_t> following(nodes_.size(), -1);
    for (int64_t i = 0; i < count; ++i) following[order_[path[i]]] = tokens[i];
    for (size_t node = 1; node < nodes_.size(); ++node) {
      const int32_t token = following[nodes_[node].parent];
      if (token >= 0) rates.learn(nodes_[node].kind, token == nodes_[node].token);
    }
  }

 private:
  struct Node {
    int32_t token, parent, kind, depth;
    bool has_context;
    Context context;
  };

  // A node in the heap that waits for its guesses, or for its next guess to become a child.
  struct Waiting {
    double negative;  // minus the acceptance probability of the next child; of the node itself before it has guesses
    int64_t number;
    int32_t parent;
    double reached;
    int64_t first_guess, num_guesses;  // NOWHERE: no guesses yet

    bool operator<(const Waiting& other) const {  // comes later
      return negative != other.negative ? negative > other.negative : number > other.number;
    }
  };

  // Begin a tree with its root.
  void plant(
      Source& source, int32_t root, const Context& context, int64_t num_drafted, int64_t max_depth, bool chain_only) {
    source_ = &source;
    nodes_.clear();
    guesses_.clear();
    heap_ = {};
    next_number_ = 0;
    num_left_ = num_drafted;
    max_depth_ = max_depth;
    chain_only_ = chain_only;
    nodes_.push_back({root, -1, 0, 0, true, context});
    if (max_depth > 0) wait(-1.0, 0, 1.0, NOWHERE, 0);
  }

  void wait(double negative, int32_t parent, double reached, int64_t first_guess, int64_t num_guesses) {
    heap_.push({negative, next_number_++, parent, reached, first_guess, num_guesses});
  }

  // Add the next node; return its acceptance probability, -1 if there is none.
  double next() {
    while (!heap_.empty() && num_left_ > 0) {
      const Waiting top = heap_.top();
      heap_.pop();
      if (top.first_guess == NOWHERE) {
        const int64_t first = guesses_.size();
        source_->guess(context_of(top.parent), guesses_);
        const int64_t count = guesses_.size() - first;
        if (count) wait(-top.reached * guesses_[first].probability, top.parent, top.reached, first, count);
        continue;
      }
      const Guess chosen = guesses_[top.first_guess];
      const int32_t node = nodes_.size(), depth = nodes_[top.parent].depth + 1;
      nodes_.push_back({chosen.token, top.parent, chosen.kind, depth, false, {}});
      if (top.num_guesses > 1 && !chain_only_) {
        const double probability = top.reached * guesses_[top.first_guess + 1].probability;
        wait(-probability, top.parent, top.reached, top.first_guess + 1, top.num_guesses - 1);
      }
      if (depth < max_depth_) wait(top.negative, node, -top.negative, NOWHERE, 0);
      --num_left_;
      return -top.negative;
    }
    return -1.0;
  }

  // Grow while a larger tree could pay; return the best number of drafted nodes.
  int64_t worth(const CostCurve& costs) {
    double tokens = 1.0, gain = 1.0, best_rate = costs.margin / costs.milliseconds[0];
    int64_t num_read = 0, best = 0;
    bool is_over = false;
    for (int64_t i = 1; i < costs.count; ++i) {
      while (num_read < costs.sizes[i] - 1) {
        gain = next();
        if (gain < 0.0) {
          is_over = true;
          break;
        }
        tokens += gain;
        ++num_read;
      }
      const double rate = tokens / costs.milliseconds[i];
      if (rate > best_rate) {
        best_rate = rate * costs.margin;
        best = num_read;
      }
      bool is_hopeless = true;
      for (int64_t larger = i + 1; larger < costs.count && is_hopeless; ++larger) {
        const double more = (costs.sizes[larger] - costs.sizes[i]) * gain;
        is_hopeless = tokens + more <= best_rate * costs.milliseconds[larger];
      }
      if (is_over || is_hopeless) break;
    }
    return best;
  }

  const Context& context_of(int32_t number) {
    Node& node = nodes_[number];
    if (!node.has_context) {
      node.context = source_->follow(context_of(node.parent), node.token);
      node.has_context = true;
    }
    return node.context;
  }

  void place(int32_t node, int32_t parent, int64_t N, int32_t* tokens, int32_t* parents, int32_t* kinds) {
    const int32_t own = order_.size();
    order_.push_back(node);
    tokens[own] = nodes_[node].token;
    parents[own] = parent;
    kinds[own] = nodes_[node].kind;
    for (int32_t child = node + 1; child < N; ++child) {
      if (nodes_[child].parent == node) place(child, own, N, tokens, parents, kinds);
    }
  }

  Source* source_ = nullptr;
  std::vector<Node> nodes_;     // in the order of growth
  std::vector<int32_t> order_;  // by depth-first index: the number in nodes_
  std::vector<Guess> guesses_;  // of all nodes that have them
  std::priority_queue<Waiting> heap_;
  int64_t next_number_ = 0, num_left_ = 0, max_depth_ = 0;
  bool chain_only_ = false;
};

}  // namespace best_first
