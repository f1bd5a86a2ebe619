"""The scheduler: inventory of machines, plan of who does what, forecasts of output lengths. All of it is advice."""
