"""The planner and the simulator next to what others published."""
