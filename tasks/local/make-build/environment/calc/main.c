#include <stdio.h>
#include "calc.h"

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: calc EXPRESSION\n");
        return 2;
    }
    printf("%g\n", parse(argv[1]));
    return 0;
}
