// Checks of indices that functions are given, before memory is touched: Python has checked dtypes and shapes.

#pragma once
#include "paged_attention.hpp"

namespace funrl {

// Whether all of some numbers are at least 0 and below `end`.
inline bool all_below(const int64_t* numbers, int64_t count, int64_t end) {
  uint64_t outside = 0;  // without a branch: the compiler makes vectors of it
  for (int64_t i = 0; i < count; i++) outside |= (uint64_t)numbers[i] >= (uint64_t)end;
  return !outside;
}

// Whether the ends of some groups of rows ascend from 0 to at most `rows`.
inline bool all_ascend(const int32_t* ends, int64_t groups, int64_t rows) {
  for (int64_t g = 0, before = 0; g < groups; before = ends[g++])
    if (ends[g] < before || ends[g] > rows) return false;
  return true;
}

// 0, or the number of what does not fit the memory of `pages` pages: 1 offsets, 2 ends, 3 a page that is read.
template <class T> int problem_of(const Sequences<T>& all, int64_t pages) {
  if (all.offsets[0] != 0) return 1;
  for (int64_t s = 0; s < all.count; s++)
    if (all.offsets[s + 1] < all.offsets[s] || all.offsets[s + 1] > all.tokens) return 1;
  for (int64_t s = 0; all.ends && s < all.count; s++) {
    const int64_t end = all.end(s), queries = all.queries(s);
    if (!queries) continue;
    if (end < queries || end > all.width * all.page) return 2;
    const int64_t *table = all.table + s * all.width, seen = all.first_seen(end - queries) / PAGE * PAGE;
    if (!all_below(table + seen / all.page, (end - 1) / all.page + 1 - seen / all.page, pages)) return 3;
  }
  return 0;
}

}  // namespace funrl
