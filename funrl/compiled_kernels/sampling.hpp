// One token of a row of logits, by inverting the cumulative distribution: the first token whose cumulative probability
// exceeds the noise. Exponentials are float32; their sums, over blocks of the vocabulary and within one, are float64.

#pragma once
#include <algorithm>
#include <vector>

#include "lanes.hpp"

namespace funrl {

constexpr int64_t SAMPLE_BLOCK = 256;

struct Drawn {
  int64_t token;
  float sampling_logp, raw_logp;  // at the temperature, and at 1; NaN where a logit is NaN or +inf
};

struct SampleScratch {
  std::vector<float> weights;  // up to whole blocks
  std::vector<double> blocks;
};

// A row of logits in blocks: the last one is a copy, with -inf behind it.
class LogitBlocks {
 public:
  const int64_t blocks;
  LogitBlocks(const float* logits, int64_t V) : blocks((V + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK), logits(logits) {
    const int64_t first = (blocks - 1) * SAMPLE_BLOCK;
    // Two loops: compilers read ahead of a condition within one, past the end of the logits.
    const float* end = std::copy(logits + first, logits + V, last);
    std::fill(last + (end - last), last + SAMPLE_BLOCK, -INFINITY);
  }
  const float* operator[](int64_t block) const { return block + 1 < blocks ? logits + block * SAMPLE_BLOCK : last; }

 private:
  const float* logits;
  float last[SAMPLE_BLOCK];
};

// Sum of e^((x - top) / temperature); the terms go to `weights`, their sums to `sums`.
inline double exponential_sums(const LogitBlocks& x, float top, float temperature, float* weights, double* sums) {
  double total = 0;
  for (int64_t block = 0; block < x.blocks; block++, weights += SAMPLE_BLOCK) {
    WideSum sum;
    for (int64_t i = 0; i < SAMPLE_BLOCK; i += LANES) {
      const Lanes shifted = load(x[block] + i) - splat(top);
      const Lanes e = exponential(temperature == 1 ? shifted : shifted / splat(temperature));
      store(weights + i, e);
      sum.add(e);
    }
    total += sums[block] = sum.total();
  }
  return total;
}

// Never a token of weight 0: where rounding leaves nothing above the target, the last one that has any.
inline int64_t invert(const float* weights, const double* sums, int64_t blocks, double target) {
  double below = 0;
  int64_t block = 0;
  for (; block + 1 < blocks && below + sums[block] <= target; block++) below += sums[block];
  int64_t i = block * SAMPLE_BLOCK;
  const int64_t end = i + SAMPLE_BLOCK;
  for (; i < end; i++) {
    below += weights[i];
    if (below > target) return i;
  }
  while (i > 0 && !(weights[i - 1] > 0)) i--;
  return i - 1;
}

// Args: logits [V]; noise in (0, 1), or null for the most probable token, whose log-probabilities are both raw.
inline Drawn draw(const float* logits, int64_t V, const double* noise, double temperature, SampleScratch& scratch) {
  const LogitBlocks x(logits, V);
  scratch.weights.resize(x.blocks * SAMPLE_BLOCK), scratch.blocks.resize(x.blocks);
  float* weights = scratch.weights.data();
  double* sums = scratch.blocks.data();

  Lanes top_lanes = splat(-INFINITY);
  for (int64_t block = 0; block < x.blocks; block++)
    for (int64_t i = 0; i < SAMPLE_BLOCK; i += LANES) top_lanes = larger(load(x[block] + i), top_lanes);
  const float top = largest_of(top_lanes);
  double tempered = 0, raw = 0;
  if (!noise || temperature != 1) raw = exponential_sums(x, top, 1, weights, sums);
  if (noise) tempered = exponential_sums(x, top, temperature, weights, sums);
  if (!noise) tempered = raw, temperature = 1;
  if (noise && temperature == 1) raw = tempered;
  if (!(raw > 0 && tempered > 0)) return {V - 1, NAN, NAN};

  int64_t token = 0;
  if (noise) token = invert(weights, sums, x.blocks, *noise * tempered);
  else while (logits[token] != top) token++;
  const double above = (double)logits[token] - top;
  return {token, (float)(above / temperature - log(tempered)), (float)(above - log(raw))};
}

}  // namespace funrl
