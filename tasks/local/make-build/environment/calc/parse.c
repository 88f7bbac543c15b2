#include <ctype.h>
#include <stdlib.h>
#include "calc.h"

static const char *at;
static double sum(void);

static void spaces(void)
{
    while (isspace((unsigned char)*at))
        at++;
}

static double atom(void)
{
    spaces();
    if (*at == '(') {
        at++;
        double inner = sum();
        spaces();
        at++;
        return inner;
    }
    char *end;
    double number = strtod(at, &end);
    at = end;
    return number;
}

static double raised(void)
{
    double base = atom();
    spaces();
    if (*at == '^') {
        at++;
        return power(base, raised());
    }
    return base;
}

static double product(void)
{
    double value = raised();
    for (;;) {
        spaces();
        if (*at == '*') {
            at++;
            value *= raised();
        } else if (*at == '/') {
            at++;
            value /= raised();
        } else {
            return value;
        }
    }
}

static double sum(void)
{
    double value = product();
    for (;;) {
        spaces();
        if (*at == '+') {
            at++;
            value += product();
        } else if (*at == '-') {
            at++;
            value += product();
        } else {
            return value;
        }
    }
}

double parse(const char *text)
{
    at = text;
    return sum();
}
