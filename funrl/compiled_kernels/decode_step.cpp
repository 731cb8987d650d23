// One forward pass of a dense decoder over a paged key-value cache, in one call: Llama, Qwen2 and Qwen3.
//
// Prompts and decoding rows alike are tokens, each with a position and a sequence; decode_step.py says what they mean.
// The stages of a layer are separated by barriers: all keys and values of a layer are written before any is read. What
// a stage computes for a token depends on that token and on its sequence's pages alone, and in no stage on how the work
// was split. Numbers of a T (float, bfloat16 or double) are rounded where torch's own pass rounds them; sums are float32,
// of double float64.

#include "adapters.hpp"
#include "arguments.hpp"
#include "lanes.hpp"
#include "operators.hpp"
#include "paged_attention.hpp"
#include "products.hpp"
#include "sampling.hpp"
#include "team.hpp"

#include <array>
#include <type_traits>

namespace funrl {

// These three are filled by ctypes: fields and order as in decode_step.py. Norms, biases and rotations are Real<T>.
struct Layer {
  const void *qkv, *output, *gate_up, *down;  // panels
  const void *attn_norm, *mlp_norm, *q_norm, *k_norm, *qkv_bias, *output_bias;  // null: the model has none
  int64_t window;  // 0: a token sees all before it
};
struct Model {
  int64_t layers, embed, heads, kv_heads, head, mlp, vocab;  // true sizes
  int64_t output_parts, down_parts;  // of the terms of a sum
  double norm_eps;
  const void *embedding, *unembed;  // rows; panels
  const void *norm, *rope;          // rope: cosines and sines of each position, [positions, head]
  int64_t positions;
  const Layer* layer;
};
struct Step {
  int64_t tokens, width, drawn;  // N, P of tables [S, P], M
  const int64_t *token, *position, *sequence;
  const int32_t* tables;
  const int64_t* draw;
  void *keys, *values;  // [layers, pages, ...]
  int64_t pages, threads;
  void* logits;  // [M, V] of Real<T>
  const Adapter* adapters;
  const int64_t* adapter;  // [N] number of each token's, -1: none; null: no token has one
  int64_t adapter_count;
};

// Query rows that share a sequence: tokens first .. first + count - 1 of the step.
struct QueryTile {
  int64_t first;
  int count;
};

template <class T> struct Workspace {
  using R = Real<T>;
  std::vector<R> hidden, qkv;  // [N, D], [BLOCK_ROWS, heads and key-value heads]
  // [BLOCK_ROWS, D], [BLOCK_ROWS, F], [N, heads], [N, heads], and rows as the products with `output` and `down` take them
  std::vector<T> narrow, inner, query, mixed, terms, low_rank;
  std::vector<R> added;  // of adapters, [BLOCK_ROWS, columns of a product]
  std::vector<QueryTile> tiles;
};

template <class T> class Pass {
 public:
  Pass(const Model& model, const Step& step, Workspace<T>& space)
      : m(model), s(step), space(space), D(padded(m.embed)), head(padded(m.head)), Q(m.heads * head),
        KV(m.kv_heads * head), F(padded(m.mlp)), output_terms(terms_of<T>(m.heads * m.head, m.output_parts)),
        down_terms(terms_of<T>(m.mlp, m.down_parts)), adapted(s.adapters, s.adapter, s.adapter_count) {
    grow(space.hidden, s.tokens * D);
    grow(space.qkv, BLOCK_ROWS * (Q + 2 * KV));
    grow(space.narrow, BLOCK_ROWS * D);
    grow(space.inner, BLOCK_ROWS * F);
    grow(space.query, s.tokens * Q);
    grow(space.mixed, s.tokens * Q);
    grow(space.terms, BLOCK_ROWS * std::max(output_terms.total(), down_terms.total()));
    adapted.reserve(std::max({Q + 2 * KV, 2 * F, D}), space.low_rank, space.added);
    cut_tiles();
  }

  // What one thread of the team does.
  void run(Team& team, int thread) {
    rows(0, s.tokens, team, thread, [&](int64_t t) { embed(t); });
    team.barrier();
    for (int64_t l = 0; l < m.layers; l++) {
      each_block(s.tokens, [&](int64_t first, int count) { write_qkv(l, first, count, team, thread); });
      attention(l, team);
      each_block(s.tokens, [&](int64_t first, int count) { mlp(l, first, count, team, thread); });
    }
    each_block(s.drawn, [&](int64_t first, int count) { logits(first, count, team, thread); });
  }

 private:
  const Model& m;
  const Step& s;
  Workspace<T>& space;
  using R = Real<T>;
  const int64_t D, head, Q, KV, F;
  const Terms output_terms, down_terms;
  AddedProducts<T> adapted;

  const R* vector(const void* x) const { return (const R*)x; }
  template <class V> static void grow(V& vector, int64_t size) {
    if ((int64_t)vector.size() < size) vector.resize(size);
  }
  template <class Work> static void each_block(int64_t count, Work work) {
    for (int64_t first = 0; first < count; first += BLOCK_ROWS)
      work(first, count - first < BLOCK_ROWS ? count - first : BLOCK_ROWS);
  }
  template <class Work> static void rows(int64_t first, int64_t count, Team& team, int thread, Work work) {
    for (int64_t i = count * thread / team.size; i < count * (thread + 1) / team.size; i++) work(first + i);
  }
  R* hidden(int64_t token) { return space.hidden.data() + token * D; }
  T* cache(void* start, int64_t layer) { return (T*)start + layer * s.pages * page_numbers(); }
  int64_t page_numbers() const { return KV * PAGE; }

  void cut_tiles() {
    const int most = QUERY_ROWS / (m.heads / m.kv_heads);
    space.tiles.clear();
    for (int64_t t = 0; t < s.tokens; t++) {
      const bool fits = t && s.sequence[t] == s.sequence[t - 1] && space.tiles.back().count < most;
      if (fits) space.tiles.back().count++;
      else space.tiles.push_back({t, 1});
    }
  }

  void embed(int64_t t) {
    const T* from = (const T*)m.embedding + s.token[t] * m.embed;
    R* to = hidden(t);
    for (int64_t i = 0; i < D; i++) to[i] = i < m.embed ? widen(from[i]) : (R)0;
  }

  // Queries of a block of tokens, and their keys and values in the cache.
  void write_qkv(int64_t l, int64_t first, int count, Team& team, int thread) {
    const Layer& layer = m.layer[l];
    const int64_t width = Q + 2 * KV;
    rows(first, count, team, thread, [&](int64_t t) {
      T* normed = space.narrow.data() + (t - first) * D;
      normalise<T>(hidden(t), vector(layer.attn_norm), normed, m.embed, m.norm_eps);
    });
    team.barrier();
    const R* added = adapted.of(l, first, count, {space.narrow.data(), D, {1, D}}, &Factors::qkv_first,
                                {{&Factors::q, 0, Q}, {&Factors::k, Q, KV}, {&Factors::v, Q + KV, KV}}, width, team, thread);
    multiply(space.narrow.data(), D, count, {1, D}, (const T*)layer.qkv, panels_of(width), thread, team.size,
             [&](int row, int64_t panel, const R* y) {
               for (int64_t n = panel * PANEL; n < width && n < (panel + 1) * PANEL; n += LANES, y += LANES) {
                 Vector<T> sum = layer.qkv_bias ? load(y) + load(vector(layer.qkv_bias) + n) : load(y);
                 if (added) sum = rounded<T>(sum) + load(added + row * width + n);
                 store(space.qkv.data() + row * width + n, rounded<T>(sum));
               }
             });
    team.barrier();
    rows(first, count, team, thread, [&](int64_t t) { write_token_of(l, t, space.qkv.data() + (t - first) * width); });
    team.barrier();
  }

  void write_token_of(int64_t l, int64_t t, R* qkv) {
    const Layer& layer = m.layer[l];
    const int64_t position = s.position[t];
    for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
      R* x = qkv + h * head;
      const R *norm = vector(h < m.heads ? layer.q_norm : layer.k_norm), *rope = vector(m.rope) + position * m.head;
      if (norm) normalise<T>(x, norm, x, m.head, m.norm_eps);
      turn<T>(x, rope, rope + m.head / 2, (R)1, m.head);
    }
    for (int64_t i = 0; i < Q; i += LANES) store(space.query.data() + t * Q + i, load(qkv + i));
    const int64_t page = s.tables[s.sequence[t] * s.width + position / PAGE] * page_numbers();
    for (int64_t k = 0; k < m.kv_heads; k++) {
      const int64_t at = page + k * head * PAGE;
      write_token(cache(s.keys, l) + at, cache(s.values, l) + at, position % PAGE, head, qkv + Q + k * head,
                  qkv + Q + KV + k * head);
    }
  }

