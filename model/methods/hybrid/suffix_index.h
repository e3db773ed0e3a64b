// The text of the candidate pool, and its earlier places that agree with a context.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "../../budget/best_first.h"

namespace candidates {

using best_first::NOWHERE;

constexpr int LONGEST_KEY = 4;  // of the text's n-grams
constexpr int64_t LONGEST_MATCH = 24;

// Python's hash of a tuple of small numbers.
inline int64_t hash_of(const int32_t* tokens, int count) {
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

}  // namespace candidates
