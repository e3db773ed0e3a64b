// The candidate pool of the hybrid (candidate_pool.py); the same in Python takes ten times as long.
//
// Python owns the arrays of rows, rates and counts, and saves and loads them; the text and the current tree are kept
// here. Pools of several texts share the arrays.
//
// Shapes: N nodes of a tree, k tokens in a row, S logit samples, V vocabulary.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "../../budget/best_first.h"
#include "sources.h"
#include "suffix_index.h"

using namespace best_first;
using namespace candidates;

namespace {

constexpr int LONGEST_ROW_KEY = 3;
constexpr int32_t NO_TOKEN = -1;  // where fewer tokens have been emitted than are ranked

// The context on which a node's guesses depend.
struct Context {
  Last last;
  Match match;
  Neighbour neighbour;
  int64_t guided = NOWHERE;  // node of the guide
};

}  // namespace

struct CandidatePool {
  Shared shared;
  Rates rates;
  Buckets buckets;
  SuffixIndex index;
  Neighbours neighbours;
  Guide guide;
  State end;  // state after the text's last token but one
  Growth<CandidatePool, Context> growth;

  explicit CandidatePool(const Shared& shared)
      : shared(shared),
        rates{shared.rates, shared.num_kinds, shared.most_observations},
        buckets{shared.minus_edges, shared.num_buckets},
        index(shared.vocab_size),
        neighbours(this->shared) {}

  // Rank anew from counts that Python has changed.
  void reload() {
    end.clear();
    std::fill_n(shared.frequent, shared.num_frequent, NO_TOKEN);
    for (int64_t token = 0; token < shared.vocab_size; ++token) {
      if (shared.counts[token]) rank(token);
    }
  }

  void append(int32_t token) {
    guide.clear();
    index.append(token);
    ++shared.counts[token];
    rank(token);
  }

  // Make rows from the k likeliest of `width` tokens after each of N nodes: entries [N, k].
  const int32_t* rows_of(int64_t N, const int32_t* tokens, const double* logits, int64_t width) {
    const int64_t k = shared.k;
    weights_.resize(k);
    rows_.resize(N * k);
    for (int64_t node = 0; node < N; ++node, tokens += width, logits += width) {
      int32_t* row = rows_.data() + node * k;
      const double total = buckets.weigh(logits, k, weights_.data());
      for (int64_t i = 0; i < k; ++i) row[i] = tokens[i] * shared.num_codes + buckets.code(weights_[i], total);
      row[0] += shared.first_of_row;
    }
    return rows_.data();
  }

  // Write the row of a context of `count` tokens that ends at `last`, under keys of all lengths.
  void write(const int32_t* last, int count, const int32_t* row) {
    for (int length = 1; length <= count; ++length) {
      const int64_t key = hash_of(last - length, length), slot = key & (shared.num_slots - 1);
      shared.keys[slot] = key;
      std::copy_n(row, shared.k, shared.rows + slot * shared.k);
    }
  }

  // Add the record of a node of the last `read`; its parent is one of these nodes, or -1 for the end of the text.
  void record(int32_t token, int64_t parent, int64_t node, const int32_t* row) const {
    if (parent < 0 && end.empty()) return;
    neighbours.add(token, parent < 0 ? end.data() : neighbours.state(parent), neighbours.state(node), row);
  }

  // Use the state of a node as that after the text's last token but one.
  void remember_end(int64_t node) {
    const int8_t* state = neighbours.state(node);
    end.assign(state, state + shared.num_probes);
  }

  Context at_end() const {
    const Last last = index.end(LONGEST_KEY);
    const Neighbour neighbour = neighbours.find(*(last.from_end(1)), end.empty() ? nullptr : end.data());
    return {last, index.match_end(), neighbour, guide.root()};
  }

  Context follow(const Context& before, int32_t token) const {
    Context after = before;
    after.last.push(token);
    after.match = index.follow(before.match, token, after.last);
    after.neighbour = neighbours.find(token, neighbours.after(before.neighbour.number));
    after.guided = guide.child(before.guided, token);
    return after;
  }

