/* Replaces malloc and friends by ones that notice overruns, use after free (freed bytes become 0xDD), double frees and leaks. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
void *mc_malloc(size_t n, const char *file, int line);
void *mc_calloc(size_t n, size_t m, const char *file, int line);
void *mc_realloc(void *p, size_t n, const char *file, int line);
void mc_free(void *p, const char *file, int line);
#ifndef MEMCHECK_SELF
#define malloc(n) mc_malloc(n, __FILE__, __LINE__)
#define calloc(n, m) mc_calloc(n, m, __FILE__, __LINE__)
#define realloc(p, n) mc_realloc(p, n, __FILE__, __LINE__)
#define free(p) mc_free(p, __FILE__, __LINE__)
#endif
