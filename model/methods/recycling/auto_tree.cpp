// The guesses of `--tree-version auto` (auto_tree.py); the same in Python takes four to seven times as long.
//
// Python owns the matrix, codes and rates, and saves and loads them; the text and the current tree are kept here.
//
// Shapes: N nodes of a tree, V vocabulary, k successors kept for a token.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

#include "../../budget/best_first.h"

using namespace best_first;

// Settings and arrays of Python, which owns the arrays.
struct Shared {
  int64_t vocab_size, k, num_buckets, num_kinds, is_average;
  double most_observations;
  const double* minus_edges;  // [num_buckets - 1], rising
  const double* centres;      // [num_buckets]
  int32_t* matrix;            // [V, k]
  uint8_t* codes;             // [V, k]; 0: no row yet
  double* rates;              // [2, num_kinds]: rates, and the observations they rest on
};

// The tokens of prompt and answer, and their pairs of neighbours.
class TextSoFar {
 public:
  static constexpr int64_t NUM_LEVELS = 4;

  explicit TextSoFar(int64_t vocab_size) : levels_(vocab_size) {}

  void start() {
    std::fill(levels_.begin(), levels_.end(), 0);
    pairs_.clear();
    last_ = -1;
  }

  void append(const int32_t* tokens, int64_t count, bool is_answer) {
    for (int64_t i = 0; i < count; ++i) {
      // A token without a logit is never a successor.
      if (tokens[i] < int64_t(levels_.size())) levels_[tokens[i]] = is_answer ? OF_ANSWER : OF_PROMPT;
      pairs_.insert(pair(last_, tokens[i]));
      last_ = tokens[i];
    }
  }

  int32_t level(int32_t token, int32_t successor) const {
    return pairs_.count(pair(token, successor)) ? AFTER_TOKEN : levels_[successor];
  }

 private:
  enum : int32_t { OF_PROMPT = 1, OF_ANSWER, AFTER_TOKEN };

  static int64_t pair(int64_t token, int64_t successor) { return token * (int64_t(1) << 32) + successor; }

  std::vector<uint8_t> levels_;  // [V]
  std::unordered_set<int64_t> pairs_;
  int32_t last_ = -1;
};

struct AutoTree {
  Shared shared;
  Rates rates;
  Buckets buckets;
  TextSoFar text;
  Growth<AutoTree, int32_t> growth;  // the context of a node is its token

  explicit AutoTree(const Shared& shared)
      : shared(shared),
        rates{shared.rates, shared.num_kinds, shared.most_observations},
        buckets{shared.minus_edges, shared.num_buckets},
        text(shared.vocab_size) {}

  int32_t follow(int32_t, int32_t token) const { return token; }

  // A kind of guess is a rank, a bucket of its probability and a level: where the text has named the token.
  void guess(int32_t token, std::vector<Guess>& guesses) const {
    const int64_t k = shared.k;
    const uint8_t* codes = shared.codes + token * k;
    if (!codes[0]) return;
    const size_t first = guesses.size();
    for (int64_t rank = 0; rank < k; ++rank) {
      const int32_t successor = shared.matrix[token * k + rank];
      const int32_t bucket = rank * shared.num_buckets + codes[rank] - 1;
      const int32_t kind = bucket * TextSoFar::NUM_LEVELS + text.level(token, successor);
      guesses.push_back({rates[kind], successor, kind});
    }
    std::sort(guesses.begin() + first, guesses.end(), std::greater<>());
  }

  void write(int32_t token, const int32_t* successors, const double* logits) {
    const int64_t k = shared.k;
    int32_t* row = shared.matrix + token * k;
    uint8_t* codes = shared.codes + token * k;
    weights_.resize(k);
    const double total = buckets.weigh(logits, k, weights_.data());
    if (!shared.is_average || !codes[0]) {
      std::copy_n(successors, k, row);
      for (int64_t i = 0; i < k; ++i) codes[i] = buckets.code(weights_[i], total);
      return;
    }
    shares_.clear();
    for (int64_t i = 0; i < k; ++i) add(row[i], shared.centres[codes[i] - 1]);
    for (int64_t i = 0; i < k; ++i) add(successors[i], weights_[i] / total);
    std::stable_sort(shares_.begin(), shares_.end(), [](const Share& a, const Share& b) { return a.share > b.share; });
    double sum = 0.0;
    for (int64_t i = 0; i < k; ++i) sum += shares_[i].share;
    for (int64_t i = 0; i < k; ++i) {
      row[i] = shares_[i].token;
      codes[i] = buckets.code(shares_[i].share, sum);
    }
  }

 private:
  struct Share {
    int32_t token;
    double share;
  };

  void add(int32_t token, double share) {
    for (Share& known : shares_) {
      if (known.token == token) {
        known.share += share;
        return;
      }
    }
    shares_.push_back({token, share});
  }

  std::vector<double> weights_;
  std::vector<Share> shares_;
};

extern "C" {

AutoTree* rows_new(const Shared* shared) { return new AutoTree(*shared); }

void rows_free(AutoTree* rows) { delete rows; }

// Grow a tree: tokens, parents and kinds [N], the root first; return N.
int64_t rows_grow(
    AutoTree* rows, int32_t root, int64_t num_drafted, int64_t max_depth, int32_t chain_only, int64_t num_costs,
    const int64_t* sizes, const double* milliseconds, double margin, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  const CostCurve costs{num_costs, sizes, milliseconds, margin};
  const int64_t N = rows->growth.grow(*rows, root, root, num_drafted, max_depth, chain_only, costs);
  rows->growth.put_in_order(N, tokens, parents, kinds);
  return N;
}

// Grow a tree without costs: write the nodes' acceptance probabilities [num_drafted], down to `least`; return their
// number.
int64_t rows_offer(
    AutoTree* rows, int32_t root, int64_t num_drafted, int64_t max_depth, int32_t chain_only, double least,
    double* gains) {
  return rows->growth.offer(*rows, root, root, num_drafted, max_depth, chain_only, least, gains);
}

// Take the first N nodes of the last tree, the root included: tokens, parents and kinds [N].
void rows_take(AutoTree* rows, int64_t N, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  rows->growth.put_in_order(N, tokens, parents, kinds);
}

// Begin a text with a prompt.
void rows_start(AutoTree* rows, const int32_t* tokens, int64_t count) {
  rows->text.start();
  rows->text.append(tokens, count, false);
}

// Add tokens of the answer.
void rows_append(AutoTree* rows, const int32_t* tokens, int64_t count) { rows->text.append(tokens, count, true); }

// Learn the acceptance of the last tree's guesses from the accepted path and its emitted tokens.
void rows_teach(AutoTree* rows, const int64_t* path, const int32_t* tokens, int64_t count) {
  rows->growth.teach(rows->rates, path, tokens, count);
}

// Write the rows of the nodes in `order` [count], one by one: the tokens of all nodes, and for each node `width`
// likely successors with their logits, k of which are written.
void rows_write(
    AutoTree* rows, const int32_t* tokens, const int64_t* order, int64_t count, const int32_t* successors,
    const double* logits, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t node = order[i];
    rows->write(tokens[node], successors + node * width, logits + node * width);
  }
}

}  // extern "C"
