// Products of low rank beside those of a step: to W x is added B (scale A x), where each token may have its own adapter.
//
// A and B are panels like W. Each product is rounded to a T, as where they are multiplied one by one: `low_rank` of
// exact/low_rank.py has the same bits. Neighbouring tokens of one adapter are multiplied together.

#pragma once
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "lanes.hpp"
#include "operators.hpp"
#include "products.hpp"
#include "team.hpp"

namespace funrl {

// These are filled by ctypes: fields and order as in exact/adapters.py. In one layer: a first factor has the rows of A of
// all weights that read the same numbers, each padded to whole vectors; null: the weight has no factors.
struct Factors {
  const void *qkv_first, *output_first, *gate_up_first, *down_first;
  const void *q, *k, *v, *output, *gate, *up, *down;
};
struct Adapter {
  int64_t rank;
  double scale;
  const Factors* layer;
};

// A weight that shares its input with others: its second factor, and its columns among theirs.
struct AdaptedWeight {
  const void* Factors::*second;
  int64_t column, outputs;
};

// The input of a product: rows of `stride` numbers.
template <class T> struct Rows {
  const T* x;
  int64_t stride;
  Terms terms;
};

// Adapters of the tokens of a step; `number` [N] is -1 for the base alone, or null: no token has an adapter.
template <class T> class AddedProducts {
 public:
  using R = Real<T>;
  static constexpr int MOST_WEIGHTS = 3;  // that share an input

  AddedProducts(const Adapter* adapters, const int64_t* number, int64_t count) : adapters(adapters), number(number) {
    for (int64_t i = 0; number && i < count; i++) most = std::max(most, padded(adapters[i].rank));
  }

  // Memory for blocks whose products have up to so many columns.
  void reserve(int64_t columns, std::vector<T>& inner_space, std::vector<R>& added_space) {
    if (!number) return;
    if ((int64_t)inner_space.size() < BLOCK_ROWS * width()) inner_space.resize(BLOCK_ROWS * width());
    if ((int64_t)added_space.size() < BLOCK_ROWS * columns) added_space.resize(BLOCK_ROWS * columns);
    inner = inner_space.data(), added = added_space.data();
  }

  // What is added to the products of tokens first .. first + count - 1 in a layer, [count, columns]; null: nothing. Where
  // a token or a weight has no adapter it is -0, which changes no number that it is added to. Called by all threads.
  const R* of(int64_t layer, int64_t first, int count, Rows<T> rows, const void* Factors::*firsts,
              std::initializer_list<AdaptedWeight> weights, int64_t columns, Team& team, int thread) const {
    if (!number || !any(layer, first, count, firsts)) return nullptr;
    each_run(first, count, [&](int row, int some, const Adapter* adapter) {
      if (!adapter || !(adapter->layer[layer].*firsts)) return;
      const Factors& factors = adapter->layer[layer];
      int64_t outputs = 0;
      for (const AdaptedWeight& weight : weights) outputs += factors.*weight.second ? padded(adapter->rank) : 0;
      const Vector<T> scale = splat((R)adapter->scale);
      multiply(rows.x + row * rows.stride, rows.stride, some, rows.terms, (const T*)(factors.*firsts), panels_of(outputs),
               thread, team.size, [&](int i, int64_t panel, const R* y) {
                 for (int64_t n = panel * PANEL; n < outputs && n < (panel + 1) * PANEL; n += LANES, y += LANES)
                   store(inner + (row + i) * width() + n, rounded<T>(scale * rounded<T>(load(y))));
               });
    });
    team.barrier();
    each_run(first, count, [&](int row, int some, const Adapter* adapter) {
      const Factors* factors = adapter ? adapter->layer + layer : nullptr;
      int64_t column = 0;
      for (const AdaptedWeight& weight : weights) {
        if (!factors || !(factors->*weight.second)) {
          clear(row, some, weight, columns, team, thread);
          continue;
        }
        const int64_t rank = padded(adapter->rank);
        multiply(inner + row * width() + column, width(), some, {1, rank}, (const T*)(factors->*weight.second),
                 panels_of(weight.outputs), thread, team.size, [&](int i, int64_t panel, const R* y) {
                   R* to = added + (row + i) * columns + weight.column;
                   for (int64_t n = panel * PANEL; n < weight.outputs && n < (panel + 1) * PANEL; n += LANES, y += LANES)
                     store(to + n, rounded<T>(load(y)));
                 });
        column += rank;
      }
    });
    team.barrier();
    return added;
  }

 private:
  const Adapter* adapters;
  const int64_t* number;
  int64_t most = 0;  // rank of an adapter, padded
  T* inner = nullptr;
  R* added = nullptr;

  int64_t width() const { return MOST_WEIGHTS * most; }

  bool any(int64_t layer, int64_t first, int count, const void* Factors::*firsts) const {
    for (int64_t t = first; t < first + count; t++)
      if (number[t] >= 0 && adapters[number[t]].layer[layer].*firsts) return true;
    return false;
  }

  // Calls work(row, rows, adapter or null) for neighbouring tokens of one adapter.
  template <class Work> void each_run(int64_t first, int count, Work work) const {
    for (int row = 0, end; row < count; row = end) {
      const int64_t of_row = number[first + row];
      for (end = row + 1; end < count && number[first + end] == of_row;) end++;
      work(row, end - row, of_row < 0 ? nullptr : adapters + of_row);
    }
  }

  void clear(int row, int some, AdaptedWeight weight, int64_t columns, Team& team, int thread) const {
    for (int i = some * thread / team.size; i < some * (thread + 1) / team.size; i++)
      std::fill_n(added + (row + i) * columns + weight.column, weight.outputs, (R)-0.0);
  }
};

}  // namespace funrl
