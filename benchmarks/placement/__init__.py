"""Measures what placing sessions by their prefix saves over placing each turn by load, on two real engines."""