  // The first position that a token sees.
  int64_t first_seen(int64_t l, int64_t t) const {
    const int64_t window = m.layer[l].window, end = s.position[t] + 1;
    return window && end > window ? end - window : 0;
  }

  // A task of the attention is a tile and a key-value head.
  Pages<T> pages_of(int64_t l, int64_t task) {
    const int64_t at = task % m.kv_heads * head * PAGE;
    const int32_t* table = s.tables + s.sequence[space.tiles[task / m.kv_heads].first] * s.width;
    return {cache(s.keys, l) + at, cache(s.values, l) + at, page_numbers(), table, (int)head, {}};
  }

  // Lets the first keys of a later task be fetched while the last ones of this are read.
  void fetch_ahead(Pages<T>& pages, int64_t l, int64_t later) {
    const int64_t t = space.tiles[later / m.kv_heads].first;
    const Pages<T> theirs = pages_of(l, later);
    const int64_t page = first_seen(l, t) / PAGE, last = s.position[t] / PAGE;
    for (int i = 0; i < MOST_TOGETHER; i++) pages.ahead[i] = theirs.key_page(page + i < last ? page + i : last);
  }

  void attention(int64_t l, Team& team) {
    static thread_local AttentionScratch<T> scratch;
    const int group = m.heads / m.kv_heads;
    const int64_t tasks = space.tiles.size() * m.kv_heads;
    const Logits<T> logits{scale_of<R>(m.head), 0};
    for (int64_t task; (task = team.next.fetch_add(1, std::memory_order_relaxed) - l * (tasks + team.size)) < tasks;) {
      const QueryTile tile = space.tiles[task / m.kv_heads];
      const int64_t k = task % m.kv_heads;
      Pages<T> pages = pages_of(l, task);
      fetch_ahead(pages, l, task + team.size < tasks ? task + team.size : task);
      QueryRow row[QUERY_ROWS];
      int count = 0;
      for (int64_t t = tile.first; t < tile.first + tile.count; t++)
        for (int g = 0; g < group; g++) {
          const int64_t column = t * Q + (k * group + g) * head;
          row[count++] = {space.query.data() + column, space.mixed.data() + column, first_seen(l, t),
                          s.position[t] + 1};
          if (count == QUERY_ROWS) attend(pages, row, count, logits, scratch), count = 0;
        }
      if (count) attend(pages, row, count, logits, scratch);
    }
    team.barrier();
  }

