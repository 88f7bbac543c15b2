#include "escape.h"
#include <stdio.h>

void escape(const char *text) {
  for (; *text; text++)
    switch (*text) {
    case '<':
      fputs("&lt;", stdout);
      break;
    case '&':
      fputs("&amp;", stdout);
      break;
    default:
      putchar(*text);
    }
}
