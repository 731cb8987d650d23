// Softmax attention of query rows over the pages of a sequence, softmax(q k^T / sqrt(N)) v, sums in float32.
//
// A page holds PAGE tokens of one layer: keys [K, N / terms, PAGE, terms], values [K, PAGE / terms, N, terms], where
// `terms` is what one product takes (1 float32, 2 bfloat16) and N is padded to whole vectors. A row's sums go over its
// own tokens in ascending order. Rows are computed together only to share loads: the bits of each are those it has
// alone, and what it must not see is never multiplied, not even by zero.

#pragma once
#include <vector>

#include "lanes.hpp"

namespace funrl {

constexpr int PAGE = 16, QUERY_ROWS = 8, MOST_TOGETHER = 4;

// Keys and values of one layer and key-value head, and the pages of one sequence.
template <class T> struct Pages {
  const T *keys, *values;  // of page 0
  int64_t stride;          // numbers from a page to the next
  const int32_t* table;
  int head;  // padded head size
  const T* ahead[MOST_TOGETHER];  // pages of keys that are wanted after these

  const T* key_page(int64_t page) const { return keys + table[page] * stride; }
  const T* value_page(int64_t page) const { return values + table[page] * stride; }
};

struct QueryRow {
  const void* query;
  void* out;
  int64_t first, end;  // tokens that it sees
};

template <class T> struct AttentionScratch {
  std::vector<float> scores;     // [rows, slots]
  std::vector<T> probabilities;  // [rows, slots], not divided by their sum
  std::vector<float> outputs;    // [rows, head]
  void reserve(int64_t slots, int64_t head) {
    if ((int64_t)scores.size() < QUERY_ROWS * slots) scores.resize(QUERY_ROWS * slots);
    if ((int64_t)probabilities.size() < QUERY_ROWS * slots) probabilities.resize(QUERY_ROWS * slots);
    if ((int64_t)outputs.size() < QUERY_ROWS * head) outputs.resize(QUERY_ROWS * head);
  }
};

// scores[ROWS, TOGETHER * PAGE] = q k^T of some pages; TOGETHER is more than one only so that sums need not wait for one
// another. Behind the last page it is repeated. These pages' values and the next ones' keys are fetched meanwhile.
template <class T, int ROWS, int TOGETHER>
void score_pages(const Pages<T>& pages, int64_t page, int64_t page_end, const QueryRow* rows, float* scores,
                 int64_t stride) {
  using P = Product<T>;
  Lanes sum[TOGETHER][ROWS];
  const T *keys[TOGETHER], *next_keys[TOGETHER], *values[TOGETHER], *query[ROWS];
  UNROLL for (int i = 0; i < TOGETHER; i++) {
    const int64_t here = page + i < page_end ? page + i : page_end - 1;
    keys[i] = pages.key_page(here), values[i] = pages.value_page(here);
    next_keys[i] = here + TOGETHER < page_end ? pages.key_page(here + TOGETHER) : pages.ahead[i];
  }
  UNROLL for (int r = 0; r < ROWS; r++) query[r] = (const T*)rows[r].query;
  UNROLL for (int i = 0; i < TOGETHER; i++)
    UNROLL for (int r = 0; r < ROWS; r++) sum[i][r] = zeros();
  for (int n = 0; n < pages.head; n += P::terms) {
    typename P::Weights key[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; i++) {
      key[i] = P::weights(keys[i] + n * PAGE);
      __builtin_prefetch(next_keys[i] + n * PAGE), __builtin_prefetch(values[i] + n * PAGE, 0, 2);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename P::Factor factor = P::factor(query[r] + n);
      UNROLL for (int i = 0; i < TOGETHER; i++) sum[i][r] = P::add(sum[i][r], key[i], factor);
    }
  }
  UNROLL for (int i = 0; i < TOGETHER; i++)
    UNROLL for (int r = 0; r < ROWS; r++) store(scores + r * stride + i * PAGE, sum[i][r]);
}

// One row's scores of slots 0 .. slots - 1, the first of which is token `base`, to probabilities times their sum.
template <class T>
float exponentials(float* scores, T* probabilities, int64_t slots, int64_t base, const QueryRow& row, float scale) {
  const Lanes never = splat(-INFINITY);
  Lanes top = never, sum = zeros();
  for (int64_t s = 0; s < slots; s += PAGE) {
    const int64_t low = row.first - base - s, high = row.end - base - s;
    Lanes score = load(scores + s) * splat(scale);
    if (low > 0 || high < PAGE) score = where_within(score, low, high, never);
    store(scores + s, score);
    top = larger(score, top);
  }
  const Lanes largest = splat(largest_of(top));
  for (int64_t s = 0; s < slots; s += PAGE) {
    const Lanes e = exponential(load(scores + s) - largest);  // 0 in the lanes that are not seen
    store(probabilities + s, e);
    sum = sum + e;
  }
  return sum_of(sum);
}

// out[ROWS, lanes] += probabilities of tokens first .. end - 1 times their values; a token of bfloat16's pairs that
// stands outside of these is cleared.
template <class T, int ROWS, int VECTORS>
void add_values(const Pages<T>& pages, int64_t base, int64_t first, int64_t end, const T* probabilities, int64_t stride,
                int n, float* const* out) {
  using P = Product<T>;
  Lanes sum[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++) sum[r][j] = load(out[r] + n + j * LANES);
  for (int64_t token = first / P::terms * P::terms; token < end; token += P::terms) {
    const T* from = pages.value_page(token / PAGE) + (token % PAGE * pages.head + n * P::terms);
    typename P::Weights value[VECTORS];
    UNROLL for (int j = 0; j < VECTORS; j++) {
      value[j] = P::weights(from + j * LANES * P::terms);
      if constexpr (P::terms == 2) {
        if (token < first) EACH_PART value[j].part[i] &= (int32_t)0xffff0000;
        if (token + 1 == end) EACH_PART value[j].part[i] &= 0xffff;
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename P::Factor factor = P::factor(probabilities + r * stride + token - base);
      UNROLL for (int j = 0; j < VECTORS; j++) sum[r][j] = P::add(sum[r][j], value[j], factor);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++) store(out[r] + n + j * LANES, sum[r][j]);
}

template <class T, int ROWS>
void add_all_values(const Pages<T>& pages, int64_t base, int64_t first, int64_t end, const T* probabilities,
                    int64_t stride, float* const* out) {
  constexpr int VECTORS = ROWS * 4 <= 24 && PARTS == 1 ? 4 : 2;  // sums that fit the registers
  if (first >= end) return;
  int n = 0;
  for (; n + VECTORS * LANES <= pages.head; n += VECTORS * LANES)
    add_values<T, ROWS, VECTORS>(pages, base, first, end, probabilities, stride, n, out);
  for (; n < pages.head; n += LANES)
    add_values<T, ROWS, 1>(pages, base, first, end, probabilities, stride, n, out);
}

// Attention of ROWS query rows of one sequence and key-value head.
template <class T, int ROWS>
void attend_rows(const Pages<T>& pages, const QueryRow* rows, float scale, AttentionScratch<T>& scratch) {
  int64_t first = rows[0].first, end = rows[0].end, last_first = first, first_end = end;
  for (int r = 1; r < ROWS; r++) {
    first = rows[r].first < first ? rows[r].first : first, end = rows[r].end > end ? rows[r].end : end;
    last_first = rows[r].first > last_first ? rows[r].first : last_first;
    first_end = rows[r].end < first_end ? rows[r].end : first_end;
  }
  const int64_t page = first / PAGE, page_end = (end + PAGE - 1) / PAGE, base = page * PAGE;
  const int64_t slots = (page_end - page) * PAGE;
  constexpr int TOGETHER = ROWS <= 2 ? MOST_TOGETHER : ROWS <= 4 ? 2 : 1;
  const int64_t stride = (slots + TOGETHER * PAGE - 1) / (TOGETHER * PAGE) * (TOGETHER * PAGE);  // of a row's numbers
  scratch.reserve(stride, pages.head);
  float *scores = scratch.scores.data(), *out[ROWS], sum[ROWS];
  T* probabilities = scratch.probabilities.data();

  for (int64_t i = page; i < page_end; i += TOGETHER)
    score_pages<T, ROWS, TOGETHER>(pages, i, page_end, rows, scores + i * PAGE - base, stride);

  // What all rows see is added for all of them together, what only some see row by row, before it and after it.
  constexpr int terms = Product<T>::terms;
  const int64_t shared = first == last_first ? first : (last_first + terms - 1) / terms * terms;
  const int64_t shared_end = first_end == end ? end : first_end / terms * terms;
  const bool some_shared = shared < shared_end;
  for (int r = 0; r < ROWS; r++) {
    sum[r] = exponentials(scores + r * stride, probabilities + r * stride, slots, base, rows[r], scale);
    out[r] = scratch.outputs.data() + r * pages.head;
    memset(out[r], 0, pages.head * sizeof(float));
    const int64_t until = some_shared ? shared : rows[r].end;
    add_all_values<T, 1>(pages, base, rows[r].first, until, probabilities + r * stride, stride, out + r);
  }
  if (some_shared) {
    add_all_values<T, ROWS>(pages, base, shared, shared_end, probabilities, stride, out);
    for (int r = 0; r < ROWS; r++)
      add_all_values<T, 1>(pages, base, shared_end, rows[r].end, probabilities + r * stride, stride, out + r);
  }
  for (int r = 0; r < ROWS; r++)
    for (int n = 0; n < pages.head; n += LANES)
      store((T*)rows[r].out + n, load(out[r] + n) / splat(sum[r]));
}

// Attention of up to QUERY_ROWS rows. The last one is computed twice where no function has just as many rows.
template <class T>
void attend(const Pages<T>& pages, QueryRow* rows, int count, float scale, AttentionScratch<T>& scratch) {
  if (count == 5 || count == 7) rows[count] = rows[count - 1], count++;
  switch (count) {
    case 1: return attend_rows<T, 1>(pages, rows, scale, scratch);
    case 2: return attend_rows<T, 2>(pages, rows, scale, scratch);
    case 3: return attend_rows<T, 3>(pages, rows, scale, scratch);
    case 4: return attend_rows<T, 4>(pages, rows, scale, scratch);
    case 6: return attend_rows<T, 6>(pages, rows, scale, scratch);
    default: return attend_rows<T, 8>(pages, rows, scale, scratch);
  }
}

// Writes the key and the value [N] of one token.
template <class T>
void write_token(T* key_page, T* value_page, int slot, int head, const float* key, const float* value) {
  constexpr int terms = Product<T>::terms;
  for (int n = 0; n < head; n++) {
    key_page[(n / terms * PAGE + slot) * terms + n % terms] = narrow<T>(key[n]);
    value_page[(slot / terms * head + n) * terms + slot % terms] = narrow<T>(value[n]);
  }
}

}  // namespace funrl
