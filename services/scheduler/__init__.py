"""The scheduler keeps an inventory of machines, plans their roles and forecasts output lengths; all of it is advice.

The root holds the process and the gRPC service. Imports run one way: problem <- cost_model <- solvers <- planning <-
replanning <- root; `lengths` is independent.
"""
