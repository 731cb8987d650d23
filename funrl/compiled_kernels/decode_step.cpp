// One forward pass of a dense decoder over a paged key-value cache, in one call: Llama, Qwen2 and Qwen3.
//
// Prompts and decoding rows alike are tokens, each with a position and a sequence; decode_step.py says what they mean.
// The stages of a layer are separated by barriers: all keys and values of a layer are written before any is read. What
// a stage computes for a token depends on that token and on its sequence's pages alone, and in no stage on how the work
// was split. Numbers of a T (float or bfloat16) are rounded where torch's own pass rounds them; sums are float32.

#include "lanes.hpp"
#include "paged_attention.hpp"
#include "products.hpp"
#include "sampling.hpp"
#include "team.hpp"

namespace funrl {

// These three are filled by ctypes: fields and order as in decode_step.py. Norms and biases are float32 whatever T is.
struct Layer {
  const void *qkv, *output, *gate_up, *down;  // panels
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *qkv_bias, *output_bias;  // null: the model has none
  int64_t window;  // 0: a token sees all before it
};
struct Model {
  int64_t layers, embed, heads, kv_heads, head, mlp, vocab;  // true sizes
  float norm_eps;
  const void *embedding, *unembed;  // rows; panels
  const float *norm, *rope;         // rope: cosines and sines of each position, [positions, head]
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
  float* logits;  // [M, V]
};

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

// out = x / sqrt(mean(x^2) + eps) * weight; x and weight are padded with zeros.
template <class T, class Out>
void normalise(const float* x, const float* weight, Out* out, int64_t size, float eps) {
  Lanes squares = zeros();
  for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const Lanes scale = splat(1.0f / sqrtf(sum_of(squares) / size + eps));
  for (int64_t i = 0; i < size; i += LANES)
    store(out + i, rounded<T>(rounded<T>(load(x + i) * scale) * load(weight + i)));
}

// Turns a head by its position, given cosines and sines of the pairs (i, i + size / 2).
template <class T> void turn(float* __restrict head, const float* __restrict rope, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const float first = head[i], second = head[half + i], cosine = rope[i], sine = rope[half + i];
    head[i] = rounded<T>(rounded<T>(first * cosine) - second * sine);
    head[half + i] = rounded<T>(rounded<T>(second * cosine) + first * sine);
  }
}

// x / (1 + e^-x), without overflow.
INLINE Lanes silu(Lanes x) {
  const Lanes one = splat(1.0f), e = exponential(where_less(x, zeros(), x, zeros() - x));
  return x * where_less(x, zeros(), e, one) / (one + e);
}

// Query rows that share a sequence: tokens first .. first + count - 1 of the step.
struct QueryTile {
  int64_t first;
  int count;
};

template <class T> struct Workspace {
  std::vector<float> hidden, qkv;               // [N, D], [BLOCK_ROWS, heads and key-value heads]
  std::vector<T> narrow, inner, query, mixed;  // [BLOCK_ROWS, D], [BLOCK_ROWS, F], [N, heads], [N, heads]
  std::vector<QueryTile> tiles;
};

