"""Dispatches the longest predicted first, each sample to the generator that finishes it first. Pure.

Source: Graham (1969), longest processing time first, within 4/3 of the best makespan on equal machines; the order that
StreamRL (Zhong et al. 2025), section 5.4, uses inside an instance. Differences: over the whole fleet of unequal
generators, and only among one step's groups, so that short prompts are never postponed for ever.
"""

from __future__ import annotations

from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.situation import Order


class LongestFirst(LeastLoaded):
    """See the module."""

    name = "lpt"
    order = Order.LENGTH
