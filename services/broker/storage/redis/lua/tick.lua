-- Advance a run's clock.
-- KEYS: run.  ARGV: longest time between two advances that counts, and that a broker is waited for, microseconds; the
--   caller's name if it serves the run (empty: it does not, or has read what it did not store), 1 if it leaves,
--   how far one that is behind may be, microseconds (empty: it is not).
-- Returns {time, end of the last gap, time up to which holders were heard}, microseconds as strings; of a run that does
-- not exist it keeps nothing.
local max_gap, broker_life, name = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local now, machine, lead, since = clock_now(KEYS[1], max_gap)
local brokers = clock_brokers(KEYS[1])
for other, times in pairs(brokers) do
  local silent = now - tonumber(times[1])
  if silent > max_gap then
    since = now
  end
  if silent > broker_life then
    brokers[other] = nil
  end
end
if ARGV[4] == '1' then
  brokers[name] = nil
elseif name ~= '' then
  local at = string.format('%d', now)
  local last, before = unpack(brokers[name] or {at, at})
  if ARGV[5] ~= '' then
    last = string.format('%d', math.max(tonumber(before), now - tonumber(ARGV[5])))
  end
  brokers[name] = {at, last}
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'clock_at', string.format('%d', machine), 'clock_lead', string.format('%d', lead),
    'clock_since', string.format('%d', since), 'brokers', cjson.encode(brokers))
end
return {string.format('%d', now), string.format('%d', since), string.format('%d', clock_heard(brokers, now))}
