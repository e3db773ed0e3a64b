// The market of the hybrid: what market.py does, node by node and number by number, in a tenth of the time. After a pass
// over the model nothing is left of a step's objects in the processor's caches, so that Python spends most of a step
// waiting for memory; here a step touches a few arrays.
//
// The arrays of rows, rates and counts are Python's, which saves and loads them; the text and the tree under way are kept
// here.
//
// Shapes: N nodes of a tree, k tokens in a row, V vocabulary.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <queue>
#include <vector>

namespace {

constexpr int LONGEST_ROW_KEY = 3;
constexpr int LONGEST_KEY = 4;  // of the text's n-grams
constexpr int64_t LONGEST_MATCH = 24;
constexpr int64_t NOWHERE = -1;

}  // namespace

// What Python knows and keeps; arrays belong to it.
struct Shared {
  int64_t num_slots, k, vocab_size;
  int64_t num_buckets, num_codes, first_of_row;  // of probabilities; codes in an entry; what the first one's is larger by
  int64_t num_match_weights, num_frequent, first_frequent, num_kinds;
  double in_text_weight, most_observations;
  const double* minus_edges;     // [num_buckets - 1], rising
  const double* row_weights;     // [2 * num_buckets + 2]
  const double* match_weights;   // [num_match_weights]
  const double* kind_centres;    // [first_frequent]
  int64_t* keys;                 // [num_slots]
  int32_t* rows;                 // [num_slots, k]
  double* rates;                 // [2, num_kinds]: rates, and the weights they rest on
  int32_t* counts;               // [V], of tokens written
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

// Up to LONGEST_KEY tokens, the newest last.
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

// An earlier place in the text: the token that followed there, and how many before it agree.
struct Match {
  int64_t position = NOWHERE, length = 0;
};

// What a node's guesses depend on.
struct Context {
  Last last;
  Match match;
};

// The text, and where each n-gram of it was last.
class SuffixIndex {
 public:
  std::vector<int32_t> text;
  std::vector<char> is_in_text;  // by token

  explicit SuffixIndex(int64_t vocab_size) : is_in_text(vocab_size) { clear(); }

  void clear() {
    for (const int32_t token : text) is_in_text[token] = false;
    text.clear();
    entries_.assign(1024, Entry{});
    num_entries_ = 0;
  }

  // An n-gram is known when its continuation exists, so that no end of the text finds itself.
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

  // Where an n-gram is, or would be.
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

struct Guess {
  double probability;
  int32_t token, kind;

  bool operator>(const Guess& other) const {
    if (probability != other.probability) return probability > other.probability;
    if (token != other.token) return token > other.token;
    return kind > other.kind;
  }
};

struct Node {
  int32_t token, parent, kind, depth;
  bool has_context;
  Context context;
};

// A node that waits in the heap for its guesses, or for the next of them to become its child.
struct Waiting {
  double negative;  // minus the probability that the child is accepted; without guesses, that the node is
  int64_t number;
  int32_t parent;
  double reached;
  int64_t first_guess, num_guesses;  // NOWHERE: not asked for yet

  bool operator<(const Waiting& other) const {  // of a heap's top: comes later
    return negative != other.negative ? negative > other.negative : number > other.number;
  }
};

// Milliseconds of a step with so many nodes, rising; none: all nodes are drawn.
struct Prices {
  int64_t count;
  const int64_t* sizes;
  const double* milliseconds;
  double margin;
};

}  // namespace

struct Market {
  Shared shared;
  SuffixIndex index;
  std::vector<int32_t> frequent;  // the most frequent first
  std::vector<Node> nodes;        // in the order of growth
  std::vector<int32_t> order;     // of each node of the tree, its number there

  explicit Market(const Shared& shared) : shared(shared), index(shared.vocab_size) { reload(); }

