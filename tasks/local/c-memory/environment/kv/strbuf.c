#include "strbuf.h"
#include <stdlib.h>
#include <string.h>

void strbuf_init(struct strbuf *b) {
  b->room = 8;
  b->length = 0;
  b->text = malloc(b->room);
  b->text[0] = 0;
}

void strbuf_add(struct strbuf *b, const char *text, size_t n) {
  if (b->length + n > b->room) {
    while (b->length + n > b->room)
      b->room *= 2;
    b->text = realloc(b->text, b->room);
  }
  memcpy(b->text + b->length, text, n);
  b->length += n;
  b->text[b->length] = 0;
}

void strbuf_clear(struct strbuf *b) {
  b->length = 0;
}

void strbuf_free(struct strbuf *b) {
  free(b->text);
}
