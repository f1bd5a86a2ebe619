"""Measures what a unit of work costs a broker at the size of a large fleet, and what fleets need by those costs."""
