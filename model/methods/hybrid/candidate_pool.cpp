// The candidate pool of the hybrid (candidate_pool.py); the same in Python takes ten times as long.
//
// Python owns the arrays of rows, rates and counts, and saves and loads them; the text and the current tree are kept
// here.
//
// Shapes: N nodes of a tree, k tokens in a row, S sketches, E records of nodes, V vocabulary.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "../growth/best_first.h"

using namespace best_first;

namespace {

constexpr int LONGEST_ROW_KEY = 3;
constexpr int LONGEST_KEY = 4;  // of the text's n-grams
constexpr int64_t LONGEST_MATCH = 24;

}  // namespace

// Settings and arrays of Python, which owns the arrays.
struct Shared {
  int64_t num_slots, k, vocab_size;
  int64_t num_buckets, num_codes, first_of_row;  // of probabilities; of codes; added to a first token's code
  int64_t num_match_weights, num_frequent, first_frequent, num_kinds;
  int64_t num_records, num_probes, num_compared, num_steps;  // of similarity
  int64_t state_length;
  double in_text_weight, most_observations, largest_logit, logit_steps;
  const double* minus_edges;     // [num_buckets - 1], rising
  const double* row_weights;     // [2 * num_buckets + 2]
  const double* match_weights;   // [num_match_weights]
  const double* kind_centres;    // [first_frequent]
  const double* neighbour_weights;  // [num_steps]
  int64_t* keys;                 // [num_slots]
  int32_t* rows;                 // [num_slots, k]
  double* rates;                 // [2, num_kinds]: rates and numbers of observations
  int32_t* counts;               // [V], of emitted tokens
  // Records of verified nodes, each at its number modulo E: states before and after the token.
  int8_t* before;                // [E, S]
  int8_t* after;                 // [E, S]
  int32_t* record_tokens;        // [E]
  int32_t* record_rows;          // [E, k]
  int64_t* previous;             // [E], numbers
  int64_t* latest;               // [V]
  int64_t* num_recorded;         // [1]
};

namespace {

// Python's hash of a tuple of small numbers.
int64_t hash_of(const int32_t* tokens, int count) {
  constexpr uint64_t FIRST = 11400714785074694791u, SECOND = 14029467366897019727u, FIFTH = 2870177450012600261u;
  uint64_t sum = FIFTH;
  for (int i = 0; i < count; ++i) {
    sum += static_cast<uint64_t>(tokens[i]) * SECOND;
    sum = (sum << 31 | sum >> 33) * FIRST;
  }
  sum += static_cast<uint64_t>(count) ^ (FIFTH ^ 3527539u);
  return sum == ~uint64_t{0} ? 1546275796 : static_cast<int64_t>(sum);
}

// The last tokens, up to LONGEST_KEY, the newest last.
struct Last {
  std::array<int32_t, LONGEST_KEY> tokens;
  int count = 0;

  const int32_t* from_end(int number) const { return tokens.data() + count - number; }

  void push(int32_t token) {
    if (count == LONGEST_KEY) {
      std::copy(tokens.begin() + 1, tokens.end(), tokens.begin());
      --count;
    }
    tokens[count++] = token;
  }
};

// An earlier place in the text: the position of the token that followed, and how many tokens before it agree.
struct Match {
  int64_t position = NOWHERE, length = 0;
};

// The record of the last token with the most similar state before it, and that similarity.
struct Neighbour {
  int64_t number = NOWHERE, likeness = 0;
};

// The context on which a node's guesses depend.
struct Context {
  Last last;
  Match match;
  Neighbour neighbour;
};

// The text, and the last place of each n-gram.
class SuffixIndex {
 public:
  std::vector<int32_t> text;
  std::vector<char> is_in_text;  // by token

  explicit SuffixIndex(int64_t vocab_size) : is_in_text(vocab_size) { clear(); }

  void clear() {
    for (const int32_t token : text) is_in_text[token] = false;
    text.clear();
    entries_ = std::vector<Entry>(1024);  // frees the memory of a long text
    num_entries_ = 0;
  }

  // An n-gram is indexed once its continuation exists, so that no suffix of the text finds itself.
  void append(int32_t token) {
    const Last last = end(LONGEST_KEY);
    for (int length = last.count; length > 0; --length) put(last.from_end(length), length, text.size());
    text.push_back(token);
    if (token >= static_cast<int64_t>(is_in_text.size())) is_in_text.resize(token + 1);  // some prompts' tokens have no logit
    is_in_text[token] = true;
  }