template <class T> class Pass {
 public:
  Pass(const Model& model, const Step& step, Workspace<T>& space)
      : m(model), s(step), space(space), D(padded(m.embed)), head(padded(m.head)), Q(m.heads * head),
        KV(m.kv_heads * head), F(padded(m.mlp)) {
    grow(space.hidden, s.tokens * D);
    grow(space.qkv, BLOCK_ROWS * (Q + 2 * KV));
    grow(space.narrow, BLOCK_ROWS * D);
    grow(space.inner, BLOCK_ROWS * F);
    grow(space.query, s.tokens * Q);
    grow(space.mixed, s.tokens * Q);
    cut_tiles();
  }

  // What one thread of the team does.
  void run(Team& team, int thread) {
    rows(0, s.tokens, team, thread, [&](int64_t t) { embed(t); });
    team.barrier();
    for (int64_t l = 0; l < m.layers; l++) {
      const Layer& layer = m.layer[l];
      each_block(s.tokens, [&](int64_t first, int count) { write_qkv(l, first, count, team, thread); });
      attention(l, team);
      each_block(s.tokens, [&](int64_t first, int count) { mlp(layer, first, count, team, thread); });
    }
    each_block(s.drawn, [&](int64_t first, int count) { logits(first, count, team, thread); });
  }

 private:
  const Model& m;
  const Step& s;
  Workspace<T>& space;
  const int64_t D, head, Q, KV, F;

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
  float* hidden(int64_t token) { return space.hidden.data() + token * D; }
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
    float* to = hidden(t);
    for (int64_t i = 0; i < D; i++) to[i] = i < m.embed ? widen(from[i]) : 0.0f;
  }

  // Queries of a block of tokens, and their keys and values in the cache.
  void write_qkv(int64_t l, int64_t first, int count, Team& team, int thread) {
    const Layer& layer = m.layer[l];
    const int64_t width = Q + 2 * KV;
    rows(first, count, team, thread, [&](int64_t t) {
      normalise<T>(hidden(t), layer.attn_norm, space.narrow.data() + (t - first) * D, m.embed, m.norm_eps);
    });
    team.barrier();
    multiply(space.narrow.data(), count, D, (const T*)layer.qkv, panels_of(width), thread, team.size,
             [&](int row, int64_t panel, const float* y) {
               for (int64_t n = panel * PANEL; n < width && n < (panel + 1) * PANEL; n += LANES, y += LANES) {
                 const Lanes sum = layer.qkv_bias ? load(y) + load(layer.qkv_bias + n) : load(y);
                 store(space.qkv.data() + row * width + n, rounded<T>(sum));
               }
             });
    team.barrier();
    rows(first, count, team, thread, [&](int64_t t) { write_token_of(l, t, space.qkv.data() + (t - first) * width); });
    team.barrier();
  }

  void write_token_of(int64_t l, int64_t t, float* qkv) {
    const Layer& layer = m.layer[l];
    const int64_t position = s.position[t];
    for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
      float* x = qkv + h * head;
      const float* norm = h < m.heads ? layer.q_norm : layer.k_norm;
      if (norm) normalise<T>(x, norm, x, m.head, m.norm_eps);
      turn<T>(x, m.rope + position * m.head, m.head);
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
    const float scale = 1.0f / sqrtf(m.head);
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
          if (count == QUERY_ROWS) attend(pages, row, count, scale, scratch), count = 0;
        }
      if (count) attend(pages, row, count, scale, scratch);
    }
    team.barrier();
  }

  // The rest of a layer: the attention's output, then the mlp, each added to the hidden states.
  void mlp(const Layer& layer, int64_t first, int count, Team& team, int thread) {
    T* narrow = space.narrow.data();
    auto add = [&](const float* bias) {
      return [=, this](int row, int64_t panel, const float* y) {
        float* x = hidden(first + row);
        for (int64_t n = panel * PANEL; n < D && n < (panel + 1) * PANEL; n += LANES, y += LANES) {
          Lanes sum = rounded<T>(load(y));
          if (bias) sum = rounded<T>(sum + load(bias + n));
          store(x + n, rounded<T>(load(x + n) + sum));
        }
      };
    };
    multiply(space.mixed.data() + first * Q, count, Q, (const T*)layer.output, panels_of(D), thread, team.size,
             add(layer.output_bias));
    team.barrier();
    rows(first, count, team, thread, [&](int64_t t) {
      normalise<T>(hidden(t), layer.mlp_norm, narrow + (t - first) * D, m.embed, m.norm_eps);
    });
    team.barrier();
    inner(layer, count, team, thread);
    team.barrier();
    multiply(space.inner.data(), count, F, (const T*)layer.down, panels_of(D), thread, team.size, add(nullptr));
    team.barrier();
  }

  // silu(gate) * up: a panel has the gates of PANEL / 2 outputs and then their ups.
  void inner(const Layer& layer, int count, Team& team, int thread) {
    multiply(space.narrow.data(), count, D, (const T*)layer.gate_up, panels_of(2 * F), thread, team.size,
             [&](int row, int64_t panel, const float* y) {
               for (int64_t n = 0; n < PANEL / 2 && panel * PANEL / 2 + n < F; n += LANES) {
                 const Lanes gate = rounded<T>(load(y + n)), up = rounded<T>(load(y + PANEL / 2 + n));
                 store(space.inner.data() + row * F + panel * PANEL / 2 + n, rounded<T>(rounded<T>(silu(gate)) * up));
               }
             });
  }

  void logits(int64_t first, int count, Team& team, int thread) {
    rows(first, count, team, thread, [&](int64_t i) {
      normalise<T>(hidden(s.draw[i]), m.norm, space.narrow.data() + (i - first) * D, m.embed, m.norm_eps);
    });
    team.barrier();
    multiply(space.narrow.data(), count, D, (const T*)m.unembed, panels_of(m.vocab), thread, team.size,
             [&](int row, int64_t panel, const float* y) {
               const int64_t n = panel * PANEL, some = m.vocab - n < PANEL ? m.vocab - n : PANEL;
               memcpy(s.logits + (first + row) * m.vocab + n, y, some * sizeof(float));
             });
    team.barrier();
  }
};

