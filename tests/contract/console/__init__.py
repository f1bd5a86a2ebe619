"""Commands of the console against real or scripted services."""
