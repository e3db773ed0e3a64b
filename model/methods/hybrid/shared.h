// What the candidate pool shares with Python, which owns the arrays.
//
// Shapes: k tokens in a row, S logit samples, E records of nodes, V vocabulary.

#pragma once

#include <cstdint>

// Settings and arrays.
struct Shared {
  int64_t num_slots, k, vocab_size;
  int64_t num_buckets, num_codes, first_of_row;  // of probabilities; of codes; added to a first token's code
  int64_t num_match_weights, num_frequent, first_frequent, first_guided, num_kinds;
  int64_t num_records, num_probes, num_compared, num_steps;  // of similarity
  int64_t state_length;
  double in_text_weight, most_observations, largest_logit, logit_steps;
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
