// The guesses of `--tree-version auto`: what row_guesses.py does, node by node and number by number, in a tenth of the
// time.
//
// The matrix, codes and rates are Python's, which saves and loads them; the tree under way is kept here.
//
// Shapes: N nodes of a tree, V vocabulary, k successors kept for a token.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "../best_first.h"

using namespace best_first;

// What Python knows and keeps; arrays belong to it.
struct Shared {
  int64_t k, num_buckets, num_kinds;
  double most_observations;
  const double* minus_edges;  // [num_buckets - 1], rising
  int32_t* matrix;            // [V, k]
  uint8_t* codes;             // [V, k]; 0: no row yet
  double* rates;              // [2, num_kinds]: rates, and the observations they rest on
};

struct RowGuesses {
  Shared shared;
  Rates rates;
  Buckets buckets;
  Growth<RowGuesses, int32_t> growth;  // the context of a node is its token

  explicit RowGuesses(const Shared& shared)
      : shared(shared),
        rates{shared.rates, shared.num_kinds, shared.most_observations},
        buckets{shared.minus_edges, shared.num_buckets} {}

  int32_t follow(int32_t, int32_t token) const { return token; }

  // A kind of guess is a rank and a bucket of its probability.
  void guess(int32_t token, std::vector<Guess>& guesses) const {
    const int64_t k = shared.k;
    const uint8_t* codes = shared.codes + token * k;
    if (!codes[0]) return;
    const size_t first = guesses.size();
    for (int64_t rank = 0; rank < k; ++rank) {
      const int32_t kind = rank * shared.num_buckets + codes[rank] - 1;
      guesses.push_back({rates[kind], shared.matrix[token * k + rank], kind});
    }
    std::sort(guesses.begin() + first, guesses.end(), std::greater<>());
  }

  void write(int32_t token, const int32_t* successors, const double* logits) {
    const int64_t k = shared.k;
    weights_.resize(k);
    codes_.resize(k);
    buckets.codes(logits, k, weights_.data(), codes_.data());
    std::copy_n(successors, k, shared.matrix + token * k);
    std::copy_n(codes_.data(), k, shared.codes + token * k);
  }

 private:
  std::vector<double> weights_;
  std::vector<int32_t> codes_;
};

extern "C" {

RowGuesses* rows_new(const Shared* shared) { return new RowGuesses(*shared); }

void rows_free(RowGuesses* rows) { delete rows; }

// Grow a tree: tokens, parents and kinds [N], the root first; returns N.
int64_t rows_grow(
    RowGuesses* rows, int32_t root, int64_t num_drafted, int64_t max_depth, int32_t chain_only, int64_t num_prices,
    const int64_t* sizes, const double* milliseconds, double margin, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  const Prices prices{num_prices, sizes, milliseconds, margin};
  const int64_t N = rows->growth.grow(*rows, root, root, num_drafted, max_depth, chain_only, prices);
  rows->growth.put_in_order(N, tokens, parents, kinds);
  return N;
}

// Learn what the last tree's guesses were worth, from the accepted path and the tokens that came along it.
void rows_teach(RowGuesses* rows, const int64_t* path, const int32_t* tokens, int64_t count) {
  rows->growth.teach(rows->rates, path, tokens, count);
}

// Write rows of nodes, those in `order` [count], one after the other: tokens of all, and their likeliest successors with
// their logits, `width` of each, k of which are written.
void rows_write(
    RowGuesses* rows, const int32_t* tokens, const int64_t* order, int64_t count, const int32_t* successors,
    const double* logits, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t node = order[i];
    rows->write(tokens[node], successors + node * width, logits + node * width);
  }
}

}  // extern "C"
