#include <math.h>
#include "calc.h"

double power(double base, double exponent)
{
    return pow(base, exponent);
}
