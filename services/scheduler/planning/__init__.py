"""A plan for a problem: choice of a solver, the plan's report, the market around it, and the first-fit plan.

From a problem or an inventory to a plan. Runs in progress are in `replanning`.
"""
