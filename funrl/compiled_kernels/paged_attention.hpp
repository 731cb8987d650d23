// Softmax attention of query rows over the pages of a sequence, softmax(scale q k^T) v, sums in float32 or float64.
//
// A page holds PAGE tokens of one layer: keys [K, N / terms, PAGE, terms], values [K, PAGE / terms, N, terms], where
// `terms` is what one product takes (2 bfloat16, else 1) and N is padded to whole vectors. A row's sums go over its
// own tokens in ascending order. Rows are computed together only to share loads: the bits of each are those it has
// alone, and what it must not see is never multiplied, not even by zero.

#pragma once
#include <algorithm>
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
  int64_t first, end;   // tokens that it sees
  void* lse = nullptr;  // receives the logarithm of the sum of the exponentials, where it is wanted
};

// What is done to q k^T before the softmax.
template <class T> struct Logits {
  Real<T> scale, cap;  // a cap of 0: there is none
};

template <class T> struct AttentionScratch {
  std::vector<Real<T>> scores;   // [rows, slots]
  std::vector<T> probabilities;  // [rows, slots], not divided by their sum
  std::vector<Real<T>> outputs;  // [rows, head]
  void reserve(int64_t slots, int64_t head) {
    if ((int64_t)scores.size() < QUERY_ROWS * slots) scores.resize(QUERY_ROWS * slots);
    if ((int64_t)probabilities.size() < QUERY_ROWS * slots) probabilities.resize(QUERY_ROWS * slots);
    if ((int64_t)outputs.size() < QUERY_ROWS * head) outputs.resize(QUERY_ROWS * head);
  }
};

// Registers of the scores of a page.
template <class T> constexpr int PAGE_SUMS = PAGE / Product<T>::width;
// Pages that are scored together for some rows, so that sums need not wait for one another.
template <class T> constexpr int pages_together(int rows) {
  int pages = MOST_TOGETHER;
  while (pages > 1 && rows * pages * PAGE_SUMS<T> > (WIDE_TILES<T> ? 16 : 8)) pages /= 2;
  return pages;
}

// scores[ROWS, TOGETHER * PAGE] = q k^T of some pages. Behind the last page it is repeated. These pages' values and the
// next ones' keys are fetched meanwhile.
template <class T, int ROWS, int TOGETHER>
void score_pages(const Pages<T>& pages, int64_t page, int64_t page_end, const QueryRow* rows, Real<T>* scores,
                 int64_t stride) {
  using P = Product<T>;
  constexpr int SUMS = TOGETHER > 1 ? PAGE_SUMS<T> : std::min(PAGE_SUMS<T>, tile_registers<T>(ROWS));
  const T *keys[TOGETHER], *next_keys[TOGETHER], *values[TOGETHER], *query[ROWS];
  UNROLL for (int i = 0; i < TOGETHER; i++) {
    const int64_t here = page + i < page_end ? page + i : page_end - 1;
    keys[i] = pages.key_page(here), values[i] = pages.value_page(here);
    next_keys[i] = here + TOGETHER < page_end ? pages.key_page(here + TOGETHER) : pages.ahead[i];
  }
  UNROLL for (int r = 0; r < ROWS; r++) query[r] = (const T*)rows[r].query;
  for (int slot = 0; slot < PAGE; slot += SUMS * P::width) {
    typename P::Sum sum[TOGETHER][ROWS][SUMS];
    UNROLL for (int i = 0; i < TOGETHER; i++)
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int j = 0; j < SUMS; j++) sum[i][r][j] = typename P::Sum{};
    for (int n = 0; n < pages.head; n += P::terms) {
      typename P::Weights key[TOGETHER][SUMS];
      UNROLL for (int i = 0; i < TOGETHER; i++) {
        UNROLL for (int j = 0; j < SUMS; j++)
          key[i][j] = P::weights(keys[i] + n * PAGE + (slot + j * P::width) * P::terms);
        if (slot == 0) __builtin_prefetch(next_keys[i] + n * PAGE), __builtin_prefetch(values[i] + n * PAGE, 0, 2);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        typename P::Factor factor = P::factor(query[r] + n);
        UNROLL for (int i = 0; i < TOGETHER; i++)
          UNROLL for (int j = 0; j < SUMS; j++) sum[i][r][j] = P::add(sum[i][r][j], key[i][j], factor);
      }
    }
    UNROLL for (int i = 0; i < TOGETHER; i++)
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int j = 0; j < SUMS; j++)
          native_store(scores + r * stride + i * PAGE + slot + j * P::width, (Native)sum[i][r][j]);
  }
}