  // Take over counts that Python has changed.
  void reload() {
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

  // Write a row of k tokens, after `count` tokens that end at `last`, under all lengths of key.
  void write(const int32_t* last, int count, const int32_t* tokens, const double* logits) {
    const int64_t k = shared.k;
    double total = 0.0;
    weights_.clear();
    for (int64_t i = 0; i < k; ++i) {
      weights_.push_back(std::exp(logits[i] - logits[0]));
      total += weights_.back();
    }
    row_.clear();
    for (int64_t i = 0; i < k; ++i) {
      row_.push_back(tokens[i] * shared.num_codes + 1 + bucket_of(weights_[i] / -total));
    }
    row_[0] += shared.first_of_row;
    for (int length = 1; length <= count; ++length) {
      const int64_t key = hash_of(last - length, length), slot = key & (shared.num_slots - 1);
      shared.keys[slot] = key;
      std::copy_n(row_.data(), k, shared.rows + slot * k);
    }
  }

  // Grow the tree; return how many nodes are drafted.
  int64_t grow(int32_t root, int64_t num_nodes, int64_t max_depth, bool chain_only, const Prices& prices) {
    nodes.clear();
    guesses_.clear();
    heap_ = {};
    next_number_ = 0;
    nodes.push_back({root, -1, 0, 0, true, {index.end(LONGEST_KEY), index.match_end()}});
    if (max_depth > 0) wait(-1.0, 0, 1.0, NOWHERE, 0);
    num_nodes_ = num_nodes;
    max_depth_ = max_depth;
    chain_only_ = chain_only;
    if (prices.count) return worth(prices);
    int64_t drawn = 0;
    while (next() >= 0.0) ++drawn;
    return drawn;
  }

  // Say of every guess after an accepted node, drafted or only considered, if it came true.
  void teach(const int64_t* path, const int32_t* tokens, int64_t count) {
    std::vector<int32_t> following(nodes.size(), -1);
    for (int64_t i = 0; i < count; ++i) following[order[path[i]]] = tokens[i];
    for (size_t node = 1; node < nodes.size(); ++node) {
      const int32_t token = following[nodes[node].parent];
      if (token < 0) continue;
      const int64_t kind = nodes[node].kind;
      double& weight = shared.rates[shared.num_kinds + kind];
      weight = std::min(weight + 1.0, shared.most_observations);
      const double came_true = token == nodes[node].token;
      shared.rates[kind] += (came_true - shared.rates[kind]) / weight;
    }
  }

 private:
  int64_t bucket_of(double minus_probability) const {
    const double* begin = shared.minus_edges;
    return std::lower_bound(begin, begin + shared.num_buckets - 1, minus_probability) - begin;
  }

  // Put a token where its count says, if it is among the most frequent; of equal counts the larger id comes first.
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

  void wait(double negative, int32_t parent, double reached, int64_t first_guess, int64_t num_guesses) {
    heap_.push({negative, next_number_++, parent, reached, first_guess, num_guesses});
  }

  // Add the next node; return the probability that it is accepted, -1 if there is none.
  double next() {
    while (!heap_.empty() && num_nodes_ > 0) {
      const Waiting top = heap_.top();
      heap_.pop();
      if (top.first_guess == NOWHERE) {
        const int64_t first = guesses_.size();
        guess(context_of(top.parent));
        const int64_t count = guesses_.size() - first;
        if (count) wait(-top.reached * guesses_[first].probability, top.parent, top.reached, first, count);
        continue;
      }
      const Guess chosen = guesses_[top.first_guess];
      const int32_t node = nodes.size(), depth = nodes[top.parent].depth + 1;
      nodes.push_back({chosen.token, top.parent, chosen.kind, depth, false, {}});
      if (top.num_guesses > 1 && !chain_only_) {
        const double probability = top.reached * guesses_[top.first_guess + 1].probability;
        wait(-probability, top.parent, top.reached, top.first_guess + 1, top.num_guesses - 1);
      }
      if (depth < max_depth_) wait(top.negative, node, -top.negative, NOWHERE, 0);
      --num_nodes_;
      return -top.negative;
    }
    return -1.0;
  }

  // As `Prices.worth` in model/prices.py.
  int64_t worth(const Prices& prices) {
    double tokens = 1.0, gain = 1.0, best_rate = prices.margin / prices.milliseconds[0];
    int64_t num_read = 0, best = 0;
    bool is_over = false;
    for (int64_t i = 1; i < prices.count; ++i) {
      while (num_read < prices.sizes[i] - 1) {
        gain = next();
        if (gain < 0.0) {
          is_over = true;
          break;
        }
        tokens += gain;
        ++num_read;
      }
      const double rate = tokens / prices.milliseconds[i];
      if (rate > best_rate) {
        best_rate = rate * prices.margin;
        best = num_read;
      }
      bool is_hopeless = true;
      for (int64_t larger = i + 1; larger < prices.count && is_hopeless; ++larger) {
        const double more = (prices.sizes[larger] - prices.sizes[i]) * gain;
        is_hopeless = tokens + more <= best_rate * prices.milliseconds[larger];
      }
      if (is_over || is_hopeless) break;
    }
    return best;
  }

  const Context& context_of(int32_t number) {
    Node& node = nodes[number];
    if (!node.has_context) {
      node.context = context_of(node.parent);
      node.context.last.push(node.token);
      node.context.match = index.follow(node.context.match, node.token, node.context.last);
      node.has_context = true;
    }
    return node.context;
  }

  // Pool what the sources say about the token after a context; the guesses go behind `guesses_`, the likeliest first.
  void guess(const Context& context) {
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
    int32_t matching = -1;
    int64_t kind_of_match = 0;
    if (context.match.position != NOWHERE) {
      matching = index.text[context.match.position];
      const int64_t step = std::min(context.match.length, shared.num_match_weights - 1);
      const bool is_known = std::find(tokens_.begin(), tokens_.end(), matching) != tokens_.end();
      kind_of_match = shared.num_buckets * (is_known ? 2 : 1);
      weight_of(matching) *= shared.match_weights[step];
    }
    const size_t first = guesses_.size();
    if (tokens_.empty()) {
      for (size_t rank = 0; rank < frequent.size(); ++rank) {
        const int32_t kind = shared.first_frequent + rank;
        guesses_.push_back({shared.rates[kind], frequent[rank], kind});
      }
    }
    double total = 1.0;  // "none of these"
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (index.is_in_text[tokens_[i]]) weights_[i] *= shared.in_text_weight;
      total += weights_[i];
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const double probability = weights_[i] / total;
      int64_t kind = bucket_of(-probability);
      if (tokens_[i] == matching) kind += kind_of_match;
      const double expected = probability * shared.rates[kind] / shared.kind_centres[kind];
      guesses_.push_back({expected < 1.0 ? expected : 1.0, tokens_[i], static_cast<int32_t>(kind)});
    }
    std::sort(guesses_.begin() + first, guesses_.end(), std::greater<>());
  }

