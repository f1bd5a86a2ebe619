"""Places a plan's services beside any solver's plan for the rest: scorers, a critic, reward workers.

Members of the portfolio each have a turn; on small problems every placement is bounded, and the best one is proved.
"""
