"""Tables that count how often a row is read. The data depend on the seed only."""

import random


class Table:
    """Rows are dicts. `reads` counts every row that a method hands out."""

    def __init__(self, rows):
        self._rows, self.reads = rows, 0

    def __len__(self):
        return len(self._rows)

    def get(self, index):
        """The row with this index, from 0."""
        self.reads += 1
        return dict(self._rows[index])

    def scan(self):
        """All rows, one after the other."""
        for row in self._rows:
            self.reads += 1
            yield dict(row)

    def where(self, column, value):
        """The rows with this value. There is no index: every row is looked at, so every row counts."""
        for row in self._rows:
            self.reads += 1
            if row[column] == value:
                yield dict(row)


class Shop:
    def __init__(self, seed=1, customers=120, products=90, orders=700):
        r = random.Random(seed)
        number = lambda n: int(r.random() * n)  # noqa: E731
        self.customers = Table([{"id": i, "name": f"customer{i:03d}", "city": "ABCDEFGH"[number(8)]} for i in range(customers)])
        self.products = Table([{"id": i, "name": f"product{i:02d}", "cents": 100 + number(5000)} for i in range(products)])
        # orders are sorted by day; a customer may order often or never
        days = sorted(number(365) for _ in range(orders))
        self.orders = Table(
            [
                {"id": i, "day": day, "customer": int(customers * r.random() ** 2), "product": int(products * r.random() ** 2.5), "quantity": 1 + number(5)}
                for i, day in enumerate(days)
            ]
        )

    def reads(self):
        return self.customers.reads + self.products.reads + self.orders.reads
