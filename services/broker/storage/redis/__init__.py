"""The store in Redis: connection, keys, Lua scripts, loading and deletion of runs.

The only folder of the broker that speaks to Redis. No rule about samples or groups is decided here.
"""