  Last end(int count) const {
    Last last;
    const int64_t size = text.size();
    for (int64_t i = std::max<int64_t>(0, size - count); i < size; ++i) last.push(text[i]);
    return last;
  }

  Match match_end() const {
    Match found = match(end(LONGEST_KEY));
    if (found.length < LONGEST_KEY) return found;
    const int64_t size = text.size(), position = found.position;
    int64_t& length = found.length;
    while (length < std::min(LONGEST_MATCH, position) && text[position - 1 - length] == text[size - 1 - length]) ++length;
    return found;
  }

  Match match(const Last& last) const {
    for (int length = last.count; length > 0; --length) {
      const Entry& entry = entries_[place_of(last.from_end(length), length)];
      if (entry.position != NOWHERE) return {entry.position, length};
    }
    return {};
  }

  Match follow(const Match& before, int32_t token, const Last& last) const {
    const int64_t next = before.position + 1;
    if (before.position != NOWHERE && text[before.position] == token && next < static_cast<int64_t>(text.size())) {
      return {next, before.length + 1};
    }
    return match(last);
  }

 private:
  struct Entry {
    std::array<int32_t, LONGEST_KEY> ngram{};
    int length = 0;
    int64_t position = NOWHERE;
  };

  // Return the slot of an n-gram, or the slot it would get.
  size_t place_of(const int32_t* ngram, int length) const {
    const size_t last_place = entries_.size() - 1;
    size_t place = hash_of(ngram, length) & last_place;
    while (entries_[place].position != NOWHERE &&
           !(entries_[place].length == length && std::equal(ngram, ngram + length, entries_[place].ngram.begin()))) {
      place = (place + 1) & last_place;
    }
    return place;
  }

  void put(const int32_t* ngram, int length, int64_t position) {
    Entry& entry = entries_[place_of(ngram, length)];
    const bool is_new = entry.position == NOWHERE;
    std::copy(ngram, ngram + length, entry.ngram.begin());
    entry.length = length;
    entry.position = position;
    if (is_new && 2 * ++num_entries_ > entries_.size()) grow();
  }

  void grow() {
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.position != NOWHERE) entries_[place_of(entry.ngram.data(), entry.length)] = entry;
    }
  }

  std::vector<Entry> entries_;
  size_t num_entries_ = 0;
};

using State = std::vector<int8_t>;  // [S]; empty: not known

// Sketches of nodes [N, S] inside their logits: every `step`-th number, rows `row_step` apart.
struct Sketches {
  const float* values;  // null: the nodes have no states
  int64_t row_step, step;
};

// Records of verified nodes: see neighbours.py.
class Neighbours {
 public:
  explicit Neighbours(const Shared& shared) : shared_(shared) {}

