// A team of threads that does one job together, phase by phase.
//
// torch's own pool was rejected: a decode step has about 250 phases of 20 to 100 microseconds,
// and leaving and entering a parallel region costs as much as the short ones. Here all threads
// stay in the job, and whoever waits spins (the wait is short) and yields after a while (the
// processor may be shared).
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#include <sched.h>

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

constexpr int MAX_SPINS = 4000;

class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ended_ = true;
            job_number_++;
        }
        woken_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Run job(i) on every thread i, the caller being thread 0; returns when all have finished.
    void run(const std::function<void(int)>& job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            job_number_++;
        }
        woken_.notify_all();
        job(0);
        meet();
    }

    // Wait until every thread of the team has arrived.
    void meet() {
        if (size_ == 1) return;
        unsigned round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            spins < MAX_SPINS ? relax() : void(sched_yield());
        }
    }

  private:
    void serve(int index) {
        unsigned long seen = 0;
        while (true) {
            const std::function<void(int)>* job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                woken_.wait(lock, [&] { return job_number_ != seen; });
                seen = job_number_;
                if (ended_) return;
                job = job_;
            }
            (*job)(index);
            meet();
        }
    }

    int size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable woken_;
    const std::function<void(int)>* job_ = nullptr;
    unsigned long job_number_ = 0;
    bool ended_ = false;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};