  std::priority_queue<Waiting> heap_;
  std::vector<Guess> guesses_;  // of all nodes that were asked
  std::vector<int32_t> tokens_;  // bid for at a node, and their weights
  std::vector<double> weights_;
  std::vector<int32_t> row_;
  int64_t next_number_ = 0, num_nodes_ = 0, max_depth_ = 0;
  bool chain_only_ = false;
};

extern "C" {

Market* market_new(const Shared* shared) { return new Market(*shared); }

void market_free(Market* market) { delete market; }

void market_reload(Market* market) { market->reload(); }

void market_start(Market* market, const int32_t* tokens, int64_t count) {
  market->index.clear();
  for (int64_t i = 0; i < count; ++i) market->index.append(tokens[i]);
}

void market_append(Market* market, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i) market->append(tokens[i]);
}

// Rows after the tokens of a text from `begin` on: token ids and logits [count - begin, k].
void market_write_rows(
    Market* market, const int32_t* text, int64_t begin, int64_t count, const int32_t* token_ids, const double* logits) {
  for (int64_t end = begin + 1; end <= count; ++end, token_ids += market->shared.k, logits += market->shared.k) {
    market->write(text + end, std::min<int64_t>(LONGEST_ROW_KEY, end), token_ids, logits);
  }
}

// Grow a tree, and put it in order depth first: tokens, parents and kinds [N], the root first; returns N.
int64_t market_grow(
    Market* market, int32_t root, int64_t num_nodes, int64_t max_depth, int32_t chain_only, int64_t num_prices,
    const int64_t* sizes, const double* milliseconds, double margin, int32_t* tokens, int32_t* parents, int32_t* kinds) {
  const int64_t N = 1 + market->grow(root, num_nodes, max_depth, chain_only, {num_prices, sizes, milliseconds, margin});
  const auto& nodes = market->nodes;
  auto& order = market->order;
  order.clear();
  const auto place = [&](int32_t node, int32_t parent, const auto& place_rest) -> void {
    const int32_t own = order.size();
    order.push_back(node);
    tokens[own] = nodes[node].token;
    parents[own] = parent;
    kinds[own] = nodes[node].kind;
    for (int32_t child = node + 1; child < N; ++child) {
      if (nodes[child].parent == node) place_rest(child, own, place_rest);
    }
  };
  place(0, -1, place);
  return N;
}

// Learn from the last tree, N nodes: tokens and parents [N], the accepted path and the tokens that came along it, and
// the likeliest `width` tokens after every node with their logits [N, width].
void market_learn(
    Market* market, int64_t N, const int32_t* tokens, const int32_t* parents, const int64_t* path, int64_t path_length,
    const int32_t* emitted, int64_t num_emitted, const int32_t* token_ids, const double* logits, int64_t width) {
  market->teach(path, emitted, std::min(path_length, num_emitted));
  std::vector<Last> contexts(N);
  contexts[0] = market->index.end(LONGEST_ROW_KEY);
  for (int64_t node = 1; node < N; ++node) {
    contexts[node] = contexts[parents[node]];
    contexts[node].push(tokens[node]);
  }
  const auto write = [&](int64_t node) {
    const Last& last = contexts[node];
    const int count = std::min(LONGEST_ROW_KEY, last.count);
    market->write(last.from_end(0), count, token_ids + node * width, logits + node * width);
  };
  // Of equal contexts the last written wins: the accepted nodes, and of others the deeper one.
  std::vector<int64_t> others;
  for (int64_t node = 0; node < N; ++node) {
    if (std::find(path, path + path_length, node) == path + path_length) others.push_back(node);
  }
  const auto depth_of = [&](int64_t node) { return market->nodes[market->order[node]].depth; };
  std::stable_sort(others.begin(), others.end(), [&](int64_t a, int64_t b) { return depth_of(a) < depth_of(b); });
  for (const int64_t node : others) write(node);
  for (int64_t i = 0; i < path_length; ++i) write(path[i]);
  market_append(market, emitted, num_emitted);
}

}  // extern "C"
