// One token of a row of logits, by inverting the cumulative distribution: the first token whose cumulative probability
// exceeds the noise. Exponentials are float32; their sums, over blocks of the vocabulary and within one, are float64.

#pragma once
#include <vector>

#include "lanes.hpp"

namespace funrl {

constexpr int64_t SAMPLE_BLOCK = 256;

struct Drawn {
  int64_t token;
  float sampling_logp, raw_logp;  // at the temperature, and at 1; NaN where a logit is NaN or +inf
};

struct SampleScratch {
  std::vector<float> logits, weights;  // up to whole blocks
  std::vector<double> blocks;
};

// Sum of e^((x - top) / temperature); the terms go to `weights`, their sums to `blocks`.
inline double exponential_sums(const float* x, int64_t count, float top, float temperature, float* weights,
                               double* blocks) {
  double total = 0;
  for (int64_t first = 0; first < count; first += SAMPLE_BLOCK) {
    double lane[LANES] = {};
    for (int64_t i = first; i < first + SAMPLE_BLOCK; i += LANES) {
      const Lanes shifted = load(x + i) - splat(top);
      store(weights + i, exponential(temperature == 1 ? shifted : shifted / splat(temperature)));
      for (int j = 0; j < LANES; j++) lane[j] += weights[i + j];
    }
    double sum = 0;
    for (double one : lane) sum += one;
    total += blocks[first / SAMPLE_BLOCK] = sum;
  }
  return total;
}

// Never a token of weight 0: where rounding leaves nothing above the target, the last one that has any.
inline int64_t invert(const float* weights, const double* blocks, int64_t count, double target) {
  double below = 0;
  int64_t block = 0;
  for (; block + 1 < count / SAMPLE_BLOCK && below + blocks[block] <= target; block++) below += blocks[block];
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
  const int64_t count = (V + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK * SAMPLE_BLOCK;
  scratch.logits.resize(count), scratch.weights.resize(count), scratch.blocks.resize(count / SAMPLE_BLOCK);
  float *x = scratch.logits.data(), *weights = scratch.weights.data();
  double* blocks = scratch.blocks.data();
  memcpy(x, logits, V * sizeof(float));
  for (int64_t i = V; i < count; i++) x[i] = -INFINITY;

  Lanes top_lanes = splat(-INFINITY);
  for (int64_t i = 0; i < count; i += LANES) top_lanes = larger(load(x + i), top_lanes);
  const float top = largest_of(top_lanes);
  double tempered = 0, raw = 0;
  if (!noise || temperature != 1) raw = exponential_sums(x, count, top, 1, weights, blocks);
  if (noise) tempered = exponential_sums(x, count, top, temperature, weights, blocks);
  if (!noise) tempered = raw, temperature = 1;
  if (noise && temperature == 1) raw = tempered;
  if (!(raw > 0 && tempered > 0)) return {V - 1, NAN, NAN};

  int64_t token = 0;
  if (noise) token = invert(weights, blocks, count, *noise * tempered);
  else while (x[token] != top) token++;
  const double above = (double)x[token] - top;
  return {token, (float)(above / temperature - log(tempered)), (float)(above - log(raw))};
}

}  // namespace funrl
