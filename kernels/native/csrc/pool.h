/* Threads that run one function together and meet at barriers.
 *
 * A step of a small model has some two hundred barriers in a few milliseconds, so waiting threads look at memory for a
 * short while before they sleep; they do sleep soon, because on a laptop the other half of the processor belongs to
 * somebody else.
 */
#ifndef TP_POOL_H
#define TP_POOL_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

#define MAX_THREADS 256
#define SPINS 6000 /* about 50 to 100 microseconds */

typedef void (*Work)(void *argument, int thread);

typedef struct {
    int threads;
    pthread_t handles[MAX_THREADS];
    _Alignas(TP_PAD) _Atomic uint32_t started; /* counts calls of pool_run */
    _Atomic int start_sleepers;
    Work work;
    void *argument;
    _Atomic int stopping;
    _Alignas(TP_PAD) _Atomic uint32_t phase; /* counts barriers */
    _Atomic int phase_sleepers;
    _Alignas(TP_PAD) _Atomic int arrived;
} Pool;

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_while(_Atomic uint32_t *word, _Atomic int *sleepers, uint32_t value) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        relax();
    }
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(word) == value) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    atomic_fetch_sub(sleepers, 1);
}

static void advance(_Atomic uint32_t *word, _Atomic int *sleepers) {
    atomic_fetch_add(word, 1);
    if (atomic_load(sleepers) > 0) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void barrier(Pool *pool) {
    if (pool->threads == 1) return;
    uint32_t phase = atomic_load(&pool->phase);
    if (atomic_fetch_add(&pool->arrived, 1) == pool->threads - 1) {
        atomic_store(&pool->arrived, 0);
        advance(&pool->phase, &pool->phase_sleepers);
    } else {
        wait_while(&pool->phase, &pool->phase_sleepers, phase);
    }
}

typedef struct {
    Pool *pool;
    int thread;
} Member;

static void *member_main(void *given) {
    Member member = *(Member *)given;
    free(given);
    Pool *pool = member.pool;
    uint32_t seen = 0;
    for (;;) {
        wait_while(&pool->started, &pool->start_sleepers, seen);
        seen++;
        if (atomic_load(&pool->stopping)) return NULL;
        pool->work(pool->argument, member.thread);
        barrier(pool);
    }
}

/* Run work(argument, thread) on every thread of the pool, the caller's included; returns when all are done. */
static void pool_run(Pool *pool, Work work, void *argument) {
    pool->work = work;
    pool->argument = argument;
    if (pool->threads > 1) advance(&pool->started, &pool->start_sleepers);
    work(argument, 0);
    barrier(pool);
}

static Pool *pool_new(int threads) {
    Pool *pool = NULL;
    if (threads < 1 || threads > MAX_THREADS || posix_memalign((void **)&pool, TP_PAD, sizeof(Pool)) != 0) return NULL;
    memset(pool, 0, sizeof(Pool));
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
    advance(&pool->started, &pool->start_sleepers);
    for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->handles[thread], NULL);
    free(pool);
}

/* A shared counter hands out tasks: threads that are held up by others take fewer. */
typedef struct {
    _Alignas(TP_PAD) _Atomic int64_t next;
} Counter;

INLINE int64_t take(Counter *counter, int64_t count) {
    return atomic_fetch_add_explicit(&counter->next, count, memory_order_relaxed);
}

#endif
