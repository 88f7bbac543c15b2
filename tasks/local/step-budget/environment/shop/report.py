"""Five questions about a shop (store.Shop). Each function takes the shop and gives its answer as a list."""


def best_customers(shop):
    """The ten customers with the highest turnover: (name, cents), ties by name."""
    turnover = []
    for customer in shop.customers.scan():
        cents = 0
        for order in shop.orders.where("customer", customer["id"]):
            product = next(iter(shop.products.where("id", order["product"])))
            cents += order["quantity"] * product["cents"]
        turnover.append((customer["name"], cents))
    return sorted(turnover, key=lambda pair: (-pair[1], pair[0]))[:10]


def never_sold(shop):
    """The names of products that nobody ordered, in the order of their ids."""
    names = []
    for product in shop.products.scan():
        if not list(shop.orders.where("product", product["id"])):
            names.append(product["name"])
    return names


def orders_between(shop, first, last):
    """The ids of the orders from day `first` to day `last`, both included. Orders are sorted by day."""
    return [order["id"] for order in shop.orders.scan() if first <= order["day"] <= last]


def bought_together(shop):
    """Pairs of products (a < b) that the same customer ordered on the same day: (name, name, how often), most frequent first,
    then by name; only the first twenty. A pair counts once for each such customer and day."""
    pairs = {}
    seen = set()
    for one in shop.orders.scan():
        for two in shop.orders.where("customer", one["customer"]):
            if one["day"] == two["day"] and one["product"] < two["product"]:
                a = next(iter(shop.products.where("id", one["product"])))["name"]
                b = next(iter(shop.products.where("id", two["product"])))["name"]
                if (one["customer"], one["day"], a, b) not in seen:
                    seen.add((one["customer"], one["day"], a, b))
                    pairs[a, b] = pairs.get((a, b), 0) + 1
    return sorted(((a, b, n) for (a, b), n in pairs.items()), key=lambda p: (-p[2], p[0], p[1]))[:20]


def longest_gap(shop):
    """For every city the longest time in days without an order from there: (city, days, day on which it began), sorted by city.
    Of equal gaps the first one. Only gaps between two orders count; a city with fewer than two orders has none."""
    cities = sorted({customer["city"] for customer in shop.customers.scan()})
    answer = []
    for city in cities:
        days = []
        for order in shop.orders.scan():
            if shop.customers.get(order["customer"])["city"] == city:
                days.append(order["day"])
        gaps = [(later - earlier, earlier) for earlier, later in zip(days, days[1:], strict=False)]
        if gaps:
            length = max(gap for gap, _ in gaps)
            answer.append((city, length, next(start for gap, start in gaps if gap == length)))
    return answer
