/* Threads that work through one job together.
 *
 * A job is a sequence of operations, and an operation is a number of tasks that a shared counter hands out. Every
 * thread walks through the whole sequence, takes what tasks it gets, and goes on once all tasks of an operation are
 * done, by whomever. So nobody waits for a thread that the system has put aside, unless it was put aside in the middle
 * of a task: on a busy machine one thread alone carries on. A thread that comes late finds nothing left to take, skips
 * to where the others are, or drops out if the next job has begun: counters carry the number of their job.
 *
 * A step of a small model has some two hundred operations in a few milliseconds, so a waiting thread looks at memory
 * for a short while before it sleeps.
 */
#ifndef TP_POOL_H
#define TP_POOL_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define MAX_THREADS 256
#define SPINS 2000 /* some 30 microseconds */
#define NAP_NS 100000 /* short: a core that goes to sleep is offered threads that wait for another one */
#define JOB_BYTES 512

/* Both words: number of the job in the high half, tasks in the low one. */
typedef struct {
    _Alignas(TP_PAD) _Atomic uint64_t taken;
    _Alignas(TP_PAD) _Atomic uint64_t done;
} Op;

struct Pool;

/* One thread's part in a job. */
typedef struct {
    struct Pool *pool;
    int thread;
    uint32_t job;
    int late; /* the next job has begun: nothing may be touched any more */
    int32_t op;
} Hand;

typedef void (*Work)(Hand *hand, const void *job);

typedef struct Pool {
    int threads;
    pthread_t handles[MAX_THREADS];
    Op *ops;
    int64_t op_count;
    Work work;
    _Alignas(TP_PAD) char job[JOB_BYTES];
    _Alignas(TP_PAD) _Atomic uint32_t prepared; /* the job that is being written */
    _Alignas(TP_PAD) _Atomic uint32_t started;  /* the job that has begun */
    _Atomic uint32_t finished;
    _Atomic int stopping;
    _Alignas(TP_PAD) _Atomic int sleepers;
    _Atomic int active; /* threads other than the caller's that are in a job */
    pid_t owner;        /* a forked child has none of the threads */
} Pool;

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The half of a word that the kernel can wait for. */
INLINE uint32_t *low_half(_Atomic uint64_t *word) {
    const int big = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__;
    return (uint32_t *)word + big;
}

static void sleep_while(Pool *pool, uint32_t *word, uint32_t value, int64_t ns) {
    const struct timespec limit = {ns / 1000000000, ns % 1000000000};
    atomic_fetch_add(&pool->sleepers, 1);
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &limit, NULL, 0);
    atomic_fetch_sub(&pool->sleepers, 1);
}

INLINE void wake(Pool *pool, uint32_t *word) {
    if (atomic_load(&pool->sleepers) > 0) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

INLINE Op *next_op(Hand *hand) { return &hand->pool->ops[hand->op++]; }

/* The first of up to `stride` tasks that are now this thread's, or -1. A late thread may have computed `total` from
 * what the next job is being made of: the counter is read after that, and has the next job's number by then. */
INLINE int64_t take(Hand *hand, Op *op, int64_t total, int64_t stride) {
    atomic_thread_fence(memory_order_acquire);
    uint64_t word = atomic_load_explicit(&op->taken, memory_order_acquire);
    while (!hand->late) {
        const int64_t first = (uint32_t)word;
        if ((uint32_t)(word >> 32) != hand->job) {
            hand->late = 1;
        } else if (first >= total) {
            break;
        } else if (atomic_compare_exchange_weak(&op->taken, &word, word + (uint64_t)MIN(stride, total - first))) {
            return first;
        }
    }
    return -1;
}

INLINE void complete(Hand *hand, Op *op, int64_t total, int64_t count) {
    const int64_t before = (uint32_t)atomic_fetch_add(&op->done, (uint64_t)count);
    if (before + count == total && hand->pool->threads > 1) wake(hand->pool, low_half(&op->done));
}

/* Wait until all tasks are done. */
INLINE void settle(Hand *hand, Op *op, int64_t total) {
    for (int spins = 0; !hand->late; spins++) {
        const uint64_t word = atomic_load_explicit(&op->done, memory_order_acquire);
        if ((uint32_t)(word >> 32) != hand->job) {
            hand->late = 1;
        } else if ((int64_t)(uint32_t)word >= total) {
            return;
        } else if (spins < SPINS) {
            relax();
        } else {
            sleep_while(hand->pool, low_half(&op->done), (uint32_t)word, NAP_NS);
        }
    }
}

/* About so many pieces a thread, so that one that is held up keeps little from the others. */
INLINE int64_t stride_for(const Hand *hand, int64_t total, int64_t pieces) {
    return MAX(1, total / (hand->pool->threads * MAX(1, pieces)));
}

/* for each task `index` of `total`: the body that follows; then wait for all. `total` must be the same whenever a
 * thread comes by, however far others are: it may be made of nothing that a later operation of the job writes. */
#define EACH_TASK(hand, total, pieces, index, body)                                                                   \
    do {                                                                                                              \
        Op *op_ = next_op(hand);                                                                                      \
        const int64_t total_ = (total), stride_ = stride_for(hand, total_, pieces);                                   \
        for (int64_t first_; (first_ = take(hand, op_, total_, stride_)) >= 0;) {                                     \
            const int64_t stop_ = MIN(first_ + stride_, total_);                                                      \
            for (int64_t index = first_; index < stop_; index++) body;                                                \
            complete(hand, op_, total_, stop_ - first_);                                                              \
        }                                                                                                             \
        settle(hand, op_, total_);                                                                                    \
    } while (0)

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

typedef struct {
    Pool *pool;
    int thread;
} Member;

static void *member_main(void *given) {
    const Member member = *(Member *)given;
    free(given);
    Pool *pool = member.pool;
    uint32_t seen = 0;
    _Alignas(TP_PAD) char job[JOB_BYTES];
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&pool->started, memory_order_acquire) == seen; spins++) {
            if (spins < SPINS)
                relax();
            else
                sleep_while(pool, (uint32_t *)&pool->started, seen, 1000000000);
        }
        if (atomic_load(&pool->stopping)) return NULL;
        atomic_fetch_add(&pool->active, 1);
        const uint32_t number = atomic_load(&pool->started);
        if (atomic_load(&pool->finished) != number) {
            const Work work = pool->work;
            memcpy(job, pool->job, JOB_BYTES);
            atomic_thread_fence(memory_order_acquire);
            if (atomic_load(&pool->prepared) == number) {
                Hand hand = {pool, member.thread, number, 0, 0};
                work(&hand, job);
            }
        }
        seen = number;
        atomic_fetch_sub(&pool->active, 1);
    }
}

