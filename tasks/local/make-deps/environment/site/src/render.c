/* render HEADER PAGE: prints PAGE as HTML. */
#include "config.h"
#include "escape.h"
#include "text.h"
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
  char line[1000];
  FILE *header = argc == 3 ? fopen(argv[1], "r") : NULL, *page = argc == 3 ? fopen(argv[2], "r") : NULL;
  if (!header || !page) {
    fprintf(stderr, "render: cannot read\n");
    return 2;
  }
  while (fgets(line, sizeof line, header))
    fputs(line, stdout);
  if (!fgets(line, sizeof line, page) || strncmp(line, "title: ", 7)) {
    fprintf(stderr, "render: %s has no title\n", argv[2]);
    return 1;
  }
  printf("<title>");
  escape(chomp(line + 7));
  printf("</title>\n<h1>%s</h1><main style=\"width: %dch\">\n", SITE_NAME, WIDTH);
  while (fgets(line, sizeof line, page)) {
    escape(chomp(line));
    putchar('\n');
  }
  printf("</main>\n");
  return 0;
}
