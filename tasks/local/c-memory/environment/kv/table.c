#include "table.h"
#include <stdlib.h>
#include <string.h>

#define FIRST_SIZE 4

static size_t hash(const char *key) {
  size_t h = 5381;
  while (*key)
    h = h * 33 + (unsigned char)*key++;
  return h;
}

static char *copy(const char *text) {
  char *fresh = malloc(strlen(text));
  return strcpy(fresh, text);
}

void table_init(struct table *t) {
  t->size = FIRST_SIZE;
  t->used = 0;
  t->buckets = calloc(t->size, sizeof *t->buckets);
}

static struct entry *find(const struct table *t, const char *key) {
  struct entry *e = t->buckets[hash(key) % t->size];
  while (e && strcmp(e->key, key) != 0)
    e = e->next;
  return e;
}

static void grow(struct table *t) {
  size_t size = t->size * 2;
  struct entry **buckets = malloc(size * sizeof *buckets);
  for (size_t i = 0; i < t->size; i++)
    for (struct entry *e = t->buckets[i], *next; e; e = next) {
      next = e->next;
      struct entry **slot = &buckets[hash(e->key) % size];
      e->next = *slot;
      *slot = e;
    }
  free(t->buckets);
  t->buckets = buckets;
  t->size = size;
}

static void insert(struct table *t, char *key, char *value) {
  struct entry *e = malloc(sizeof *e);
  struct entry **slot = &t->buckets[hash(key) % t->size];
  if (t->used + 1 > t->size)
    grow(t);
  e->key = key;
  e->value = value;
  e->next = *slot;
  *slot = e;
  t->used++;
}

void table_set(struct table *t, const char *key, const char *value) {
  struct entry *e = find(t, key);
  if (e)
    e->value = copy(value);
  else
    insert(t, copy(key), copy(value));
}

void table_append(struct table *t, const char *key, const char *text) {
  struct entry *e = find(t, key);
  if (!e) {
    table_set(t, key, text);
    return;
  }
  e->value = realloc(e->value, strlen(e->value) + strlen(text));
  strcat(e->value, text);
}

const char *table_get(const struct table *t, const char *key) {
  struct entry *e = find(t, key);
  return e ? e->value : NULL;
}

static void drop(struct entry *e) {
  free(e->key);
  free(e->value);
  free(e);
}

int table_delete(struct table *t, const char *key) {
  struct entry **slot = &t->buckets[hash(key) % t->size];
  for (; *slot; slot = &(*slot)->next)
    if (strcmp((*slot)->key, key) == 0) {
      struct entry *gone = *slot;
      drop(gone);
      *slot = gone->next;
      return 1;
    }
  return 0;
}

static int by_key(const void *a, const void *b) {
  return strcmp((*(struct entry *const *)a)->key, (*(struct entry *const *)b)->key);
}

struct entry **table_sorted(const struct table *t) {
  struct entry **all = malloc(t->used * sizeof *all);
  size_t n = 0;
  for (size_t i = 0; i < t->size; i++)
    for (struct entry *e = t->buckets[i]; e; e = e->next)
      all[n++] = e;
  qsort(all, n, sizeof *all, by_key);
  return all;
}

void table_clear(struct table *t) {
  for (size_t i = 0; i < t->size; i++)
    for (struct entry *e = t->buckets[i]; e; e = e->next)
      drop(e);
  t->used = 0;
}

void table_free(struct table *t) {
  table_clear(t);
  free(t->buckets);
}