/* Wait until no other thread is in a job; only then may memory that jobs use be given back. */
static void quiet(Pool *pool) {
    while (atomic_load(&pool->active) > 0 && pool->owner == getpid()) sched_yield();
}

/* Room for so many operations in a job. */
static int reserve_ops(Pool *pool, int64_t count) {
    if (count <= pool->op_count) return 1;
    quiet(pool);
    free(pool->ops);
    pool->ops = NULL;
    pool->op_count = 0;
    if (posix_memalign((void **)&pool->ops, TP_PAD, (size_t)count * sizeof(Op)) != 0) return 0;
    memset(pool->ops, 0, (size_t)count * sizeof(Op));
    pool->op_count = count;
    return 1;
}

/* Call before anything is written that a job reads: from here on late threads of earlier jobs find nothing to take.
 * The job will have at most `ops` operations. */
static void pool_open(Pool *pool, int64_t ops) {
    const uint32_t number = atomic_load(&pool->started) + 1;
    atomic_store(&pool->prepared, number);
    for (int64_t i = 0; i < ops; i++) {
        atomic_store_explicit(&pool->ops[i].taken, (uint64_t)number << 32, memory_order_relaxed);
        atomic_store_explicit(&pool->ops[i].done, (uint64_t)number << 32, memory_order_relaxed);
    }
    atomic_thread_fence(memory_order_seq_cst);
}

/* Do the job that was opened with all threads, the caller's included; returns when it is done. The job is copied; what
 * it points to must stay until then, and what late threads may look at (see Hand.late) for longer. */
static void pool_run(Pool *pool, Work work, const void *job, size_t bytes) {
    const uint32_t number = atomic_load(&pool->prepared);
    pool->work = work;
    memcpy(pool->job, job, bytes);
    atomic_store(&pool->started, number);
    if (pool->threads > 1) wake(pool, (uint32_t *)&pool->started);
    Hand hand = {pool, 0, number, 0, 0};
    work(&hand, pool->job);
    atomic_store(&pool->finished, number);
}

/* At least one thread and at most MAX_THREADS; fewer than asked if the system gives no more. */
static Pool *pool_new(int threads) {
    Pool *pool = NULL;
    if (posix_memalign((void **)&pool, TP_PAD, sizeof(Pool)) != 0) return NULL;
    memset(pool, 0, sizeof(Pool));
    threads = MIN(threads, MAX_THREADS);
    pool->owner = getpid();
    pool->threads = 1;
    for (int thread = 1; thread < threads; thread++) {
        Member *member = malloc(sizeof(Member));
        if (member == NULL) break;
        *member = (Member){pool, thread};
        if (pthread_create(&pool->handles[thread], NULL, member_main, member) != 0) {
            free(member);
            break;
        }
        pool->threads = thread + 1;
    }
    return pool;
}

static void pool_free(Pool *pool) {
    if (pool == NULL) return;
    atomic_store(&pool->stopping, 1);
    atomic_fetch_add(&pool->started, 1);
    syscall(SYS_futex, (uint32_t *)&pool->started, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    for (int thread = 1; thread < pool->threads && pool->owner == getpid(); thread++)
        pthread_join(pool->handles[thread], NULL);
    free(pool->ops);
    free(pool);
}

#endif