  // The rest of a layer: the attention's output, then the mlp, each added to the hidden states.
  void mlp(int64_t l, int64_t first, int count, Team& team, int thread) {
    const Layer& layer = m.layer[l];
    T* narrow = space.narrow.data();
    auto add = [&](const R* bias, const R* added) {
      return [=, this](int row, int64_t panel, const R* y) {
        R* x = hidden(first + row);
        for (int64_t n = panel * PANEL; n < D && n < (panel + 1) * PANEL; n += LANES, y += LANES) {
          Vector<T> sum = rounded<T>(load(y));
          if (added) sum = rounded<T>(sum + load(added + row * D + n));
          if (bias) sum = rounded<T>(sum + load(bias + n));
          store(x + n, rounded<T>(load(x + n) + sum));
        }
      };
    };
    const T* mixed = space.mixed.data() + first * Q;
    const bool dense = head == m.head && output_terms.total() == Q;  // the heads stand as the product takes them
    if (!dense) {
      rows(0, count, team, thread, [&](int64_t i) {
        lay_out(mixed + i * Q, m.head, head, m.heads * m.head, output_terms, space.terms.data() + i * output_terms.total());
      });
      team.barrier();
      mixed = space.terms.data();
    }
    const R* added = adapted.of(l, first, count, {mixed, output_terms.total(), output_terms}, &Factors::output_first,
                                {{&Factors::output, 0, D}}, D, team, thread);
    multiply(mixed, output_terms.total(), count, output_terms, (const T*)layer.output, panels_of(D), thread, team.size,
             add(vector(layer.output_bias), added));
    team.barrier();
    rows(first, count, team, thread, [&](int64_t t) {
      normalise<T>(hidden(t), vector(layer.mlp_norm), narrow + (t - first) * D, m.embed, m.norm_eps);
    });
    team.barrier();
    inner(l, first, count, team, thread);
    team.barrier();
    const T* inside = space.inner.data();
    if (down_terms.total() != F) {
      rows(0, count, team, thread, [&](int64_t i) {
        lay_out(inside + i * F, m.mlp, m.mlp, m.mlp, down_terms, space.terms.data() + i * down_terms.total());
      });
      team.barrier();
      inside = space.terms.data();
    }
    added = adapted.of(l, first, count, {inside, down_terms.total(), down_terms}, &Factors::down_first,
                       {{&Factors::down, 0, D}}, D, team, thread);
    multiply(inside, down_terms.total(), count, down_terms, (const T*)layer.down, panels_of(D), thread, team.size,
             add(nullptr, added));
    team.barrier();
  }

