/* Loads the plugin as NCCL does and asks it through structures declared here, in C, from the interface's description:
 * what the two languages disagree about shows as a wrong offset, a crash or a wrong answer.
 *
 *     abi PLUGIN    with NCCL_TUNER_CONFIG_FILE naming the table of abi.rs
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int status;
typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct domains { int count, ranks_min, ranks_max; };
struct constants {
  double base[7][3], hardware[3][7][3], ll[4][3], ring_ll128[4][3], tree_ll128[4][3], tree[4][3], nvls_tree[4][3];
};

struct tuner_v2 {
  const char *name;
  status (*init)(size_t ranks, size_t nodes, logger log, void **context);
  status (*choose)(void *context, int collective, size_t bytes, int collnet, int nvls, int operations, int *algorithm,
                   int *protocol, int *channels);
  status (*destroy)(void *context);
};
struct tuner_v3 {
  const char *name;
  status (*init)(size_t ranks, size_t nodes, logger log, void **context);
  status (*choose)(void *context, int collective, size_t bytes, int operations, float **table, int algorithms,
                   int protocols, int *channels);
  status (*destroy)(void *context);
};
struct tuner_v4 {
  const char *name;
  status (*init)(size_t ranks, size_t nodes, logger log, void **context);
  status (*choose)(void *context, int collective, size_t bytes, int operations, float **table, int algorithms,
                   int protocols, int registered, int *channels);
  status (*destroy)(void *context);
};
struct tuner_v5 {
  const char *name;
  status (*init)(void **context, uint64_t communicator, size_t ranks, size_t nodes, logger log,
                 struct domains *domains, struct constants *constants);
  status (*choose)(void *context, int collective, size_t bytes, int operations, float **table, int algorithms,
                   int protocols, int registered, int *channels);
  status (*finalize)(void *context);
};
struct tuner_v6 {
  const char *name;
  status (*init)(void **context, uint64_t communicator, size_t ranks, size_t nodes, logger log,
                 struct domains *domains, struct constants *constants);
  status (*choose)(void *context, int collective, size_t bytes, int operations, float **table, int algorithms,
                   int protocols, int registered, int *channels);
  status (*finalize)(void *context);
  status (*chunk_size)(void *context, int collective, size_t bytes, int algorithm, int protocol, int channels,
                       size_t *chunk);
};

static char last_line[4096];
static int lines;

static void keep(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  va_list arguments;
  (void)file, (void)line;
  va_start(arguments, format);
  vsnprintf(last_line, sizeof last_line, format, arguments);
  va_end(arguments);
  printf("log %d %#lx %s\n", level, flags, last_line);
  lines++;
}

static void check(int holds, const char *what) {
  if (!holds) {
    printf("FAILED: %s\n", what);
    exit(1);
  }
}
#define CHECK(condition) check(condition, #condition)

enum { ALL_GATHER = 2, ALL_REDUCE = 4, RING = 1, TREE = 0, LL = 0, SIMPLE = 2 };

static void fill(float table[7][3], float cost) {
  for (int a = 0; a < 7; a++)
    for (int p = 0; p < 3; p++) table[a][p] = cost;
}

static int cells_of(float table[7][3], float cost) {
  int count = 0;
  for (int a = 0; a < 7; a++)
    for (int p = 0; p < 3; p++) count += table[a][p] == cost;
  return count;
}

/* Asks one of the versions with a cost table about the sizes of abi.rs. */
#define ASK(call)                                                                                    \
  do {                                                                                               \
    float table[7][3];                                                                               \
    int channels = 0;                                                                                \
    size_t bytes;                                                                                    \
    int collective = ALL_REDUCE;                                                                     \
    fill(table, 9), bytes = 1000;                                                                    \
    CHECK((call) == 0 && table[RING][LL] == 0 && channels == 16 && cells_of(table, 9) == 20);        \
    fill(table, 9), bytes = (size_t)1 << 40, channels = 0;                                           \
    CHECK((call) == 0 && table[TREE][SIMPLE] == 0 && channels == 32 && cells_of(table, 9) == 20);    \
    fill(table, -1), bytes = 1000, channels = 0;                                                     \
    CHECK((call) == 0 && channels == 0 && cells_of(table, -1) == 21);                                \
    fill(table, 9), collective = ALL_GATHER;                                                         \
    CHECK((call) == 0 && channels == 0 && cells_of(table, 9) == 21);                                 \
  } while (0)

int main(int count, char **arguments) {
  check(count == 2, "one argument, the plugin");
  void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) check(0, dlerror());
  void *context = NULL;

  struct tuner_v2 *v2 = dlsym(library, "ncclTunerPlugin_v2");
  CHECK(v2 && !strcmp(v2->name, "nccltune"));
  if (v2->init(8, 1, keep, &context) != 0) {
    printf("refused: %s\n", last_line);
    return 2;
  }
  CHECK(lines == 1 && strstr(last_line, "2 of 3 rows are for 8 ranks on 1 nodes"));
  int algorithm = -1, protocol = -1, channels = 0;
  CHECK(v2->choose(context, ALL_REDUCE, 1000, 0, 0, 1, &algorithm, &protocol, &channels) == 0);
  CHECK(algorithm == RING && protocol == LL && channels == 16);
  algorithm = protocol = -1, channels = 0;
  CHECK(v2->choose(context, ALL_GATHER, 1000, 0, 0, 1, &algorithm, &protocol, &channels) == 0);
  CHECK(algorithm == -1 && protocol == -1 && channels == 0);
  CHECK(v2->destroy(context) == 0);

  struct tuner_v3 *v3 = dlsym(library, "ncclTunerPlugin_v3");
  CHECK(v3 && v3->init(8, 1, keep, &context) == 0);
  ASK(v3->choose(context, collective, bytes, 1, (float **)table, 7, 3, &channels));
  CHECK(v3->destroy(context) == 0);

  struct tuner_v4 *v4 = dlsym(library, "ncclTunerPlugin_v4");
  CHECK(v4 && v4->init(8, 1, keep, &context) == 0);
  ASK(v4->choose(context, collective, bytes, 1, (float **)table, 7, 3, 1, &channels));
  CHECK(v4->destroy(context) == 0);

  struct domains domains = {1, 8, 8};
  struct constants constants;
  memset(&constants, 0, sizeof constants);
  struct tuner_v5 *v5 = dlsym(library, "ncclTunerPlugin_v5");
  CHECK(v5 && v5->init(&context, 77, 8, 1, keep, &domains, &constants) == 0);
  ASK(v5->choose(context, collective, bytes, 1, (float **)table, 7, 3, 1, &channels));
  CHECK(v5->finalize(context) == 0);

  struct tuner_v6 *v6 = dlsym(library, "ncclTunerPlugin_v6");
  CHECK(v6 && v6->chunk_size == NULL && v6->init(&context, 77, 8, 1, keep, &domains, &constants) == 0);
  ASK(v6->choose(context, collective, bytes, 1, (float **)table, 7, 3, 1, &channels));
  CHECK(v6->finalize(context) == 0);

  /* A communicator that no row is for keeps NCCL's choices, and the log says so. */
  CHECK(v5->init(&context, 78, 2, 1, keep, &domains, &constants) == 0);
  CHECK(strstr(last_line, "keeps NCCL's own choices") != NULL);
  CHECK(v5->finalize(context) == 0);
  printf("constants %zu bytes, all versions agree\n", sizeof constants);
  return 0;
}
