/* A hash table from strings to strings. It keeps copies of what it is given. */
#ifndef TABLE_H
#define TABLE_H
#include <stddef.h>
struct entry {
  char *key, *value;
  struct entry *next; /* in the same bucket */
};
struct table {
  struct entry **buckets;
  size_t size, used;
};
void table_init(struct table *t);
void table_set(struct table *t, const char *key, const char *value);
void table_append(struct table *t, const char *key, const char *text);
const char *table_get(const struct table *t, const char *key); /* NULL when there is none */
int table_delete(struct table *t, const char *key);            /* 1 when it was there */
struct entry **table_sorted(const struct table *t);            /* `used` entries by key; the caller frees the array, not the entries */
void table_clear(struct table *t);
void table_free(struct table *t);
#endif