  // silu(gate) * up: a panel has the gates of PANEL / 2 outputs and then their ups.
  void inner(int64_t l, int64_t first, int count, Team& team, int thread) {
    const R* added = adapted.of(l, first, count, {space.narrow.data(), D, {1, D}}, &Factors::gate_up_first,
                                {{&Factors::gate, 0, F}, {&Factors::up, F, F}}, 2 * F, team, thread);
    multiply(space.narrow.data(), D, count, {1, D}, (const T*)m.layer[l].gate_up, panels_of(2 * F), thread, team.size,
             [&](int row, int64_t panel, const R* y) {
               for (int64_t n = 0; n < PANEL / 2 && panel * PANEL / 2 + n < F; n += LANES) {
                 const int64_t column = panel * PANEL / 2 + n;
                 Vector<T> gate = rounded<T>(load(y + n)), up = rounded<T>(load(y + PANEL / 2 + n));
                 if (added) {
                   const R* more = added + row * 2 * F + column;
                   gate = rounded<T>(gate + load(more)), up = rounded<T>(up + load(more + F));
                 }
                 const Vector<T> product = rounded<T>(rounded<T>(silu(gate)) * up);
                 store(space.inner.data() + row * F + column, product);
               }
             });
  }

  void logits(int64_t first, int count, Team& team, int thread) {
    rows(first, count, team, thread, [&](int64_t i) {
      T* normed = space.narrow.data() + (i - first) * D;
      normalise<T>(hidden(s.draw[i]), vector(m.norm), normed, m.embed, m.norm_eps);
    });
    team.barrier();
    multiply(space.narrow.data(), D, count, {1, D}, (const T*)m.unembed, panels_of(m.vocab), thread, team.size,
             [&](int row, int64_t panel, const R* y) {
               const int64_t n = panel * PANEL, some = m.vocab - n < PANEL ? m.vocab - n : PANEL;
               memcpy((R*)s.logits + (first + row) * m.vocab + n, y, some * sizeof(R));
             });
    team.barrier();
  }
};

// 0, or the number of what a step has that does not exist: 1 token, 2 sequence, 3 page, 4 drawn token, 5 adapter, 6
// rotation.
int problem_of(const Model& m, const Step& s, int64_t sequences) {
  for (int64_t t = 0; t < s.tokens; t++) {
    if (s.token[t] < 0 || s.token[t] >= m.vocab) return 1;
    if (s.sequence[t] < 0 || s.sequence[t] >= sequences) return 2;
    if (s.position[t] < 0 || s.position[t] >= s.width * PAGE) return 3;
    const int32_t* table = s.tables + s.sequence[t] * s.width;
    for (int64_t page = 0; page <= s.position[t] / PAGE; page++)
      if (table[page] < 0 || table[page] >= s.pages) return 3;
    if (s.adapter && (s.adapter[t] < -1 || s.adapter[t] >= s.adapter_count)) return 5;
    if (s.position[t] >= m.positions) return 6;
  }
  for (int64_t i = 0; i < s.drawn; i++)
    if (s.draw[i] < 0 || s.draw[i] >= s.tokens) return 4;
  return 0;
}

