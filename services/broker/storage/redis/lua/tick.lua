-- Advance a run's clock.
-- KEYS: run.  ARGV: longest time between two advances that counts, microseconds.
-- Returns {time, end of the last gap}, microseconds as strings; of a run that does not exist it keeps nothing.
local now, machine, lead, since = clock_now(KEYS[1], tonumber(ARGV[1]))
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'clock_at', string.format('%d', machine), 'clock_lead', string.format('%d', lead),
    'clock_since', string.format('%d', since))
end
return {string.format('%d', now), string.format('%d', since)}
