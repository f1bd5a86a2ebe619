-- What changed in a run since the mark of a copy.
-- KEYS: run, marks, changed, groups.  ARGV: revision and name of the copy's mark, longest time between two advances of
-- the clock that counts, microseconds; most bytes of records to return.
-- Returns false when there is no run, else {revision, name, record, is_lost, time of the run's clock, end of its last
-- gap, time up to which holders were heard, group id, record, group id, record, ...}; a record that is gone is the empty string. With `is_lost` there are no
-- records: the mark is not in this history, or too much has changed since.
local current = redis.call('HMGET', KEYS[1], 'revision', 'name', 'record')
if not current[1] then
  return false
end
local now, _, _, since = clock_now(KEYS[1], tonumber(ARGV[3]))
local reply = {current[1], current[2], '', 0, string.format('%d', now), string.format('%d', since),
  string.format('%d', clock_heard(clock_brokers(KEYS[1]), now))}
if ARGV[1] == current[1] and ARGV[2] == current[2] then
  return reply
end
reply[3] = current[3]
local known = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not known or tonumber(known) ~= tonumber(ARGV[1]) then
  reply[4] = 1
  return reply
end
local num_bytes = 0
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf')) do
  local record = redis.call('HGET', KEYS[4], name) or ''
  num_bytes = num_bytes + #record
  if num_bytes > tonumber(ARGV[4]) then
    return {reply[1], reply[2], reply[3], 1}
  end
  reply[#reply + 1] = name
  reply[#reply + 1] = record
end
return reply
