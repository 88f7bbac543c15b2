/* Prints text with the characters that HTML wants escaped. */
void escape(const char *text);