// 0, or the number of what a step has that does not exist: 1 token, 2 sequence, 3 page, 4 drawn token, 5 rotation.
int problem_of(const Model& m, const Step& s, int64_t sequences) {
  for (int64_t t = 0; t < s.tokens; t++) {
    if (s.token[t] < 0 || s.token[t] >= m.vocab) return 1;
    if (s.sequence[t] < 0 || s.sequence[t] >= sequences) return 2;
    if (s.position[t] < 0 || s.position[t] >= s.width * PAGE) return 3;
    const int32_t* table = s.tables + s.sequence[t] * s.width;
    for (int64_t page = 0; page <= s.position[t] / PAGE; page++)
      if (table[page] < 0 || table[page] >= s.pages) return 3;
    if (s.position[t] >= m.positions) return 5;
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

template <class T> void linear(const T* x, const T* packed, float* y, int64_t M, int64_t N, int64_t K, int threads) {
  Pool::run(threads, [&](Team& team, int thread) {
    for (int64_t first = 0; first < M; first += BLOCK_ROWS)
      multiply(x + first * K, M - first < BLOCK_ROWS ? M - first : BLOCK_ROWS, K, packed, panels_of(N), thread,
               team.size, [&](int row, int64_t panel, const float* sums) {
                 const int64_t n = panel * PANEL, some = N - n < PANEL ? N - n : PANEL;
                 memcpy(y + (first + row) * N + n, sums, some * sizeof(float));
               });
  });
}

// Attention of whole sequences, which stand end to end: pages are made of their keys and values, then read as in a step.
template <class T>
void attend_sequences(const T* q, const T* k, const T* v, const int64_t* offsets, int64_t sequences, int64_t heads,
                      int64_t kv_heads, int64_t size, int64_t window, T* out, int threads) {
  const int64_t head = padded(size), group = heads / kv_heads;
  Pool::run(threads, [&](Team& team, int) {
    AttentionScratch<T> scratch;
    std::vector<T> keys, values, query(QUERY_ROWS * head), mixed(QUERY_ROWS * head);
    std::vector<int32_t> table;
    std::vector<float> key(head), value(head);
    for (int64_t task; (task = team.next.fetch_add(1)) < sequences * kv_heads;) {
      const int64_t kv = task % kv_heads, first = offsets[task / kv_heads], tokens = offsets[task / kv_heads + 1] - first;
      const int64_t pages = (tokens + PAGE - 1) / PAGE;
      keys.assign(pages * PAGE * head, T{}), values.assign(pages * PAGE * head, T{}), table.resize(pages);
      for (int64_t page = 0; page < pages; page++) table[page] = page;
      for (int64_t t = 0; t < tokens; t++) {
        const int64_t from = ((first + t) * kv_heads + kv) * size, page = t / PAGE * PAGE * head;
        for (int64_t n = 0; n < size; n++) key[n] = widen(k[from + n]), value[n] = widen(v[from + n]);
        write_token(keys.data() + page, values.data() + page, t % PAGE, head, key.data(), value.data());
      }
      const T* none = keys.data();
      const Pages<T> all{none, values.data(), PAGE * head, table.data(), (int)head, {none, none, none, none}};
      const int64_t total = tokens * group;
      for (int64_t start = 0; start < total; start += QUERY_ROWS) {
        const int count = total - start < QUERY_ROWS ? total - start : QUERY_ROWS;
        QueryRow row[QUERY_ROWS];
        auto column = [&](int i) {  // of query row i in q and out
          return ((first + (start + i) / group) * heads + kv * group + (start + i) % group) * size;
        };
        for (int i = 0; i < count; i++) {
          const int64_t end = (start + i) / group + 1;
          memcpy(query.data() + i * head, q + column(i), size * sizeof(T));
          row[i] = {query.data() + i * head, mixed.data() + i * head, window && end > window ? end - window : 0, end};
        }
        attend(all, row, count, 1.0f / sqrtf(size), scratch);
        for (int i = 0; i < count; i++) memcpy(out + column(i), mixed.data() + i * head, size * sizeof(T));
      }
    }
  });
}

}  // namespace funrl

using namespace funrl;

// `bits` is 32 for float and 16 for bfloat16.
extern "C" {
int64_t funrl_panel() { return PANEL; }

void funrl_pack(int bits, const void* w, int64_t N, int64_t K, int64_t K_padded, void* out) {
  if (bits == 32) pack_panels((const float*)w, N, K, K_padded, (float*)out);
  else pack_panels((const Bfloat16*)w, N, K, K_padded, (Bfloat16*)out);
}

int funrl_forward(int bits, const Model* model, const Step* step, int64_t sequences) {
  return bits == 32 ? forward<float>(*model, *step, sequences) : forward<Bfloat16>(*model, *step, sequences);
}

void funrl_linear(int bits, const void* x, const void* packed, float* y, int64_t M, int64_t N, int64_t K, int threads) {
  if (bits == 32) linear((const float*)x, (const float*)packed, y, M, N, K, threads);
  else linear((const Bfloat16*)x, (const Bfloat16*)packed, y, M, N, K, threads);
}

void funrl_attention(int bits, const void* q, const void* k, const void* v, const int64_t* offsets, int64_t sequences,
                     int64_t heads, int64_t kv_heads, int64_t size, int64_t window, void* out, int threads) {
  if (bits == 32)
    attend_sequences((const float*)q, (const float*)k, (const float*)v, offsets, sequences, heads, kv_heads, size,
                     window, (float*)out, threads);
  else
    attend_sequences((const Bfloat16*)q, (const Bfloat16*)k, (const Bfloat16*)v, offsets, sequences, heads, kv_heads,
                     size, window, (Bfloat16*)out, threads);
}

// `temperature` is one for all, or null and one of each draw. Returns 1 where a draw's source is no row, else 0.
int funrl_sample(const float* logits, int64_t M, int64_t V, const int64_t* source, int64_t draws, const double* noise,
                 double temperature, const double* temperatures, int64_t* token, float* sampling_logp, float* raw_logp,
                 int threads) {
  for (int64_t r = 0; r < draws; r++)
    if (source[r] < 0 || source[r] >= M) return 1;
  Pool::run(draws > 1 ? threads : 1, [&](Team& team, int) {
    static thread_local SampleScratch scratch;
    for (int64_t r; (r = team.next.fetch_add(1)) < draws;) {
      const double* one_noise = noise ? noise + r : nullptr;
      const Drawn one = draw(logits + source[r] * V, V, one_noise, temperatures ? temperatures[r] : temperature, scratch);
      token[r] = one.token, sampling_logp[r] = one.sampling_logp, raw_logp[r] = one.raw_logp;
    }
  });
  return 0;
}
}
