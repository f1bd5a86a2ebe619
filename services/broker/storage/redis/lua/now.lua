-- The time of the server that has a key.
-- KEYS: any.  Returns {seconds, microseconds}.
return redis.call('TIME')
