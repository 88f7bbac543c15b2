/* A calculator for one expression: + - * / ^ and parentheses. */
double parse(const char *text);
double power(double base, double exponent);
