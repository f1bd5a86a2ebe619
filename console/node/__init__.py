"""`penstock node`: a machine that runs the generators which a scheduler's plan assigns to it.

Its configuration, its assignment by the plan, and the rates it reports. How processes start is in `console.launch`.
"""
