-- A run's clock; see run_clock.py. In front of the scripts that read it.
-- `clock_now` returns the clock's time, this machine's time, how far the clock is ahead of this machine's, and the end of
-- the last gap, each in microseconds; it writes nothing.
local function clock_now(key, max_gap)
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local known = redis.call('HMGET', key, 'clock_at', 'clock_lead', 'clock_since')
  if not known[1] then
    return now, now, 0, now
  end
  local passed, lead, since = now - tonumber(known[1]), tonumber(known[2]), tonumber(known[3])
  if passed < 0 then
    lead = lead - passed
  elseif passed > max_gap then
    lead = math.max(0, lead - passed)
    since = now + lead
  end
  return now + lead, now, lead, since
end

-- The brokers that serve the run: by name, its times at their last two advances, as text (JSON rounds numbers this large).
local function clock_brokers(key)
  return cjson.decode(redis.call('HGET', key, 'brokers') or '{}')
end

-- The time up to which all of them have heard their holders.
local function clock_heard(brokers, now)
  local heard = now
  for _, times in pairs(brokers) do
    heard = math.min(heard, tonumber(times[2]))
  end
  return heard
end
