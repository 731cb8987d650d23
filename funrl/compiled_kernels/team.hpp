// Threads that run one function together, kept from call to call.
//
// They wait in the kernel between calls, and between the stages of a call for a moment in a loop first. A fork leaves
// the threads behind: the child makes its own at its first use, whatever the parent was doing. A call that finds the
// threads busy with another runs alone, which changes no bit.

#pragma once
#include <immintrin.h>
#include <pthread.h>

#include <atomic>

namespace funrl {

// Waits until `value` is no longer `old`.
inline void wait_for_change(std::atomic<int>& value, int old) {
  for (int spin = 0; spin < 2000; spin++) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// What a function that a team runs knows of it.
class Team {
 public:
  explicit Team(int size) : size(size) {}
  const int size;
  std::atomic<int64_t> next{0};  // of tasks that are taken one by one

  // Waits until all threads of the team are here.
  void barrier() {
    if (size == 1) return;
    const int round = rounds.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      rounds.store(round + 1, std::memory_order_release);
      rounds.notify_all();
    } else {
      wait_for_change(rounds, round);
    }
  }

 private:
  std::atomic<int> arrived{0}, rounds{0};
};

class Pool {
 public:
  // Runs work(team, thread) in up to `wanted` threads, of which the caller is number 0.
  template <class Work> static void run(int wanted, Work work) {
    Pool* pool = wanted > 1 ? current() : nullptr;
    if (!pool || pool->busy.test_and_set(std::memory_order_acquire)) {
      Team alone(1);
      return invoke(work, alone, 0);
    }
    wanted = pool->grow(wanted);
    Team team(wanted);
    auto call = [&](int thread) {
      if (thread < wanted) invoke(work, team, thread);
    };
    pool->work = [](void* f, int thread) { (*(decltype(call)*)f)(thread); };
    pool->argument = &call;
    pool->running.store(pool->threads - 1, std::memory_order_relaxed);
    pool->calls.fetch_add(1, std::memory_order_release);
    pool->calls.notify_all();
    call(0);
    for (int left; (left = pool->running.load(std::memory_order_acquire));) wait_for_change(pool->running, left);
    pool->busy.clear(std::memory_order_release);
  }

 private:
  std::atomic_flag busy;
  std::atomic<int> calls{0}, running{0};
  int threads = 1;  // the caller included
  void (*work)(void*, int) = nullptr;
  void* argument = nullptr;

  // Compiled once, for the caller and for the other threads.
  template <class Work> __attribute__((noinline)) static void invoke(Work& work, Team& team, int thread) {
    work(team, thread);
  }

  static Pool*& current() {
    static Pool* pool = [] {
      pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
      return new Pool;  // never deleted: its threads outlast static objects
    }();
    return pool;
  }
  struct Birth {
    Pool* pool;
    int thread, seen;
  };
  // Starts threads until there are `size`, or the system has no more; returns how many of these there are.
  int grow(int size) {
    for (; threads < size; threads++) {
      pthread_t started;
      Birth* birth = new Birth{this, threads, calls.load()};
      if (pthread_create(&started, nullptr, &Pool::begin, birth)) {
        delete birth;
        break;
      }
      pthread_detach(started);
    }
    return size < threads ? size : threads;
  }
  static void* begin(void* argument) {
    const Birth birth = *(Birth*)argument;
    delete (Birth*)argument;
    birth.pool->live(birth.thread, birth.seen);
    return nullptr;
  }
  // The life of a thread: it answers every call, also one that wants fewer threads.
  void live(int thread, int seen) {
    for (;; seen++) {
      wait_for_change(calls, seen);
      work(argument, thread);
      running.fetch_sub(1, std::memory_order_acq_rel);
      running.notify_all();
    }
  }
};

}  // namespace funrl