  // Compute the states of N nodes.
  void read(const Sketches& sketches, int64_t N) {
    const int64_t S = shared_.num_probes;
    whole_.resize(S);
    states_.resize(N * S);
    for (int64_t node = 0; node < N; ++node) {
      const float* values = sketches.values + node * sketches.row_step;
      int64_t sum = 0;
      for (int64_t i = 0; i < S; ++i) {
        const float value = values[i * sketches.step], most = shared_.largest_logit;
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

}  // namespace

struct CandidatePool {
  Shared shared;
  Rates rates;
  Buckets buckets;
  SuffixIndex index;
  Neighbours neighbours;
  State end;  // state after the text's last token but one
  Growth<CandidatePool, Context> growth;
  std::vector<int32_t> frequent;  // the most frequent first

  explicit CandidatePool(const Shared& shared)
      : shared(shared),
        rates{shared.rates, shared.num_kinds, shared.most_observations},
        buckets{shared.minus_edges, shared.num_buckets},
        index(shared.vocab_size),
        neighbours(this->shared) {
    reload();
  }

  // Rebuild from counts and records that Python has changed.
  void reload() {
    end.clear();
    frequent.clear();
    for (int64_t token = 0; token < shared.vocab_size; ++token) {
      if (shared.counts[token]) rank(token);
    }
  }

  void append(int32_t token) {
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

  Context follow(const Context& before, int32_t token) const {
    Context after = before;
    after.last.push(token);
    after.match = index.follow(before.match, token, after.last);
    after.neighbour = neighbours.find(token, neighbours.after(before.neighbour.number));
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
      for (size_t rank = 0; rank < frequent.size(); ++rank) {
        const int32_t kind = shared.first_frequent + rank;
        guesses.push_back({rates[kind], frequent[rank], kind});
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
      const double expected = probability * rates[kind] / shared.kind_centres[kind];
      guesses.push_back({expected < 1.0 ? expected : 1.0, tokens_[i], kind});
    }
    std::sort(guesses.begin() + first, guesses.end(), std::greater<>());
  }

 private:
  // Move a token to its rank if it is among the most frequent; of equal counts the larger id comes first.
  void rank(int32_t token) {
    const auto comes_before = [this](int32_t a, int32_t b) {
      return shared.counts[a] != shared.counts[b] ? shared.counts[a] > shared.counts[b] : a > b;
    };
    if (std::find(frequent.begin(), frequent.end(), token) == frequent.end()) {
      if (static_cast<int64_t>(frequent.size()) == shared.num_frequent && comes_before(frequent.back(), token)) return;
      frequent.push_back(token);
    }
    std::sort(frequent.begin(), frequent.end(), comes_before);
    if (static_cast<int64_t>(frequent.size()) > shared.num_frequent) frequent.pop_back();
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
  pool->index.clear();
  for (int64_t i = 0; i < count; ++i) pool->index.append(tokens[i]);
}

void pool_append(CandidatePool* pool, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i) pool->append(tokens[i]);
  pool->end.clear();
}

// Write rows for the tokens of a text from `begin` on: token ids and logits [count - begin, k], and sketches.
void pool_write_rows(
    CandidatePool* pool, const int32_t* text, int64_t begin, int64_t count, const int32_t* token_ids, const double* logits,
    const float* sketches, int64_t row_step, int64_t step) {
  const int64_t k = pool->shared.k;
  const int32_t* rows = pool->rows_of(count - begin, token_ids, logits, k);
  for (int64_t i = begin; i < count; ++i) {
    pool->write(text + i + 1, std::min<int64_t>(LONGEST_ROW_KEY, i + 1), rows + (i - begin) * k);
  }
  if (!sketches) return;
  pool->neighbours.read({sketches, row_step, step}, count - begin);
  for (int64_t i = 0; i < count - begin; ++i) pool->record(text[begin + i], i - 1, i, rows + i * k);
  pool->remember_end(count - begin - 1);
}

// Grow a tree at the end of the text: tokens, parents and kinds [N], the root first; return N.
int64_t pool_grow(
    CandidatePool* pool, int32_t root, int64_t num_drafted, int64_t max_depth, int32_t chain_only, int64_t num_costs,
    const int64_t* sizes, const double* milliseconds, double margin, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  const Last last = pool->index.end(LONGEST_KEY);
  const int8_t* state = pool->end.empty() ? nullptr : pool->end.data();
  const Neighbour neighbour = pool->neighbours.find(*(last.from_end(1)), state);
  const Context context{last, pool->index.match_end(), neighbour};
  const CostCurve costs{num_costs, sizes, milliseconds, margin};
  const int64_t N = pool->growth.grow(*pool, root, context, num_drafted, max_depth, chain_only, costs);
  pool->growth.put_in_order(N, tokens, parents, kinds);
  return N;
}

// Learn from the last tree of N nodes: tokens and parents [N], the accepted path and its emitted tokens, the
// likeliest `width` tokens after every node with their logits [N, width], and sketches.
void pool_learn(
    CandidatePool* pool, int64_t N, const int32_t* tokens, const int32_t* parents, const int64_t* path, int64_t path_length,
    const int32_t* emitted, int64_t num_emitted, const int32_t* token_ids, const double* logits, int64_t width,
    const float* sketches, int64_t row_step, int64_t step) {
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
  if (sketches) {
    pool->neighbours.read({sketches, row_step, step}, N);
    for (int64_t node = 0; node < N; ++node) pool->record(tokens[node], parents[node], node, rows + node * k);
  }
  pool_append(pool, emitted, num_emitted);
  if (sketches) pool->remember_end(path[path_length - 1]);
}

}  // extern "C"
