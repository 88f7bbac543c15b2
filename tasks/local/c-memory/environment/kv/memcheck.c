#define MEMCHECK_SELF
#include "memcheck.h"
#undef malloc
#undef realloc
#undef free

#define GUARD 16
struct block {
  struct block *next;
  const char *file;
  size_t size;
  int line, freed;
  unsigned char data[];
};
static struct block *blocks;
static int faults;

static void fault(const char *what, const struct block *b, const char *file, int line) {
  fprintf(stderr, "memcheck: %s, block of %zu bytes from %s:%d, noticed at %s:%d\n", what, b->size, b->file, b->line, file, line);
  faults++;
}

static void look(struct block *b, const char *file, int line) {
  for (int i = 0; i < GUARD; i++)
    if (b->data[b->size + i] != 0xAB) {
      fault("written past its end", b, file, line);
      memset(b->data + b->size, 0xAB, GUARD);
      return;
    }
}

static void at_exit(void) {
  for (struct block *b = blocks; b; b = b->next) {
    look(b, "exit", 0);
    if (!b->freed)
      fault("never freed", b, "exit", 0);
  }
  if (faults) {
    fflush(NULL);
    _Exit(99);
  }
}

void *mc_malloc(size_t n, const char *file, int line) {
  static int registered;
  if (!registered++)
    atexit(at_exit);
  struct block *b = (malloc)(sizeof *b + n + GUARD);
  *b = (struct block){.next = blocks, .file = file, .size = n, .line = line};
  memset(b->data, 0xCD, n);
  memset(b->data + n, 0xAB, GUARD);
  blocks = b;
  return b->data;
}

void *mc_calloc(size_t n, size_t m, const char *file, int line) {
  return memset(mc_malloc(n * m, file, line), 0, n * m);
}

static struct block *find(void *p) {
  for (struct block *b = blocks; b; b = b->next)
    if (b->data == p)
      return b;
  return NULL;
}

void mc_free(void *p, const char *file, int line) {
  struct block *b = p ? find(p) : NULL;
  if (!p)
    return;
  if (!b) {
    fprintf(stderr, "memcheck: %s:%d frees what was never allocated\n", file, line);
    faults++;
    return;
  }
  look(b, file, line);
  if (b->freed) {
    fault("freed twice", b, file, line);
    return;
  }
  b->freed = 1;
  memset(b->data, 0xDD, b->size);
}

void *mc_realloc(void *p, size_t n, const char *file, int line) {
  void *fresh = mc_malloc(n, file, line);
  if (p) {
    size_t old = find(p)->size;
    memcpy(fresh, p, old < n ? old : n);
    mc_free(p, file, line);
  }
  return fresh;
}
