"""Plans a problem: chooses a solver, reports the plan and its market, and falls back to first fit.

From a problem or an inventory to a plan. Runs in progress are in `replanning`.
"""
