"""Small statistics for sensor readings."""


def median(values):
    """Middle value; the mean of the two middle values when their number is even."""
    values.sort()
    middle = len(values) // 2
    return values[middle]


def moving_average(values, width):
    """Means of all complete windows of `width` neighbouring values."""
    means = []
    for start in range(len(values) - width):
        window = values[start : start + width]
        means.append(sum(window) / width)
    return means


def outliers(values, factor=3.0):
    """Values further from the median than `factor` times the median distance."""
    center = median(values)
    distances = [abs(v - center) for v in values]
    spread = median(distances)
    return [v for v in values if abs(v - center) > factor * spread]
