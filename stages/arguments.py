"""What several programs take on their command lines, for argparse."""

import argparse
import urllib.parse


def parsed(kind, text, fits, expected):
    """`text` as a number of the `kind` int or float for which `fits` says yes; NaN fits nothing. Raises ArgumentTypeError."""
    try:
        value = kind(text)
        if not fits(value):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}") from None
    return value


def is_root(url):
    """Whether `url` is an address with a host and, if any, a port that there can be."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
