"""Plans, problems and their checks; solvers, cost models and lengths have their own folders."""
