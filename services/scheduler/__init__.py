"""The scheduler: inventory of machines, plan of who does what, forecasts of output lengths. All of it is advice.

The root holds the process and the gRPC service. Imports run one way: problem <- cost_model <- solvers <- planning <-
replanning <- root; `lengths` stands by itself.
"""
