/* The next token of a row of logits, without sorting the vocabulary. Included by stack.c.
 *
 * Scaled logits are cut by top-k, then top-p over what that left, then min-p, and Gumbel noise is added, a hash of
 * (key, token); the largest wins. Tokens that tie with the last survivor survive.
 * A histogram over the distance to the best token finds the bucket in which a cut lies; only that bucket is searched.
 */

#define BUCKETS 4096
#define BUCKET_SPAN 32.0f /* distances from here on share the last bucket: e^-32 of the best */

typedef struct {
    double temperature, top_p, min_p; /* temperature 0: the best token; top_p 1 and min_p 0: no cut */
    int64_t top_k;                    /* 0: no cut */
    uint64_t key;
} Draw;

typedef struct {
    double mass[BUCKETS];
    int32_t count[BUCKETS];
    float *values; /* [vocab] */
} SampleScratch;

/* SplitMix64's finalizer over key + (token + 1) * golden ratio (Steele, Lea, Flood, OOPSLA 2014). v in (0, 1). */
INLINE float uniform(uint64_t key, int64_t token) {
    uint64_t h = key + (uint64_t)(token + 1) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    h ^= h >> 31;
    const float v = ((float)(h >> 11) + 0.5f) * 0x1p-53f;
    return MIN(v, 1.0f - 0x1p-24f);
}

INLINE float gumbel(float v) { return -logf(-log1pf(-v)); }

INLINE int bucket_of(float distance) {
    const float at = distance * (BUCKETS / BUCKET_SPAN);
    return at < BUCKETS - 1 ? (int)at : BUCKETS - 1;
}

static int largest_first(const void *a, const void *b) {
    const float left = *(const float *)a, right = *(const float *)b;
    return left < right ? 1 : left > right ? -1 : 0;
}

/* The k-th largest of values [count], which change places (Hoare, "Algorithm 65: Find", CACM 1961). At a low
 * temperature the last bucket can hold nearly all the vocabulary, too much to be sorted for every token. */
static float kth_largest(float *values, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i > j) break;
            const float swap = values[i];
            values[i++] = values[j];
            values[j--] = swap;
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return values[k - 1];
}

/* The values of one bucket that are at least `least`, into found; how many. */
static int64_t take_bucket(const float *values, int64_t count, float top, int bucket, float least, float *found) {
    int64_t taken = 0;
    for (int64_t i = 0; i < count; i++)
        if (values[i] >= least && bucket_of(top - values[i]) == bucket) found[taken++] = values[i];
    return taken;
}

/* values [count] are scaled logits. The least value that survives top-k and top-p. room: for count values. */
static float floor_of(SampleScratch *s, int64_t count, float top, int64_t top_k, double top_p, float *room) {
    const float *values = s->values;
    float least = -INFINITY;
    memset(s->mass, 0, sizeof(s->mass));
    memset(s->count, 0, sizeof(s->count));
    double total = 0.0;
    for (int64_t from = 0; from < count; from += 1024) {
        const int64_t width = MIN(1024, count - from);
        float odds[1024];
        int32_t buckets[1024];
        for (int64_t i = 0; i < width; i++) odds[i] = fast_exp(values[from + i] - top);
        for (int64_t i = 0; i < width; i++) buckets[i] = bucket_of(top - values[from + i]);
        for (int64_t i = 0; i < width; i++) {
            s->count[buckets[i]]++;
            s->mass[buckets[i]] += odds[i];
        }
    }
    for (int b = 0; b < BUCKETS; b++) total += s->mass[b];
    if (top_k > 0 && top_k < count) {
        int64_t before = 0;
        int bucket = 0;
        while (before + s->count[bucket] < top_k) before += s->count[bucket++];
        const int64_t found = take_bucket(values, count, top, bucket, -INFINITY, room);
        least = kth_largest(room, found, MIN(top_k - before, found));
        total = 0.0;
        for (int b = 0; b < bucket; b++) total += s->mass[b];
        double inside = 0.0;
        for (int64_t i = 0; i < found; i++)
            if (room[i] >= least) inside += exp((double)(room[i] - top));
        total += inside;
        s->mass[bucket] = inside;
        for (int b = bucket + 1; b < BUCKETS; b++) s->mass[b] = 0.0;
    }
    if (top_p >= 1.0) return least;
    /* The first token at which the mass reaches top_p is the last to survive. */
    const double wanted = top_p * total;
    double before = 0.0;
    int bucket = 0;
    while (bucket < BUCKETS - 1 && before + s->mass[bucket] < wanted) before += s->mass[bucket++];
    const int64_t found = take_bucket(values, count, top, bucket, least, room);
    qsort(room, (size_t)found, sizeof(float), largest_first);
    float floor = least;
    for (int64_t i = 0; i < found; i++) {
        floor = room[i];
        before += exp((double)(room[i] - top));
        if (before >= wanted) break;
    }
    return MAX(floor, least);
}

/* The token, or -1 if the largest logit is not finite. */
static int64_t choose_token(const float *logits, int64_t count, const Draw *draw, SampleScratch *s, float *room) {
    float top = -INFINITY, poison = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : poison)
    for (int64_t i = 0; i < count; i++) {
        top = logits[i] > top ? logits[i] : top;
        poison += logits[i] != logits[i] ? 1.0f : 0.0f;
    }
    if (poison != 0.0f || !isfinite(top)) return -1;
    int64_t best = 0;
    while (logits[best] != top) best++;
    if (draw->temperature <= 0.0) return best;
    const float temperature = (float)draw->temperature;
    float *values = s->values;
    for (int64_t i = 0; i < count; i++) values[i] = logits[i] / temperature;
    top = values[best];
    float least = -INFINITY;
    if (draw->top_k > 0 || draw->top_p < 1.0) least = floor_of(s, count, top, draw->top_k, draw->top_p, room);
    if (draw->min_p > 0.0) least = MAX(least, top + (float)log(draw->min_p));
    /* Noise g beats the best so far only if v < e^(value - best), because 1 - e^-y <= y: few logarithms are needed. */
    float winning = top + gumbel(uniform(draw->key, best));
    for (int64_t from = 0; from < count; from += 1024) {
        const int64_t to = MIN(from + 1024, count);
        float odds[1024], v[1024];
        for (int64_t i = from; i < to; i++) odds[i - from] = fast_exp(MIN(values[i] - winning + 1e-3f, 80.0f));
        for (int64_t i = from; i < to; i++) v[i - from] = uniform(draw->key, i);
        for (int64_t i = from; i < to; i++) {
            if (v[i - from] > odds[i - from] || values[i] < least) continue;
            const float value = values[i] + gumbel(v[i - from]);
            if (value > winning || (value == winning && i < best)) winning = value, best = i;
        }
    }
    return best;
}

typedef struct {
    const float *logits;
    const Draw *draws;
    int64_t rows, count;
    int64_t *tokens;
    char *scratch; /* a piece of scratch_bytes for each thread */
    int64_t scratch_bytes;
} ChoiceJob;

static void choose_row(const ChoiceJob *job, int thread, int64_t row) {
    SampleScratch *s = (SampleScratch *)(job->scratch + thread * job->scratch_bytes);
    s->values = (float *)(s + 1);
    job->tokens[row] =
        choose_token(job->logits + row * job->count, job->count, &job->draws[row], s, s->values + job->count);
}

static void choose_rows(Hand *hand, const void *given) {
    const ChoiceJob *job = given;
    EACH_TASK(hand, job->rows, job->rows, row, choose_row(job, hand->thread, row));
}