  // Pool the candidates of all sources for the token after a context.
  void guess(const Context& context, std::vector<Guess>& guesses) {
    weights_.clear();
    tokens_.clear();
    const auto weight_of = [this](int32_t token) -> double& {
      const size_t place = std::find(tokens_.begin(), tokens_.end(), token) - tokens_.begin();
      if (place == tokens_.size()) {
        tokens_.push_back(token);
        weights_.push_back(1.0);
      }
      return weights_[place];
    };
    const int64_t k = shared.k, num_codes = shared.num_codes;
    for (int length = 1; length <= std::min(LONGEST_ROW_KEY, context.last.count); ++length) {
      const int64_t key = hash_of(context.last.from_end(length), length), slot = key & (shared.num_slots - 1);
      if (shared.keys[slot] != key) continue;
      for (int64_t i = 0; i < k; ++i) {
        const int32_t entry = shared.rows[slot * k + i];
        weight_of(entry / num_codes) *= shared.row_weights[entry % num_codes];
      }
    }
    if (context.neighbour.number != NOWHERE) {
      const double of_likeness = shared.neighbour_weights[context.neighbour.likeness];
      const int32_t* row = neighbours.row(context.neighbour.number);
      for (int64_t i = 0; i < k; ++i) {
        weight_of(row[i] / num_codes) *= shared.row_weights[row[i] % num_codes] * of_likeness;
      }
    }
    if (context.guided != NOWHERE) {
      for (const Guided& guided : guide.row(context.guided)) {
        weight_of(guided.token) *= std::exp(shared.guide_offset + shared.guide_slope * guided.log_probability);
      }
    }
    int32_t matching = -1;
    int64_t kind_of_match = 0;
    if (context.match.position != NOWHERE) {
      matching = index.text[context.match.position];
      const int64_t step = std::min(context.match.length, shared.num_match_weights - 1);
      const bool is_known = std::find(tokens_.begin(), tokens_.end(), matching) != tokens_.end();
      kind_of_match = shared.num_buckets * (is_known ? 2 : 1);
      weight_of(matching) *= shared.match_weights[step];
    }
    const size_t first = guesses.size();
    if (tokens_.empty()) {
      for (int64_t rank = 0; rank < shared.num_frequent && shared.frequent[rank] != NO_TOKEN; ++rank) {
        const int32_t kind = shared.first_frequent + rank;
        guesses.push_back({rates[kind], shared.frequent[rank], kind});
      }
    }
    double total = 1.0;  // "none of these"
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (index.is_in_text[tokens_[i]]) weights_[i] *= shared.in_text_weight;
      total += weights_[i];
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const double probability = weights_[i] / total;
      int32_t kind = buckets.of(-probability);
      if (tokens_[i] == matching) kind += kind_of_match;
      if (guide.names(context.guided, tokens_[i])) kind += shared.first_guided;
      const double expected = probability * rates[kind] / shared.kind_centres[kind];
      guesses.push_back({expected < 1.0 ? expected : 1.0, tokens_[i], kind});
    }
    std::sort(guesses.begin() + first, guesses.end(), std::greater<>());
  }

 private:
  // Move a token to its rank if it is among the most frequent; of equal counts the larger id comes first.
  void rank(int32_t token) const {
    const auto count_of = [this](int32_t token) { return token == NO_TOKEN ? 0 : shared.counts[token]; };
    const auto comes_before = [&](int32_t a, int32_t b) {
      return count_of(a) != count_of(b) ? count_of(a) > count_of(b) : a > b;
    };
    int32_t *const first = shared.frequent, *const last = first + shared.num_frequent;
    if (std::find(first, last, token) == last) {
      if (comes_before(last[-1], token)) return;
      last[-1] = token;
    }
    std::sort(first, last, comes_before);
  }

  std::vector<int32_t> tokens_;  // candidates at a node, and their weights
  std::vector<double> weights_;
  std::vector<int32_t> rows_;
};

extern "C" {

CandidatePool* pool_new(const Shared* shared) { return new CandidatePool(*shared); }

void pool_free(CandidatePool* pool) { delete pool; }

void pool_reload(CandidatePool* pool) { pool->reload(); }

void pool_start(CandidatePool* pool, const int32_t* tokens, int64_t count) {
  pool->end.clear();
  pool->guide.clear();
  pool->index.clear();
  for (int64_t i = 0; i < count; ++i) pool->index.append(tokens[i]);
}

void pool_append(CandidatePool* pool, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i) pool->append(tokens[i]);
  pool->end.clear();
}

