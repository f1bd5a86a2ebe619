"""From a plan to the files that start it: for each site a compose file and the services' configurations.

Writes files only; nothing is started here.
"""