// One row's scores of slots 0 .. slots - 1, the first of which is token `base`, to probabilities times their sum.
template <class T>
Real<T> exponentials(Real<T>* scores, T* probabilities, int64_t slots, int64_t base, const QueryRow& row,
                     Logits<T> logits) {
  using R = Real<T>;
  const Vector<T> never = splat((R)-INFINITY);
  Vector<T> top = never, sum = zeros<R>();
  for (int64_t s = 0; s < slots; s += PAGE) {
    const int64_t low = row.first - base - s, high = row.end - base - s;
    Vector<T> score = load(scores + s) * splat(logits.scale);
    if (logits.cap) score = hyperbolic_tangent(score / splat(logits.cap)) * splat(logits.cap);
    if (low > 0 || high < PAGE) score = where_within(score, low, high, never);
    store(scores + s, score);
    top = larger(score, top);
  }
  const R most = largest_of(top);
  const Vector<T> largest = splat(most);
  for (int64_t s = 0; s < slots; s += PAGE) {
    const Vector<T> e = exponential(load(scores + s) - largest);  // 0 in the lanes that are not seen
    store(probabilities + s, e);
    sum = sum + e;
  }
  const R total = sum_of(sum);
  if (row.lse) *(R*)row.lse = most + std::log(total);
  return total;
}