// Write rows for the tokens of a text from `begin` on: token ids and logits [count - begin, k], and logit samples.
void pool_write_rows(
    CandidatePool* pool, const int32_t* text, int64_t begin, int64_t count, const int32_t* token_ids, const double* logits,
    const float* logit_samples, int64_t row_step, int64_t step) {
  const int64_t k = pool->shared.k;
  const int32_t* rows = pool->rows_of(count - begin, token_ids, logits, k);
  for (int64_t i = begin; i < count; ++i) {
    pool->write(text + i + 1, std::min<int64_t>(LONGEST_ROW_KEY, i + 1), rows + (i - begin) * k);
  }
  if (!logit_samples) return;
  pool->neighbours.read({logit_samples, row_step, step}, count - begin);
  for (int64_t i = 0; i < count - begin; ++i) pool->record(text[begin + i], i - 1, i, rows + i * k);
  pool->remember_end(count - begin - 1);
}

// Take what a guide says after the text and after M nodes of a tree of its own, until the text goes on: tokens (-1:
// any) and parents [M], the root first; rows of tokens and logarithms of their probabilities [M, k].
void pool_guide(
    CandidatePool* pool, int64_t M, int64_t k, const int32_t* tokens, const int32_t* parents, const int32_t* rows,
    const double* log_probabilities) {
  pool->guide.take(M, k, tokens, parents, rows, log_probabilities);
}

// Grow a tree at the end of the text: tokens, parents and kinds [N], the root first; return N.
int64_t pool_grow(
    CandidatePool* pool, int32_t root, int64_t num_drafted, int64_t max_depth, int32_t chain_only, int64_t num_costs,
    const int64_t* sizes, const double* milliseconds, double margin, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  const CostCurve costs{num_costs, sizes, milliseconds, margin};
  const int64_t N = pool->growth.grow(*pool, root, pool->at_end(), num_drafted, max_depth, chain_only, costs);
  pool->growth.put_in_order(N, tokens, parents, kinds);
  return N;
}

// Grow a tree at the end of the text, without costs: write the nodes' acceptance probabilities [num_drafted], down
// to `least`; return their number.
int64_t pool_offer(
    CandidatePool* pool, int32_t root, int64_t num_drafted, int64_t max_depth, int32_t chain_only, double least,
    double* gains) {
  return pool->growth.offer(*pool, root, pool->at_end(), num_drafted, max_depth, chain_only, least, gains);
}

// Take the first N nodes of the last tree, the root included: tokens, parents and kinds [N].
void pool_take(CandidatePool* pool, int64_t N, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  pool->growth.put_in_order(N, tokens, parents, kinds);
}

// Learn from the last tree of N nodes: tokens and parents [N], the accepted path and its emitted tokens, the
// likeliest `width` tokens after every node with their logits [N, width], and logit samples.
void pool_learn(
    CandidatePool* pool, int64_t N, const int32_t* tokens, const int32_t* parents, const int64_t* path, int64_t path_length,
    const int32_t* emitted, int64_t num_emitted, const int32_t* token_ids, const double* logits, int64_t width,
    const float* logit_samples, int64_t row_step, int64_t step) {
  const auto& growth = pool->growth;
  growth.teach(pool->rates, path, emitted, std::min(path_length, num_emitted));
  std::vector<Last> contexts(N);
  contexts[0] = pool->index.end(LONGEST_ROW_KEY);
  for (int64_t node = 1; node < N; ++node) {
    contexts[node] = contexts[parents[node]];
    contexts[node].push(tokens[node]);
  }
  const int32_t* rows = pool->rows_of(N, token_ids, logits, width);
  const int64_t k = pool->shared.k;
  const auto write = [&](int64_t node) {
    const Last& last = contexts[node];
    pool->write(last.from_end(0), std::min(LONGEST_ROW_KEY, last.count), rows + node * k);
  };
  // Of equal contexts the last written wins: accepted nodes, and among the others the deeper one.
  std::vector<int64_t> others;
  for (int64_t node = 0; node < N; ++node) {
    if (std::find(path, path + path_length, node) == path + path_length) others.push_back(node);
  }
  std::stable_sort(others.begin(), others.end(), [&](int64_t a, int64_t b) {
    return growth.depth_of(a) < growth.depth_of(b);
  });
  for (const int64_t node : others) write(node);
  for (int64_t i = 0; i < path_length; ++i) write(path[i]);
  if (logit_samples) {
    pool->neighbours.read({logit_samples, row_step, step}, N);
    for (int64_t node = 0; node < N; ++node) pool->record(tokens[node], parents[node], node, rows + node * k);
  }
  pool_append(pool, emitted, num_emitted);
  if (logit_samples) pool->remember_end(path[path_length - 1]);
}

}  // extern "C"
