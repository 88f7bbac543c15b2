#include "strbuf.h"
#include "table.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Reads a line of any length without its newline. Returns 0 at the end of the input. */
static int read_line(struct strbuf *line) {
  int c, any = 0;
  strbuf_clear(line);
  while ((c = getchar()) != EOF) {
    any = 1;
    if (c == '\n')
      break;
    char one = (char)c;
    strbuf_add(line, &one, 1);
  }
  return any;
}

/* Cuts the first word off *rest. */
static char *word(char **rest) {
  char *start = *rest + strspn(*rest, " ");
  char *end = start + strcspn(start, " ");
  if (*end)
    *end++ = 0;
  *rest = end;
  return start;
}

int main(void) {
  struct table t;
  struct strbuf line;
  table_init(&t);
  strbuf_init(&line);
  while (read_line(&line)) {
    char *rest = line.text;
    char *command = word(&rest);
    if (strcmp(command, "set") == 0) {
      char *key = word(&rest);
      table_set(&t, key, rest);
    } else if (strcmp(command, "append") == 0) {
      char *key = word(&rest);
      table_append(&t, key, rest);
    } else if (strcmp(command, "get") == 0) {
      const char *value = table_get(&t, word(&rest));
      printf("%s\n", value ? value : "(none)");
    } else if (strcmp(command, "del") == 0) {
      puts(table_delete(&t, word(&rest)) ? "deleted" : "(none)");
    } else if (strcmp(command, "count") == 0) {
      printf("%zu\n", t.used);
    } else if (strcmp(command, "list") == 0) {
      struct entry **all = table_sorted(&t);
      for (size_t i = 0; i < t.used; i++)
        printf("%s=%s\n", all[i]->key, all[i]->value);
    } else if (strcmp(command, "clear") == 0) {
      table_clear(&t);
    } else {
      printf("? %s\n", command);
    }
  }
  table_free(&t);
  return 0;
}
