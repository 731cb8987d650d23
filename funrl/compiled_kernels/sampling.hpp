// Log-probabilities of tokens of a row of logits, and one token of it, by inverting the cumulative distribution: the first
// token whose cumulative probability exceeds the noise.
//
// The vocabulary stands in some parts of equal size. Exponentials are in the logits' type; their sums are float64: over
// blocks of a part and within one from the first to the last, and over parts by a binary tree. So ranks that have
// neighbouring parts, a power of two of them, and add their sums by the rest of the tree get the same bits.

#pragma once
#include <algorithm>
#include <vector>

#include "lanes.hpp"

namespace funrl {

constexpr int64_t SAMPLE_BLOCK = 256;
constexpr int MOST_SAMPLE_PARTS = 8;

template <class R> struct Drawn {
  int64_t token;
  R sampling_logp, raw_logp;  // at the temperature, and at 1; NaN where a logit is NaN or +inf
};

template <class R> struct SampleScratch {
  std::vector<R> weights;
  std::vector<double> blocks;
};

// A row of logits, in blocks that do not cross the borders of parts.
template <class R> class LogitBlocks {
 public:
  const R* const logits;
  const int64_t part, blocks_of_part, blocks;
  LogitBlocks(const R* logits, int64_t V, int parts)
      : logits(logits), part(V / parts), blocks_of_part((part + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK),
        blocks(parts * blocks_of_part) {}
  int64_t first(int64_t block) const {
    return block / blocks_of_part * part + block % blocks_of_part * SAMPLE_BLOCK;
  }
  int64_t end(int64_t block) const {
    const int64_t end_of_part = (block / blocks_of_part + 1) * part;
    return std::min(first(block) + SAMPLE_BLOCK, end_of_part);
  }
  // Calls visit(first, count, numbers) for up to LANES neighbouring logits of a block, with -inf behind them.
  template <class Visit> INLINE void each(int64_t block, Visit visit) const {
    int64_t i = first(block);
    const int64_t stop = end(block);
    for (; i + LANES <= stop; i += LANES) visit(i, LANES, load(logits + i));
    if (i == stop) return;
    R rest[LANES];
    std::fill(std::copy(logits + i, logits + stop, rest), rest + LANES, (R)-INFINITY);
    visit(i, (int)(stop - i), load(rest));
  }
};

template <class R> R largest_logit(const LogitBlocks<R>& x) {
  VectorOf<R> top = splat((R)-INFINITY);
  for (int64_t block = 0; block < x.blocks; block++)
    x.each(block, [&](int64_t, int, VectorOf<R> some) __attribute__((always_inline)) { top = larger(some, top); });
  return largest_of(top);
}

// The sum of neighbouring numbers, a power of two of them, by a binary tree; they are used up.
inline double tree_sum(double* x, int count) {
  for (int step = 1; step < count; step *= 2)
    for (int i = 0; i + step < count; i += 2 * step) x[i] += x[i + step];
  return x[0];
}

// (x - top) / temperature of some logits.
template <class R> INLINE VectorOf<R> shifted(VectorOf<R> x, R top, R temperature) {
  const VectorOf<R> above = x - splat(top);
  return temperature == 1 ? above : above / splat(temperature);
}

// Sum of e^((x - top) / temperature); the terms go to `weights`, their sums to `sums`.
template <class R>
double exponential_sums(const LogitBlocks<R>& x, R top, R temperature, R* weights, double* sums) {
  double parts[MOST_SAMPLE_PARTS] = {};
  for (int64_t block = 0; block < x.blocks; block++) {
    WideSum sum;
    x.each(block, [&](int64_t first, int count, VectorOf<R> some) __attribute__((always_inline)) {
      const VectorOf<R> e = exponential(shifted(some, top, temperature));
      if (count == LANES) {
        store(weights + first, e);
      } else {
        R rest[LANES];
        store(rest, e);
        std::copy(rest, rest + count, weights + first);
      }
      sum.add(e);
    });
    parts[block / x.blocks_of_part] += sums[block] = sum.total();
  }
  return tree_sum(parts, x.blocks / x.blocks_of_part);
}

// Sums over a row of e^z, z e^z and e^2z of z = (x - top) / temperature, the latter two where there is `more`.
template <bool more, class R> void moment_sums(const LogitBlocks<R>& x, R top, R temperature, double* sums) {
  double parts[3][MOST_SAMPLE_PARTS] = {};
  for (int64_t block = 0; block < x.blocks; block++) {
    WideSum sum[3];
    x.each(block, [&](int64_t, int, VectorOf<R> some) __attribute__((always_inline)) {
      const VectorOf<R> z = shifted(some, top, temperature), e = exponential(z);
      sum[0].add(e);
      if (!more) return;
      sum[1].add(where_less(zeros<R>(), e, z * e, zeros<R>()));
      sum[2].add(e * e);
    });
    for (int kind = 0; kind < (more ? 3 : 1); kind++) parts[kind][block / x.blocks_of_part] += sum[kind].total();
  }
  for (int kind = 0; kind < (more ? 3 : 1); kind++) sums[kind] = tree_sum(parts[kind], x.blocks / x.blocks_of_part);
}

// Log-probability of a logit that is `above` the largest one, given the sum of the exponentials.
template <class R> R log_probability(double above, double sum, double temperature) {
  return (R)((temperature == 1 ? above : above / temperature) - std::log(sum));
}

// Never a token of weight 0: where rounding leaves nothing above the target, the last one that has any.
template <class R>
int64_t invert(const LogitBlocks<R>& x, const R* weights, const double* sums, double target) {
  double below = 0;
  int64_t block = 0;
  for (; block + 1 < x.blocks && below + sums[block] <= target; block++) below += sums[block];
  int64_t i = x.first(block);
  const int64_t end = x.end(block);
  for (; i < end; i++) {
    below += weights[i];
    if (below > target) return i;
  }
  while (i > 0 && !(weights[i - 1] > 0)) i--;
  return i - 1;
}

// Args: logits [V] in `parts`; noise in (0, 1), or null for the most probable token, whose log-probabilities are both raw.
template <class R>
Drawn<R> draw(const R* logits, int64_t V, int parts, const double* noise, double temperature,
              SampleScratch<R>& scratch) {
  const LogitBlocks<R> x(logits, V, parts);
  scratch.weights.resize(V), scratch.blocks.resize(x.blocks);
  R* weights = scratch.weights.data();
  double* sums = scratch.blocks.data();
  const R top = largest_logit(x);
  double tempered = 0, raw = 0;
  if (!noise || temperature != 1) raw = exponential_sums(x, top, (R)1, weights, sums);
  if (noise) tempered = exponential_sums(x, top, (R)temperature, weights, sums);
  if (!noise) tempered = raw, temperature = 1;
  if (noise && temperature == 1) raw = tempered;
  if (!(raw > 0 && tempered > 0)) return {V - 1, (R)NAN, (R)NAN};

  int64_t token = 0;
  if (noise) token = invert(x, weights, sums, *noise * tempered);
  else while (logits[token] != top) token++;
  const double above = (double)logits[token] - top;
  return {token, log_probability<R>(above, tempered, temperature), log_probability<R>(above, raw, 1)};
}

}  // namespace funrl
