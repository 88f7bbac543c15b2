/* Cuts the newline off a line. */
char *chomp(char *line);
