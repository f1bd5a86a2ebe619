"""The store in Redis: connection, keys, Lua scripts, loading and deletion of runs.

The only folder of the broker that accesses Redis. It decides no rule about samples or groups.
"""
