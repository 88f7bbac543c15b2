"""Five questions about a shop (store.Shop). Each function takes the shop and gives its answer as a list."""

import itertools


def best_customers(shop):
    """The ten customers with the highest turnover: (name, cents), ties by name."""
    cents = {p["id"]: p["cents"] for p in shop.products.scan()}
    turnover = {c["id"]: [c["name"], 0] for c in shop.customers.scan()}
    for order in shop.orders.scan():
        turnover[order["customer"]][1] += order["quantity"] * cents[order["product"]]
    return sorted(map(tuple, turnover.values()), key=lambda pair: (-pair[1], pair[0]))[:10]


def never_sold(shop):
    """The names of products that nobody ordered, in the order of their ids."""
    sold = {order["product"] for order in shop.orders.scan()}
    return [p["name"] for p in shop.products.scan() if p["id"] not in sold]


def orders_between(shop, first, last):
    """The ids of the orders from day `first` to day `last`, both included. Orders are sorted by day."""
    low, high = 0, len(shop.orders)
    while low < high:
        middle = (low + high) // 2
        if shop.orders.get(middle)["day"] < first:
            low = middle + 1
        else:
            high = middle
    rows = map(shop.orders.get, range(low, len(shop.orders)))
    return [order["id"] for order in itertools.takewhile(lambda order: order["day"] <= last, rows)]


def bought_together(shop):
    """Pairs of products (a < b) that the same customer ordered on the same day: (name, name, how often), most frequent first,
    then by name; only the first twenty. A pair counts once for each such customer and day."""
    names = {p["id"]: p["name"] for p in shop.products.scan()}
    baskets, pairs = {}, {}
    for order in shop.orders.scan():
        baskets.setdefault((order["customer"], order["day"]), set()).add(order["product"])
    for basket in baskets.values():
        for pair in itertools.combinations(sorted(basket), 2):
            pairs[pair] = pairs.get(pair, 0) + 1
    return sorted(((names[a], names[b], n) for (a, b), n in pairs.items()), key=lambda p: (-p[2], p[0], p[1]))[:20]


def longest_gap(shop):
    """For every city the longest time in days without an order from there: (city, days, day on which it began), sorted by city.
    Of equal gaps the first one. Only gaps between two orders count; a city with fewer than two orders has none."""
    city = {c["id"]: c["city"] for c in shop.customers.scan()}
    days = {}
    for order in shop.orders.scan():
        days.setdefault(city[order["customer"]], []).append(order["day"])
    answer = []
    for name in sorted(days):
        gaps = [(later - earlier, -earlier) for earlier, later in zip(days[name], days[name][1:], strict=False)]
        if gaps:
            length, start = max(gaps)
            answer.append((name, length, -start))
    return answer