// out[ROWS, SUMS registers] += probabilities of tokens first .. end - 1 times their values; a token of bfloat16's pairs that
// stands outside of these is cleared.
template <class T, int ROWS, int SUMS>
void add_values(const Pages<T>& pages, int64_t base, int64_t first, int64_t end, const T* probabilities, int64_t stride,
                int n, Real<T>* const* out) {
  using P = Product<T>;
  typename P::Sum sum[ROWS][SUMS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < SUMS; j++) sum[r][j] = (typename P::Sum)native_load(out[r] + n + j * P::width);
  for (int64_t token = first / P::terms * P::terms; token < end; token += P::terms) {
    const T* from = pages.value_page(token / PAGE) + (token % PAGE * pages.head + n * P::terms);
    typename P::Weights value[SUMS];
    UNROLL for (int j = 0; j < SUMS; j++) {
      value[j] = P::weights(from + j * P::width * P::terms);
      if constexpr (P::terms == 2) {
        if (token < first) value[j] &= (int32_t)0xffff0000;
        if (token + 1 == end) value[j] &= 0xffff;
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename P::Factor factor = P::factor(probabilities + r * stride + token - base);
      UNROLL for (int j = 0; j < SUMS; j++) sum[r][j] = P::add(sum[r][j], value[j], factor);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < SUMS; j++) native_store(out[r] + n + j * P::width, (Native)sum[r][j]);
}

template <class T, int ROWS>
void add_all_values(const Pages<T>& pages, int64_t base, int64_t first, int64_t end, const T* probabilities,
                    int64_t stride, Real<T>* const* out) {
  constexpr int SUMS = tile_registers<T>(ROWS), REST = std::min(SUMS, PAGE_SUMS<T>), WIDTH = Product<T>::width;
  if (first >= end) return;
  int n = 0;
  for (; n + SUMS * WIDTH <= pages.head; n += SUMS * WIDTH)
    add_values<T, ROWS, SUMS>(pages, base, first, end, probabilities, stride, n, out);
  for (; n < pages.head; n += REST * WIDTH)
    add_values<T, ROWS, REST>(pages, base, first, end, probabilities, stride, n, out);
}

// Rows of some that fit a tile: all, or with fewer registers half of 8.
template <class T> constexpr int share_of(int rows) { return tile_registers<T>(rows) > 1 ? rows : rows / 2; }

// Attention of ROWS query rows of one sequence and key-value head.
template <class T, int ROWS>
void attend_rows(const Pages<T>& pages, const QueryRow* rows, Logits<T> logits, AttentionScratch<T>& scratch) {
  int64_t first = rows[0].first, end = rows[0].end, last_first = first, first_end = end;
  for (int r = 1; r < ROWS; r++) {
    first = rows[r].first < first ? rows[r].first : first, end = rows[r].end > end ? rows[r].end : end;
    last_first = rows[r].first > last_first ? rows[r].first : last_first;
    first_end = rows[r].end < first_end ? rows[r].end : first_end;
  }
  const int64_t page = first / PAGE, page_end = (end + PAGE - 1) / PAGE, base = page * PAGE;
  const int64_t slots = (page_end - page) * PAGE;
  constexpr int SHARE = share_of<T>(ROWS), TOGETHER = pages_together<T>(SHARE);
  const int64_t stride = (slots + TOGETHER * PAGE - 1) / (TOGETHER * PAGE) * (TOGETHER * PAGE);  // of a row's numbers
  scratch.reserve(stride, pages.head);
  Real<T> *scores = scratch.scores.data(), *out[ROWS], sum[ROWS];
  T* probabilities = scratch.probabilities.data();

  for (int64_t i = page; i < page_end; i += TOGETHER)
    for (int r = 0; r < ROWS; r += SHARE)
      score_pages<T, SHARE, TOGETHER>(pages, i, page_end, rows + r, scores + r * stride + i * PAGE - base, stride);

  // What all rows see is added for all of them together, what only some see row by row, before it and after it.
  constexpr int terms = Product<T>::terms;
  const int64_t shared = first == last_first ? first : (last_first + terms - 1) / terms * terms;
  const int64_t shared_end = first_end == end ? end : first_end / terms * terms;
  const bool some_shared = shared < shared_end;
  for (int r = 0; r < ROWS; r++) {
    sum[r] = exponentials(scores + r * stride, probabilities + r * stride, slots, base, rows[r], logits);
    out[r] = scratch.outputs.data() + r * pages.head;
    memset(out[r], 0, pages.head * sizeof(Real<T>));
    const int64_t until = some_shared ? shared : rows[r].end;
    add_all_values<T, 1>(pages, base, rows[r].first, until, probabilities + r * stride, stride, out + r);
  }
  if (some_shared) {
    for (int r = 0; r < ROWS; r += SHARE)
      add_all_values<T, SHARE>(pages, base, shared, shared_end, probabilities + r * stride, stride, out + r);
    for (int r = 0; r < ROWS; r++)
      add_all_values<T, 1>(pages, base, shared_end, rows[r].end, probabilities + r * stride, stride, out + r);
  }
  for (int r = 0; r < ROWS; r++)
    for (int n = 0; n < pages.head; n += LANES)
      store((T*)rows[r].out + n, load(out[r] + n) / splat(sum[r]));
}

// Attention of up to QUERY_ROWS rows. The last one is computed twice where no function has just as many rows.
template <class T>
void attend(const Pages<T>& pages, QueryRow* rows, int count, Logits<T> logits, AttentionScratch<T>& scratch) {
  if (count == 5 || count == 7) rows[count] = rows[count - 1], count++;
  switch (count) {
    case 1: return attend_rows<T, 1>(pages, rows, logits, scratch);
    case 2: return attend_rows<T, 2>(pages, rows, logits, scratch);
    case 3: return attend_rows<T, 3>(pages, rows, logits, scratch);
    case 4: return attend_rows<T, 4>(pages, rows, logits, scratch);
    case 6: return attend_rows<T, 6>(pages, rows, logits, scratch);
    default: return attend_rows<T, 8>(pages, rows, logits, scratch);
  }
}

// Writes the key and the value [N] of one token.
template <class T>
void write_token(T* key_page, T* value_page, int slot, int head, const Real<T>* key, const Real<T>* value) {
  constexpr int terms = Product<T>::terms;
  for (int n = 0; n < head; n++) {
    key_page[(n / terms * PAGE + slot) * terms + n % terms] = narrow<T>(key[n]);
    value_page[(slot / terms * head + n) * terms + slot % terms] = narrow<T>(value[n]);
  }
}

// The same from numbers that are stored as they will be; the rest of the pages' heads is 0 already.
template <class T> void copy_token(T* key_page, T* value_page, int slot, int head, int64_t size, const T* key, const T* value) {
  if constexpr (Product<T>::terms == 1) {
    for (int64_t n = 0; n < size; n++) key_page[n * PAGE + slot] = key[n];
    memcpy(value_page + slot * head, value, size * sizeof(T));
  } else {
    for (int64_t n = 0; n + 1 < size; n += 2) memcpy(key_page + (n / 2 * PAGE + slot) * 2, key + n, 2 * sizeof(T));
    if (size % 2) key_page[(size / 2 * PAGE + slot) * 2] = key[size - 1];
    T* to = value_page + slot / 2 * head * 2 + slot % 2;
    for (int64_t n = 0; n < size; n++) to[2 * n] = value[n];
  }
}

// Sequences whose queries are their last tokens, and where the keys and values of each token stand.
template <class T> struct Sequences {
  const T *q, *k, *v;  // [tokens, heads, size]; keys and values: [.., kv_heads, size]
  T* out;              // as q
  Real<T>* lse;        // [heads, tokens]; null: it is not wanted
  int64_t tokens, count, heads, kv_heads, size, window;
  const int64_t* offsets;  // [count + 1], of the queries
  const int64_t* ends;     // tokens of each sequence; null: it has as many as queries, and its keys stand with them
  const int64_t* table;    // [count, width]: pages of `page` tokens of each sequence
  int64_t width, page;

  int64_t queries(int64_t s) const { return offsets[s + 1] - offsets[s]; }
  int64_t end(int64_t s) const { return ends ? ends[s] : queries(s); }
  int64_t first_seen(int64_t position) const { return window && position >= window ? position + 1 - window : 0; }
  // Row of a token's key and value.
  int64_t row(int64_t s, int64_t position) const {
    return ends ? table[s * width + position / page] * page + position % page : offsets[s] + position;
  }
};

// Attention of one sequence and key-value head, or of one of some shares of its query rows. Pages are made of its keys and
// values, then read as in a step.
template <class T> struct SequenceScratch {
  AttentionScratch<T> attention;
  std::vector<T> keys, values, query, mixed;
  std::vector<int32_t> table;
};
template <class T>
void attend_sequence(const Sequences<T>& all, int64_t s, int64_t kv, int64_t share, int64_t shares, Logits<T> logits,
                     SequenceScratch<T>& scratch) {
  const int64_t size = all.size, head = (size + LANES - 1) / LANES * LANES, group = all.heads / all.kv_heads;
  const int64_t end = all.end(s), queries = all.queries(s), seen = all.first_seen(end - queries) / PAGE * PAGE;
  const int64_t pages = (end - seen + PAGE - 1) / PAGE;
  scratch.keys.assign(pages * PAGE * head, T{}), scratch.values.assign(pages * PAGE * head, T{});
  scratch.query.resize(QUERY_ROWS * head), scratch.mixed.resize(QUERY_ROWS * head);
  scratch.table.resize(pages);
  for (int64_t page = 0; page < pages; page++) scratch.table[page] = page;
  for (int64_t t = seen; t < end; t++) {
    const int64_t from = (all.row(s, t) * all.kv_heads + kv) * size, page = (t - seen) / PAGE * PAGE * head;
    copy_token(scratch.keys.data() + page, scratch.values.data() + page, (t - seen) % PAGE, head, size, all.k + from,
               all.v + from);
  }
  const T* none = scratch.keys.data();
  const Pages<T> memory{none, scratch.values.data(), PAGE * head, scratch.table.data(), (int)head, {none, none, none, none}};
  const int64_t last = queries * group * (share + 1) / shares;
  for (int64_t start = queries * group * share / shares; start < last; start += QUERY_ROWS) {
    const int count = last - start < QUERY_ROWS ? last - start : QUERY_ROWS;
    QueryRow row[QUERY_ROWS];
    auto token = [&](int i) { return all.offsets[s] + (start + i) / group; };  // of query row i
    auto head_of = [&](int i) { return kv * group + (start + i) % group; };
    for (int i = 0; i < count; i++) {
      const int64_t position = end - queries + (start + i) / group;
      T* query = scratch.query.data() + i * head;
      std::fill(query + size, query + head, T{});
      memcpy(query, all.q + (token(i) * all.heads + head_of(i)) * size, size * sizeof(T));
      row[i] = {query, scratch.mixed.data() + i * head, all.first_seen(position) - seen, position + 1 - seen,
                all.lse ? all.lse + head_of(i) * all.tokens + token(i) : nullptr};
    }
    attend(memory, row, count, logits, scratch.attention);
    for (int i = 0; i < count; i++)
      memcpy(all.out + (token(i) * all.heads + head_of(i)) * size, scratch.mixed.data() + i * head, size * sizeof(T));
  }
}

}  // namespace funrl
