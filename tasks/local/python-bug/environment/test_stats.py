"""Run: python3 test_stats.py"""

import unittest

from stats import median, moving_average, outliers


class StatsTest(unittest.TestCase):
    def test_median_odd(self):
        self.assertEqual(median([3, 1, 2]), 2)

    def test_median_even(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)

    def test_moving_average(self):
        self.assertEqual(moving_average([1, 2, 3, 4], 2), [1.5, 2.5, 3.5])

    def test_outliers(self):
        self.assertEqual(outliers([9, 10, 50, 11, 10]), [50])


unittest.main()