template <class T> int forward(const Model& model, const Step& step, int64_t sequences) {
  if (int problem = problem_of(model, step, sequences)) return problem;
  static thread_local Workspace<T> space;
  Pass<T> pass(model, step, space);
  Pool::run(step.threads, [&](Team& team, int thread) { pass.run(team, thread); });
  return 0;
}

}  // namespace funrl

using namespace funrl;

// Runs work((T*)nullptr) for the T of `bits`: 32 float, 16 bfloat16, 64 double.
template <class Work> void with_type(int bits, Work work) {
  if (bits == 32) work((float*)nullptr);
  else if (bits == 16) work((Bfloat16*)nullptr);
  else work((double*)nullptr);
}
#define WITH_TYPE(bits, ...) \
  with_type(bits, [&](auto* type) { using T = std::remove_pointer_t<decltype(type)>; __VA_ARGS__; })

extern "C" {
int64_t funrl_panel() { return PANEL; }

// w [N, parts size].
void funrl_pack(int bits, const void* w, int64_t N, int64_t size, int64_t parts, void* out) {
  WITH_TYPE(bits, pack_panels((const T*)w, N, size, terms_of<T>(parts * size, parts), (T*)out));
}

uint64_t funrl_digest(const void* memory, int64_t bytes) { return digest_of((const char*)memory, bytes); }

int funrl_forward(int bits, const Model* model, const Step* step, int64_t sequences) {
  int problem = 0;
  WITH_TYPE(bits, problem = forward<T>(*model, *step, sequences));
  return problem;
}

// y [M, N] as a T, or where `wide` as a Real<T>, which has no bias.
void funrl_linear(int bits, const void* x, const void* packed, const void* bias, void* y, int wide, int64_t M, int64_t N,
                  int64_t size, int64_t parts, int threads) {
  WITH_TYPE(bits, {
    const Terms terms = terms_of<T>(parts * size, parts);
    if (wide) linear((const T*)x, size, terms, (const T*)packed, (const T*)nullptr, (Real<T>*)y, M, N, threads);
    else linear((const T*)x, size, terms, (const T*)packed, (const T*)bias, (T*)y, M, N, threads);
  });
}

// y [N, K] = a^T b of a [M, N] and b [M, K], or where `add` y and it; float32.
void funrl_transposed_product(const float* a, const float* b, float* y, int64_t M, int64_t N, int64_t K, int add,
                              int threads) {
  transposed_product(a, b, y, M, N, K, add, threads);
}

void funrl_norm(int bits, const void* x, const void* weight, void* out, int64_t M, int64_t D, double eps, double offset,
                int threads) {
  WITH_TYPE(bits, norm_rows((const T*)x, (const T*)weight, (T*)out, M, D, (Real<T>)eps, (Real<T>)offset, threads));
}

void funrl_norm_backward(int bits, const void* grad, const void* x, const void* weight, void* d_x, void* d_weight,
                         int64_t M, int64_t D, double eps, double offset, int threads) {
  WITH_TYPE(bits, norm_gradients((const T*)grad, (const T*)x, (const T*)weight, (T*)d_x, (T*)d_weight, M, D,
                                 (Real<T>)eps, (Real<T>)offset, threads));
}

// x [M, heads, size], of which the first `turned` numbers of a head are turned; cosines and sines [rows, turned], of which
// row m has number m % rows. With sign -1 it turns back.
void funrl_rotate(int bits, const void* x, const void* cosine, const void* sine, void* out, int64_t M, int64_t heads,
                  int64_t size, int64_t turned, int64_t rows, int sign, int threads) {
  WITH_TYPE(bits, turn_rows((const T*)x, (const T*)cosine, (const T*)sine, (T*)out, M, heads, size, turned, rows, sign,
                            threads));
}

void funrl_gate(int bits, const void* gate, const void* up, void* out, int64_t count, int activation, int threads) {
  WITH_TYPE(bits, gate_numbers((const T*)gate, (const T*)up, (T*)out, count, activation, threads));
}

void funrl_gate_backward(int bits, const void* grad, const void* gate, const void* up, void* d_gate, void* d_up,
                         int64_t count, int activation, int threads) {
  WITH_TYPE(bits, gate_gradients((const T*)grad, (const T*)gate, (const T*)up, (T*)d_gate, (T*)d_up, count, activation,
                                 threads));
}

// A scale of 0 is 1 / sqrt(size), a cap of 0 none. `lse`, `ends` and `table` may be null; see `Sequences`. Returns what
// `problem_of` finds.
int funrl_attention(int bits, const void* q, const void* k, const void* v, void* out, void* lse, const int64_t* sizes,
                     const int64_t* offsets, const int64_t* ends, const int64_t* table, double scale, double cap,
                     int threads) {
  const auto [tokens, count, heads, kv_heads, size, window, width, page, pages] = *(const std::array<int64_t, 9>*)sizes;
  int problem = 0;
  WITH_TYPE(bits, {
    const Sequences<T> all{(const T*)q, (const T*)k,   (const T*)v, (T*)out, (Real<T>*)lse, tokens, count, heads,
                           kv_heads,    size,          window,      offsets, ends,          table,  width, page};
    problem = problem_of(all, pages);
    if (!problem)
      attend_sequences(all, Logits<T>{scale ? (Real<T>)scale : scale_of<Real<T>>(size), (Real<T>)cap}, threads);
  });
  return problem;
}

// `temperature` is one for all, or null and one of each draw. Returns 1 where a draw's source is no row, else 0.
int funrl_sample(int bits, const void* logits, int64_t M, int64_t V, int parts, const int64_t* source, int64_t draws,
                 const double* noise, double temperature, const double* temperatures, int64_t* token,
                 void* sampling_logp, void* raw_logp, int threads) {
  if (!all_below(source, draws, M)) return 1;
  WITH_TYPE(bits, {
    using R = Real<T>;
    Pool::run(draws > 1 ? threads : 1, [&](Team& team, int) {
      static thread_local SampleScratch<R> scratch;
      for (int64_t r; (r = team.next.fetch_add(1)) < draws;) {
        const double* one_noise = noise ? noise + r : nullptr;
        const Drawn<R> one = draw((const R*)logits + source[r] * V, V, parts, one_noise,
                                  temperatures ? temperatures[r] : temperature, scratch);
        token[r] = one.token, ((R*)sampling_logp)[r] = one.sampling_logp, ((R*)raw_logp)[r] = one.raw_logp;
      }
    });
  });
  return 0;
}

// Of each row of logits [M, V]: the largest one.
void funrl_tops(int bits, const void* logits, int64_t M, int64_t V, void* tops, int threads) {
  WITH_TYPE(bits, largest_logits((const Real<T>*)logits, M, V, (Real<T>*)tops, threads));
}

// Of each row: how far the logits of `ids` [M, n] are above the top, [M, n], and the sums of `moment_sums`, [M, 3].
// Returns 1 where an id is no column, else 0.
int funrl_moments(int bits, const void* logits, int64_t M, int64_t V, int parts, const void* tops, double temperature,
                  const int64_t* ids, int64_t n, int more, double* above, double* sums, int threads) {
  if (!all_below(ids, M * n, V)) return 1;
  WITH_TYPE(bits, logit_moments((const Real<T>*)logits, M, V, parts, (const Real<T>*)tops, (Real<T>)temperature, ids, n,
                                more, above, sums, threads));
  return 0;
}

// Log-probabilities [M, n] of logits that are `above` [M, n] the top, given the sums [M] of the exponentials.
void funrl_log_probabilities(int bits, const double* above, const double* sums, int64_t M, int64_t n, double temperature,
                             void* out) {
  WITH_TYPE(bits, {
    for (int64_t i = 0; i < M * n; i++)
      ((Real<T>*)out)[i] = log_probability<Real<T>>(above[i], sums[i / n], temperature);
  });
}
}

#include "experts.hpp"
