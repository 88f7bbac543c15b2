/* A string that grows. */
#ifndef STRBUF_H
#define STRBUF_H
#include <stddef.h>
struct strbuf {
  char *text; /* ends with a zero byte */
  size_t length, room;
};
void strbuf_init(struct strbuf *b);
void strbuf_add(struct strbuf *b, const char *text, size_t n);
void strbuf_clear(struct strbuf *b); /* empties it, keeps the room */
void strbuf_free(struct strbuf *b);
#endif
