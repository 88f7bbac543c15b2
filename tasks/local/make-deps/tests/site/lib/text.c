#include "text.h"
#include <string.h>

char *chomp(char *line) {
  line[strcspn(line, "\n")] = 0;
  return line;
}
