-- Advance a run's clock.
-- KEYS: run.  ARGV: longest time between two advances that counts, and that an ear is waited for, microseconds; the
--   caller's name as an ear (empty: it is none, or has read what it did not store), 1 if it leaves.
-- Returns {time, end of the last gap, time up to which holders were heard}, microseconds as strings; of a run that does
-- not exist it keeps nothing.
local max_gap, ear_life, name = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local now, machine, lead, since = clock_now(KEYS[1], max_gap)
local ears = clock_ears(KEYS[1])
for other, times in pairs(ears) do
  local silent = now - tonumber(times[1])
  if silent > max_gap then
    since = now
  end
  if silent > ear_life then
    ears[other] = nil
  end
end
if ARGV[4] == '1' then
  ears[name] = nil
elseif name ~= '' then
  local at = string.format('%d', now)
  ears[name] = {at, ears[name] and ears[name][1] or at}
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'clock_at', string.format('%d', machine), 'clock_lead', string.format('%d', lead),
    'clock_since', string.format('%d', since), 'ears', cjson.encode(ears))
end
return {string.format('%d', now), string.format('%d', since), string.format('%d', clock_heard(ears, now))}
